"""Suffix decoding: all texts seen so far as drafter."""
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import groupby
from math import floor

from playground.algorithms.speculative.suffix_index import Suffixes
from playground.contract import Drafter, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.events import Figure


@dataclass
class Guess:
    """A tree of guesses after an ending of `match` tokens; `score` is how many of them are expected to stand."""

    tree: TokenTree = field(default_factory=TokenTree)
    match: int = 0
    score: float = 0.0


class SuffixDecoding(Drafter):
    """Look up how this text and all earlier answers went on after the same ending; guess far where they agree, little
    where they do not.

    Every ending of the text that occurred before is tried, short ones with much evidence and long ones with little: one
    of m tokens may guess alpha m + offset tokens ahead, each the most frequent continuation of the one before, as long
    as the frequencies multiply to min_prob. The guess whose frequencies sum to most is taken, from this prompt and
    answer or from the answers that were written for the same visitor before, the oldest of which are forgotten first.
    alpha = offset = 0 is plain decoding. Oliaro et al. 2024, arXiv 2411.04975; falling back on a draft model is left
    out.
    """

    name, title, paper, sheet = "suffix_decoding", "Suffix decoding", "2411.04975", "speculative/suffix-decoding"
    guarantee, remembers = ("collapses",), True

    depth: int = knob(64, 8, 128, step=1, help="tokens that an ending and its continuation may have together")
    alpha: float = knob(1.0, 0.0, 4.0, step=0.1, help="tokens guessed for each token of the ending")
    offset: float = knob(0.0, -4.0, 8.0, step=0.5, help="tokens guessed besides")
    min_prob: float = knob(0.1, 0.0, 0.9, step=0.05, help="smallest product of frequencies that is still guessed")
    most: int = knob(64, 1, 64, step=1, help="guesses of a round at most")
    requests: int = knob(200, 0, 1000, step=1, help="earlier answers that are remembered; 0 looks at this text alone")
    branching: bool = knob(False, help="guess a tree of the most probable continuations in place of one")

    _local = None  # prompt and answer of this run

    def propose(self, lm, budget) -> Iterator:
        if self._local is None:
            self._begin(lm)
        self._learn(lm.tokens)
        context, ends = lm.tokens[-self.depth:], lm.ends
        local, past = (self.guess(store, context, budget, ends) for store in (self._local, self._past))
        chosen, where = (local, "this text") if local.score >= past.score else (past, "earlier answers")
        yield from self._tell(lm, local, past)
        if chosen.match and lm.generated:
            span = [max(0, lm.generated - chosen.match), lm.generated, f"found in {where}", chosen.score]
            yield Figure("spans", "endings that were found", {"spans": [span]})
        return chosen.tree

    def observe(self, tree, rows, verdict) -> None:
        self._learn(rows.sequence.tokens)

    def _begin(self, lm) -> None:
        self._local, self._past = Suffixes(), lm.memory(self.name, Suffixes) if self.requests else Suffixes()
        self._past.only_last(max(0, self.requests - 1))
        for store in (self._local, self._past):
            store.begin()
        self._prompt = self._learned = lm.prompt_length
        self._local.add(lm.tokens[:self._prompt])

    def _learn(self, text) -> None:
        """What was committed since; prompts are looked up in their own run alone."""
        fresh, self._learned = text[self._learned:], len(text)
        self._local.add(fresh)
        if self.requests:
            self._past.add(fresh)

    def guess(self, store, context, budget, ends=lambda token: False) -> Guess:
        """The best guess a store has for what follows a context, at most `budget` deep."""
        best = Guess()
        for match, places in self._endings(store, context):
            tree, score = self._grow(store, places, min(self._cap(match), self.most), budget, ends)
            if score and score >= best.score:
                best = Guess(tree, match, score)
        return best

    def _endings(self, store, context) -> Iterator[tuple[int, list[int]]]:
        """Endings worth trying. Those that occur in the same places guess alike, so of them the one that may guess most
        is enough.
        """
        for _, alike in groupby(store.occurrences(context[1:]), key=lambda found: len(found[1])):
            yield max(alike, key=lambda found: (self._cap(found[0]), found[0]))

    def _cap(self, match) -> int:
        return max(0, min(floor(self.alpha * match + self.offset + 1e-6), self.depth - match))

    def _grow(self, store, places, cap, budget, ends) -> tuple[TokenTree, float]:
        """A tree of at most `cap` guesses after these places, the likeliest first, and the sum of their chances."""
        tree, score, waiting = TokenTree(self.name), 0.0, []
        self._push(store, waiting, 1.0, ROOT, 1, places)
        while waiting and len(tree) < cap:
            chance, _, token, parent, depth, share, after = heappop(waiting)
            if depth > budget:
                continue
            node = tree.add(token, parent, confidence=share)
            score -= chance
            if not ends(token):
                self._push(store, waiting, -chance, node, depth + 1, after)
        return tree, score

    def _push(self, store, waiting, chance, parent, depth, places) -> None:
        """Let the followers of a node wait, all of them or the most frequent; of equals the one that was read last."""
        followers = sorted(store.followers(places).items(), key=lambda follower: (-len(follower[1]), -follower[1][-1]))
        for token, after in followers if self.branching else followers[:1]:
            share = len(after) / len(places)
            if chance * share >= self.min_prob:
                heappush(waiting, (-chance * share, -after[-1], token, parent, depth, share, after))

    def _tell(self, lm, local, past) -> Iterator:
        scores, matches = (
            {"this text": local.score, "earlier answers": past.score},
            {"this text": local.match, "earlier answers": past.match},
        )
        yield Figure("scalar", "guesses expected to stand", {"x": lm.generated, "series": scores})
        yield Figure("scalar", "tokens of the ending that was found", {"x": lm.generated, "series": matches})
