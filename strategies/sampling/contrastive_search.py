"""Contrastive search."""
from collections.abc import Iterator

import torch

from playground.contract import Decoder, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.sampling import REMOVED
from playground.events import Event, Figure, Note


class ContrastiveSearch(Decoder):
    """Of the k most probable tokens take the one that is probable and yet unlike all that was said: repeats look like
    what they repeat.

    Each candidate is worth (1 - alpha) p less alpha times the largest cosine between its own hidden state, as the
    model's head reads it, and that of any token before it, prompt included. The states of all candidates come from one
    forward, and that of the chosen one is kept, so a token costs one forward of k rows. Once, at the beginning, the
    prompt is read a second time for the states of its tokens. alpha = 0 or k = 1 is greedy. Su et al. 2022, arXiv
    2202.06417.
    """

    name, title, paper, sheet = "contrastive_search", "Contrastive search", "2202.06417", "sampling/sampling-baselines"
    needs, guarantee, refuses = ("hidden_states",), ("heuristic", "collapses"), ("drawing",)

    k: int = knob(5, 1, 16, step=1, help="candidates; 1 is greedy")
    alpha: float = knob(
        0.6,
        0.0,
        1.0,
        step=0.05,
        help="weight of being unlike what was said, against that of being probable; 0 is greedy",
    )

    def decode(self, lm) -> Iterator:
        rows = yield lm.prefill()
        said = yield from _states(lm)
        while True:
            tree, p = self._candidates(rows)
            ahead = yield lm.extend(tree)
            new = directions(ahead.hidden[ahead.row(0):])
            likeness = (new @ said.T).amax(-1)
            worth = (1 - self.alpha) * p - self.alpha * likeness.to(p)
            best = int(worth.argmax())
            yield from _told(lm, tree, torch.stack([p, likeness.to(p), worth], 1), best)
            yield lm.keep(lm.choose(ahead, tree.tokens[best]))
            said = torch.cat([said, new[best:best + 1]])
            if len(said) < len(lm.tokens):  # a grammar wrote on by itself, and nobody saw the states of that
                said = yield from _states(lm)
            rows = yield lm.extend()

    def _candidates(self, rows) -> tuple[TokenTree, torch.Tensor]:
        """The k most probable tokens after the text, and their probabilities."""
        scores = rows.scores[rows.row(ROOT)]
        p, order = scores.softmax(-1).sort(descending=True, stable=True)  # of equals the lowest id comes first
        count, tree = min(self.k, int((scores > REMOVED).sum())), TokenTree(self.name)
        for token, chance in zip(order[:count].tolist(), p[:count].tolist()):
            tree.add(token, ROOT, confidence=chance)
        return tree, p[:count]


def _states(lm) -> Iterator:
    """Directions of the hidden states of all tokens so far, [tokens, width]."""
    read = []
    for request in lm.reading(lm.tokens):
        piece = yield request
        read.append(directions(piece.hidden))
    return torch.cat(read)


def directions(hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states as vectors of length 1, in float32 at least: in half precision too many of them would be equally
    alike.
    """
    return torch.nn.functional.normalize(hidden.to(torch.promote_types(hidden.dtype, torch.float32)), dim=-1)


def _told(lm, tree: TokenTree, values: torch.Tensor, best: int) -> Iterator[Event]:
    """The candidates, what was taken, and whether the first choice was overruled."""
    pieces = list(map(lm.piece, tree.tokens))
    yield Figure(
        "matrix", "candidates", {"rows": pieces, "columns": ["p", "likeness", "worth"], "values": values.tolist()}
    )
    p, likeness, _ = values[best].tolist()
    yield Figure("scalar", "the chosen token", {"x": lm.generated, "series": {"p": p, "likeness": likeness}})
    if best:
        yield Note(
            f"{pieces[best]!r} in place of {pieces[0]!r}: likeness {likeness:.2f} against {float(values[0, 1]):.2f}."
        )
