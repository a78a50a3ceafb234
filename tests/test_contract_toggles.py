"""The contract of lanes with toggles, and of all combinations: they work or are refused before the run."""
from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from pairs import pair, pair_for
from registry import TEXT, TOGGLES, can_be_had, lanes, registered, title
from tables import TableModel, write
from toys import byte_tokenizer

from playground.contract import ReadsChannels, ReadsParts, find
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.rng import Draws
from playground.errors import Refusal
from playground.events import Done
from playground.trace import check
from support.contract_lanes import ALL, LANES, each_of, events, ids, in_groups, start, timeless

# --- toggles, and lanes that require one ---

def toggles() -> list[str]:
    """Those that need no model of another kind than the pairs of these tests."""
    return [cls.name for cls in registered(*TOGGLES) if not {"state_space", "encoder"} & set(cls.needs)]


def decoder_of(toggle: str) -> str:
    """Greedy decoding, unless the toggle watches another decoder."""
    return getattr(find(toggle), "decoders", ("greedy",))[0]


REGEX = ("regex", {"pattern": "(ab|cd|efg){2,9}"})
BESIDE = {"h2o": [("h2o", {"heavy": 3, "recent": 3})], "mirostat": [("mirostat", {})]}
COMPANY = {
    title(config): config
    for config in [
        *(
            LaneConfig(decoder_of(name), {}, [REGEX if name == "regex" else (name, {})])
            for name in toggles()
        ),
        *(
            LaneConfig("speculative", {}, [("draft_model", {"width": 2}), ("rejection", {}), *beside])
            for beside in BESIDE.values()
        ),
        *(LaneConfig(cls.name, {}, [REGEX]) for cls in registered(*TEXT) if "constraint" in cls.needs),
    ]
}
every_company = each_of(COMPANY)


@every_company
def test_toggles_give_consistent_and_reproducible_traces(config):
    session = start(config, seed=3)
    recorded = events(session)
    assert isinstance(recorded[-1], Done) and check(session.trace) == []
    assert timeless(recorded) == timeless(events(start(config, seed=3)))


@pytest.mark.slow
@in_groups(ALL | COMPANY)
@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "qwen3", "mixtral"])
def test_every_strategy_runs_on_other_architectures(architecture, configs):
    models = pair(architecture)
    assert unfinished([config for config in configs if fits(config, models)], models) == []


def fits(config: LaneConfig, models: Models) -> bool:
    """Whether the models have experts, and layers whose parts and weights can be read, where a lane needs them."""
    assembly, parts = assemble(config), models.target.parts
    has_experts, cache = models.target.network.config.model_type == "mixtral", assembly.cache_policy
    channels = any(isinstance(overlay, ReadsChannels) for overlay in assembly.overlays)
    reads_parts = assembly.compute_policy is not None or isinstance(cache, ReadsParts) or channels
    plain = parts is not None and not parts.norms_heads or cache is None or cache.name != "cskv"
    return (has_experts or "experts" not in assembly.needs()) and (parts is not None or not reads_parts) and plain


@pytest.mark.slow
@in_groups(ALL | COMPANY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_strategy_runs_in_half_precision(dtype, configs):
    mixtures = [config for config in configs if "experts" in assemble(config).needs()]
    for group in (mixtures, [config for config in configs if config not in mixtures]):
        assert not group or unfinished(group, pair_for(*group, dtype=dtype)) == []


def unfinished(configs: list[LaneConfig], models: Models) -> list:
    """Reasons of lanes that failed, and contradictions in the trace."""
    session = start(*configs, models=models, length=5)
    events(session)
    ends = [(title(config), session.trace.lane(i).events[-1].event) for i, config in enumerate(configs)]
    return [end for end in ends if not isinstance(end[1], Done)] + check(session.trace)


@every_company
def test_toggles_can_be_held_and_stopped_anywhere(config):
    whole = events(start(config, seed=3, length=5))
    for turns in range(0, 40, 3):
        session = start(config, seed=3, length=5)
        for _ in range(turns):
            session.advance()
        if session.finished:
            break
        session.stop()
        recorded = events(session)
        assert timeless(recorded[:-1]) == timeless(whole[:len(recorded) - 1]) and check(session.trace) == []


@every_company
def test_toggles_work_with_a_fork(config):
    text = ids(events(start(config, seed=3)))
    recorded = events(start(replace(config, forced=text[:2]), seed=3))
    assert isinstance(recorded[-1], Done), recorded[-1]
    assert ids(recorded)[:2] == text[:2]


# --- combinations: they work or are refused before the run ---

SLICES = 18  # of all lanes, each a case of its own


def outcome(config: LaneConfig, models: dict) -> str:
    """ "refused", or why the text ended; fails if the lane fails."""
    try:
        assembly = assemble(config)
    except Refusal as refusal:
        assert str(refusal).endswith(".") and "\n" not in str(refusal)
        return "refused"
    return write(assembly, models, [54, 71, 71], Limits(1, 6), Draws(1)).reason


@pytest.fixture(scope="module")
def speakers() -> dict[str, TableModel]:
    tokenizer = byte_tokenizer()
    return {"target": TableModel(tokenizer=tokenizer), "draft": TableModel(tokenizer=tokenizer, seed=1)}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("part", range(SLICES))
@pytest.mark.parametrize("toggle", toggles())
def test_a_toggle_works_with_every_lane_or_is_refused(toggle, part):
    fitting = pair_for(LaneConfig(toggle))
    models = {"target": fitting.target, "draft": fitting.draft}
    for config in LANES[part::SLICES]:
        assert outcome(replace(config, extras=[*config.extras, (toggle, {})]), models) in (
            "refused",
            "length",
            "end",
            "grammar",
        )


def companies() -> list[tuple[tuple[str, str], list[LaneConfig]]]:
    """Pairs of toggles, each with a third of the decoders, whose slots are filled in one of their ways."""
    fillings: dict[str, list[LaneConfig]] = {}
    for config in lanes():
        fillings.setdefault(config.strategy, []).append(config)
    decoders = list(fillings.values())
    return [
        (pair_, [ways[turn % len(ways)] for ways in decoders[turn % 3 :: 3]])
        for turn, pair_ in enumerate(combinations(toggles(), 2))
    ]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "both, beside", companies(), ids=lambda value: "-".join(value) if isinstance(value, tuple) else ""
)
def test_two_toggles_work_together_or_are_refused(both, beside, speakers):
    for config in beside:
        added = [(name, {}) for name in both]
        assert outcome(replace(config, extras=[*config.extras, *added]), speakers) in (
            "refused",
            "length",
            "end",
            "grammar",
        )


@pytest.mark.slow
def test_most_combinations_of_toggles_are_supported():
    asked = [replace(config, extras=[*config.extras, (toggle, {})]) for config in lanes() for toggle in toggles()]
    assert sum(map(can_be_had, asked)) > len(asked) / 2
