"""Beam search over forked sequences.

Every token after every beam is a candidate, and the best candidates become the next beams. A beam's first child
continues in the beam's own sequence, its other children in forks of it, and a beam without children is dropped. No KV
cache is copied, and common prefixes are stored once.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from playground.engine.sampling import REMOVED, largest
from playground.events import Event, Figure, Note

if TYPE_CHECKING:
    from playground.contract import Lane
    from playground.decoding.rows import Rows
    from playground.decoding.sequence import Sequence

Ends = Callable[[int], bool]


@dataclass(eq=False)
class Beam:
    """One sequence, the score it is ranked by, and the sum of its tokens' log-probabilities in nats."""

    leaf: Sequence
    score: float = 0.0
    logp: float = 0.0


class Offer(NamedTuple):
    """A candidate: a token after the live beam with index `place`, and the score of the extended text."""

    place: int
    token: int
    score: float


class Beams:
    """At most `width` live beams, and the `width` best finished ones.

    Beams are ranked by score / length ** exponent, where length counts generated tokens. The search ends when no beam
    is live, or when `width` beams are finished and, if `patient`, no live one ranks above the worst of them.
    """

    def __init__(self, leaf: Sequence, width: int, exponent: float = 0.0, patient: bool = True):
        self.width, self.exponent, self.patient, self.start = width, exponent, patient, leaf.generated
        self.live, self.finished = [Beam(leaf)], []
        self.considered: list[Offer] = []  # in the last step, best first

    # --- one step ---

    def choose(self, gains: Tensor, ends: Ends) -> list[Offer]:
        """The chosen candidates, best first: the `width` best unfinished ones, and end tokens among the `width` best.

        `gains` is what each token adds to the score of each live beam, [live, V], -inf for masked tokens.
        """
        sums = torch.tensor([beam.score for beam in self.live], dtype=gains.dtype, device=gains.device)[:, None] + gains
        offers = self.considered = self._candidates(sums, ends)
        ending = [offer for offer in offers[:self.width] if ends(offer.token)]
        unfinished = [offer for offer in offers if not ends(offer.token)][:self.width]
        return sorted(ending + unfinished, key=offers.index)

    def _candidates(self, sums: Tensor, ends: Ends) -> list[Offer]:
        """Enough of the best candidates to contain `width` unfinished ones, if there are that many.

        With a single end token the first attempt is enough.
        """
        count = 2 * self.width
        while len(offers := best(sums, count)) == count and sum(not ends(offer.token) for offer in offers) < self.width:
            count *= 2
        return offers

    def follow(self, lm: Lane, offers: list[Offer], logp: Tensor) -> None:
        """Replace the live beams by the children of these offers, in the same order, without committing their tokens.

        `logp` [live, V] are the log-probabilities that `Beam.logp` sums up.
        """
        parents = [self.live[offer.place] for offer in offers]
        leaves = [
            parent.leaf if parent not in parents[:i] else lm.fork(1, parent.leaf)[0] for i, parent in enumerate(parents)
        ]
        lm.drop(beam.leaf for beam in self.live if beam not in parents)
        self.live = [Beam(leaf, offer.score, parent.logp + float(logp[offer.place, offer.token]))
                     for leaf, parent, offer in zip(leaves, parents, offers)]

    def retire(self, lm: Lane) -> None:
        """After a commit: move complete beams to the finished ones, and drop those that can no longer win."""
        complete = [beam for beam in self.live if beam.leaf.reason]
        self.live = [beam for beam in self.live if not beam.leaf.reason]
        ranked = sorted([*self.finished, *complete], key=self.rank, reverse=True)
        self.finished, dropped = ranked[:self.width], ranked[self.width:]
        if self._is_over():
            dropped, self.live = dropped + self.live, []
        lm.drop(beam.leaf for beam in dropped)

    def _is_over(self) -> bool:
        if len(self.finished) < self.width:
            return False
        return not self.patient or all(self.rank(beam) <= self.rank(self.finished[-1]) for beam in self.live)

    # --- ranking ---

    def rank(self, beam: Beam) -> float:
        return self.of_length(beam.score, beam)

    def of_length(self, total: float, beam: Beam) -> float:
        """A sum over the tokens of a beam, normalised by its length."""
        return total / (beam.leaf.generated - self.start) ** self.exponent

    def ranks(self) -> dict[int, float]:
        """Rank of every live and finished beam, by sequence number."""
        return {beam.leaf.number: self.rank(beam) for beam in [*self.finished, *self.live]}

    def sums(self) -> dict[int, float]:
        """Score before length normalisation of the same beams; empty if scores are not normalised."""
        return {beam.leaf.number: beam.score for beam in [*self.finished, *self.live]} if self.exponent else {}


def best(sums: Tensor, count: int) -> list[Offer]:
    """The largest unmasked sums of [beams, V], largest first; ties go to the earlier beam, then to the lower id."""
    flat = sums.flatten()
    least = largest(flat, min(count, len(flat))).values[-1]
    places = ((flat >= least) & (flat > REMOVED)).nonzero()[:, 0]
    ordered = places[flat[places].argsort(descending=True, stable=True)][:count]
    return [
        Offer(*divmod(place, sums.shape[1]), score) for place, score in zip(ordered.tolist(), flat[ordered].tolist())
    ]


def log_probabilities(rows: list[Rows]) -> Tensor:
    """Log-probabilities of each sequence's next token, [sequences, V]: the model's own, -inf for masked tokens."""
    return torch.stack([row.allowed_logp() for row in rows])


# --- diversity of the results ---

def compared(beams: list[Beam]) -> Iterator[Event]:
    """A figure and a note on the diversity of the finished texts."""
    texts = [beam.leaf.written for beam in beams]
    labels, values = ["distinct-1", "distinct-2"], [distinct(texts, 1), distinct(texts, 2)]
    yield Figure("bars", "diversity of the finished texts", {"labels": labels, "values": values})
    if len(texts) > 1:
        yield Note(f"{len(texts)} texts were finished; length of their common prefix in tokens: {shared_start(texts)}.")


def distinct(texts: list[list[int]], n: int) -> float:
    """distinct-n: unique n-grams over all n-grams of all texts; 1 if no n-gram occurs twice."""
    grams = [tuple(text[i:i + n]) for text in texts for i in range(len(text) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def shared_start(texts: list[list[int]]) -> int:
    """Length of the common prefix of all texts, in tokens."""
    columns = zip(*texts)  # ends with the shortest text
    return len(list(takewhile(lambda tokens: len(set(tokens)) == 1, columns)))
