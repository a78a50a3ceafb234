"""What is compared: our lanes, the library's `generate` on an unmodified copy of the same network, and a minimal loop.
"""
from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CompileConfig, PreTrainedModel

from playground.bench.minimal_loop import Loop, has_loop
from playground.bench.speed_defaults import COMPILED, LIBRARY, LOOP, STATIC
from playground.bench.speed_prompts import Task
from playground.contract.lane_config import LaneConfig
from playground.decoding.recorder import Recorder, Silent
from playground.decoding.session import Limits, Models, Prompt, Session, prepare
from playground.engine.load import Loading, check_draft, load
from playground.engine.model import Model
from playground.trace.result import Result

DRAFT_DEPTH = 5  # tokens a draft model proposes per round, ours and the library's
LOOKUP_DEPTH = 10  # tokens that prompt lookup proposes per round
MAX_NGRAM = 3  # longest ngram that is looked up, in tokens

PLAIN, SILENT = "greedy", "greedy, nothing recorded"
DRAFT, ASSISTED, ASSISTED_DEFAULT = "draft model", "generate, assisted", "generate, assisted, own settings"
LOOKUP, LIBRARY_LOOKUP = "prompt lookup", "generate, prompt lookup"
TOGETHER, APART = "four lanes together", "four lanes one after the other"
PAIRS = (
    (PLAIN, LIBRARY),
    (PLAIN, STATIC),
    (PLAIN, COMPILED),
    (PLAIN, LOOP),
    (PLAIN, SILENT),
    (TOGETHER, APART),
    (DRAFT, PLAIN),
    (DRAFT, ASSISTED),
    (DRAFT, ASSISTED_DEFAULT),
    (ASSISTED, LIBRARY),
    (LOOKUP, PLAIN),
    (LOOKUP, LIBRARY_LOOKUP),
    (LIBRARY_LOOKUP, LIBRARY),
)


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


@dataclass(frozen=True)
class Size:
    """Maximum length of a text, and capacity of a static cache: longest prompt plus text. Both in tokens."""

    length: int
    capacity: int

    @classmethod
    def of(cls, tasks: list[Task], model: Model, length: int) -> Size:
        return cls(length, length + max(len(prompt_of(task, model).encode(model)) for task in tasks))


def make_baselines(target: TwinModels, draft: TwinModels | None, size: Size, compiled: bool = False) -> list[Baseline]:
    """All baselines; those with a draft model only if there is one, the compiled one only if `compiled`."""
    if draft:
        check_draft(target.model.tokens, draft.model.tokens)
    lanes = _lanes(Models(target.model, draft.model if draft else None), size.length)
    assisted = _assisted(target, draft, size.length) if draft else []
    return [*lanes, *_library(target, size, compiled), *assisted, *_loop(target, size.length)]


def _lanes(models: Models, length: int) -> list[Baseline]:
    def run(task: Task, lanes: int, config: LaneConfig, recorder: type[Recorder] = Recorder) -> Session:
        session = prepare(
            models, [config] * lanes, prompt_of(task, models.target), Limits(max_new_tokens=length), recorder
        )
        for _ in session:
            pass
        return session

    def lane(name: str, write: Callable[[Task], list[Session]]) -> Baseline:
        return Baseline(name, lambda task: task, write, texts, models.target.device)

    def speculative(drafter: str, **knobs: int) -> LaneConfig:
        return LaneConfig("speculative", extras=[(drafter, knobs), ("greedy_match", {})])

    plain, lookup = LaneConfig("greedy"), speculative("prompt_lookup", depth=LOOKUP_DEPTH, n_max=MAX_NGRAM)
    drafted = speculative("draft_model", depth=DRAFT_DEPTH)
    return [
        lane(PLAIN, lambda task: [run(task, 1, plain)]),
        lane(SILENT, lambda task: [run(task, 1, plain, Silent)]),
        lane(TOGETHER, lambda task: [run(task, 4, plain)]),
        lane(APART, lambda task: [run(task, 1, plain) for _ in range(4)]),
        *([lane(DRAFT, lambda task: [run(task, 1, drafted)])] if models.draft else []),
        lane(LOOKUP, lambda task: [run(task, 1, lookup)]),
    ]


def texts(sessions: list[Session]) -> list[int]:
    """Token ids of all lanes, concatenated. Raises RuntimeError if a lane failed."""
    results = [Result(session.trace.lane(header.lane)) for session in sessions for header in session.headers]
    if failed := next((result.message for result in results if result.message), ""):
        raise RuntimeError(failed)
    return [token for result in results for token in result.token_ids]


def _library(target: TwinModels, size: Size, compiled: bool) -> list[Baseline]:
    """`generate` without a draft model, with a dynamic or a static cache."""
    length, static = size.length, {"cache_implementation": "static", "max_cache_len": size.capacity}
    return [
        _generate(target, length, LIBRARY),
        _generate(
            target, length, LIBRARY_LOOKUP, prompt_lookup_num_tokens=LOOKUP_DEPTH, max_matching_ngram_size=MAX_NGRAM
        ),
        _generate(target, length, STATIC, **static, disable_compile=True),
        *([_generate(target, length, COMPILED, **static, compile_config=everywhere())] if compiled else []),
    ]


def _assisted(target: TwinModels, draft: TwinModels, length: int) -> list[Baseline]:
    """Assisted generation: with as many draft tokens per round as ours, and with the library's own settings."""
    return [_generate(target, length, ASSISTED, assistant_model=assistant(draft, DRAFT_DEPTH)),
            _generate(target, length, ASSISTED_DEFAULT, assistant_model=draft.untouched)]


def assistant(draft: TwinModels, depth: int) -> PreTrainedModel:
    """The draft model for the library, always proposing `depth` tokens per round: neither the acceptance rate nor the
    draft's confidence changes that.
    """
    network = twin(draft.untouched)
    for setting, value in (
        ("num_assistant_tokens", depth),
        ("num_assistant_tokens_schedule", "constant"),
        ("assistant_confidence_threshold", 0.0),
    ):
        setattr(network.generation_config, setting, value)
    return network


def settings(model: Model, length: int) -> dict[str, Any]:
    """Arguments with which `generate` writes what a greedy lane writes."""
    ends = sorted(model.end_ids)
    return {
        "max_new_tokens": length,
        "do_sample": False,
        "eos_token_id": ends or None,
        "pad_token_id": ends[0] if ends else 0,
    }


def _generate(target: TwinModels, length: int, name: str, **options: Any) -> Baseline:
    """The library gets token ids; for our lanes, encoding the prompt is part of the measured time."""
    model, common = target.model, settings(target.model, length)

    def ready(task: Task) -> torch.Tensor:
        return torch.tensor([prompt_of(task, model).encode(model)], device=model.device)

    def write(ids: torch.Tensor) -> list[int]:
        with torch.inference_mode():
            written = target.untouched.generate(ids, attention_mask=torch.ones_like(ids), **common, **options)
        return written[0, ids.shape[1]:].tolist()

    return Baseline(name, ready, write, lambda ids: ids, model.device)


def everywhere() -> CompileConfig:
    """Settings with which the library compiles on every device; by default it does so on a GPU only."""
    config = CompileConfig(dynamic=False)
    config._compile_all_devices = True
    return config


def _loop(target: TwinModels, length: int) -> list[Baseline]:
    """The hand-written loop. It does not check for end tokens: the warm-up round finds the length of each text."""
    if not has_loop(target.untouched):
        return []
    model, lengths = target.model, {}

    def ready(task: Task) -> tuple[Task, Loop, torch.Tensor]:
        ids = torch.tensor(prompt_of(task, model).encode(model), device=model.device)
        return task, Loop(target.untouched, len(ids) + length), ids

    def write(prepared: tuple[Task, Loop, torch.Tensor]) -> tuple[Task, list[int]]:
        task, loop, ids = prepared
        first = loop.prefill(ids)
        return task, [*first.tolist(), *loop.decode(first, len(ids), lengths.get(task, length) - 1).tolist()]

    def read(output: tuple[Task, list[int]]) -> list[int]:
        task, ids = output
        lengths[task] = next((place for place, token in enumerate(ids, 1) if token in model.end_ids), len(ids))
        return ids[:lengths[task]]

    return [Baseline(LOOP, ready, write, read, model.device)]
