"""FoReaL decoding: a large model begins each sentence, a small one completes it."""
import re
from collections.abc import Iterator
from dataclasses import dataclass

from playground.contract import Decoder, Lane, knob
from playground.events import Event, Figure, Note, Switch

STOP = re.compile(r"""(?<!\d\.)(?<=[.!?。！？])["'”’»)\]]*\s*$""")
LINE = re.compile(r"\n\s*$")
AFTER_A_NUMBER = re.compile(r"\d\.\s+[^\s\d]\S*$")
WORD = re.compile(r"\w")


def is_sentence(text: str) -> bool:
    """Whether a text contains a word and ends with a line break, or with a full stop and optional closing quotes.

    "3." may continue as "3.14", so a full stop after a digit counts only once a word follows it.
    """
    return bool(WORD.search(text)) and any(ending.search(text) for ending in (STOP, LINE, AFTER_A_NUMBER))


@dataclass
class Sentence:
    """The current sentence: where it begins, whether the large model leads it, and how many tokens each model wrote."""

    token: int
    character: int
    led: bool
    leader: int = 0
    draft: int = 0

    def write(self, writer: str) -> None:
        setattr(self, writer, getattr(self, writer) + 1)

    def span(self) -> list:
        label = f"{self.leader} led, {self.draft} followed" if self.led else f"{self.draft} without a lead"
        return [self.token, self.token + self.leader + self.draft, label, self.leader / (self.leader + self.draft)]


class Foreal(Decoder):
    """Let the large model write the first tokens of each sentence and the small model the rest, without verification.

    The two models diverge mostly at the start of a sentence and agree afterwards. Each sentence is led by the large
    model with probability `p`; it then writes `n` tokens, or fewer if the sentence ends. On a switch, the other model
    first reads the missing tokens in one forward. With p = 1 and n above the length of any sentence only the large
    model writes, with p = 0 or n = 0 only the small one. Li et al. 2025, arXiv 2506.06998, from the abstract and
    reviews: the sentence boundaries, the longest run of the small model, and that either model may end the text are our
    interpretation.
    """

    name, title, paper, sheet = "foreal", "FoReaL decoding", "2506.06998", "search/foreal"
    needs, guarantee = ("draft",), ("heuristic", "collapses")
    reconstruction, sure = True, "medium"

    n: int = knob(
        15, 0, 1024, step=1, help="tokens of the large model at the start of a sentence it leads; 0: small model alone"
    )
    p: float = knob(1.0, 0.0, 1.0, step=0.05, help="probability that the large model leads a sentence")
    cap: int = knob(
        128, 1, 512, step=1, help="maximum tokens of the small model before a new sentence is assumed to begin"
    )

    def decode(self, lm: Lane) -> Iterator:
        models, sentence, writer, led = {"leader": lm.target, "draft": lm.stream("draft")}, None, None, 0
        while True:
            if sentence is None or self._is_over(lm, sentence):
                yield from self._sentence_figure(sentence)
                sentence = self._new_sentence(lm)
                writes = "large model leads" if sentence.led else "small model writes all of it"
                yield Note(f"A sentence begins at token {lm.generated}: the {writes}.")
            wanted = self._next(sentence)
            if wanted != writer:
                yield Switch(
                    lm.generated, wanted, "leads the sentence" if wanted == "leader" else "continues the sentence"
                )
            rows = yield models[wanted].extend() if writer else models[wanted].prefill()
            writer, led = wanted, led + (wanted == "leader")
            sentence.write(writer)
            yield Figure(
                "scalar",
                "share of the large model",
                {"x": lm.generated, "series": {"share of all tokens": led / (lm.generated + 1)}},
            )
            yield lm.keep(lm.pick(rows))

    def _new_sentence(self, lm: Lane) -> Sentence:
        return Sentence(lm.generated, len(lm.text), lm.flip(self.p, len(lm.tokens), "lead")[0])

    def _is_over(self, lm: Lane, sentence: Sentence) -> bool:
        return is_sentence(lm.text[sentence.character:]) or sentence.draft >= self.cap

    def _next(self, sentence: Sentence) -> str:
        return "leader" if sentence.led and sentence.leader < self.n else "draft"

    def _sentence_figure(self, sentence: Sentence | None) -> Iterator[Event]:
        if sentence:
            yield Figure("spans", "sentences, and the share of the large model", {"spans": [sentence.span()]})
