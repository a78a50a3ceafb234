"""Comparative prefix-tuning: learnt key and value states, with which the better one of two programs is likelier."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from playground.algorithms.differentiable_llama import DifferentiableLlama
from playground.algorithms.kv_cache.cache_training import Descent, descend
from playground.algorithms.kv_cache.prefix_before_text import (
    AttendsPrefix,
    States,
    after_states,
    padded,
    states_before,
)
from playground.algorithms.programs.meaningful_names import changed_lines, in_lines, with_meaningful_names
from playground.contract import knob
from playground.errors import Refusal
from playground.events import Figure, Note

INSTRUCTION = "Write clean code with meaningful names."
VECTORS = 8  # of the prefix
MARGIN, RANK_WEIGHT, KL_WEIGHT = 0.2, 1.0, 1.0  # nats per token; of the losses
TOGETHER = 4  # pairs of a training step
HELD_OUT = 24  # pairs, and other texts, that are not trained on
DESCENT = Descent("loss of the pairs", steps=60, rate=1e-1, every=10, clip=1.0)


class ProgramPair(NamedTuple):
    """Two texts with the same beginning, as token ids, and which of their tokens are compared, True or False each."""

    good: list[int]
    bad: list[int]
    good_mask: list[bool]
    bad_mask: list[bool]


class ComparativePrefix(AttendsPrefix):
    """Learnt key and value states stand before the text of every layer, and make programs with meaningful names
    likelier than the same programs with names of one letter.

    One prefix is trained for one property by pairs of nearly equal programs: the ranking loss asks that the mean
    log-probability of the tokens of lines that differ is higher for the better one by a margin of 0.2 nats, beside the
    ordinary loss of the better one, and the divergence from the model without prefix on lines that do not differ. The
    weights stay as they are. `python -m playground fit comparative_prefix` makes pairs of the programs of the small
    world, `x`, `i` and `w` renamed to `item`, `index` and `word`, and trains 8 positions of states, which begin as
    those of the words "Write clean code with meaningful names." Of 24 held-out pairs the bundled prefix makes the
    better one likelier in all, by 1.35 nats per compared token, where the model prefers its own short names in all, by
    4.05. It costs more than it should: lines that do not differ diverge by 0.071 nats, and texts with nothing to rename
    take 0.733 nats per token in place of 0.544, a perplexity 21 % higher. Without a fit, and with `prefix` off, nothing
    is added.
    The property is one that a rule can check; the authors grade code with a static analyser. The paper's loss is known
    from its abstract: its form, the compared tokens and the task are ours. Jiang et al. 2025, arXiv 2503.09020.
    """

    name, title, paper, sheet = (
        "comparative_prefix", "Comparative prefix", "2503.09020", "weights/comparative-prefix"
    )
    guarantee = ("collapses",)
    reconstruction, sure = True, "low"
    fitted_to_target, prefers_trained = True, True
    calibration_tasks, questions_per_task = ("programs", "records", "facts"), 120

    prefix: bool = knob(True, help="attend to the prefix that was fitted")

    def __post_init__(self):
        super().__post_init__()
        self._trained: dict[str, Tensor] = {}
        self._said = False

    def begin_fitted(self, weights):
        self._trained = dict(weights)

    def begin(self, parts):
        if self.prefix and self._trained:
            self.states = list(zip(self._trained["keys"], self._trained["values"]))

    def explain(self, prompt, layers):
        if not self._said:
            self._said = True
            size = f"{self.vectors} positions, {self.memory_bytes / 1e3:.1f} kB"
            yield Note(f"A prefix of {size} stands before the text." if self.states else
                       "No prefix: `python -m playground fit comparative_prefix` trains one.")
        yield from super().explain(prompt, layers)

    @classmethod
    def calibrate(cls, texts, seed: int) -> Iterator[Figure | Note]:
        """Train the prefix on pairs; returns keys and values [layers, kv_heads, n, head_dim]."""
        pairs, others = pairs_of(texts)
        if len(pairs) <= HELD_OUT:
            raise Refusal(f"{len(pairs)} texts have loop variables named x, i or w, and more than {HELD_OUT} are "
                          "needed: name more programs.", "texts")
        network = DifferentiableLlama(texts.parts)
        weights = first_states(network, texts)
        yield from descend(weights, pair_loss(network, weights, pairs[HELD_OUT:], seed), DESCENT, texts)
        yield Note(comparison(network, weights, pairs[:HELD_OUT], others[:HELD_OUT]))
        return {name: tensor.detach().half() for name, tensor in weights.items()}


# --- pairs ---

def pairs_of(texts) -> tuple[list[ProgramPair], list[list[int]]]:
    """Texts whose programs can be written better, with the better form, and the texts that have nothing to rename."""
    pairs, others = [], []
    for ids in texts.texts:
        before, written = texts.last_turn(ids)
        better = with_meaningful_names(written)
        if better == written:
            others.append(ids)
        else:
            pairs.append(pair_of(texts, before, better, written))
    return pairs, others


def pair_of(texts, before: list[int], better: str, worse: str) -> ProgramPair:
    """Both programs after the same tokens; compared are the tokens of the lines that differ."""
    lines = changed_lines(better.split("\n"), worse.split("\n"))
    ids = [texts.spell(text) for text in (better, worse)]
    masks = [in_lines([texts.piece(token) for token in own], changed) for own, changed in zip(ids, lines)]
    return ProgramPair(*([*before, *own] for own in ids), *([False] * len(before) + mask for mask in masks))


# --- training ---

def first_states(network: DifferentiableLlama, texts) -> dict[str, Tensor]:
    """States of the first words of the instruction, repeated if it is shorter than the prefix."""
    ids = texts.spell(INSTRUCTION)
    ids = (ids * VECTORS)[:VECTORS]
    with torch.no_grad():
        found = states_before(network, texts.parts, network.embed(torch.tensor(ids)))
    return {name: torch.stack(states).clone() for name, states in zip(("keys", "values"), zip(*found))}


def as_states(weights: dict[str, Tensor]) -> States:
    return list(zip(weights["keys"], weights["values"]))


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """Of each token after the first, [texts, m - 1], by logits [texts, m, V]."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def mean_over(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of values [texts, m] over the places that a mask marks, by text; 0 for a text without any."""
    return (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def masked(pairs: Sequence[ProgramPair], which: str) -> tuple[Tensor, Tensor, Tensor]:
    """The "good" or "bad" texts of pairs, padded: token ids, and of each token after the first, real and compared."""
    ids, real = padded([getattr(pair, which) for pair in pairs])
    compared = torch.zeros_like(real)
    for row, pair in enumerate(pairs):
        own = torch.tensor(getattr(pair, f"{which}_mask"))
        compared[row, :len(own)] = own
    return ids, real[:, 1:], compared[:, 1:]


def losses_of(network: DifferentiableLlama, prefix: States, pairs: Sequence[ProgramPair]) -> dict[str, Tensor]:
    """By pair, in nats per token: "lm", the loss of the better text; "gap", how much likelier its compared tokens are;
    "kl", the divergence from the model without prefix on the other tokens of the better text.
    """
    ids, real, compared = masked(pairs, "good")
    bad_ids, _, bad_compared = masked(pairs, "bad")
    logits = after_states(network, prefix, ids)
    logp, bad_logp = log_probabilities(logits, ids), log_probabilities(after_states(network, prefix, bad_ids), bad_ids)
    with torch.no_grad():
        plain = after_states(network, (), ids)[:, :-1].log_softmax(-1)
    divergence = kl_div(plain, logits[:, :-1].log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return {"lm": -mean_over(logp, real), "gap": mean_over(logp, compared) - mean_over(bad_logp, bad_compared),
            "kl": mean_over(divergence, real & ~compared)}


def total_loss(losses: dict[str, Tensor]) -> Tensor:
    """The three losses together, mean over pairs."""
    ranking = (MARGIN - losses["gap"]).clamp(min=0)
    return (losses["lm"] + RANK_WEIGHT * ranking + KL_WEIGHT * losses["kl"]).mean()


def pair_loss(network: DifferentiableLlama, weights: dict[str, Tensor], pairs: list[ProgramPair], seed: int):
    """loss(step) over some of the pairs."""

    def loss(step: int) -> Tensor:
        chosen = torch.Generator().manual_seed(seed * DESCENT.steps + step)
        numbers = torch.randint(len(pairs), (TOGETHER,), generator=chosen).tolist()
        return total_loss(losses_of(network, as_states(weights), [pairs[number] for number in numbers]))

    return loss


# --- what it learnt ---

@torch.no_grad()
def comparison(
    network: DifferentiableLlama, weights: dict[str, Tensor], pairs: Sequence[ProgramPair], others: Sequence[list[int]]
) -> str:
    """Held-out pairs and other texts without the prefix and with it, in words."""
    parts = []
    for way, prefix in (("without", ()), ("with", as_states(weights))):
        found = [losses_of(network, prefix, pairs[first:first + TOGETHER]) for first in range(0, len(pairs), TOGETHER)]
        gaps, kl = (torch.cat([losses[name] for losses in found]) for name in ("gap", "kl"))
        said = f"{way} the prefix the better one is likelier in {float((gaps > 0).float().mean()):.0%}, by " \
               f"{float(gaps.mean()):.2f} nats per compared token"
        apart = f", and lines that do not differ diverge by {float(kl.mean()):.3f} nats" if prefix else ""
        parts.append(said + apart)
        if others:
            parts[-1] += f"; other texts cost {other_loss(network, prefix, others):.3f} nats per token"
    return f"Of {len(pairs)} held-out pairs: {'. '.join(parts)}."


def other_loss(network: DifferentiableLlama, prefix: States, texts: Sequence[list[int]]) -> float:
    """Mean loss of the tokens of texts, in nats."""
    found = []
    for first in range(0, len(texts), TOGETHER):
        ids, real = padded(texts[first:first + TOGETHER])
        found.append(-log_probabilities(after_states(network, prefix, ids), ids)[real[:, 1:]])
    return float(torch.cat(found).mean())
