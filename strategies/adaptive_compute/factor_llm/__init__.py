"""FactorLLM: the feed-forward networks of a dense model, cut into experts of which a token runs some."""
from collections.abc import Iterator, Sequence
from itertools import combinations
from random import Random

import torch
from torch import Tensor

from playground.contract import ComputePolicy, LayerChoices, SharedFeedForward, knob
from playground.events import Figure, Note
from strategies.adaptive_compute.factor_llm.factor_training import EXPERTS, cut, scores, train_routers

TIE = 1e-4  # of squared distances, relative: float32 tells no finer


class ChosenChunks(LayerChoices):
    """One forward: each row runs the experts that are chosen for it."""

    def __init__(self, policy: "FactorLLM", positions: list[int]):
        self._policy, self._positions = policy, positions
        self.chosen: list[Tensor] = []  # by layer, bool [rows, experts]

    def feed_forwards(self, layer: int, hidden: Tensor, full) -> Sequence[SharedFeedForward]:
        if self._policy.run >= EXPERTS:
            return [SharedFeedForward(None, full)]
        if self._policy.choice == "oracle":
            return [SharedFeedForward(None, self._policy.tried(layer, self.chosen))]
        self.chosen.append(self._policy.choose(layer, hidden, self._positions).cpu())
        return [SharedFeedForward(rows, part) for part, own in zip(self._policy.experts[layer], self.chosen[-1].T)
                if (rows := own.nonzero()[:, 0].tolist())]

    def deciding_weights(self, layer: int) -> int:
        return self._policy.router_weights


class TriedExperts:
    """All experts of a layer, computed once; for each row those are added whose sum is nearest to the FFN's output.

    `factor` is what the outputs of the experts are multiplied by already.
    """

    def __init__(self, experts: Sequence, run: int, factor: float, chosen: list[Tensor]):
        self._experts, self._run, self._factor, self._chosen = experts, run, factor, chosen

    @property
    def weights(self) -> int:
        return sum(expert.weights for expert in self._experts)

    def __call__(self, normed: Tensor) -> Tensor:
        outputs = torch.stack([expert(normed) for expert in self._experts])
        nearest = nearest_choice(outputs, outputs.sum(0) / self._factor, self._run)
        self._chosen.append(nearest.cpu())
        return (outputs * nearest.T[..., None]).sum(0)


class FactorLLM(ComputePolicy):
    """Cut each feed-forward network (FFN) of a dense model into four experts, of which a router runs `run` for a token.

    An FFN is a sum over its channels, so the outputs of four consecutive parts of them add up to its own, and with all
    four nothing changes. With fewer, the sum is multiplied by the share of channels that is left out. `python -m
    playground fit factor_llm` trains a linear router for each layer on the FFN's input, as in the paper towards the
    experts whose outputs are nearest to that of the FFN, and with a loss that balances their use. The experts are not
    trained here, and the loss of the next token, which choices without weights give routers no gradient for, is left
    out; so text suffers far more than in the paper. For the bundled model the divergence on held-out text is 0.32 nats
    per token with trained routers, 0.26 with the labels that they learn, and 0.40 with a random choice, as the fit
    prints. `oracle` tries all choices of experts and takes the one that is nearest to the FFN's output: an upper bound
    that computes everything. Without a fit the choice is random, and depends on layer and position alone. Zhao et al.
    2024, arXiv 2408.11855.
    """

    name, title, paper, sheet = "factor_llm", "FFN as experts (FactorLLM)", "2408.11855", "weights/read-me-factorllm"
    guarantee, reconstruction, sure = ("collapses",), True, "medium"
    prefers_trained = True
    questions_per_task = 20

    run: int = knob(2, 1, EXPERTS, step=1, help="experts that run for a token; 4 is plain decoding")
    choice: str = knob("router", choices=("router", "oracle", "random"), help="what chooses the experts of a token")
    scale: bool = knob(True, help="multiply the sum of the experts by the channels of the FFN over theirs")

    experts: Sequence[Sequence] = ()
    router_weights = 0

    def begin(self, parts, weights):
        self._told = bool(weights) or self.choice != "router"
        self._routers = weights.get("router") if self.choice == "router" and self.run < EXPERTS else None
        self.router_weights = 0 if self._routers is None else self._routers[0].numel()
        self._norm, self._factor = parts.ffn_input, EXPERTS / self.run if self.scale else 1.0
        if self.run < EXPERTS:
            self.experts = [[parts.feed_forward(layer, gate, up, self._factor * down)
                             for gate, up, down in cut(parts.ffn_projections(layer))] for layer in range(parts.depth)]

    def tried(self, layer: int, chosen: list[Tensor]) -> TriedExperts:
        """The experts of a layer for `oracle`, which adds to `chosen` those of each row, bool [n, experts]."""
        return TriedExperts(self.experts[layer], self.run, self._factor, chosen)

    def choose(self, layer: int, hidden: Tensor, positions: list[int]) -> Tensor:
        """The experts of each row, bool [n, experts], for the hidden states [n, d] after attention."""
        if self._routers is None:
            return torch.tensor([self._drawn(layer, position) for position in positions])
        normed = self._norm(layer, hidden)
        return highest(scores(self._routers[layer].float().to(hidden.device), normed.float()), self.run)

    def _drawn(self, layer: int, position: int) -> list[bool]:
        """Random experts of the token at a position, the same at every repetition and beside any other rows."""
        drawn = Random(f"{layer} {position}").sample(range(EXPERTS), self.run)
        return [expert in drawn for expert in range(EXPERTS)]

    def choices(self, positions, prompt):
        return ChosenChunks(self, positions)

    def explain(self, choices, row, generated) -> Iterator:
        if not self._told:
            self._told = True
            yield Note("No routers for this model: experts are chosen at random. `python -m playground fit factor_llm` "
                       "trains routers.")
        if choices.chosen:
            own = torch.stack([layer[row] for layer in choices.chosen]).float()
            yield Figure("matrix", "experts that ran for the newest token",
                         {"rows": [f"layer {layer}" for layer in range(len(own))],
                          "columns": [f"expert {expert}" for expert in range(EXPERTS)], "values": own.tolist()})

    @classmethod
    def calibrate(cls, texts, seed: int) -> Iterator:
        """Train the routers; returns their weights."""
        torch.manual_seed(seed)
        return (yield from train_routers(texts))


def highest(found: Tensor, count: int) -> Tensor:
    """The highest scores of each row, bool like them; of equal ones the first."""
    order = found.argsort(dim=-1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(found, dtype=torch.bool).scatter_(1, order, True)


def nearest_choice(outputs: Tensor, whole: Tensor, run: int) -> Tensor:
    """Of all choices of `run` experts the one whose sum is nearest to the whole [n, d], bool [n, experts]; of equally
    near ones the first. Two of four experts, times 2, are as near as the other two.

    outputs: of all experts, [experts, n, d].
    """
    choices = list(combinations(range(len(outputs)), run))
    errors = torch.stack([(outputs[list(choice)].sum(0) - whole).square().sum(-1) for choice in choices], -1)
    table = torch.tensor([[expert in choice for expert in range(len(outputs))] for choice in choices])
    nearest = errors <= errors.amin(-1, keepdim=True) * (1 + TIE)
    return table.to(whole.device)[(~nearest).cumprod(-1).sum(-1)]
