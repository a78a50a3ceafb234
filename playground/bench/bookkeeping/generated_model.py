"""A stand-in for a model: its rows are looked up, and its key and value states are arbitrary numbers.

The KV caches are real, with the layers and heads of a large model and a tiny head dimension. Attention is computed only
where a cache policy acts on it, so a long prompt is read in a second.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import Lock, get_ident
from time import thread_time

import torch
from torch import Tensor

from playground.bench.bookkeeping.bookkeeping_defaults import Sizes
from playground.bench.bookkeeping.made_tokens import made_tokenizer
from playground.decoding.stream import PIECE
from playground.engine.attention.attention_parts import Projections
from playground.engine.attention.segment_attention import Segment, attend_all
from playground.engine.cache.kv_buffer import UNKNOWN, Capacity
from playground.engine.cache.kv_cache import KVCache
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import Call, LayerPlan
from playground.engine.layer_choices import ComputePass, FeedForwardPart, attending_rows
from playground.engine.row_numbers import row_numbers
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal
from playground.grammar.matcher import GrammarEngine

HEADS, HEAD_DIM = 8, 4  # of keys and values
WIDTH = 64  # of hidden states
STATES, SPAN = 64, 64  # distinct hidden states; positions over which the state after a token stays the same
SPREAD = 6.0  # standard deviation of the logits: some tokens are likely, none is certain
NOISE = 0.3  # between the hidden states of target and draft
DRAFT_LAYERS = 2


class ForwardClock:
    """CPU time that each thread has spent in forwards, in seconds. One inside another counts once."""

    def __init__(self):
        self._spent: Counter[int] = Counter()
        self._running: Counter[int] = Counter()  # by thread

    @contextmanager
    def running(self) -> Iterator[None]:
        thread, start = get_ident(), thread_time()
        self._running[thread] += 1
        try:
            yield
        finally:
            self._running[thread] -= 1
            self._spent[thread] += 0 if self._running[thread] else thread_time() - start

    @property
    def spent(self) -> float:
        """Of the calling thread."""
        return self._spent[get_ident()]


class SharedVocabulary:
    """What target and draft share: tokens, grammars, lm_head weights [V, width] and hidden states [STATES, width]."""

    def __init__(self, size: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.size, self.tokenizer = size, made_tokenizer(size)
        self.tokens = Tokens(self.tokenizer, size)
        self.end_ids = frozenset([self.tokenizer.eos_token_id])
        self.lm_head = torch.randn(size, WIDTH, generator=generator) * (SPREAD / WIDTH ** 0.5)
        self.lm_head[sorted(self.end_ids)] = 0  # no text ends early
        self.states = torch.randn(STATES, WIDTH, generator=generator)
        self.stopwatch = ForwardClock()

    @cached_property
    def grammars(self) -> GrammarEngine:
        return GrammarEngine(self.tokenizer, self.size, sorted(self.end_ids))


@dataclass(frozen=True)
class GeneratedParts:
    """The sizes that a policy reads, arbitrary attention weights, and feed-forward networks that add nothing."""

    depth: int
    width: int = WIDTH
    heads: int = HEADS
    head_dim: int = HEAD_DIM
    norms_heads: bool = False

    def attention_projections(self, layer: int) -> Projections:
        """Arbitrary weights of the attention of a layer; there are as many query heads as KV heads."""
        rows = torch.linspace(-1, 1, self.heads * self.head_dim * self.width).view(-1, self.width)
        return Projections(rows, rows, rows, rows.T)

    def attention_input(self, layer: int, hidden: Tensor) -> Tensor:
        """What the projections of a layer multiply, [n, width]."""
        return hidden

    def rotate(self, rows: Tensor, positions: Tensor) -> Tensor:
        """There are no positions in its states."""
        return rows

    rotate_back = rotate

    def channels(self, layer: int) -> int:
        """Width of the feed-forward network of a layer."""
        return WIDTH

    def output_norms(self, layer: int) -> Tensor:
        """Norm of the output weights of each channel."""
        return torch.ones(WIDTH)

    def narrowed(self, layer: int, channels: Tensor) -> FeedForwardPart:
        """The feed-forward network of a layer with only these channels [k]."""
        return AddsNothing()

    def ffn_projections(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of a layer's feed-forward network, all zero."""
        return torch.zeros(WIDTH, WIDTH), torch.zeros(WIDTH, WIDTH), torch.zeros(WIDTH, WIDTH)

    def ffn_input(self, layer: int, hidden: Tensor) -> Tensor:
        """What the feed-forward network of a layer reads: the hidden states, since there is no norm."""
        return hidden

    def feed_forward(self, layer: int, gate: Tensor, up: Tensor, down: Tensor) -> FeedForwardPart:
        """Another feed-forward network for a layer, from weights [k, d], [k, d] and [d, k]."""
        return AddsNothing()

    def norm_before(self, layer: int) -> tuple[Tensor, float]:
        """Weight and epsilon of a norm."""
        return torch.ones(self.width), 1e-5

    @property
    def lm_head(self) -> Tensor:
        """A head over as many tokens as there are channels."""
        return torch.eye(self.width)


class AddsNothing:
    """Stands in for a feed-forward network, with the share of a layer's weights that attention has."""

    weights = 1

    def __call__(self, hidden: Tensor) -> Tensor:
        return torch.zeros_like(hidden)

    def activations(self, hidden: Tensor) -> Tensor:
        """Its channels, [m, WIDTH]."""
        return torch.zeros(len(hidden), WIDTH)


class GeneratedLayers:
    """Stands in for a layer for multi-token prediction: its output is the state that it reads."""

    count = 1

    def __init__(self, model: GeneratedModel):
        self.model = model

    def new_cache(self) -> GeneratedLayers:
        return self

    def crop(self, count: int) -> None:
        """There is nothing to keep."""

    def states(self, number: int, states: Tensor, tokens: list[int], first: int, cache: GeneratedLayers) -> Tensor:
        return states

    def logits(self, states: Tensor) -> Tensor:
        return self.model.read_out(states)


class GeneratedModel:
    """Has the members of `engine.model.Model` that a lane uses. A row depends on the token before it and its position.
    """

    revision, quantization, parameters, tied, attends, splits, fills = "", "none", 0, False, True, True, False
    has_encoder = False
    lexical_units = 8  # as if it was tuned for it
    experts, mtp_count = 8, 1  # experts that a plan may choose among, without effect
    replay = launched_ahead = None  # nothing is recorded
    row_numbers = staticmethod(row_numbers)
    device, dtype, width = torch.device("cpu"), torch.float32, WIDTH

    def __init__(self, name: str, shared: SharedVocabulary, depth: int, context: int, watched: int, noise: float = 0.0):
        self.name, self.depth, self.context, self.watched = name, depth, context, watched
        # as if they were measured: what reads them times no stand-in
        self.forward_times = {(rows, 32): 1e-3 * depth * (1 + 0.02 * rows) for rows in (1, 4, 16, 64)}
        self.vocabulary, self.tokenizer, self.tokens = shared.size, shared.tokenizer, shared.tokens
        self.end_ids, self.lm_head_weights, self.stopwatch = shared.end_ids, shared.lm_head, shared.stopwatch
        self._shared, self.lock = shared, Lock()
        generator = torch.Generator().manual_seed(1)
        self._states = shared.states + noise * torch.randn(shared.states.shape, generator=generator)
        self._logits = self._states @ shared.lm_head.T
        self._keys = torch.randn(3, depth, HEADS, STATES, HEAD_DIM, generator=generator)

    @cached_property
    def thread(self) -> Executor:
        return ThreadPoolExecutor(1)

    @property
    def grammars(self) -> GrammarEngine:
        return self._shared.grammars

    def new_store(self, capacity: Capacity = UNKNOWN) -> KVCache:
        return KVCache(self.depth, capacity=capacity)

    def flops(self, rows: int, context: int, layers: int, experts: int | None = None) -> float:
        return float(rows)

    def flops_saved(self, rows: int, context: int, compute: ComputePass) -> float:
        return compute.idle_weights / (2 * self.depth)

    @property
    def mtp(self) -> GeneratedLayers:
        return GeneratedLayers(self)

    @property
    def parts(self) -> GeneratedParts:
        """Layers without weights: a compute policy decides nothing here, and its own work is measured."""
        return GeneratedParts(self.depth)

    def rotate(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Query states have no positions."""
        return rows

    def rotate_back(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Key states have no positions."""
        return rows

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden

    def embed(self, tokens: list[int]) -> Tensor:
        return self.lm_head_weights[tokens]

    def read_out(self, hidden: Tensor, norm: bool = True) -> Tensor:
        """Logits [n, V] of hidden states [n, width]; a matrix product of the model, so it counts as a forward."""
        with self.stopwatch.running():
            return hidden @ self.lm_head_weights.T

    def forward(
        self, works: list[ForwardInput], plan: LayerPlan | None = None
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """As `Model.forward`. Raises Refusal if all logits or attention weights of a long prompt are requested."""
        with self.stopwatch.running():
            plan = plan or LayerPlan()
            segments = [work.segment() for work in works]
            rows = torch.cat([_state_numbers(work, segment) for work, segment in zip(works, segments)])
            for work, segment in zip(works, segments):
                self._check_length(work, segment)
            self._write(Call(segments, plan), rows)
            if plan.compute:
                plan.compute.begin([position for segment in segments for position in segment.positions])
                self._choose(plan.compute, self._states[rows])
            return self._rows(works, plan, rows), {layer: self._state(layer, rows) for layer in plan.capture}

    def _choose(self, compute: ComputePass, hidden: Tensor) -> None:
        """Ask a compute policy about every layer, as a network does."""
        for layer in range(self.depth):
            attending = attending_rows(compute.choices.attends(layer, hidden), len(hidden))
            spent, own = [0.0] * len(hidden), AddsNothing()
            for row in attending:
                spent[row] = 1.0
            if attending and compute.choices.reads_attention(layer):
                compute.choices.attended(layer, _even_attention(attending, len(hidden)))
            for rows, part in compute.choices.feed_forwards(layer, hidden, own):
                for row in range(len(hidden)) if rows is None else rows:
                    spent[row] += part.weights
            compute.note(1 + own.weights, spent)
            compute.choices.observe(layer, hidden, hidden)

    def _check_length(self, work: ForwardInput, segment: Segment) -> None:
        """Raise Refusal if something is computed for many rows of a long prompt that takes minutes for all of them."""
        watched = segment.rows if _reads_all(segment) else len(segment.watched)
        logits = 1 if work.last_only else segment.rows
        if max(watched, logits) >= PIECE and work.start > self.watched:
            raise Refusal("The logits or attention weights of a prompt this long take minutes: shorten it.", "context")

    def _write(self, call: Call, rows: Tensor) -> None:
        """Write the rows' keys and values in every layer that runs, and compute attention where a policy reads it."""
        attended = any(segment.watched or _reads_all(segment) for segment in call.segments)
        for layer in filter(call.plan.runs, range(self.depth)):
            query, keys, values = self._keys[:, layer, :, rows]
            if attended:
                attend_all(layer, (query, keys, values), call, HEAD_DIM ** -0.5)
                continue
            parts = [rows.split([segment.rows for segment in call.segments], 1) for rows in (keys, values)]
            for segment, *states in zip(call.segments, *parts):
                segment.write(layer, *states)

    def _rows(self, works: list[ForwardInput], plan: LayerPlan, rows: Tensor) -> list[Tensor]:
        """Logits [n, V] of each work."""
        shares = rows.split([len(work.tokens) for work in works])
        wanted = [share[-1:] if work.last_only else share for work, share in zip(works, shares)]
        if plan.stop is None and not plan.skip:
            return [self._logits[part] for part in wanted]
        return [self.read_out(self._state(plan.layers(self.depth), part)) for part in wanted]

    def _state(self, layer: int, rows: Tensor) -> Tensor:
        """Hidden states [n, width] before a layer, the more like the last ones the later the layer is."""
        share = layer / self.depth
        return share * self._states[rows] + (1 - share) * self._states[rows - 1]


def _even_attention(attending: list[int], rows: int) -> Tensor:
    """Attention weights [attending, rows] of rows that see each earlier row of the same forward equally."""
    places = torch.arange(rows)
    seen = (places <= torch.tensor(attending)[:, None]).float()
    return seen / seen.sum(-1, keepdim=True)


def _reads_all(segment: Segment) -> bool:
    """Whether a cache policy reads the attention or the query states of every row."""
    return segment.focused or segment.reports_queries


def _state_numbers(work: ForwardInput, segment: Segment) -> Tensor:
    """Which state follows each row, [n]."""
    tokens, positions = torch.tensor(work.tokens), torch.tensor(segment.positions)
    return (tokens * 2654435761 + positions // SPAN) // 7 % STATES


def generated_pair(sizes: Sizes) -> tuple[GeneratedModel, GeneratedModel]:
    """A target, and a draft that often agrees with it."""
    shared, room = SharedVocabulary(sizes.vocabulary), sizes.context + sizes.tokens + 1024
    return (
        GeneratedModel("generated rows", shared, sizes.layers, room, sizes.watched),
        GeneratedModel("generated rows, draft", shared, min(DRAFT_LAYERS, sizes.layers), room, sizes.watched, NOISE),
    )
