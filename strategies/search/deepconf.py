"""DeepConf."""
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from playground.algorithms.search.answer_votes import Votes, answer_in, answer_knob, by_answer, elected, words_knob
from playground.algorithms.search.parallel_samples import SampledText, whole
from playground.contract import Decoder, Lane, Strategy, knob, make
from playground.engine.sampling import largest
from playground.errors import Refusal
from playground.events import Branches, Event, Figure, Note


@dataclass(eq=False)
class ConfidentText(SampledText):
    """One text with the model's confidence at each of its tokens."""

    window: int = 1  # tokens over which confidence is averaged
    confidences: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)  # mean confidence of every full window
    stopped: bool = False  # it fell below the bar and was abandoned

    def add(self, logp: float, confidence: float) -> None:
        """Note a token that was drawn."""
        self.logp, self.drawn = self.logp + logp, self.drawn + 1
        self.confidences.append(confidence)
        if len(self.confidences) >= self.window:
            self.full.append(sum(self.confidences[-self.window:]) / self.window)

    @property
    def mean_confidence(self) -> float:
        return sum(self.confidences) / len(self.confidences)

    @property
    def groups(self) -> list[float]:
        """Mean confidence of every full window; of the whole text if it is shorter."""
        return self.full or [self.mean_confidence]

    @property
    def lowest(self) -> float:
        return min(self.groups)


WEIGHTS = {
    "lowest": lambda text: text.lowest,
    "mean": lambda text: text.mean_confidence,
    "tail": lambda text: text.groups[-1],
    "equal": lambda text: 1.0,
}


class DeepConf(Decoder):
    """Sample several texts, stop those in which the model becomes unsure, and let the others vote, weighted by their
    confidence.

    The confidence at a token is the mean of -log p over the k most probable tokens, which is large where one of them
    stands out; a text counts with its least confident window of tokens. The first texts, the warm-up, are written to
    their end and set the bar: a percentile of their lowest confidences. Each later text stops as soon as a window falls
    below the bar, and votes only if it did not; so do the texts of the warm-up. With as many texts in the warm-up as in
    all this is the offline form. At percentile 0 nothing stops, and with equal weights that is self-consistency. The
    bar holds for one model and question only. Fu et al. 2025, arXiv 2508.15260, as in the authors' code; without their
    early end of the vote.
    """

    name, title, paper, sheet = "deepconf", "DeepConf", "2508.15260", "search/deepconf"
    guarantee = ("heuristic", "collapses")
    new_in = "2026"
    several = counts_forced = True

    n: int = knob(8, 1, 64, step=1, help="texts to sample, those of the warm-up included; 1 is plain sampling")
    warm_up: int = knob(3, 1, 64, step=1, help="texts that set the bar, written to their end; n: offline form")
    percentile: float = knob(
        50.0, 0.0, 100.0, step=5, help="of the warm-up's lowest confidences, below which a text stops; 0 stops none"
    )
    window: int = knob(8, 1, 256, step=1, help="tokens over which confidence is averaged")
    k: int = knob(20, 1, 100, step=1, help="most probable tokens whose probabilities make up the confidence")
    weight: str = knob(
        "lowest", choices=tuple(WEIGHTS),
        help="what a vote counts: the least confident window, the mean of all tokens, the last window, or 1",
    )
    answer: str = answer_knob()
    words: int = words_knob()
    temperature: float = knob(
        0.7, 0.0, 2.0, step=0.05, help="below 1 sharpens, above 1 flattens; at 0 every text is the greedy one"
    )

    def check(self) -> None:
        if self.warm_up > self.n > 1:
            raise Refusal(
                f"The warm-up has {self.warm_up} texts of {self.n} in all: choose a shorter one, or more.", "warm_up"
            )

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm: Lane) -> Iterator:
        yield lm.prefill()
        first = min(self.warm_up, self.n)
        texts = self._begun(lm, first)
        yield from self._write(lm, texts, -math.inf)
        bar = self._bar(texts)
        if self.n > first:
            texts += self._begun(lm, self.n - first)
            yield from self._write(lm, texts[first:], bar)
        votes = self._votes(texts, bar)
        yield from self._shown(texts, votes)
        yield lm.keep(self._winner(texts, votes).leaf)

    def _begun(self, lm: Lane, count: int) -> list[ConfidentText]:
        return [ConfidentText(leaf, window=self.window) for leaf in lm.fork(count)]

    def _write(self, lm: Lane, texts: list[ConfidentText], bar: float) -> Iterator:
        """Write texts side by side until each ends, or a window of it falls below the bar."""
        while growing := [text for text in texts if not (text.leaf.reason or text.stopped)]:
            rows = yield lm.extend([text.leaf for text in growing])
            choices = [lm.pick(row) for row in rows]
            for text, row, choice in zip(growing, rows, choices):
                text.add(float(row.logp[0, choice.token]), self.confidence(row.logp[0]))
            yield lm.keep(choices)
            for text in growing:
                text.stopped = bool(text.full) and text.full[-1] < bar
            lm.drop(text.leaf for text in growing if text.stopped)
            yield from self._progress(growing, bar)

    def _progress(self, growing: list[ConfidentText], bar: float) -> Iterator[Event]:
        lows = {text.leaf.number: text.lowest for text in growing if not text.stopped}
        yield Branches(scores=lows)
        series = {text.label: text.groups[-1] for text in growing}
        lines = {} if bar == -math.inf else {"bar": bar}
        place = len(growing[0].confidences) - 1
        yield Figure("scalar", "confidence of the last window", {"x": place, "series": series, "lines": lines})

    def confidence(self, logp: torch.Tensor) -> float:
        """Mean of -log p over the k most probable tokens of the model's own distribution [V]."""
        return -float(largest(logp[None], min(self.k, len(logp))).values.double().mean())

    def _bar(self, texts: list[ConfidentText]) -> float:
        """The percentile of the lowest confidences of the warm-up, between two of them by linear interpolation."""
        if self.percentile == 0:
            return -math.inf
        lows = torch.tensor([text.lowest for text in texts], dtype=torch.float64)
        return float(lows.quantile(self.percentile / 100))

    def _votes(self, texts: list[ConfidentText], bar: float) -> Votes[ConfidentText]:
        """Texts by answer. Those that fell below the bar or have no answer do not vote, nor those that the length limit
        cut, unless all were cut.
        """
        above = [text for text in texts if not text.stopped and text.lowest >= bar]
        return by_answer(whole(above), self._read)

    def _elected(self, votes: Votes[ConfidentText]) -> str:
        return elected(votes, self._weight)

    def _winner(self, texts: list[ConfidentText], votes: Votes[ConfidentText]) -> ConfidentText:
        """The most probable text with the elected answer; if none votes, the most probable that was not stopped."""
        complete = whole([text for text in texts if not text.stopped])
        voters = votes[self._elected(votes)] if votes else complete
        return max(voters, key=lambda text: text.logp)

    def _weight(self, texts: list[ConfidentText]) -> float:
        """What the votes for one answer count together."""
        return sum(WEIGHTS[self.weight](text) for text in texts)

    def _read(self, text: str) -> str | None:
        return answer_in(text, self.answer, self.words)

    def _shown(self, texts: list[ConfidentText], votes: Votes[ConfidentText]) -> Iterator[Event]:
        weights = [*map(self._weight, votes.values())]
        yield Figure("bars", "weight of the answers", {"labels": list(votes), "values": weights})
        labels = [text.label + " stopped" * text.stopped for text in texts]
        lows = [text.lowest for text in texts]
        yield Figure("bars", "lowest confidence of each text", {"labels": labels, "values": lows})
        stopped, written = sum(text.stopped for text in texts), sum(len(text.confidences) for text in texts)
        begun = f"{stopped} of {len(texts)} texts were stopped early; {written} tokens were sampled in all."
        if not votes:
            yield Note(f"{begun} No text has an answer: the most probable one is returned.")
            return
        answer, voters = self._elected(votes), sum(map(len, votes.values()))
        share = self._weight(votes[answer]) / sum(weights)
        yield Note(f"{begun} {answer!r} has {share:.0%} of the weight of {voters} votes.")
