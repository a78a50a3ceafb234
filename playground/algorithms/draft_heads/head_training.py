"""Training of a draft head on texts that its target wrote: seeded, and resumed where it was interrupted.

The target stays as it is; its embeddings and its lm_head are used by the head, and are not part of it.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy, embedding, linear

from playground.events import Figure, Note

BETAS, CLIP = (0.9, 0.95), 0.5
REPORT = 20  # measurements in a training


class HeadBatch(NamedTuple):
    """Texts of the target with its hidden states, padded at the end."""

    ids: Tensor  # [texts, tokens]
    written: Tensor  # bool [texts, tokens]: the target wrote this token
    states: dict[int, Tensor]  # inputs of layers [texts, tokens, hidden_size]; the depth: inputs of the lm_head
    share: float = 0.0  # of the training that is done
    chance: torch.Generator | None = None  # for random choices of a training; held-out texts have none


class FrozenTarget(Protocol):
    """The target's own network, through which gradients flow to the inputs of further rows."""

    heads: int  # query heads of a layer

    def hidden(self, ids: Tensor, rows: Tensor, positions: Tensor, seen: Tensor, layer: int = 0) -> Tensor:
        """Inputs of the lm_head [texts, n, hidden_size] for rows [texts, n, hidden_size] that enter at a layer.

        Their positions are `positions` [texts, n], after texts `ids` [texts, tokens]; `seen` [texts, n, tokens + n]
        says which tokens and rows each of them attends to.
        """

    def last_cache(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value states of the last layer, [texts, kv_heads, tokens, head_dim] each, for tokens at positions
        [texts, tokens].
        """

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n, head_dim] of the target's rotary embedding at positions [n], as far as it is known."""


class FirstLayers(NamedTuple):
    """The first decoder layers of a target of the Llama family, for a drafter that starts as a copy of them."""

    layers: list[dict[str, Tensor]]  # weights by the library's names
    norm: Tensor  # weight of the final norm, [hidden_size]
    head_dim: int
    theta: float  # base of the rotary embedding
    eps: float  # of the norms


class HeadTexts(Protocol):
    """Training texts of one target (`training.head_fitting` makes them)."""

    width: int
    depth: int  # decoder layers of the target
    context: int  # longest text of the target
    embeddings: Tensor  # [V, hidden_size]
    lm_head: Tensor  # [V, hidden_size]
    last_layer: dict[str, Tensor]  # weights of the target's last decoder layer, by the names of its architecture
    seed: int
    epochs: int  # passes over the texts in place of a head's own number; 0: its own number
    frozen: FrozenTarget

    def first_layers(self, count: int) -> FirstLayers:
        """Copies of the target's first layers, in float32. Raises Refusal if it is not of the Llama family."""

    def batches(self, epoch: int) -> Iterator[HeadBatch]:
        """The training texts in an order of this epoch."""

    def held_out(self) -> Iterator[HeadBatch]:
        """Texts that are not trained on."""

    def fitted(self, name: str) -> dict[str, Tensor] | None:
        """The weights of another head, if one is fitted to this target."""

    def resumed(self) -> dict | None:
        """What was saved last, if the training was interrupted."""

    def save(self, state: dict) -> None:
        """Save a state to resume from."""

    def progress(self, share: float, text: str) -> None:
        """Show how far the training is."""


@dataclass(frozen=True)
class HeadTraining:
    """Hyperparameters of a training.

    The heads of the papers read tens of thousands of texts once or a few times. Those trained here read some thousand
    short texts, and their accuracy on held-out texts grows for about ten passes.
    """

    epochs: int = 12
    rate: float = 1e-3  # cosine decay to a tenth
    warmup: float = 0.05  # share of the steps
    decay: float = 0.0  # weight decay
    noise: float = 0.0  # half-width of uniform noise on the target's hidden states
    names: tuple[str, ...] = ()  # of the losses, if they are not one for each depth


Losses = Callable[[HeadBatch], list[Tensor]]
"""The loss of each depth, whose sum is trained."""


def trained(head: Module, texts: HeadTexts, losses: Losses, training: HeadTraining) -> Iterator[Figure | Note]:
    """Train a head in place, yielding its loss at each depth.

    It goes on after the last epoch that was saved if the training was interrupted.
    """
    optimizer = torch.optim.AdamW(head.parameters(), training.rate, BETAS, weight_decay=training.decay)
    first, epochs = _resume(head, optimizer, texts.resumed()), texts.epochs or training.epochs
    total = epochs * (per_epoch := sum(1 for _ in texts.batches(0)))
    if first:
        yield Note(f"Resumed after pass {first} of {epochs} over the texts.")
    for epoch in range(first, epochs):
        recent: list[list[float]] = []
        chance = torch.Generator().manual_seed(texts.seed * 1000 + epoch)  # the same after an interruption
        torch.manual_seed(texts.seed * 1000 + epoch)  # of dropout
        for number, batch in enumerate(texts.batches(epoch)):
            step = epoch * per_epoch + number
            for group in optimizer.param_groups:
                group["lr"] = training.rate * _schedule(step / total, training.warmup)
            batch = batch._replace(share=step / total, chance=chance)
            found = losses(_noisy(batch, training.noise, chance))
            _step(head, optimizer, torch.stack(found).sum())
            recent.append([float(loss.detach()) for loss in found])
            texts.progress(step / total, f"Epoch {epoch + 1} of {epochs}, step {step + 1} of {total}")
            if step % max(1, total // REPORT) == 0:
                yield _curve(step, [sum(column) / len(recent) for column in zip(*recent)], training.names)
                recent = []
        texts.save({"epoch": epoch + 1, "head": head.state_dict(), "optimizer": optimizer.state_dict()})
    head.eval()


def _resume(head: Module, optimizer: torch.optim.Optimizer, saved: dict | None) -> int:
    """The epoch to begin with."""
    if not saved:
        return 0
    head.load_state_dict(saved["head"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["epoch"]


def _schedule(share: float, warmup: float) -> float:
    """Factor of the learning rate after a share of the steps."""
    return min(1.0, (share + 1e-9) / warmup if warmup else 1.0) * (0.55 + 0.45 * math.cos(math.pi * share))


def _step(head: Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(head.parameters(), CLIP)
    optimizer.step()


def _noisy(batch: HeadBatch, half: float, chance: torch.Generator) -> HeadBatch:
    if not half:
        return batch
    noise = {layer: torch.rand(rows.shape, generator=chance) * 2 - 1 for layer, rows in batch.states.items()}
    return batch._replace(states={layer: rows + noise[layer] * half for layer, rows in batch.states.items()})


def _curve(step: int, values: list[float], names: tuple[str, ...]) -> Figure:
    labels = names or [f"loss at depth {depth}" for depth in range(1, len(values) + 1)]
    series = dict(zip(labels, values))
    return Figure("scalar", "training loss", {"x": step, "series": series})


def ahead(batch: HeadBatch, count: int) -> tuple[Tensor, Tensor]:
    """Positions [texts, tokens] whose `count`-th next token the target wrote, and that token.

    The last `count` positions of a text have none.
    """
    written = torch.zeros_like(batch.written)
    labels = torch.zeros_like(batch.ids)
    written[:, :-count], labels[:, :-count] = batch.written[:, count:], batch.ids[:, count:]
    return written, labels


def teacher(texts: HeadTexts, batch: HeadBatch, count: int) -> Tensor:
    """The target's distributions [n, V] of the `count`-th next token, where it wrote that token."""
    places, _ = ahead(batch, count)
    with torch.no_grad():
        return linear(batch.states[texts.depth].roll(1 - count, 1)[places], texts.lm_head).softmax(-1)


def token_loss(states: Tensor, lm_head: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of labels [n] for states [n, hidden_size]; 0 for none."""
    return cross_entropy(linear(states, lm_head), labels) if len(labels) else states.sum() * 0


def ranks(states: Tensor, lm_head: Tensor, labels: Tensor) -> Tensor:
    """The rank of each label [n] among the logits of states [n, hidden_size], 0 for the largest."""
    logits = linear(states, lm_head)
    return (logits > logits.gather(1, labels[:, None])).sum(1)


def embedded(texts: HeadTexts, ids: Tensor) -> Tensor:
    """Input embeddings [..., hidden_size] of token ids."""
    return embedding(ids, texts.embeddings)


class RankCounts:
    """How often the right token had each rank, by depth."""

    def __init__(self, depths: int, kept: int):
        self.counts, self.totals = torch.zeros(depths, kept), torch.zeros(depths)

    def add(self, depth: int, found: Tensor) -> None:
        """Ranks [n] at a depth, from 0."""
        self.counts[depth] += torch.bincount(found, minlength=self.counts.shape[1])[:self.counts.shape[1]]
        self.totals[depth] += len(found)

    @property
    def shares(self) -> Tensor:
        """[depths, ranks]"""
        return self.counts / self.totals.clamp(min=1)[:, None]

    def note(self) -> Note:
        first = ", ".join(f"{share:.1%}" for share in self.shares[:, 0].tolist())
        return Note(f"Held-out texts: the most probable token is right at depth 1, 2, ... in {first} of the cases.")


Guesses = Callable[[HeadBatch], Iterable[tuple[Tensor, Tensor]]]
"""For each depth the inputs of the lm_head [n, hidden_size] and the right tokens [n]."""


@torch.no_grad()
def measured(texts: HeadTexts, depths: int, guesses: Guesses, kept: int = 10) -> RankCounts:
    """How often the right token has each of the first `kept` ranks in the held-out texts."""
    counts = RankCounts(depths, kept)
    for batch in texts.held_out():
        for depth, (states, labels) in enumerate(guesses(batch)):
            counts.add(depth, ranks(states, texts.lm_head, labels))
    return counts
