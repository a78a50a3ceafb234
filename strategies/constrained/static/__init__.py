"""Beam search over a list of items."""
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from playground.algorithms.search.beams import Offer, best
from playground.contract import Decoder, Lane, knob
from playground.errors import Refusal
from playground.events import Branches, Figure, Note
from playground.grammar.limits import check_items, check_rows
from strategies.constrained.static.csr_trie import ROOT, CsrTrie

NEVER = float("-inf")
SHOWN = 12  # items and candidates


@dataclass(eq=False)
class ItemBeam:
    """A prefix of an item: its sequence, its log-probability in nats, its state in the trie."""

    leaf: object
    score: float = 0.0
    state: int = ROOT


class Static(Decoder):
    """Answer with one of a list of items, found by beam search: only prefixes of items grow, and the most probable
    complete item wins.

    The items form a trie stored as a sparse matrix; at every step the tokens after all beams are gathered from it at
    once and only their log-probabilities are read, so a step costs the same for a hundred items and for a million. A
    beam that completed its item stays among the best until others displace it. With as many beams as items all are
    found, in order of their probability; one beam is greedy. Su et al. 2026, arXiv 2602.22647 (STATIC); items of
    different length, which end with the end token, are this project's own.
    """

    name, title, paper, sheet = "static", "STATIC: search among items", "2602.22647", "constrained/static-trie"
    guarantee, several, whole_answers, refuses = ("heuristic",), True, True, ("sampler", "constraint")

    items: str = knob(
        "abc|abd|bac|bcd|cab",
        multiline=True,
        file=True,
        help="the items, separated by | or line breaks",
    )
    beams: int = knob(4, 1, 64, step=1, help="prefixes that grow in parallel")

    def check(self) -> None:
        check_items(self.items)
        if not self._texts():
            raise Refusal("There is no item to choose: write some, separated by |.", "items")

    def decode(self, lm: Lane) -> Iterator:
        row = yield lm.prefill()
        trie = self._trie(lm, row.raw.device)
        yield Note(
            f"{len(self._texts())} items: {trie.edges} edges after the first token, {trie.bytes} bytes of index."
        )
        live, done, depth = [ItemBeam(lm.fork(1)[0])], [], 0
        while live:
            rows = yield lm.extend([beam.leaf for beam in live])
            sums, tokens, states = self._candidates(trie, rows, live, depth)
            offers = best(sums, self.beams)
            yield self._shown(lm, trie, sums, offers, tokens)
            offers, done = self._compete(lm, offers, done)
            live = yield from self._grow(lm, rows, live, [self._named(offer, tokens) for offer in offers],
                                         [int(states[offer.place, offer.token]) for offer in offers])
            done += [beam for beam in live if beam.leaf.reason or trie.complete(beam.state)]
            live, depth = [beam for beam in live if beam not in done], depth + 1
            yield Branches(scores={beam.leaf.number: beam.score for beam in [*live, *done]})
        yield from self._chosen(lm, sorted(done, key=lambda beam: -beam.score))

    def _texts(self) -> list[str]:
        return list(dict.fromkeys(text for line in self.items.splitlines() for text in line.split("|") if text.strip()))

    def _trie(self, lm: Lane, device: torch.device) -> CsrTrie:
        end = sorted(lm.end_ids)[:1]
        spelt = [self._spelt(lm, text) for text in self._texts()]
        longest = max(map(len, spelt))
        if longest > lm.remaining:
            raise Refusal(
                f"An item has {longest} tokens, and {lm.remaining} can be written: raise the length.", "items"
            )
        check_rows(len(spelt), longest)
        try:
            return CsrTrie([item + end for item in spelt], lm.vocabulary).to(device)
        except ValueError as reason:
            raise Refusal(
                f"This model's tokens do not distinguish these items ({reason}): change them.", "items"
            ) from None

    def _spelt(self, lm: Lane, text: str) -> list[int]:
        tokens = lm.spell(text)
        if not tokens or max(tokens) >= lm.vocabulary:
            raise Refusal(f"This model has no tokens for the item {text!r}: write another.", "items")
        return tokens

    def _candidates(
        self, trie: CsrTrie, rows, live: list[ItemBeam], depth: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probability of each prefix with each token that may follow, the tokens, and their states, [live, k].
        """
        logp = torch.cat([row.logp for row in rows])[:, :trie.vocabulary]
        tokens, states, count = trie.following(torch.tensor([beam.state for beam in live], device=logp.device), depth)
        gains = logp.gather(1, tokens.clamp(max=trie.vocabulary - 1)).masked_fill(~count, NEVER)
        return (
            torch.tensor([beam.score for beam in live], device=logp.device, dtype=logp.dtype)[:, None] + gains,
            tokens,
            states,
        )

    def _compete(self, lm: Lane, offers: list[Offer], done: list[ItemBeam]) -> tuple[list[Offer], list[ItemBeam]]:
        """The best of the growing and the complete beams, at most `beams` in total."""
        ranked = sorted([*done, *offers], key=lambda either: -either.score)[:self.beams]
        lm.drop(beam.leaf for beam in done if beam not in ranked)
        return [offer for offer in offers if offer in ranked], [beam for beam in done if beam in ranked]

    def _named(self, offer: Offer, tokens: torch.Tensor) -> Offer:
        return offer._replace(token=int(tokens[offer.place, offer.token]))

    def _grow(self, lm: Lane, rows, live: list[ItemBeam], offers: list[Offer], states: list[int]) -> Iterator:
        """The beams of these offers; the first of a parent continues its sequence, the others forks of it."""
        places = [offer.place for offer in offers]
        leaves = [
            live[place].leaf if place not in places[:i] else lm.fork(1, live[place].leaf)[0]
            for i, place in enumerate(places)
        ]
        lm.drop(beam.leaf for place, beam in enumerate(live) if place not in places)
        yield lm.keep([lm.choose(rows[offer.place], offer.token, leaf=leaf) for offer, leaf in zip(offers, leaves)])
        return [ItemBeam(leaf, offer.score, state) for leaf, offer, state in zip(leaves, offers, states)]

    def _shown(self, lm: Lane, trie: CsrTrie, sums: torch.Tensor, offers: list[Offer], tokens: torch.Tensor) -> Figure:
        candidates = [self._named(offer, tokens) for offer in best(sums, SHOWN)]
        taken = [self._named(offer, tokens) for offer in offers]
        labels = [f"{'✓' if offer in taken else '–'} {offer.place + 1} {lm.piece(offer.token)}" for offer in candidates]
        return Figure(
            "bars",
            "beam and token, log-probability of the beginning",
            {"labels": labels, "values": [offer.score for offer in candidates]},
        )

    def _chosen(self, lm: Lane, done: list[ItemBeam]) -> Iterator:
        shown = done[:SHOWN]
        yield Figure(
            "bars",
            "items found, by log-probability",
            {"labels": [beam.leaf.text for beam in shown], "values": [beam.score for beam in shown]},
        )
        yield lm.keep(done[0].leaf)
