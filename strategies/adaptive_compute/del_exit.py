"""DEL: the exit layer and the draft length are chosen every round."""
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from playground.algorithms.speculative.drafting import chain_until, new_tree
from playground.algorithms.speculative.speculation_math import block_efficiency
from playground.contract import Drafter, EarlyExit, Lane, knob
from playground.contract.token_tree import ROOT
from playground.engine.sampling import first_largest
from playground.events import Event, Figure


@dataclass
class ExitStatistics:
    """Decayed counts of how often a layer's top token is the full model's, and sums of its confidence on hits and on
    misses.
    """

    hits: float = 0.0
    misses: float = 0.0
    hit_confidence: float = 0.0  # decayed sum over hits
    miss_confidence: float = 0.0  # decayed sum over misses

    def add(self, hits: list[bool], confidences: list[float], decay: float) -> None:
        """Add a round; earlier rounds are multiplied by `decay`."""
        self.hits = decay * self.hits + sum(hits)
        self.misses = decay * self.misses + len(hits) - sum(hits)
        self.hit_confidence = decay * self.hit_confidence + sum(c for c, hit in zip(confidences, hits) if hit)
        self.miss_confidence = decay * self.miss_confidence + sum(c for c, hit in zip(confidences, hits) if not hit)

    @property
    def alpha(self) -> float | None:
        """Estimated acceptance rate; None without observations."""
        seen = self.hits + self.misses
        return self.hits / seen if seen else None

    @property
    def threshold(self) -> float:
        """Midpoint of the mean confidences of hits and of misses; 0 until both occurred."""
        if not self.hits or not self.misses:
            return 0.0
        return (self.hit_confidence / self.hits + self.miss_confidence / self.misses) / 2


def tokens_per_layer(alpha: float, length: int, layer: int, depth: int) -> float:
    """Expected tokens of a round per executed layer: `length` draft tokens through `layer` layers, then all `depth`."""
    return block_efficiency(alpha, length) / (depth + length * layer)


class DelExit(Drafter):
    """Draft with the target's own first layers; the exit layer and the draft length are chosen every round from recent
    hit rates.

    Drafting and verification run every layer anyway, so the lm_head is applied to all exit layers once a round: a layer
    scores a hit if its top token equals the full model's. Counts decay by `decay` per round. The next round uses the
    layer and length with the most expected tokens per executed layer. With `dynamic`, drafting stops after a token
    whose confidence is below the midpoint of the layer's mean confidences on hits and on misses; that token is still
    verified. Otherwise the draft has the chosen length. Only committed positions are counted. The authors also count
    the last 32 prompt tokens; here the first round starts from the first row after the prompt. most = 0 is plain
    decoding. A speed-up needs a model trained with early-exit loss. Entezari Zarch et al. 2025, arXiv 2504.05598.
    """

    name, title, paper, sheet = "del_exit", "DEL: dynamic exit layer", "2504.05598", "speculative/del"
    drawn, guarantee, exits_early = "independent", ("collapses",), True

    decay: float = knob(
        0.95, 0.0, 1.0, step=0.05, help="decay of the counts per round; 0 counts the last round only"
    )
    most: int = knob(18, 0, 24, step=1, help="maximum draft tokens per round; 0 is plain decoding")
    stride: int = knob(
        1, 1, 8, step=1, help="layers between exit candidates; each candidate costs one lm_head product per row"
    )
    dynamic: bool = knob(
        True, help="stop drafting when the exit layer is uncertain; otherwise use the best length so far"
    )

    def inner(self, depth, tied):
        self.depth = depth
        self.exits = [EarlyExit("target", layer) for layer in range(1, depth, self.stride)]
        return self.exits

    @cached_property
    def statistics(self) -> dict[int, ExitStatistics]:
        """Statistics of each exit, by layer."""
        return {exit.layer: ExitStatistics() for exit in self.exits}

    def propose(self, lm: Lane, budget) -> Iterator:
        tree = new_tree(lm, self)
        # the next row is already known, as after prefill: its token needs no forward
        if not (self.most and self.exits and lm.target.behind()):
            return tree
        layer, length = self.plan()
        threshold = self.statistics[layer].threshold
        longest = min(budget, self.most if self.dynamic else length)
        yield from chain_until(
            lm, lm.exit(layer), tree, longest, lambda chain: self.dynamic and chain.confidence[-1] < threshold
        )
        yield from self._figures(lm, tree, layer)
        return tree

    def plan(self) -> tuple[int, int]:
        """Exit layer and draft length with the most expected tokens per executed layer; the lowest on ties.

        The first exit with one draft token before any observation.
        """
        known = {layer: counts.alpha for layer, counts in self.statistics.items() if counts.alpha is not None}
        plans = [(layer, length) for layer in known for length in range(self.most)]
        return max(
            plans,
            key=lambda plan: tokens_per_layer(known[plan[0]], plan[1], plan[0], self.depth),
            default=(self.exits[0].layer, 1),
        )

    def observe(self, tree, rows, verdict) -> None:
        """Compare each exit's top token with the full model's, in all rows of committed positions."""
        at = [rows.row(node) for node in (ROOT, *verdict.kept)]
        top, self._hits = first_largest(rows.raw[at]), []
        for exit, counts in zip(self.exits, self.statistics.values()):
            logits = rows.others[exit][at]
            hits = (first_largest(logits) == top)[:, 0].tolist()
            counts.add(hits, logits.softmax(-1).amax(-1).tolist(), self.decay)
            self._hits.append([float(hit) for hit in hits])

    def _figures(self, lm: Lane, tree, layer: int) -> Iterator[Event]:
        """Hits of the last round, expected speed-up of each exit, the chosen exit, and its confidence per token."""
        labels, x = [f"layer {exit.layer}" for exit in self.exits], lm.generated
        positions = [str(i + 1) for i in range(len(self._hits[0]))]
        yield Figure(
            "matrix",
            "exits whose top token is the full model's",
            {"rows": labels, "columns": positions, "values": self._hits},
        )
        yield Figure(
            "bars", "expected tokens per cost of a plain decode step", {"labels": labels, "values": self._speed_ups()}
        )
        yield Figure(
            "scalar",
            "draft layers and length",
            {"x": x, "series": {"layers": layer, "draft tokens": len(tree)}, "lines": {"all layers": self.depth}},
        )
        yield Figure(
            "bars",
            "confidence of each draft token",
            {"labels": list(map(lm.piece, tree.tokens)), "values": list(tree.confidence)},
        )
        yield Figure(
            "scalar",
            "confidence below which drafting stops",
            {"x": x, "series": {"confidence": self.statistics[layer].threshold}},
        )

    def _speed_ups(self) -> list[float]:
        """Expected tokens of each exit at its best length, per cost of a plain decode step."""
        return [
            self.depth
            * max(tokens_per_layer(counts.alpha or 0.0, length, layer, self.depth) for length in range(self.most))
            for layer, counts in self.statistics.items()
        ]
