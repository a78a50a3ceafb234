"""Forbidden words."""
from collections.abc import Iterator

from playground.algorithms.sampling.phrases import biased, completing, spellings
from playground.contract import Lane, Sampler, knob
from playground.engine.sampling import REMOVED
from playground.events import Event, Figure, Note


class BadWords(Sampler):
    """Never complete one of the forbidden words or phrases.

    The last token of a phrase is removed if the text so far, prompt included, ends with its other tokens. Each phrase
    is forbidden at the start of a line and after a space; other tokenisations of it are not, so a word may still appear
    in a rarer one. The name of a special token is that token. If no token would remain, the row is unchanged. Useful to
    exclude names and terms. The choice stays argmax unless another sampler draws. An empty list changes nothing. A
    baseline, as `bad_words_ids` of the transformers library defines it.
    """

    name, title, paper, sheet = "bad_words", "Forbidden words", "baseline", "sampling/logit-processors"
    stage, rank, draws = "penalty", 11, False
    guarantee = ("collapses",)

    words: str = knob("", multiline=True, help="forbidden words or phrases, one per line")

    _phrases = None

    def prepare(self, lm: Lane) -> Iterator:
        yield from ()
        words = filter(None, map(str.strip, self.words.splitlines()))
        self._phrases = {phrase: REMOVED for word in words for phrase in spellings(lm, word, "words")}

    def apply(self, scores, histories):
        if not self._phrases:
            return scores
        left = biased(scores, histories, self._phrases)
        return left.where((left > REMOVED).any(-1, keepdim=True), scores)

    def explain(self, scores, history, token) -> Iterator[Event]:
        best = int(scores.argmax())
        if token == best or best not in completing(history, self._phrases or {}):
            return
        place = len(history) - self.start
        yield Figure("spans", "forbidden words", {"spans": [[place, place + 1, self.piece(best), 1]]})
        yield Note(f"{self.piece(best)!r} would have completed a forbidden word; {self.piece(token)!r} was chosen.")
