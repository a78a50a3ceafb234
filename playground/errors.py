"""The exception whose message is shown to people: a sentence that says what is wrong and what to do."""


class Refusal(Exception):
    """A request that cannot be carried out. The message is shown verbatim, next to the control it concerns."""

    def __init__(self, sentence: str, about: str = ""):
        super().__init__(sentence)
        self.about = about  # the knob, option or toggle it concerns; empty for the whole request
