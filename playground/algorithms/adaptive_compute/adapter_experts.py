"""Low-rank adapters (LoRA) of one model as experts: each row of a forward gets a weighted sum of what they add.

They act on the three matrices of each feed-forward network, and every matrix routes by itself, on its own input. How
the adapters are weighted for a row is what the methods differ in.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from playground.contract import ComputePolicy, LayerChoices, SharedFeedForward, knob
from playground.errors import Refusal
from playground.events import Figure, Note

MATRICES = ("gate", "up", "down")  # of a feed-forward network
FITTED = "phatgoose"  # the strategy whose fit trains adapters and gates


class MatrixAdapters(NamedTuple):
    """The adapters of one matrix [out, in], one for each expert."""

    a: Tensor  # [experts, rank, in]
    b: Tensor  # [experts, out, rank], with the scale of the adapter
    gate: Tensor  # [experts, in], PHATGOOSE's vectors

    def added(self, rows: Tensor, weights: Tensor) -> Tensor:
        """What the experts with weights [n, experts] add to the product of the matrix with rows [n, in], [n, out].

        Two products for all experts together, with zeros for those of weight 0: for few small experts this is faster
        than to gather their matrices.
        """
        inner = torch.einsum("ni,zri->nzr", rows, self.a) * weights[..., None].to(rows)
        return torch.einsum("nzr,zor->no", inner, self.b)

    @property
    def numbers(self) -> int:
        return self.a.numel() + self.b.numel()


class AdaptedFeedForward:
    """The feed-forward network of a layer with its adapters. shares: receives the weights [n, experts] by matrix."""

    def __init__(self, policy: AdapterExperts, layer: int, full, shares: list[Tensor]):
        self._policy, self._layer, self._full, self._shares = policy, layer, full, shares

    @property
    def weights(self) -> int:
        return self._full.weights + sum(own.numbers for own in self._policy.adapters[self._layer].values())

    def __call__(self, normed: Tensor) -> Tensor:
        return self._product("down", self.activations(normed))

    def activations(self, normed: Tensor) -> Tensor:
        return silu(self._product("gate", normed)) * self._product("up", normed)

    def _product(self, name: str, rows: Tensor) -> Tensor:
        own = self._policy.adapters[self._layer][name]
        weights = self._policy.mixed(self._layer, name, rows)
        self._shares.append(weights.detach())
        return linear(rows, self._policy.matrices[self._layer][name]) + own.added(rows, weights)


class AdaptedRows(LayerChoices):
    """One forward whose rows are routed among the experts."""

    def __init__(self, policy: AdapterExperts):
        self._policy = policy
        self.shares: list[list[Tensor]] = []  # by layer and matrix, [rows, experts]

    def feed_forwards(self, layer: int, hidden: Tensor, full) -> Sequence[SharedFeedForward]:
        if not self._policy.experts:
            return [SharedFeedForward(None, full)]
        self.shares.append([])
        return [SharedFeedForward(None, AdaptedFeedForward(self._policy, layer, full, self.shares[-1]))]

    def deciding_weights(self, layer: int) -> int:
        return self._policy.router_weights


class AdapterExperts(ComputePolicy):
    """Adapters of one model, each trained on one task, of which every row and matrix gets a weighted sum."""

    guarantee, sure = ("collapses",), "high"
    prefers_trained, weights_of = True, FITTED

    only: str = knob("", help="experts that take part, such as lists, facts; empty: all that are fitted")

    experts: tuple[str, ...] = ()
    router_weights = 0  # numbers of the routers of a layer

    def begin(self, parts, weights):
        self._told = False
        self.experts = _chosen(experts_of(weights), self.only)
        if not self.experts:
            return
        self.matrices = [dict(zip(MATRICES, parts.ffn_projections(layer))) for layer in range(parts.depth)]
        self.adapters = [{name: adapters_of(weights, self.experts, name, layer, own)
                          for name, own in matrices.items()} for layer, matrices in enumerate(self.matrices)]
        self.prepare()

    def prepare(self) -> None:
        """Make what rows are routed with, once for a lane."""

    def weigh(self, layer: int, name: str, rows: Tensor) -> Tensor:
        """The weights of the experts for rows [n, in] that one matrix of a layer reads, [n, experts] in float32."""
        raise NotImplementedError

    def mixed(self, layer: int, name: str, rows: Tensor) -> Tensor:
        """The same; a single expert has weight 1 whatever the router says."""
        return torch.ones(len(rows), 1) if len(self.experts) == 1 else self.weigh(layer, name, rows)

    def choices(self, positions, prompt):
        return AdaptedRows(self)

    def explain(self, choices, row, generated) -> Iterator:
        if not self.experts and not self._told:
            self._told = True
            yield Note(f"No experts for this model, so it runs as it is: `python -m playground fit {self.name}` trains "
                       "some.")
        if not choices.shares:
            return
        layers = torch.stack([torch.stack([each[row] for each in layer]).mean(0) for layer in choices.shares]).cpu()
        shares = layers.mean(0)
        best = int(shares.argmax())
        yield Figure("scalar", "weight of each expert, over all layers",
                     {"x": generated, "series": {name: round(float(share), 4)
                                                 for name, share in zip(self.experts, shares)}})
        yield Figure("spans", "expert with the largest weight",
                     {"spans": [[generated, generated + 1, self.experts[best], round(float(shares[best]), 3)]]})
        yield Figure("matrix", "weights of the experts for the newest token",
                     {"rows": [f"layer {layer}" for layer in range(len(layers))], "columns": list(self.experts),
                      "values": [[round(share, 3) for share in layer] for layer in layers.tolist()]})


def experts_of(weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of the experts that there are weights of, sorted."""
    return tuple(sorted({name.split(".")[0] for name in weights}))


def adapters_of(weights: Mapping[str, Tensor], experts: Sequence[str], name: str, layer: int, like: Tensor
                ) -> MatrixAdapters:
    """The adapters of one matrix from stored weights, in the dtype of the matrix."""
    return MatrixAdapters(*(torch.stack([weights[f"{expert}.{name}.{part}"][layer].to(like) for expert in experts])
                            for part in ("a", "b", "gate")))


def top_softmax(scores: Tensor, count: int, temperature: float) -> Tensor:
    """A softmax of scores [n, experts] over temperature, over the `count` highest of each row; others have 0.

    Of equal scores the first are taken.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)[:, :count]
    kept = torch.full_like(scores, float("-inf")).scatter(1, order, scores.gather(1, order))
    return (kept / temperature).softmax(-1)


def _chosen(experts: tuple[str, ...], only: str) -> tuple[str, ...]:
    """The experts that `only` names, in its order without repetitions. Raises Refusal for one that there is not."""
    wanted = list(dict.fromkeys(entry for entry in map(str.strip, only.split(",")) if entry))
    for name in wanted:
        if experts and name not in experts:
            raise Refusal(f"There is no expert {name[:40]!r}: choose some of {', '.join(experts)}.", "only")
    return tuple(wanted) if experts and wanted else experts
