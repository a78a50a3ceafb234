"""FactorLLM: the feed-forward networks of a dense model, cut into experts of which a token runs some."""
from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from playground.contract import ComputePolicy, LayerChoices, SharedFeedForward, knob
from playground.events import Figure, Note
from strategies.adaptive_compute.factor_llm.factor_training import EXPERTS, cut, scores, train_routers

TIE = 1e-4  # of squared distances, relative: float32 tells no finer


class ChosenChunks(LayerChoices):
    """One forward: each row runs the experts that are chosen for it."""

    def __init__(self, policy: "FactorLLM"):
        self._policy = policy
        self.chosen: list[Tensor] = []  # by layer, bool [rows, experts]

    def feed_forwards(self, layer: int, hidden: Tensor, full) -> Sequence[SharedFeedForward]:
        if self._policy.run >= EXPERTS:
            return [SharedFeedForward(None, full)]
        self.chosen.append(self._policy.choose(layer, hidden, full).cpu())
        return [SharedFeedForward(rows, part) for part, own in zip(self._policy.experts[layer], self.chosen[-1].T)
                if (rows := own.nonzero()[:, 0].tolist())]

    def deciding_weights(self, layer: int) -> int:
        return self._policy.deciding(layer) if self._policy.run < EXPERTS else 0


class FactorLLM(ComputePolicy):
    """Cut each feed-forward network (FFN) of a dense model into four experts, of which a router runs `run` for a token.

    An FFN is a sum over its channels, so the outputs of four consecutive parts of them add up to its own, and with all
    four nothing changes. With fewer, the sum is multiplied by the share of channels that is left out. `python -m
    playground fit factor_llm` trains a linear router for each layer on the FFN's input, as in the paper towards the
    experts whose outputs are nearest to that of the FFN, and with a loss that balances their use. The experts are not
    trained here, and the loss of the next token, which choices without weights give routers no gradient for, is left
    out; so text suffers far more than in the paper. For the bundled model the divergence on held-out text is 0.32 nats
    per token with trained routers, 0.26 with the labels that they learn, and 0.40 with a random choice, as the fit
    prints. `oracle` tries all choices of experts
    and takes the one that is nearest to the FFN's output: an upper bound that computes everything. Without a fit the
    choice is random. Zhao et al. 2024, arXiv 2408.11855.
    """

    name, title, paper, sheet = "factor_llm", "FFN as experts (FactorLLM)", "2408.11855", "weights/read-me-factorllm"
    guarantee, reconstruction, sure = ("collapses",), True, "medium"
    prefers_trained = True
    questions_per_task = 20

    run: int = knob(2, 1, EXPERTS, step=1, help="experts that run for a token; 4 is plain decoding")
    choice: str = knob("router", choices=("router", "oracle", "random"), help="what chooses the experts of a token")
    scale: bool = knob(True, help="multiply the sum of the experts by the channels of the FFN over theirs")

    experts: Sequence[Sequence] = ()

    def begin(self, parts, weights):
        self._told = bool(weights) or self.choice != "router"
        self._routers = weights.get("router") if self.choice == "router" else None
        self._parts, self._full = parts, [sum(part.numel() for part in parts.ffn_projections(layer))
                                          for layer in range(parts.depth)]
        self._chance = torch.Generator().manual_seed(0)
        if self.run < EXPERTS:
            factor = EXPERTS / self.run if self.scale else 1.0
            self.experts = [[parts.feed_forward(layer, gate, up, factor * down)
                             for gate, up, down in cut(parts.ffn_projections(layer))] for layer in range(parts.depth)]

    def choose(self, layer: int, hidden: Tensor, full) -> Tensor:
        """The experts of each row, bool [n, experts], for the hidden states [n, d] after attention."""
        normed = self._parts.ffn_input(layer, hidden)
        if self.choice == "oracle":
            return self._nearest(layer, normed, full)
        if self._routers is None:
            found = torch.rand(len(hidden), EXPERTS, generator=self._chance)
        else:
            found = scores(self._routers[layer].float().to(hidden.device), normed.float())
        return highest(found, self.run)

    def _nearest(self, layer: int, normed: Tensor, full) -> Tensor:
        """Of all choices the one whose sum is nearest to the output of the whole network; of equally near ones the
        first. Two of four experts, times 2, are as near as the other two.
        """
        outputs, whole = torch.stack([part(normed) for part in self.experts[layer]]), full(normed)
        choices = list(combinations(range(EXPERTS), self.run))
        errors = torch.stack([(outputs[list(choice)].sum(0) - whole).square().sum(-1) for choice in choices], -1)
        table = torch.tensor([[expert in choice for expert in range(EXPERTS)] for choice in choices])
        nearest = errors <= errors.amin(-1, keepdim=True) * (1 + TIE)
        return table.to(normed.device)[(~nearest).cumprod(-1).sum(-1)]

    def deciding(self, layer: int) -> int:
        """Weights that a row is multiplied with for the choice."""
        return self._full[layer] if self.choice == "oracle" else EXPERTS * self._parts.width

    def choices(self, positions, prompt):
        return ChosenChunks(self)

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
