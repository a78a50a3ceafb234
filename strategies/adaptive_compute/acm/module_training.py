"""Training of adaptive computation modules in three phases: learners, gates one by one, gates together.

Only the output weights of the learners are trained, so that a file holds a third of the feed-forward networks. The
phases are those of the paper; the last trains the gates alone, so that all budgets share the learners.
"""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import gumbel_softmax, nll_loss, silu

from playground.algorithms.adaptive_compute.policy_training import distillation, held_out_mean
from playground.algorithms.draft_heads.head_training import HeadTraining, trained
from playground.contract import LayerChoices, LayerSteps, SharedFeedForward
from playground.events import Figure, Note
from strategies.adaptive_compute.acm.gates import Gate

BUDGETS = (0.25, 0.4)
RATIO = 1.2  # errors of k and k + 1 learners up to which k are enough
TEMPERATURE = 0.8  # of the Gumbel-softmax
NEAR_BUDGET, EVEN, DIVERSE = 4.0, 0.05, 0.05  # weights of the losses beside the divergence; the first is larger here


class Learners(nn.Module):
    """The learners of all layers: fixed gate and up weights in the order of the channels, trained output weights."""

    def __init__(self, parts, order: Tensor, count: int):
        super().__init__()
        self.count, self.order = count, order
        picked = [(gate[own], up[own], down[:, own]) for own, (gate, up, down) in
                  zip(order, map(parts.ffn_projections, range(parts.depth)))]
        gates, ups, downs = ([weight.detach().clone().float() for weight in each] for each in zip(*picked))
        self._first = list(zip(gates, ups))
        self.down = nn.Parameter(torch.stack(downs))

    def prefixes(self, layer: int, normed: Tensor) -> Tensor:
        """Outputs of the first 0, 1, ... learners, [count + 1, ..., d]."""
        gate, up = self._first[layer]
        channels = silu(normed @ gate.T) * (normed @ up.T)
        pieces = zip(channels.chunk(self.count, -1), self.down[layer].chunk(self.count, 1))
        each = torch.stack([piece @ down.T for piece, down in pieces])
        return torch.cat([torch.zeros_like(each[:1]), each.cumsum(0)])


class Inputs(LayerSteps):
    """Notes what the feed-forward networks read and add at the tokens of a text."""

    def __init__(self, real: Tensor):
        self._real, self.seen = real, []

    def feed_forward(self, layer, normed, own):
        added = own(normed)
        self.seen.append((normed[self._real], added[self._real]))
        return added


class SoftModules(LayerSteps):
    """Every token runs the number of learners its gate draws, with straight-through gradients."""

    def __init__(self, learners: Learners, gates: nn.ModuleList, real: Tensor, draws: bool):
        self._learners, self._gates, self._real, self._draws = learners, gates, real, draws
        self.chosen: list[Tensor] = []  # by layer, one-hot [tokens, count + 1]

    def feed_forward(self, layer, normed, own):
        scores = self._gates[layer](normed)
        if self._draws:
            picked = gumbel_softmax(scores, TEMPERATURE, hard=True)
        else:
            picked = nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).float()
        self.chosen.append(picked[self._real])
        return (self._learners.prefixes(layer, normed) * picked.movedim(-1, 0)[..., None]).sum(0)


class Contributions(LayerChoices):
    """Sums how strongly each channel is active, [layers, channels]."""

    def __init__(self, depth: int):
        self.sums: list[Tensor | float] = [0.0] * depth

    def feed_forwards(self, layer, hidden, full):
        return [SharedFeedForward(None, CountedChannels(full, self, layer))]


class CountedChannels:
    """A feed-forward network that adds its activations to a `Contributions`."""

    def __init__(self, part, counts: Contributions, layer: int):
        self._part, self._counts, self._layer, self.weights = part, counts, layer, part.weights

    def __call__(self, hidden: Tensor) -> Tensor:
        sums = self._counts.sums
        sums[self._layer] = sums[self._layer] + self._part.activations(hidden).abs().float().sum(0)
        return self._part(hidden)


def train_modules(texts, count: int) -> Iterator:
    """All phases; yields figures and notes, and returns the weights by name."""
    learners = Learners(texts.parts, channel_orders(texts), count)
    # before any training, so that a resumed one draws the same
    apart = nn.ModuleList(Gate(texts.parts.width, count) for _ in range(texts.parts.depth))
    steps = HeadTraining(epochs=2, rate=1e-3, names=("error of the learners",))
    yield from trained(learners, texts.phase("learners"), partial(learner_losses, texts, learners), steps)
    learners.requires_grad_(False)
    errors = held_out_mean(texts, lambda batch: module_errors(texts, learners, batch))
    yield Note("Relative error of 0, 1, ... learners on held-out texts: " + " ".join(f"{e:.3f}" for e in errors))
    steps = HeadTraining(epochs=1, rate=1e-2, names=("loss of the gates",))
    yield from trained(apart, texts.phase("gates"), partial(label_losses, texts, learners, apart), steps)
    found = {"order": learners.order.to(torch.int16), "down": learners.down.detach().half()}
    for budget in BUDGETS:
        gates = yield from train_together(texts, learners, apart, budget)
        found |= stacked(gates, str(budget))
    return found


def channel_orders(texts) -> Tensor:
    """Channels of every layer by mean activation times the norm of their output weights, largest first."""
    sums = Contributions(texts.parts.depth)
    for ids in texts.texts:
        texts.read(ids, sums)
    sizes = [total * texts.parts.output_norms(layer).float() for layer, total in enumerate(sums.sums)]
    return torch.stack([size.argsort(descending=True, stable=True).cpu() for size in sizes])


def inputs_of(texts, batch) -> list[tuple[Tensor, Tensor]]:
    """What each feed-forward network reads and adds, [tokens, d] each."""
    steps = Inputs(batch.real)
    with torch.no_grad():
        texts.forward(batch.ids, steps)
    return steps.seen


def module_errors(texts, learners: Learners, batch) -> Tensor:
    """Squared error of 0, 1, ... learners, relative to that of none, mean over layers, [count + 1]."""
    each = [errors_of(learners, layer, *seen).mean(1) for layer, seen in enumerate(inputs_of(texts, batch))]
    return torch.stack([errors / errors[0] for errors in each]).mean(0)


def errors_of(learners: Learners, layer: int, normed: Tensor, added: Tensor) -> Tensor:
    """Squared error of 0, 1, ... learners for every token, [count + 1, tokens]."""
    return (learners.prefixes(layer, normed) - added).square().sum(-1)


def learner_losses(texts, learners: Learners, batch) -> list[Tensor]:
    """Phase one: every number of learners comes close to the feed-forward network."""
    return [module_errors(texts, learners, batch)[1:].mean()]


def enough(errors: Tensor, ratio: float = RATIO) -> Tensor:
    """Label of each token: the smallest k whose error is less than `ratio` times that of k + 1, from [count + 1, n]."""
    helps_little = errors[:-1] / errors[1:].clamp(min=1e-12) < ratio
    none = torch.ones_like(helps_little[:1])
    return torch.cat([helps_little, none]).int().argmax(0)  # the first; all learners if each of them helps


def label_losses(texts, learners: Learners, gates: nn.ModuleList, batch) -> list[Tensor]:
    """Phase two: every gate by itself."""
    losses = []
    for layer, (normed, added) in enumerate(inputs_of(texts, batch)):
        labels = enough(errors_of(learners, layer, normed, added))
        losses.append(nll_loss(gates[layer](normed).log_softmax(-1), labels))
    return [torch.stack(losses).mean()]


def train_together(texts, learners: Learners, apart: nn.ModuleList, budget: float) -> Iterator:
    """Phase three for one budget; returns its gates."""
    gates = nn.ModuleList(Gate(texts.parts.width, learners.count) for _ in range(texts.parts.depth))
    gates.load_state_dict(apart.state_dict())
    names = ("divergence", "distance to the budget", "evenness", "diversity")
    steps = HeadTraining(epochs=2, rate=1e-2, names=names)
    losses = partial(joint_losses, texts, (learners, gates), budget)
    yield from trained(gates, texts.phase(f"budget{budget}"), losses, steps)

    def measure(batch) -> Tensor:
        modules = SoftModules(learners, gates, batch.real, draws=False)
        return torch.stack([distillation(texts, batch, modules), spent(modules.chosen)])

    divergence, share = held_out_mean(texts, measure).tolist()
    yield Note(f"Budget {budget}: {share:.3f} of the learners run on held-out texts, KL divergence {divergence:.4f}.")
    data = {"x": round(100 * share), "axis": "percent", "series": {"KL": divergence}}
    yield Figure("scalar", "divergence of the gated modules", data)
    return gates


def joint_losses(texts, networks: tuple[Learners, nn.ModuleList], budget: float, batch) -> list[Tensor]:
    """Phase three: divergence, distance to the budget, and terms that keep the gates from choosing alike."""
    modules = SoftModules(*networks, batch.real, draws=True)
    divergence, chosen = distillation(texts, batch, modules), modules.chosen
    return [divergence, NEAR_BUDGET * (spent(chosen) - budget).abs(), EVEN * -evenness(chosen),
            DIVERSE * -diversity(chosen)]


def numbers(chosen: list[Tensor]) -> Tensor:
    """Share of the learners that each token runs, [layers, tokens]."""
    picked = torch.stack(chosen)
    return picked @ torch.linspace(0, 1, picked.shape[-1])


def spent(chosen: list[Tensor]) -> Tensor:
    """Mean share of the learners."""
    return numbers(chosen).mean()


def evenness(chosen: list[Tensor]) -> Tensor:
    """Normalised entropy of how often each number of learners is chosen, mean over layers."""
    shares = torch.stack(chosen).mean(1).clamp(min=1e-6)
    return -(shares * shares.log()).sum(-1).mean() / torch.log(torch.tensor(float(shares.shape[-1])))


def diversity(chosen: list[Tensor]) -> Tensor:
    """How much the tokens differ in what they run, mean over layers."""
    return numbers(chosen).std(1, correction=0).mean()


def stacked(gates: nn.ModuleList, budget: str) -> dict[str, Tensor]:
    """Weights of the gates of all layers by name, [layers, ...]."""
    states = [gate.state_dict() for gate in gates]
    return {f"{budget}.{name}": torch.stack([state[name] for state in states]).half() for name in states[0]}
