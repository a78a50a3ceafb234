"""Training of adapters as experts, one for each task, and of PHATGOOSE's gate for each of them.

The model is frozen. An adapter learns from the answers of its task alone; then it is frozen as well, and a gate learns
from the same answers which inputs each matrix wants it for.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, silu

from playground.algorithms.adaptive_compute.adapter_experts import MATRICES
from playground.algorithms.adaptive_compute.policy_training import TextBatch, held_out_mean, next_token_loss
from playground.algorithms.draft_heads.head_training import HeadTraining, trained
from playground.contract import LayerSteps, make
from playground.events import Note

RANK = 4
ADAPTER_STEPS, GATE_STEPS = 120, 60  # at least, in whole passes over the texts
ROUTERS = ("merged_adapters", "arrow", "phatgoose")  # that are compared after the training
TRAINING = HeadTraining(rate=5e-3, warmup=0.06, names=("loss of the answers",))


class TaskAdapter(nn.Module):
    """Low-rank products for the matrices of all feed-forward networks, zero at first."""

    def __init__(self, parts, rank: int = RANK):
        super().__init__()
        shapes = [[tuple(own.shape) for own in parts.ffn_projections(layer)] for layer in range(parts.depth)][0]
        self.a = nn.ParameterDict({name: torch.randn(parts.depth, rank, inputs) / inputs ** 0.5
                                   for name, (_, inputs) in zip(MATRICES, shapes)})
        self.b = nn.ParameterDict({name: torch.zeros(parts.depth, outputs, rank)
                                   for name, (outputs, _) in zip(MATRICES, shapes)})

    def added(self, name: str, layer: int, rows: Tensor) -> Tensor:
        """B A x / rank"""
        return rows @ self.a[name][layer].T @ self.b[name][layer].T / self.a[name].shape[1]


class AdapterGates(nn.Module):
    """A vector for each matrix that an adapter changes."""

    def __init__(self, adapter: TaskAdapter):
        super().__init__()
        self.v = nn.ParameterDict({name: torch.zeros(a.shape[0], a.shape[2]) for name, a in adapter.a.items()})

    def __call__(self, name: str, layer: int, rows: Tensor) -> Tensor:
        """Rows [..., in] times the sigmoid of how well the vector fits each of them."""
        return rows * torch.sigmoid(rows @ self.v[name][layer])[..., None]


class AdaptedLayers(LayerSteps):
    """The frozen network with an adapter, which reads its inputs through gates if there are some."""

    def __init__(self, parts, adapter: TaskAdapter, gates: AdapterGates | None = None):
        self._matrices = [dict(zip(MATRICES, (weight.detach().clone().float() for weight in
                                              parts.ffn_projections(layer)))) for layer in range(parts.depth)]
        self.adapter, self.gates = adapter, gates

    def feed_forward(self, layer, normed, own):
        product = partial(self._product, layer)
        return product("down", silu(product("gate", normed)) * product("up", normed))

    def _product(self, layer: int, name: str, rows: Tensor) -> Tensor:
        read = rows if self.gates is None else self.gates(name, layer, rows)
        return linear(rows, self._matrices[layer][name]) + self.adapter.added(name, layer, read)


def train_experts(texts, names) -> Iterator:
    """Yields figures and notes; returns adapters and gates of all experts by name, in half precision.

    texts: of each expert's task, as `texts.in_new_form(name)`.
    """
    found: dict[str, Tensor] = {}
    for name in names:
        found |= yield from _trained_expert(texts.in_new_form(name), name)
    yield compared(texts, found, names)
    return found


def _trained_expert(texts, name: str) -> Iterator:
    adapter = TaskAdapter(texts.parts)
    steps = AdaptedLayers(texts.parts, adapter)
    before = float(held_out_mean(texts, partial(answer_loss, texts, LayerSteps())))
    yield from trained(adapter, texts.phase(name), lambda batch: [answer_loss(texts, steps, batch)],
                       _passes(texts, ADAPTER_STEPS))
    after = float(held_out_mean(texts, partial(answer_loss, texts, steps)))
    yield Note(f"{name}: {before:.3f} nats per token of held-out answers before, {after:.3f} with the adapter.")
    for weight in adapter.parameters():
        weight.requires_grad_(False)
    gates = AdapterGates(adapter)
    gated = AdaptedLayers(texts.parts, adapter, gates)
    yield from trained(gates, texts.phase(f"{name}-gates"), lambda batch: [answer_loss(texts, gated, batch)],
                       _passes(texts, GATE_STEPS))
    return stored(name, adapter, gates)


def _passes(texts, steps: int) -> HeadTraining:
    """A training of whole passes over the texts that has so many steps."""
    return replace(TRAINING, epochs=-(-steps // sum(1 for _ in texts.batches(0))))


def answer_loss(texts, steps: LayerSteps, batch: TextBatch) -> Tensor:
    """Mean cross-entropy of the tokens of the answers, in nats."""
    return next_token_loss(texts.forward(batch.ids, steps), batch)


def stored(expert: str, adapter: TaskAdapter, gates: AdapterGates) -> dict[str, Tensor]:
    """Weights of an expert by name, the scale within B."""
    scales = {name: a.shape[1] for name, a in adapter.a.items()}
    tensors = {f"{name}.{part}": own for part, table in (("a", adapter.a), ("gate", gates.v))
               for name, own in table.items()} | {f"{name}.b": b / scales[name] for name, b in adapter.b.items()}
    return {f"{expert}.{name}": own.detach().half().contiguous() for name, own in tensors.items()}


@torch.inference_mode()
def compared(texts, weights: Mapping[str, Tensor], tasks) -> Note:
    """Loss of held-out answers, mean over the tasks: with no expert, the task's own, and all, averaged or routed."""
    own = {task: texts.in_new_form(task) for task in tasks}
    found = {"without experts": [], "with the task's own": [], **{name: [] for name in ROUTERS}}
    for task, held in own.items():
        found["without experts"].append(_routed_loss(held, make(ROUTERS[0]), {}))
        found["with the task's own"].append(_routed_loss(held, make(ROUTERS[0], only=task), weights))
        for name in ROUTERS:
            found[name].append(_routed_loss(held, make(name), weights))
    return Note("Nats per token of held-out answers, mean over the tasks: "
                + ", ".join(f"{sum(losses) / len(losses):.3f} {way}" for way, losses in found.items()) + ".")


def _routed_loss(texts, policy, weights: Mapping[str, Tensor]) -> float:
    """Mean cross-entropy of the tokens of held-out answers under a policy, in nats."""
    policy.begin(texts.parts, weights)
    total, count = 0.0, 0
    for batch in texts.held_out():
        for ids, real in zip(batch.ids, batch.real):
            learned = real.nonzero()[:, 0]
            read = ids[:int(learned[-1]) + 1].tolist()
            logits = texts.read(read, policy.choices(list(range(len(read))), len(read)))
            total += float(cross_entropy(logits[learned - 1].float(), ids[learned].to(logits.device), reduction="sum"))
            count += len(learned)
    return total / count
