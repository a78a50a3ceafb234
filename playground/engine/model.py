"""A language model as the playground sees it: token ids in, rows of logits out, keys and values in the stores it is
given.
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cached_property
from threading import Lock

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from playground.engine.attention_mask import Segment
from playground.engine.cuda_graphs import GraphReplay, replay_path
from playground.engine.forward_input import ForwardInput
from playground.engine.fused_llama import FusedLlama, fast_path
from playground.engine.grammar_matcher import GrammarEngine
from playground.engine.hooks import Call, LayerPlan, install
from playground.engine.kv_buffer import UNKNOWN, Capacity
from playground.engine.kv_cache import KVCache
from playground.engine.numpy_llama import FEW, NumpyLlama, light_path
from playground.engine.tokens import Tokens
from playground.errors import Refusal

log = logging.getLogger(__name__)
PROBE = 5  # tokens of the forward that compares our attention with the library's own


Way = FusedLlama | NumpyLlama | GraphReplay | None

class Model:
    """A causal language model with both seams in place. Many lanes may share one; all their state is in their stores.
    """

    fills = False  # it writes from left to right, and cannot fill masked positions

    def __init__(
        self,
        network: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        revision: str = "",
        quantization: str = "none",
    ):
        self.network, self.tokenizer, self.name, self.revision, self.quantization = (
            network.eval(),
            tokenizer,
            name,
            revision,
            quantization,
        )
        config = network.config.get_text_config()
        self.vocabulary: int = config.vocab_size
        self.width: int = config.hidden_size
        self.tied: bool = bool(getattr(config, "tie_word_embeddings", False))  # the head is the embeddings
        self.context: int = getattr(config, "max_position_embeddings", None) or 2048
        self.device: torch.device = network.get_input_embeddings().weight.device
        self.dtype: torch.dtype = network.dtype
        self.parameters = network.num_parameters()  # knows how many weights a quantised tensor stands for
        self.tokens = Tokens(tokenizer, self.vocabulary)
        self.turn = Lock()  # whose forward it is: the session's, or one that its thread makes
        with torch.inference_mode():
            expected = self._probe_library()
            self.depth = len(install(network))
            self.fast = self.light = self.replay = None
            self.fast = self._trusted("fast", fast_path(network, self.context), expected)
            self.light = self._trusted("light", light_path(self.fast), expected)
            self.replay = self._trusted("replay", replay_path(self.fast), expected)
            if not self.fast:
                self._probe_seams(expected)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text, by the model's own generation settings and its tokenizer."""
        named = self.network.generation_config.eos_token_id if self.network.generation_config else None
        ids = named if isinstance(named, list) else [named, self.tokenizer.eos_token_id]
        return frozenset(i for i in ids if i is not None)

    @cached_property
    def thread(self) -> Executor:
        """Where forwards are made while whoever asked for them goes on; it ends with the model."""
        return ThreadPoolExecutor(1, f"aside of {self.name}")

    @cached_property
    def grammars(self) -> GrammarEngine:
        return GrammarEngine(self.tokenizer, self.vocabulary, sorted(self.end_ids))

    @property
    def keys(self) -> Tensor | None:
        """Rows of the head, [V, width], whose products with what it reads are the scores; None where it is no plain
        matrix, as with packed weights.
        """
        weight = getattr(self.network.get_output_embeddings(), "weight", None)
        plain = weight is not None and weight.is_floating_point() and weight.shape[1:] == (self.width,)
        return weight.detach() if plain else None

    @property
    def turn_back(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Moves rotated queries [heads, n, d] by so many positions [n] towards the start; None where positions cannot
        be changed afterwards.
        """
        return self.fast.turn_back if self.fast else None

    def new_store(self, room: Capacity = UNKNOWN) -> KVCache:
        return KVCache(self.depth, self.device, room)

    @torch.inference_mode()
    def forward(
        self, works: list[ForwardInput], plan: LayerPlan | None = None
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """One pass over the rows of all works. Returns logits [rows, V] of each, in float32 or better, and captured
        hidden states.

        A forward that fails leaves the stores as they were.
        """
        before = [len(work.store.parents) for work in works]
        try:
            return self._forward(works, [work.segment() for work in works], plan or LayerPlan())
        except BaseException:
            for work, count in zip(works, before):
                work.store.forget(count)
            raise

    def _forward(
        self, works: list[ForwardInput], segments: list[Segment], plan: LayerPlan
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        if self.replay and self.replay.fits(works, segments, plan):
            rows = self.replay(works[0].tokens, segments[0])
            self._wait()
            return [rows[-1:] if works[0].last_only else rows], {}
        call = Call(segments, plan)
        positions = torch.tensor([[p for segment in segments for p in segment.positions()]], device=self.device)
        wanted, counts = self._wanted(works)
        logits = self._through(positions, wanted, call, self._inputs(works))
        self._wait()
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return list(exact.split(counts)), call.captured

    def _through(self, positions: Tensor, wanted: Tensor | int, call: Call, inputs: dict[str, Tensor]) -> Tensor:
        """Logits [rows, V], the leanest way the network has."""
        if self.light and positions.shape[1] <= FEW:
            return self.light(positions, wanted, call, **inputs)
        if self.fast:
            return self.fast(positions, wanted, call, **inputs)
        return self.network(**inputs, position_ids=positions, use_cache=False, logits_to_keep=wanted, call=call).logits[
            0
        ]

    @torch.inference_mode()
    def read_out(self, hidden: Tensor, norm: bool = True) -> Tensor:
        """Logits [n, V] of states [n, width] from between any two layers, as if no layer followed; without `norm` the
        head reads them as they are.
        """
        logits = (
            self._behind_all_layers(self.network, hidden).logits[0]
            if norm
            else self.network.get_output_embeddings()(hidden)
        )
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    @torch.inference_mode()
    def normed(self, hidden: Tensor) -> Tensor:
        """States [n, width] that left the last layer, as the head reads them."""
        return self._behind_all_layers(self.network.base_model, hidden).last_hidden_state[0]

    def _behind_all_layers(self, part: PreTrainedModel, hidden: Tensor) -> ModelOutput:
        """What is left of a network, or of the part below its head, where it is entered after the last layer."""
        places = torch.zeros(1, len(hidden), dtype=torch.long, device=self.device)
        return part(
            inputs_embeds=hidden[None],
            position_ids=places,
            use_cache=False,
            call=Call([], LayerPlan(resume=(self.depth, hidden))),
        )

    def _inputs(self, works: list[ForwardInput]) -> dict[str, Tensor]:
        """Token ids, or embeddings where some row blends several tokens."""
        ids = torch.tensor([[token for work in works for token in work.tokens]], device=self.device)
        if not any(work.blends for work in works):
            return {"input_ids": ids}
        embed, start = self.network.get_input_embeddings(), 0
        embeddings = embed(ids)
        for work in works:
            for row, (tokens, weights) in work.blends.items():
                share = torch.tensor(weights, dtype=embeddings.dtype, device=self.device)
                embeddings[0, start + row] = share @ embed(torch.tensor(tokens, device=self.device))
            start += len(work.tokens)
        return {"inputs_embeds": embeddings}

    def _wanted(self, works: list[ForwardInput]) -> tuple[Tensor | int, list[int]]:
        """Rows the head is applied to, and how many belong to each work. 0 is the library's word for all."""
        if not any(work.last_only and len(work.tokens) > 1 for work in works):
            return 0, [len(work.tokens) for work in works]
        rows, start = [], 0
        for work in works:
            end = start + len(work.tokens)
            rows.append(range(end - 1, end) if work.last_only else range(start, end))
            start = end
        return torch.tensor([i for r in rows for i in r], device=self.device), [len(r) for r in rows]

    def flops(self, rows: int, context: int, layers: int) -> float:
        """Computed, not measured: two per weight and row for the layers that ran, and the attention over the context.
        """
        weights = 2.0 * self.parameters * layers / self.depth
        return rows * (weights + 4.0 * layers * self.width * (context + rows / 2))

    def _wait(self) -> None:
        """Until the device is done: the seconds of a forward are measured, and a GPU returns before it has worked."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def _probe_ids(self) -> Tensor:
        return torch.arange(1, PROBE + 1, device=self.device)[None] % self.vocabulary

    def _probe_library(self) -> Tensor:
        return self.network(input_ids=self._probe_ids(), use_cache=False).logits[0].float()

    def _trusted(self, name: str, way: Way, expected: Tensor) -> Way:
        """A leaner way if it gives the library's rows. One that does not, or cannot run here, is left out, and the log
        says so.
        """
        if way is None:
            return None
        setattr(self, name, way)
        try:
            off = self._off(expected)
        except RuntimeError as reason:
            log.warning("%s goes without %s: %s", self.name, name, reason)
            return None
        if not off < self._tolerance:
            log.warning("%s goes without %s, which is off by %.2g", self.name, name, off)
            return None
        return way

    @property
    def _tolerance(self) -> float:
        return 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.15

    def _off(self, expected: Tensor) -> float:
        """How far a short forward is from the library's own, as a share of its largest logit."""
        (seen,), _ = self.forward(
            [ForwardInput(self.new_store(), self._probe_ids()[0].tolist(), list(range(-1, PROBE - 1)))]
        )
        return float((seen.float() - expected).abs().max() / expected.abs().max().clamp(min=1.0))

    @cached_property
    @torch.inference_mode()
    def splits(self) -> bool:
        """Whether later layers can read rows by themselves: not where they use what earlier ones left behind, such as
        their keys.
        """
        ids, parents, half = self._probe_ids()[0].tolist(), list(range(-1, PROBE - 1)), max(1, self.depth // 2)
        (whole,), captured = self.forward(
            [ForwardInput(self.new_store(), ids, parents)], LayerPlan(capture=frozenset([half]))
        )
        try:
            (late,), _ = self.forward(
                [ForwardInput(self.new_store(), ids, parents)], LayerPlan(resume=(half, captured[half]))
            )
        except (KeyError, TypeError, AttributeError, RuntimeError) as reason:
            log.info("%s cannot be read in two parts: %s", self.name, reason)
            return False
        return bool((late - whole).abs().max() < self._tolerance * whole.abs().max().clamp(min=1.0))

    def _probe_seams(self, expected: Tensor) -> None:
        """Refuse a model that our attention would change."""
        try:
            worst = self._off(expected)
        except TypeError as reason:
            kind = self.network.config.model_type
            raise Refusal(
                f"{kind} models do not hand the state of a running forward to their attention ({reason}): choose another model.",
                "model",
            ) from None
        if not worst < self._tolerance:
            raise Refusal(
                f"With this model the playground's attention differs from the library's by {worst:.2g}: choose another model.",
                "model",
            )
