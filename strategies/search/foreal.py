"""FoReaL decoding: a strong model leads every sentence, a small one finishes it."""
import re
from collections.abc import Iterator
from dataclasses import dataclass

from playground.contract import Decoder, knob
from playground.events import Event, Figure, Note, Switch

STOP = re.compile(r"""(?<!\d\.)(?<=[.!?。！？])["'”’»)\]]*\s*$""")
LINE = re.compile(r"\n\s*$")
AFTER_A_NUMBER = re.compile(r"\d\.\s+[^\s\d]\S*$")
WORD = re.compile(r"\w")


def is_sentence(text: str) -> bool:
    """Whether a text with a word in it ends as sentences do: with a line break or a stop, perhaps with a closing quote
    or bracket after it.

    "3." may go on as "3.14": the point of a number counts only once a word follows it.
    """
    return bool(WORD.search(text)) and any(ending.search(text) for ending in (STOP, LINE, AFTER_A_NUMBER))


@dataclass
class Sentence:
    """The sentence at hand: where it begins, whether the large model leads it, and how many tokens each model wrote."""

    token: int
    letter: int
    led: bool
    leader: int = 0
    draft: int = 0

    def write(self, writer: str) -> None:
        setattr(self, writer, getattr(self, writer) + 1)

    def span(self) -> list:
        label = f"{self.leader} led, {self.draft} followed" if self.led else f"{self.draft} without a lead"
        return [self.token, self.token + self.leader + self.draft, label, self.leader / (self.leader + self.draft)]


class Foreal(Decoder):
    """Let the large model write the first tokens of each sentence and the small one the rest: nothing is checked
    afterwards.

    A small model mostly goes wrong where a sentence begins and falls in line after it. At the start of each a coin says
    with probability `p` whether the large model leads; it then writes `n` tokens, or fewer if the sentence is over.
    Whoever takes over first reads in one forward what the other wrote. With p = 1 and n beyond every sentence only the
    large model writes, with p = 0 or n = 0 only the small one. Li et al. 2025, arXiv 2506.06998, from the abstract and
    reviews: where a sentence ends, the longest stretch of the small model, and that either may end the text are our
    reading.
    """

    name, title, paper, sheet = "foreal", "FoReaL decoding", "2506.06998", "search/foreal"
    needs, guarantee = ("draft",), ("heuristic", "collapses")
    reconstruction, sure = True, "medium"

    n: int = knob(
        15, 0, 1024, step=1, help="tokens the large model writes at the start of a sentence it leads; 0: none"
    )
    p: float = knob(1.0, 0.0, 1.0, step=0.05, help="chance that the large model leads a sentence")
    cap: int = knob(
        128, 1, 512, step=1, help="tokens the small model writes at most before a new sentence is taken to begin"
    )

    def decode(self, lm) -> Iterator:
        models, sentence, writer, led = {"leader": lm.target, "draft": lm.stream("draft")}, None, None, 0
        while True:
            if sentence is None or self._is_over(lm, sentence):
                yield from self._closing(sentence)
                sentence = self._begun(lm)
                yield Note(
                    f"A sentence begins at token {lm.generated}: the {'large model leads' if sentence.led else 'small model is on its own'}."
                )
            wanted = self._next(sentence)
            if wanted != writer:
                yield Switch(
                    lm.generated, wanted, "leads the sentence" if wanted == "leader" else "goes on with the sentence"
                )
            rows = yield models[wanted].extend() if writer else models[wanted].prefill()
            writer, led = wanted, led + (wanted == "leader")
            sentence.write(writer)
            yield Figure(
                "scalar",
                "share of the large model",
                {"x": lm.generated, "series": {"tokens it wrote, of all": led / (lm.generated + 1)}},
            )
            yield lm.keep(lm.pick(rows))

    def _begun(self, lm) -> Sentence:
        return Sentence(lm.generated, len(lm.text), lm.flip(self.p, len(lm.tokens), "lead")[0])

    def _is_over(self, lm, sentence: Sentence) -> bool:
        return is_sentence(lm.text[sentence.letter:]) or sentence.draft >= self.cap

    def _next(self, sentence: Sentence) -> str:
        return "leader" if sentence.led and sentence.leader < self.n else "draft"

    def _closing(self, sentence: Sentence | None) -> Iterator[Event]:
        if sentence:
            yield Figure("spans", "sentences, and the share of the large model", {"spans": [sentence.span()]})
