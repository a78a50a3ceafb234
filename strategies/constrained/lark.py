"""A context-free grammar as constraint."""
from playground.algorithms.constrained.bundled_grammars import NAMES, ready_grammar
from playground.contract import Constraint, knob

EXAMPLE = 'start: sum\nsum: NUMBER (" + " NUMBER)*\nNUMBER: /[0-9]{1,3}/'
OWN = "own"


class Lark(Constraint):
    """Only tokens that keep the text a beginning of a sentence of the grammar may be chosen.

    Rules are written in the Lark dialect: `start` is the first rule, names in capitals are terminals. An Earley parser
    over the tokens' bytes names the legal ones. Each terminal is read as far as it goes, and a grammar of which no text
    can be completed that way is refused; \\d, \\w and \\s are those of Unicode. Some grammars are bundled: sums,
    days, JSON, a part of Python, SELECT of SQL. Engine: llguidance; compare SynCode, Ugare et al. 2024, arXiv
    2403.01632.
    """

    name, title, paper, sheet = "lark", "Lark grammar", "2403.01632", "constrained/grammar-engines"
    guarantee = ("constraint_sound",)

    ready: str = knob(OWN, choices=(OWN, *NAMES), help="a grammar that comes along, in place of your own")
    source: str = knob(EXAMPLE, multiline=True, file=True, help="your own grammar; its first rule is called start")

    def grammar(self):
        return "lark", self.source if self.ready == OWN else ready_grammar(self.ready)
