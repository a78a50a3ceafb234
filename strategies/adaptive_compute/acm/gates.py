"""The gates of adaptive computation modules: which number of learners a token runs in a layer."""
from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from playground.engine.sampling import first_largest

HIDDEN = 16


class Gate(nn.Sequential):
    """Scores [n, learners + 1] of the possible numbers of learners, from what the FFN reads, [n, d]."""

    def __init__(self, width: int, learners: int):
        first, second, last = nn.Linear(width, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, learners + 1)
        super().__init__(first, nn.SiLU(), second, nn.SiLU(), last)


class Gates:
    """The trained gates of all layers for one budget."""

    def __init__(self, gates: list[Gate], norm: Callable[[int, Tensor], Tensor]):
        """norm(layer, hidden) is what the FFN of a layer reads of the hidden states."""
        self._gates, self._norm = gates, norm
        self.weights = sum(weight.numel() for weight in gates[0].parameters() if weight.dim() == 2)

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], budget: str, norm: Callable[[int, Tensor], Tensor]) -> Gates:
        """The gates in what `fit` stored."""
        own = {name.removeprefix(f"{budget}."): weight for name, weight in weights.items()
               if name.startswith(f"{budget}.")}
        width, learners = own["0.weight"].shape[-1], own["4.bias"].shape[-1] - 1
        gates = []
        for layer in range(len(own["0.weight"])):
            gate = Gate(width, learners)
            gate.load_state_dict({name: weight[layer].float() for name, weight in own.items()})
            gates.append(gate.eval())
        return cls(gates, norm)

    def choose(self, layer: int, hidden: Tensor, bias: float) -> list[int]:
        """How many learners each row runs, for hidden states [n, d] before the norm; the lower number at a tie."""
        normed = self._norm(layer, hidden).float()
        scores = self._gates[layer].to(normed.device)(normed)
        shifted = scores + bias * torch.arange(scores.shape[1], device=scores.device)
        return first_largest(shifted)[:, 0].tolist()
