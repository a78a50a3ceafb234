"""Mirostat."""
import math
from collections.abc import Iterator

import torch

from playground.contract import Sampler, knob
from playground.engine.sampling import REMOVED, first_largest, largest
from playground.events import Event, Figure, Note

LN2 = math.log(2)
SLACK = 7  # bits above a uniform distribution; a truncation at that surprise removes a mass below 2 ** -7


class Mirostat(Sampler):
    """Keep the surprise of the text at a target: truncate more after a surprising token, and less after a predictable
    one.

    Only tokens with a surprise of at most mu bits are sampled; after each token mu -= eta * (surprise - tau), from 2 *
    tau at the start. Version 2 truncates at mu itself. Version 1 keeps the k most probable tokens, with k from mu and
    the exponent of a Zipf law fitted to the top ranks. Surprise is measured under the scores that the sampler receives
    or, as in llama.cpp, under the truncated distribution. A temperature may be applied before; mu does not account for
    an earlier truncation. tau = 0 is greedy. Basu et al. 2021, arXiv 2007.14966; version 2 after the authors' notebook.
    """

    name, title, paper, sheet = "mirostat", "Mirostat", "2007.14966", "sampling/mirostat"
    row_wise, guarantee = False, ("collapses",)

    version: str = knob("2", choices=("1", "2"), help="1 converts mu to a top-k, 2 truncates at a surprise of mu")
    tau: float = knob(3.0, 0.0, 10.0, step=0.1, help="target surprise, in bits per token; 0 is greedy")
    eta: float = knob(
        0.1, 0.0, 2.0, step=0.01, help="learning rate of mu; 1 oscillates, 0 leaves it at 2 * tau"
    )
    surprise: str = knob("full", choices=("full", "renormalised"), help="under the full or the truncated distribution")
    ranks: int = knob(100, 10, 500, step=10, help="top ranks to which the Zipf law is fitted, in version 1")

    def __post_init__(self):
        self.mu, self.observed = 2 * self.tau, []

    def apply(self, scores, histories):
        return scores.masked_fill(~self.kept(scores), REMOVED)

    def kept(self, scores: torch.Tensor) -> torch.Tensor:
        """Mask of the tokens kept, [n, V]; always includes the most probable one."""
        best = first_largest(scores)
        if self.version == "2":
            return (-scores.log_softmax(-1) / LN2 <= self.mu).scatter(-1, best, True)
        order = scores.sort(descending=True, stable=True).indices
        first = torch.arange(scores.shape[-1], device=scores.device) < zipf_size(scores, self.mu, self.ranks)[:, None]
        return torch.zeros_like(first).scatter(-1, order, first)

    def observe(self, rows, token, position) -> Iterator[Event]:
        (scores,) = rows.values()
        kept = self.kept(scores[None])[0]
        judged = scores[kept] if self.surprise == "renormalised" else scores
        surprise = max(0.0, float(judged.logsumexp(-1) - scores[token]) / LN2)
        if math.isinf(surprise):  # a forced token that an earlier sampler removed
            return
        before, self.mu = self.mu, self.mu - self.eta * (surprise - self.tau)
        self.observed.append(surprise)
        yield from self._events(position, before, int(kept.sum()))
        if before <= max(2 * self.tau, math.log2(len(scores)) + SLACK) < self.mu:
            yield Note(
                f"The target of {self.tau:g} bits cannot be reached: almost nothing is truncated, and the surprise of "
                "the text is still lower."
            )

    def _events(self, position: int, mu: float, kept: int) -> Iterator[Event]:
        mean = sum(self.observed) / len(self.observed)
        series = {"surprise, bits": self.observed[-1], "mean so far": mean, "mu": mu}
        yield Figure("scalar", "surprise", {"x": position, "series": series, "lines": {"tau": self.tau}})
        yield Figure("scalar", "tokens kept", {"x": position, "series": {"tokens": kept}})


def zipf_size(scores: torch.Tensor, mu: float, ranks: int) -> torch.Tensor:
    """How many of the most probable tokens have a surprise of at most mu bits if each row follows a Zipf law, [n].

    k ** s = 2 ** mu / H, where H, the sum of i ** -s over all N ranks, is approximated by (1 - N ** -eps) / eps with
    eps = s - 1.
    """
    count = (scores > REMOVED).sum(-1)
    s = zipf_exponent(scores, ranks)
    eps, width = s - 1, count.clamp(min=2).log()
    inverse = torch.where(eps.abs() < 1e-6, 1 / width, eps / -torch.expm1(-eps * width))  # 1 / H
    log2_size = (mu + inverse.log2()) / s.clamp(min=1e-6)
    return torch.minimum(log2_size.clamp(max=60).exp2().round(), count).clamp(min=1)


def zipf_exponent(scores: torch.Tensor, ranks: int) -> torch.Tensor:
    """Least-squares Zipf exponent of each row over its top ranks, from the ratios of successive ranks, [n]."""
    top = largest(scores, min(ranks + 1, scores.shape[-1])).values
    rank = torch.arange(1, top.shape[-1], device=top.device, dtype=top.dtype)
    steps, falls = ((rank + 1) / rank).log(), top[:, :-1] - top[:, 1:]
    real = top[:, 1:] > REMOVED
    weights = (steps ** 2 * real).sum(-1).clamp(min=torch.finfo(top.dtype).tiny)
    return torch.where(real, steps * falls, 0.0).sum(-1) / weights
