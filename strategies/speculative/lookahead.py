"""Lookahead decoding: n-grams gathered on the model's own ways of correcting guesses."""
from collections.abc import Iterator
from random import Random

from playground.contract import Drafter, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.errors import Refusal
from playground.events import Figure

MOST_NODES = 128


class NGramPool:
    """For each token, the n-grams that were last seen to follow it, the latest last."""

    def __init__(self, most: int):
        self.most = most
        self.known: dict[int, dict[tuple[int, ...], None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.known.values()))

    def add(self, token: int, following: tuple[int, ...]) -> None:
        row = self.known.setdefault(token, {})
        row.pop(following, None)  # seen again it becomes the latest
        row[following] = None
        if len(row) > self.most:
            del row[next(iter(row))]

    def read(self, text: list[int], size: int) -> None:
        """Every n-gram of a text, `size` tokens after the first."""
        for i in range(len(text) - size):
            self.add(text[i], tuple(text[i + 1:i + 1 + size]))

    def after(self, token: int) -> list[list[int]]:
        return [list(following) for following in reversed(self.known.get(token, {}))]


class Lookahead(Drafter):
    """Run many Jacobi iterations side by side in one pass, keep the n-grams they come upon, and guess those that begin
    where the text ends.

    The window has n - 1 rows of guesses, each row a later iteration: the token of a row sees the first row up to its
    own column and the rows above it there. What the model says after the last row completes an n-gram for every column;
    the rows then move up by one. N-grams stay by their first token, and those after the text's last token are the
    guesses; the window itself is checked with them, for all of it hangs together as one tree. It begins with tokens of
    the prompt in one row that loses a column for each row it gains, moves by the model's own favourites whatever the
    lane draws, and rests where it would reach beyond the end. The first column hangs on the text's end, which may run
    ahead of the window: its n-gram counts where the model agrees with its second token. guesses = window = 0 is plain
    decoding. Fu et al. 2024, arXiv
    2402.02057.
    """

    name, title, paper, sheet = "lookahead", "Lookahead decoding", "2402.02057", "speculative/jacobi"
    guarantee = ("collapses",)

    n: int = knob(5, 3, 8, step=1, help="tokens of an n-gram, the one it is found by included")
    window: int = knob(7, 0, 30, step=1, help="columns of the window; 0 looks no further than the text itself")
    guesses: int = knob(7, 0, 30, step=1, help="n-grams that are checked in a round")
    prompt: bool = knob(True, help="begin with the n-grams of the prompt")

    # of the window, lists of tokens; the first is one shorter, for its first column is the end of the text
    _rows = None

    def check(self):
        nodes = (self.n - 1) * (self.window + self.guesses)
        if nodes > MOST_NODES:
            raise Refusal(
                f"A round would check {nodes} guesses, and {MOST_NODES} are the most: take a smaller n, window or number of guesses.",
                "window",
            )

    def propose(self, lm, budget) -> Iterator:
        if self._rows is None:
            self._begin(lm)
        self._nodes, tree = {}, TokenTree(self.name)
        for guess in self._pool.after(lm.tokens[-1])[:self.guesses]:
            self._path(tree, guess[:budget], lm.ends)
        fits = self.window and len(self._rows[0]) + len(self._rows) - 1 <= budget
        self._columns = [self._column(tree, column) for column in range(len(self._rows[0]) + 1)] if fits else []
        if self.window or self.guesses:
            yield Figure("scalar", "n-grams in the pool", {"x": lm.generated, "series": {"n-grams": len(self._pool)}})
        return tree

    def _begin(self, lm) -> None:
        text = lm.tokens[:lm.prompt_length]
        self._pool, self._rows = (
            NGramPool(max(1, self.guesses)),
            [Random(len(text)).choices(text, k=self.window + self.n - 3)],
        )
        if self.prompt:
            self._pool.read(text, self.n - 1)

    def _path(self, tree, tokens, ends=lambda token: False) -> list[int]:
        """Nodes of these tokens from the root down, the root first and those that are there already shared; none after
        the end of a text.
        """
        path = [ROOT]
        for token in tokens:
            place = (path[-1], token)
            self._nodes[place] = self._nodes[place] if place in self._nodes else tree.add(token, path[-1])
            path.append(self._nodes[place])
            if ends(token):
                break
        return path

    def _column(self, tree, column) -> list[int]:
        """Nodes down one column. It hangs on the first row, whose own first column is the root."""
        first, *below = self._rows
        return self._path(tree, [*first[:column], *(row[column] for row in below)])[column:]

    def observe(self, tree, rows, verdict) -> None:
        """Let every column go one row further; one that was full gives an n-gram, and the window moves on."""
        if not self._columns:
            return
        ahead, *said = (
            rows.raw[[rows.row(node) for node in (ROOT, *(column[-1] for column in self._columns))]].argmax(-1).tolist()
        )
        if len(self._rows) < self.n - 1:
            self._rows = [row[1:] for row in [*self._rows, said]]
            return
        for column, token in zip(self._columns, said):
            key, *following = [rows.committed[-1] if node == ROOT else tree.tokens[node] for node in column]
            if column[0] != ROOT or following[0] == ahead:
                self._pool.add(key, (*following, token))
        self._rows = self._moved(said)

    def _moved(self, said) -> list[list[int]]:
        return [self._rows[1][1:], *self._rows[2:], said]
