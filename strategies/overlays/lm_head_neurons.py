"""Feed-forward neurons that fire, named by the lm_head."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from playground.algorithms.overlays.token_figures import bars, by_token, shaded
from playground.contract import ReadsChannels, ReadsStates, knob
from playground.events import Note

SEEN = 8  # channels of each layer and row that may be named
LISTED = 12  # neurons in the figure of those that fired most
WORDS = 3  # tokens in a name


class Firing(NamedTuple):
    """The channels of one layer that wrote most, by row: index, signed activation and share of the layer, [n, SEEN]."""

    neurons: Tensor
    activations: Tensor
    shares: Tensor


class Name(NamedTuple):
    """What a neuron is called: its best tokens, and the z-score and probability of the first."""

    tokens: list[int]
    z: float
    p: float


class LmHeadNeurons(ReadsChannels, ReadsStates):
    """Show which neurons of the feed-forward networks wrote most at a token, named by the lm_head.

    The paper multiplies the row of a neuron in the up projection with the lm_head: the best tokens name what the neuron
    reads. `view = write` names what it writes, by its column of the down projection after the final norm's weights.
    Names are ranked by cosine, since the softmax of small rows is flat, and need a z-score among all tokens; z-score
    and threshold are ours. A token has the colour of the row that read it: the share of its strongest named neuron in
    the norm of the layer's channels times their output weights. Its card adds how much of the next token's logit the
    neuron writes, with the final norm's scale as it was. On small models few neurons have clean names. A name
    correlates. Davies 2025, arXiv 2501.02688.
    """

    name, title = "lm_head_neurons", "Neurons named by the lm_head"
    paper, sheet = "2501.02688", "overlays/lm-head-neurons"
    sure = "medium"

    view: str = knob("read", choices=("read", "write"), help="name neurons by what they read, or by what they write")
    z: float = knob(6.0, 3.0, 12.0, step=0.5, help="least z-score of a name among all tokens")
    shown: int = knob(3, 1, 8, step=1, help="named neurons on the card of a token")

    _text = None

    def layers(self, depth):
        return (depth,)

    def begin(self, text, model):
        self._text, self._parts = text, model.parts
        self._fired: dict[int, list[Firing]] = {}
        self._last: list[Tensor] = []  # hidden states after the last layer, [n, d]

    def read_channels(self, layer, first, channels):
        sizes = channels.abs().float() * self._parts.output_norms(layer).float()
        found = (sizes / sizes.norm(dim=1, keepdim=True).clamp(min=1e-30)).topk(min(SEEN, sizes.shape[1]), 1)
        fired = Firing(found.indices, channels.gather(1, found.indices).float(), found.values)
        self._fired.setdefault(layer, []).append(Firing(*(part.cpu() for part in fired)))

    def read_states(self, first, states):
        self._last += [rows for rows in states.values()]

    def draw(self):
        if not self._fired or self._text.generated < 1:
            return
        layers, own = sorted(self._fired), slice(self._text.start, None)
        fired = [Firing(*(torch.cat(parts)[own] for parts in zip(*self._fired[layer]))) for layer in layers]
        names = {layer: self.names(layer, found.neurons.unique()) for layer, found in zip(layers, fired)}
        strongest = [self._named_at(fired, layers, names, token) for token in range(self._text.generated)]
        colour = f"share of the strongest neuron that {self.view}s a token"
        yield shaded(colour, [found[0][0] if found else 0.0 for found in strongest],
                     [self._label(found, token) for token, found in enumerate(strongest)],
                     [[f"neuron {layer}.{neuron}" for _, layer, neuron, *_ in found] for found in strongest])
        shares = [[max((share for share, place, *_ in found if place == layer), default=0.0) for found in strongest]
                  for layer in layers]
        yield by_token("strongest named neuron by layer and token", [f"layer {layer}" for layer in layers],
                       self._text.pieces(), shares)
        yield from self._most(strongest)
        known = [name for of_layer in names.values() for name in of_layer.values()]
        named = sum(name.z >= self.z for name in known)
        yield Note(
            f"Neurons: of {len(known)} that wrote most somewhere, {named} have a name (z-score {self.z:g} or more). A "
            f"name says which token the neuron {self.view}s, and correlates; only switching it off shows what it does."
        )

    def names(self, layer: int, neurons: Tensor) -> dict[int, Name]:
        """The names of some neurons [n] of a layer."""
        _, up, down = self._parts.ffn_projections(layer)
        head = self._parts.lm_head.float()
        index = neurons.to(up.device)
        rows = up[index].float() if self.view == "read" else down[:, index].T.float()
        if self.view == "write":
            rows = rows * self._parts.norm_before(self._parts.depth)[0].float().to(rows.device)
        scores = rows.to(head.device) @ head.T
        cosines = scores / head.norm(dim=1).clamp(min=1e-30)  # the norm of a row does not change its z-scores
        ranked = (cosines - cosines.mean(1, keepdim=True)) / cosines.std(1, keepdim=True).clamp(min=1e-30)
        best = ranked.topk(min(WORDS, ranked.shape[1]), 1)
        first = scores.softmax(1).gather(1, best.indices[:, :1])[:, 0].tolist()
        return {neuron: Name(tokens, z[0], p) for neuron, tokens, z, p in zip(
            neurons.tolist(), best.indices.tolist(), best.values.tolist(), first)}

    def _named_at(self, fired: list[Firing], layers: list[int], names: dict[int, dict[int, Name]], token: int) -> list:
        """The named neurons at a token as (share, layer, neuron, activation, name), the strongest first."""
        found = [
            (share, layer, neuron, activation, names[layer][neuron])
            for layer, of_layer in zip(layers, fired)
            for neuron, activation, share in zip(*(part[token].tolist() for part in of_layer))
            if names[layer][neuron].z >= self.z
        ]
        return sorted(found, key=lambda each: -each[0])[:self.shown]

    def _label(self, found: list, token: int) -> str:
        if not found:
            return "no named neuron among those that wrote most"
        return "; ".join(
            f"layer {layer}, neuron {neuron} {self._words(name)}: activation {activation:.2f}"
            + self._effect_in_words(layer, neuron, activation, token)
            for _, layer, neuron, activation, name in found
        )

    def _effect_in_words(self, layer: int, neuron: int, activation: float, token: int) -> str:
        following = self._text.start + token + 1
        if following >= len(self._text.tokens):
            return ""
        written = self.effect(layer, neuron, activation, following)
        return f", {written:+.2f} in the logit of “{self._text.piece(self._text.tokens[following])}”"

    def effect(self, layer: int, neuron: int, activation: float, following: int) -> float:
        """What a neuron adds to the logit of the token at position `following`, in the row before it."""
        gamma, epsilon = self._parts.norm_before(self._parts.depth)
        state = torch.cat(self._last)[following - 1].float()
        scale = (state.square().mean() + epsilon).rsqrt()
        column = self._parts.ffn_projections(layer)[2][:, neuron].to(state)
        target = self._parts.lm_head[self._text.tokens[following]].to(state) * gamma.to(state)
        return float(activation * scale * (target @ column))

    def _words(self, name: Name) -> str:
        return "“" + "”, “".join(map(self._text.piece, name.tokens)) + f"” (z {name.z:.1f}, p {name.p:.3f})"

    def _most(self, strongest: list):
        """The named neurons with the largest mean share over the text."""
        total: dict[tuple[int, int], float] = {}
        words = {}
        for share, layer, neuron, _, name in (each for found in strongest for each in found):
            total[layer, neuron] = total.get((layer, neuron), 0.0) + share / len(strongest)
            words[layer, neuron] = self._words(name)
        most = sorted(total, key=total.__getitem__, reverse=True)[:LISTED]
        if most:
            labels = [f"layer {layer}, neuron {neuron}: {words[layer, neuron]}" for layer, neuron in most]
            yield bars("named neurons, mean share", labels, [total[each] for each in most])
