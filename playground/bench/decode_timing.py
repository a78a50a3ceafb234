"""Baselines that decode after a prompt of a given length. Either the tokens after the first are timed, or the first.

End tokens are ignored here, so that all baselines write the same number of tokens.
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import Cache, DynamicCache, StaticCache

from playground.bench.baselines import Baseline, TwinModels, everywhere, prompt_of, texts, twin
from playground.bench.minimal_loop import Loop, has_loop
from playground.bench.speed_defaults import (
    COMPILED,
    ENGINE,
    FIRST,
    LANE,
    LIBRARY,
    LIBRARY_PREFILL,
    LOOP,
    SILENT_LANE,
    STATIC,
    apart,
    together,
)
from playground.bench.speed_prompts import Task
from playground.contract.lane_config import LaneConfig
from playground.decoding.recorder import Recorder, Silent
from playground.decoding.session import Limits, Models, Session, prepare
from playground.engine.forward_input import ForwardInput
from playground.engine.model import Model


def without_end_tokens(loaded: TwinModels) -> TwinModels:
    """The same weights, without end tokens."""
    model, untouched = copy.copy(loaded.model), twin(loaded.untouched)
    model.end_ids = frozenset()
    untouched.generation_config.eos_token_id = None
    return TwinModels(model, untouched)


def decode_baselines(loaded: TwinModels, length: int, lanes: Iterable[int], compiled: bool) -> list[Baseline]:
    """All baselines that write `length` tokens, of which the first is not timed. `loaded` has no end tokens."""
    model = loaded.model
    one = [_lanes(model, LANE, length, [1]), _lanes(model, SILENT_LANE, length, [1], Silent)]
    several = [
        contender
        for count in lanes
        if count > 1
        for contender in (
            _lanes(model, together(count), length, [count]),
            _lanes(model, apart(count), length, [1] * count),
        )
    ]
    loop = [_loop(loaded, length)] if has_loop(loaded.untouched) else []
    return [*one, *several, *loop, *_library(loaded, length, compiled)]


def first_token_baselines(loaded: TwinModels) -> list[Baseline]:
    """A lane up to its first token, and bare prefills without a lane."""
    return [_first_of_a_lane(loaded.model), _engine(loaded.model), _prefill(loaded)]


def _session(model: Model, task: Task, lanes: int, length: int, recorder: type[Recorder] = Recorder) -> Session:
    """Greedy lanes that have written their first token."""
    session = prepare(
        Models(model), [LaneConfig("greedy")] * lanes, prompt_of(task, model), Limits(max_new_tokens=length), recorder
    )
    session.step()
    return session


def _lanes(model: Model, name: str, length: int, sessions: list[int], recorder: type[Recorder] = Recorder) -> Baseline:
    """Sessions one after the other; `sessions` has the number of lanes of each."""
    def write(started: list[Session]) -> list[Session]:
        for session in started:
            for _ in session:
                pass
        return started

    return Baseline(name, lambda task: [_session(model, task, lanes, length, recorder) for lanes in sessions], write,
                    lambda finished: _after_the_first(texts(finished), length), model.device)


def _after_the_first(ids: list[int], length: int) -> list[int]:
    """Drops the first token of each text from concatenated texts of `length` tokens."""
    return [token for position, token in enumerate(ids) if position % length]


def _loop(loaded: TwinModels, length: int) -> Baseline:
    def ready(task: Task) -> tuple[Loop, torch.Tensor, int]:
        loop = Loop(loaded.untouched, len(task.ids) + length)
        return loop, loop.prefill(torch.tensor(task.ids, device=loaded.model.device)), len(task.ids)

    def write(prepared: tuple[Loop, torch.Tensor, int]) -> list[int]:
        loop, first, at = prepared
        return loop.decode(first, at, length - 1).tolist()

    return Baseline(LOOP, ready, write, list, loaded.model.device)


def _library(loaded: TwinModels, length: int, compiled: bool) -> list[Baseline]:
    config = loaded.untouched.config

    def static(tokens: int) -> Cache:
        return StaticCache(config=config, max_cache_len=tokens + length)

    return [_generate(loaded, LIBRARY, length, lambda tokens: DynamicCache(config=config)),
            _generate(loaded, STATIC, length, static, disable_compile=True),
            *([_generate(loaded, COMPILED, length, static, compile_config=everywhere())] if compiled else [])]


def _generate(loaded: TwinModels, name: str, length: int, cache: Callable[[int], Cache], **options: Any) -> Baseline:
    """`generate` after a prefill that has already chosen the first token."""
    network, device = loaded.untouched, loaded.model.device

    @torch.inference_mode()
    def ready(task: Task) -> tuple[torch.Tensor, Cache]:
        ids, past = torch.tensor([task.ids], device=device), cache(len(task.ids))
        first = network(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
        return torch.cat([ids, first[None]], 1), past

    @torch.inference_mode()
    def write(prepared: tuple[torch.Tensor, Cache]) -> list[int]:
        ids, past = prepared
        written = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=past,
            max_new_tokens=length - 1,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        return written[0, ids.shape[1]:].tolist()

    return Baseline(name, ready, write, list, device)


def _first_of_a_lane(model: Model) -> Baseline:
    return Baseline(FIRST, lambda task: task, lambda task: [_session(model, task, 1, 2)], texts, model.device)


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
