"""DoLa: decoding by contrasting layers."""
from collections.abc import Iterator

import torch

from playground.algorithms.sampling import contrastive
from playground.contract import EarlyExit, Sampler, knob
from playground.engine.sampling import LOWEST, first_largest, jensen_shannon
from playground.events import Event, Figure

DEEP = 40  # layers; above it the buckets are the first and the last SPAN layers
SPAN = 20


class DoLa(Sampler):
    """Contrast layers: score tokens by the last layer's log-probabilities minus those of an earlier layer.

    For every row the earlier layer is the candidate that diverges most from the last one. Only tokens at least alpha
    times as probable as the best are eligible. Candidates are every second layer of the lower or the upper half, or one
    fixed layer. The authors apply the lm_head to inner layers without the final norm, and their divergence swaps the
    mixture and the two distributions; both can be changed. They add a repetition penalty of 1.2. alpha = 1 is greedy,
    and so is a contrast with the last layer itself, which is always read through the final norm. It costs no additional
    forward, and helps little in shallow models, whose inner layers decode poorly. Chuang et al. 2023, arXiv 2309.03883.
    """

    name, title, paper, sheet = "dola", "DoLa", "2309.03883", "sampling/lol"
    stage, draws, guarantee = "mix", False, ("collapses",)

    layers: str = knob(
        "high",
        choices=("low", "high", "one"),
        help="candidates: lower half for long reasoning, upper half for short answers, or one layer",
    )
    at: float = knob(0.5, 0.0, 1.0, step=0.05, help="depth of the one layer, as a share of all layers; 1 is greedy")
    alpha: float = knob(
        0.1, 0.0, 1.0, step=0.01, help="smallest probability of an eligible token, relative to the best; 1 is greedy"
    )
    norm: bool = knob(False, help="read inner layers through the final norm")
    divergence: str = knob(
        "mixture first", choices=("mixture first", "Jensen-Shannon"), help="divergence that selects the candidate layer"
    )

    def inner(self, depth, tied):
        layers = candidates(self.layers, self.at, depth, tied)
        self.exits = [EarlyExit("target", layer, self.norm or layer == depth) for layer in layers]
        return self.exits

    def mix(self, rows):
        selected = self._divergences(rows).argmax(0).tolist()
        early = torch.stack([rows[self.exits[layer]][row] for row, layer in enumerate(selected)])
        return self._contrast(rows["target"], early)

    def _contrast(self, logits: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        return contrastive.restricted(logits.log_softmax(-1) - early.log_softmax(-1), logits, self.alpha)

    def _divergences(self, rows) -> torch.Tensor:
        """Divergence of each candidate from the last layer, in nats, [layers, n]."""
        measure = jensen_shannon if self.divergence == "Jensen-Shannon" else mixture_first
        return torch.stack([measure(rows["target"], rows[exit]) for exit in self.exits])

    def observe(self, rows, token, position) -> Iterator[Event]:
        single = {name: row[None] for name, row in rows.items()}
        exits, divergences = self.exits, self._divergences(single)[:, 0].tolist()
        largest = max(divergences)
        selected = exits[divergences.index(largest)]
        series = {f"layer {at.layer}": divergence for at, divergence in zip(exits, divergences)}
        yield Figure("scalar", "divergence from the last layer", {"x": position, "series": series})
        labels = [f"layer {at.layer}: {self.piece(int(first_largest(rows[at])))}" for at in exits]
        yield Figure("bars", "first choice of each layer, by divergence", {"labels": labels, "values": divergences})
        spans = [[position, position + 1, f"layer {selected.layer}", largest]]
        yield Figure("spans", "layer contrasted with", {"spans": spans})
        yield from contrastive.contrast_events(
            rows["target"], rows[selected], self._contrast(rows["target"], rows[selected]), self.alpha, position,
            self.piece,
        )


def candidates(bucket: str, share: float, depth: int, tied: bool) -> list[int]:
    """Candidate layers; 0 is the embeddings, left out if they are tied to the lm_head, which would decode the input."""
    if bucket == "one":
        return [round(share * depth)]
    first = min(2, depth - 1) if tied else 0
    if bucket == "low":
        return list(range(first, SPAN if depth > DEEP else depth // 2, 2)) or [first]
    return list(range(depth - SPAN if depth > DEEP else depth // 2, depth, 2))


def mixture_first(last: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
    """Jensen-Shannon divergence of the authors' code, in nats, [n]: mean divergence of the mixture from each row."""
    logq, loge = last.log_softmax(-1), early.log_softmax(-1)
    mixture = (logq.exp() + loge.exp()) / 2
    return (mixture * (mixture.log().clamp_(min=LOWEST) - (logq + loge) / 2)).sum(-1)
