"""The network of PAWN: features of next-token distributions, summed with weights that hidden states decide.

Weights are tensors by name, as `fit` stores them, so that a training, a file and a run share one form.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear
from torch.special import entr

LONGEST = 512  # tokens; a token's place enters as a share of it
FEATURES, GATES, HIDDEN, LINEAR = 32, 8, 64, 3  # the paper's networks are wider: 256 each
METRICS = 5


class ScoredTokens(NamedTuple):
    """Of each scored token of a text, or of texts of one length with one more dimension in front."""

    metrics: Tensor  # [n, 5]
    states: Tensor  # [n, 2 d + 1]: the states before and after the token was read, and its place


class TextScore(NamedTuple):
    logit: Tensor  # of "written by a machine"
    shares: Tensor  # [n, gates]: weights of the tokens, which sum to 1 for each gate


def metrics_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of distributions [n, V] and the tokens [n] that came, in nats, [n, 5].

    Entropy, largest log-probability, the token's own, the share of the vocabulary that is at least as probable, and
    the probability of that share.
    """
    logp = logits.double().log_softmax(1)
    own = logp.gather(1, tokens[:, None])
    p, likelier = logp.exp(), logp >= own
    columns = entr(p).sum(1), logp.amax(1), own[:, 0], likelier.double().mean(1), (p * likelier).sum(1)
    return torch.stack(columns, 1)


def evidence_of(metrics: Tensor, states: Tensor) -> ScoredTokens:
    """ScoredTokens about the n tokens after the first of states [n + 1, d], the inputs of the lm_head."""
    places = torch.arange(len(metrics)).to(states) / LONGEST
    return ScoredTokens(metrics, torch.cat([states[:-1], states[1:], places[:, None]], 1))


def untrained(width: int, metrics: Tensor, seed: int) -> dict[str, Tensor]:
    """Random weights for states of this width; metrics [m, 5] of training texts are standardised by their moments."""
    sizes = {
        "features": [METRICS, HIDDEN, HIDDEN, FEATURES],
        "gates": [2 * width + 1, HIDDEN, HIDDEN, GATES],
        "verdict": [FEATURES, HIDDEN, HIDDEN, 1],
    }
    chance = torch.Generator().manual_seed(seed)
    weights = {"mean": metrics.mean(0).float(), "spread": metrics.std(0).float().clamp(min=1e-6)}
    for name, widths in sizes.items():
        for number, (inputs, outputs) in enumerate(zip(widths, widths[1:])):
            weights[f"{name}.{number}.weight"] = torch.randn(outputs, inputs, generator=chance) * inputs ** -0.5
            weights[f"{name}.{number}.bias"] = torch.zeros(outputs)
    return weights


def judge(weights: dict[str, Tensor], evidence: ScoredTokens, seen: Tensor | None = None) -> TextScore:
    """The verdict about a text, or [texts] of them; `seen` [..., n] leaves the other tokens out."""
    features, gates = features_and_gates(weights, evidence)
    if seen is not None:
        gates = gates.masked_fill(~seen[..., None], -torch.inf)
    shares = gates.softmax(-2)
    return TextScore(_verdict(weights, (spread_gates(shares) * features).sum(-2)), shares)


def running(weights: dict[str, Tensor], evidence: ScoredTokens) -> Tensor:
    """The logit after each token of a text, [n]: sums are carried on, whose terms are scaled by the largest gate."""
    features, gates = features_and_gates(weights, evidence)
    total = gates.logcumsumexp(0)
    kept = spread_gates((total.roll(1, 0) - total).exp())  # what is left of the shares of earlier tokens
    added = spread_gates((gates - total).exp()) * features
    sums = [added[0]]
    for share, new in zip(kept[1:], added[1:]):
        sums.append(share * sums[-1] + new)
    return _verdict(weights, torch.stack(sums))


def features_and_gates(weights: dict[str, Tensor], evidence: ScoredTokens) -> tuple[Tensor, Tensor]:
    """Features [..., n, features] of the metrics, and gate logits [..., n, gates] of the states."""
    metrics = (evidence.metrics.to(weights["mean"]) - weights["mean"]) / weights["spread"]
    return _network(weights, "features", metrics), _network(weights, "gates", evidence.states.to(weights["mean"]))


def spread_gates(shares: Tensor) -> Tensor:
    """Shares [..., gates] for every feature, [..., features]: a gate serves neighbouring features."""
    return shares.repeat_interleave(FEATURES // GATES, -1)


def _verdict(weights: dict[str, Tensor], pooled: Tensor) -> Tensor:
    return _network(weights, "verdict", pooled)[..., 0]


def _network(weights: dict[str, Tensor], name: str, values: Tensor) -> Tensor:
    for number in range(LINEAR):
        values = linear(values, weights[f"{name}.{number}.weight"], weights[f"{name}.{number}.bias"])
        values = gelu(values) if number < LINEAR - 1 else values
    return values


def area(machine: list[float], human: list[float]) -> float:
    """AUC: the share of pairs in which the machine's text has the larger score; ties count half."""
    wins = sum((a > b) + (a == b) / 2 for a in machine for b in human)
    return wins / (len(machine) * len(human))
