"""Baselines that decode after a prompt of a given length. Either the tokens after the first are timed, or the first.

End tokens are ignored here, so that all baselines write the same number of tokens.
"""
from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from transformers import Cache, DynamicCache, StaticCache

from playground.bench.speed.baselines import Baseline, TwinModels, everywhere, generate, lanes, loops, twin
from playground.bench.speed.speed_defaults import (
    COMPILED,
    ENGINE,
    FIRST,
    LANE,
    LIBRARY,
    LIBRARY_PREFILL,
    SILENT_LANE,
    STATIC,
    apart,
    together,
)
from playground.decoding.models import Models
from playground.decoding.recorder import Silent
from playground.engine.forward_input import ForwardInput
from playground.engine.model import Model


def without_end_tokens(loaded: TwinModels) -> TwinModels:
    """The same weights, without end tokens."""
    model, untouched = copy.copy(loaded.model), twin(loaded.untouched)
    model.end_ids = frozenset()
    untouched.generation_config.eos_token_id = None
    return TwinModels(model, untouched)


def decode_baselines(loaded: TwinModels, length: int, counts: Iterable[int], compiled: bool) -> list[Baseline]:
    """All baselines that write `length` tokens, of which the first is not timed; `counts` are numbers of lanes.
    `loaded` has no end tokens.
    """
    models = Models(loaded.model)
    stages = [lanes(models, LANE, length), lanes(models, SILENT_LANE, length, recorder=Silent)]
    for count in (count for count in counts if count > 1):
        stages += [lanes(models, together(count), length, [count]), lanes(models, apart(count), length, [1] * count)]
    return [*(each.decoding() for each in [*stages, *loops(loaded, length)]), *_library(loaded, length, compiled)]


def first_token_baselines(loaded: TwinModels) -> list[Baseline]:
    """A lane up to its first token, and bare prefills without a lane."""
    return [lanes(Models(loaded.model), FIRST, 2).first_token(), _engine(loaded.model), _prefill(loaded)]


def _library(loaded: TwinModels, length: int, compiled: bool) -> list[Baseline]:
    config = loaded.untouched.config

    def dynamic(tokens: int) -> Cache:
        return DynamicCache(config=config)

    def static(tokens: int) -> Cache:
        return StaticCache(config=config, max_cache_len=tokens + length)

    return [generate(loaded, LIBRARY, length, dynamic),
            generate(loaded, STATIC, length, static, disable_compile=True),
            *([generate(loaded, COMPILED, length, static, compile_config=everywhere())] if compiled else [])]


def _engine(model: Model) -> Baseline:
    """The prompt in one forward, without a lane around it."""
    def write(ids: list[int]) -> list[int]:
        prefill = ForwardInput(model.new_store(), ids, list(range(-1, len(ids) - 1)), last_only=True)
        (logits,), _ = model.forward([prefill])
        return logits.argmax(-1).tolist()

    return Baseline(ENGINE, lambda task: list(task.ids), write, list, model.device)


def _prefill(loaded: TwinModels) -> Baseline:
    network, device = loaded.untouched, loaded.model.device

    @torch.inference_mode()
    def write(ids: torch.Tensor) -> list[int]:
        return network(input_ids=ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()

    return Baseline(LIBRARY_PREFILL, lambda task: torch.tensor([task.ids], device=device), write, list, device)
