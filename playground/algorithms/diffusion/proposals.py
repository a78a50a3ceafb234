"""Proposals for masked positions, and rules that choose which of them are filled in one forward.

Confidence is the probability of the proposed token before temperature, in float64. Ties go to the lower position. Every
rule chooses at least one position.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from playground.engine.sampling import in_float64


@dataclass(frozen=True)
class Proposals:
    """The proposed token of each masked position, and its confidence; positions ascending."""

    tokens: dict[int, int]
    confidence: dict[int, float]

    @property
    def ranked(self) -> list[int]:
        """Positions, the most confident first."""
        return sorted(self.tokens, key=lambda position: -self.confidence[position])

    def of(self, positions: Iterable[int]) -> Proposals:
        """Those of some positions."""
        kept = [position for position in positions if position in self.tokens]
        return Proposals({i: self.tokens[i] for i in kept}, {i: self.confidence[i] for i in kept})


def propose(lm, rows, positions: Iterable[int]) -> Proposals:
    """Proposals for some positions, which must have been wanted of the forward."""
    positions = list(positions)
    tokens = {position: lm.pick(rows, position) for position in positions}
    probabilities = in_float64(rows.raw[positions]).softmax(-1)
    chosen = probabilities[range(len(positions)), list(tokens.values())].tolist()
    return Proposals(tokens, dict(zip(positions, chosen)))


def fill(lm, proposals: Proposals, positions: Iterable[int]):
    """The request that fills positions as proposed."""
    positions = list(positions)
    tokens, confidence = proposals.tokens, proposals.confidence
    return lm.fill(positions, [tokens[i] for i in positions], [confidence[i] for i in positions])


def most_confident(proposals: Proposals, count: int) -> list[int]:
    """The `count` most confident positions."""
    return proposals.ranked[:max(1, count)]


def above(proposals: Proposals, threshold: float) -> list[int]:
    """Positions whose confidence reaches a threshold, or the most confident one (Fast-dLLM, arXiv 2505.22618)."""
    return [i for i, c in proposals.confidence.items() if c >= threshold] or proposals.ranked[:1]


def bounded_mean(filled: list[float], confidences: Iterable[float], low: float, high: float) -> float:
    """The mean confidence of what was filled in a block, kept between two bounds; the largest of the proposals'
    `confidences` if nothing was (BACD, arXiv 2602.09555).
    """
    target = sum(filled) / len(filled) if filled else max(confidences)
    return max(low, min(high, target))


def by_factor(proposals: Proposals, factor: float) -> list[int]:
    """The n most confident positions for the largest n with (n + 1)(1 - c_n) < factor (Fast-dLLM, arXiv 2505.22618).

    If n tokens are each that likely, their joint mode is the product of their modes as long as this holds for 1.
    """
    ranked = proposals.ranked
    fitting = [n for n, i in enumerate(ranked, 1) if (n + 1) * (1 - proposals.confidence[i]) < factor]
    return ranked[:max(fitting, default=1)]
