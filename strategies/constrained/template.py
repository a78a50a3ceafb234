"""A template with holes as constraint."""
from collections.abc import Callable, Iterator
from typing import ClassVar

from playground.contract import Constraint, knob
from playground.events import Event, Figure
from playground.grammar.template_grammar import Template

EXAMPLE = "Name: {{name:[A-Z][a-z]{2,8}}}\nAge: {{age:[0-9]{1,2}}} years\n"


class FilledTemplate(Constraint):
    """Fixed text is written without running the model, which fills in the holes between it.

    A hole is {{name}}, some text on one line, or {{name:pattern}}, a match of a regular expression. It ends at the
    first place where the fixed text after it is complete; a hole without a pattern does not contain the first
    character of that text. Tokens that leave no choice are forced, the fixed text with them: only where a hole could
    go on, the model itself writes the first token after it. As guidance interleaves text and generation; compare
    Willard and Louf 2023, arXiv 2307.09702; engine: llguidance.
    """

    name, title, paper, sheet = "template", "Template with holes", "2307.09702", "constrained/grammar-engines"
    guarantee = ("constraint_sound",)

    source: str = knob(EXAMPLE, multiline=True, file=True, help="the text, with holes {{name}} or {{name:pattern}}")

    begins: ClassVar[int]  # these come with the lane
    spelling: ClassVar[Callable[[int], bytes]]
    template: ClassVar[Template | None] = None

    def grammar(self):
        return "template", self.source

    def begin(self, start, spelling):
        self.begins, self.spelling, self.template = start, spelling, None

    def explain(self, history, token) -> Iterator[Event]:
        self.template = self.template or Template.read(self.source)
        template, place = self.template, len(history) - self.begins
        number = len(template.filled(self._text(history)))
        if number < len(template.holes):
            span = [place, place + 1, template.holes[number].name, number]
            yield Figure("spans", "tokens that the model chose, by hole", {"spans": [span]})

    def _text(self, history: list[int]) -> str:
        return b"".join(map(self.spelling, history[self.begins:])).decode("utf-8", "replace")
