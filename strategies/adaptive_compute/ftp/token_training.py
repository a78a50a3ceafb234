"""FTP's genetic search for the share of skipped tokens of each block, and the training of its router."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from playground.algorithms.adaptive_compute.policy_training import TextBatch, distillation, held_out_mean
from playground.algorithms.draft_heads.head_training import HeadTraining, trained
from playground.contract import LayerSteps
from playground.events import Figure, Note
from strategies.adaptive_compute.ftp.token_router import TokenRouter, features, kept_tokens, static_ranking

RATES = (0.1, 0.2, 0.3)
POPULATION, SURVIVORS, GENERATIONS = 10, 3, 5
STEP = 0.1  # share that a mutation moves from one block to another
RECENT = 4  # last tokens that are kept
GUIDE, SPARSITY = 0.5, 1.0  # weights of the losses beside the divergence
MISSING = 2.0  # factor of the sparsity loss where more tokens run than the schedule says


class PrunedBlocks(LayerSteps):
    """Blocks that skip tokens of whole texts, with gradients for the router through the tokens that run."""

    reads_attention = True

    def __init__(self, shares: list[float], real: Tensor, router: TokenRouter | None = None):
        self._shares, self._real, self._router = shares, real, router
        self._received: Tensor | None = None  # [texts, n]
        self._running = real
        self.guides: list[tuple[Tensor, Tensor]] = []  # logits of the router, and the static choice, of real tokens

    def layer(self, layer, hidden, run):
        share = self._shares[layer]
        if self._received is None or not share:
            self._running = self._real
            return run(hidden)
        rows = [self._choice(text, share) for text in range(len(hidden))]
        self._running = torch.stack([kept for kept, _ in rows])
        weight = torch.stack([gradient for _, gradient in rows])[..., None]  # one where a token runs, zero elsewhere
        return weight * run(hidden, self._running) + (1 - weight) * hidden

    def _choice(self, text: int, share: float) -> tuple[Tensor, Tensor]:
        """Which tokens of a text run, bool [n], and the same as numbers with straight-through gradients."""
        real = self._real[text]
        count = int(real.sum())
        received = self._received[text, :count]
        scores, kept = static_ranking(received, RECENT), torch.zeros_like(real)
        if self._router is None:
            kept[:count] = kept_tokens(scores, share)
            return kept, kept.to(received.dtype)
        logits = self._router(features(received, share))
        free = ~scores.isinf()
        self.guides.append((logits[free], kept_tokens(scores, share)[free].float()))
        kept[:count] = kept_tokens(torch.where(free, logits.detach(), scores), share)
        soft = torch.sigmoid(logits).where(free, torch.ones(()))
        through = torch.nn.functional.pad(soft, (0, len(real) - count))
        return kept, kept.to(soft.dtype) + through - through.detach()

    def attended(self, layer, weights, seen):
        runs = self._running.to(weights.dtype)
        queries = (seen.to(weights.dtype) * runs[:, :, None]).sum(1).clamp(min=1)
        received = (weights * runs[:, :, None]).sum(1) / queries
        before = torch.zeros_like(received) if self._received is None else self._received
        self._received = torch.where(self._running, received, before)


def scaled(shares: list[float], mean: float) -> list[float]:
    """Shares with this mean in the same proportions, each at most 1."""
    total = sum(shares)
    return [min(1.0, share * mean * len(shares) / total) if total else 0.0 for share in shares]


def train_ftp(texts, seed: int) -> Iterator:
    """Search a schedule for every rate, then train the router on all of them; returns both by name."""
    few = next(iter(texts.held_out()))
    found: dict[str, list[float]] = {}
    for rate in RATES:
        found[str(rate)] = yield from search(partial(pruned_divergence, texts, few), texts.parts.depth, rate, seed)
    router = TokenRouter()
    names = ("divergence", "static choice", "sparsity")
    steps = HeadTraining(epochs=1, rate=1e-3, names=names)
    losses = partial(router_losses, texts, router, list(found.values()))
    yield from trained(router, texts.phase("router"), losses, steps)
    router.requires_grad_(False)
    for rate, shares in found.items():
        each = [held_out_mean(texts, lambda batch, used=used, shares=shares: distillation(
            texts, batch, PrunedBlocks(shares, batch.real, used))) for used in (None, router)]
        yield Note(f"Mean share {rate} skipped: KL divergence {each[0]:.4f} by attention, {each[1]:.4f} by the router.")
    schedules = {f"schedule.{rate}": torch.tensor(shares) for rate, shares in found.items()}
    return schedules | {f"router.{name}": weight.half() for name, weight in router.state_dict().items()}


def pruned_divergence(texts, batch: TextBatch, shares: list[float]) -> float:
    """Divergence of the network whose blocks skip these shares of tokens by the static ranking."""
    with torch.no_grad():
        return float(distillation(texts, batch, PrunedBlocks(shares, batch.real)))


def search(fitness, depth: int, rate: float, seed: int) -> Iterator:
    """The best schedule of a genetic search at a mean share; the first block never skips. Yields a figure each time."""
    chance = Random(f"{seed} {rate}")
    population = [random_schedule(depth, rate, chance) for _ in range(POPULATION)]
    values = {tuple(shares): fitness(shares) for shares in population}
    for generation in range(GENERATIONS):
        parents = sorted(values, key=values.__getitem__)[:SURVIVORS]
        yield Figure("scalar", "divergence of the best schedule",
                     {"x": generation, "series": {f"r = {rate}": values[parents[0]]}})
        children = [moved(crossed(*chance.sample(parents, 2), rate, chance), chance)
                    for _ in range(POPULATION - SURVIVORS)]
        values = {parent: values[parent] for parent in parents} | {tuple(each): fitness(each) for each in children}
    return list(min(values, key=values.__getitem__))


def random_schedule(depth: int, rate: float, chance: Random) -> list[float]:
    return [0.0, *rescaled([chance.random() for _ in range(depth - 1)], rate * depth / (depth - 1))]


def rescaled(shares: list[float], mean: float) -> list[float]:
    """Shares of at most 0.9 with this mean, which is at most 0.9."""
    for _ in range(len(shares)):
        shares = [min(0.9, share) for share in scaled(shares, mean)]
    return shares


def crossed(one: tuple[float, ...], other: tuple[float, ...], rate: float, chance: Random) -> list[float]:
    """A schedule with the share of either parent in every block, rescaled to the same mean."""
    mixed = [chance.choice(pair) for pair in zip(one[1:], other[1:])]
    depth = len(one)
    return [0.0, *rescaled(mixed, rate * depth / (depth - 1))]


def moved(shares: list[float], chance: Random) -> list[float]:
    """A mutation: a part of one block's share goes to another."""
    first, second = chance.sample(range(1, len(shares)), 2)
    part = min(shares[first], 0.9 - shares[second], STEP * chance.random())
    return [share + part * ((block == second) - (block == first)) for block, share in enumerate(shares)]


def router_losses(texts, router: TokenRouter, schedules: list[list[float]], batch: TextBatch) -> list[Tensor]:
    """Divergence, agreement with the static choice, and the distance to the schedule, larger if too many run."""
    shares = schedules[int(batch.ids.sum()) % len(schedules)]  # the same at every repetition
    steps = PrunedBlocks(shares, batch.real, router)
    divergence = distillation(texts, batch, steps)
    logits, wanted = (torch.cat(each) for each in zip(*steps.guides))
    excess = torch.sigmoid(logits).mean() - wanted.mean()
    sparsity = excess.abs() * (MISSING if float(excess) > 0 else 1.0)
    return [divergence, GUIDE * binary_cross_entropy_with_logits(logits, wanted), SPARSITY * sparsity]
