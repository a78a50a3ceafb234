"""What in-context navigation has asked and found: the form of its prompts, the prompts read, and the answers so far."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from playground.algorithms.search.explored_prefixes import Explored
from playground.contract import Lane
from playground.engine.sampling import first_largest
from strategies.sampling.in_context_navigation.lm_head_geometry import Atlas

ASKED = (
    "\n\nPlease show me some different ways to solve this problem.\n\nHere are different ways to solve the problem:\n"
)


class Form(NamedTuple):
    """The format of answers in a prompt, up to the start of the next one, and what ends an answer."""

    opening: str
    item: str  # before an answer, {n} is its number
    after: str
    stop: bytes  # a token that contains it ends an answer

    def put(self, answers: list[str], open_one: bool = True) -> str:
        items = [f"{self.item.format(n=n)}{answer}{self.after}" for n, answer in enumerate(answers, 1)]
        return self.opening + "".join(items) + self.item.format(n=len(answers) + 1) * open_one


LIST = Form("\n\nAnswer:\n", '{n}. "', '"\n', b'"')
WAYS = Form(ASKED, "### Way {n}:\n* **Step 1:**\n", "\n", b"#")


@dataclass
class ReadPrompts(Explored):
    """Results for the prompts and answers read: the best token after each node, and logits for each query."""

    best: dict[int, int] = field(default_factory=dict)
    rows: dict[int, Tensor] = field(default_factory=dict)  # logits [V]
    states: dict[int, Tensor] = field(default_factory=dict)  # input of the lm_head, [width], if it is drawn
    queries: dict[tuple[int, ...], int] = field(default_factory=dict)

    def learn(self, rows) -> None:
        self.best |= {rows.first + i: token for i, token in enumerate(first_largest(rows.raw)[:, 0].tolist())}

    def query(self, lm: Lane, ids: list[int]) -> Iterator:
        """The node after these tokens; its logits are stored."""
        if tuple(ids) in self.queries:
            return self.queries[tuple(ids)]
        # a new node, since the logits of an existing one may have been discarded
        node = self.tree.add(ids[-1], self.follow(ids[:-1]))
        rows = yield lm.extend(self.tree)
        self.store_query(ids, rows, node)
        return node

    def store_query(self, ids: list[int], rows, node: int) -> None:
        """Store the logits after these tokens, which end at a node."""
        self.learn(rows)
        self.rows[node], self.queries[tuple(ids)] = rows.raw[rows.row(node)], node
        if rows.hidden is not None:
            self.states[node] = rows.hidden[rows.row(node)]

    def unread(self, node: int) -> bool:
        return node not in self.best


@dataclass
class Search:
    """The answers so far, which may repeat, and the first tokens tried, which do not."""

    answers: list[str] = field(default_factory=list)
    queries: list[int] = field(default_factory=list)  # query that found each answer, 0 for known ones
    tried: dict[str, int] = field(default_factory=dict)  # first tokens by their text
    atlas: Atlas | None = None  # once the first query was made
    crossed: int = 0  # number of first tokens crossed out in the figure

    @property
    def different(self) -> int:
        return len(set(self.answers))
