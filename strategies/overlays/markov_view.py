"""Numbers of a generation step seen as a composition of Markov kernels."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.special import entr

from playground.algorithms.overlays.token_figures import over_tokens, shaded
from playground.contract import LooksAhead, knob
from playground.events import Note

QUANTITIES = ("difference", "entropy", "dependence", "spread")
MEANS = {
    "difference": "chance that two draws differ",
    "entropy": "entropy over its maximum",
    "dependence": "dependence of the next two tokens, over its maximum",
    "spread": "spread of the lm_head under the distribution",
}
COVERED = 0.5  # probability of the branches below which a dependence is not shown
ROWS = 64  # most probable tokens whose lm_head rows give the effective rank
NAMED = 3  # tokens and their continuations on a card


class MarkovView(LooksAhead):
    """Show how random each next token is, what the next two tokens know of each other, and how the lm_head spreads.

    A step is a kernel: drawing once and copying differs from drawing twice by 1 - sum p^2 in total variation, the
    chance that two seeds part here, and by the entropy in KL divergence. The dependence is the mutual information of
    the next two tokens, in nats, over the most probable `branches`, each read one token further: what a drafter loses
    that guesses the second token without the first. The spread is the trace of the Fisher information pulled back
    through the lm_head, as a share of the second moment of its rows; the effective rank counts the directions.
    Painted on the token that the row predicts. These follow from definitions; estimators, branches and drawings are
    ours, and the information surplus, which needs trained probes, is left out. Zhang 2025, arXiv 2507.19247.
    """

    name, title, paper, sheet = "markov_view", "Markov kernels of a step", "2507.19247", "overlays/markov-framework"
    reconstruction, sure = True, "medium"

    quantity: str = knob("difference", choices=QUANTITIES, help="what colours the text")
    branches: int = knob(4, 0, 32, step=1, help="most probable tokens that are read one token further; 0 for none")

    _text = None

    def begin(self, text, model):
        self._text, self._head = text, model.lm_head_weights
        self._numbers: list[Tensor] = []  # difference, entropy, their maximum, spread, effective rank, [n, 5]
        self._tops: dict[int, tuple[list[int], list[float]]] = {}  # candidates and probabilities, by position
        self._ahead: dict[int, tuple[float, float, list[int]]] = {}  # dependence, covered probability, best followers

    def read_logits(self, first, logits):
        p = logits.double().softmax(1)
        spread, rank = self._geometry(p)
        most = torch.full_like(spread, p.shape[1]).log()
        self._numbers.append(torch.stack([1 - p.square().sum(1), entr(p).sum(1), most, spread, rank], 1).cpu())

    def _geometry(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """The spread, 0 to 1, and the effective rank for distributions p [n, V]; NaN for a head that is no matrix."""
        if self._head is None:
            return torch.full_like(p[:, 0], torch.nan), torch.full_like(p[:, 0], torch.nan)
        head = self._head[:p.shape[1]].double()
        second, mean = p @ head.square().sum(1), p @ head
        return 1 - mean.square().sum(1) / second, torch.stack([effective_rank(row, head) for row in p])

    def candidates(self, first, logits):
        wanted = []
        for at, row in enumerate(logits.double().softmax(1), first):
            if not self._text.start - 1 <= at < len(self._text.tokens) - 1 or not self.branches:
                wanted.append([])
                continue
            values, tokens = row.topk(min(self.branches, len(row)))
            self._tops[at] = tokens.tolist(), values.tolist()
            wanted.append(self._tops[at][0])
        return wanted

    def read_ahead(self, first, logits):
        for at, rows in enumerate(logits, first):
            if len(rows):
                after, weights = rows.double().softmax(1), torch.tensor(self._tops[at][1], dtype=torch.float64)
                found = dependence(weights.to(after.device), after)
                self._ahead[at] = found, float(weights.sum()), after.argmax(1).tolist()

    def draw(self):
        if not self._numbers or self._text.generated < 1:
            return
        rows = range(self._text.start - 1, len(self._text.tokens) - 1)
        numbers = torch.cat(self._numbers)[rows.start:rows.stop]
        pairs = [self._dependence(at) for at in rows]
        yield shaded(MEANS[self.quantity], self._colours(numbers, pairs), self._labels(rows, numbers, pairs))
        series = {"dependence of the next two tokens": pairs, "entropy": numbers[:, 1].tolist()}
        yield from over_tokens("Markov kernels, nats", series if self.branches else {"entropy": series["entropy"]})
        yield from over_tokens("effective rank of the lm_head", {"directions": numbers[:, 4].tolist()})
        shown = [value for value in pairs if value == value]
        if shown:
            yield Note(
                f"Guessing the token after the next without knowing the next loses {sum(shown) / len(shown):.3f} nats "
                f"on average over {len(shown)} of {len(pairs)} tokens, those where the branches cover enough."
            )

    def _dependence(self, at: int) -> float:
        """In nats; NaN where it is not known, or the branches cover too little."""
        found, covered, _ = self._ahead.get(at, (torch.nan, 0.0, []))
        return found if covered >= COVERED else torch.nan

    def _colours(self, numbers: Tensor, pairs: list[float]) -> list[float]:
        if self.quantity == "dependence":
            most = torch.tensor(float(max(2, self.branches))).log().item()
            return [value / most for value in pairs]
        column = {"difference": numbers[:, 0], "entropy": numbers[:, 1] / numbers[:, 2], "spread": numbers[:, 3]}
        return column[self.quantity].tolist()

    def _labels(self, rows: range, numbers: Tensor, pairs: list[float]) -> list[str]:
        labels = []
        for at, (differ, _, _, spread, rank), pair in zip(rows, numbers.tolist(), pairs):
            words = [f"two draws differ with {differ:.2f}"]
            if spread == spread:
                words.append(f"lm_head spread {spread:.2f} over {rank:.1f} directions")
            if at in self._ahead:
                words.append(self._branches_in_words(at))
            if pair == pair:
                words.append(f"guessing two ahead blindly costs {pair:.2f} nats")
            labels.append("; ".join(words))
        return labels

    def _branches_in_words(self, at: int) -> str:
        (tokens, shares), (_, covered, followers) = self._tops[at], self._ahead[at]
        named = [f"“{self._text.piece(token)}{self._text.piece(after)}” {100 * share:.0f} %"
                 for token, share, after in zip(tokens, shares, followers)]
        return f"{', '.join(named[:NAMED])} (branches cover {100 * covered:.0f} %)"


def dependence(weights: Tensor, after: Tensor) -> float:
    """Mutual information in nats of a token with these weights [k] and the one after it, of distributions [k, V].

    The weights are normalised; never negative.
    """
    shares = weights / weights.sum()
    return max(0.0, float(entr(shares @ after).sum() - shares @ entr(after).sum(1)))


def effective_rank(p: Tensor, head: Tensor) -> Tensor:
    """exp of the entropy of the eigenvalues of the Fisher information of p [V] through rows [V, d], over their sum.

    Of the most probable tokens, whose probabilities are normalised.
    """
    values, tokens = p.topk(min(ROWS, len(p)))
    shares = values / values.sum()
    rows = head[tokens]
    centred = (rows - shares @ rows) * shares.sqrt()[:, None]
    eigenvalues = torch.linalg.eigvalsh(centred @ centred.T).clamp(min=0)
    total = eigenvalues.sum()
    return entr(eigenvalues / total).sum().exp() if total > 0 else torch.ones_like(total)
