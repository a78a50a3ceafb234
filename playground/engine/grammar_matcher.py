"""What a grammar allows next: compiled once, then followed token by token, forwards and back.

llguidance parses; this module gives it one notion of state that can always be rolled back, forked and laid over a draft
tree. Where a grammar leaves only one spelling, the mask holds only the tokenizer's own token for it, although other
splits of the same bytes may be followed too: the mask is what a model may choose, `advance` is what the text may
contain.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from playground.engine.gbnf_to_lark import lark_of
from playground.engine.schema_subset import enforceable
from playground.errors import Refusal

KINDS = {
    "json_schema": "JSON Schema",
    "regex": "regex",
    "lark": "Lark grammar",
    "gbnf": "GBNF grammar",
    "choice": "list of choices",
}
KEPT = 64  # compiled grammars an engine remembers
LONGEST_RUN = 256  # forced tokens found at once: a grammar that never ends would force tokens for ever
ROOT = -1
SURROGATE = re.compile("[\ud800-\udfff]")  # llguidance takes UTF-8, which has none


class GrammarEngine:
    """Compiles grammars for one model. Building it walks the whole vocabulary (about 1 s for 150,000 tokens): keep it
    with the model.

    `vocabulary` is the width of the model's rows; `eos_ids` are the tokens that end a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, eos_ids: list[int]):
        self.vocabulary = vocabulary
        self.eos_ids = frozenset(id for id in eos_ids if id < vocabulary)
        self.end_index = sorted(self.eos_ids)
        try:
            self.llguidance = from_tokenizer(tokenizer, max(vocabulary, len(tokenizer)), self.end_index or None)
        except ValueError as reason:
            raise Refusal(
                f"Grammars do not work with this model's tokenizer ({reason}): switch the constraint off."
            ) from None
        self.compile = lru_cache(KEPT)(self._compile)

    def _compile(self, kind: str, source: str) -> Grammar:
        """A grammar ready to be followed. `source` of a choice is its options with "|" between them; raises Refusal."""
        if kind not in KINDS:
            raise Refusal(f"There is no grammar kind {kind!r}; choose one of {', '.join(KINDS)}.")
        if not source.strip():
            raise Refusal(f"The {KINDS[kind]} is empty: write one, or switch the constraint off.")
        if SURROGATE.search(source):
            raise _refusal(kind, "it has half of a character (a lone surrogate)")
        text = _READERS[kind](source)
        with _panics_refused(kind):
            failed, messages = LLMatcher.validate_grammar_with_warnings(text, self.llguidance)
            if failed:
                raise _refusal(kind, messages[0])
            grammar = Grammar(self, kind, LLMatcher(self.llguidance, text, log_level=0))
        start = grammar.matcher()
        if not any(start.fork().advance(int(token)) for token in start.mask().nonzero()):
            raise _refusal(kind, "no finite text satisfies it")
        return grammar


class Grammar:
    """A compiled grammar; every sequence that follows it takes a matcher of its own."""

    def __init__(self, engine: GrammarEngine, kind: str, start: LLMatcher):
        self.engine, self.kind = engine, kind
        self._start = start

    def matcher(self) -> Matcher:
        return Matcher(self)

    def fresh(self) -> LLMatcher:
        """llguidance's own matcher, at the start of the text."""
        return self._start.deep_copy()


class Matcher:
    """Where one text stands in its grammar. An end token is followed like any other and can be rolled back."""

    def __init__(self, grammar: Grammar):
        self._grammar, self._engine = grammar, grammar.engine
        self._parser = grammar.fresh()
        self._path: list[int] = []  # tokens advanced over, an end token included
        self._ended = False

    def mask(self) -> Tensor:
        """Tokens that may come next, bool [V]. All False after the end and where the grammar has become a dead end."""
        return torch.zeros(self._engine.vocabulary, dtype=torch.bool) if self._ended else self.unpack(self.bitmask())

    def unpack(self, bitmask: bytes) -> Tensor:
        """The bitmask of this place as a mask, bool [V], with the end tokens where the text may end."""
        bits = numpy.unpackbits(
            numpy.frombuffer(bitmask, numpy.uint8), count=self._engine.vocabulary, bitorder="little"
        )
        allowed = torch.from_numpy(bits.view(numpy.bool_))
        allowed[self._engine.end_index] = self.accepting
        return allowed

    def advance(self, token: int) -> bool:
        """Follow one token; False, and nothing has changed, where it is illegal."""
        ends = token in self._engine.eos_ids
        if not (self._may_end() if ends else self._may_follow(token)):
            return False
        if not ends and not self._parser.consume_token(token):  # legal, but past what the parser can keep in mind
            self._replay()
            return False
        self._path.append(token)
        self._ended = ends
        return True

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens; ValueError where there are fewer."""
        if not 0 <= count <= len(self._path):
            raise ValueError(f"cannot take back {count} of {len(self._path)} tokens")
        if count == 0:
            return
        fed = count - self._ended  # llguidance is never told of the end
        del self._path[-count:]
        self._ended = False
        if self._parser.is_error():  # which is permanent
            self._replay()
        elif fed:
            self._parser.rollback(fed)

    def forced(self) -> list[int]:
        """The run of tokens that have no alternative from here on; the end is not among them."""
        run: list[int] = []
        while len(run) < LONGEST_RUN and (token := self._only()) is not None and self.advance(token):
            run.append(token)
        self.rollback(len(run))
        return run

    def masks_of_tree(self, tokens: list[int], parents: list[int]) -> Tensor:
        """Masks after the text so far and after each node of a draft tree, bool [1 + N, V].

        Node i follows node parents[i], -1 being the text so far. Nodes that an illegal token leads to get a row of
        False.
        """
        masks = torch.zeros(1 + len(tokens), self._engine.vocabulary, dtype=torch.bool)
        children: list[list[int]] = [[] for _ in range(1 + len(tokens))]
        for node, parent in enumerate(parents):
            children[1 + parent].append(node)
        self._visit(ROOT, tokens, children, masks)
        return masks

    def fork(self) -> Matcher:
        """A matcher at the same place that goes its own way."""
        twin = Matcher(self._grammar)
        twin._parser = self._parser.deep_copy()
        twin._path, twin._ended = self._path.copy(), self._ended
        return twin

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self._engine.eos_ids

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        return self._ended or self._may_end()

    @property
    def stopped(self) -> bool:
        """Whether nothing but the end can follow."""
        return self._ended or self._parser.is_stopped()

    @property
    def state(self) -> str:
        """Where the text stands, in a few words."""
        if self.stopped:
            return (
                "ended" if self._ended else "complete" if self._may_end() else f"dead end: {self._parser.stop_reason()}"
            )
        if due := self._parser.compute_ff_bytes():
            return f"must continue {due.decode('utf-8', 'replace')[:40]!r}"
        return "may end" if self.accepting else "open"

    def bitmask(self) -> bytes:
        """One bit a token, lowest bit first, end tokens as llguidance sees them; no bit set in a dead end."""
        bitmask = self._parser.compute_bitmask()
        return bytes(len(bitmask)) if self._parser.is_error() else bitmask

    def _only(self) -> int | None:
        """The one token that may follow, if there is just one and the text cannot end."""
        if self.accepting:
            return None
        bits = int.from_bytes(self.bitmask(), "little")
        return bits.bit_length() - 1 if bits.bit_count() == 1 else None

    def _may_end(self) -> bool:
        return not self._ended and not self._parser.is_error() and self._parser.is_accepting()

    def _may_follow(self, token: int) -> bool:
        return not self._ended and 0 <= token < self._engine.vocabulary and self._parser.validate_tokens([token]) == 1

    def _replay(self) -> None:
        self._parser = self._grammar.fresh()
        self._parser.consume_tokens(self._path)

    def _visit(self, node: int, tokens: list[int], children: list[list[int]], masks: Tensor) -> None:
        masks[1 + node] = self.mask()
        for child in children[1 + node]:
            if self.advance(tokens[child]):
                self._visit(child, tokens, children, masks)
                self.rollback(1)


@contextmanager
def _panics_refused(kind: str) -> Iterator[None]:
    """A panic within llguidance, such as one over the message it was about to give, is no Exception: no handler of a
    request would catch it.
    """
    try:
        yield
    except BaseException as panic:
        if type(panic).__name__ != "PanicException":  # which pyo3 does not export
            raise
        raise _refusal(kind, "the grammar engine cannot read it") from None


def _read_schema(source: str) -> str:
    try:
        schema = json.loads(source)
    except RecursionError:
        raise Refusal("The JSON Schema is nested too deeply: flatten it.") from None
    except ValueError as reason:
        raise Refusal(f"The JSON Schema is not valid JSON: {reason}.") from None
    if not isinstance(schema, (dict, bool)):
        raise Refusal(f"A JSON Schema is an object in braces, not {source.strip()[:40]}.")
    try:
        sound = enforceable(schema)
    except RecursionError:
        raise Refusal("The JSON Schema is nested too deeply: flatten it.") from None
    return LLMatcher.grammar_from_json_schema(source if sound == schema else json.dumps(sound))


def _read_gbnf(source: str) -> str:
    return LLMatcher.grammar_from_lark(lark_of(source))


def _read_choice(source: str) -> str:
    options = [option.strip() for option in source.split("|")]
    if not all(options):
        raise Refusal(
            'An option of the list of choices is empty: write them with one "|" between each two, as in "yes | no".'
        )
    return LLMatcher.grammar_from_lark(
        "start: " + " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
    )


_READERS = {
    "json_schema": _read_schema,
    "regex": LLMatcher.grammar_from_regex,
    "lark": LLMatcher.grammar_from_lark,
    "gbnf": _read_gbnf,
    "choice": _read_choice,
}


def _refusal(kind: str, message: str) -> Refusal:
    """llguidance's message in one sentence, without the lines that quote the source."""
    first, *rest = message.strip().splitlines()
    if kind in ("regex", "gbnf"):
        first = re.sub(r"^at \d+\(\d+\): ", "", first)  # a place in a Lark grammar made of it, which nobody wrote
    causes = [line.removeprefix("error: ") for line in rest if line.startswith("error: ")]
    reason = " ".join([first, *causes]).rstrip(".:")
    return Refusal(f"The {KINDS[kind]} cannot be used: {reason}. Change or remove that part.")
