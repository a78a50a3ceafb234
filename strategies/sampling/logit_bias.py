"""Logit bias."""
import math
from collections.abc import Iterator

from playground.algorithms.sampling.phrases import biased, completing, spellings
from playground.contract import Lane, Sampler, knob
from playground.engine.sampling import REMOVED
from playground.errors import Refusal
from playground.events import Event, Note

MOST = 100.0  # as in the interface of OpenAI
SHOWN = 40  # characters shown of an invalid line


class LogitBias(Sampler):
    """Add a bias to the scores of given words or phrases, which makes them more or less probable.

    The bias of a phrase of several tokens is added to its last token if the text so far, prompt included, ends with the
    others. Each phrase is matched at the start of a line and after a space; other tokenisations of it are not affected.
    The name of a special token, such as <|im_end|>, is that token.
    A bias of about 5 makes a plausible word very likely, -100 practically excludes it. Useful to steer single words
    without changing the prompt. The choice stays argmax unless another sampler draws. Without biases nothing changes. A
    baseline, as `sequence_bias` of the transformers library defines it.
    """

    name, title, paper, sheet = "logit_bias", "Logit bias", "baseline", "sampling/logit-processors"
    stage, rank, draws = "penalty", 10, False
    guarantee = ("collapses",)

    biases: str = knob("", multiline=True, help="one per line: a word or phrase, a colon and the number to add, dog: 5")

    _phrases = None

    def check(self):
        parsed(self.biases)

    def prepare(self, lm: Lane) -> Iterator:
        yield from ()
        self._phrases = {
            phrase: bias for text, bias in parsed(self.biases).items() for phrase in spellings(lm, text, "biases")
        }

    def apply(self, scores, histories):
        return biased(scores, histories, self._phrases) if self._phrases else scores

    def explain(self, scores, history, token) -> Iterator[Event]:
        best, bias = int(scores.argmax()), completing(history, self._phrases or {})
        if token != best and (bias.get(token) or bias.get(best)):
            yield Note(f"The bias ranks {self.piece(token)!r} above {self.piece(best)!r}.")


def parsed(text: str) -> dict[str, float]:
    """The bias of each phrase. Raises Refusal for a line that is not a phrase with a number."""
    return dict(map(_line, filter(str.strip, text.splitlines())))


def _line(line: str) -> tuple[str, float]:
    phrase, _, number = line.rpartition(":")
    try:
        bias = float(number)
    except ValueError:
        bias = math.nan
    if not phrase.strip() or not -MOST <= bias <= MOST and bias != REMOVED:
        raise Refusal(
            f"{line[:SHOWN]!r} is not a bias: write a word, a colon and a number from -{MOST:.0f} to {MOST:.0f}, "
            "such as dog: 5.",
            "biases",
        )
    return phrase.strip(), bias
