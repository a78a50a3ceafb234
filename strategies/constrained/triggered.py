"""A constraint that applies after a trigger string."""
from playground.contract import Constraint, knob
from playground.grammar.schema.source import read_schema
from playground.grammar.triggered_grammar import TriggeredSource


class Triggered(Constraint):
    """The model writes freely until a trigger string; what follows has to satisfy a constraint.

    The constraint begins right after the first place where the trigger is complete, even inside a token. With an end
    string it ends at the first place where its text is complete and the end string follows; then the text is free
    again, and the trigger acts each time. As llama.cpp's lazy grammars and the structural tags of vLLM. The trigger is
    compared as text, so a special token cannot be one. JSON is written with fixed white space; a Lark terminal
    matches greedily, and one that goes on with the end string never stops before it. Related: Banerjee et al. 2025,
    arXiv 2502.09061; engine: llguidance.
    """

    name, title, paper, sheet = "triggered", "Triggered grammar", "2502.09061", "constrained/grammar-engines"
    guarantee = ("constraint_sound",)

    source: str = knob("[0-9]{1,3}", multiline=True, file=True, help="the constraint after the trigger")
    format: str = knob(
        "regex",
        choices=("regex", "json_schema", "lark", "gbnf", "choice"),
        help="what the constraint is: a pattern, a JSON Schema, a grammar, or options separated by |",
    )
    trigger: str = knob("#### ", help="the string after which the constraint applies")
    end: str = knob("", help="the string after which the text is free again; without one nothing follows")
    must: bool = knob(False, help="whether the text may end only after the trigger came")
    most: int = knob(
        0, 0, 2000, step=1, help="characters of each free part at most; then the trigger has to follow; 0: any number"
    )

    def check_target(self, model):
        model.tokens.check_is_text(self.trigger, "trigger")
        model.tokens.check_is_text(self.end, "end")

    def remarks(self):
        return read_schema(self.source).remarks if self.format == "json_schema" else []

    def grammar(self):
        parts = TriggeredSource(self.format, self.source, self.trigger, self.end, self.must, self.most)
        return "triggered", parts.packed()
