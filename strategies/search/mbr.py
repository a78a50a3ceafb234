"""Minimum Bayes risk decoding."""
from collections.abc import Iterator

from playground.algorithms.search.parallel_samples import draw_many, whole
from playground.algorithms.search.similarity import MEASURES
from playground.contract import Decoder, Lane, Strategy, knob, make
from playground.events import Branches, Figure, Note


class MinimumBayesRisk(Decoder):
    """Sample several texts and keep the one with the highest mean similarity to all of them.

    The samples are both candidates and references: the text with the largest mean similarity to all, itself included,
    has the highest estimated expected utility. With `text` as the measure this is the text sampled most often, with
    `number` the majority answer of self-consistency. The references are unbiased only at temperature 1 and without a
    truncating sampler. Ties go to the first text; one truncated by the length limit counts only if all are. Kumar and
    Byrne 2004; sampling references: Eikema and Aziz 2020, arXiv 2005.10283.
    """

    name, title, paper, sheet = "mbr", "Minimum Bayes risk", "2005.10283", "search/self-consistency-bestofn"
    guarantee = ("heuristic", "collapses")
    several = counts_forced = True

    n: int = knob(8, 1, 64, step=1, help="texts to sample; 1 is plain sampling")
    likeness: str = knob(
        "words",
        choices=tuple(MEASURES),
        help="similarity measure: F1 of words or of character n-grams (chrF), edit distance in words, same last "
        "number, or same text",
    )
    temperature: float = knob(
        1.0, 0.0, 2.0, step=0.05, help="1 samples from the model itself; below 1 its most probable texts gain weight"
    )

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm: Lane) -> Iterator:
        samples = yield from draw_many(lm, self.n, self._progress)
        candidates = whole(samples)
        table, labels = self._table(candidates), [sample.label for sample in candidates]
        means = [sum(row) / len(row) for row in table]
        best = max(range(len(means)), key=means.__getitem__)
        yield Figure("matrix", "similarity", {"rows": labels, "columns": labels, "values": table})
        yield Figure("bars", "mean similarity to all texts", {"labels": labels, "values": means})
        likeliest = max(candidates, key=lambda sample: sample.logp)
        yield Note(
            f"{labels[best]} has the highest mean similarity, {means[best]:.2f}; the most probable text is "
            f"{likeliest.label}."
        )
        yield lm.keep(candidates[best].leaf)

    def _table(self, samples) -> list[list[float]]:
        """Pairwise similarities of the texts. The measures are symmetric, so only half of the pairs are computed."""
        measure, texts = MEASURES[self.likeness], [sample.leaf.text for sample in samples]
        half = [[measure(texts[i], texts[j]) for j in range(i + 1)] for i in range(len(texts))]
        return [[half[max(i, j)][min(i, j)] for j in range(len(texts))] for i in range(len(texts))]

    def _progress(self, samples, completed) -> Iterator:
        yield Branches(scores={sample.leaf.number: sample.logp for sample in samples})
