"""MaskLLM: masks that are learnt by the loss of the model."""
from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from playground.algorithms.weights.pruning_masks import outside_pattern, pruned_bits
from playground.algorithms.weights.weight_training import WeightTraining, language_loss
from playground.contract import CalibratedChange, knob

GROUP = 4  # consecutive inputs, of which some are kept
SPREAD = 0.01  # of the logits of masks at the start
SHARPNESS, TEMPERATURE = (1e2, 5e2), (4.0, 0.05)  # what logits are multiplied by, and of the softmax: first and last


class MaskLLM(CalibratedChange):
    """Learn which of every 4 consecutive inputs of a row stay, by how well the pruned model continues texts.

    Each group has a logit for each of its masks, 6 for 2 that stay. While they are trained, a weight is multiplied by
    the sum of all masks, each by its share of a softmax with Gumbel noise, which becomes sharper with every step;
    weights themselves stay as they are. A small bonus for the magnitude of what is kept fades out. Logits start from
    the masks of Wanda. The most probable mask of each group is taken at the end. The authors train 2000 steps of 256
    sequences of 4096 tokens from masks of SparseGPT; this is a small fit of two texts a step. Fang et al. 2024, arXiv
    2409.17481.
    """

    name, title, paper, sheet = "maskllm", "MaskLLM", "2409.17481", "weights/maskllm-cast-armor"
    adjective, guarantee, needs = "pruned by MaskLLM", ("heuristic",), ("corpus",)

    kept: int = knob(2, 1, GROUP, step=1, help="inputs of every 4 that stay; 4 changes nothing")
    samples: int = knob(256, 1, 256, step=1, help="calibration texts")
    steps: int = knob(80, 0, 2000, step=20, help="of training; 0: the masks that it starts from")
    rate: float = knob(0.001, 0.00001, 0.1, help="step of Adam, on logits that begin near 0")
    strength: float = knob(3.0, 0.0, 1000.0, help="of the masks that training starts from; 0: from random ones")
    bonus: float = knob(0.00001, 0.0, 0.01, help="for the sum of squares of kept weights, at first")

    def change(self, blocks):
        if self.kept == GROUP:
            return
        masks = {name: GroupMasks.started(blocks.weight(name), inputs, self.kept, self.strength)
                 for block in blocks for name, inputs in block.inputs().items()}
        chance = torch.Generator().manual_seed(0)

        def loss(over, ids):
            soft = {name: own.soft(over, chance) for name, own in masks.items()}
            kept = sum(weight.square().sum() for weight in soft.values())
            return language_loss(blocks.logits(ids, soft), ids) - self.bonus * (1 - over) * kept

        optimiser = torch.optim.Adam([own.logits for own in masks.values()], lr=self.rate)
        WeightTraining(blocks, self.steps).run(optimiser, loss)
        for name, own in masks.items():
            blocks.put(name, own.hard(), pruned_bits(1 - self.kept / GROUP, f"{self.kept}:4"))


class GroupMasks:
    """What to keep of a matrix. masks: [masks, 4], with 1 for what is kept. logits: [out, groups, masks]."""

    def __init__(self, weight: Tensor, masks: Tensor, logits: Tensor):
        self.weight = weight.clone()  # a loaded weight may allow no gradients
        self.masks, self.logits = masks, logits

    @classmethod
    def started(cls, weight: Tensor, inputs: Tensor, kept: int, strength: float) -> GroupMasks:
        """Logits that prefer masks by how far they agree with Wanda's for inputs [n, in]."""
        chance = torch.Generator().manual_seed(0)
        masks = one_hot(torch.tensor(list(combinations(range(GROUP), kept))), GROUP).sum(1).to(weight)
        first = ~outside_pattern(weight.abs() * inputs.norm(dim=0), f"{kept}:{GROUP}")
        whole = weight.shape[1] // GROUP * GROUP
        agree = first[:, :whole].unflatten(1, (-1, GROUP)).to(weight) @ masks.T  # how many both keep
        noise = SPREAD * torch.randn(agree.shape, generator=chance).to(weight)
        return cls(weight, masks, (noise + SPREAD * strength * (agree - 1)).requires_grad_())

    def soft(self, over: float, chance: torch.Generator) -> Tensor:
        """The weights [out, in] under a random mixture of masks, which gets purer while training goes from 0 to 1."""
        sharpness, temperature = (first + over * (last - first) for first, last in (SHARPNESS, TEMPERATURE))
        noise = -torch.empty(self.logits.shape).exponential_(generator=chance).clamp(min=1e-30).log().to(self.logits)
        return self._under(((self.logits * sharpness + noise) / temperature).softmax(-1))

    def hard(self) -> Tensor:
        """The weights [out, in] under the most probable masks."""
        return self._under(one_hot(self.logits.detach().argmax(-1), len(self.masks)).to(self.weight))

    def _under(self, shares: Tensor) -> Tensor:
        kept = (shares @ self.masks).flatten(1)
        return torch.cat([self.weight[:, :kept.shape[1]] * kept, self.weight[:, kept.shape[1]:]], 1)
