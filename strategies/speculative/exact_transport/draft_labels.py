"""Random labels that turn acceptance probabilities into a rule.

Every draft token gets a label in [0, 1], uniform within the labels of its token: a set of length q(x), the sets of all
tokens being disjoint. So all labels together are uniform, and the smallest of k labels has density k (1 - t)^(k - 1).
Token x is then accepted with probability a(x) if this density, up to the limit, has the integral a(x) over its labels.

Such sets are assigned token by token: from the free labels, laid end to end, each takes one interval with the right
length and integral. It exists for every order of the tokens, and the others can still be assigned (the shadow of an
atom, Beiglboeck and Juillet 2016, arXiv 1208.1509). So the order is by descending q, and ends with the last token that
was drafted: it must not depend on which tokens were drafted, only on q.
"""
from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod

from strategies.speculative.exact_transport.transport_plan import TransportPlan

Intervals = list[tuple[float, float]]
ROUNDS = 80  # of the search for an interval, every second of which halves it
ROUNDING = 1e-17


class FreeLabels:
    """The labels not assigned yet: disjoint intervals in ascending order."""

    def __init__(self, k: int, limit: float):
        self.k, self.limit, self.intervals = k, limit, [(0.0, 1.0)]

    def take(self, length: float, integral: float) -> Intervals:
        """Remove an interval of the free labels, laid end to end, with this length and integral; returns its parts."""
        lengths = [0.0, *accumulate(end - start for start, end in self.intervals)]
        integrals = [0.0, *accumulate(self.below(end) - self.below(start) for start, end in self.intervals)]

        def integral_before(place: float) -> float:
            i = min(bisect_right(lengths, place), len(self.intervals)) - 1
            start = self.intervals[i][0]
            return integrals[i] + self.below(start + place - lengths[i]) - self.below(start)

        def surplus(place: float) -> float:
            return integral_before(min(place + length, lengths[-1])) - integral_before(place) - integral

        start = _root(surplus, max(0.0, lengths[-1] - length))
        return self._remove(start, start + length)

    def below(self, label: float) -> float:
        """The probability that the smallest label is below a label and below the limit."""
        return 1 - (1 - min(label, self.limit)) ** self.k

    def _remove(self, start: float, end: float) -> Intervals:
        """Remove what lies between two places of the free labels, laid end to end."""
        taken, left, place = [], [], 0.0
        for low, high in self.intervals:
            first, last = (min(max(low + edge - place, low), high) for edge in (start, end))
            place += high - low
            taken += [(first, last)] if last > first else []
            pieces = [(low, first), (last, high)] if last > first else [(low, high)]
            left += [(a, b) for a, b in pieces if b > a]
        self.intervals = left
        return taken


def _root(function, high: float) -> float:
    """Where a falling function on [0, high] is 0; an end of the interval if it is nowhere."""
    low, at_low, at_high = 0.0, function(0.0), function(high)
    if at_low <= 0 or at_high >= 0:
        return low if at_low <= 0 else high
    for number in range(ROUNDS):
        share = 0.5 if number % 2 else at_low / (at_low - at_high)
        middle = low + share * (high - low)
        value = function(middle)
        if abs(value) < ROUNDING or not low < middle < high:
            return middle
        low, at_low, high, at_high = (middle, value, high, at_high) if value > 0 else (low, at_low, middle, value)
    return (low + high) / 2


def labels_of(plan: TransportPlan, drafted: Iterable[int]) -> dict[int, Intervals]:
    """The labels of the tokens that the drafter prefers to the least probable drafted one, and of that."""
    least = min(float(plan.q[token]) for token in drafted)
    tokens = (plan.q >= least).nonzero()[:, 0]
    tokens = tokens[plan.q[tokens].argsort(descending=True, stable=True)]
    free = FreeLabels(plan.k, plan.limit)
    sizes = zip(tokens.tolist(), plan.q[tokens].tolist(), plan.accepted[tokens].tolist())
    return {token: free.take(length, integral) for token, length, integral in sizes}


def accepted_given(labels: Mapping[int, Intervals], drafted: Sequence[int], limit: float) -> dict[int, float]:
    """The probability that each drafted token is accepted, given all drafted tokens, repeats included."""
    counts, chances, none_before = Counter(drafted), dict.fromkeys(drafted, 0.0), 1.0
    lengths = {token: sum(end - start for start, end in labels[token]) for token in counts}
    later = dict.fromkeys(counts, 1.0)  # the share of each token's labels that are not passed yet
    placed = [(*part, token) for token in counts for part in labels[token]]
    for start, end, token in sorted(placed):
        if start >= limit:
            break
        later[token] = max(0.0, later[token] - (min(end, limit) - start) / lengths[token])
        none_now = prod(share ** counts[token] for token, share in later.items())
        chances[token] += none_before - none_now
        none_before = none_now
    return chances
