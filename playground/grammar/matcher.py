"""Token masks of grammars: compiled once, then advanced token by token, with rollback.

llguidance parses; this module adds a state that can always be rolled back, forked and extended over a draft
tree. If a grammar allows only one continuation, the mask holds only the tokenizer's own token for it, although other
tokenisations of the same bytes are valid too: the mask is what a model may choose, `advance` is what the text may
contain.
"""
from __future__ import annotations

from copy import copy
from time import thread_time
from typing import Any, Protocol, Self

import numpy
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from playground.errors import Refusal
from playground.grammar import limits
from playground.grammar.client import ContentCache, Vocabulary, check_source, compiler, digest_of
from playground.grammar.forced_bytes import ALTERNATIVES, NO_FORCING, ForcedBytes
from playground.grammar.kinds import KINDS, parser_limits

LONGEST_RUN = 256  # forced tokens found at once: a grammar that never ends would force tokens for ever
ROOT = -1
TOO_COMPLEX = ("ParserTooComplex", "LexerTooComplex", "InternalError")  # reasons of llguidance to stop


class GrammarEngine:
    """Compiles grammars for one model. Building it walks the whole vocabulary (about 1 s for 150,000 tokens): keep it
    with the model.

    `vocabulary` is the width of the model's rows; `eos_ids` are the tokens that end a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, eos_ids: list[int]):
        self.vocabulary = vocabulary
        self.eos_ids = frozenset(id for id in eos_ids if id < vocabulary)
        self.end_index = sorted(self.eos_ids)
        self._known = Vocabulary(
            _description(tokenizer), max(vocabulary, len(tokenizer)), tuple(self.end_index) or _own_end(tokenizer)
        )
        self._digest = self._known.digest
        try:
            self.llguidance = LLTokenizer(
                self._known.description, n_vocab=self._known.width, eos_token=list(self._known.ends) or None
            )
        except ValueError as reason:
            raise _unfit(_in_words(tokenizer, str(reason))) from None
        self._cache = ContentCache(limits.GRAMMARS, limits.GRAMMARS_BYTES, lambda grammar: grammar.bytes)

    def compile(self, kind: str, source: str) -> Grammar:
        """A compiled grammar. `source` of a choice is its options with "|" between them; raises Refusal.

        It is compiled in the compiler process first, and here only if it stayed within all limits there.
        """
        if kind not in KINDS:
            raise Refusal(f"There is no grammar kind {kind!r}; choose one of {', '.join(KINDS)}.")
        check_source(kind, source)
        return self._cache.get(digest_of(kind, source), lambda: self._compile(kind, source))

    def _compile(self, kind: str, source: str) -> Grammar:
        answer = compiler().compile(kind, source, self._known, self._digest)
        matcher = LLMatcher(self.llguidance, answer["text"], log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise Refusal(f"The {KINDS[kind]} cannot be used: it is too complex to follow. Make it simpler.")
        return Grammar(self, kind, matcher, answer["bytes"], forces=NO_FORCING not in answer["text"])


def _description(tokenizer: PreTrainedTokenizerBase) -> str:
    """A tokenizer as JSON, with what was added to it, and without padding and truncation."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise _unfit("only fast tokenizers are supported")
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return backend.to_str()


def _own_end(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


def _in_words(tokenizer: Any, reason: str) -> str:
    """Why llguidance cannot read a tokenizer, without its notation."""
    if "decoder" not in reason:
        return " ".join(reason.split())[:200]
    decoder = tokenizer.backend_tokenizer.decoder
    return f"its tokens are joined by {type(decoder).__name__}, not as bytes" if decoder else "it has no decoder"


def _unfit(reason: str) -> Refusal:
    return Refusal(f"Grammars do not work with this model's tokenizer ({reason}): switch the constraint off.")


class Grammar:
    """A compiled grammar; every sequence has a separate matcher. `bytes` is its approximate size in
    memory. `forces` tells whether llguidance restricts the masks to the tokenizer's own token where only one
    continuation is possible; otherwise the matcher does.
    """

    def __init__(self, engine: GrammarEngine, kind: str, start: LLMatcher, bytes: int = 0, forces: bool = True):
        self.engine, self.kind, self.bytes, self.forces = engine, kind, bytes, forces
        self._start = start

    def matcher(self) -> Matcher:
        return Matcher(self)

    def looked_up(self, source: MaskSource) -> LookedUpMatcher:
        """A matcher whose masks come from a source."""
        return LookedUpMatcher(self, source)

    def fresh(self) -> LLMatcher:
        """llguidance's own matcher, at the start of the text."""
        return self._start.deep_copy()


class Matcher:
    """State of one text in its grammar. An end token is advanced over like any other and can be rolled back."""

    def __init__(self, grammar: Grammar):
        self._grammar, self._engine = grammar, grammar.engine
        self._parser = grammar.fresh()
        self._path: list[int] = []  # tokens advanced over, an end token included
        self._ended = False
        self._forced = ForcedBytes(self._engine.llguidance)  # unused where llguidance forces

    def mask(self) -> Tensor:
        """Tokens that may come next, bool [V]. All False after the end and in a dead end.

        Raises Refusal if the grammar has become too complex for the parser's limits.
        """
        mask = self._mask()
        self._check_followed()
        return mask

    def allows(self, token: int) -> bool:
        """Whether a token may come next, computed without the mask: any tokenisation of a valid text is allowed.

        Raises Refusal if the grammar has become too complex for the parser's limits.
        """
        allowed = self._may_end() if token in self._engine.eos_ids else self._may_follow(token)
        self._check_followed()
        return allowed

    def _check_followed(self) -> None:
        if not self._ended and self._parser.is_error() and self._parser.stop_reason() in TOO_COMPLEX:
            raise Refusal("The grammar has become too complex to follow at this point of the text: "
                          "make it simpler, with fewer alternatives and smaller repeats.", "constraint")

    def _mask(self) -> Tensor:
        return torch.zeros(self._engine.vocabulary, dtype=torch.bool) if self._ended else self.unpack(self.bitmask())

    def unpack(self, bitmask: bytes) -> Tensor:
        """A bitmask as a mask, bool [V], with the end tokens if the text may end."""
        bits = numpy.unpackbits(
            numpy.frombuffer(bitmask, numpy.uint8), count=self._engine.vocabulary, bitorder="little"
        )
        allowed = torch.from_numpy(bits.view(numpy.bool_))
        allowed[self._engine.end_index] = self.accepting
        return allowed

    def advance(self, token: int) -> bool:
        """Advance over one token; False, without a change, if it is not allowed."""
        ends = token in self._engine.eos_ids
        if not (self._may_end() if ends else self._may_follow(token)):
            return False
        if not ends and not self._parser.consume_token(token):  # allowed, but beyond the parser's limits
            self._replay()
            return False
        self._path.append(token)
        self._ended = ends
        self._forced = self._forced.after(token)
        return True

    def rollback(self, count: int) -> None:
        """Roll back the last `count` tokens; raises ValueError if there are fewer."""
        if not 0 <= count <= len(self._path):
            raise ValueError(f"cannot take back {count} of {len(self._path)} tokens")
        if count == 0:
            return
        fed = count - self._ended  # llguidance does not get the end token
        del self._path[-count:]
        self._ended = False
        self._forced = ForcedBytes(self._engine.llguidance)
        if self._parser.is_error():  # which is permanent
            self._replay()
        elif fed:
            self._parser.rollback(fed)

    def forced(self) -> list[int]:
        """The tokens without alternatives from here on, without the end token."""
        run: list[int] = []
        deadline = thread_time() + limits.FORCED_SECONDS
        while (
            len(run) < LONGEST_RUN
            and thread_time() < deadline
            and (token := self._only()) is not None
            and self.advance(token)
        ):
            run.append(token)
        self.rollback(len(run))
        return run

    def masks_of_tree(self, tokens: list[int], parents: list[int]) -> Tensor:
        """Masks after the text so far and after each node of a draft tree, bool [1 + N, V].

        Node i follows node parents[i], -1 being the text so far. Nodes after a disallowed token get a row of
        False. Raises Refusal where the grammar has become too complex, or its masks take longer than STEP_SECONDS.
        """
        masks = torch.zeros(1 + len(tokens), self._engine.vocabulary, dtype=torch.bool)
        children: list[list[int]] = [[] for _ in range(1 + len(tokens))]
        for node, parent in enumerate(parents):
            children[1 + parent].append(node)
        masks[0] = self.mask()
        self._visit(ROOT, tokens, children, masks, thread_time() + limits.STEP_SECONDS)
        return masks

    def fork(self) -> Self:
        """An independent matcher in the same state."""
        twin = copy(self)
        twin._parser, twin._path = self._parser.deep_copy(), self._path.copy()
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
        """Whether only the end can follow."""
        return self._ended or self._parser.is_stopped()

    @property
    def state(self) -> str:
        """The position of the text, in a few words."""
        if self.stopped:
            return (
                "ended" if self._ended else "complete" if self._may_end() else f"dead end: {self._parser.stop_reason()}"
            )
        if due := self._due():
            return f"must continue {due.decode('utf-8', 'replace')[:40]!r}"
        return "may end" if self.accepting else "open"

    def bitmask(self) -> bytes:
        """One bit a token, lowest bit first, end tokens as llguidance sees them; no bit set in a dead end."""
        bitmask = self._parser.compute_bitmask()
        if self._parser.is_error():
            return bytes(len(bitmask))
        if self._grammar.forces or not 1 < int.from_bytes(bitmask, "little").bit_count() <= ALTERNATIVES:
            return bitmask
        own = self._own_token()
        return bitmask if own is None else (1 << own).to_bytes(len(bitmask), "little")

    def _only(self) -> int | None:
        """The one token that may follow, if there is just one and the text cannot end."""
        if self.accepting:
            return None
        bits = int.from_bytes(self.bitmask(), "little")
        return bits.bit_length() - 1 if bits.bit_count() == 1 else None

    def _own_token(self) -> int | None:
        """The tokenizer's own token where only one continuation is possible; None elsewhere."""
        if self._grammar.forces:
            return next(iter(self._parser.compute_ff_tokens()), None)
        self._forced = self._forced.extended(self._parser)
        return self._forced.own_token(self._path)

    def _due(self) -> bytes:
        """The bytes that must come next, as far as they are known."""
        if self._grammar.forces:
            return self._parser.compute_ff_bytes()
        self._forced = self._forced.extended(self._parser)
        return self._forced.text

    def _may_end(self) -> bool:
        return not self._ended and not self._parser.is_error() and self._parser.is_accepting()

    def _may_follow(self, token: int) -> bool:
        return not self._ended and 0 <= token < self._engine.vocabulary and self._parser.validate_tokens([token]) == 1

    def _replay(self) -> None:
        self._parser = self._grammar.fresh()
        self._parser.consume_tokens(self._path)

    def _visit(self, node: int, tokens: list[int], children: list[list[int]], masks: Tensor, deadline: float) -> None:
        """Fill in the masks below a node that the parser has reached."""
        for child in children[1 + node]:
            if thread_time() > deadline:
                raise Refusal(
                    f"The masks of this grammar take more than {limits.STEP_SECONDS} s for one step: make it simpler.",
                    "constraint",
                )
            if self.advance(tokens[child]):
                masks[1 + child] = self._mask()
                self._visit(child, tokens, children, masks, deadline)
                self.rollback(1)


class MaskSource(Protocol):
    """Computes masks in place of the engine, which confirms. A place is the source's own state after some tokens."""

    def start(self) -> Any:
        """The place of the empty text."""

    def after(self, place: Any, token: int) -> Any:
        """The place after one more token."""

    def allowed(self, place: Any, engine: LookedUpMatcher) -> Tensor:
        """Tokens that may come next, bool [V]; `engine` is in the same place."""

    def given(self, place: Any, engine: LookedUpMatcher) -> Tensor:
        """`allowed`, for a row that tokens are chosen from."""


class LookedUpMatcher(Matcher):
    """A matcher whose masks come from a source; the engine is asked what the source asks it, and about every token
    that is committed.
    """

    def __init__(self, grammar: Grammar, source: MaskSource):
        super().__init__(grammar)
        self.source, self._places = source, [source.start()]

    @property
    def place(self) -> Any:
        return self._places[-1]

    def advance(self, token: int) -> bool:
        if not super().advance(token):
            return False
        self._places.append(self.source.after(self.place, token))
        return True

    def rollback(self, count: int) -> None:
        super().rollback(count)
        del self._places[len(self._places) - count:]

    def fork(self) -> Self:
        twin = super().fork()
        twin._places = self._places.copy()
        return twin

    def allows(self, token: int) -> bool:
        return super().allows(token) and not self._ended and bool(self.source.allowed(self.place, self)[token])

    def _mask(self) -> Tensor:
        return super()._mask() if self._ended else self.source.given(self.place, self)

    def _only(self) -> int | None:
        if self.accepting:
            return None
        allowed = self.source.allowed(self.place, self)
        return int(allowed.nonzero()) if int(allowed.sum()) == 1 else None

    # --- what a source asks the engine ---

    def exact_mask(self) -> Tensor:
        """The engine's own mask, bool [V]."""
        return super()._mask()

    def confirms(self, token: int) -> bool:
        """Whether the engine allows a token that is no end."""
        return self._may_follow(token)

    def only_token(self) -> int | None:
        """The token that the engine's mask is restricted to where only one continuation is possible."""
        return self._own_token()

    @property
    def vocabulary(self) -> int:
        return self._engine.vocabulary

    @property
    def end_index(self) -> list[int]:
        return self._engine.end_index
