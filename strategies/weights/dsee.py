"""DSEE: fine-tuning by a low-rank change and a few single entries, of weights of which a share becomes zero."""
from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from playground.algorithms.weights.pruning_masks import UNSTRUCTURED, pruned_bits
from playground.algorithms.weights.weight_training import WeightTraining, language_loss
from playground.contract import CalibratedChange, knob
from playground.errors import Refusal

TUNED = re.compile(r"\.(q|v)_proj$")  # query and value projections
GROWTH, MOST, INNER = 5, 64, 2  # of the rank of the decomposition in each round, its end, and steps of a round
SMALL = 0.2  # the quantile of magnitudes below which an entry of the decomposition's sparse part is none
SPREAD = 0.02  # of the numbers that A starts from
NUMBER = 16  # bits of a number of the change
SCORES = ("update", "sum", "weight", "opposite")


class DSEE(CalibratedChange):
    """Fine-tune on the calibration texts by a small change of some projections, and set a share of all weights to zero.
    On the bundled model the authors' score loses (perplexity 3.53, loaded model 3.39), and plain magnitude does not
    (3.22). It adapts a model to its texts: compare it with other fine-tuned models. Zeros make nothing faster.

    Query and value projections become W S1 + alpha / rank (B A + S2): a
    product that starts at 0, and single entries at the places that a decomposition of W into a product and a sparse
    part leaves. After the first training the smallest weights of all other layers together become zero, and of query
    and value projections together those with the lowest score. Then the change, and nothing else, is trained again.
    `update` scores a weight by the change at its place, as the authors' scripts do: it keeps what the texts changed and
    drops what they did not, which may hurt; `sum` takes weight and change, `weight` the weight alone, `opposite` drops
    what changed most. The authors fine-tune BERT; their code for causal models is not public. Ours: next tokens as the
    task, where the decomposition stops, and its threshold; pruning of heads is left out. Chen et al. 2021, arXiv
    2111.00160.
    """

    name, title, paper, sheet = "dsee", "DSEE", "2111.00160", "weights/dsee"
    adjective, guarantee, needs = "fine-tuned sparsely by DSEE", ("heuristic",), ("corpus",)
    sure = "medium"

    ratio: float = knob(0.2, 0.0, 0.9, step=0.05, help="share of the weights of all other layers that become zero")
    tuned_ratio: float = knob(0.2, 0.0, 0.9, step=0.05, help="the same of query and value projections")
    score: str = knob("update", choices=SCORES, help="what query and value weights are kept by")
    rank: int = knob(16, 0, 64, step=1, help="of the product; 0: none")
    entries: int = knob(16, 0, 512, step=1, help="single entries of the change of a matrix")
    samples: int = knob(256, 1, 256, step=1, help="calibration texts")
    steps: int = knob(80, 0, 2000, step=20, help="of the training before pruning; 0: none")
    recovery: int = knob(80, 0, 2000, step=20, help="of the training after pruning; 0: none")
    rate: float = knob(0.0005, 0.000001, 0.01, help="step of AdamW")
    alpha: float = knob(32.0, 0.0, 256.0, help="the change is multiplied by alpha / rank")

    def change(self, blocks):
        tuned = [name for name in blocks.layers if TUNED.search(name)]
        if not tuned:
            raise Refusal("DSEE fine-tunes query and value projections, and this model has none that are layers of "
                          "their own: choose a llama, mistral or qwen model, or another change.", "weights")
        chance = torch.Generator().manual_seed(0)
        changes = {name: SmallChange.started(blocks.weight(name), self, chance) for name in tuned}
        self._train(blocks, changes, self.steps)
        for own, kept in zip(changes.values(), self.kept(list(changes.values()))):
            own.kept = kept
        self._prune_others(blocks, tuned)
        self._train(blocks, changes, self.recovery)
        for name, own in changes.items():
            blocks.put(name, own.whole().detach(), own.bits())

    def kept(self, changes: list[SmallChange]) -> list[Tensor]:
        """Which weights of query and value projections stay, [out, in] each."""
        return highest([own.scored(self.score) for own in changes], self.tuned_ratio)

    def _prune_others(self, blocks, tuned):
        """Set the smallest weights of the layers that are not fine-tuned to zero."""
        names = [name for name in blocks.layers if name not in tuned]
        for name, kept in zip(names, highest([blocks.weight(name).abs() for name in names], self.ratio)):
            blocks.put(name, blocks.weight(name) * kept, pruned_bits(float((~kept).float().mean()), UNSTRUCTURED))

    def _train(self, blocks, changes, steps):
        numbers = [number for own in changes.values() for number in own.numbers if number.numel()]
        if not (steps and numbers):
            return

        # a loaded weight may allow no gradients through it
        others = {name: blocks.weight(name).clone() for name in blocks.layers if name not in changes}

        def loss(over, ids):
            tuned = {name: own.whole() for name, own in changes.items()}
            return language_loss(blocks.logits(ids, others | tuned), ids)

        WeightTraining(blocks, steps).run(torch.optim.AdamW(numbers, lr=self.rate, weight_decay=0.0), loss)


@dataclass
class SmallChange:
    """What becomes of a matrix [out, in]. up: [out, r], B. down: [r, in], A. free: [n], values of S2 at `places`, flat
    indices. kept: [out, in], S1.
    """

    weight: Tensor
    up: Tensor
    down: Tensor
    free: Tensor
    places: Tensor
    scale: float
    kept: Tensor

    @classmethod
    def started(cls, weight: Tensor, of: DSEE, chance: torch.Generator) -> SmallChange:
        """A change that changes nothing yet."""
        out, width = weight.shape
        rank = min(of.rank, out, width)
        down = (SPREAD * torch.randn(rank, width, generator=chance)).to(weight)
        places = support(weight, min(of.entries, weight.numel()), chance)
        numbers = weight.new_zeros(out, rank), down, weight.new_zeros(len(places))
        return cls(weight.clone(), *(number.requires_grad_() for number in numbers), places,
                   of.alpha / max(rank, 1), torch.ones_like(weight, dtype=torch.bool))

    @property
    def numbers(self) -> list[Tensor]:
        """What is trained."""
        return [self.up, self.down, self.free]

    def update(self) -> Tensor:
        """The change, [out, in]."""
        single = torch.zeros_like(self.weight).flatten().index_add(0, self.places, self.free)
        return self.scale * (self.up @ self.down + single.view_as(self.weight))

    def whole(self) -> Tensor:
        """The weights that are kept, with the change."""
        return self.weight * self.kept + self.update()

    def scored(self, by: str) -> Tensor:
        """What each weight is kept by, [out, in]."""
        change = self.update().detach()
        return {"update": change.abs(), "sum": (self.weight + change).abs(), "weight": self.weight.abs(),
                "opposite": -change.abs()}[by]

    def bits(self) -> float:
        """Of a weight: those that are kept and where, the product, and single entries with their places."""
        size = self.weight.numel()
        change = NUMBER * (self.up.numel() + self.down.numel()) + len(self.free) * (NUMBER + math.ceil(math.log2(size)))
        return pruned_bits(float((~self.kept).float().mean()), UNSTRUCTURED) + change / size


def highest(scores: list[Tensor], share: float) -> list[Tensor]:
    """Which entries of some tensors stay: all but a share of all of them, rounded down, with the lowest scores.

    Of equal ones the last stay.
    """
    flat = torch.cat([each.flatten() for each in scores])
    kept = torch.ones_like(flat, dtype=torch.bool)
    if count := int(share * len(flat)):
        last = flat.kthvalue(count).values  # a sort of all weights would take several times their memory
        kept = flat >= last
        kept[(flat == last).nonzero()[:count - int((~kept).sum()), 0]] = False
    return [part.view_as(each) for part, each in zip(kept.split([each.numel() for each in scores]), scores)]


def support(weight: Tensor, count: int, chance: torch.Generator, most: int = MOST) -> Tensor:
    """Flat indices of the largest entries of the sparse part of a matrix [out, in], which is not low-rank."""
    return sparse_part(weight, chance, most).abs().flatten().topk(count).indices


def sparse_part(weight: Tensor, chance: torch.Generator, most: int = MOST) -> Tensor:
    """S of W = U V + S + small entries, with a product whose rank grows greedily to `most`, or half of the matrix's."""
    size = weight.abs().flatten().kthvalue(max(1, int(SMALL * weight.numel()))).values
    right = torch.randn(1, weight.shape[1], generator=chance).to(weight)
    while True:
        sparse = torch.zeros_like(weight)
        for _ in range(INNER):
            left = torch.linalg.qr((weight - sparse) @ right.T).Q
            right = left.T @ (weight - sparse)
            rest = weight - left @ right
            sparse = rest.where(rest.abs() >= size, 0)
        if len(right) + GROWTH > min(most, min(weight.shape) // 2):
            return sparse
        right = torch.cat([right, torch.linalg.qr(rest - sparse).R[:GROWTH]])
