"""Anchored decoding."""
from collections.abc import Iterator

import torch
from torch import Tensor

from playground.contract import Decoder, Lane, Strategy, knob, make
from playground.events import Figure, Note

HALVINGS = 40
TOLERANCE = 1e-4  # nats by which rounding may exceed the budget of a step


class Anchored(Decoder):
    """Sample as close to a risky model as a budget of divergence from a safe model allows; every token adds k nats to
    it.

    The distribution of a step is proportional to safe^(1 - theta) risky^theta, with the largest theta in [0, 1] whose
    divergence from the safe model fits into the budget; the unused budget is carried over. A token that masks or
    samplers remove from only one of the models counts as equally probable under both, so below theta = 1 it has the
    safe model's weight. A prompt that is much more probable under the risky model than under the safe one starts with a
    debt. Hence the divergence of whole texts from the safe model, after the same masks and samplers, is at most k times
    their length minus the debt. The target is the risky model, the draft model the safe one. k = 0 samples from the
    draft model. Argmax has no such bound, so tokens are always sampled. He et al. 2026, arXiv 2602.07120.
    """

    name, title, paper, sheet = "anchored", "Anchored decoding", "2602.07120", "sampling/anchored"
    needs, guarantee = ("draft",), ("heuristic", "collapses")

    k: float = knob(
        0.15,
        0.0,
        20.0,
        step=0.05,
        help="budget per token in nats; 0 samples from the safe model, a large one from the risky model",
    )
    debt: bool = knob(True, help="start with a debt if the prompt is much more probable under the risky model")
    n: int = knob(5, 1, 20, step=1, help="prompt tokens with the largest likelihood ratios, which make up the debt")
    t: float = knob(1.0, 0.05, 1.5, step=0.05, help="temperature of both models, before they are combined")

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.t)]

    def decode(self, lm: Lane) -> Iterator:
        safe, risky_rows = lm.stream("draft"), (yield lm.prefill())
        safe_rows = yield safe.extend()
        balance = -(yield from self._prompt_debt(lm)) if self.debt else 0.0
        while True:
            balance += self.k
            budget = max(0.0, balance)
            p, r = (rows.scores[-1].cpu().double().log_softmax(-1) for rows in (safe_rows, risky_rows))
            theta, logq = nearest(p, r, budget)
            spent = divergence(logq, p)
            if spent > budget + TOLERANCE:
                raise ArithmeticError(f"a step spends {spent} of {budget} nats")
            balance -= spent
            yield from _events(lm, theta, spent, balance, budget)
            risky_rows.add_stage(self.name, logq[None])
            yield lm.keep(lm.pick(risky_rows))
            risky_rows, safe_rows = yield lm.together(lm.extend(), safe.extend())

    def _prompt_debt(self, lm: Lane) -> Iterator:
        """The debt in nats: the mean of the n largest log-likelihood ratios, risky to safe, of the prompt's tokens."""
        prompt, logps = lm.tokens[:lm.prompt_length], []
        for name in ("target", "draft"):
            logps.append((yield from _read(lm, prompt, name)))
        gains = [(risky - safe, token) for risky, safe, token in zip(*logps, prompt[1:]) if not lm.special(token)]
        nats = debt([gain for gain, _ in gains], self.n, len(prompt))
        if nats:
            tokens = ", ".join(repr(lm.piece(token)) for _, token in sorted(gains, reverse=True)[:self.n])
            yield Note(
                f"The prompt costs {nats:.2f} nats before the first token: {tokens} are more probable under the risky "
                "model than under the safe one."
            )
        return nats


def _read(lm: Lane, ids: list[int], name: str) -> Iterator:
    """Log-probabilities of all tokens of a text except the first, under one model."""
    logps = []
    for request in lm.reading(ids, name):
        piece = yield request
        following = torch.tensor(ids[len(logps) + 1:len(logps) + 1 + len(piece.tokens)], device=piece.logits.device)
        logps += piece.logits[:len(following)].log_softmax(-1).gather(1, following[:, None])[:, 0].tolist()
    return logps


def debt(gains: list[float], count: int, length: int) -> float:
    """Mean of the `count` largest log-likelihood ratios of a prompt's tokens; negative and missing ones count as 0."""
    most = min(count, length - 1)
    return sum(max(gain, 0.0) for gain in sorted(gains, reverse=True)[:most]) / most if most > 0 else 0.0


def nearest(p: Tensor, r: Tensor, budget: float) -> tuple[float, Tensor]:
    """The distribution closest to r within `budget` nats of p, as theta and log-probabilities [V].

    p and r are log-probabilities [V].
    """
    if budget <= 0:
        return 0.0, p
    if divergence(r, p) <= budget:
        return 1.0, r
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if divergence(between(p, r, middle), p) <= budget else (low, middle)
    return low, between(p, r, low)


def between(p: Tensor, r: Tensor, theta: float) -> Tensor:
    """Log-probabilities [V] proportional to exp(p) ** (1 - theta) * exp(r) ** theta; p itself at 0, r at 1.

    Where only one of them is finite, their difference is 0: two disjoint supports give p.
    """
    if theta in (0, 1):
        return r if theta else p
    gain = torch.where(p.isfinite() & r.isfinite(), r - p, 0.0)
    return (p + theta * gain).log_softmax(-1)


def divergence(q: Tensor, p: Tensor) -> float:
    """Kullback-Leibler divergence of q from p, log-probabilities [V], in nats; infinite if p excludes a token of q."""
    probabilities = q.exp()
    return max(0.0, float(torch.where(probabilities > 0, probabilities * (q - p), 0.0).sum()))


def _events(lm: Lane, theta: float, spent: float, left: float, budget: float) -> Iterator[Figure]:
    yield Figure("scalar", "from safe (0) to risky (1)", {"x": lm.generated, "series": {"theta": theta}})
    account = {"spent on this token": spent, "budget": budget, "left": left}
    yield Figure("scalar", "account, nats", {"x": lm.generated, "series": account})
