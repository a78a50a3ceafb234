"""A context-free grammar as constraint."""
from playground.algorithms.constrained.bundled_grammars import NAMES, ready_grammar
from playground.contract import Constraint, knob

EXAMPLE = 'start: sum\nsum: NUMBER (" + " NUMBER)*\nNUMBER: /[0-9]{1,3}/'
OWN = "own"


class Lark(Constraint):
    """Only tokens that keep the text a prefix of a sentence of the grammar are allowed.

    Rules are written in the Lark dialect: `start` is the start rule, names in capitals are terminals. An Earley parser
    over the tokens' bytes computes the allowed ones. Terminals match greedily, and a grammar of which no text can be
    completed that way, or with a branch that no text leaves, is refused; \\d, \\w and \\s are those of Unicode.
    Some grammars are bundled: sums, days, JSON, a part of Python, SELECT of SQL. Engine: llguidance; compare SynCode,
    Ugare et al. 2024, arXiv 2403.01632.
    """

    name, title, paper, sheet = "lark", "Lark grammar", "2403.01632", "constrained/grammar-engines"
    guarantee = ("constraint_sound",)

    ready: str = knob(OWN, choices=(OWN, *NAMES), help="a bundled grammar, in place of your own")
    source: str = knob(EXAMPLE, multiline=True, file=True, help="your own grammar; its start rule is called start")

    def grammar(self):
        return "lark", self.source if self.ready == OWN else ready_grammar(self.ready)
