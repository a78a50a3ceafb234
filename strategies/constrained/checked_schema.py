"""JSON Schema as constraint, with the parts that no mask enforces checked beside it."""
import json
from collections import Counter
from collections.abc import Callable
from time import thread_time
from typing import ClassVar

import torch
from torch import Tensor

from playground.algorithms.constrained.completions import Completions
from playground.algorithms.constrained.partial_json import inside_string, read_partial
from playground.algorithms.constrained.schema_verdict import SchemaJudge, needs_judging, relaxed, words_of
from playground.contract import Constraint, knob
from playground.errors import Refusal
from playground.grammar.byte_matcher import ByteMatcher
from playground.grammar.limits import STEP_SECONDS, check_text
from playground.grammar.schema.source import read_schema
from playground.grammar.schema.subset import FIXED_WHITESPACE, check_size

EXAMPLE = json.dumps({
    "type": "object",
    "properties": {
        "pets": {"type": "array", "items": {"enum": ["cat", "dog", "fox"]}, "uniqueItems": True, "minItems": 2},
        "name": {"type": "string", "maxLength": 12},
    },
    "required": ["pets"],
    "additionalProperties": False,
    "if": {"properties": {"pets": {"maxItems": 2}}},
    "then": {"required": ["name"]},
})
ENDING = frozenset(b'"]},el')  # bytes that complete a value, or end a number before them
QUOTE = frozenset(b'"')
LISTED, FEW = 64, 8  # bytes that may follow before and after a token of one of a list of values
STATES_BEFORE = 1000  # of the search before a run


class CheckedSchema(Constraint):
    """JSON valid under a schema that may use `not`, `if`, `then`, `else`, `uniqueItems`, `contains`,
    `dependentRequired`, `dependentSchemas`, `propertyNames` and any `oneOf`.

    The engine enforces the schema without those. What they say is decided on the text itself: a token after which no
    continuation can satisfy them is removed, and a document that breaks them is never completed. For a token that ends
    a value, or is part of one that the schema lists, a bounded search looks for a complete document that goes on from
    it. Where the only way out is further ahead than it looks, a text can come to a point where no token is left; then
    the run ends with a message that names the keyword. Keywords inside those parts that cannot be decided, such as
    `pattern` and `format`, are refused, and the document has to be an object or an array. Numbers are compared in
    double precision, white space is fixed. The search takes time with a large vocabulary. Without such parts this is
    `json_schema`.
    Engine: llguidance; see JSONSchemaBench, Geng et al. 2025, arXiv 2501.10868.
    """

    name, title, paper, sheet = "checked_schema", "JSON Schema, checked", "2501.10868", "constrained/grammar-engines"
    guarantee = ("constraint_sound",)
    narrows_forced = True

    source: str = knob(EXAMPLE, multiline=True, file=True, json_text=True, help="the schema, as JSON")

    begins: ClassVar[int]  # these come with the lane
    spelling: ClassVar[Callable[[int], bytes]]
    judge: ClassVar[SchemaJudge]
    ahead: ClassVar[Completions | None] = None

    def grammar(self):
        schema = self._schema()
        SchemaJudge(schema).check()
        return "json_schema", json.dumps({**relaxed(schema), "x-guidance": FIXED_WHITESPACE})

    def _schema(self) -> dict:
        check_text("JSON Schema", self.source)
        schema = read_schema(self.source).schema
        if not isinstance(schema, dict) or schema.get("type") not in ("object", "array"):
            raise Refusal(
                'The checks need a document that ends with a bracket: let the schema have "type": "object" or "array".',
                "source",
            )
        check_size(schema)
        return schema

    def remarks(self):
        return read_schema(self.source).remarks

    def check_source(self):
        self._look_ahead()

    def begin(self, start, spelling):
        self.begins, self.spelling, self.ahead = start, spelling, self._look_ahead()

    def _look_ahead(self) -> Completions | None:
        """The search for complete texts; None if the mask enforces everything. Raises Refusal if there is no text."""
        schema = self._schema()
        self.judge = SchemaJudge(schema)
        kind, source = self.grammar()
        if not needs_judging(schema):
            return None
        words = [word.encode() for word in words_of(schema)]
        found = Completions(ByteMatcher.compiled(kind, source), self._verdict, words)
        if not found.possible(b"", STATES_BEFORE):
            raise Refusal(
                "The JSON Schema cannot be used: no document satisfies it, since its parts contradict each other."
                f"{self._because(found)} Change one of them.",
                "source",
            )
        return found

    def narrow(self, masks, histories):
        deadline = thread_time() + STEP_SECONDS
        return torch.stack([self._narrowed(mask, history, deadline) for mask, history in zip(masks, histories)])

    def _narrowed(self, mask: Tensor, history: list[int], deadline: float) -> Tensor:
        text, kept = self._text(history), mask.clone()
        if self.ahead is None:
            return kept
        ending, few = self._ending(text), self._is_listed(text)
        for token in mask.nonzero()[:, 0].tolist():
            if thread_time() > deadline:
                raise Refusal(
                    f"The checks of this schema take more than {STEP_SECONDS} s for one step: make it simpler.",
                    "constraint",
                )
            kept[token] = self._passes(text, self.spelling(token), ending, few)
        return kept

    def permits(self, history, token, vocabulary):
        text = self._text(history)
        return self.ahead is None or self._passes(text, self.spelling(token), self._ending(text), self._is_listed(text))

    def dead_end(self, history):
        if self.ahead is None:
            return ""
        self.ahead.possible(self._text(history))
        return self._because(self.ahead)

    def _ending(self, text: bytes) -> frozenset[int]:
        return QUOTE if inside_string(text.decode("utf-8", "replace")) else ENDING

    def _is_listed(self, text: bytes) -> bool:
        """Whether few bytes may follow, so that what comes may be one of a list of values."""
        self.ahead.move(text)
        matcher = self.ahead.at(text)
        return matcher is not None and len(matcher.following()) <= LISTED

    def _passes(self, text: bytes, added: bytes, ending: frozenset[int], listed: bool) -> bool:
        """Whether some continuation of a text and a token may still satisfy what the mask does not enforce."""
        if ending.isdisjoint(added) and not (listed and added and self._is_listed_after(text + added)):
            return True
        return self._verdict(text + added) is not False and self.ahead.possible(text + added)

    def _is_listed_after(self, text: bytes) -> bool:
        matcher = self.ahead.at(text)
        return matcher is not None and len(matcher.following()) <= FEW

    def _verdict(self, text: bytes) -> bool | None:
        return self.judge.judge(read_partial(text.decode("utf-8", "replace")))

    def _because(self, search: Completions) -> str:
        """The keywords that all that a search has seen breaks, in a sentence; empty if none is found."""
        beginnings = [read_partial(text.decode("utf-8", "replace")) for text in search.rejected]
        broken = Counter(filter(None, map(self.judge.broken, beginnings)))
        return f" Whatever follows breaks {' or '.join(key for key, _ in broken.most_common(3))}." if broken else ""

    def _text(self, history: list[int]) -> bytes:
        return b"".join(map(self.spelling, history[self.begins:]))
