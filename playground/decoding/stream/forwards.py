"""The forwards of a stream: what goes into one, and what is taken from it."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.committed_states import CommittedStates
from playground.decoding.requests import Feed, Steps, StepsTo, in_background
from playground.decoding.rows import Rows, concat
from playground.decoding.sampler_chain import Histories
from playground.engine.attention.attention_mask import EMPTY
from playground.engine.cache.kv_buffer import Capacity
from playground.engine.expert_routing import ExpertRouting
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan, Rewrite
from playground.engine.host_copies import on_device, read_lists
from playground.engine.layer_choices import ComputePass
from playground.engine.model import Model
from playground.events import Figure

if TYPE_CHECKING:
    from playground.decoding.cache_manager import CacheManager
    from playground.decoding.compute_manager import ComputeManager
    from playground.decoding.lane.lane_state import LaneState

Entering = tuple[int, Callable[[Tensor], Tensor]]
"""A layer, and what the probes of a tree enter it with, from the inputs of that layer for the tree's nodes."""
CHUNK = 512  # most prompt tokens per forward, so that other lanes and a stop need not wait long
SMALLEST_CHUNK = 16  # prompt tokens per forward of a network of any size
CHUNK_FLOPS = 5e10  # per forward of a prompt on a CPU: two cores take about a second


def chunk_of(model: Model) -> int:
    """Prompt tokens per forward of this model. A large network on a CPU gets fewer, since all visitors wait for it."""
    if model.device.type != "cpu" or not model.parameters:
        return CHUNK
    return min(CHUNK, max(SMALLEST_CHUNK, int(CHUNK_FLOPS / (2 * model.parameters))))


def answer_of(feed: Feed, captures: frozenset[int]) -> Tensor:
    """Logits and the hidden states before these layers side by side, [rows, V + captured], layer by layer."""
    logits = feed.result()
    states = [feed.captured[layer][-len(logits):].to(logits.dtype) for layer in sorted(captures)]
    return torch.cat([logits, *states], 1) if states else logits


def consulted(rows: Rows) -> Steps:
    """Wait for what samplers have to find out before they apply to these rows; other lanes go on."""
    histories = Histories(rows.committed, rows.tree, range(rows.first, rows.first + rows.count))
    for sampler in rows.chain.consulting:
        if consultation := sampler.consult(histories):
            yield from in_background(consultation.work, consultation.cancel)


class LayerStates(NamedTuple):
    """Key and value states of one layer, with rotary embedding, [kv_heads, slots, head_dim] each."""

    keys: Tensor
    values: Tensor
    live: Tensor | None  # slots that hold a token, bool [1 or kv_heads, slots]; None if all do


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


class StreamForwards:
    """A model with its KV cache, which consists of the committed text (trunk) and of the nodes of one tree that have
    been read (scratch).
    """

    reads_again = False

    def __init__(self, name: str, model: Model, lane: LaneState, prompt: list[int]):
        self.name, self.model, self.lane, self.prompt = name, model, lane, prompt
        self.store = model.new_store(
            Capacity(len(prompt), min(len(prompt) + lane.limits.max_new_tokens, model.context))
        )
        self._longer = len(prompt) - lane.prompt_length  # tokens that its prompt has more than the lane's
        self._own_inputs: dict[int, Tensor] = {}  # by position, input embeddings that are read in place of tokens
        self.captures = lane.captures(name)
        self._routed = lane.routing(name) is not None
        self.candidates = lane.candidates  # most probable tokens of each row that are recorded
        self.takes_unread = bool(model.replay)  # whether a tree may have `unread` tokens
        self._numbers = model.row_numbers  # how what is recorded of them is computed
        self.states = CommittedStates(model, lane.state_layers(name))
        self._captured_layers = self.captures.union(self.states.layers)
        self._plan = LayerPlan(capture=self._captured_layers)  # of a forward without compute policy and routing
        self.cache_manager: CacheManager | None = None  # only on the target, where the lane's cache policy acts
        self.computing: ComputeManager | None = None  # only on the target of a lane with a compute policy
        # row after the trunk, [1, V + captured], if it is known
        self._root: Tensor | None = None
        self._tree = TokenTree()  # the tree whose first nodes are in the scratch
        self._left_early = EarlyRows()
        self._probed: Tensor | None = None  # logits [n, V] of the probes of the last forward
        self.seen: Rows | None = None  # the rows returned last

    # --- what it has read ---

    def behind(self) -> int:
        """Number of committed tokens that this stream's model has not read."""
        return len(self.lane.main.tokens) + self._longer - self.store.length

    def unread(self) -> list[int]:
        """Committed tokens that this stream's model has not read."""
        at = self.store.length
        return self.prompt[at:] + self.lane.main.tokens[max(self.lane.prompt_length, at - self._longer):]

    @property
    def room(self) -> int:
        """Tokens that its model can still read after the text."""
        return self.model.context - len(self.prompt) - self.lane.generated

    def last_cache(self) -> LayerStates:
        """Key and value states of the last layer, of the committed tokens that were read."""
        layer = self.model.depth - 1
        slots = self.store.slots_of(layer)
        held = (buffers[layer].read(slots.count) for buffers in (self.store.keys, self.store.values))
        keys, values = (states.to(self.store.device) for states in held)
        return LayerStates(keys, values, None if slots.dense else slots.positions != EMPTY)

    def _start_tree(self, tree: TokenTree) -> None:
        if self.store.parents:
            self.store.crop_scratch()
        if self.states.layers:
            self.states.commit([])
        self._tree, self._left_early = tree, EarlyRows()

    # --- one forward ---

    def _feed_new(self, missing: list[int], tree: TokenTree, fed: int) -> StepsTo[Tensor]:
        """One forward over missing tokens and new nodes.

        Returns the rows of the new nodes, [new, V + captured], after the row of the root if no node was read before.
        """
        count, nodes = len(missing), len(tree)  # the tree may grow while an asynchronous forward runs
        if not count and fed == nodes:
            return self._known_root()[:0] if fed else self._known_root()
        tokens, parents = input_tree(count, missing, tree, fed)
        blends = {count + node - fed: blend for node, blend in tree.blends.items() if node >= fed}
        probes = tree.probes if self.name == "target" else {}
        expected = self.seen.went_on(tokens[0]) if self.model.replay and len(tokens) == 1 and self.seen else ""
        work = ForwardInput(
            self.store, tokens, parents, last_only=not nodes and not probes, blends=blends, expected=expected,
            given=tree.unread,
        )
        _add_probes(work, probes, count)
        rewrite = _entering(tree, tree.entering, count) if probes and tree.entering else None
        answer = yield from self._feed(work, count, rewrite)
        if not count:
            return answer if fed else concat([self._known_root(), answer])
        self._commit(count - 1)
        rows = answer[-nodes - 1:]
        self._root = rows[:1]
        return rows

    def _known_root(self) -> Tensor:
        """The row after the trunk, [1, V + captured]. Raises RuntimeError if it is not known."""
        if self._root is None:
            raise RuntimeError(f"{self.name} does not know the row after its text: read the last token again")
        return self._root

    def _commit(self, node: int) -> None:
        """Append the path to a scratch node to the trunk."""
        if self.cache_manager:
            self.cache_manager.commit(node)
        else:
            self.store.commit(node)

    def _feed(
        self, work: ForwardInput, committed: int, rewrite: tuple[int, Rewrite] | None = None
    ) -> StepsTo[Tensor]:
        """One forward, whose first rows are `committed` tokens of the text."""
        first, routing, plan, probes = self.store.length, self._routing(), self._plan, len(work.embeds)
        if self._own_inputs:
            work.embeds |= self._inputs_of(range(first, first + committed))
        if self.computing or routing:
            plan = replace(plan, compute=self._compute(), routing=routing)
        if rewrite:
            plan = replace(plan, rewrite=rewrite)
        feed = Feed(self, self._watched(work), plan)
        yield [feed]
        if probes:
            self._take_probes(feed, probes)
        if self.states.layers:
            self.states.read(feed.captured, first, committed)
            self._pass_states()
        if routing and feed.rows == 1 and routing.chosen:
            self.lane.record(experts_figure(self.name, routing))
        if self.computing:
            self.computing.observe(feed)
        return answer_of(feed, self.captures)

    def _pass_states(self) -> None:
        """Let the cache policy read the hidden states of committed tokens, if it does that."""
        if self.cache_manager:
            self.cache_manager.observe_states(self.states)
            self.states.forget()

    def _inputs_of(self, positions: range) -> dict[int, Tensor]:
        """Input embeddings that are read in place of tokens at these positions, by row."""
        given = self._own_inputs
        return {position - positions.start: given[position] for position in positions if position in given}

    def _take_probes(self, feed: Feed, count: int) -> None:
        """Set the logits of the probes aside, which are the last rows, and drop them from the KV cache."""
        logits = feed.result()
        self._probed, feed.logits = logits[-count:, :self.lane.vocabulary], logits[:-count]
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

    def _captures_up_to(self, end: int) -> frozenset[int]:
        """Layers to capture in a forward that stops at `end`: `end` itself, to resume there, and earlier captures."""
        return frozenset([end, *(layer for layer in self._captured_layers if layer < end)])


def experts_figure(stream: str, routing: ExpertRouting) -> Figure:
    """The experts that ran for the newest token, by layer and rank."""
    newest = [layer[-1].to(routing.chosen[0].device) for layer in routing.chosen]
    values = [list(map(float, layer)) for layer in read_lists(*newest)]
    labels = {"rows": [f"layer {layer}" for layer in range(len(values))],
              "columns": [f"expert {number}" for number in range(1, len(values[0]) + 1)]}
    return Figure("matrix", f"experts that ran: {stream}", {**labels, "values": values})


def input_tree(offset: int, missing: list[int], tree: TokenTree, fed: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of missing text and of the nodes from `fed` on; node i has scratch index offset + i."""
    parents = [offset + parent if parent != ROOT else offset - 1 for parent in tree.parents[fed:]]
    return [*missing, *tree.tokens[fed:]], [*in_chain(len(missing)), *parents]


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


def _entering(tree: TokenTree, entering: Entering, offset: int) -> tuple[int, Rewrite]:
    """The layer at which the probes of a tree enter, and what its input [rows, d] becomes there."""
    layer, of_nodes = entering
    counts = list(map(len, tree.probes.values()))
    nodes = [offset + node if node != ROOT else offset - 1 for node in tree.probes]

    def rewrite(hidden: Tensor) -> Tensor:
        entering = of_nodes(hidden[on_device(nodes, hidden.device)])
        new = torch.cat([own[:count] for own, count in zip(entering, counts)])
        return torch.cat([hidden[:-len(new)], new.to(hidden)])

    return layer, rewrite


def in_chain(count: int) -> list[int]:
    return list(range(-1, count - 1))
