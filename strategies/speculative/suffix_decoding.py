"""Suffix decoding: matches in this text and in earlier answers as drafts."""
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import groupby
from math import floor

from playground.algorithms.speculative.suffix_index import SuffixIndex
from playground.contract import Drafter, Lane, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.events import Figure


@dataclass
class ScoredDraft:
    """A draft tree after a suffix of `match` tokens; `score` is the expected number of accepted tokens."""

    tree: TokenTree = field(default_factory=TokenTree)
    match: int = 0
    score: float = 0.0


class SuffixDecoding(Drafter):
    """Look up continuations of the same suffix in this text and in earlier answers, and draft more tokens the more
    consistent they are.

    Every suffix of the text that occurred before is looked up. A suffix of m tokens may draft up to alpha m + offset
    tokens, each the most frequent continuation, while the product of relative frequencies is at least min_prob. No path
    is longer than depth - m; a tree may have more nodes than that. The draft with the largest sum of these products is
    used, from this prompt and answer or from earlier answers to the same visitor, of which the oldest are evicted
    first. alpha = offset = 0 is plain decoding. The fallback to a draft model is left out. Oliaro et al. 2024, arXiv
    2411.04975.
    """

    name, title, paper, sheet = "suffix_decoding", "Suffix decoding", "2411.04975", "speculative/suffix-decoding"
    guarantee, remembers = ("collapses",), True

    depth: int = knob(64, 8, 128, step=1, help="maximum tokens of a suffix and its continuation together")
    alpha: float = knob(1.0, 0.0, 4.0, step=0.1, help="draft tokens per matched token")
    offset: float = knob(0.0, -4.0, 8.0, step=0.5, help="draft tokens in addition to that")
    min_prob: float = knob(0.1, 0.0, 0.9, step=0.05, help="smallest product of relative frequencies to draft")
    most: int = knob(64, 1, 64, step=1, help="maximum draft tokens per round")
    requests: int = knob(200, 0, 1000, step=1, help="earlier answers kept in memory; 0 searches this text only")
    branching: bool = knob(False, help="draft a tree of the most probable continuations instead of one chain")

    _local = None  # prompt and answer of this run

    def propose(self, lm: Lane, budget) -> Iterator:
        if self._local is None:
            self._begin(lm)
        self._learn(lm.tokens)
        context, ends = lm.tokens[-self.depth:], lm.ends
        local, past = (self.best_draft(store, context, budget, ends) for store in (self._local, self._past))
        chosen, where = (local, "this text") if local.score >= past.score else (past, "earlier answers")
        yield from self._figures(lm, local, past)
        if chosen.match and lm.generated:
            span = [max(0, lm.generated - chosen.match), lm.generated, f"found in {where}", chosen.score]
            yield Figure("spans", "matched suffixes", {"spans": [span]})
        return chosen.tree

    def observe(self, tree, rows, verdict) -> None:
        self._learn(rows.sequence.tokens)

    def _begin(self, lm: Lane) -> None:
        self._local, self._past = SuffixIndex(), lm.memory(self.name, SuffixIndex) if self.requests else SuffixIndex()
        self._past.keep_last(max(0, self.requests - 1))
        for store in (self._local, self._past):
            store.begin()
        self._prompt = self._learned = lm.prompt_length
        self._local.add(lm.tokens[:self._prompt])

    def _learn(self, text) -> None:
        """Index the tokens committed since the last call; prompts are only searched in their own run."""
        new, self._learned = text[self._learned:], len(text)
        self._local.add(new)
        if self.requests:
            self._past.add(new)

    def best_draft(self, store, context, budget, ends=lambda token: False) -> ScoredDraft:
        """The draft with the highest score that an index gives for a context, at most `budget` deep."""
        best = ScoredDraft()
        for match, places in self._suffixes(store, context):
            nodes, path = self._limits(match)
            tree, score = self._grow(store, places, nodes, min(path, budget), ends)
            if score and score >= best.score:
                best = ScoredDraft(tree, match, score)
        return best

    def _suffixes(self, store, context) -> Iterator[tuple[int, list[int]]]:
        """Suffixes to try, shortest first."""
        for _, same in groupby(store.occurrences(context[1:]), key=lambda found: len(found[1])):
            yield from self._undominated(list(same))

    def _undominated(self, suffixes) -> list[tuple[int, list[int]]]:
        """Of suffixes with the same occurrences, shortest first, those whose limits no other reaches in both."""
        left = []
        for suffix in reversed(suffixes):
            nodes, path = self._limits(suffix[0])
            if not left or path > left[-1][1]:
                left = [other for other in left if other[0] > nodes] + [(nodes, path, suffix)]
        return [suffix for _, _, suffix in reversed(left)]

    def _limits(self, match) -> tuple[int, int]:
        """Most nodes and longest path to draft after a suffix of `match` tokens."""
        nodes = max(0, min(floor(self.alpha * match + self.offset + 1e-6), self.most))
        path = min(nodes, self.depth - match)
        return nodes if self.branching else path, path

    def _grow(self, store, places, nodes, path, ends) -> tuple[TokenTree, float]:
        """A tree of at most `nodes` draft tokens, at most `path` deep, most probable first, and its score."""
        tree, score, waiting = TokenTree(self.name), 0.0, []
        self._push(store, waiting, 1.0, ROOT, 1, places)
        while waiting and len(tree) < nodes:
            chance, _, token, parent, depth, share, after = heappop(waiting)
            if depth > path:
                continue
            node = tree.add(token, parent, confidence=share)
            score -= chance
            if not ends(token):
                self._push(store, waiting, -chance, node, depth + 1, after)
        return tree, score

    def _push(self, store, waiting, chance, parent, depth, places) -> None:
        """Push the followers of a node, all or the most frequent; on ties the one read last."""
        followers = sorted(store.followers(places).items(), key=lambda follower: (-len(follower[1]), -follower[1][-1]))
        for token, after in followers if self.branching else followers[:1]:
            share = len(after) / len(places)
            if chance * share >= self.min_prob:
                heappush(waiting, (-chance * share, -after[-1], token, parent, depth, share, after))

    def _figures(self, lm: Lane, local, past) -> Iterator:
        scores, matches = (
            {"this text": local.score, "earlier answers": past.score},
            {"this text": local.match, "earlier answers": past.match},
        )
        yield Figure("scalar", "expected accepted draft tokens", {"x": lm.generated, "series": scores})
        yield Figure("scalar", "length of the matched suffix", {"x": lm.generated, "series": matches})
