"""FiRST: routers read the prompt and decide which layers this text needs."""
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from playground.contract import ComputePolicy, LayerChoices, SharedFeedForward, knob
from playground.events import Figure, Note
from strategies.adaptive_compute.first_router.router_training import train_routers


class KeptLayers(LayerChoices):
    """The layers that the routers kept run, in every forward after the vote."""

    def __init__(self, policy: "FirstRouter"):
        self._policy = policy

    def attends(self, layer: int, hidden: Tensor) -> bool:
        return self._policy.keeps(layer)

    def feed_forwards(self, layer: int, hidden: Tensor, full) -> Sequence[SharedFeedForward]:
        part = self._policy.feed_forward(layer, full)
        return [SharedFeedForward(None, part)] if self._policy.keeps(layer) else []


class Voting(KeptLayers):
    """The forward over the prompt: layer by layer, the routers vote on the hidden states that arrive there."""

    def __init__(self, policy: "FirstRouter", rows: int):
        super().__init__(policy)
        self._rows = rows  # of the prompt

    def attends(self, layer: int, hidden: Tensor) -> bool:
        self._policy.take_vote(layer, hidden[:self._rows])
        return self._policy.keeps(layer) or self._policy.prefill == "whole"

    def feed_forwards(self, layer: int, hidden: Tensor, full) -> Sequence[SharedFeedForward]:
        whole = self._policy.prefill == "whole"
        return [SharedFeedForward(None, full)] if whole else super().feed_forwards(layer, hidden, full)

    def deciding_weights(self, layer: int) -> int:
        return self._policy.width


class Judging(LayerChoices):
    """The forward over the prompt without trained routers: every layer runs, and shows how much it turns the states."""

    def __init__(self, policy: "FirstRouter", rows: int):
        self._policy, self._rows, self._turns, self._input = policy, rows, [], torch.empty(0)

    def attends(self, layer: int, hidden: Tensor) -> bool:
        self._input = hidden
        return True

    def observe(self, layer: int, before: Tensor, after: Tensor) -> None:
        cosines = cosine_similarity(self._input[:self._rows].float(), after[:self._rows].float(), dim=-1)
        self._turns.append(1 - float(cosines.mean()))
        if layer == self._policy.depth - 1:
            self._policy.leave_out_the_idlest(self._turns)


class FirstRouter(ComputePolicy):
    """A router before each layer votes once, on the prompt, whether this text needs the layer; others are left out.

    A router is a linear map and a sigmoid. The mean of its probabilities over the prompt, or with `majority` the share
    of tokens above one half, is compared with `threshold`. Layers below it are identities from then on and hold no keys
    and values; the first `first` and last `last` layers always run. With prefill `skipped` the prompt passes the same
    layers as the text, with `whole` all of them. `python -m playground fit first_router` trains the routers, each layer
    mixed with its absence, and then low-rank adapters for the FFNs of the layers that remain, which bring them closer
    to the whole model. Threshold 0 without adapters is plain decoding. Without a fit, the `budget` layers that turn the
    prompt's states least are left out after a whole prefill, which is not the method. A prompt of several forwards is
    judged by the first. Attention has no adapters, the authors' weights of the losses are not known, and they tune
    on the task where these adapters follow the whole model. Jain et al. 2024, arXiv 2410.12513.
    """

    name, title, paper = "first_router", "Layers by the prompt (FiRST)", "2410.12513"
    sheet = "adaptive-compute/first-router"
    guarantee, reconstruction, sure = ("collapses",), True, "low"
    skips_attention, prefers_trained = True, True
    questions_per_task = 60

    threshold: float = knob(0.5, 0.0, 1.01, step=0.01, help="a layer is kept if its vote reaches this; 0 keeps all")
    vote: str = knob("mean", choices=("mean", "majority"), help="what of the tokens' probabilities is compared")
    prefill: str = knob("skipped", choices=("skipped", "whole"), help="layers of the prompt: those of the text, or all")
    adapters: bool = knob(True, help="use the trained adapters of the layers that are kept")
    first: int = knob(1, 0, 16, step=1, help="first layers that always run")
    last: int = knob(1, 0, 16, step=1, help="last layers that always run")
    budget: int = knob(2, 0, 16, step=1, help="without trained routers: layers that are left out")

    def begin(self, parts, weights):
        self.depth, self.width, self._votes, self._idle, self._told = parts.depth, parts.width, [], None, False
        self._routers = (weights["router.weight"].float(), weights["router.bias"].float()) if weights else None
        self._parts = {}
        if "gate.a" in weights and self.adapters:
            self._parts = {layer: adapted(parts, layer, weights) for layer in range(parts.depth)}

    def choices(self, positions, prompt):
        rows = sum(position < prompt for position in positions)
        if self._routers is None:
            return Judging(self, rows) if self._idle is None else KeptLayers(self)
        if len(self._votes) == self.depth:
            return KeptLayers(self)
        self._votes = []  # a forward that was begun again votes anew
        return Voting(self, rows)

    def take_vote(self, layer: int, hidden: Tensor) -> None:
        """The vote of a layer's router on the states [n, d] of the prompt before the layer."""
        weight, bias = (table[layer].to(hidden.device) for table in self._routers)
        probabilities = torch.sigmoid(hidden.float() @ weight + bias)
        if self.vote == "majority":
            probabilities = (probabilities >= 0.5).float()
        self._votes.append(float(probabilities.mean()))

    def leave_out_the_idlest(self, turns: list[float]) -> None:
        """Without routers: leave out the layers with the smallest values."""
        free = [layer for layer in range(self.depth) if not self._is_protected(layer)]
        self._votes, self._idle = turns, set(sorted(free, key=turns.__getitem__)[:self.budget])

    def keeps(self, layer: int) -> bool:
        """Whether a layer runs, as far as the votes are known."""
        if self._is_protected(layer) or layer >= len(self._votes):
            return True
        return layer not in self._idle if self._routers is None else self._votes[layer] >= self.threshold

    def _is_protected(self, layer: int) -> bool:
        return layer < self.first or layer >= self.depth - self.last

    def feed_forward(self, layer: int, full):
        """The feed-forward network of a layer, with its adapter if there is one."""
        return self._parts.get(layer, full)

    def explain(self, choices, row, generated) -> Iterator:
        if self._told:
            return
        self._told = True
        if self._routers is None:
            yield Note("No routers for this model: the layers that turn the prompt least are left out, which is not "
                       "the method. `python -m playground fit first_router` trains routers.")
        kept = [self.keeps(layer) for layer in range(self.depth)]
        labels = [f"layer {layer}, {'kept' if keeps else 'left out'}" for layer, keeps in enumerate(kept)]
        title = "turn of the prompt's states" if self._routers is None else "votes of the routers on the prompt"
        yield Figure("bars", title, {"labels": labels, "values": [round(vote, 4) for vote in self._votes]})
        yield Figure("scalar", "layers that run", {"x": generated, "series": {"layers": sum(kept)}})

    @classmethod
    def calibrate(cls, texts, seed: int) -> Iterator:
        """Train the routers, then the adapters; returns the weights by name."""
        torch.manual_seed(seed)
        return (yield from train_routers(texts))


def adapted(parts, layer: int, weights):
    """The feed-forward network of a layer with its low-rank adapters added."""
    names = zip(("gate", "up", "down"), parts.ffn_projections(layer))
    changes = [(own, weights[f"{name}.b"][layer].float() @ weights[f"{name}.a"][layer].float()) for name, own in names]
    return parts.feed_forward(layer, *(own + change.to(own) for own, change in changes))
