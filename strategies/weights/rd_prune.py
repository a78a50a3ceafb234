"""RD-Prune: how much of each layer to prune, so that the output moves least."""
from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from playground.algorithms.weights.budgeted_choices import cheapest
from playground.algorithms.weights.pruning_masks import UNSTRUCTURED, lowest, pruned_bits
from playground.algorithms.weights.weight_training import divergence
from playground.contract import CalibratedChange, knob

LOGITS, KL = "logits", "KL"
RANKINGS = ("magnitude", "wanda")


class RDPrune(CalibratedChange):
    """Prune each layer by another share, chosen so that the model's outputs move least at a given sparsity of all.

    Each matrix is pruned alone at several levels, and how far the logits then move on calibration texts is measured. A
    program chooses a level for every matrix so that the sum of these distortions is least and the weights that are
    kept stay within the budget. That they add up is an approximation. Within a matrix the smallest weights go first, or
    those that Wanda would take. The authors prune image networks, and finetune after each of many rounds; this is one
    round for a language model, without finetuning. Xu et al. 2023, arXiv 2308.10438.
    """

    name, title, paper, sheet = "rd_prune", "RD-Prune", "2308.10438", "weights/joint-layer-pruning"
    adjective, guarantee, needs = "pruned by RD-Prune", ("heuristic",), ("corpus",)
    sure = "medium"

    samples: int = knob(4, 1, 256, step=1, help="calibration texts")
    sparsity: float = knob(0.5, 0.0, 1.0, step=0.05, help="share of the weights of all layers that become zero")
    levels: int = knob(8, 1, 100, step=1, help="shares that are tried of each matrix, beside 0")
    distortion: str = knob(LOGITS, choices=(LOGITS, KL), help="mean square of what logits change by, or their KL from "
                                                              "the original")
    ranking: str = knob("magnitude", choices=RANKINGS, help="by what a matrix loses its weights")

    def change(self, blocks):
        curves = list(self.curves(blocks))
        sizes = [[(error, int((weight != 0).sum())) for error, weight in own] for _, own in curves]
        budget = (1 - self.sparsity) * sum(own[0][1].numel() for _, own in curves)
        for (name, own), number in zip(curves, cheapest(sizes, budget)):
            weight = own[number][1]
            blocks.put(name, weight, pruned_bits(float((weight == 0).float().mean()), UNSTRUCTURED))

    def curves(self, blocks) -> Iterator[tuple[str, list[tuple[float, Tensor]]]]:
        """The name of each matrix, and what it becomes at each level with the distortion of that alone. More pruning
        counts as no less distortion.
        """
        originals = [blocks.logits(ids) for ids in blocks.texts]
        for block in blocks:
            for name, inputs in block.inputs().items():
                pruned = list(self._levels(blocks.weight(name), inputs))
                moved = [0.0, *(self._distortion(block, {name: new}, originals) for new in pruned[1:])]
                yield name, list(zip(accumulate(moved, max), pruned))

    def _levels(self, weight: Tensor, inputs: Tensor) -> Iterator[Tensor]:
        """The matrix [out, in] with ever more zeros, from none to nothing else."""
        scores = weight.abs() * inputs.norm(dim=0) if self.ranking == "wanda" else weight.abs().flatten()
        for level in range(self.levels + 1):
            yield weight.masked_fill(lowest(scores, level / self.levels).view_as(weight), 0)

    @torch.no_grad()
    def _distortion(self, block, weights: dict[str, Tensor], originals: list[Tensor]) -> float:
        """How far the logits are from the original ones, on average over texts."""
        measure = divergence if self.distortion == KL else mean_square
        moved = [float(measure(before, block.logits(text, weights))) for text, before in enumerate(originals)]
        return sum(moved) / len(moved)


def mean_square(before: Tensor, after: Tensor) -> Tensor:
    return (after - before).square().mean()
