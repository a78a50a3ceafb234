"""A stream: one model that follows a lane's text with its own KV cache, and the requests for its rows.

The target is a stream, and so are a draft model and the target's model over another prompt. Each catches up with the
committed text at its next request. Strategies yield requests: each consists of steps that wait for one forward, and its
answer is the value of the yield. The session may batch forwards of one model.
"""
from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from playground.contract.token_tree import ROOT, TokenTree, chain
from playground.decoding.committed_states import CommittedStates
from playground.decoding.requests import Feed, Request, Steps, in_background, side_by_side
from playground.decoding.rows import Rows, concat
from playground.decoding.sampler_chain import HIDDEN_STATES
from playground.engine.attention.attention_mask import EMPTY
from playground.engine.cache.kv_buffer import Capacity
from playground.engine.expert_routing import ExpertRouting
from playground.engine.forward_input import ForwardInput, LateInput
from playground.engine.hooks import LayerPlan
from playground.engine.host_copies import read_lists
from playground.engine.layer_choices import ComputePass
from playground.engine.model import Model
from playground.events import Figure, Note

if TYPE_CHECKING:
    from playground.contract import EarlyExit
    from playground.decoding.cache_manager import CacheManager
    from playground.decoding.compute_manager import ComputeManager
    from playground.decoding.lane.lane_state import LaneState
    from playground.decoding.sequence import Sequence

CHUNK = 512  # most prompt tokens per forward, so that other lanes and a stop need not wait long
SMALLEST_CHUNK = 16  # prompt tokens per forward of a network of any size
CHUNK_FLOPS = 5e10  # per forward of a prompt on a CPU: two cores take about a second
PIECE = 128  # tokens per forward of `reading`, which returns the logits of every row
WATCHED_CHUNK = 128  # prefill chunk size if a cache policy reads the attention weights, [chunk, slots] each


def chunk_of(model: Model) -> int:
    """Prompt tokens per forward of this model. A large network on a CPU gets fewer, since all visitors wait for it."""
    if model.device.type != "cpu" or not model.parameters:
        return CHUNK
    return min(CHUNK, max(SMALLEST_CHUNK, int(CHUNK_FLOPS / (2 * model.parameters))))


def consulted(rows: Rows) -> Steps:
    """Wait for what samplers have to find out before they apply to these rows; other lanes go on."""
    for consultation in rows.consultations():
        yield from in_background(consultation.work, consultation.cancel)


def answer_of(feed: Feed, captures: frozenset[int]) -> Tensor:
    """Logits and the hidden states before these layers side by side, [rows, V + captured], layer by layer."""
    states = [feed.captured[layer][-len(feed.logits):].to(feed.logits.dtype) for layer in sorted(captures)]
    return torch.cat([feed.logits, *states], 1) if states else feed.logits


class LayerStates(NamedTuple):
    """Key and value states of one layer, with rotary embedding, [kv_heads, slots, head_dim] each."""

    keys: Tensor
    values: Tensor
    live: Tensor | None  # slots that hold a token, bool [1 or kv_heads, slots]; None if all do


class Stream:
    """One model in step with one lane.

    Its KV cache consists of the committed text (trunk) and the nodes of one tree that have been read (scratch).
    """

    def __init__(self, name: str, model: Model, lane: LaneState, prompt: list[int], companions: Iterable[Stream] = ()):
        self.name, self.model, self.lane, self.prompt = name, model, lane, prompt
        self.companions = list(companions)  # streams whose rows samplers read in addition
        self.store = model.new_store(
            Capacity(len(prompt), min(len(prompt) + lane.limits.max_new_tokens, model.context))
        )
        self._longer = len(prompt) - lane.prompt_length  # tokens that its prompt has more than the lane's
        self._prompt_inputs: dict[int, Tensor] = {}  # by position, input embeddings that the prompt has for tokens
        self.captures = lane.captures(name)
        self._routed = lane.routing(name) is not None
        self.candidates = lane.candidates  # most probable tokens of each row that are recorded
        self.states = CommittedStates(model, lane.state_layers(name))
        self._captured_layers = self.captures.union(self.states.layers)
        self._plan = LayerPlan(capture=self._captured_layers)  # of a forward without compute policy and routing
        self.cache_manager: CacheManager | None = None  # only on the target, where the lane's cache policy acts
        self.computing: ComputeManager | None = None  # only on the target of a lane with a compute policy
        # row after the trunk, [1, V + captured], if it is known
        self._root: Tensor | None = None
        # rows of `seen`, [n, V + captured], and the node of the first
        self._answer: tuple[Tensor, int] | None = None
        self._tree = TokenTree()  # the tree whose first nodes are in the scratch
        self._left_early = EarlyRows()
        self._probed: Tensor | None = None  # logits [n, V] of the probes of the last forward
        self.seen: Rows | None = None  # the rows returned last

    # --- requests ---

    def extend(self, tree: TokenTree | None = None) -> Request:
        """Request rows for the root and for every node of `tree` that this stream has not read yet."""
        return Request(self._extend(tree if tree is not None else TokenTree()))

    def prefill(self) -> Request:
        """Request the row after the prompt."""
        return Request(self._prefill())

    def replace_prompt(self, inputs: list[int | Tensor]) -> None:
        """Read tokens and input embeddings [hidden_size] in place of the prompt. Raises RuntimeError if it was read."""
        if self.store.length:
            raise RuntimeError("the prompt was read: replace it before the first forward")
        self._prompt_inputs = {place: given for place, given in enumerate(inputs) if isinstance(given, Tensor)}
        self.prompt = [0 if place in self._prompt_inputs else given for place, given in enumerate(inputs)]
        self._longer = len(inputs) - self.lane.prompt_length

    def grow(self, leaves: list[Sequence]) -> Request:
        """Request the row after the end of each sequence, in one forward."""
        return Request(self._grow(leaves))

    def last_cache(self) -> LayerStates:
        """Key and value states of the last layer, of the committed tokens that were read."""
        layer = self.model.depth - 1
        slots = self.store.slots_of(layer)
        held = (buffers[layer].read(slots.count) for buffers in (self.store.keys, self.store.values))
        keys, values = (states.to(self.store.device) for states in held)
        return LayerStates(keys, values, None if slots.dense else slots.positions != EMPTY)

    def resume(self, layer: int, states: Tensor) -> Request:
        """Request logits [n, V] of rows that enter at a layer with these states [n, hidden_size].

        They run through it and all later layers as if they followed the text that was read, each after the one before,
        and are dropped from the KV cache.
        """
        return Request(self._resume(layer, states))

    def exit(self, layer: int) -> Exit:
        """The early exit of this model after `layer` layers."""
        return Exit(self, layer)

    # --- steps of the requests ---

    def _prefill(self) -> Steps:
        """Read the prompt. The tokens that a fork begins with go along as a draft that is always accepted."""
        given, lane = chain(list(self.lane.limits.forced), "fork"), self.lane
        rows = yield from self._extend(given)
        if len(given):
            lane.commit_forced(rows)
            if lane.reason:
                return rows
            rows = yield from self._extend(TokenTree())
        if self.cache_manager:  # only the target has one; a decoder may begin with the draft model
            yield from self._settle_prefill(self.cache_manager)
            if (logits := self.cache_manager.logits_after_prompt()) is not None:
                rows = self._replace_root(rows, logits)
        return rows

    def _replace_root(self, rows: Rows, logits: Tensor) -> Rows:
        """The row after the prompt with logits [V] of the cache policy."""
        answer, first = self._answer
        answer = answer.clone()
        answer[-1, :self.model.vocabulary] = logits.to(answer)
        self._answer, self._root = (answer, first), answer[-1:]
        self.seen = replace(rows, raw=self._logits(answer))
        return self.seen

    def _settle_prefill(self, manager: CacheManager) -> Steps:
        """Let the cache policy act on the prompt that was read."""
        for text in manager.probe_texts(self.lane.tokens, self.model.context - self.store.length):
            yield from self._rehearse(text)
        self._settle("prefill")

    def _settle(self, moment: str) -> None:
        """Let the cache policy act on what was read."""
        for event in self.cache_manager.settle(moment, self.store.length):
            self.lane.record(event)

    def _rehearse(self, tokens: list[int]) -> Steps:
        """Read tokens after the text, pass their attention to the cache policy, and discard them."""
        if not tokens:
            return
        plan, manager = LayerPlan(compute=self._compute(), routing=self._routing()), self.cache_manager
        manager.rehearsing = True
        for start in range(0, len(tokens), WATCHED_CHUNK):
            chunk = tokens[start:start + WATCHED_CHUNK]
            parents = list(range(start - 1, start - 1 + len(chunk)))
            yield [Feed(self, ForwardInput(self.store, chunk, parents, watch=lambda position: True), plan)]
        manager.rehearsing = False
        manager.observe_probes()
        self.store.crop_scratch()

    def _grow(self, leaves: list[Sequence]) -> Steps:
        raw, first, others = yield from self._compute_rows(self.lane.branch_tree(leaves))
        grown = [self._row_of(leaf, raw, first, others) for leaf in leaves]
        for rows in grown:
            yield from consulted(rows)
        return grown

    def _resume(self, layer: int, states: Tensor) -> Steps:
        count = len(states)
        self._start_tree(TokenTree())
        work = ForwardInput(self.store, [0] * count, _chain(count))  # the tokens are placeholders
        feed = Feed(self, work, LayerPlan(resume=(layer, states), routing=self._routing()), name="resumed")
        yield [feed]
        self.store.crop_scratch()
        return feed.logits[:, :self.lane.vocabulary]

    def _row_of(self, leaf: Sequence, raw: Tensor, first: int, others: dict[str, Tensor]) -> Rows:
        row = leaf.node - first
        if not 0 <= row < len(raw):
            raise RuntimeError(f"sequence {leaf.number} has no new token to extend: keep one first")
        return Rows(
            self.name,
            raw[row : row + 1],
            leaf,
            TokenTree(),
            others={name: other[row : row + 1] for name, other in others.items()},
            candidates=self.candidates,
        )

    def _extend(self, tree: TokenTree) -> Steps:
        raw, first, others = yield from self._compute_rows(tree)
        self.seen = Rows(
            self.name, raw, self.lane.main, tree, first, others, probes=self._probed, candidates=self.candidates
        )
        if self.seen.chain.consulting:
            yield from consulted(self.seen)
        return self.seen

    def _compute_rows(
        self, tree: TokenTree
    ) -> Generator[list[Feed], None, tuple[Tensor, int, dict[str | EarlyExit, Tensor]]]:
        """Logits [n, V], the node of the first row, and what samplers read in addition for the same nodes.

        The latter are logits [n, V] of companions and early exits, and hidden states [n, hidden_size].
        """
        if self.companions:
            self._answer, *companion_answers = yield from side_by_side(
                Request(stream._read_tree(tree)) for stream in (self, *self.companions)
            )
        else:
            self._answer, companion_answers = (yield from self._read_tree(tree)), []
        answer, first = self._answer
        others = self._captured(answer)
        for stream, (companion_answer, _) in zip(self.companions, companion_answers):
            others |= {stream.name: stream._logits(companion_answer), **stream._captured(companion_answer)}
        return self._logits(answer), first, others

    def _logits(self, answer: Tensor) -> Tensor:
        """Logits [n, V] over the lane's vocabulary, on the target's device, of rows [n, V + captured]."""
        return answer[:, :self.lane.vocabulary].to(self.lane.target_model.device)

    def _captured(self, answer: Tensor) -> dict[str | EarlyExit, Tensor]:
        """Logits of early exits [n, V] and hidden states [n, hidden_size], from rows [n, V + captured]."""
        if not self.captures:
            return {}
        model = self.model
        states = dict(zip(sorted(self.captures), answer[:, model.vocabulary:].to(model.dtype).split(model.width, 1)))
        exits = {
            exit: self._logits(model.read_out(states[exit.layer], exit.norm))
            for exit in self.lane.inner
            if exit.stream == self.name
        }
        hidden = {HIDDEN_STATES: model.normed(states[model.depth])} if self.lane.shows_hidden(self.name) else {}
        return exits | hidden

    def _read_tree(self, tree: TokenTree) -> Generator[list[Feed], None, tuple[Tensor, int]]:
        """Read unread text and the new nodes of `tree`.

        Returns rows [n, V + captured] and the node of the first: the root, or the first new node if the tree grew.
        """
        self._probed = None
        yield from self._read_shared_prefix()
        yield from self._catch_up()
        if tree is not self._tree:
            self._start_tree(tree)
        if self._left_early:
            return (yield from self._complete(tree))
        fed = len(self.store.parents)
        if not self.behind() and self._root is None:
            self.store.roll_back(1)
        return (yield from self._feed_new(self.unread(), tree, fed)), fed or ROOT

    def _start_tree(self, tree: TokenTree) -> None:
        if self.store.parents:
            self.store.crop_scratch()
        if self.states.layers:
            self.states.commit([])
        self._tree, self._left_early = tree, EarlyRows()

    @property
    def room(self) -> int:
        """Tokens that its model can still read after the text."""
        return self.model.context - len(self.prompt) - self.lane.generated

    def spellings(self, start: int) -> list[tuple[int, tuple[int, ...]]]:
        """Generated tokens from `start` on, each with the tokens that this stream's model reads for it.

        Tokens that no token boundary of this model matches are omitted.
        """
        return [(token, (token,)) for token in self.lane.tokens[self.lane.prompt_length + start:]]

    def behind(self) -> int:
        """Number of committed tokens that this stream's model has not read."""
        return len(self.lane.main.tokens) + self._longer - self.store.length

    def unread(self) -> list[int]:
        """Committed tokens that this stream's model has not read."""
        at = self.store.length
        return self.prompt[at:] + self.lane.main.tokens[max(self.lane.prompt_length, at - self._longer):]

    def _read_shared_prefix(self) -> Steps:
        """Start from a prompt that several lanes of the session share."""
        prefix = None if self.store.length or self.store.parents else self.lane.prefixes.of(self)
        if prefix:
            given = yield from prefix.read(self.lane)
            self._root = prefix.begin(self.store, self.captures)
            if (captured := prefix.captured(self.states.layers)) is not None:
                self.states.read(captured, 0, len(self.prompt))
            if given:
                self.lane.record(
                    Note(
                        f"{given} of the {len(self.prompt)} prompt tokens of the {self.name} were read for another "
                        "lane; reusing their KV cache costs this lane nothing."
                    )
                )

    def _catch_up(self) -> Steps:
        """Read the text in chunks until at most one chunk is unread."""
        if not self.store.length and (cuts := self._cuts()):
            yield from self._prefill_in_segments(cuts)
        if self.behind() < 2:  # a decode step
            return
        chunk = self._chunk_size()
        while self.behind() > chunk:
            work = ForwardInput(self.store, self.unread()[:chunk], _chain(chunk), last_only=True)
            self._root = yield from self._feed(work, chunk)
            self.store.commit(chunk - 1)
            if self._acts_after() and self.store.length < len(self.prompt):
                probe = self.cache_manager.chunk_probe(self.prompt)
                yield from self._rehearse(probe[:self.model.context - self.store.length])
                self._settle("chunk")

    def _acts_after(self) -> int:
        """Tokens of the prompt after which the cache policy acts; 0 at its end only."""
        return self.cache_manager.prefill_chunk if self.cache_manager else 0

    def _chunk_size(self) -> int:
        """Most tokens of the prompt in one forward."""
        chunk = max(chunk_of(self.model), self.store.least_chunk)
        chunk = min(WATCHED_CHUNK, chunk) if self._watch() else chunk
        return min(chunk, self._acts_after() or chunk)

    def _feed_new(self, missing: list[int], tree: TokenTree, fed: int) -> Generator[list[Feed], None, Tensor]:
        """One forward over missing tokens and new nodes.

        Returns the rows of the new nodes, [new, V + captured], after the row of the root if no node was read before.
        """
        count, nodes = len(missing), len(tree)  # the tree may grow while an asynchronous forward runs
        if not count and fed == nodes:
            return self._root[:0] if fed else self._root
        tokens, parents = _input_tree(count, missing, tree, fed)
        blends = {count + node - fed: blend for node, blend in tree.blends.items() if node >= fed}
        probes = tree.probes if self.name == "target" else {}
        work = ForwardInput(self.store, tokens, parents, last_only=not nodes and not probes, blends=blends)
        _add_probes(work, probes, count)
        answer = yield from self._feed(work, count)
        if not count:
            return answer if fed else concat([self._root, answer])
        self.store.commit(count - 1)
        rows = answer[-nodes - 1:]
        self._root = rows[:1]
        return rows

    def _feed(self, work: ForwardInput, committed: int) -> Generator[list[Feed], None, Tensor]:
        """One forward, whose first rows are `committed` tokens of the text."""
        first, routing, plan, probes = self.store.length, self._routing(), self._plan, len(work.embeds)
        if first < len(self.prompt):
            work.embeds |= self._inputs_of(range(first, first + committed))
        if self.computing or routing:
            plan = replace(plan, compute=self._compute(), routing=routing)
        feed = Feed(self, self._watched(work), plan)
        yield [feed]
        if probes:
            self._take_probes(feed, probes)
        if self.states.layers:
            self.states.read(feed.captured, first, committed)
        if routing and feed.rows == 1 and routing.chosen:
            self.lane.record(experts_figure(self.name, routing))
        if self.computing:
            self.computing.observe(feed)
        return answer_of(feed, self.captures)

    def _inputs_of(self, positions: range) -> dict[int, Tensor]:
        """Input embeddings that the prompt has in place of tokens at these positions, by row."""
        given = self._prompt_inputs
        return {position - positions.start: given[position] for position in positions if position in given}

    def _take_probes(self, feed: Feed, count: int) -> None:
        """Set the logits of the probes aside, which are the last rows, and drop them from the KV cache."""
        self._probed = feed.logits[-count:, :self.lane.vocabulary]
        feed.logits = feed.logits[:-count]
        feed.captured = {layer: rows[:-count] for layer, rows in feed.captured.items()}
        feed.work.tokens, feed.work.parents = feed.work.tokens[:-count], feed.work.parents[:-count]
        self.store.crop_scratch(len(self.store.parents) - count)

    def _routing(self) -> ExpertRouting | None:
        """Which experts run in the next forward, and a place to note them; None for a model without experts."""
        return self.lane.routing(self.name) if self._routed else None

    def _compute(self) -> ComputePass | None:
        """What the compute policy decides in the next forward; None without one."""
        return self.computing.new_pass() if self.computing else None

    def _watched(self, work: ForwardInput) -> ForwardInput:
        work.watch = self._watch()
        return work

    def _watch(self) -> Callable[[int], bool] | None:
        """By position, whether the cache policy reads the attention of that row; None if it reads none."""
        return self.cache_manager.watch() if self.cache_manager else None

    def _cuts(self) -> list[int]:
        """Layers before which the cache policy shortens the prompt."""
        return self.cache_manager.cut_layers() if self.cache_manager else []

    # --- prefill with a prompt that becomes shorter at some layers ---

    def _prefill_in_segments(self, cuts: list[int]) -> Steps:
        """Prefill that continues at each cut with the tokens that the cache policy retains.

        The layers before the first cut read the whole prompt. The row after the last token becomes the root.
        """
        early = yield from self._read_before(cuts[0])
        for end in (*cuts[1:], self.model.depth):
            feed, early = yield from self._read_segment(early, end)
        self._root = answer_of(feed, self.captures)

    def _read_before(self, cut: int) -> Generator[list[Feed], None, EarlyRows]:
        """Run all tokens of the prompt through the layers before `cut`."""
        early = EarlyRows(cut)
        for start in range(0, len(self.prompt), self._chunk_size()):
            chunk = self.prompt[start:start + self._chunk_size()]
            work = ForwardInput(self.store, chunk, _chain(len(chunk)), last_only=True)
            plan = LayerPlan(
                stop=cut, capture=self._captures_up_to(cut), routing=self._routing()
            )
            feed = Feed(self, self._watched(work), plan)
            yield [feed]
            early.captured.append(feed.captured)
            self.store.commit(len(chunk) - 1)
        return early

    def _read_segment(self, early: EarlyRows, end: int) -> Generator[list[Feed], None, tuple[Feed, EarlyRows]]:
        """Run the retained tokens through the layers from one cut to `end`, the next cut or the model's depth.

        What earlier layers captured of the last token is added to the last feed.
        """
        onward = self.cache_manager.select_prompt(early.layer)
        states, late = early.entering(early.layer)[onward], EarlyRows(end)
        positions = self.store.slots_of(early.layer).positions[0].tolist()
        for start in range(0, len(positions), self._chunk_size()):
            chunk = slice(start, start + self._chunk_size())
            work = LateInput(
                self.store,
                [self.prompt[position] for position in positions[chunk]],
                [],
                last_only=True,
                first=start,
                positions=positions[chunk],
            )
            feed = Feed(
                self,
                self._watched(work),
                LayerPlan(
                    stop=end,
                    resume=(early.layer, states[chunk]),
                    capture=self._captures_up_to(end),
                    routing=self._routing(),
                ),
            )
            yield [feed]
            late.captured.append(feed.captured)
        feed.captured |= {layer: early.captured[-1][layer] for layer in self._captured_layers if layer < early.layer}
        last = {layer: rows[-1:] for layer, rows in feed.captured.items()}
        if end == self.model.depth:
            self.states.read(last, len(self.prompt) - 1, 1)
        return feed, late

    def _captures_up_to(self, end: int) -> frozenset[int]:
        """Layers to capture in a forward that stops at `end`: `end` itself, to resume there, and earlier captures."""
        return frozenset([end, *(layer for layer in self._captured_layers if layer < end)])

    # --- early exits ---

    def _complete(self, tree: TokenTree) -> Generator[list[Feed], None, tuple[Tensor, int]]:
        """Run the rows that exited early through the remaining layers, in one forward."""
        early = self._left_early
        yield from self.exit(early.layer).feed_new(tree)
        work = ForwardInput(self.store, early.tokens, [], again=True)
        feed = Feed(
            self,
            self._watched(work),
            LayerPlan(
                resume=(early.layer, early.entering(early.layer)),
                capture=self._captured_layers,
                routing=self._routing(),
            ),
        )
        yield [feed]
        feed.captured |= {layer: early.entering(layer) for layer in self._captured_layers if layer < early.layer}
        self.states.read(feed.captured, self.store.length, early.missing)
        self.store.commit(early.missing - 1)
        rows, self._left_early = answer_of(feed, self.captures)[early.missing - 1:], EarlyRows()
        self._root = rows[:1]
        return rows, ROOT

    # --- when the text changes ---

    def follow(self) -> None:
        """Keep the nodes of the tree that the lane has committed, and discard all others."""
        node = ROOT if self._left_early else self._tree.follow(self.unread(), len(self.store.parents))
        if self.states.layers:
            self.states.commit(self.store.path(node))
        self.store.commit(node)
        if node != ROOT or self.behind():
            known = self.seen and self.seen.tree is self._tree and not self.behind()
            self._root = self._row_after(node) if known else None
        self._start_tree(TokenTree())

    def _row_after(self, node: int) -> Tensor | None:
        """The row after a node from the last answer, [1, V + captured]; None if that forward did not include it."""
        rows, first = self._answer
        return rows[node - first:node - first + 1] if node >= first else None

    def roll_back(self) -> None:
        """Follow a rollback of the lane."""
        self.store.roll_back(max(0, -self.behind()))
        if self.states.layers:
            self.states.crop(self.store.length)
        self._root = None
        self._start_tree(TokenTree())

    def prune(self, tree: TokenTree, nodes: list[int], pruned: TokenTree) -> None:
        """Remove all but these nodes from the lane's tree of branches, which becomes `pruned`."""
        if self._tree is tree:
            fed = len(self.store.parents)
            self.store.prune([node for node in nodes if node < fed])
            self.states.prune([node for node in nodes if node < fed])
            self._tree = pruned


@dataclass
class EarlyRows:
    """Rows that have passed only the first layers: committed tokens, then nodes of the tree; or a whole prompt."""

    layer: int = 0  # layers they have passed
    missing: int = 0  # committed tokens among them
    tokens: list[int] = field(default_factory=list)
    # hidden states before `layer` and before other captured layers, [rows, hidden_size] each
    captured: list[dict[int, Tensor]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.captured)

    def entering(self, layer: int) -> Tensor:
        """Hidden states of all rows before a layer, [rows, hidden_size]."""
        return torch.cat([part[layer] for part in self.captured])


class Exit:
    """An early exit of a model: its lm_head on an inner layer. It shares the KV cache of the model's first layers.

    Rows that exited early continue through the other layers at the next request to the stream for the same tree.
    """

    def __init__(self, stream: Stream, layer: int):
        self.stream, self.layer = stream, layer
        # states after its layers, [new, hidden_size]: of committed tokens it has just read, then of nodes
        self.hidden: Tensor | None = None
        self.inputs: dict[int, Tensor] = {}  # of the same rows, the inputs of earlier layers whose states are kept

    def extend(self, tree: TokenTree | None = None) -> Request:
        """Request rows of the early exit for the root and for every node of `tree` that it has not read yet."""
        return Request(self._extend(tree if tree is not None else TokenTree()))

    def _extend(self, tree: TokenTree) -> Steps:
        stream = self.stream
        if tree is not stream._tree:
            yield from stream._catch_up()
            stream._start_tree(tree)
        grown = bool(stream._left_early)
        # the whole model has read the last token, so the first layers have to read it again
        if not grown and not stream.behind():
            if stream.cache_manager.policy:
                raise RuntimeError(
                    "the last token was read before the cache policy evicted slots: exit early from the next token on"
                )
            stream.store.roll_back(1)
        raw = yield from self.feed_new(tree)
        before_root = 0 if grown else stream._left_early.missing - 1
        raw = raw[before_root:, :stream.lane.vocabulary]
        self.inputs = stream._left_early.captured[-1]
        self.hidden = self.inputs[self.layer]
        rows = Rows("exit", raw, stream.lane.main, tree, len(tree) - len(raw))
        yield from consulted(rows)
        return rows

    def feed_new(self, tree: TokenTree) -> Generator[list[Feed], None, Tensor]:
        """Run unread text and nodes of `tree` through the first layers; returns rows [new, V]."""
        stream, early = self.stream, self.stream._left_early
        missing = [] if early else stream.unread()
        early.layer, early.missing = self.layer, early.missing or len(missing)
        fed = max(0, len(stream.store.parents) - early.missing)
        if not missing and fed == len(tree):
            return early.captured[-1][self.layer][:0]
        work = ForwardInput(stream.store, *_input_tree(early.missing, missing, tree, fed))
        feed = Feed(
            stream,
            stream._watched(work),
            LayerPlan(
                stop=self.layer,
                capture=stream._captures_up_to(self.layer),
                routing=stream._routing(),
            ),
            name="exit",
        )
        yield [feed]
        early.tokens += work.tokens
        early.captured.append(feed.captured)
        return feed.logits


class Piece(NamedTuple):
    """A piece of a text read by `reading`."""

    tokens: list[int]
    logits: Tensor  # [n, V], after each token
    hidden: Tensor | None = None  # input of the lm_head, [n, hidden_size], if the lane needs hidden states


def reading(stream: Stream, ids: list[int], hidden: bool) -> list[Request]:
    """Requests that read a text with a separate stream, one for each piece."""
    piece = min(PIECE, chunk_of(stream.model))
    return [Request(_read(stream, ids[start:start + piece], hidden)) for start in range(0, len(ids), piece)]


def _read(stream: Stream, tokens: list[int], hidden: bool) -> Generator[list[Feed], None, Piece]:
    model, last = stream.model, frozenset([stream.model.depth] if hidden else [])
    feed = Feed(stream, ForwardInput(stream.store, tokens, _chain(len(tokens))), LayerPlan(capture=last))
    yield [feed]
    stream.store.commit(len(tokens) - 1)
    return Piece(
        tokens, feed.logits[:, : stream.lane.vocabulary], model.normed(feed.captured[model.depth]) if hidden else None
    )


def experts_figure(stream: str, routing: ExpertRouting) -> Figure:
    """The experts that ran for the newest token, by layer and rank."""
    newest = [layer[-1].to(routing.chosen[0].device) for layer in routing.chosen]
    values = [list(map(float, layer)) for layer in read_lists(*newest)]
    labels = {"rows": [f"layer {layer}" for layer in range(len(values))],
              "columns": [f"expert {number}" for number in range(1, len(values[0]) + 1)]}
    return Figure("matrix", f"experts that ran: {stream}", {**labels, "values": values})


def _input_tree(offset: int, missing: list[int], tree: TokenTree, fed: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of missing text and of the nodes from `fed` on; node i has scratch index offset + i."""
    parents = [offset + parent if parent != ROOT else offset - 1 for parent in tree.parents[fed:]]
    return [*missing, *tree.tokens[fed:]], [*_chain(len(missing)), *parents]


def _add_probes(work: ForwardInput, probes: dict[int, Tensor], offset: int) -> None:
    """Append the probes of a tree to a forward, after its last row; node i has scratch index offset + i."""
    before = len(work.store.parents)
    for node, inputs in probes.items():
        parent = offset + node if node != ROOT else offset - 1
        for own in inputs:
            work.embeds[len(work.tokens)] = own
            work.parents.append(parent)
            parent = before + len(work.tokens)
            work.tokens.append(0)  # a placeholder


def _chain(count: int) -> list[int]:
    return list(range(-1, count - 1))
