"""Adaptive Computation Modules: every token runs as many parts of each feed-forward network as a gate allows it."""
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from playground.contract import ComputePolicy, LayerChoices, SharedFeedForward, knob
from playground.errors import Refusal
from playground.events import Figure, Note
from strategies.adaptive_compute.acm.gates import Gates
from strategies.adaptive_compute.acm.module_training import BUDGETS, train_modules

LEARNERS = 4


class LearnerChoices(LayerChoices):
    """One forward: each row runs the first learners of every layer, as many as its gate chooses."""

    def __init__(self, policy: "AdaptiveModules"):
        self._policy = policy
        self.counts: list[list[int]] = []  # learners by layer and row

    def feed_forwards(self, layer: int, hidden: Tensor, full) -> Sequence[SharedFeedForward]:
        counts = self._policy.learners(layer, hidden)
        self.counts.append(counts)
        runs = [[row for row, count in enumerate(counts) if count > number] for number in range(LEARNERS)]
        parts = self._policy.parts_of(layer)
        return [SharedFeedForward(rows, part) for rows, part in zip(runs, parts) if rows]

    def deciding_weights(self, layer: int) -> int:
        return self._policy.gate_weights


class AdaptiveModules(ComputePolicy):
    """Divide each feed-forward network (FFN) into four learners; a small gate decides how many of them a token runs.

    The outputs of the learners add up, so that the first k are a cheaper, rougher version of the FFN. Here the learners
    are groups of its channels, those with the largest contributions first: all four are the FFN itself. `python -m
    playground fit acm` trains the output weights of the learners so that every k comes close to the FFN, then the gates
    to recognise where one more learner helps, then all gates together towards a share of the learners, `budget`. Mode
    `fixed` runs k learners everywhere, `by_layer` as many as `counts` says for each layer; fixed with k = 4 is plain
    decoding before a fit, and almost so after it. `bias` shifts the gates towards more learners. Without a fit, gated
    leaves nothing out. The paper converts attention projections as well, lets learners start at random, and trains
    them in the last phase too; its gates are affine, these have SiLU between their layers. Wójcik et al. 2023, arXiv
    2312.10193.
    """

    name, title, paper, sheet = "acm", "Adaptive computation modules (ACM)", "2312.10193", "adaptive-compute/acm"
    guarantee, reconstruction, sure = ("collapses",), True, "medium"
    prefers_trained = True
    questions_per_task = 60

    mode: str = knob("gated", choices=("gated", "fixed", "by_layer"), help="who chooses how many learners run")
    budget: str = knob("0.4", choices=tuple(map(str, BUDGETS)), help="gated: share of the learners trained to run")
    k: int = knob(LEARNERS, 0, LEARNERS, step=1, help="fixed: learners that run in every layer; 0 leaves out every FFN")
    counts: str = knob("", help="by_layer: learners of each layer, such as 4 4 3 2 2 3 4 4; empty: k everywhere")
    bias: float = knob(0.0, -20.0, 20.0, step=0.5, help="gated: added to a gate's score once for each further learner")

    def check(self):
        if any(not 0 <= count <= LEARNERS for count in self._listed()):
            raise Refusal(f"A layer has 0 to {LEARNERS} learners: write such numbers with spaces between.", "counts")

    def _listed(self) -> list[int]:
        words = self.counts.replace(",", " ").split()
        if not all(word.isdecimal() and len(word) < 3 for word in words):
            raise Refusal(f"A layer has 0 to {LEARNERS} learners: write such numbers with spaces between.", "counts")
        return [int(word) for word in words]

    def begin(self, parts, weights):
        self._parts, self._told = parts, bool(weights) or self.mode != "gated"
        self._learners = [self._divided(parts, layer, weights) for layer in range(parts.depth)]
        self._fixed = self._fixed_counts(parts.depth)
        gated = self.mode == "gated" and weights
        self._gates = Gates.of(weights, self.budget, parts.ffn_input) if gated else None
        self.gate_weights = self._gates.weights if self._gates else 0

    def _divided(self, parts, layer: int, weights) -> list:
        """The learners of a layer, each with an equal part of its channels."""
        gate, up, down = parts.ffn_projections(layer)
        order = channel_order(parts, layer, weights).to(gate.device)
        down = weights["down"][layer].to(down) if weights else down[:, order]
        pieces = zip(gate[order].chunk(LEARNERS), up[order].chunk(LEARNERS), down.chunk(LEARNERS, 1))
        return [parts.feed_forward(layer, *piece) for piece in pieces]

    def _fixed_counts(self, depth: int) -> list[int]:
        listed = self._listed() if self.mode == "by_layer" else []
        if listed and len(listed) != depth:
            raise Refusal(f"The model has {depth} layers, not {len(listed)}: give a number for each.", "counts")
        return listed or [LEARNERS if self.mode == "gated" else self.k] * depth

    def parts_of(self, layer: int) -> list:
        """The learners of a layer, in order."""
        return self._learners[layer]

    def learners(self, layer: int, hidden: Tensor) -> list[int]:
        """How many learners each row runs."""
        if not self._gates:
            return [self._fixed[layer]] * len(hidden)
        return self._gates.choose(layer, hidden, self.bias)

    def choices(self, positions, prompt):
        return LearnerChoices(self)

    def explain(self, choices, row, generated) -> Iterator:
        if not self._told:
            self._told = True
            yield Note("No gates for this model, so every learner runs: `python -m playground fit acm` trains them.")
        counts = [layer[row] for layer in choices.counts]
        labels = [f"layer {layer}" for layer in range(len(counts))]
        yield Figure("bars", "learners that ran in each layer", {"labels": labels, "values": counts})
        data = {"x": generated, "series": {"learners": sum(counts) / len(counts)}}
        lines = {"lines": {"budget": float(self.budget) * LEARNERS}} if self._gates else {}
        yield Figure("scalar", "learners per layer, mean", data | lines)

    @classmethod
    def calibrate(cls, texts, seed: int) -> Iterator:
        """Train the learners, then the gates of every budget; returns the weights by name."""
        torch.manual_seed(seed)
        return (yield from train_modules(texts, LEARNERS))


def channel_order(parts, layer: int, weights) -> Tensor:
    """Channels of an FFN, those with the largest contributions first; by their output weights before a fit."""
    if weights:
        return weights["order"][layer].long()
    return parts.output_norms(layer).argsort(descending=True, stable=True)
