"""Minimum Bayes risk decoding."""
from collections.abc import Iterator

from playground.algorithms.search.parallel_samples import draw_many, whole
from playground.algorithms.search.similarity import MEASURES
from playground.contract import Decoder, Strategy, knob, make
from playground.events import Branches, Figure, Note


class MinimumBayesRisk(Decoder):
    """Draw several texts by chance and keep the one that is most like all of them.

    The texts stand for what the model might say; the one with the largest mean likeness to all, itself included, is the
    best bet whichever is right. With `text` as the measure it is the text that was drawn most often, with `number` the
    vote of self-consistency. The references are unbiased only at temperature 1 and without a truncating sampler. Of
    equals the first one is taken; a text cut off by the length counts only if all are. Kumar and Byrne 2004; sampling
    references: Eikema and Aziz 2020, arXiv 2005.10283.
    """

    name, title, paper, sheet = "mbr", "Minimum Bayes risk", "2005.10283", "search/self-consistency-bestofn"
    guarantee, several = ("heuristic", "collapses"), True

    n: int = knob(8, 1, 64, step=1, help="texts that are drawn; 1 is plain sampling")
    likeness: str = knob(
        "words",
        choices=tuple(MEASURES),
        help="what makes two texts alike: F1 of words or of runs of letters (chrF), few edits "
        "of words, the same last number, or the same text",
    )
    temperature: float = knob(
        1.0, 0.0, 2.0, step=0.05, help="1 draws from the model itself; below 1 its likeliest texts outvote the others"
    )

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm) -> Iterator:
        samples = yield from draw_many(lm, self.n, self._standings)
        contenders = whole(samples)
        table, labels = self._table(contenders), [sample.label for sample in contenders]
        means = [sum(row) / len(row) for row in table]
        best = max(range(len(means)), key=means.__getitem__)
        yield Figure("matrix", "likeness", {"rows": labels, "columns": labels, "values": table})
        yield Figure("bars", "mean likeness to all texts", {"labels": labels, "values": means})
        likeliest = max(contenders, key=lambda sample: sample.logp)
        yield Note(
            f"{labels[best]} is most like the others, {means[best]:.2f} on average; the most probable text is {likeliest.label}."
        )
        yield lm.keep(contenders[best].leaf)

    def _table(self, samples) -> list[list[float]]:
        """Likeness of every text to every text. The measures are symmetric, so half of the pairs will do."""
        measure, texts = MEASURES[self.likeness], [sample.leaf.text for sample in samples]
        half = [[measure(texts[i], texts[j]) for j in range(i + 1)] for i in range(len(texts))]
        return [[half[max(i, j)][min(i, j)] for j in range(len(texts))] for i in range(len(texts))]

    def _standings(self, samples, completed) -> Iterator:
        yield Branches(scores={sample.leaf.number: sample.logp for sample in samples})
