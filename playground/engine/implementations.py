"""How a model computes: the hooks in its network, and its fastest implementation that computes the library's logits."""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Protocol

import torch
from transformers import PreTrainedModel

from playground.engine.attention.attention_mask import Reach
from playground.engine.attention.library_cache import LibraryAttention
from playground.engine.attention.library_masks import layer_reaches
from playground.engine.cache.kv_cache import KVCache
from playground.engine.expert_routing import install_routing
from playground.engine.graphs.compiled_rows import CompiledRows, build_compiled_rows
from playground.engine.graphs.fused_llama import FusedLlama, build_fused_llama
from playground.engine.graphs.graph_replay import GraphReplay, build_graph_replay
from playground.engine.hooks import install_plans, running_routing, use_own_attention
from playground.engine.loading.finite_weights import logits_refusal
from playground.engine.loading.load_check import Reference, largest_error
from playground.engine.loading.stored_weights import rounds_inputs
from playground.engine.recurrent.recurrent_layers import Recurrence, find_recurrence
from playground.errors import Refusal

log = logging.getLogger(__name__)
Implementation = FusedLlama | CompiledRows | GraphReplay | None


class Computing(Protocol):
    """What is read of a model, and set (`engine.model.Model`)."""

    name: str
    network: PreTrainedModel
    dtype: torch.dtype
    context: int
    lock: AbstractContextManager
    reaches: dict[int, Reach]
    recurrence: Recurrence | None
    depth: int
    experts: int
    fused: FusedLlama | None
    compiled: CompiledRows | None
    replay: GraphReplay | None
    library: LibraryAttention | None
    forward: Callable
    new_store: Callable[[], KVCache]


class Implementations:
    """Chooses how a model computes, by comparing each way with the library's own logits."""

    def __init__(self, model: Computing):
        self._model = model

    def install(self) -> float:
        """Install both hooks, find recurrent layers, and choose the implementations; returns the tolerance of logits.

        Raises Refusal if the model cannot be made to compute the library's own logits.
        """
        model, reference = self._model, self._reference()
        model.recurrence = self._find_recurrence()
        self._check_library(reference)
        model.depth = len(install_plans(model.network))
        model.experts = install_routing(model.network, running_routing)
        self._install_attention(reference)
        return self._tolerance

    def _reference(self) -> Reference:
        """The library's own logits, before any hook; raises Refusal if it fails to compute them."""
        if self._model.dtype == torch.float64:  # the library's grouped matrix products of experts have no float64
            self._model.network.set_experts_implementation("eager")
        with self._library_runs():
            reference = Reference.of(self._model.network)
        if not reference.is_finite:
            raise logits_refusal(self._model.name, self._model.dtype)
        return reference

    def _find_recurrence(self) -> Recurrence | None:
        """The network's recurrent layers; raises Refusal if they do not run by themselves."""
        try:
            return find_recurrence(self._model.network)
        except Refusal:
            raise
        except Exception as reason:  # an architecture may need more than the rows in any way
            log.info("the recurrent layers of %s do not run by themselves: %s", self._model.name, reason)
            raise self._refusal("their recurrent layers do not run by themselves") from None

    def _check_library(self, reference: Reference) -> None:
        """Raise Refusal if the library's own logits depend on its cache. States of recurrent layers do depend on how
        many rows a forward has, in some architectures by more than rounding.
        """
        if self._model.recurrence:
            return
        with self._library_runs():
            error = reference.library_error(self._model.network)
        if not error < self._tolerance:
            raise self._refusal(f"the transformers library's own logits differ by {error:.2g} with and without a cache")

    @contextmanager
    def _library_runs(self) -> Iterator[None]:
        """Raises Refusal if the library's forward fails, which it may in any way."""
        try:
            with self._model.lock:
                yield
        except Exception as reason:
            log.info("the library cannot run %s: %s", self._model.name, reason)
            raise self._refusal("the transformers library cannot run them on text alone") from None

    def _install_attention(self, reference: Reference) -> None:
        """The playground's own attention if it computes the reference, otherwise the library's; raises Refusal."""
        original = self._model.network.config.get_text_config(decoder=True)._attn_implementation
        try:
            self._install_own_attention(reference)
        except Exception as reason:  # an architecture may fail under foreign attention in any way
            log.info("%s does not run with the playground's attention: %s", self._model.name, reason)
            if self._model.recurrence:  # states are carried beside the playground's attention only
                raise reason if isinstance(reason, Refusal) else self._refusal("their layers fail") from None
            self._install_library_attention(original, reference)

    def _install_own_attention(self, reference: Reference) -> None:
        """Raises Refusal if the logits differ from the reference, and whatever the architecture raises."""
        model = self._model
        model.reaches = layer_reaches(model.network)
        use_own_attention(model.network)
        model.fused = self._checked("fused", lambda: build_fused_llama(model.network, model.context), reference)
        model.compiled = self._checked("compiled", lambda: build_compiled_rows(model.fused), reference)
        model.replay = self._checked("replay", self._build_replay, reference)
        if not model.fused:
            self._check(reference)

    def _build_replay(self) -> GraphReplay | None:
        replay = build_graph_replay(self._model.fused)
        if replay:
            replay.record_usual(self._model.context)
        return replay

    def _install_library_attention(self, implementation: str, reference: Reference) -> None:
        """Raises Refusal if a cache of the playground's does not do for the library's."""
        self._model.network.set_attn_implementation(implementation)
        self._model.reaches, self._model.fused, self._model.replay = {}, None, None
        reasons = []
        for one_by_one in (False, True):
            self._model.library = LibraryAttention(self._model.network, one_by_one)
            try:
                return self._check(reference)
            except Refusal as refusal:
                reasons.append(refusal)
            except Exception as reason:
                log.info("%s does not run with the library's attention: %s", self._model.name, reason)
                reasons.append(self._refusal("they keep state outside of keys and values, or accept no cache"))
        raise reasons[0]

    def _check(self, reference: Reference) -> None:
        """Raise Refusal if the logits differ from the library's own."""
        error = largest_error(self._model.forward, self._model.new_store, reference)
        if not error < self._tolerance:
            raise self._refusal(f"their logits would differ from the transformers library's by {error:.2g}")

    def _refusal(self, why: str) -> Refusal:
        kind = self._model.network.config.model_type
        return Refusal(f"{kind} models cannot be run here, because {why}: choose another model.", "model")

    def _checked(self, name: str, build: Callable[[], Implementation], reference: Reference) -> Implementation:
        """A faster implementation if it reproduces the library's logits. Otherwise it is dropped with a warning."""
        try:
            implementation = build()
            if implementation is None:
                return None
            setattr(self._model, name, implementation)
            error = largest_error(self._model.forward, self._model.new_store, reference)
        except Exception as reason:  # drivers and libraries may fail in any way, and the model runs without
            log.warning("%s runs without the %s implementation: %s", self._model.name, name, reason)
            return None
        if not error < self._tolerance:
            log.warning("%s runs without the %s implementation, whose error is %.2g", self._model.name, name, error)
            return None
        return implementation

    @property
    def _tolerance(self) -> float:
        if self._model.dtype not in (torch.float32, torch.float64) or self._rounds_inputs:
            return 0.15  # measured on random networks of 8 layers: up to 0.09 for int8, 0.03 for nf4 on a CPU
        return 0.05 if self._model.recurrence else 1e-3  # recurrent layers round otherwise row by row than in one call

    @cached_property
    def _rounds_inputs(self) -> bool:
        return rounds_inputs(self._model.network)
