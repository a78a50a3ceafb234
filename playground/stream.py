"""A stream: one model following a lane's text with a cache of its own, and the requests that make it look ahead.

The target is a stream; so is a draft model. Each catches up with the committed text when it is next asked for rows.
A request is what a strategy yields and the scheduler serves, one forward at a time; its answer comes back from the yield.
"""
from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from playground.engine.model import Model, Work
from playground.events import Forward
from playground.parts.tree import ROOT, TokenTree, chain
from playground.rows import Rows, concat

if TYPE_CHECKING:
    from playground.lane import Lane

CHUNK = 512  # tokens of a prompt that go through in one forward, so that stop and the other lanes need not wait


class Request:
    """Something a strategy asks for. `advance` does at most one forward and says whether the answer is there."""

    result: Any = None

    def advance(self) -> bool:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a request has no {name!r}: write `answer = yield lm.…`, the answer comes back from the yield")


class Immediate(Request):
    """A request that needs no forward."""

    def __init__(self, act: Callable[[], Any]):
        self._act, self.served = act, False

    def advance(self) -> bool:
        self.result, self.served = self._act(), True
        return True


class Together(Request):
    """Independent requests served side by side; the answer is a tuple."""

    def __init__(self, *requests: Request):
        self._requests, self._pending = requests, list(requests)

    def advance(self) -> bool:
        if self._pending and self._pending[0].advance():
            self._pending.pop(0)
        self.result = tuple(request.result for request in self._requests)
        return not self._pending


class Extend(Request):
    """Rows for the end of the text and for the nodes of a tree that were not fed yet."""

    def __init__(self, stream: Stream, tree: TokenTree):
        self._stream, self._tree = stream, tree

    def advance(self) -> bool:
        if self._stream.behind() > CHUNK:
            self._stream.catch_up(CHUNK)
            return False
        self.result = self._stream.rows(self._tree)
        return True


class Prefill(Request):
    """The prompt goes through a model, with the tokens a fork begins with as guesses that cannot fail; the answer is the last row."""

    def __init__(self, stream: Stream):
        self._stream = stream
        self._given = chain(list(stream.lane.limits.forced), "fork")

    def advance(self) -> bool:
        stream, lane = self._stream, self._stream.lane
        if stream.behind() > CHUNK:
            stream.catch_up(CHUNK)
            return False
        self.result = stream.rows(self._given)
        if len(self._given):
            lane.keep_given(self.result)
            self._given = TokenTree()
            return False
        lane.settle()
        return True


class Stream:
    """One model in step with one lane. The trunk of its store is committed text, the scratch is the fed part of one tree."""

    def __init__(self, name: str, model: Model, lane: Lane):
        self.name, self.model, self.lane = name, model, lane
        self.store = model.new_store()
        self._root: Tensor | None = None  # row [1, V] that follows the trunk, where it is known
        self._tree = TokenTree()  # the tree whose first nodes are in the scratch
        self.seen: Rows | None = None  # what was asked for last

    def extend(self, tree: TokenTree | None = None) -> Request:
        """Ask for rows: of the root, and of every node of `tree` this stream has not seen yet."""
        return Extend(self, tree if tree is not None else TokenTree())

    def prefill(self) -> Request:
        """Ask for the row after the prompt."""
        return Prefill(self)

    def behind(self) -> int:
        """Committed tokens this stream's model has not read."""
        return len(self.lane.tokens) - self.store.length

    def catch_up(self, count: int) -> None:
        """Feed the next `count` committed tokens."""
        tokens = self.lane.tokens[self.store.length:self.store.length + count]
        self._root = self._feed(tokens, _chain(count), last_only=True)
        self.store.keep(count - 1)

    def rows(self, tree: TokenTree) -> Rows:
        """Feed what is missing and the new nodes of `tree` in one forward; rows of the new nodes, and of the root unless the tree grew."""
        if tree is not self._tree:
            self.store.forget()
            self._tree = tree
        fed = len(self.store.parents)
        if not self.behind() and self._root is None:
            self.store.roll_back(1)
        missing = self.lane.tokens[self.store.length:]
        new = self._feed_new(missing, tree, fed)
        if fed:
            return self._rows(new, tree, fed)
        return self._rows(concat([self._root, new]) if len(new) else self._root, tree, ROOT)

    def _feed_new(self, missing: list[int], tree: TokenTree, fed: int) -> Tensor:
        """One forward over missing tokens and new nodes; returns the rows of the new nodes, [new, V]."""
        count = len(missing)
        if not count and fed == len(tree):
            return self._root[:0]
        hanging = [count + parent if parent != ROOT else count - 1 for parent in tree.parents[fed:]]
        logits = self._feed([*missing, *tree.tokens[fed:]], [*_chain(count), *hanging], last_only=not len(tree))
        if count:
            self.store.keep(count - 1)
            self._root = logits[-1:] if not len(tree) else logits[count - 1:count]
        return logits[len(logits) - (len(tree) - fed):]

    def _feed(self, tokens: list[int], parents: list[int], last_only: bool) -> Tensor:
        context, prefill = self.store.length + len(self.store.parents), self.store.length < self.lane.prompt_length
        phase = "prefill" if prefill else "catch_up" if last_only and len(tokens) > 1 else "decode"
        start = perf_counter()
        (logits,), _ = self.model.forward([Work(self.store, tokens, parents, last_only)])
        seconds = perf_counter() - start
        depth = self.model.depth
        self.lane.record(Forward(self.name, phase, len(tokens), context, depth, seconds, self.model.flops(len(tokens), context, depth)))
        return logits

    def _rows(self, raw: Tensor, tree: TokenTree, first: int) -> Rows:
        self.seen = Rows(self.name, raw[:, :self.lane.vocabulary], self.lane.chain, list(self.lane.tokens), tree, first)
        return self.seen

    def follow(self) -> None:
        """Keep the guesses the lane has committed meanwhile, and forget all others."""
        node = ROOT
        for token in self.lane.tokens[self.store.length:]:
            child = next((c for c in self._tree.children(node) if c < len(self.store.parents) and self._tree.tokens[c] == token), None)
            if child is None:
                break
            node = child
        self.store.keep(node)
        if node != ROOT or self.behind():
            self._root = None if self.behind() else self.seen.after(node)
        self.store.forget()
        self._tree = TokenTree()

    def roll_back(self) -> None:
        """The lane took back its last tokens."""
        self.store.forget()
        self.store.roll_back(max(0, -self.behind()))
        self._root, self._tree = None, TokenTree()


def _chain(count: int) -> list[int]:
    return list(range(-1, count - 1))
