"""P-less sampling."""
from collections.abc import Iterator

import torch

from playground.contract import Sampler, knob
from playground.engine.sampling import REMOVED
from playground.events import Event, Figure

SLACK = 1e-5  # relative: tokens that tie with the threshold stay, as all of a uniform distribution do


class PLess(Sampler):
    """Truncate at the collision probability: the chance that two tokens drawn from the distribution are the same.

    The threshold is the sum of p squared over the vocabulary, so it is high where the distribution is peaked and low
    where it is flat, without a knob to tune. The most probable token always stays. It acts before all other
    truncations, on the distribution after the temperature. The norm form is more permissive: it subtracts from the
    threshold the chance that the two differ, shared out among the V - 1 other tokens of the vocabulary. Tan et al.
    2025, arXiv 2509.23234, with ties as in the authors' patch of llama.cpp.
    """

    name, title, paper, sheet, rank = "p_less", "P-less", "2509.23234", "sampling/p-less", 0
    guarantee = ("heuristic",)
    new_in = "2026"
    reads_text = False

    norm: bool = knob(False, help="the normalised threshold, which keeps more tokens: (V sum p^2 - 1) / (V - 1)")

    def apply(self, scores, histories):
        p = scores.softmax(-1)
        kept = (p >= self.threshold(p) * (1 - SLACK)) & (p > 0)  # the norm form's threshold may be 0
        return scores.masked_fill(~kept, REMOVED)

    def threshold(self, p: torch.Tensor) -> torch.Tensor:
        """The smallest probability that stays, [n, 1], for distributions p [n, V]."""
        collision, size = p.square().sum(-1, keepdim=True), p.shape[-1]
        return (size * collision - 1) / max(1, size - 1) if self.norm else collision

    def explain(self, scores, history, token) -> Iterator[Event]:
        p = scores.softmax(-1)
        kept = int((self.apply(scores[None], [history]) > REMOVED).sum())
        place = len(history) - self.start
        series = {"threshold": float(self.threshold(p[None])), "largest p": float(p.max())}
        yield Figure("scalar", "collision probability", {"x": place, "series": series})
        yield Figure("scalar", "tokens kept", {"x": place, "series": {"tokens": kept}})
