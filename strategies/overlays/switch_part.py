"""Switching a feature, a neuron or a head off or on while a text is written."""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from playground.algorithms.overlays.sparse_autoencoder import SparseAutoencoder
from playground.contract import ComputePolicy, LayerChoices, SharedFeedForward, knob
from playground.errors import Refusal
from playground.events import Figure

MOST = 64  # parts that are switched at once


class SwitchedPart(NamedTuple):
    """A feature of the autoencoder, which has no layer to name, or a neuron or head of a layer."""

    kind: str
    layer: int
    number: int

    def __str__(self) -> str:
        return f"feature {self.number}" if self.kind == "feature" else f"{self.kind} {self.layer}.{self.number}"


class SwitchedChoices(LayerChoices):
    """One forward in which some parts are switched; notes the activations that they would have had."""

    def __init__(self, policy: SwitchPart):
        self._policy = policy
        self.natural: dict[SwitchedPart, list[float]] = {}  # by part, for each row

    def mixed(self, layer: int, heads: Tensor) -> Tensor:
        rows, size = heads.clone(), self._policy.head_dim
        for part in self._policy.of("head", layer):
            own = slice(part.number * size, (part.number + 1) * size)
            self.natural[part] = heads[:, own].norm(dim=1).tolist()
            rows[:, own] *= self._policy.level
        return rows

    def feed_forwards(self, layer: int, hidden: Tensor, full) -> Sequence[SharedFeedForward]:
        switched = [*self._policy.of("neuron", layer), *self._policy.of("feature", layer)]
        return [SharedFeedForward(None, SwitchedNetwork(self, layer, hidden, full) if switched else full)]

    def change(self, layer: int, normed: Tensor, hidden: Tensor, added: Tensor) -> Tensor:
        """What the feed-forward network of a layer adds to the states, after parts were switched."""
        for part in self._policy.of("neuron", layer):
            own = self._policy.channel(part)
            self.natural[part] = own.activations(normed)[:, 0].tolist()
            added = added - own(normed) + self._policy.level * self._policy.direction(part).to(added)
        features = self._policy.of("feature", layer)
        return added + self._features(features, hidden + added) if features else added

    def _features(self, features: list[SwitchedPart], states: Tensor) -> Tensor:
        """What switching features changes in the states [n, d] after the layer."""
        numbers = [part.number for part in features]
        active = self._policy.sae.to(states.device).encode(states)[:, numbers]
        self.natural |= dict(zip(features, active.T.tolist()))
        wanted = self._policy.level * self._policy.largest[numbers].to(active)
        return ((wanted - active) @ self._policy.sae.decoder[numbers].to(active)).to(states)


class SwitchedNetwork:
    """The feed-forward network of a layer with some parts switched."""

    def __init__(self, choices: SwitchedChoices, layer: int, hidden: Tensor, full):
        self._choices, self._layer, self._hidden, self._full = choices, layer, hidden, full
        self.weights = full.weights

    def __call__(self, normed: Tensor) -> Tensor:
        return self._choices.change(self._layer, normed, self._hidden, self._full(normed))

    def activations(self, normed: Tensor) -> Tensor:
        return self._full.activations(normed)


class SwitchPart(ComputePolicy):
    """Switch features, neurons or heads of the target off, or hold them on, and see whether the text changes.

    What an overlay names only correlates with the text; this intervenes. `parts` lists what is switched: "neuron 4.120"
    is channel 120 of the feed-forward network of layer 4, "head 3.1" head 1 of layer 3, and "feature 17" one of
    `sae_features`, whose autoencoder has to be fitted to the model. Off is an activation of 0 in every row, the
    prompt's included. On is an activation of `strength`: for a feature times its largest in the training texts, for a
    neuron as a number; the output of a head is multiplied by it. A feature is removed from the state, or added, along
    its own direction, and the rest of the state stays. No parts, or heads on with strength 1, change nothing. Other
    parts may do the same work, so a text that stays does not show that a part does nothing. After Davies 2025, arXiv
    2501.02688, who holds neurons.
    """

    name, title = "switch_part", "A feature, neuron or head off or on"
    paper, sheet = "2501.02688", "overlays/lm-head-neurons"
    guarantee, sure = ("collapses",), "medium"
    weights_of, fitted_to_target = "sae_features", True

    parts: str = knob("head 0.0", help='what is switched, such as "head 3.1, neuron 4.120, feature 17"; empty: nothing')
    state: str = knob("off", choices=("off", "on"), help="hold the activation at 0, or at the strength")
    strength: float = knob(1.0, -20.0, 20.0, step=0.5, help="on: the activation, as the summary says for each kind")

    def check(self):
        read_parts(self.parts)

    @property
    def trained(self):
        kinds = {part.kind for part in read_parts(self.parts)}
        return "switch a neuron or a head instead of a feature" if "feature" in kinds else ""

    def begin(self, parts, weights):
        self._network, self.head_dim = parts, parts.head_dim
        self.level = self.strength if self.state == "on" else 0.0
        if "feature" in {part.kind for part in read_parts(self.parts)}:
            self.sae, self.largest = SparseAutoencoder.of(weights), weights["largest"].float()
        self._at = dict.fromkeys(self._placed(part, weights) for part in read_parts(self.parts))

    def _placed(self, part: SwitchedPart, weights) -> SwitchedPart:
        """A part with the layer after which it is switched. Raises Refusal if the model has no such part."""
        layer = int(weights["layer"]) - 1 if part.kind == "feature" else part.layer
        if not 0 <= layer < self._network.depth:
            raise Refusal(f"There is no layer {layer}: the model has layers 0 to {self._network.depth - 1}.", "parts")
        counts = {"head": self._network.heads, "neuron": self._network.channels(layer)}
        count = len(self.largest) if part.kind == "feature" else counts[part.kind]
        if part.number >= count:
            raise Refusal(f"There is no {part}: choose a {part.kind} from 0 to {count - 1}.", "parts")
        return part._replace(layer=layer)

    def of(self, kind: str, layer: int) -> list[SwitchedPart]:
        """The parts of a kind that are switched in a layer."""
        return [part for part in self._at if (part.kind, part.layer) == (kind, layer)]

    def channel(self, part: SwitchedPart):
        """A feed-forward network with one neuron alone."""
        return self._network.narrowed(part.layer, torch.tensor([part.number]))

    def direction(self, part: SwitchedPart) -> Tensor:
        """What a neuron writes with an activation of 1, [d]."""
        return self._network.ffn_projections(part.layer)[2][:, part.number]

    def choices(self, positions, prompt):
        return SwitchedChoices(self)

    def explain(self, choices, row, generated):
        series = {str(part): round(values[row], 4) for part, values in choices.natural.items() if row < len(values)}
        if series:
            name = "what the parts would have had: activation, or norm of a head"
            yield Figure("scalar", name, {"x": generated, "series": series})


def read_parts(text: str) -> list[SwitchedPart]:
    """Parts by their names; those of features have layer 0. Raises Refusal."""
    entries = [entry for entry in map(str.strip, re.split(r"[,\n]", text)) if entry]
    if len(entries) > MOST:
        raise Refusal(f"{len(entries)} parts are more than {MOST}: name fewer.", "parts")
    return [_read_part(entry) for entry in entries]


def _read_part(entry: str) -> SwitchedPart:
    match = re.fullmatch(r"(neuron|head) (\d{1,4})\.(\d{1,7})|feature (\d{1,7})", entry)
    if not match:
        raise Refusal(f'"{entry[:40]}" is no part: write "head 3.1", "neuron 4.120" or "feature 17".', "parts")
    if match[4]:
        return SwitchedPart("feature", 0, int(match[4]))
    return SwitchedPart(match[1], int(match[2]), int(match[3]))
