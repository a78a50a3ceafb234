"""Who is compared: our lanes, the library's own `generate` on an untouched copy of the same network, and the least a
loop can do.
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

GUESSES = 5  # tokens the draft models guess at a time, ours and the library's
LOOKED_UP = 10  # tokens taken from the prompt at a time
LONGEST = 3  # tokens of the ending that is looked up

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
    """Writes a text. `ready` does what need not be timed; `write` is timed; `read` takes the token ids from what it
    left.
    """

    name: str
    ready: Callable[[Task], Any]
    write: Callable[[Any], Any]
    read: Callable[[Any], list[int]]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True)
class Given(Prompt):
    """A prompt of which only the token ids count."""

    ids: tuple[int, ...] = ()

    def encode(self, model: Model) -> list[int]:
        return list(self.ids)


def prompt_of(task: Task, model: Model) -> Prompt:
    """What a model is asked to continue; a chat only where it has a chat form."""
    return (
        Given("", ids=task.ids) if task.ids else Prompt(task.prompt, task.chat and bool(model.tokenizer.chat_template))
    )


@dataclass(frozen=True)
class TwinModels:
    """A model twice, sharing its weights: with our seams in place, and as the library made it."""

    model: Model
    untouched: PreTrainedModel


def load_twice(name: str, loading: Loading, progress: Callable[[float, str], None]) -> TwinModels:
    network, tokenizer, facts = load(name, loading, progress)
    untouched = twin(network)
    return TwinModels(Model(network, tokenizer, facts.name, facts.revision, facts.quantization), untouched)


def twin(network: PreTrainedModel) -> PreTrainedModel:
    """A second network over the very same weights."""
    shared = {id(tensor): tensor for tensor in [*network.parameters(), *network.buffers()]}
    return copy.deepcopy(network, shared)


@dataclass(frozen=True)
class Size:
    """Most tokens of a text, and tokens that a cache of fixed size has room for: the longest prompt and its text."""

    length: int
    room: int

    @classmethod
    def of(cls, tasks: list[Task], model: Model, length: int) -> Size:
        return cls(length, length + max(len(prompt_of(task, model).encode(model)) for task in tasks))


def contenders(target: TwinModels, draft: TwinModels | None, size: Size, compiled: bool = False) -> list[Baseline]:
    """Everyone; those that need a draft model only where there is one, the compiled one only where it is wanted."""
    if draft:
        check_draft(target.model.tokens, draft.model.tokens)
    lanes = _lanes(Models(target.model, draft.model if draft else None), size.length)
    assisted = _assisted(target, draft, size.length) if draft else []
    return [*lanes, *_library(target, size, compiled), *assisted, *_loop(target, size.length)]


def _lanes(models: Models, length: int) -> list[Baseline]:
    def run(task: Task, lanes: int, recipe: LaneConfig, recorder: type[Recorder] = Recorder) -> Session:
        session = prepare(
            models, [recipe] * lanes, prompt_of(task, models.target), Limits(max_new_tokens=length), recorder
        )
        for _ in session:
            pass
        return session

    def lane(name: str, write: Callable[[Task], list[Session]]) -> Baseline:
        return Baseline(name, lambda task: task, write, texts, models.target.device)

    def guessing(drafter: str, **knobs: int) -> LaneConfig:
        return LaneConfig("speculative", extras=[(drafter, knobs), ("greedy_match", {})])

    plain, looked_up = LaneConfig("greedy"), guessing("prompt_lookup", depth=LOOKED_UP, n_max=LONGEST)
    ahead = [lane(DRAFT, lambda task: [run(task, 1, guessing("draft_model", depth=GUESSES))])] if models.draft else []
    return [
        lane(PLAIN, lambda task: [run(task, 1, plain)]),
        lane(SILENT, lambda task: [run(task, 1, plain, Silent)]),
        lane(TOGETHER, lambda task: [run(task, 4, plain)]),
        lane(APART, lambda task: [run(task, 1, plain) for _ in range(4)]),
        *ahead,
        lane(LOOKUP, lambda task: [run(task, 1, looked_up)]),
    ]


def texts(sessions: list[Session]) -> list[int]:
    """Ids of all lanes, one text after the other."""
    results = [Result(session.trace.lane(header.lane)) for session in sessions for header in session.headers]
    if failed := next((result.message for result in results if result.message), ""):
        raise RuntimeError(failed)
    return [token for result in results for token in result.token_ids]


def _library(target: TwinModels, size: Size, compiled: bool) -> list[Baseline]:
    """`generate` without a draft, keys and values growing or in a place of fixed size."""
    length, static = size.length, {"cache_implementation": "static", "max_cache_len": size.room}
    return [
        _generate(target, length, LIBRARY),
        _generate(target, length, LIBRARY_LOOKUP, prompt_lookup_num_tokens=LOOKED_UP, max_matching_ngram_size=LONGEST),
        _generate(target, length, STATIC, **static, disable_compile=True),
        *([_generate(target, length, COMPILED, **static, compile_config=everywhere())] if compiled else []),
    ]


def _assisted(target: TwinModels, draft: TwinModels, length: int) -> list[Baseline]:
    """`generate` with the draft: with as many guesses as ours, and with its own settings."""
    return [_generate(target, length, ASSISTED, assistant_model=assistant(draft, GUESSES)),
            _generate(target, length, ASSISTED_DEFAULT, assistant_model=draft.untouched)]


def assistant(draft: TwinModels, guesses: int) -> PreTrainedModel:
    """The draft as the library takes it, guessing so many tokens at a time, whatever stood and however sure it is."""
    alike = twin(draft.untouched)
    for setting, value in (
        ("num_assistant_tokens", guesses),
        ("num_assistant_tokens_schedule", "constant"),
        ("assistant_confidence_threshold", 0.0),
    ):
        setattr(alike.generation_config, setting, value)
    return alike


def settings(model: Model, length: int) -> dict[str, Any]:
    """What `generate` is told so that it writes what a greedy lane writes."""
    ends = sorted(model.end_ids)
    return {
        "max_new_tokens": length,
        "do_sample": False,
        "eos_token_id": ends or None,
        "pad_token_id": ends[0] if ends else 0,
    }


def _generate(target: TwinModels, length: int, name: str, **options: Any) -> Baseline:
    """It gets its prompt as ids; ours count the encoding of the prompt as their own time."""
    model, common = target.model, settings(target.model, length)

    def ready(task: Task) -> torch.Tensor:
        return torch.tensor([prompt_of(task, model).encode(model)], device=model.device)

    def write(ids: torch.Tensor) -> list[int]:
        with torch.inference_mode():
            written = target.untouched.generate(ids, attention_mask=torch.ones_like(ids), **common, **options)
        return written[0, ids.shape[1]:].tolist()

    return Baseline(name, ready, write, lambda ids: ids, model.device)


def everywhere() -> CompileConfig:
    """Settings under which the library compiles on every device; unasked it does so on a GPU only."""
    config = CompileConfig(dynamic=False)
    config._compile_all_devices = True
    return config


def _loop(target: TwinModels, length: int) -> list[Baseline]:
    """The hand-written loop. It does not look for the end of a text: the warm-up finds it, and from then on it writes
    as far as that.
    """
    if not has_loop(target.untouched):
        return []
    model, lengths = target.model, {}

    def ready(task: Task) -> tuple[Task, Loop, torch.Tensor]:
        ids = torch.tensor(prompt_of(task, model).encode(model), device=model.device)
        return task, Loop(target.untouched, len(ids) + length), ids

    def write(asked: tuple[Task, Loop, torch.Tensor]) -> tuple[Task, list[int]]:
        task, loop, ids = asked
        first = loop.prefill(ids)
        return task, [*first.tolist(), *loop.decode(first, len(ids), lengths.get(task, length) - 1).tolist()]

    def read(left: tuple[Task, list[int]]) -> list[int]:
        task, ids = left
        lengths[task] = next((place for place, token in enumerate(ids, 1) if token in model.end_ids), len(ids))
        return ids[:lengths[task]]

    return [Baseline(LOOP, ready, write, read, model.device)]
