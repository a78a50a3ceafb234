"""ADED: a search through a table of tri-grams as drafter."""
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from math import log, sqrt

from playground.contract import Drafter, knob
from playground.contract.token_tree import TokenTree, merged
from playground.events import Figure

SHOWN = 40  # places of the search, and successors
Pair = tuple[int, int]


class TriGrams:
    """Weights of the tokens that follow a pair of tokens. They grow with every use and are no probabilities."""

    def __init__(self):
        self.known: dict[Pair, dict[int, float]] = {}

    def __deepcopy__(self, memo):
        copy = TriGrams()
        copy.known = {pair: dict(row) for pair, row in self.known.items()}
        return copy

    def reinforce(self, tokens, more, cap) -> None:
        """Every tri-gram of the tokens gains weight, up to a cap."""
        for *pair, token in zip(tokens, tokens[1:], tokens[2:]) if more else ():
            row = self.known.setdefault(tuple(pair), {})
            row[token] = min(cap, row.get(token, 0.0) + more)

    def read(self, text, most) -> None:
        """Learn how often each token follows a pair in a text, the `most` frequent alone; what is known already stays.
        """
        counts = defaultdict(Counter)
        for *pair, token in zip(text, text[1:], text[2:]):
            counts[tuple(pair)][token] += 1
        for pair, row in counts.items():
            shares = {token: count / row.total() for token, count in row.most_common(most)}
            self.known[pair] = shares | self.known.get(pair, {})

    def best(self, pair) -> list[int]:
        """The token of the largest weight, if any is known."""
        row = self.known.get(pair)
        return [max(row, key=row.get)] if row else []

    def digest(self) -> str:
        return blake2b(
            repr(sorted((pair, sorted(row.items())) for pair, row in self.known.items())).encode(), digest_size=8
        ).hexdigest()


@dataclass(slots=True)
class SearchNode:
    """A word of the search, with the word before it. `children` is None until it was expanded."""

    pair: Pair
    prior: float = 0.0  # weight that leads here
    visits: int = 0
    score: float = 0.0  # sum over the visits
    children: list["SearchNode"] | None = None


class ADED(Drafter):
    """A table of which token followed which two grows with the text; a tree search through it finds what to guess.

    Each round searches `iterations` times from the last two tokens: down the place that promises most or was tried
    least (PUCT), then on through the table; the `paths` most visited ways become guesses, each one token longer than it
    was searched. What is written gains weight, `window` tokens at a time, so the table follows the text and stays for
    the next prompt. It begins with the prompt's own tri-grams, where the released code reads a corpus. A search scores
    1 and the weights on its way, as the paper has it, or always 1, as the released code comes to; how it goes on below
    the tree is not drawn but averaged over. Without a table (no prompt, no gain) it is plain decoding, as with nodes =
    0. Liu et al. 2024, arXiv 2407.12021.
    """

    name, title, paper, sheet = "aded", "ADED: tri-gram search", "2407.12021", "speculative/aded"
    guarantee, remembers, reconstruction, sure = ("collapses",), True, True, "medium"

    iterations: int = knob(150, 10, 500, step=10, help="ways searched in a round")
    paths: int = knob(24, 4, 64, step=1, help="most visited ways that become guesses")
    length: int = knob(
        4, 2, 8, step=1, help="tokens of a searched way, the last of the text included; one is guessed besides"
    )
    nodes: int = knob(64, 0, 64, step=1, help="guesses in the tree at most; 0 is plain decoding")
    c1: float = knob(32.0, 1.0, 64.0, step=1.0, help="how much the search follows the weights in place of scores")
    c2: float = knob(8.0, 1.0, 32.0, step=1.0, help="how slowly that grows with the visits")
    gain: float = knob(0.04, 0.0, 0.5, step=0.01, help="weight a tri-gram gains in a round; 0 learns nothing")
    cap: float = knob(3.0, 1.0, 10.0, step=0.5, help="largest weight")
    window: int = knob(16, 3, 64, step=1, help="last tokens of the text that gain weight")
    prune: int = knob(12, 2, 64, step=1, help="successors of a pair that are learned from the prompt")
    prompt: bool = knob(True, help="begin with the tri-grams of the prompt")
    score: str = knob(
        "weights", choices=("weights", "one"), help="what a searched way scores: 1 and the weights on it, or 1"
    )

    _table = None

    def propose(self, lm, budget) -> Iterator:
        if self._table is None:
            self._begin(lm)
        if len(lm.tokens) < 2 or not self.nodes or not budget:
            return TokenTree(self.name)
        root = self.search(tuple(lm.tokens[-2:]))
        tree, _ = merged(self._within([self._cut(path, budget, lm.ends) for path in self.ways(root)]), self.name)
        yield from self._tell(lm, root)
        return tree

    def observe(self, tree, rows, verdict) -> None:
        self._adapt(rows.sequence.tokens)

    def _begin(self, lm) -> None:
        self._table = lm.memory(self.name, TriGrams)
        if self.prompt:
            self._table.read(lm.tokens[:lm.prompt_length], self.prune)
        self._adapt(lm.tokens)

    def _adapt(self, text) -> None:
        self._table.reinforce(text[-self.window:], self.gain, self.cap)

    # --- the search ---

    def search(self, pair) -> SearchNode:
        """The tree of all that was searched after a pair of tokens."""
        root, averages = SearchNode(pair), {}
        for _ in range(self.iterations):
            path = [root]
            while path[-1].children and len(path) < self.length:
                path.append(self._promising(path[-1]))
            if path[-1].children is None and len(path) < self.length:
                last = path[-1]
                last.children = [
                    SearchNode((last.pair[1], token), weight)
                    for token, weight in self._table.known.get(last.pair, {}).items()
                ]
                path += last.children[-1:]
            score = 1.0
            if self.score == "weights":
                score += sum(place.prior for place in path) + self._on_average(
                    path[-1].pair, self.length - len(path), averages
                )
            for place in path:
                place.visits += 1
                place.score += score
        return root

    def _promising(self, place) -> SearchNode:
        """The first child that was never visited, or the one of the largest PUCT."""
        explore = (self.c1 + log((place.visits + self.c2 + 1) / self.c2)) * sqrt(place.visits)
        best, largest = place, float("-inf")
        for child in place.children:
            if not child.visits:
                return child
            promise = child.score / child.visits + explore * child.prior / (1 + child.visits)
            if promise > largest:
                best, largest = child, promise
        return best

    def _on_average(self, pair, steps, averages) -> float:
        """Expected sum of weights where a way goes on at random, a token by its weight."""
        row = self._table.known.get(pair) if steps else None
        if not row:
            return 0.0
        if (pair, steps) not in averages:
            rest = [
                weight * (weight + self._on_average((pair[1], token), steps - 1, averages))
                for token, weight in row.items()
            ]
            averages[pair, steps] = sum(rest) / sum(row.values())
        return averages[pair, steps]

    # --- what becomes of it ---

    def ways(self, root) -> list[list[int]]:
        """Tokens of the most visited ways without those of the text, each with the likeliest token after it."""
        found = [(root, [])]
        for place, words in found:
            found += [(child, [*words, child.pair[1]]) for child in place.children or () if child.visits]
        chosen = sorted(found, key=lambda way: -way[0].visits)[:self.paths]
        return [[*words, *self._table.best(place.pair)] for place, words in chosen if words]

    def _cut(self, path, budget, ends) -> list[int]:
        path = path[:budget]
        return path[:next((i + 1 for i, token in enumerate(path) if ends(token)), len(path))]

    def _within(self, paths) -> list[list[int]]:
        """Without doubles, and as many as there is place for: those of most different tokens go first, of equals the
        least visited.
        """
        kept = [list(path) for path in dict.fromkeys(map(tuple, paths)) if path]
        sizes = [len(set(path)) for path in kept]
        while sum(sizes) > self.nodes:
            gone = max(range(len(kept)), key=lambda i: (sizes[i], i))
            del kept[gone], sizes[gone]
        return kept

    def _tell(self, lm, root) -> Iterator:
        yield Figure("scalar", "pairs in the table", {"x": lm.generated, "series": {"pairs": len(self._table.known)}})
        if root.children:
            row = sorted(root.children, key=lambda child: -child.prior)[:SHOWN]
            labels, weights = [lm.piece(child.pair[1]) for child in row], [child.prior for child in row]
            yield Figure("bars", "weights after the last two tokens", {"labels": labels, "values": weights})
            places, parents = self._outline(root)
            labels, visits = [lm.piece(place.pair[1]) for place in places], [place.visits for place in places]
            yield Figure("tree", "visits of the search", {"labels": labels, "parents": parents, "values": visits})

    def _outline(self, root) -> tuple[list[SearchNode], list[int]]:
        """The first places of a search, level by level, and where in the list the parent of each stands."""
        places, parents = [root], [-1]
        for above, place in enumerate(places):
            below = (place.children or [])[:SHOWN - len(places)]
            places += below
            parents += [above] * len(below)
        return places, parents
