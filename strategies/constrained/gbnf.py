"""A grammar as llama.cpp writes it, as constraint."""
from playground.contract import Constraint, knob

EXAMPLE = 'root ::= animal (" and " animal)*\nanimal ::= "a " [a-z]{3,6}'


class Gbnf(Constraint):
    """Only tokens that keep the text a prefix of a sentence of a GBNF grammar, llama.cpp's format, are allowed.

    `root` is the start rule. As in llama.cpp there is no lexer: a text belongs to the grammar if its characters do, so
    `[a-z]+ "end"` accepts "weekend". Parts that a lexer would read equally are terminals of the parser; the others are
    parsed character by character, which is slower with a large vocabulary. Single tokens by name, <think>, are refused.
    Willard and Louf 2023, arXiv 2307.09702; engine: llguidance.
    """

    name, title, paper, sheet = "gbnf", "GBNF grammar", "2307.09702", "constrained/grammar-engines"
    guarantee = ("constraint_sound",)

    source: str = knob(EXAMPLE, multiline=True, file=True, help="the grammar; its start rule is called root")

    def grammar(self):
        return "gbnf", self.source
