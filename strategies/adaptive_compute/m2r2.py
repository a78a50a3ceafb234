"""M2R2: a second, accelerated residual stream lets the target's first layers draft."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList, RMSNorm
from torch.nn.functional import cosine_similarity, linear, rms_norm, silu

from playground.algorithms.draft_heads.draft_head import DraftHead
from playground.algorithms.draft_heads.feature_networks import EPS, set_eps, soft_loss, without_facts
from playground.algorithms.draft_heads.head_training import (
    HeadBatch,
    HeadTexts,
    HeadTraining,
    RankCounts,
    ahead,
    ranks,
    trained,
)
from playground.algorithms.speculative.drafting import grow, independent, new_tree
from playground.contract import Lane, knob
from playground.events import Figure, Note

RANK = 32  # of the adapters
Weights = dict[str, Tensor]


class LowRankAdapter(Module):
    """B SiLU(C RMS(p)), zero at first."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.c, self.b = Linear(width, rank, bias=False), Linear(rank, width, bias=False)
        torch.nn.init.zeros_(self.b.weight)

    def forward(self, rows: Tensor) -> Tensor:
        return self.b(silu(self.c(rms_norm(rows, rows.shape[-1:], eps=EPS))))


class AcceleratedResidual(Module):
    """Adapters for the layers before the gate, and the target's final norm."""

    def __init__(self, layers: int, width: int, rank: int):
        super().__init__()
        self.acc, self.norm = ModuleList(LowRankAdapter(width, rank) for _ in range(layers)), RMSNorm(width, EPS)

    def path(self, slow: list[Tensor]) -> list[Tensor]:
        """The accelerated residual [.., width] before each layer and at the gate, of the residuals there.

        It makes every step of the slow residual, and that of its adapter in addition.
        """
        fast = [slow[0]]
        for adapter, before, after in zip(self.acc, slow, slow[1:]):
            fast.append(fast[-1] + (after - before) + adapter(fast[-1]))
        return fast

    def forward(self, slow: list[Tensor]) -> Tensor:
        """The input of the lm_head at the gate, [.., width]."""
        return self.norm(self.path(slow)[-1])

    @classmethod
    def of(cls, weights: Weights) -> AcceleratedResidual:
        """The adapters with these weights. Raises KeyError or RuntimeError if they are others."""
        weights, facts = without_facts(weights)
        layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("acc."))
        rank, width = weights["acc.0.c.weight"].shape
        network = cls(layers, width, rank)
        network.load_state_dict(weights)
        set_eps(network, facts.get("rms_norm_eps", EPS))
        return network


class M2R2(DraftHead):
    """Beside the residual stream of the first layers runs an accelerated one, which small adapters push to where the
    residual will be after all layers; the tokens read from it are the draft. Left out, since no code was found: the
    trained router, exits without verification, and experts that are loaded ahead.

    At the gate, after half of the layers, the target's final norm and lm_head read the accelerated residual. The target
    continues from the residual itself, which the adapters never change, so verification resumes at the gate and nothing
    is computed twice. Drafting stops after a token below tau, which is verified as well. Adapters of zero make this
    drafting with the first layers alone; depth = 0 is plain decoding. Reconstructed without code of the authors: one
    gate, adapters beside each step of the residual in place of the feed-forward network, and the token's probability in
    place of the trained router. Its draft tokens are accepted as often as those of the first layers alone on the
    bundled model, which was trained to exit early. Bhendawade et al. 2025, arXiv 2502.02040.
    """

    name, title, paper, sheet = "m2r2", "M2R2: accelerated residuals", "2502.02040", "adaptive-compute/m2r2"
    drawn, guarantee, exits_early = "independent", ("collapses",), True
    reconstruction, sure = True, "low"

    tau: float = knob(0.0, 0.0, 1.0, step=0.05, help="probability of a draft token below which drafting stops")
    depth: int = knob(4, 0, 12, step=1, help="maximum draft tokens per round; 0 is plain decoding")

    def state_layers(self, depth):
        return (*range(gate_of(depth) + 1), depth)

    @classmethod
    def untrained(cls, width, depth):
        return AcceleratedResidual(gate_of(depth), width, RANK).state_dict()

    @classmethod
    def build(cls, weights):
        return AcceleratedResidual.of(weights)

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train the adapters on the target's distributions, and beside them a probe of the same size that reads the
        residual at the gate alone; returns the weights of the adapters.
        """
        torch.manual_seed(texts.seed)
        gate, target = gate_of(texts.depth), texts.first_layers(0)
        both = ModuleList([
            AcceleratedResidual(gate, texts.width, RANK), AcceleratedResidual(1, texts.width, gate * RANK)
        ])
        for network in both:
            network.norm.weight = torch.nn.Parameter(target.norm, requires_grad=False)
            set_eps(network, target.eps)

        def losses(batch: HeadBatch) -> list[Tensor]:
            places, _ = ahead(batch, 1)
            with torch.no_grad():
                teacher = linear(batch.states[texts.depth][places], texts.lm_head).softmax(-1)
            return [soft_loss(linear(found, texts.lm_head), teacher) for found in predictions(both, batch, gate)]

        yield from trained(both, texts, losses, HeadTraining(epochs=8, rate=2e-3))
        yield _measured(both, texts, gate)
        return {**both[0].state_dict(), "rms_norm_eps": torch.tensor(target.eps, dtype=torch.float64)}

    @torch.inference_mode()
    def drafted(self, lm: Lane, budget) -> Iterator:
        tree, early = new_tree(lm, self), lm.exit(gate_of(lm.depth))
        if not self.depth:
            return tree
        yield from self._trajectories(lm)

        def level(rows, leaves, number):
            slow = [early.inputs[layer][-1:] for layer in range(early.layer + 1)]
            logits = lm.read_out(self.network(slow))
            added = independent(lm, tree, lm.own_rows(logits, tree, leaves[0]), leaves[0], 1)
            return [] if added and float(logits.softmax(-1)[0, tree.tokens[added[0]]]) < self.tau else added

        yield from grow(lm, early, tree, min(self.depth, budget), level)
        return tree

    def _trajectories(self, lm: Lane) -> Iterator[Figure]:
        """How near both residuals of the last token that the target has read are to its last one, layer by layer."""
        states = lm.target.states
        layers = [states.of(layer, states.length - 1) for layer in range(len(self.network.acc) + 1)]
        if not len(layers[0]):
            return
        end = states.of(lm.depth, states.length - 1)
        rows = {"residual": layers, "accelerated": self.network.path(layers)}
        values = [[float(cosine_similarity(self.network.norm(row), end)[0]) for row in path] for path in rows.values()]
        columns = [f"after {layer}" for layer in range(len(layers))]
        yield Figure(
            "matrix", "cosine to the last hidden state, by layer", {"rows": list(rows), "columns": columns,
                                                                    "values": values}
        )


def gate_of(depth: int) -> int:
    """The layers before the gate."""
    return max(1, round(depth / 2))


def predictions(both: ModuleList, batch: HeadBatch, gate: int) -> list[Tensor]:
    """Inputs of the lm_head [n, width] where the target wrote the next token: of the adapters, and of the probe."""
    places, _ = ahead(batch, 1)
    slow = [batch.states[layer][places] for layer in range(gate + 1)]
    return [both[0](slow), both[1]([slow[-1], slow[-1]])]


@torch.no_grad()
def _measured(both: ModuleList, texts: HeadTexts, gate: int) -> Note:
    """How often the most probable token is right, beside the probe and the residual as it is."""
    counts = RankCounts(3, 1)
    for batch in texts.held_out():
        places, labels = ahead(batch, 1)
        untouched = both[0].norm(batch.states[gate][places])
        for number, found in enumerate([*predictions(both, batch, gate), untouched]):
            counts.add(number, ranks(found, texts.lm_head, labels[places]))
    fast, probe, lens = counts.shares[:, 0].tolist()
    return Note(
        f"Held-out texts: the most probable token after {gate} layers is right in {fast:.1%} of the cases with the "
        f"accelerated residual, in {probe:.1%} with a probe of the same size, and in {lens:.1%} without either."
    )
