"""Training of a draft model while it drafts: a copy of its network for one lane, whose weights follow the target.

What was learned is either a low-rank addition to the attention projections (LoRA, Hu et al. 2021, arXiv 2106.09685) or
all weight matrices. The loaded model stays as it is, because other lanes and other visitors read with it.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from playground.algorithms.differentiable_llama import DifferentiableLlama

if TYPE_CHECKING:
    from playground.contract import Lane
    from playground.engine.model import Model

ALL, LORA = "all", "lora"
MOST_WEIGHTS = {ALL: 10_000_000, LORA: 400_000_000}  # of a draft: AdamW needs four float32 numbers for each it trains
CLIP = 1.0  # largest norm of a gradient


class DraftLesson(NamedTuple):
    """A text, and what the draft should have predicted at some of its positions."""

    tokens: list[int]  # in the draft's vocabulary
    places: list[int]  # positions whose rows count
    loss: Callable[[Tensor], Tensor]  # of the draft's logits there, [places, V]


class LearnedWeights:
    """What a draft learned, with the state of its optimiser; a visitor keeps it between runs."""

    @torch.inference_mode(False)  # lanes run in inference mode, whose tensors cannot be trained
    def __init__(self, initial: Mapping[str, Tensor]):
        self.tensors = {name: tensor.detach().clone().requires_grad_() for name, tensor in initial.items()}
        self.updates = 0
        self._optimiser = torch.optim.AdamW(self.tensors.values(), weight_decay=0.0)

    @torch.inference_mode(False)
    def step(self, loss: Tensor, rate: float) -> None:
        """One step of AdamW down the gradient of a loss."""
        self._optimiser.param_groups[0]["lr"] = rate
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.tensors.values(), CLIP)
        self._optimiser.step()
        self.updates += 1

    def to_device(self, device: torch.device) -> None:
        """Move the weights and the moments of the optimiser."""
        moments = self._optimiser.state_dict()
        for tensor in self.tensors.values():
            tensor.data = tensor.data.to(device)
        self._optimiser.load_state_dict(moments)  # which moves the moments to their weights

    def digest(self) -> str:
        """Hash of the weights."""
        parts = (tensor.detach().cpu().numpy().tobytes() for tensor in self.tensors.values())
        return blake2b(b"".join(parts), digest_size=8).hexdigest()


class DraftTraining:
    """The draft model of one lane and its training. `model` is what the lane reads with; it changes at every update.

    For models that are not `untrainable`.
    """

    @torch.inference_mode(False)
    def __init__(self, lm: Lane, strategy: str, loaded: Model, scope: str, rank: int, about: tuple = (),
                 share: bool = True):
        """`about`: everything else that what was learned depends on. `share`: keep it for the visitor's next runs."""
        self._loaded, self._network = loaded, DifferentiableLlama(loaded.fused)
        initial = self._matrices() if scope == ALL else untrained_lora(self._network, rank)
        key = (loaded.name, loaded.revision, scope, rank, *about)
        self.learned = lm.memory(strategy, lambda: LearnedWeights(initial), *key) if share else LearnedWeights(initial)
        self.learned.to_device(loaded.device)
        self._added = {} if scope == ALL else lora_pairs(self.learned.tensors)
        if scope == ALL:
            self._network.use(self._tied(self.learned.tensors))
        self.model = self._retrained() if self.learned.updates else loaded

    def _matrices(self) -> dict[str, Tensor]:
        found = self._network.matrices()
        if self._loaded.tied:
            del found["head"]
        return found

    def _tied(self, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"head": matrices["embeddings"], **matrices} if self._loaded.tied else dict(matrices)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def learn(self, lessons: Iterable[DraftLesson], rate: float) -> float:
        """One update on the sum of the lessons' losses; returns it as it was before. `model` is another one then."""
        loss = torch.stack([lesson.loss(self.logits(lesson.tokens, lesson.places)) for lesson in lessons]).sum()
        self.learned.step(loss, rate)
        self.model = self._retrained()
        return float(loss.detach())

    def logits(self, tokens: list[int], places: list[int]) -> Tensor:
        """The draft's logits [places, V] in float32, through which gradients flow to what it learns."""
        device = self._loaded.device
        ids, positions = torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device)
        network = self._network
        hidden = network(network.embed(ids), positions, network.attend_causally, self._added)
        return network.logits(hidden[torch.tensor(places, device=device)])

    @torch.no_grad()
    def _retrained(self) -> Model:
        """A model that computes with what was learned, without recorded graphs, whose weights are fixed."""
        model = copy(self._loaded)
        model.fused, model.compiled, model.replay = self._loaded.fused.with_matrices(self._current()), None, None
        return model

    def _current(self) -> dict[str, Tensor]:
        if not self._added:
            return {name: tensor.detach().clone() for name, tensor in self._tied(self.learned.tensors).items()}
        matrices = self._network.matrices()
        return {name: matrices[name] + (down @ up).T for name, (down, up) in self._added.items()}


def untrainable(model: Model, scope: str) -> str:
    """Why the weights of a draft are not trained here, as a sentence; empty if they can be."""
    if getattr(model, "fused", None) is None:
        return f"The weights of {model.name} cannot be trained: it is quantised, or not of the Llama family."
    if model.parameters > (most := MOST_WEIGHTS[scope]):
        return f"{model.name} has {model.parameters:,} weights, and at most {most:,} are trained while it drafts."
    return ""


def untrained_lora(network: DifferentiableLlama, rank: int) -> dict[str, Tensor]:
    """Low-rank additions to the attention projections of all layers, which add nothing yet."""
    chance, found = torch.Generator().manual_seed(0), {}
    for index, layer in enumerate(network.layers):
        for name, linear in (("qkv", layer.qkv), ("out", layer.out)):
            size, width = linear.weight.shape[1], linear.weight.shape[0]
            found[f"{name}.{index}.down"] = (torch.randn(size, rank, generator=chance) * size**-0.5).to(linear.weight)
            found[f"{name}.{index}.up"] = linear.weight.new_zeros(rank, width)
    return found


def lora_pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The additions by projection, as `DifferentiableLlama` takes them."""
    names = dict.fromkeys(name.rpartition(".")[0] for name in tensors)
    return {name: (tensors[f"{name}.down"], tensors[f"{name}.up"]) for name in names}
