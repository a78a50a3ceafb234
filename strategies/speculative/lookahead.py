"""Lookahead decoding: n-grams collected from parallel Jacobi iterations."""
from collections.abc import Iterator
from random import Random

from playground.contract import Drafter, Lane, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.sampling import first_largest
from playground.errors import Refusal
from playground.events import Figure

MOST_NODES = 128


class NGramPool:
    """For each token, the last `most` distinct n-grams seen after it, the latest last."""

    def __init__(self, most: int):
        self.most = most
        self.known: dict[int, dict[tuple[int, ...], None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.known.values()))

    def add(self, token: int, following: tuple[int, ...]) -> None:
        """Add the n-gram `following` a token, as the latest, and evict the oldest if there are too many."""
        ngrams = self.known.setdefault(token, {})
        ngrams.pop(following, None)
        ngrams[following] = None
        if len(ngrams) > self.most:
            del ngrams[next(iter(ngrams))]

    def read(self, text: list[int], size: int) -> None:
        """Add every n-gram of a text: `size` tokens after each token."""
        for i in range(len(text) - size):
            self.add(text[i], tuple(text[i + 1:i + 1 + size]))

    def after(self, token: int) -> list[list[int]]:
        """The n-grams after a token, the latest first."""
        return [list(following) for following in reversed(self.known.get(token, {}))]


class Lookahead(Drafter):
    """Run Jacobi iterations for a window of positions in one forward, collect n-grams from them, and draft those that
    start with the last token.

    The window has n - 1 rows of tokens, each a later iteration. A token attends to the first row up to its own column,
    and to the rows above it in that column. The model's predictions after the last row complete one n-gram per column,
    and the rows move up by one. N-grams are stored by their first token; those after the text's last token are drafted.
    Window and drafts form one tree and share a forward. The window starts with random prompt tokens in one row, loses a
    column for each row it gains, is updated by argmax even if the lane samples, and is left out if it would exceed the
    length limit. The first column continues the text, which may advance ahead of the window, so its n-gram is stored
    only if the model agrees with its second token. guesses = window = 0 is plain decoding. Fu et al. 2024, arXiv
    2402.02057.
    """

    name, title, paper, sheet = "lookahead", "Lookahead decoding", "2402.02057", "speculative/jacobi"
    guarantee = ("collapses",)

    n: int = knob(5, 3, 8, step=1, help="tokens in an n-gram, including the first, by which it is stored")
    window: int = knob(7, 0, 30, step=1, help="columns of the window; 0 disables it")
    guesses: int = knob(7, 0, 30, step=1, help="n-grams verified per round")
    prompt: bool = knob(True, help="initialise the pool with the n-grams of the prompt")

    # rows of the window, lists of tokens; the first is one shorter, because its first column is the text's last token
    _rows = None

    def check(self):
        nodes = (self.n - 1) * (self.window + self.guesses)
        if nodes > MOST_NODES:
            raise Refusal(
                f"A round would have {nodes} draft tokens, and the maximum is {MOST_NODES}: "
                "choose a smaller n, window or guesses.",
                "window",
            )

    def propose(self, lm: Lane, budget) -> Iterator:
        if self._rows is None:
            self._begin(lm)
        self._nodes, tree = {}, TokenTree(self.name)
        for following in self._pool.after(lm.tokens[-1])[:self.guesses]:
            self._path(tree, following[:budget], lm.ends)
        fits = self.window and len(self._rows[0]) + len(self._rows) - 1 <= budget
        self._columns = [self._column(tree, column) for column in range(len(self._rows[0]) + 1)] if fits else []
        if self.window or self.guesses:
            yield Figure("scalar", "n-grams in the pool", {"x": lm.generated, "series": {"n-grams": len(self._pool)}})
        return tree

    def _begin(self, lm: Lane) -> None:
        text = lm.tokens[:lm.prompt_length]
        self._pool, self._rows = (
            NGramPool(max(1, self.guesses)),
            [Random(len(text)).choices(text, k=self.window + self.n - 3)],
        )
        if self.prompt:
            self._pool.read(text, self.n - 1)

    def _path(self, tree, tokens, ends=lambda token: False) -> list[int]:
        """Add a path of tokens from the root up to an end token, sharing nodes; returns the root and its nodes."""
        path = [ROOT]
        for token in tokens:
            edge = (path[-1], token)
            self._nodes[edge] = self._nodes[edge] if edge in self._nodes else tree.add(token, path[-1])
            path.append(self._nodes[edge])
            if ends(token):
                break
        return path

    def _column(self, tree, column) -> list[int]:
        """Nodes of one column of the window, from the first row down; its ancestors are the first row before it."""
        first, *below = self._rows
        return self._path(tree, [*first[:column], *(row[column] for row in below)])[column:]

    def observe(self, tree, rows, verdict) -> None:
        """Add a row of predictions to the window; if it was full, store an n-gram per column and drop the first row."""
        if not self._columns:
            return
        ends = [rows.row(node) for node in (ROOT, *(column[-1] for column in self._columns))]
        after_text, *predicted = first_largest(rows.raw[ends])[:, 0].tolist()
        if len(self._rows) < self.n - 1:
            self._rows = [row[1:] for row in [*self._rows, predicted]]
            return
        for column, token in zip(self._columns, predicted):
            first, *following = [rows.committed[-1] if node == ROOT else tree.tokens[node] for node in column]
            if column[0] != ROOT or following[0] == after_text:
                self._pool.add(first, (*following, token))
        self._rows = self._moved(predicted)

    def _moved(self, predicted) -> list[list[int]]:
        return [self._rows[1][1:], *self._rows[2:], predicted]
