"""A list of choices as constraint."""
from playground.contract import Constraint, knob


class Choice(Constraint):
    """The text has to be exactly one of the given options.

    Tokens that leave every option are masked; once a single option is left, its rest is written without running the
    model. Spaces at the ends of an option belong to it. A baseline for classification; engine: llguidance.
    """

    name, title, paper, sheet = "choice", "Choice list", "baseline", "constrained/grammar-engines"
    guarantee = ("constraint_sound",)

    options: str = knob("yes|no", help="the options, separated by | alone: spaces around it belong to the options")

    def grammar(self):
        return "choice", self.options
