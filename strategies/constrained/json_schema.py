"""JSON Schema as constraint."""
import json

from playground.contract import Constraint, knob
from playground.grammar.limits import check_text
from playground.grammar.schema.source import read_schema
from playground.grammar.schema.subset import FIXED_WHITESPACE

EXAMPLE = (
    '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name",'
    ' "age"]}'
)


class JsonSchema(Constraint):
    """Only tokens that keep the text a prefix of JSON valid under a schema are allowed.

    Before each token a parser computes all tokens with which some valid document could continue; the others get
    probability zero. A single allowed token is written without running the model. Schemas with keywords that cannot
    be enforced are refused. A schema is also found inside of a response format or a tool, and a name that is no
    keyword is remarked on. Named keys are written in the order of the schema, before all others, which begin with
    no named one. In a pattern, \\d and \\w are ASCII and \\s is Unicode, as in JavaScript. A date is one of the
    calendar, leap years included; leap seconds are 23:59:60 at offset 0; host names have no "xn--" labels. Engine:
    llguidance; see JSONSchemaBench, Geng et al. 2025, arXiv 2501.10868.
    """

    name, title, paper, sheet = "json_schema", "JSON Schema", "2501.10868", "constrained/grammar-engines"
    guarantee = ("constraint_sound",)

    source: str = knob(EXAMPLE, multiline=True, file=True, json_text=True, help="the schema, as JSON")
    whitespace: str = knob(
        "fixed",
        choices=("fixed", "free"),
        help="fixed: one space after a comma or colon; free: anywhere JSON allows it",
    )

    def grammar(self):
        check_text("JSON Schema", self.source)
        schema = read_schema(self.source).schema
        if self.whitespace == "fixed" and isinstance(schema, dict):
            schema = {"x-guidance": FIXED_WHITESPACE, **schema}
        return "json_schema", json.dumps(schema)

    def remarks(self):
        return read_schema(self.source).remarks
