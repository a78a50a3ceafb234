"""Timed baselines: lanes, the library's `generate` on an unmodified copy of the same network, and a minimal loop.
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, CompileConfig, PreTrainedModel

from playground.bench.speed.minimal_loop import Loop, has_loop
from playground.bench.speed.speed_defaults import LOOP
from playground.bench.speed.speed_prompts import Task
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.recorder import Recorder
from playground.decoding.session import Session, prepare
from playground.engine.loading.load import Loading, load
from playground.engine.model import Model
from playground.lane_fields import LaneConfig
from playground.trace.result import Result

GREEDY = LaneConfig("greedy")


@dataclass(frozen=True)
class Baseline:
    """Writes a text: `ready` prepares and is not timed, `write` is timed, `read` takes the token ids from its output.
    """

    name: str
    ready: Callable[[Task], Any]
    write: Callable[[Any], Any]
    read: Callable[[Any], list[int]]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True)
class Stages:
    """A text of `length` tokens in stages, so that a baseline can time all of it or some: `ready` prepares, `prefill`
    ends with the first token, `decode` writes the others, `read` takes the token ids of the whole texts.
    """

    name: str
    length: int
    ready: Callable[[Task], Any]
    prefill: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    read: Callable[[Any], list[int]]
    device: torch.device

    def whole(self) -> Baseline:
        """Times prefill and decoding."""
        return Baseline(self.name, self.ready, lambda ready: self.decode(self.prefill(ready)), self.read, self.device)

    def decoding(self) -> Baseline:
        """Times the tokens after the first, and drops the first of each text. Every text has `length` tokens."""
        def read(output: Any) -> list[int]:
            return [token for position, token in enumerate(self.read(output)) if position % self.length]

        return Baseline(self.name, lambda task: self.prefill(self.ready(task)), self.decode, read, self.device)

    def first_token(self) -> Baseline:
        """Times the prefill."""
        return Baseline(self.name, self.ready, self.prefill, self.read, self.device)


@dataclass(frozen=True)
class TokenPrompt(Prompt):
    """A prompt given as token ids."""

    ids: tuple[int, ...] = ()

    def encode(self, model: Model) -> list[int]:
        return list(self.ids)


def prompt_of(task: Task, model: Model) -> Prompt:
    """The task's prompt; a chat only if the model has a chat template."""
    if task.ids:
        return TokenPrompt("", ids=task.ids)
    return Prompt(task.prompt, task.chat and bool(model.tokenizer.chat_template))


@dataclass(frozen=True)
class TwinModels:
    """A model twice, sharing its weights: with our hooks, and as the library built it."""

    model: Model
    untouched: PreTrainedModel


def load_twice(name: str, loading: Loading, progress: Callable[[float, str], None]) -> TwinModels:
    network, tokenizer, facts = load(name, loading, progress)
    untouched = twin(network)
    return TwinModels(Model(network, tokenizer, facts.name, facts.revision, facts.quantization), untouched)


def twin(network: PreTrainedModel) -> PreTrainedModel:
    """A second network that shares all weights and buffers."""
    shared = {id(tensor): tensor for tensor in [*network.parameters(), *network.buffers()]}
    return copy.deepcopy(network, shared)


def lanes(
    models: Models,
    name: str,
    length: int,
    sessions: Sequence[int] = (1,),
    config: LaneConfig = GREEDY,
    recorder: type[Recorder] = Recorder,
) -> Stages:
    """Lanes of one config in sessions one after the other; `sessions` has the number of lanes of each. Encoding the
    prompt is part of the prefill.
    """
    def start(task: Task, count: int) -> Session:
        limits = Limits(max_new_tokens=length)
        return prepare(models, [config] * count, prompt_of(task, models.target), limits, recorder)

    def prefill(task: Task) -> list[Session]:
        started = [start(task, count) for count in sessions]
        for session in started:
            session.step()
        return started

    return Stages(name, length, lambda task: task, prefill, _finish, texts, models.target.device)


def _finish(sessions: list[Session]) -> list[Session]:
    for session in sessions:
        for _ in session:
            pass
    return sessions


def texts(sessions: list[Session]) -> list[int]:
    """Token ids of all lanes, concatenated. Raises RuntimeError if a lane failed."""
    results = [Result(session.trace.lane(header.lane)) for session in sessions for header in session.headers]
    if failed := next((result.message for result in results if result.message), ""):
        raise RuntimeError(failed)
    return [token for result in results for token in result.token_ids]


def loops(target: TwinModels, length: int) -> list[Stages]:
    """The hand-written loop, for networks that it supports. It does not check for end tokens: the warm-up round finds
    the length of each text.
    """
    if not has_loop(target.untouched):
        return []
    model, lengths = target.model, {}

    def ready(task: Task) -> tuple[Task, Loop, torch.Tensor]:
        ids = torch.tensor(prompt_of(task, model).encode(model), device=model.device)
        return task, Loop(target.untouched, len(ids) + length), ids

    def prefill(prepared: tuple[Task, Loop, torch.Tensor]) -> tuple[Task, Loop, torch.Tensor, int]:
        task, loop, ids = prepared
        return task, loop, loop.prefill(ids), len(ids)

    def decode(prefilled: tuple[Task, Loop, torch.Tensor, int]) -> tuple[Task, list[int]]:
        task, loop, first, at = prefilled
        later = loop.decode(first, at, lengths.get(task, length) - 1)
        return task, [*first.tolist(), *later.tolist()]

    def read(output: tuple[Task, list[int]]) -> list[int]:
        task, ids = output
        lengths[task] = next((place for place, token in enumerate(ids, 1) if token in model.end_ids), len(ids))
        return ids[:lengths[task]]

    return [Stages(LOOP, length, ready, prefill, decode, read, model.device)]


def generate(
    target: TwinModels, name: str, length: int, cache: Callable[[int], Cache] | None = None, **options: Any
) -> Baseline:
    """The library's `generate`, which gets token ids. With `cache`, which takes the length of the prompt, it is timed
    after a prefill that has already chosen the first token.
    """
    model, network = target.model, target.untouched
    common = settings(model, length - (cache is not None))

    @torch.inference_mode()
    def ready(task: Task) -> tuple[torch.Tensor, dict[str, Cache]]:
        ids = torch.tensor([prompt_of(task, model).encode(model)], device=model.device)
        if cache is None:
            return ids, {}
        past = cache(ids.shape[1])
        first = network(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
        return torch.cat([ids, first[None]], 1), {"past_key_values": past}

    @torch.inference_mode()
    def write(prepared: tuple[torch.Tensor, dict[str, Cache]]) -> list[int]:
        ids, past = prepared
        written = network.generate(ids, attention_mask=torch.ones_like(ids), **past, **common, **options)
        return written[0, ids.shape[1]:].tolist()

    return Baseline(name, ready, write, list, model.device)


def settings(model: Model, length: int) -> dict[str, Any]:
    """Arguments with which `generate` writes what a greedy lane writes."""
    ends = sorted(model.end_ids)
    return {
        "max_new_tokens": length,
        "do_sample": False,
        "eos_token_id": ends or None,
        "pad_token_id": ends[0] if ends else 0,
    }


def everywhere() -> CompileConfig:
    """Settings with which the library compiles on every device; by default it does so on a GPU only."""
    config = CompileConfig(dynamic=False)
    config._compile_all_devices = True
    return config
