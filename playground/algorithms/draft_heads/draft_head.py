"""What all draft heads share: their weights, when they draft, and what they read of the target."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module

from playground.contract import Drafter, knob
from playground.contract.token_tree import TokenTree
from playground.errors import Refusal
from playground.events import Note

if TYPE_CHECKING:
    from playground.contract import Lane

Weights = dict[str, Tensor]
MEASURED = "accuracy"  # measured on held-out texts, [depths, ranks]; not a weight of the network


class DraftHead(Drafter):
    """A drafter with a small network of its own, trained for one target by `python -m playground fit NAME`."""

    fitted_to_target, needs = True, ("trained",)

    weights: str = knob(
        "fitted",
        choices=("fitted", "random"),
        help="the head trained for this model, or one with random weights: it changes the speed, never the text",
    )

    def __post_init__(self):
        self.network: Module | None = None

    @property
    def trained(self):
        return "" if self.weights == "random" else "set weights to random to see that the text stays the same"

    @classmethod
    def build(cls, weights: Weights) -> Module:
        """The network with these weights. Raises KeyError or RuntimeError if they are not those of this head."""
        raise NotImplementedError

    @classmethod
    def untrained(cls, width: int, depth: int) -> Weights:
        """Weights to start a training from, for a target of this hidden size and this many layers."""
        raise NotImplementedError

    @classmethod
    def widths(cls, weights: Weights) -> set[int]:
        """Sizes among which the hidden size of the head's target is; the smallest is named if it is not."""
        matrices = (tensor for name, tensor in weights.items() if tensor.dim() == 2 and name != MEASURED)
        return {size for tensor in matrices for size in tensor.shape}

    def beginning(self, lm: Lane) -> Weights:
        """Weights of the right sizes for the target of a lane, whose values do not matter."""
        return self.untrained(lm.target_model.width, lm.depth)

    def state_layers(self, depth):
        return (depth,)

    def propose(self, lm: Lane, budget: int) -> Iterator:
        if self.network is None:
            yield from self._load(lm)
        if budget < 1 or not lm.target.behind():  # the next row is known already: its token needs no forward
            return TokenTree(self.name)
        return (yield from self.drafted(lm, budget))

    def drafted(self, lm: Lane, budget: int) -> Iterator:
        """The draft tree, after events to show; at least one committed token has not been read by the target."""
        raise NotImplementedError

    @torch.inference_mode()
    def _load(self, lm: Lane) -> Iterator[Note]:
        model = lm.target_model
        if self.weights == "random":
            yield Note(f"The weights of {self.title} are random: expect few accepted draft tokens.")
            torch.manual_seed(0)
            weights = random_like(self.beginning(lm))
        else:
            weights = lm.fitted[self.name]
        check_width(self.title, self.widths(weights), model.width, model.name)
        self.network = self.build(weights).to(device=model.device, dtype=model.dtype).eval().requires_grad_(False)


def random_like(weights: Weights) -> Weights:
    """Small random numbers in place of all weights, so that a head does not copy the target."""
    return {
        name: torch.randn_like(tensor) * tensor.shape[-1] ** -0.5
        if tensor.is_floating_point() and name != MEASURED
        else tensor
        for name, tensor in weights.items()
    }


def check_width(title: str, sizes: set[int], width: int, name: str) -> None:
    """Raise Refusal if no size of a head's weights is the target's hidden size: it belongs to another model."""
    if width not in sizes:
        raise Refusal(
            f"This {title} head is for a model of hidden size {min(sizes, default=0)}, and {name} has {width}: choose "
            "a head for this model.",
            "weights",
        )
