"""Duo-LLM: every layer has a large and a small feed-forward network, and each token takes one of them."""
from collections.abc import Iterator, Sequence
from random import Random

import torch
from torch import Tensor

from playground.contract import ComputePolicy, LayerChoices, SharedFeedForward, knob
from playground.engine.sampling import first_largest
from playground.errors import Refusal
from playground.events import Figure, Note
from strategies.adaptive_compute.duo_llm.duo_training import TARGETS, train_duo

BIG, SMALL, NONE = "B", "S", "0"
SHARE = 16  # the large network is so many times as wide as the small one


class RoutedTokens(LayerChoices):
    """One forward: in every layer each row runs the large network, the small one, or none."""

    def __init__(self, policy: "DuoLlm", positions: list[int]):
        self._policy, self._positions, self.routes = policy, positions, [""] * len(positions)

    def feed_forwards(self, layer: int, hidden: Tensor, full) -> Sequence[SharedFeedForward]:
        chosen = self._policy.route(layer, hidden, self._positions)
        self.routes = [before + taken for before, taken in zip(self.routes, chosen)]
        parts = [(BIG, full), (SMALL, self._policy.small(layer))]
        runs = [([row for row, taken in enumerate(chosen) if taken == kind], part) for kind, part in parts]
        return [SharedFeedForward(rows, part) for rows, part in runs if rows]

    def deciding_weights(self, layer: int) -> int:
        return self._policy.router_weights


class DuoLlm(ComputePolicy):
    """Give each layer a small feed-forward network (FFN) beside its large one; every token takes one in each layer.

    `python -m playground fit duo_llm` trains the small networks, a sixteenth as wide, while tokens take either one at
    random, so that any mixture works; the large ones stay the model's own, so that `big` is plain decoding. Then it
    trains routers, linear maps with a softmax, towards a mean share of large networks over all tokens and layers,
    `target`. Mode `router` follows them, `pattern` takes the same route for every token, such as BBSSBSBB, 0 for none,
    and `random` takes `big_layers` layers at random for each token. Attention always runs. Without a fit the small
    networks are the widest channels of the large ones and the router mode leaves nothing out. The authors train both
    networks from scratch. Alizadeh et al. 2024, arXiv 2410.10846.
    """

    name, title, paper, sheet = "duo_llm", "Large and small FFNs (Duo-LLM)", "2410.10846", "adaptive-compute/duo-llm"
    guarantee, reconstruction, sure = ("collapses",), True, "medium"
    prefers_trained = True
    questions_per_task = 60

    mode: str = knob("router", choices=("router", "big", "small", "pattern", "random"), help="who takes the route")
    target: str = knob("0.5", choices=tuple(map(str, TARGETS)), help="router: share of large networks to reach")
    pattern: str = knob("", help="pattern: a letter for each layer, B large, S small, 0 none; empty: B everywhere")
    big_layers: int = knob(4, 0, 32, step=1, help="random: large networks of each token")
    draw: int = knob(0, 0, 999, step=1, help="random: number of the random choice")

    def check(self):
        if set(self.pattern) - {BIG, SMALL, NONE}:
            raise Refusal("A pattern has the letters B, S and 0, one for each layer, such as BBSSBSBB.", "pattern")

    def begin(self, parts, weights):
        self.depth, self._told = parts.depth, bool(weights) or self.mode in ("big", "pattern", "random")
        if self.mode == "pattern" and self.pattern and len(self.pattern) != parts.depth:
            raise Refusal(f"The model has {parts.depth} layers: write a letter for each.", "pattern")
        self._norm, self._routers = parts.ffn_input, None
        self._small = [small_part(parts, layer, weights) for layer in range(parts.depth)]
        if weights and self.mode == "router":
            self._routers = weights[f"router.{self.target}"].float()
        self.router_weights = 0 if self._routers is None else self._routers[0].numel()

    def small(self, layer: int):
        """The small network of a layer."""
        return self._small[layer]

    def route(self, layer: int, hidden: Tensor, positions: list[int]) -> list[str]:
        """What each row takes in a layer, from the hidden states [n, d] after attention."""
        if self._routers is not None:
            scores = self._norm(layer, hidden).float() @ self._routers[layer].to(hidden.device).T
            return [(BIG, SMALL)[int(taken)] for taken in first_largest(scores)[:, 0].tolist()]
        if self.mode == "random":
            return [self._drawn(position)[layer] for position in positions]
        letter = {"small": SMALL, "pattern": (self.pattern or BIG * self.depth)[layer]}.get(self.mode, BIG)
        return [letter] * len(positions)

    def _drawn(self, position: int) -> str:
        """A random route of the token at a position, the same at every repetition."""
        chance = Random(f"{self.draw} {position}")
        big = set(chance.sample(range(self.depth), min(self.big_layers, self.depth)))
        return "".join(BIG if layer in big else SMALL for layer in range(self.depth))

    def choices(self, positions, prompt):
        return RoutedTokens(self, positions)

    def explain(self, choices, row, generated) -> Iterator:
        if not self._told:
            self._told = True
            yield Note("No small networks and routers for this model: `python -m playground fit duo_llm` trains them.")
        route = choices.routes[row]
        data = {"labels": [f"layer {layer}" for layer in range(len(route))],
                "values": [{BIG: 1.0, SMALL: round(1 / SHARE, 4), NONE: 0.0}[taken] for taken in route]}
        yield Figure("bars", "width of the FFN that each layer took", data)
        yield Figure("scalar", "large FFNs of a token", {"x": generated, "series": {"large": route.count(BIG)}})

    @classmethod
    def calibrate(cls, texts, seed: int) -> Iterator:
        """Train the small networks under random routes, then the routers; returns the weights by name."""
        torch.manual_seed(seed)
        return (yield from train_duo(texts, SHARE))


def small_part(parts, layer: int, weights):
    """The small network of a layer; without a fit, the channels of the large one with the largest output weights."""
    if weights:
        return parts.feed_forward(layer, *(weights[f"small.{name}"][layer].float() for name in ("gate", "up", "down")))
    kept = parts.output_norms(layer).topk(max(1, parts.channels(layer) // SHARE)).indices.sort().values
    return parts.narrowed(layer, kept)
