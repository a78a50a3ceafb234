"""A grammar as llama.cpp writes it, as constraint."""
from playground.contract import Constraint, knob

EXAMPLE = 'root ::= animal (" and " animal)*\nanimal ::= "a " [a-z]{3,6}'


class Gbnf(Constraint):
    """Only tokens that keep the text a beginning of a sentence of a GBNF grammar, llama.cpp's own form, may be chosen.

    `root` is the rule a text begins with. The grammar is turned into a Lark grammar by llguidance's converter, and
    rules that do not lead back to themselves become words of a lexer, which reads each as far as it goes: after a rule
    for letters the text "end" is more letters, never the keyword, so sentences may be missing that llama.cpp would
    find, and none is added. Single tokens by name, <think>, are refused. Willard and Louf 2023, arXiv 2307.09702;
    engine: llguidance.
    """

    name, title, paper, sheet = "gbnf", "GBNF grammar", "2307.09702", "constrained/grammar-engines"
    guarantee = ("constraint_sound",)

    source: str = knob(EXAMPLE, multiline=True, file=True, help="the grammar; a text begins with its rule root")

    def grammar(self):
        return "gbnf", self.source
