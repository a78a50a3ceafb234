"""Beams: texts that grow side by side, of which only the best few stay at every step.

Every token after every beam is a candidate. The best are taken, best first; a beam's first child goes on in the beam's
own sequence, its others in forks of it, and a beam without a child is dropped. So a cache is never copied, and what
beams share is held once.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from playground.engine.sampling import REMOVED
from playground.events import Event, Figure, Note

if TYPE_CHECKING:
    from playground.decoding.lane import Lane
    from playground.decoding.rows import Rows
    from playground.decoding.sequence import Sequence

Ends = Callable[[int], bool]


@dataclass(eq=False)
class Beam:
    """One text, the sum it is ranked by, and the sum of its tokens' log-probabilities in nats where that is another
    one.
    """

    leaf: Sequence
    score: float = 0.0
    logp: float = 0.0


class Offer(NamedTuple):
    """A candidate: a token after the beam at a place among the living, and the sum it would bring that text to."""

    place: int
    token: int
    score: float


class Beams:
    """At most `width` living beams, and the `width` best of those that came to an end.

    Texts are ranked by score / length ** exponent; the length counts what was written here. The search is over when
    nothing lives, or when `width` texts are complete and, if `patient`, no living one ranks above the last of them.
    """

    def __init__(self, leaf: Sequence, width: int, exponent: float = 0.0, patient: bool = True):
        self.width, self.exponent, self.patient, self.start = width, exponent, patient, leaf.generated
        self.live, self.finished = [Beam(leaf)], []
        self.considered: list[Offer] = []  # in the last step, best first

    # --- one step ---

    def choose(self, gains: Tensor, ends: Ends) -> list[Offer]:
        """The candidates to be taken, best first: the `width` best that go on, and those among the `width` best of all
        that end the text.

        `gains` is what each token adds to each living beam, [live, V], -inf where it may not follow.
        """
        sums = torch.tensor([beam.score for beam in self.live], dtype=gains.dtype, device=gains.device)[:, None] + gains
        offers = self.considered = self._enough(sums, ends)
        ending = [offer for offer in offers[:self.width] if ends(offer.token)]
        going_on = [offer for offer in offers if not ends(offer.token)][:self.width]
        return sorted(ending + going_on, key=offers.index)

    def _enough(self, sums: Tensor, ends: Ends) -> list[Offer]:
        """So many of the best that `width` of them go on, if there are so many. With one end token the first try is
        enough.
        """
        count = 2 * self.width
        while len(offers := best(sums, count)) == count and sum(not ends(offer.token) for offer in offers) < self.width:
            count *= 2
        return offers

    def follow(self, lm: Lane, offers: list[Offer], logp: Tensor) -> None:
        """The children of these offers live from here on, in the same order; each has its token still to keep. `logp`
        [live, V].
        """
        parents = [self.live[offer.place] for offer in offers]
        leaves = [
            parent.leaf if parent not in parents[:i] else lm.fork(1, parent.leaf)[0] for i, parent in enumerate(parents)
        ]
        lm.drop(beam.leaf for beam in self.live if beam not in parents)
        self.live = [Beam(leaf, offer.score, parent.logp + float(logp[offer.place, offer.token]))
                     for leaf, parent, offer in zip(leaves, parents, offers)]

    def retire(self, lm: Lane) -> None:
        """After a keep: complete texts are ranked among the finished, and what cannot be among the best any more is
        dropped.
        """
        complete = [beam for beam in self.live if beam.leaf.reason]
        self.live = [beam for beam in self.live if not beam.leaf.reason]
        ranked = sorted([*self.finished, *complete], key=self.rank, reverse=True)
        self.finished, given_up = ranked[:self.width], ranked[self.width:]
        if self._is_over():
            given_up, self.live = given_up + self.live, []
        lm.drop(beam.leaf for beam in given_up)

    def _is_over(self) -> bool:
        if len(self.finished) < self.width:
            return False
        return not self.patient or all(self.rank(beam) <= self.rank(self.finished[-1]) for beam in self.live)

    # --- how they stand ---

    def rank(self, beam: Beam) -> float:
        return self.of_length(beam.score, beam)

    def of_length(self, total: float, beam: Beam) -> float:
        """A sum over the tokens of a beam, as far as its length counts."""
        return total / (beam.leaf.generated - self.start) ** self.exponent

    def ranks(self) -> dict[int, float]:
        """By the numbers of the sequences."""
        return {beam.leaf.number: self.rank(beam) for beam in [*self.finished, *self.live]}


def best(sums: Tensor, count: int) -> list[Offer]:
    """The largest finite sums of [beams, V], largest first; of equal ones those of the earlier beam, then of the lower
    id.
    """
    flat = sums.flatten()
    least = flat.topk(min(count, len(flat))).values[-1]
    places = ((flat >= least) & (flat > REMOVED)).nonzero()[:, 0]
    ordered = places[flat[places].argsort(descending=True, stable=True)][:count]
    return [
        Offer(*divmod(place, sums.shape[1]), score) for place, score in zip(ordered.tolist(), flat[ordered].tolist())
    ]


def log_probabilities(rows: list[Rows]) -> Tensor:
    """Under the law that each sequence's next token is drawn from, masks and samplers included, [sequences, V]."""
    return torch.cat([row.scores for row in rows]).log_softmax(-1)


# --- what came of it ---

def compared(beams: list[Beam]) -> Iterator[Event]:
    """How different finished texts are."""
    texts = [beam.leaf.written for beam in beams]
    labels, values = ["different tokens / tokens", "different pairs / pairs"], [distinct(texts, 1), distinct(texts, 2)]
    yield Figure("bars", "variety of the finished texts", {"labels": labels, "values": values})
    if len(texts) > 1:
        yield Note(f"{len(texts)} texts were finished; tokens that all of them begin with: {shared_start(texts)}.")


def distinct(texts: list[list[int]], n: int) -> float:
    """Different n-grams over n-grams, all texts together; 1 where no n-gram occurs twice."""
    grams = [tuple(text[i:i + n]) for text in texts for i in range(len(text) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def shared_start(texts: list[list[int]]) -> int:
    """Tokens with which all texts begin."""
    columns = zip(*texts)  # as long as the shortest text
    return len(list(takewhile(lambda tokens: len(set(tokens)) == 1, columns)))
