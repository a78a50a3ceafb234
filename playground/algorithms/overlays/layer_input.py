"""Reading of the states that enter one layer."""
import torch
from torch import Tensor

from playground.contract import LayerChoices


class LayerInput(LayerChoices):
    """Runs everything and keeps the input [n, d] of one layer."""

    def __init__(self, layer: int):
        self._layer, self.rows = layer, torch.empty(0)

    def attends(self, layer: int, hidden: Tensor) -> bool:
        if layer == self._layer:
            self.rows = hidden.detach().float().cpu().clone()
        return True
