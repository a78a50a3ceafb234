"""JSON Schema as constraint, with the parts that no mask enforces checked beside it."""
import json
from collections.abc import Callable
from time import thread_time
from typing import ClassVar

import torch
from torch import Tensor

from playground.algorithms.constrained.partial_json import inside_string, read_partial
from playground.algorithms.constrained.schema_verdict import SchemaJudge, relaxed
from playground.contract import Constraint, knob
from playground.engine.grammar_limits import STEP_SECONDS, check_text
from playground.engine.schema_source import read_schema
from playground.engine.schema_subset import FIXED_WHITESPACE, check_size
from playground.errors import Refusal

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


class CheckedSchema(Constraint):
    """JSON valid under a schema that may use `not`, `if`, `then`, `else`, `uniqueItems` and any `oneOf`.

    The engine enforces the schema without those. What they say is decided on the text itself: a token after which no
    continuation can satisfy them is removed, and a document that breaks them is never completed. A string or number is
    decided when it ends, so a text can come to a point where no token is left; then the run ends with a message.
    Keywords inside those parts that cannot be decided, such as `pattern` and `format`, are refused, and the document
    has to be an object or an array. Numbers are compared in double precision, white space is fixed. Every token that
    ends a value is checked, which takes time with a large vocabulary. Without such parts this is `json_schema`.
    Engine: llguidance; see JSONSchemaBench, Geng et al. 2025, arXiv 2501.10868.
    """

    name, title, paper, sheet = "checked_schema", "JSON Schema, checked", "2501.10868", "constrained/grammar-engines"
    guarantee = ("constraint_sound",)
    narrows_forced = True

    source: str = knob(EXAMPLE, multiline=True, file=True, json_text=True, help="the schema, as JSON")

    begins: ClassVar[int]  # these come with the lane
    spelling: ClassVar[Callable[[int], bytes]]
    judge: ClassVar[SchemaJudge]

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

    def begin(self, start, spelling):
        self.begins, self.spelling, self.judge = start, spelling, SchemaJudge(self._schema())

    def narrow(self, masks, histories):
        deadline = thread_time() + STEP_SECONDS
        return torch.stack([self._narrowed(mask, history, deadline) for mask, history in zip(masks, histories)])

    def _narrowed(self, mask: Tensor, history: list[int], deadline: float) -> Tensor:
        text, kept = self._text(history), mask.clone()
        ending = QUOTE if inside_string(text.decode("utf-8", "replace")) else ENDING
        for token in mask.nonzero()[:, 0].tolist():
            if thread_time() > deadline:
                raise Refusal(
                    f"The checks of this schema take more than {STEP_SECONDS} s for one step: make it simpler.",
                    "constraint",
                )
            kept[token] = ending.isdisjoint(self.spelling(token)) or self._passes(text + self.spelling(token))
        return kept

    def permits(self, history, token, vocabulary):
        return self._passes(self._text([*history, token]))

    def _passes(self, text: bytes) -> bool:
        """Whether some continuation of a text may still satisfy what the mask does not enforce."""
        return self.judge.judge(read_partial(text.decode("utf-8", "replace"))) is not False

    def _text(self, history: list[int]) -> bytes:
        return b"".join(map(self.spelling, history[self.begins:]))
