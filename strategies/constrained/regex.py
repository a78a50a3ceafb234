"""A regular expression as constraint."""
from playground.contract import Constraint, knob


class Regex(Constraint):
    """Only tokens that keep the text a prefix of a match of the pattern are allowed.

    The whole text has to match. \\d, \\w and \\s are those of Unicode, "." is everything but a line break. Look-around
    and back-references are refused. Willard and Louf 2023, arXiv 2307.09702; engine: llguidance.
    """

    name, title, paper, sheet = "regex", "Regular expression", "2307.09702", "constrained/grammar-engines"
    guarantee = ("constraint_sound",)

    pattern: str = knob(
        "[0-9]{1,3}", help="the pattern; \\d, \\w and \\s are those of Unicode: write [0-9] for ASCII digits alone"
    )

    def grammar(self):
        return "regex", self.pattern
