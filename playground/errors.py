"""The one exception a person is meant to read: a sentence that says what is wrong and what to do."""


class Refusal(Exception):
    """A request that cannot be carried out. Its text is shown as it stands, beside the control it concerns."""

    def __init__(self, sentence: str, about: str = ""):
        super().__init__(sentence)
        self.about = about  # the knob, option or toggle to point at; empty where it concerns the whole request
