"""Fits draft heads to a target: its own texts, its hidden states on them, and a training that can be resumed."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from playground.algorithms.draft_heads.draft_head import DraftHead
from playground.algorithms.draft_heads.head_training import FirstLayers, HeadBatch
from playground.decoding.fitted_weights import stored
from playground.engine.checkpoint.hub_files import Progress, unseen
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan, decoder_layers
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Note
from playground.training.checkpoint import Checkpoint
from playground.training.fitting import Fitting, finish
from playground.training.frozen_network import FrozenNetwork
from playground.training.target_texts import TargetText, target_texts

BATCH = 1024  # tokens, padding included
HELD_OUT = 10  # one text in this many is held out
FEW = 20  # texts
KEPT_BYTES = 2**30  # of hidden states that are kept between epochs; the rest is computed again


def fit_head(cls: type[DraftHead], fitting: Fitting) -> dict[str, Tensor]:
    """Train the weights of a draft head on texts of the target, and return them by name, in float16.

    An interrupted training goes on from its checkpoint, which is deleted at the end. Raises Refusal.
    """
    model = fitting.model
    if model.lm_head_weights is None:
        raise Refusal(
            f"The lm_head of {model.name} is quantised, and a draft head is trained with it: load the model without "
            "quantisation.",
            "quantization",
        )
    written = target_texts(model, fitting.texts, fitting.seed, fitting.progress)
    if len(written) < FEW:
        raise Refusal(f"{len(written)} texts are too few to train a draft head: name more with --texts.", "texts")
    layers = {*cls.state_layers(cls(), model.depth), model.depth}  # the last gives the target's own distributions
    lessons = OwnTexts(cls.name, model, tuple(sorted(layers)), written, fitting.seed, fitting.checkpoint,
                       fitting.progress, fitting.epochs)
    own = sum(len(text.tokens) - text.start for text in written)
    fitting.watch(Note(f"{len(written)} texts of {model.name}, {own} tokens of them its own."))
    weights = finish(cls.train(lessons), fitting.watch)
    fitting.checkpoint.unlink(missing_ok=True)
    return {
        name: tensor.half() if tensor.is_floating_point() and tensor.dim() else tensor  # not single numbers
        for name, tensor in weights.items()
    }


@dataclass
class OwnTexts:
    """Texts of a target in batches of similar length, with its hidden states before some layers."""

    name: str  # of the strategy
    model: Model
    layers: tuple[int, ...]
    texts: list[TargetText]
    seed: int
    checkpoint: Path
    progress: Progress = unseen
    epochs: int = 0
    _states: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # by text and layer, in float16
    _kept: int = 0  # bytes of `_states`

    def __post_init__(self) -> None:
        self.width, self.depth, self.context = self.model.width, self.model.depth, self.model.context
        self.embeddings = self.model.embed(list(range(self.model.vocabulary))).clone().float().cpu()
        self.lm_head = self.model.lm_head_weights.clone().float().cpu()
        last = decoder_layers(self.model.network)[-1].state_dict()
        self.last_layer = {name: tensor.clone().float().cpu() for name, tensor in last.items()}

    @cached_property
    def frozen(self) -> FrozenNetwork:
        """The target's network, for heads that are trained through it."""
        return FrozenNetwork(self.model)

    def first_layers(self, count: int) -> FirstLayers:
        if self.model.fused is None:
            raise Refusal(
                f"{self.model.name} is not of the Llama family, whose first layers this drafter copies: choose another "
                "drafter, or another model.",
                "model",
            )
        decoder, config = self.model.network.get_decoder(), self.model.network.config
        layers = [{name: _copied(part) for name, part in layer.state_dict().items()} for layer in decoder.layers]
        theta = float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0))
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return FirstLayers(layers[:count], _copied(decoder.norm.weight), head_dim, theta, config.rms_norm_eps)

    def batches(self, epoch: int) -> Iterator[HeadBatch]:
        numbers = [number for number in range(len(self.texts)) if number % HELD_OUT]
        groups = self._groups(numbers)
        Random(f"{self.seed} {epoch}").shuffle(groups)
        yield from map(self._batch, groups)

    def held_out(self) -> Iterator[HeadBatch]:
        yield from map(self._batch, self._groups(list(range(0, len(self.texts), HELD_OUT))))

    def _groups(self, numbers: list[int]) -> list[list[int]]:
        """Texts of similar length, so many that a batch has `BATCH` tokens with padding."""
        groups: list[list[int]] = [[]]
        for number in sorted(numbers, key=lambda number: len(self.texts[number].tokens)):
            if groups[-1] and (len(groups[-1]) + 1) * len(self.texts[number].tokens) > BATCH:
                groups.append([])
            groups[-1].append(number)
        return groups

    def _batch(self, numbers: list[int]) -> HeadBatch:
        texts = [self.texts[number] for number in numbers]
        states = [self._states_of(number) for number in numbers]
        written = [torch.arange(len(text.tokens)) >= text.start for text in texts]
        return HeadBatch(
            pad_sequence([torch.tensor(text.tokens) for text in texts], batch_first=True),
            pad_sequence(written, batch_first=True),
            {layer: pad_sequence([each[layer].float() for each in states], batch_first=True) for layer in self.layers},
        )

    def _states_of(self, number: int) -> dict[int, Tensor]:
        if number in self._states:
            return self._states[number]
        states = self._read(self.texts[number].tokens)
        size = sum(rows.nbytes for rows in states.values())
        if self._kept + size <= KEPT_BYTES:
            self._states[number] = states
            self._kept += size
        return states

    def _read(self, tokens: list[int]) -> dict[int, Tensor]:
        """Inputs of the layers for every token, [tokens, hidden_size] in float16."""
        work = ForwardInput(self.model.new_store(), tokens, list(range(-1, len(tokens) - 1)), last_only=True)
        captured = self.model.forward([work], LayerPlan(capture=frozenset(self.layers)))[1]
        rows = {
            layer: self.model.normed(captured[layer]) if layer == self.depth else captured[layer]
            for layer in self.layers
        }
        return {layer: states.half().cpu().clone() for layer, states in rows.items()}

    def fitted(self, name: str) -> dict[str, Tensor] | None:
        found = stored(name, {"target": self.model})
        return found and {key: part.float() if part.is_floating_point() else part for key, part in found.items()}

    # --- resuming ---

    def resumed(self) -> dict | None:
        return self._checkpoint.read()

    def save(self, state: dict) -> None:
        self._checkpoint.write(state)

    @property
    def _checkpoint(self) -> Checkpoint:
        about = (self.name, self.model.revision, self.model.quantization, self.seed, self.texts, self.epochs)
        return Checkpoint(self.checkpoint, about)


def _copied(weights: Tensor) -> Tensor:
    return weights.detach().clone().float().cpu()
