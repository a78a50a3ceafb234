"""Beam search for texts that contain given words."""
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest

import torch

from playground.algorithms.sampling.phrases import Phrase, spellings
from playground.algorithms.search.beams import Beam, Beams, Ends, Offer, compared, log_probabilities
from playground.contract import Decoder, Lane, knob
from playground.engine.sampling import REMOVED
from playground.events import Branches, Figure, Note


class ForcedWords(Decoder):
    """Search for the most probable text that contains all of the given words or phrases, in any order.

    The candidates are the best continuations of all beams and those that begin or continue a missing phrase. Beams are
    grouped by the number of phrase tokens they contain, and beams are allocated to the groups in turn, so that a beam
    with an improbable word is not dropped before the words around it compensate for it. A text may end once no phrase
    is missing. Useful to write about given keywords or to enforce a terminology. Without words this is plain beam
    search. Hokamp and Liu 2017, arXiv 1704.07138, with the beam allocation of Post and Vilar 2018, arXiv 1804.06609.
    """

    name, title, paper, sheet = "forced_words", "Forced words", "1804.06609", "search/forced-words"
    guarantee, refuses = ("heuristic", "collapses"), ("drawing",)
    several = counts_forced = True

    words: str = knob("", multiline=True, help="words or phrases that the text must contain, one per line")
    beams: int = knob(8, 1, 64, step=1, help="sequences that grow in parallel, over all groups")
    length_exponent: float = knob(
        1.0, 0.0, 2.0, step=0.1, help="0 ranks texts by summed log-probability, which favours short ones; 1 by the mean"
    )

    def decode(self, lm: Lane) -> Iterator:
        words = [word.strip() for word in self.words.splitlines() if word.strip()]
        missing = Missing([spellings(lm, word, "words") for word in words])
        yield lm.prefill()
        beams = ForcedBeams(lm.fork(1)[0], self.beams, self.length_exponent, missing)
        while beams.live:
            rows = yield lm.extend([beam.leaf for beam in beams.live])
            logp = log_probabilities(rows)
            offers = beams.choose(logp, lm.ends)
            beams.follow(lm, offers, logp)
            yield lm.keep([lm.choose(rows[offer.place], offer.token, leaf=beam.leaf)
                           for offer, beam in zip(offers, beams.live)])
            beams.retire(lm)
            yield Branches(scores=beams.ranks(), sums=beams.sums())
            if words and beams.live:
                series = {"words in the best beam": missing.found(beams.live[0].leaf.written), "all": len(words)}
                yield Figure("scalar", "forced words", {"x": beams.live[0].leaf.generated, "series": series})
        yield from compared(beams.finished)
        if missing.found(beams.finished[0].leaf.written) < len(missing.phrases):
            yield Note("The text is too short for all words: raise the number of tokens, or the number of beams.")
        yield lm.keep(beams.finished[0].leaf)


class Missing:
    """The phrases that texts still have to contain, each given by its spellings."""

    def __init__(self, phrases: list[list[Phrase]]):
        self.phrases = phrases

    def found(self, text: Sequence[int]) -> int:
        """Number of phrases that a text contains."""
        return sum(any(contains(text, spelling) for spelling in phrase) for phrase in self.phrases)

    def tokens(self, text: Sequence[int]) -> int:
        """Number of phrase tokens in a text: those of contained phrases, and of phrases begun at its end."""
        return sum(max(len(spelling) if contains(text, spelling) else begun(text, spelling) for spelling in phrase)
                   for phrase in self.phrases)

    def following(self, text: Sequence[int]) -> set[int]:
        """Tokens that would begin or continue a phrase missing from a text."""
        lacking = [phrase for phrase in self.phrases if not any(contains(text, spelling) for spelling in phrase)]
        return {spelling[n] for phrase in lacking for spelling in phrase for n in {0, begun(text, spelling)}}


def contains(text: Sequence[int], phrase: Phrase) -> bool:
    n = len(phrase)
    return any(tuple(text[i:i + n]) == phrase for i in range(len(text) - n + 1))


def begun(text: Sequence[int], phrase: Phrase) -> int:
    """Length of the longest proper prefix of a phrase that a text ends in."""
    return next((n for n in range(min(len(phrase) - 1, len(text)), 0, -1) if tuple(text[-n:]) == phrase[:n]), 0)


class ForcedBeams(Beams):
    """Beams grouped by the number of phrase tokens they contain. A text without all phrases ranks below all others."""

    def __init__(self, leaf, width: int, exponent: float, missing: Missing):
        super().__init__(leaf, width, exponent)
        self.missing = missing

    def choose(self, gains: torch.Tensor, ends: Ends) -> list[Offer]:
        gains = torch.stack([self._open(row, beam, ends) for row, beam in zip(gains, self.live)])
        return super().choose(gains, ends)

    def _open(self, row: torch.Tensor, beam: Beam, ends: Ends) -> torch.Tensor:
        """The gains [V] of a beam, without end tokens while a phrase is missing and the text can continue."""
        if not self.lacks(beam):
            return row
        ending = [token for token in (row > REMOVED).nonzero()[:, 0].tolist() if ends(token)]
        left = row.index_fill(0, torch.tensor(ending, dtype=torch.long, device=row.device), REMOVED)
        return left if bool((left > REMOVED).any()) else row

    def _candidates(self, sums: torch.Tensor, ends: Ends) -> list[Offer]:
        """The best candidates and those that advance a phrase: the first of each group, then the second, ..."""
        offers = {(offer.place, offer.token): offer for offer in super()._candidates(sums, ends)}
        for place, beam in enumerate(self.live):
            for token in self.missing.following(beam.leaf.written):
                if token < sums.shape[1] and sums[place, token] > REMOVED:
                    offers[place, token] = Offer(place, token, float(sums[place, token]))
        return self._in_turn(sorted(offers.values(), key=lambda offer: (-offer.score, offer.place, offer.token)))

    def _in_turn(self, offers: list[Offer]) -> list[Offer]:
        groups: dict[int, list[Offer]] = {}
        for offer in offers:
            text = [*self.live[offer.place].leaf.written, offer.token]
            groups.setdefault(self.missing.tokens(text), []).append(offer)
        turns = zip_longest(*(groups[met] for met in sorted(groups, reverse=True)))
        return [offer for offer in chain.from_iterable(turns) if offer is not None]

    def lacks(self, beam: Beam) -> bool:
        return self.missing.found(beam.leaf.written) < len(self.missing.phrases)

    def rank(self, beam: Beam) -> float:
        return super().rank(beam) - (1e6 if beam.leaf.reason and self.lacks(beam) else 0.0)
