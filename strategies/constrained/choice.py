"""A list of choices as constraint."""
from playground.contract import Constraint, knob


class Choice(Constraint):
    """The text has to be one of the given options, letter for letter.

    Tokens that leave every option are masked; as soon as one option is left, the rest of it is written without asking
    the model. Spaces at the ends of an option belong to it. A baseline for classification; engine: llguidance.
    """

    name, title, paper, sheet = "choice", "Choice list", "baseline", "constrained/grammar-engines"
    guarantee = ("constraint_sound",)

    options: str = knob("yes|no", help="the options, separated by | alone: spaces around it belong to the options")

    def grammar(self):
        return "choice", self.options
