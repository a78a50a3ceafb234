"""Who writes behind a prompt of a given length: only the tokens after the first are timed, or only the first.

Nobody looks for the end of a text here, so everyone writes the same number of tokens.
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


def endless(loaded: TwinModels) -> TwinModels:
    """The same weights, with no token that ends a text."""
    model, untouched = copy.copy(loaded.model), twin(loaded.untouched)
    model.end_ids = frozenset()
    untouched.generation_config.eos_token_id = None
    return TwinModels(model, untouched)


def writers(loaded: TwinModels, length: int, lanes: Iterable[int], compiled: bool) -> list[Baseline]:
    """Everyone who writes `length` tokens; the first one is not timed. `loaded` is endless."""
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


def firsts(loaded: TwinModels) -> list[Baseline]:
    """A lane up to its first token, and forwards that read the prompt and do nothing else."""
    return [_first_of_a_lane(loaded.model), _engine(loaded.model), _prefill(loaded)]


def _session(model: Model, task: Task, lanes: int, length: int, recorder: type[Recorder] = Recorder) -> Session:
    """Greedy lanes that have written their first token."""
    session = prepare(
        Models(model), [LaneConfig("greedy")] * lanes, prompt_of(task, model), Limits(max_new_tokens=length), recorder
    )
    session.step()
    return session


def _lanes(model: Model, name: str, length: int, sessions: list[int], recorder: type[Recorder] = Recorder) -> Baseline:
    """Sessions one after the other, each with so many lanes."""
    def write(begun: list[Session]) -> list[Session]:
        for session in begun:
            for _ in session:
                pass
        return begun

    return Baseline(name, lambda task: [_session(model, task, lanes, length, recorder) for lanes in sessions], write,
                     lambda written: _after_the_first(texts(written), length), model.device)


def _after_the_first(ids: list[int], length: int) -> list[int]:
    """Of texts of `length` tokens, one after the other, all but the first token of each."""
    return [token for place, token in enumerate(ids) if place % length]


def _loop(loaded: TwinModels, length: int) -> Baseline:
    def ready(task: Task) -> tuple[Loop, torch.Tensor, int]:
        loop = Loop(loaded.untouched, len(task.ids) + length)
        return loop, loop.prefill(torch.tensor(task.ids, device=loaded.model.device)), len(task.ids)

    def write(begun: tuple[Loop, torch.Tensor, int]) -> list[int]:
        loop, first, at = begun
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
    """`generate` behind a prompt that is in its cache already, the first token chosen."""
    network, device = loaded.untouched, loaded.model.device

    @torch.inference_mode()
    def ready(task: Task) -> tuple[torch.Tensor, Cache]:
        ids, held = torch.tensor([task.ids], device=device), cache(len(task.ids))
        first = network(input_ids=ids, past_key_values=held, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
        return torch.cat([ids, first[None]], 1), held

    @torch.inference_mode()
    def write(begun: tuple[torch.Tensor, Cache]) -> list[int]:
        ids, held = begun
        written = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=held,
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
        (row,), _ = model.forward([ForwardInput(model.new_store(), ids, list(range(-1, len(ids) - 1)), last_only=True)])
        return row.argmax(-1).tolist()

    return Baseline(ENGINE, lambda task: list(task.ids), write, list, model.device)


def _prefill(loaded: TwinModels) -> Baseline:
    network, device = loaded.untouched, loaded.model.device

    @torch.inference_mode()
    def write(ids: torch.Tensor) -> list[int]:
        return network(input_ids=ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()

    return Baseline(LIBRARY_PREFILL, lambda task: torch.tensor([task.ids], device=device), write, list, device)
