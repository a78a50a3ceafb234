"""ADED: tree search over a trigram table as drafter."""
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from math import log, sqrt

from playground.algorithms.speculative.shared_table import SharedTable
from playground.contract import Drafter, Lane, knob
from playground.contract.token_tree import TokenTree, merged
from playground.events import Figure

SHOWN = 40  # nodes of the search tree and successors in figures
Pair = tuple[int, int]


class TriGrams:
    """Weights of the tokens that follow a pair of tokens. They grow with use and are not normalised."""

    def __init__(self):
        self.known: SharedTable[Pair, dict[int, float]] = SharedTable()

    def reinforce(self, tokens, gain, cap) -> None:
        """Add `gain` to the weight of every trigram of the tokens, up to `cap`."""
        for *pair, token in zip(tokens, tokens[1:], tokens[2:]) if gain else ():
            followers = self.known.get(tuple(pair), {})
            self.known[tuple(pair)] = followers | {token: min(cap, followers.get(token, 0.0) + gain)}

    def read(self, text, most) -> None:
        """Add the relative frequencies of the `most` frequent tokens after each pair of a text; known weights are
        unchanged.
        """
        counts = defaultdict(Counter)
        for *pair, token in zip(text, text[1:], text[2:]):
            counts[tuple(pair)][token] += 1
        for pair, followers in counts.items():
            shares = {token: count / followers.total() for token, count in followers.most_common(most)}
            self.known[pair] = shares | self.known.get(pair, {})

    def best(self, pair) -> list[int]:
        """The token with the largest weight after a pair, as a list; empty if none is known."""
        followers = self.known.get(pair)
        return [max(followers, key=followers.get)] if followers else []

    def digest(self) -> str:
        """Hash of the table."""
        known = sorted((pair, sorted(followers.items())) for pair, followers in self.known.items())
        return blake2b(repr(known).encode(), digest_size=8).hexdigest()


@dataclass(slots=True)
class SearchNode:
    """A node of the search tree: its token and the one before it. `children` is None until it is expanded."""

    pair: Pair
    prior: float = 0.0  # weight of its trigram
    visits: int = 0
    score: float = 0.0  # sum over the visits
    children: list["SearchNode"] | None = None


class ADED(Drafter):
    """Store trigrams of the text in a table, and find draft tokens by a Monte Carlo tree search over it.

    Each round runs `iterations` searches from the last two tokens: selection by PUCT, then a rollout through the table.
    The `paths` most visited paths are drafted, each extended by the most probable next token. Committed text reinforces
    the last `window` tokens' trigrams, so the table adapts, and it persists for the next prompt. It starts with the
    prompt's trigrams; the released code reads a corpus. The score of a search is 1 plus the weights on its path, as in
    the paper, or always 1, which is what the released code amounts to. Rollouts are not sampled but replaced by their
    expectation. Without a table (no prompt, no gain), and with nodes = 0, this is plain decoding. Liu et al. 2024,
    arXiv 2407.12021.
    """

    name, title, paper, sheet = "aded", "ADED: tri-gram search", "2407.12021", "speculative/aded"
    guarantee, remembers, reconstruction, sure = ("collapses",), True, True, "medium"

    iterations: int = knob(150, 10, 500, step=10, help="searches per round")
    paths: int = knob(24, 4, 64, step=1, help="most visited paths that are drafted")
    length: int = knob(
        4, 2, 8, step=1, help="tokens in a search path, including the last of the text; one more is drafted"
    )
    nodes: int = knob(64, 0, 64, step=1, help="maximum draft tokens in the tree; 0 is plain decoding")
    c1: float = knob(32.0, 1.0, 64.0, step=1.0, help="PUCT: how far weights (priors) outweigh scores")
    c2: float = knob(8.0, 1.0, 32.0, step=1.0, help="PUCT: how slowly exploration grows with the visits")
    gain: float = knob(0.04, 0.0, 0.5, step=0.01, help="weight added to a trigram per round; 0 learns nothing")
    cap: float = knob(3.0, 1.0, 10.0, step=0.5, help="largest weight")
    window: int = knob(16, 3, 64, step=1, help="last tokens of the text whose trigrams are reinforced")
    prune: int = knob(12, 2, 64, step=1, help="successors per pair learned from the prompt")
    prompt: bool = knob(True, help="initialise the table with the prompt's trigrams")
    score: str = knob(
        "weights", choices=("weights", "one"), help="score of a search: 1 plus the weights on its path, or 1"
    )

    _table = None

    def propose(self, lm: Lane, budget) -> Iterator:
        if self._table is None:
            self._begin(lm)
        if len(lm.tokens) < 2 or not self.nodes or not budget:
            return TokenTree(self.name)
        root = self.search(tuple(lm.tokens[-2:]))
        paths = [self._truncated(path, budget, lm.ends) for path in self.most_visited(root)]
        tree, _ = merged(self._fitting(paths), self.name)
        yield from self._figures(lm, root)
        return tree

    def observe(self, tree, rows, verdict) -> None:
        self._adapt(rows.sequence.tokens)

    def _begin(self, lm: Lane) -> None:
        self._table = lm.memory(self.name, TriGrams)
        if self.prompt:
            self._table.read(lm.tokens[:lm.prompt_length], self.prune)
        self._adapt(lm.tokens)

    def _adapt(self, text) -> None:
        self._table.reinforce(text[-self.window:], self.gain, self.cap)

    # --- the search ---

    def search(self, pair) -> SearchNode:
        """Run the search from a pair of tokens and return its root."""
        root, averages = SearchNode(pair), {}
        for _ in range(self.iterations):
            path = [root]
            while path[-1].children and len(path) < self.length:
                path.append(self._select(path[-1]))
            if path[-1].children is None and len(path) < self.length:
                last = path[-1]
                last.children = [
                    SearchNode((last.pair[1], token), weight)
                    for token, weight in self._table.known.get(last.pair, {}).items()
                ]
                path += last.children[-1:]
            score = 1.0
            if self.score == "weights":
                score += sum(node.prior for node in path) + self._expected_weight(
                    path[-1].pair, self.length - len(path), averages
                )
            for node in path:
                node.visits += 1
                node.score += score
        return root

    def _select(self, node) -> SearchNode:
        """The first unvisited child, or the one with the largest PUCT value."""
        explore = (self.c1 + log((node.visits + self.c2 + 1) / self.c2)) * sqrt(node.visits)
        best, largest = node, float("-inf")
        for child in node.children:
            if not child.visits:
                return child
            value = child.score / child.visits + explore * child.prior / (1 + child.visits)
            if value > largest:
                best, largest = child, value
        return best

    def _expected_weight(self, pair, steps, averages) -> float:
        """Expected sum of weights of a rollout that samples each token in proportion to its weight."""
        followers = self._table.known.get(pair) if steps else None
        if not followers:
            return 0.0
        if (pair, steps) not in averages:
            rest = [
                weight * (weight + self._expected_weight((pair[1], token), steps - 1, averages))
                for token, weight in followers.items()
            ]
            averages[pair, steps] = sum(rest) / sum(followers.values())
        return averages[pair, steps]

    # --- the draft ---

    def most_visited(self, root) -> list[list[int]]:
        """Tokens of the most visited paths after the text, each with the most probable token after it."""
        found = [(root, [])]
        for node, tokens in found:
            found += [(child, [*tokens, child.pair[1]]) for child in node.children or () if child.visits]
        chosen = sorted(found, key=lambda path: -path[0].visits)[:self.paths]
        return [[*tokens, *self._table.best(node.pair)] for node, tokens in chosen if tokens]

    def _truncated(self, path, budget, ends) -> list[int]:
        """A path up to the budget and to its first end token, inclusive."""
        path = path[:budget]
        return path[:next((i + 1 for i, token in enumerate(path) if ends(token)), len(path))]

    def _fitting(self, paths) -> list[list[int]]:
        """Distinct paths that fit into `nodes`; removes those with most distinct tokens, the least visited first."""
        remaining = [list(path) for path in dict.fromkeys(map(tuple, paths)) if path]
        sizes = [len(set(path)) for path in remaining]
        while sum(sizes) > self.nodes:
            removed = max(range(len(remaining)), key=lambda i: (sizes[i], i))
            del remaining[removed], sizes[removed]
        return remaining

    def _figures(self, lm: Lane, root) -> Iterator:
        yield Figure("scalar", "pairs in the table", {"x": lm.generated, "series": {"pairs": len(self._table.known)}})
        if root.children:
            followers = sorted(root.children, key=lambda child: -child.prior)[:SHOWN]
            labels, weights = [lm.piece(child.pair[1]) for child in followers], [child.prior for child in followers]
            yield Figure("bars", "weights after the last two tokens", {"labels": labels, "values": weights})
            nodes, parents = self._outline(root)
            labels, visits = [lm.piece(node.pair[1]) for node in nodes], [node.visits for node in nodes]
            yield Figure("tree", "visits of the search", {"labels": labels, "parents": parents, "values": visits})

    def _outline(self, root) -> tuple[list[SearchNode], list[int]]:
        """The first nodes of a search tree, level by level, and the index of each one's parent."""
        nodes, parents = [root], [-1]
        for parent, node in enumerate(nodes):
            children = (node.children or [])[:SHOWN - len(nodes)]
            nodes += children
            parents += [parent] * len(children)
        return nodes, parents
