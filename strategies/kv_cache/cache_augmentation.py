"""Cache augmentation: a coprocessor reads the cache of the prompt and writes latent positions after it."""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence

from playground.algorithms.differentiable_llama import DifferentiableLlama
from playground.algorithms.kv_cache.cache_training import Descent, descend
from playground.algorithms.kv_cache.states_beside_slots import attend_also
from playground.contract import AddsMemory, ReadsParts, knob
from playground.events import Figure, Note

LATENTS, AHEAD = 8, 12  # latent positions that are trained; tokens after them that count
RANK = 8  # of what the coprocessor adds to the attention projections
PLACES = 4  # of a text, after which tokens are predicted
DESCENT = Descent("loss after latents", steps=400, rate=1e-3, every=25, clip=1.0)
MODES = {"none": "without latents", "pause": "the soft tokens", "coprocessor": "latents"}
CURVE = "curve."  # before the mode, in the names of what is stored: the loss of each token ahead on held-out texts
SHORTEST, HELD_OUT = 24, 64  # tokens of a text; texts that are not trained on


class CacheAugmentation(ReadsParts, AddsMemory):
    """After the prompt a coprocessor reads the cache and adds latent positions to it, which later tokens attend to. The
    bundled one did not help, so none is added until `latents` is raised.

    The coprocessor is the model with low-rank additions to its attention. It reads learnt soft tokens behind the cached
    states of the prompt; its last hidden states are then read by the model itself, like input embeddings, and the key
    and value states of these latent positions stay. The last of them gives the first token. The model's weights do not
    change. `python -m playground fit cache_augmentation` trains soft tokens and additions on the tokens that follow
    random places of texts, and measures on held-out texts the loss of each token ahead: without latents, with the soft
    tokens, with latents. A run shows these curves. With the bundled coprocessor, trained for minutes, the first token
    after the place loses most (5.9 nats in place of 0.8) and the twelfth hardly anything (0.91 and 0.81): latents are
    better than untrained soft tokens, and worse than none. The authors train a full copy of a model of 2 billion
    parameters, for far longer.
    With `pause` the model reads the soft tokens themselves, as a baseline; they were not trained for that. Later
    tokens are numbered as if the latent positions were not there,
    and the keys of the prompt are rotated back by their number instead, which gives the same distances. Without a fit,
    and with 0 latents, nothing is added. A decoder that returns to the end of the prompt reads its last token without
    latents. Liu et al. 2024, arXiv 2412.17747.
    """

    name, title, paper, sheet = (
        "cache_augmentation", "Latent positions (cache augmentation)", "2412.17747",
        "adaptive-compute/cache-augmentation",
    )
    guarantee = ("collapses",)
    sure = "medium"
    fitted_to_target, prefers_trained = True, True
    questions_per_task = 200

    latents: int = knob(0, 0, LATENTS, step=1, help="latent positions after the prompt; 0: none")
    mode: str = knob("coprocessor", choices=("coprocessor", "pause"), help="the model reads latents, or soft tokens")

    def __post_init__(self):
        self._weights: dict[str, Tensor] = {}
        self._curves: dict[str, Tensor] = {}  # by mode
        self._states: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values of latent positions, by layer
        self._logits: Tensor | None = None
        self._shares: dict[int, float] = {}
        self._written, self._start, self._shown = 0, 0, False

    def begin_fitted(self, weights):
        self._weights = {name: tensor for name, tensor in weights.items() if not name.startswith(CURVE)}
        self._curves = {mode: weights[CURVE + mode] for mode in MODES if CURVE + mode in weights}

    def begin(self, parts):
        self._parts = parts

    def expected_share(self, full):
        return 1.0 + (self.latents / full.length if self._weights else 0.0)

    @property
    def memory_bytes(self):
        return sum(tensor.nbytes for states in self._states.values() for tensor in states)

    def logits_after_prompt(self):
        return self._logits

    def retain_all(self, held):
        self._written = held[0].next - held[0].prompt
        if held[0].moment == "prefill" and self.latents and self._weights:
            self._augment(held)
        return [layer.live for layer in held]

    def _augment(self, held) -> None:
        """Compute the latent positions, and move the prompt away from the tokens that follow."""
        self._start, count = held[0].next, self.latents
        with torch.inference_mode():
            network = DifferentiableLlama(self._parts)
            weights = {name: tensor.to(network.embeddings) for name, tensor in self._weights.items()}
            past = [tuple(layer.read(part).to(network.embeddings) for part in ("keys", "values")) for layer in held]
            latents = weights["soft"][:count]
            if self.mode == "coprocessor":
                latents = read_after(network, past, latents, self._start, low_rank(weights))[0]
            hidden, states = read_after(network, past, latents, self._start)
            self._logits = network.logits(hidden[-1:])[0]
        for layer, (keys, values) in zip(held, states):
            like = layer.read("keys")
            back = torch.full((count,), count, device=like.device)
            keys = self._parts.rotate_back(keys.to(like), back)
            self._states[layer.layer] = keys.clone(), values.to(like).clone()
            back = torch.full((like.shape[1],), count, device=like.device)
            layer.write("keys", self._parts.rotate_back(like, back).clone())

    def attend_memory(self, layer, query_states, query_positions, seen):
        if layer not in self._states or query_positions[0] < self._start:
            return seen.out
        out, share = attend_also(query_states, *self._states[layer], seen)
        self._shares[layer] = float(share[:, -1].mean())
        return out

    def explain(self, prompt, layers):
        if not self._shown:
            self._shown = True
            yield Note(self._said())
            yield from shown_curves(self._curves)
        if self._shares:
            series = {f"layer {layer}": share for layer, share in sorted(self._shares.items())}
            yield Figure("scalar", "attention to latent positions", {"x": self._written, "series": series})
        self._shares = {}

    def _said(self) -> str:
        """What was added, or why nothing was."""
        if self._states:
            return (f"{self.latents} latent positions after the prompt: {self.latents} positions of the coprocessor "
                    "and as many of the model were computed once.")
        if self._weights:
            return "No latent positions: raise latents to add some."
        return "No latent positions: `python -m playground fit cache_augmentation` trains the coprocessor."

    @classmethod
    def calibrate(cls, texts, seed: int):
        """Train the coprocessor on the tokens that follow random places of the texts."""
        network = DifferentiableLlama(texts.parts)
        long = [ids for ids in texts.texts if len(ids) >= SHORTEST] or texts.texts
        held_out, long = long[:HELD_OUT], long[HELD_OUT:] or long
        weights = untrained(network, seed)

        def loss(step: int) -> Tensor:
            chosen = torch.Generator().manual_seed(seed * DESCENT.steps + step)
            ids = long[int(torch.randint(len(long), (1,), generator=chosen))]
            return torch.stack([each.mean() for each in ahead_losses(network, ids, weights, chosen)]).mean()

        yield from descend(weights, loss, DESCENT, texts)
        curves = measured_curves(network, held_out, weights, seed)
        yield from shown_curves(curves)
        yield Note(comparison(curves))
        stored = weights | {CURVE + mode: curve for mode, curve in curves.items()}
        return {name: tensor.half() for name, tensor in stored.items()}


def untrained(network: DifferentiableLlama, seed: int) -> dict[str, Tensor]:
    """Soft tokens of the size of embeddings, and additions that add nothing."""
    chance, width = torch.Generator().manual_seed(seed), network.width
    soft = torch.randn(LATENTS, width, generator=chance) * float(network.embeddings.std())
    weights = {"soft": soft}
    for index, layer in enumerate(network.layers):
        for name, product in (("qkv", layer.qkv), ("out", layer.out)):
            size, out = product.weight.shape[1], product.weight.shape[0]
            weights[f"{name}.{index}.down"] = torch.randn(size, RANK, generator=chance) * size ** -0.5
            weights[f"{name}.{index}.up"] = torch.zeros(RANK, out)
    return weights


def low_rank(weights: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The additions, as the network takes them."""
    names = {name.rpartition(".")[0] for name in weights if "." in name}
    return {name: (weights[f"{name}.down"], weights[f"{name}.up"]) for name in names}


def read_after(
    network: DifferentiableLlama, past: list[tuple[Tensor, Tensor]], inputs: Tensor, start: int, added=None
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The input of the lm_head [n, width] of inputs [n, width] from position `start` on, after cached states.

    With it come the key and value states of the inputs, by layer.
    """
    states = []

    def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        states.append((keys, values))
        return network.attend(query, *(torch.cat(pair, -2) for pair in zip(past[layer], (keys, values))))

    hidden = network(inputs, torch.arange(start, start + len(inputs), device=inputs.device), attend, added)
    return hidden, states


def ahead_losses(
    network: DifferentiableLlama, ids: list[int], weights: dict[str, Tensor], chance: torch.Generator,
    mode: str = "coprocessor",
) -> list[Tensor]:
    """The losses of the tokens ahead of each of some random places of a text, given latent positions there.

    In the mode "none" there are none, in the mode "pause" the soft tokens themselves.
    """
    past = cached_states(network, ids)
    last = max(1, len(ids) - 2)
    places = (torch.randperm(last, generator=chance)[:PLACES] + 1).tolist()
    return [place_losses(network, ids, place, past, weights, mode) for place in places]


def place_losses(network, ids: list[int], place: int, past: list, weights: dict[str, Tensor], mode: str) -> Tensor:
    """The losses of the tokens from `place` on, [n], in nats."""
    before = [tuple(states[:, :place] for states in layer) for layer in past]
    ahead = torch.tensor(ids[place:place + AHEAD])
    given = network.embed(ahead[:-1])
    if mode == "none":  # the last token before the place is read again, for its logits
        before = [tuple(states[:, :place - 1] for states in layer) for layer in past]
        read = network.embed(torch.tensor(ids[place - 1:place + len(given)]))
        hidden, _ = read_after(network, before, read, place - 1)
        return cross_entropy(network.logits(hidden), ahead, reduction="none")
    latents = weights["soft"]
    if mode == "coprocessor":
        latents = read_after(network, before, latents, place, low_rank(weights))[0]
    hidden, _ = read_after(network, before, torch.cat([latents, given]), place)
    return cross_entropy(network.logits(hidden[len(latents) - 1:]), ahead, reduction="none")


@torch.no_grad()
def cached_states(network: DifferentiableLlama, ids: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Key and value states of a text, by layer."""
    states = []

    def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        states.append((keys, values))
        return network.attend(query, keys, values)

    network(network.embed(torch.tensor(ids)), torch.arange(len(ids)), attend)
    return states


@torch.no_grad()
def measured_curves(
    network: DifferentiableLlama, texts: list[list[int]], weights: dict[str, Tensor], seed: int
) -> dict[str, Tensor]:
    """By mode, the mean loss of the first, second, ... token ahead on texts, [AHEAD]; NaN where no text is so long."""
    curves = {}
    for mode in MODES:
        chance = torch.Generator().manual_seed(seed)
        found = [losses for ids in texts for losses in ahead_losses(network, ids, weights, chance, mode)]
        padded = pad_sequence(found, batch_first=True, padding_value=math.nan)
        curves[mode] = pad(padded.nanmean(0), (0, AHEAD - padded.shape[1]), value=math.nan)
    return curves


def shown_curves(curves: Mapping[str, Tensor]) -> Iterator[Figure]:
    """The loss of each token ahead, as it was measured when the coprocessor was trained."""
    for ahead in range(AHEAD if curves else 0):
        series = {MODES[mode]: float(curve[ahead]) for mode, curve in curves.items() if not curve[ahead].isnan()}
        if series:
            yield Figure("scalar", "loss on held-out texts", {"x": ahead + 1, "axis": "token ahead", "series": series})


def comparison(curves: Mapping[str, Tensor]) -> str:
    """The mean loss in every mode, in words."""
    means = ", ".join(f"{float(curve.nanmean()):.3f} with {MODES[mode]}" for mode, curve in curves.items())
    return f"Loss of the {AHEAD} tokens ahead on held-out texts, in nats: {means.replace('with without', 'without')}."
