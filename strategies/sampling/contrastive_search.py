"""Contrastive search."""
from collections.abc import Iterator

import torch

from playground.contract import Decoder, Lane, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.sampling import REMOVED, ranked
from playground.events import Event, Figure, Note


class ContrastiveSearch(Decoder):
    """Of the k most probable tokens, commit the best trade-off of probability and dissimilarity to the text so far.

    The score of a candidate is (1 - alpha) p minus alpha times the largest cosine between its hidden state, the input
    of the lm_head, and that of any earlier token, prompt included. The states of all candidates come from one forward,
    and that of the chosen one remains cached, so a token costs one forward over k tokens. At the start the prompt is
    read a second time for the states of its tokens. alpha = 0 or k = 1 is greedy. Su et al. 2022, arXiv 2202.06417.
    """

    name, title, paper, sheet = "contrastive_search", "Contrastive search", "2202.06417", "sampling/sampling-baselines"
    needs, guarantee, refuses = ("hidden_states",), ("heuristic", "collapses"), ("drawing",)

    k: int = knob(5, 1, 16, step=1, help="candidates; 1 is greedy")
    alpha: float = knob(
        0.6,
        0.0,
        1.0,
        step=0.05,
        help="weight of the degeneration penalty against the probability; 0 is greedy",
    )

    def decode(self, lm: Lane) -> Iterator:
        rows = yield lm.prefill()
        states = yield from _states(lm)
        while True:
            tree, p = self._candidates(rows)
            ahead = yield lm.extend(tree)
            new = directions(ahead.hidden[ahead.row(0):])
            cosine = (new @ states.T).amax(-1)
            scores = (1 - self.alpha) * p - self.alpha * cosine.to(p)
            best = int(scores.argmax())
            yield from _events(lm, tree, torch.stack([p, cosine.to(p), scores], 1), best)
            yield lm.keep(lm.choose(ahead, tree.tokens[best]))
            states = torch.cat([states, new[best:best + 1]])
            if len(states) < len(lm.tokens):  # a grammar committed forced tokens, whose states are unknown
                states = yield from _states(lm)
            rows = yield lm.extend()

    def _candidates(self, rows) -> tuple[TokenTree, torch.Tensor]:
        """The k most probable tokens after the text, and their probabilities."""
        scores = rows.scores[rows.row(ROOT)]
        p, order = ranked(scores.softmax(-1), self.k)
        count, tree = min(self.k, int((scores > REMOVED).sum())), TokenTree(self.name)
        for token, probability in zip(order[:count].tolist(), p[:count].tolist()):
            tree.add(token, ROOT, confidence=probability)
        return tree, p[:count]


def _states(lm: Lane) -> Iterator:
    """Unit hidden states of all tokens so far, [tokens, width]."""
    read = []
    for request in lm.reading(lm.tokens):
        piece = yield request
        read.append(directions(piece.hidden))
    return torch.cat(read)


def directions(hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states as unit vectors, in float32 at least: half precision collapses small differences of cosines."""
    return torch.nn.functional.normalize(hidden.to(torch.promote_types(hidden.dtype, torch.float32)), dim=-1)


def _events(lm: Lane, tree: TokenTree, values: torch.Tensor, best: int) -> Iterator[Event]:
    """The candidates, the chosen one, and whether it differs from the most probable."""
    pieces = list(map(lm.piece, tree.tokens))
    yield Figure(
        "matrix", "candidates", {"rows": pieces, "columns": ["p", "cosine", "score"], "values": values.tolist()}
    )
    p, cosine, _ = values[best].tolist()
    yield Figure("scalar", "the chosen token", {"x": lm.generated, "series": {"p": p, "cosine": cosine}})
    if best:
        yield Note(
            f"{pieces[best]!r} in place of {pieces[0]!r}: cosine {cosine:.2f} against {float(values[0, 1]):.2f}."
        )
