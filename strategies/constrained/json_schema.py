"""JSON Schema as constraint."""
from playground.strategy import Constraint, knob

EXAMPLE = '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}'


class JsonSchema(Constraint):
    """Only tokens that keep the text on the way to JSON valid under a schema may be chosen.

    A parser follows the text and names, before each token, all tokens some valid document could go on with; the others
    get probability zero. Where only one is left it is written without asking the model. Schemas with keywords that
    cannot be enforced are refused. Engine: llguidance; see JSONSchemaBench, Geng et al. 2025, arXiv 2501.10868.
    """

    name, title, paper, sheet = "json_schema", "JSON Schema", "2501.10868", "constrained/grammar-engines"
    guarantee = ("constraint_sound",)

    source: str = knob(EXAMPLE, multiline=True, file=True, help="the schema, as JSON")

    def grammar(self):
        return "json_schema", self.source
