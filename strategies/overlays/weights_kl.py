"""What other weights change at each token of a text: two distributions after the same prefix."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.special import entr

from playground.algorithms.overlays.token_figures import over_tokens, shaded
from playground.contract import ReadsLoadedWeights
from playground.events import Note

RARE = 0.95  # the quantile that is said beside the mean, which hides a few large changes


class Favourites(NamedTuple):
    """The likeliest token of the loaded weights and that of the lane's, with their probabilities, in one row."""

    loaded: int
    loaded_share: float
    own: int
    own_share: float


class WeightsKL(ReadsLoadedWeights):
    """Show how far the distributions of a lane with other weights are from those of the loaded weights.

    Both read the lane's text, so that every token is judged after the same prefix; two lanes that write texts of their
    own can be compared at the first difference only. The colour of a token is KL(loaded || lane) of the row that
    predicts it, over the full vocabulary in nats; its card has the favourites of both, and what the token lost. Curves
    are KL in both directions, and the entropy of the loaded weights beside the lane's own. A lane that has the loaded
    weights is compared with itself: 0 everywhere. Costs the forwards of the loaded weights over the text. Same-prefix
    comparison is common practice; the study of quantised weights that this belongs to is Jin et al. 2024, arXiv
    2402.16775.
    """

    name, title = "weights_kl", "KL to the loaded weights"
    paper, sheet = "2402.16775", "weights/quantization-evaluation"

    _text = None

    def begin(self, text, model):
        self._text = text
        self._numbers: list[Tensor] = []  # KL there and back, entropy of the loaded weights, lost by the token, [n, 4]
        self._favourites: list[Favourites] = []

    def read_both(self, first, logits, loaded):
        p, q = (rows.double().log_softmax(1) for rows in (loaded, logits))
        following = [*self._text.tokens[first + 1:first + 1 + len(p)], 0][:len(p)]  # nothing follows the last token
        lost = (p - q).gather(1, torch.tensor(following, device=p.device)[:, None])[:, 0]
        self._numbers.append(torch.stack([divergence(p, q), divergence(q, p), entr(p.exp()).sum(1), lost], 1).cpu())
        best = [each.tolist() for rows in (p, q) for each in (rows.argmax(1), rows.amax(1).exp())]
        self._favourites += map(Favourites, *best)

    def draw(self):
        if not self._numbers or self._text.generated < 1:
            return
        rows = slice(self._text.start - 1, len(self._text.tokens) - 1)  # those that predict a generated token
        numbers, favourites = torch.cat(self._numbers)[rows], self._favourites[rows]
        away, back, entropy, lost = numbers.T.tolist()
        labels = [self._label(*each) for each in zip(away, lost, favourites)]
        yield shaded("KL to the loaded weights, 1 nat and more is the strongest colour", away, labels)
        both = {"KL(loaded || lane)": away, "KL(lane || loaded)": back}
        yield from over_tokens("KL after the same prefix, nats", both)
        yield from over_tokens("entropy of the loaded weights", {"loaded entropy, nats": entropy})
        yield Note(verdict(numbers[:, 0], sum(row.loaded != row.own for row in favourites)))

    def _label(self, away: float, lost: float, row: Favourites) -> str:
        piece = self._text.piece
        return (f"KL {away:.3f} nats; loaded weights “{piece(row.loaded)}” {100 * row.loaded_share:.0f} %, this lane "
                f"“{piece(row.own)}” {100 * row.own_share:.0f} %; loss of the token {lost:+.2f} nats")


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) in nats, [n], of log-probabilities [n, V]; never negative."""
    terms = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))
    return terms.sum(1).clamp(min=0)


def verdict(divergences: Tensor, disagreements: int) -> str:
    """The distances [n] of a whole text in two sentences. disagreements: rows with another most probable token."""
    if not divergences.any():
        return "KL to the loaded weights: 0 at every token. This lane computes with the loaded weights, or as they do."
    mean, rare, most = float(divergences.mean()), float(divergences.quantile(RARE)), float(divergences.max())
    return (f"KL to the loaded weights: {mean:.4f} nats on average over {len(divergences)} tokens, {rare:.4f} at the "
            f"95th percentile, most at token {int(divergences.argmax()) + 1} ({most:.3f}). At {disagreements} of them "
            "another token is the most probable one.")
