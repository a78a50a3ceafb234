"""A stream: one model following a lane's text with a cache of its own, and the requests that make it look ahead.

The target is a stream; so is a draft model, and the target's own model over another prompt. Each catches up with the
committed text when it is next asked for rows. A request is what a strategy yields: steps that wait for a forward each,
and an answer that comes back from the yield. Whoever serves it may put forwards of one model into one batch.
"""
from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from playground.contract.token_tree import ROOT, TokenTree, chain
from playground.decoding.requests import Feed, Request, Steps, side_by_side
from playground.decoding.rows import Rows, concat
from playground.decoding.sampler_chain import HIDDEN
from playground.engine.forward_input import ForwardInput, LateInput
from playground.engine.hooks import LayerPlan
from playground.engine.kv_buffer import Capacity
from playground.engine.model import Model
from playground.events import Note

if TYPE_CHECKING:
    from playground.contract import EarlyExit
    from playground.decoding.cache_manager import CacheManager
    from playground.decoding.lane_state import LaneState
    from playground.decoding.sequence import Sequence

CHUNK = 512  # tokens of a prompt that go through in one forward, so that stop and the other lanes need not wait
PIECE = 128  # tokens of a text read for its own sake, every row of which is looked at
WATCHED_CHUNK = 128  # the same where a cache policy wants their attention, which is a number for every pair of tokens


class Stream:
    """One model in step with one lane. The trunk of its store is committed text, the scratch is the fed part of one
    tree.
    """

    def __init__(self, name: str, model: Model, lane: LaneState, prompt: list[int], companions: Iterable[Stream] = ()):
        self.name, self.model, self.lane, self.prompt = name, model, lane, prompt
        self.companions = list(companions)  # streams whose rows samplers read beside this one's
        self.store = model.new_store(
            Capacity(len(prompt), min(len(prompt) + lane.limits.max_new_tokens, model.context))
        )
        self.captures = lane.captures(name)
        self.cache_manager: CacheManager | None = None  # of the target alone: the lane's cache policy acts there
        self._root: Tensor | None = None  # row that follows the trunk, where it is known, with what was captured of it
        # rows of `seen` with what was captured, and the node of the first
        self._answer: tuple[Tensor, int] | None = None
        self._tree = TokenTree()  # the tree whose first nodes are in the scratch
        self._left_early = Early()
        self.seen: Rows | None = None  # what was asked for last

    # --- what is asked of it ---

    def extend(self, tree: TokenTree | None = None) -> Request:
        """Ask for rows: of the root, and of every node of `tree` this stream has not seen yet."""
        return Request(self._extend(tree if tree is not None else TokenTree()))

    def prefill(self) -> Request:
        """Ask for the row after the prompt."""
        return Request(self._prefill())

    def grow(self, leaves: list[Sequence]) -> Request:
        """Ask for the row after the end of each sequence, in one forward."""
        return Request(self._grow(leaves))

    def exit(self, layer: int) -> Exit:
        """This model left after `layer` layers."""
        return Exit(self, layer)

    # --- how it answers ---

    def _prefill(self) -> Steps:
        """The tokens a fork begins with go along with the prompt, as guesses that cannot fail."""
        given, lane = chain(list(self.lane.limits.forced), "fork"), self.lane
        rows = yield from self._extend(given)
        if len(given):
            lane.keep_given(rows)
            if lane.reason:
                return rows
            rows = yield from self._extend(TokenTree())
        yield from self._rehearse(self.cache_manager.rehearsal(lane.tokens)[:self.model.context - self.store.length])
        for event in self.cache_manager.settle("prefill", self.store.length):
            lane.record(event)
        return rows

    def _rehearse(self, tokens: list[int]) -> Steps:
        """Read tokens behind the text, let the cache policy hear what they attend to, and forget them."""
        if not tokens:
            return
        yield [Feed(self, ForwardInput(self.store, tokens, _chain(len(tokens)), watch=lambda position: True))]
        self.cache_manager.hear_rehearsal(len(tokens))
        self.store.forget()

    def _grow(self, leaves: list[Sequence]) -> Steps:
        raw, first, others = yield from self._raws(self.lane.plant(leaves))
        return [self._of(leaf, raw, first, others) for leaf in leaves]

    def _of(self, leaf: Sequence, raw: Tensor, first: int, others: dict[str, Tensor]) -> Rows:
        at = leaf.node - first
        if not 0 <= at < len(raw):
            raise RuntimeError(f"sequence {leaf.number} has no new token to look behind: keep one first")
        return Rows(
            self.name,
            raw[at : at + 1],
            leaf,
            TokenTree(),
            others={name: other[at : at + 1] for name, other in others.items()},
        )

    def _extend(self, tree: TokenTree) -> Steps:
        raw, first, others = yield from self._raws(tree)
        self.seen = Rows(self.name, raw, self.lane.main, tree, first, others)
        return self.seen

    def _raws(self, tree: TokenTree) -> Generator[list[Feed], None, tuple[Tensor, int, dict[str | EarlyExit, Tensor]]]:
        """Logits [n, V], the node of the first row, and what samplers read besides for the same nodes: companions,
        early exits, hidden states.
        """
        if self.companions:
            self._answer, *others = yield from side_by_side(
                Request(stream._walk(tree)) for stream in (self, *self.companions)
            )
        else:
            self._answer, others = (yield from self._walk(tree)), []
        rows, first = self._answer
        beside = self._inside(rows)
        for stream, (other, _) in zip(self.companions, others):
            beside |= {stream.name: stream._logits(other), **stream._inside(other)}
        return self._logits(rows), first, beside

    def _logits(self, rows: Tensor) -> Tensor:
        """Logits [n, V] of the lane's vocabulary, of rows with what was captured of them, where the target's are."""
        return rows[:, :self.lane.vocabulary].to(self.lane.target_model.device)

    def _inside(self, rows: Tensor) -> dict[str | EarlyExit, Tensor]:
        """Early exits [n, V] and hidden states [n, width] that the lane's strategies read, of rows with what was
        captured of them.
        """
        if not self.captures:
            return {}
        model = self.model
        states = dict(zip(sorted(self.captures), rows[:, model.vocabulary:].to(model.dtype).split(model.width, 1)))
        found = {
            at: self._logits(model.read_out(states[at.layer], at.norm))
            for at in self.lane.inner
            if at.stream == self.name
        }
        shown = {HIDDEN: model.normed(states[model.depth])} if self.lane.shows_hidden(self.name) else {}
        return found | shown

    def _walk(self, tree: TokenTree) -> Generator[list[Feed], None, tuple[Tensor, int]]:
        """Feed what is missing and the new nodes of `tree`; raw rows and the node of the first: the root unless the
        tree grew.
        """
        yield from self._begin_together()
        yield from self._catch_up()
        if tree is not self._tree:
            self._begin(tree)
        if self._left_early:
            return (yield from self._complete(tree))
        fed = len(self.store.parents)
        if not self.behind() and self._root is None:
            self.store.roll_back(1)
        return (yield from self._feed_new(self.unread(), tree, fed)), fed or ROOT

    def _begin(self, tree: TokenTree) -> None:
        self.store.forget()
        self._tree, self._left_early = tree, Early()

    @property
    def room(self) -> int:
        """Tokens its model can still read behind the text."""
        return self.model.context - len(self.prompt) - self.lane.generated

    def spellings(self, start: int) -> list[tuple[int, tuple[int, ...]]]:
        """Generated tokens from `start` on, each with the tokens this stream's model reads for it, none where it does
        not read it by itself.
        """
        return [(token, (token,)) for token in self.lane.tokens[self.lane.prompt_length + start:]]

    def behind(self) -> int:
        """Committed tokens this stream's model has not read."""
        return len(self.prompt) + self.lane.generated - self.store.length

    def unread(self) -> list[int]:
        at = self.store.length
        return self.prompt[at:] + self.lane.tokens[self.lane.prompt_length + max(0, at - len(self.prompt)):]

    def _begin_together(self) -> Steps:
        """Begin with a prompt that other lanes of the session begin with too."""
        prefix = None if self.store.length or self.store.parents else self.lane.prefixes.of(self)
        if prefix:
            given = yield from prefix.read(self.lane)
            self._root = prefix.begin(self.store, self.captures)
            if given:
                self.lane.record(
                    Note(
                        f"{given} of the {len(self.prompt)} prompt tokens of the {self.name} were read for another lane: "
                        "they are taken over from there, and cost this one nothing."
                    )
                )

    def _catch_up(self) -> Steps:
        """Feed the text in pieces as long as much of it is missing."""
        if not self.store.length and (cuts := self._cuts()):
            yield from self._read_in_part(cuts)
        most = self._most()
        while self.behind() > most:
            self._root = yield from self._feed(
                ForwardInput(self.store, self.unread()[:most], _chain(most), last_only=True)
            )
            self.store.keep(most - 1)

    def _most(self) -> int:
        """Tokens that go through in one forward."""
        return WATCHED_CHUNK if self._watch() else CHUNK

    def _feed_new(self, missing: list[int], tree: TokenTree, fed: int) -> Generator[list[Feed], None, Tensor]:
        """One forward over missing tokens and new nodes; returns the rows of the new nodes, [new, V], behind the root's
        where no node was fed before.
        """
        count, nodes = len(missing), len(tree)  # while it is made aside, the tree may grow
        if not count and fed == nodes:
            return self._root[:0] if fed else self._root
        tokens, parents = _behind(count, missing, tree, fed)
        blends = {count + node - fed: blend for node, blend in tree.blends.items() if node >= fed}
        logits = yield from self._feed(ForwardInput(self.store, tokens, parents, last_only=not nodes, blends=blends))
        if not count:
            return logits if fed else concat([self._root, logits])
        self.store.keep(count - 1)
        rows = logits[-nodes - 1:]
        self._root = rows[:1]
        return rows

    def _feed(self, work: ForwardInput) -> Generator[list[Feed], None, Tensor]:
        feed = Feed(self, self._watched(work), LayerPlan(capture=self.captures))
        yield [feed]
        return feed.answer

    def _watched(self, work: ForwardInput) -> ForwardInput:
        work.watch = self._watch()
        return work

    def _watch(self) -> Callable[[int], bool] | None:
        """By position, whose attention the cache policy wants; None if it wants none."""
        return self.cache_manager.watch() if self.cache_manager else None

    def _cuts(self) -> list[int]:
        """Layers before which the cache policy shortens the prompt."""
        return self.cache_manager.cuts() if self.cache_manager else []

    # --- a prompt of which the later layers read a part ---

    def _read_in_part(self, cuts: list[int]) -> Steps:
        """The prompt through the layers before the first cut, and behind each what the cache policy sends on; the row
        after its last token is the root.
        """
        early = yield from self._read_before(cuts[0])
        for end in (*cuts[1:], self.model.depth):
            feed, early = yield from self._send_on(early, end)
        self._root = feed.answer

    def _read_before(self, cut: int) -> Generator[list[Feed], None, Early]:
        """All tokens of the prompt through the layers before `cut`."""
        early = Early(cut)
        for start in range(0, len(self.prompt), self._most()):
            piece = self.prompt[start:start + self._most()]
            work = ForwardInput(self.store, piece, _chain(len(piece)), last_only=True)
            feed = Feed(self, self._watched(work), LayerPlan(stop=cut, capture=self._wanted_before(cut)))
            yield [feed]
            early.captured.append(feed.captured)
            self.store.keep(len(piece) - 1)
        return early

    def _send_on(self, early: Early, end: int) -> Generator[list[Feed], None, tuple[Feed, Early]]:
        """Through the layers from one cut to the next, or to the model's `end`; what was captured of the last token
        earlier goes with it.
        """
        onward = self.cache_manager.send_on(early.layer)
        states, late = early.entering(early.layer)[onward], Early(end)
        places = self.store.slots_of(early.layer).positions[0].tolist()
        for start in range(0, len(places), self._most()):
            some = slice(start, start + self._most())
            work = LateInput(
                self.store,
                [self.prompt[place] for place in places[some]],
                [],
                last_only=True,
                first=start,
                places=places[some],
            )
            feed = Feed(
                self,
                self._watched(work),
                LayerPlan(stop=end, resume=(early.layer, states[some]), capture=self._wanted_before(end)),
            )
            yield [feed]
            late.captured.append(feed.captured)
        feed.captured |= {layer: early.captured[-1][layer] for layer in self.captures if layer < early.layer}
        return feed, late

    def _wanted_before(self, end: int) -> frozenset[int]:
        """Layers whose states are needed to go on from `end`, or wanted by a strategy and not passed again."""
        return frozenset([end, *(layer for layer in self.captures if layer < end)])

    # --- leaving early ---

    def _complete(self, tree: TokenTree) -> Generator[list[Feed], None, tuple[Tensor, int]]:
        """Take the rows that left early through the layers they have not seen, all in one forward."""
        early = self._left_early
        yield from self.exit(early.layer).feed_new(tree)
        work = ForwardInput(self.store, early.tokens, [], again=True)
        feed = Feed(
            self,
            self._watched(work),
            LayerPlan(resume=(early.layer, early.entering(early.layer)), capture=self.captures),
        )
        yield [feed]
        feed.captured |= {layer: early.entering(layer) for layer in self.captures if layer < early.layer}
        self.store.keep(early.missing - 1)
        rows, self._left_early = feed.answer[early.missing - 1:], Early()
        self._root = rows[:1]
        return rows, ROOT

    # --- when the text changes ---

    def follow(self) -> None:
        """Keep the guesses the lane has committed meanwhile, and forget all others."""
        node = ROOT
        for token in self.unread() if not self._left_early else []:
            child = next(
                (c for c in self._tree.children(node) if c < len(self.store.parents) and self._tree.tokens[c] == token),
                None,
            )
            if child is None or child in self._tree.blends:
                break
            node = child
        self.store.keep(node)
        if node != ROOT or self.behind():
            self._root = self._after(node) if self.seen and self.seen.tree is self._tree and not self.behind() else None
        self._begin(TokenTree())

    def _after(self, node: int) -> Tensor | None:
        """The row of one node among those asked for last; None where it was not part of that forward."""
        rows, first = self._answer
        return rows[node - first:node - first + 1] if node >= first else None

    def roll_back(self) -> None:
        """The lane took back its last tokens."""
        self.store.roll_back(max(0, -self.behind()))
        self._root = None
        self._begin(TokenTree())

    def prune(self, tree: TokenTree, nodes: list[int], pruned: TokenTree) -> None:
        """Of the lane's tree of branches only these nodes are left."""
        if self._tree is tree:
            fed = len(self.store.parents)
            self.store.prune([node for node in nodes if node < fed])
            self._tree = pruned


@dataclass
class Early:
    """Rows that only the first layers have seen, in a scratch: committed tokens, then nodes of the tree; or the trunk,
    which is a prompt.
    """

    layer: int = 0
    missing: int = 0  # committed tokens among them
    tokens: list[int] = field(default_factory=list)
    # what entered the layer after, and inner ones that are wanted, [rows, d] each
    captured: list[dict[int, Tensor]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.captured)

    def entering(self, layer: int) -> Tensor:
        """Hidden states of all rows before a layer, [rows, d]."""
        return torch.cat([part[layer] for part in self.captured])


class Exit:
    """A model left early: its head on an inner layer. Keys and values are those of the whole model's first layers,
    computed once.

    What was fed this way goes on through the other layers when the stream itself is next asked for rows of the same
    tree.
    """

    def __init__(self, stream: Stream, layer: int):
        self.stream, self.layer = stream, layer

    def extend(self, tree: TokenTree | None = None) -> Request:
        """Ask for rows of the early exit: of the root, and of every node of `tree` it has not seen yet."""
        return Request(self._extend(tree if tree is not None else TokenTree()))

    def _extend(self, tree: TokenTree) -> Steps:
        stream = self.stream
        if tree is not stream._tree:
            yield from stream._catch_up()
            stream._begin(tree)
        grown = bool(stream._left_early)
        # its last row came from the whole model: the first layers read that token again
        if not grown and not stream.behind():
            if stream.cache_manager.policy:
                raise RuntimeError(
                    "the last token was read before the cache was cut: leave early from the next token on"
                )
            stream.store.roll_back(1)
        raw = yield from self.feed_new(tree)
        before_root = 0 if grown else stream._left_early.missing - 1
        raw = raw[before_root:, :stream.lane.vocabulary]
        return Rows("exit", raw, stream.lane.main, tree, len(tree) - len(raw))

    def feed_new(self, tree: TokenTree) -> Generator[list[Feed], None, Tensor]:
        """Take what this exit has not seen of text and tree through the first layers; returns rows [new, V]."""
        stream, early = self.stream, self.stream._left_early
        missing = [] if early else stream.unread()
        early.layer, early.missing = self.layer, early.missing or len(missing)
        fed = max(0, len(stream.store.parents) - early.missing)
        if not missing and fed == len(tree):
            return early.captured[-1][self.layer][:0]
        work = ForwardInput(stream.store, *_behind(early.missing, missing, tree, fed))
        feed = Feed(
            stream,
            stream._watched(work),
            LayerPlan(stop=self.layer, capture=stream._wanted_before(self.layer)),
            name="exit",
        )
        yield [feed]
        early.tokens += work.tokens
        early.captured.append(feed.captured)
        return feed.logits


class Piece(NamedTuple):
    """A stretch of a text that was read for its own sake."""

    tokens: list[int]
    logits: Tensor  # [n, V], after each token
    hidden: Tensor | None = None  # [n, width], what the head read there, where the lane needs hidden states


def reading(stream: Stream, ids: list[int], hidden: bool) -> list[Request]:
    """Requests that read a text through a stream of its own, piece after piece."""
    return [Request(_read(stream, ids[start:start + PIECE], hidden)) for start in range(0, len(ids), PIECE)]


def _read(stream: Stream, tokens: list[int], hidden: bool) -> Generator[list[Feed], None, Piece]:
    model, last = stream.model, frozenset([stream.model.depth] if hidden else [])
    feed = Feed(stream, ForwardInput(stream.store, tokens, _chain(len(tokens))), LayerPlan(capture=last))
    yield [feed]
    stream.store.keep(len(tokens) - 1)
    return Piece(
        tokens, feed.logits[:, : stream.lane.vocabulary], model.normed(feed.captured[model.depth]) if hidden else None
    )


def _behind(offset: int, missing: list[int], tree: TokenTree, fed: int) -> tuple[list[int], list[int]]:
    """Missing text and the nodes of a tree from `fed` on, as tokens and parents; node i stands at scratch place offset
    + i.
    """
    hanging = [offset + parent if parent != ROOT else offset - 1 for parent in tree.parents[fed:]]
    return [*missing, *tree.tokens[fed:]], [*_chain(len(missing)), *hanging]


def _chain(count: int) -> list[int]:
    return list(range(-1, count - 1))
