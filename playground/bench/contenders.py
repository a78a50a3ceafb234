"""Who is compared: our lanes, and the library's own `generate` on an untouched copy of the same network."""
from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from playground.bench.prompts import Task
from playground.engine.load import Loading, check_draft, load
from playground.engine.model import Model
from playground.recipe import Recipe
from playground.recorder import Recorder, Silent
from playground.result import Result
from playground.session import Limits, Models, Prompt, Session, prepare

GUESSES = 5  # tokens the draft models guess at a time, ours and the library's
LOOKED_UP = 10  # tokens taken from the prompt at a time
LONGEST = 3  # tokens of the ending that is looked up

PLAIN, SILENT, LIBRARY = "greedy", "greedy, nothing recorded", "generate"
DRAFT, ASSISTED, ASSISTED_DEFAULT = "draft model", "generate, assisted", "generate, assisted, own settings"
LOOKUP, LIBRARY_LOOKUP = "prompt lookup", "generate, prompt lookup"
TOGETHER, APART = "four lanes together", "four lanes one after the other"
PAIRS = (
    (PLAIN, LIBRARY),
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
class Contender:
    """Writes a text. `ready` does what need not be timed; `write` is timed; `read` takes the token ids from what it left."""

    name: str
    ready: Callable[[Task], Any]
    write: Callable[[Any], Any]
    read: Callable[[Any], list[int]]


@dataclass(frozen=True)
class Loaded:
    """A model twice, sharing its weights: with our seams in place, and as the library made it."""

    model: Model
    untouched: PreTrainedModel


def load_twice(name: str, loading: Loading, progress: Callable[[float, str], None]) -> Loaded:
    network, tokenizer, facts = load(name, loading, progress)
    untouched = twin(network)
    return Loaded(Model(network, tokenizer, facts.name, facts.revision, facts.quantization), untouched)


def twin(network: PreTrainedModel) -> PreTrainedModel:
    """A second network over the very same weights."""
    shared = {id(tensor): tensor for tensor in [*network.parameters(), *network.buffers()]}
    return copy.deepcopy(network, shared)


def contenders(target: Loaded, draft: Loaded | None, length: int) -> list[Contender]:
    """Everyone; those that need a draft model only where there is one."""
    if draft:
        check_draft(target.model.tokens, draft.model.tokens)
    return [*_lanes(Models(target.model, draft.model if draft else None), length), *_library(target, draft, length)]


def _lanes(models: Models, length: int) -> list[Contender]:
    def run(task: Task, lanes: int, recipe: Recipe, recorder: type[Recorder] = Recorder) -> Session:
        prompt = Prompt(task.prompt, task.chat and bool(models.target.tokenizer.chat_template))
        session = prepare(models, [recipe] * lanes, prompt, Limits(max_new_tokens=length), recorder)
        for _ in session:
            pass
        return session

    def lane(name: str, recipe: Recipe, recorder: type[Recorder] = Recorder) -> Contender:
        return Contender(name, lambda task: task, lambda task: [run(task, 1, recipe, recorder)], _texts)

    def guessing(drafter: str, **knobs: int) -> Recipe:
        return Recipe("speculative", extras=[(drafter, knobs), ("greedy_match", {})])

    plain = [lane(PLAIN, Recipe("greedy")), lane(SILENT, Recipe("greedy"), Silent)]
    ahead = [lane(DRAFT, guessing("draft_model", depth=GUESSES))] if models.draft else []
    four = [Contender(TOGETHER, lambda task: task, lambda task: [run(task, 4, Recipe("greedy"))], _texts),
            Contender(APART, lambda task: task, lambda task: [run(task, 1, Recipe("greedy")) for _ in range(4)], _texts)]
    return [*plain, *four, *ahead, lane(LOOKUP, guessing("prompt_lookup", depth=LOOKED_UP, n_max=LONGEST))]


def _texts(sessions: list[Session]) -> list[int]:
    """Ids of all lanes, one text after the other."""
    return [token for session in sessions for header in session.headers for token in Result(session.trace.lane(header.lane)).token_ids]


def _library(target: Loaded, draft: Loaded | None, length: int) -> list[Contender]:
    """`generate` gets its prompt as ids; ours count the encoding of the prompt as their own time."""
    model, ends = target.model, sorted(target.model.end_ids)
    common = {"max_new_tokens": length, "do_sample": False, "eos_token_id": ends or None, "pad_token_id": ends[0] if ends else 0}

    def generate(name: str, **options: Any) -> Contender:
        def ready(task: Task) -> torch.Tensor:
            chat = task.chat and bool(model.tokenizer.chat_template)
            return torch.tensor([Prompt(task.prompt, chat).encode(model)], device=model.device)

        def write(ids: torch.Tensor) -> list[int]:
            with torch.inference_mode():
                written = target.untouched.generate(ids, attention_mask=torch.ones_like(ids), **common, **options)
            return written[0, ids.shape[1]:].tolist()

        return Contender(name, ready, write, lambda ids: ids)

    lookup = generate(LIBRARY_LOOKUP, prompt_lookup_num_tokens=LOOKED_UP, max_matching_ngram_size=LONGEST)
    if not draft:
        return [generate(LIBRARY), lookup]
    alike, own = twin(draft.untouched), draft.untouched
    for setting, value in (("num_assistant_tokens", GUESSES), ("num_assistant_tokens_schedule", "constant"), ("assistant_confidence_threshold", 0.0)):
        setattr(alike.generation_config, setting, value)
    return [generate(LIBRARY), generate(ASSISTED, assistant_model=alike), generate(ASSISTED_DEFAULT, assistant_model=own), lookup]
