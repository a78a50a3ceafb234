"""The baselines of whole texts, prefill included, and the pairs of them that are compared."""
from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from playground.bench.speed.baselines import (
    Baseline,
    Stages,
    TwinModels,
    everywhere,
    generate,
    lanes,
    loops,
    prompt_of,
    twin,
)
from playground.bench.speed.speed_defaults import COMPILED, LIBRARY, LOOP, STATIC
from playground.bench.speed.speed_prompts import Task
from playground.decoding.models import Models
from playground.decoding.recorder import Silent
from playground.engine.loading.load import check_draft
from playground.lane_fields import LaneConfig

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


def make_baselines(
    target: TwinModels, draft: TwinModels | None, tasks: Sequence[Task], length: int, compiled: bool = False
) -> list[Baseline]:
    """All baselines that write `length` tokens; those with a draft model only if there is one, the compiled one only
    if `compiled`. A static cache has room for the longest of the tasks.
    """
    if draft:
        check_draft(target.model.tokens, draft.model.tokens)
    ours = [*_lanes(Models(target.model, draft.model if draft else None), length), *loops(target, length)]
    longest = max(len(prompt_of(task, target.model).encode(target.model)) for task in tasks)
    library = _library(target, length, longest + length, compiled)
    return [*(each.whole() for each in ours), *library, *(_assisted(target, draft, length) if draft else [])]


def _lanes(models: Models, length: int) -> list[Stages]:
    drafted = _speculative("draft_model", depth=DRAFT_DEPTH)
    lookup = _speculative("prompt_lookup", depth=LOOKUP_DEPTH, n_max=MAX_NGRAM)
    return [
        lanes(models, PLAIN, length),
        lanes(models, SILENT, length, recorder=Silent),
        lanes(models, TOGETHER, length, [4]),
        lanes(models, APART, length, [1] * 4),
        *([lanes(models, DRAFT, length, config=drafted)] if models.draft else []),
        lanes(models, LOOKUP, length, config=lookup),
    ]


def _speculative(drafter: str, **knobs: int) -> LaneConfig:
    return LaneConfig("speculative", extras=[(drafter, knobs), ("greedy_match", {})])


def _library(target: TwinModels, length: int, capacity: int, compiled: bool) -> list[Baseline]:
    """`generate` without a draft model, with a dynamic or a static cache."""
    static = {"cache_implementation": "static", "max_cache_len": capacity}
    lookup = {"prompt_lookup_num_tokens": LOOKUP_DEPTH, "max_matching_ngram_size": MAX_NGRAM}
    return [
        generate(target, LIBRARY, length),
        generate(target, LIBRARY_LOOKUP, length, **lookup),
        generate(target, STATIC, length, **static, disable_compile=True),
        *([generate(target, COMPILED, length, **static, compile_config=everywhere())] if compiled else []),
    ]


def _assisted(target: TwinModels, draft: TwinModels, length: int) -> list[Baseline]:
    """Assisted generation: with as many draft tokens per round as ours, and with the library's own settings."""
    return [generate(target, ASSISTED, length, assistant_model=assistant(draft, DRAFT_DEPTH)),
            generate(target, ASSISTED_DEFAULT, length, assistant_model=draft.untouched)]


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
