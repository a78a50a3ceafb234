"""A causal language model: token ids in, logits out, with key and value states in the KV caches it is given."""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from playground.engine.attention.attention_mask import Reach
from playground.engine.attention.library_cache import LibraryAttention
from playground.engine.attention.segment_attention import Segment
from playground.engine.cache.kv_buffer import UNKNOWN, Capacity
from playground.engine.cache.kv_cache import KVCache
from playground.engine.checkpoint.model_facts import ModelFacts
from playground.engine.forward_input import ForwardInput
from playground.engine.forward_lock import lock_for
from playground.engine.graphs.compiled_rows import CompiledRows
from playground.engine.graphs.fused_llama import FusedLlama
from playground.engine.graphs.graph_replay import GraphReplay
from playground.engine.hooks import Call, LayerPlan, layer_devices, running
from playground.engine.host_copies import on_device
from playground.engine.implementations import Implementations
from playground.engine.layer_choices import ComputePass
from playground.engine.recurrent.recurrent_layers import Recurrence
from playground.engine.row_numbers import row_numbers
from playground.errors import Refusal
from playground.grammar.matcher import GrammarEngine

log = logging.getLogger(__name__)
PROBE = 5  # tokens of the forward that shows whether layers can be resumed


class Model(ModelFacts):
    """A causal language model with both hooks installed.

    Lanes may share one, because all their state is in their KV caches. Raises Refusal if it cannot be made to compute
    the library's own logits.
    """

    fills: Literal[False] = False  # decodes from left to right, cannot fill masked positions
    implementations: type = Implementations  # chooses how it computes: `install()` returns the tolerance
    has_encoder = False  # its decoder reads the prompt through an encoder (`engine.encoder_decoder`)

    def __init__(
        self,
        network: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        revision: str = "",
        quantization: str = "none",
    ):
        super().__init__(network, tokenizer, name, revision, quantization)
        # of each decoder layer, if they are not all on one; inputs, logits and captured states are on `device`
        self.devices: tuple[torch.device, ...] = layer_devices(network)
        # held by every forward, since several threads use one model
        self.lock = lock_for(self.device, *self.devices)
        self.fused: FusedLlama | None = None
        self.compiled: CompiledRows | None = None
        self.replay: GraphReplay | None = None
        self.library: LibraryAttention | None = None
        # seconds of forwards by rows and tokens before them, once they are measured (`decoding.forward_times`)
        self.forward_times: dict[tuple[int, int], float] | None = None
        # begin and end of the last forward, if it was launched before it was asked for (`GraphReplay`)
        self.launched_ahead: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self.reaches: dict[int, Reach] = {}
        self.recurrence: Recurrence | None = None
        self.depth = self.experts = 0  # layers, and experts that a plan can choose among in every layer with a router
        with torch.inference_mode():
            self.tolerance = self.implementations(self).install()  # of logits that should be the library's

    @cached_property
    def thread(self) -> Executor:
        """Worker thread for asynchronous forwards."""
        return ThreadPoolExecutor(1, f"forwards of {self.name}")

    @cached_property
    def grammars(self) -> GrammarEngine:
        return GrammarEngine(self.tokenizer, self.vocabulary, sorted(self.end_ids))

    @property
    def attends(self) -> bool:
        """Whether attention runs in the playground's own function, which cache policies need."""
        return self.library is None

    @property
    def parts(self) -> FusedLlama | None:
        """What a compute policy selects from; None if this model's layers always run whole."""
        return self.fused

    @property
    def rotate(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Rotates query states [heads, n, d] as their positions [n] demand; None if this model has no such function."""
        return self.fused.at_positions if self.fused else None

    @property
    def rotate_back(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Rotates query states [heads, n, d] back by so many positions [n]; None if this model has no such function."""
        return self.fused.rotate_back if self.fused else None

    def new_store(self, capacity: Capacity = UNKNOWN) -> KVCache:
        if self.recurrence is None:
            return KVCache(self.depth, self.device, capacity, devices=self.devices)
        memory = self.recurrence.new_memory()
        layers = self.recurrence.cache_layers
        return KVCache(len(layers), self.device, capacity, recurrent=memory, devices=self._devices_of(layers))

    def _devices_of(self, layers: Iterable[int]) -> tuple[torch.device, ...]:
        return tuple(self.devices[layer] for layer in layers) if self.devices else ()

    @torch.inference_mode()
    def forward(
        self, works: list[ForwardInput], plan: LayerPlan | None = None
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """One forward over the rows of all works.

        Returns the logits [rows, V] of each in float32 or float64, and captured hidden states [rows, d] by layer. A
        forward that fails leaves the KV caches unchanged.
        """
        before, plan = [len(work.store.parents) for work in works], plan or LayerPlan()
        if self.recurrence and not plan.is_whole:
            raise Refusal(
                f"{self.name} has recurrent layers, whose states need every token, so no layer can be left out: "
                "choose another strategy or another model.",
                "model",
            )
        with self.lock:
            try:
                return self._forward(works, [work.segment() for work in works], plan)
            except BaseException:
                for work, count in zip(works, before):
                    work.store.crop_scratch(count)
                raise

    def _forward(
        self, works: list[ForwardInput], segments: list[Segment], plan: LayerPlan
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        if found := self._replayed(works, segments, plan):
            logits, captured = found
            return [own[-1:] if work.last_only else own for work, own in zip(works, logits)], captured
        call = Call(segments, plan, reaches=self.reaches, recurrence=self.recurrence)
        true_positions = [position for segment in segments for position in segment.positions]
        if plan.compute:
            plan.compute.begin(true_positions)
        tokens = [token for work in works for token in work.tokens]
        ids, positions = on_device([tokens, true_positions], self.device).split(1)  # in one copy
        wanted, counts = self._wanted(works)
        logits = self._logits(positions, wanted, call, self._inputs(works, ids))
        if self.recurrence:
            call.scan.settle()
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return list(exact.split(counts)), call.captured

    def _replayed(
        self, works: list[ForwardInput], segments: list[Segment], plan: LayerPlan
    ) -> tuple[list[Tensor], dict[int, Tensor]] | None:
        """Logits [rows, V] of a recorded forward and captured states; None if this one has to run eagerly."""
        if self.replay is None:
            return None
        found = None
        if self.replay.fits(works, segments, plan):
            found = self.replay(works, segments, plan.capture)
        else:
            self.replay.join()
        self.launched_ahead = self.replay.marks
        return found

    def _logits(self, positions: Tensor, wanted: Tensor | int, call: Call, inputs: dict[str, Tensor]) -> Tensor:
        """Logits [rows, V] from the fastest implementation available."""
        if self.compiled and "input_ids" in inputs and self.compiled.fits(call):
            return self.compiled(inputs["input_ids"][0], positions[0], wanted, call.segments)
        if self.fused:
            return self.fused(positions, wanted, call, **inputs)
        if self.library:
            logits = self.library(call.segments, call.plan, call.captured, **inputs)
            return logits if isinstance(wanted, int) else logits[wanted]
        with running(call), self._recurring(call):
            out = self.network(**inputs, position_ids=positions, use_cache=False, logits_to_keep=wanted, call=call)
        logits = out.logits[0]
        ignored = not isinstance(wanted, int) and len(logits) != len(wanted)  # some architectures return all rows
        return logits[wanted] if ignored else logits

    def _recurring(self, call: Call) -> AbstractContextManager:
        return self.recurrence.running(call) if self.recurrence else nullcontext()

    @torch.inference_mode()
    def read_out(self, hidden: Tensor, norm: bool = True) -> Tensor:
        """Logits [n, V] of hidden states [n, hidden_size] of any layer (logit lens), with or without the final norm."""
        if norm:
            logits = self._after_layers(self.network, hidden).logits[0]
        else:
            with self.lock:
                logits = self.network.get_output_embeddings()(hidden)
        return logits.to(self.device, torch.promote_types(logits.dtype, torch.float32))

    @property
    def row_numbers(self) -> Callable[[Tensor, int], Tensor]:
        """How what the host reads of rows of logits [n, V] is computed, as `engine.row_numbers` does."""
        return self.replay.read if self.replay else row_numbers

    @torch.inference_mode()
    def go_on(self, store: KVCache, token: Tensor) -> None:
        """A text goes on with a token [1] on the device, which the host has not read: its next forward may begin."""
        if self.replay:
            with self.lock:
                self.replay.go_on(store, token)

    @torch.inference_mode()
    def embed(self, tokens: list[int]) -> Tensor:
        """Input embeddings of tokens, [n, hidden_size]."""
        with self.lock:
            return self.network.get_input_embeddings()(on_device(tokens, self.device, torch.long))

    @torch.inference_mode()
    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, hidden_size] of the last layer after the final norm, the input of the lm_head."""
        return self._after_layers(self.network.base_model, hidden).last_hidden_state[0].to(self.device)

    def _after_layers(self, part: PreTrainedModel, hidden: Tensor) -> ModelOutput:
        """The forward of a network, or of its base model, resumed after the last layer."""
        call = Call([], LayerPlan(resume=(self.depth, hidden)))
        with self.lock, running(call), self._recurring(call):
            if self.library:
                return part(inputs_embeds=hidden[None], use_cache=False)
            positions = torch.zeros(1, len(hidden), dtype=torch.long, device=self.device)
            return part(inputs_embeds=hidden[None], position_ids=positions, use_cache=False, call=call)

    def _inputs(self, works: list[ForwardInput], ids: Tensor) -> dict[str, Tensor]:
        """Token ids [1, rows], or embeddings if some row blends several tokens or has an input of its own."""
        end = 0
        for work in works:
            end += len(work.tokens)
            if work.given is not None:
                ids[0, end - len(work.given):end].copy_(work.given)
        if not any(work.blends or work.embeds for work in works):
            return {"input_ids": ids}
        embed, start = self.network.get_input_embeddings(), 0
        embeddings = embed(ids)
        for work in works:
            for row, (tokens, weights) in work.blends.items():
                mix = on_device(weights, self.device, embeddings.dtype)
                embeddings[0, start + row] = mix @ embed(on_device(tokens, self.device))
            for row, own in work.embeds.items():
                embeddings[0, start + row] = own.to(embeddings)
            start += len(work.tokens)
        return {"inputs_embeds": embeddings}

    def _wanted(self, works: list[ForwardInput]) -> tuple[Tensor | int, list[int]]:
        """Rows the lm_head is applied to, and how many belong to each work. 0 means all, as in transformers."""
        if not any(work.last_only and len(work.tokens) > 1 for work in works):
            return 0, [len(work.tokens) for work in works]
        rows, start = [], 0
        for work in works:
            end = start + len(work.tokens)
            rows.append(range(end - 1, end) if work.last_only else range(start, end))
            start = end
        # an index on the host selects rows on any device, and the last layer may be on another than the inputs
        return on_device([i for r in rows for i in r], "cpu" if self.devices else self.device), [len(r) for r in rows]

    def flops(self, rows: int, context: int, layers: int, experts: int | None = None) -> float:
        """Estimated FLOPs: two per weight and row for the layers that ran, plus attention over the context.

        Of a mixture of experts only those count that run for a row: `experts` in a layer, by default its own number.
        """
        idle = self.expert_weights.idle(experts) if self.expert_weights.count else 0.0
        weights = 2.0 * (self.parameters - idle) * layers / self.depth
        return rows * (weights + 4.0 * layers * self.width * (context + rows / 2))

    def flops_saved(self, rows: int, context: int, compute: ComputePass) -> float:
        """Estimated FLOPs that a compute policy left out of a forward of `flops(rows, context, depth)`."""
        attention = 4.0 * self.width * (context + rows / 2)
        return 2.0 * compute.idle_weights + rows * compute.idle_attention * attention

    @cached_property
    @torch.inference_mode()
    def splits(self) -> bool:
        """Whether a forward can be resumed at a later layer; not if layers use more than hidden states of earlier ones.

        Recurrent layers need every token: a plan may not leave any of them out.
        """
        if self.recurrence:
            return False
        ids = [token % self.vocabulary for token in range(1, PROBE + 1)]
        parents, half = list(range(-1, PROBE - 1)), max(1, self.depth // 2)
        try:
            (whole,), captured = self.forward(
                [ForwardInput(self.new_store(), ids, parents)], LayerPlan(capture=frozenset([half]))
            )
            (late,), _ = self.forward(
                [ForwardInput(self.new_store(), ids, parents)], LayerPlan(resume=(half, captured[half]))
            )
        except (Refusal, KeyError, TypeError, AttributeError, RuntimeError) as reason:
            log.info("forwards of %s cannot be resumed at a later layer: %s", self.name, reason)
            return False
        return bool((late - whole).abs().max() < self.tolerance * whole.abs().max().clamp(min=1.0))
