"""Constraints in lanes. Texts are checked by validators that share no code with the grammar engine."""
from __future__ import annotations

import json
import re
from dataclasses import replace

import jsonschema
import pytest
from pairs import pair
from registry import lanes, title
from tables import TableModel, write
from toys import byte_tokenizer

from playground.contract import find
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.events import Commit, Done, Failed, Forward, Mask, Step, Verdict
from playground.trace import check

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "trees"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
LEVELS = {"enum": ["low", "high", 3, None]}
SUM = 'start: NUMBER ("+" NUMBER)~1..3\nNUMBER: /[1-9][0-9]?/'
COLOURS = "red|green|greenish|Größe"


def fits(schema: dict):
    def valid(text: str) -> bool:
        jsonschema.validate(json.loads(text), schema)
        return True
    return valid


def spells(pattern: str):
    return lambda text: re.fullmatch(pattern, text) is not None


def one_of(options: str):
    return lambda text: text in options.split("|")


SOUND = {
    "json_schema": [({"source": json.dumps(RECORD)}, fits(RECORD)), ({"source": json.dumps(LEVELS)}, fits(LEVELS))],
    "regex": [({"pattern": "(the|then) (fox|bird)?[0-2]{1,4}"}, spells("(the|then) (fox|bird)?[0-2]{1,4}"))],
    "lark": [({"source": SUM}, spells(r"[1-9][0-9]?(\+[1-9][0-9]?){1,3}"))],
    "choice": [({"options": COLOURS}, one_of(COLOURS))],
}


def choosing(options: str) -> tuple[str, dict]:
    return "choice", {"options": options}


def run(config: LaneConfig, models: Models | None = None, **limits):
    session = prepare(models or pair(), [config], Prompt("The bird is", context="A bird."), Limits(**limits))
    return session, [stamped.event for stamped in session]


def shows_masks(config: LaneConfig) -> bool:
    """Whether the lane computes masks at all; `awrs` asks about single tokens."""
    return not find(config.strategy).checks_tokens


every_choosing_lane = pytest.mark.parametrize("config", lanes(added=(choosing(COLOURS),)), ids=title)


@pytest.mark.parametrize("config", filter(shows_masks, lanes(added=(choosing(COLOURS),))), ids=title)
def test_every_distribution_is_reported_with_its_token_mask(config):
    session, recorded = run(config)
    masks = {event.position: event for event in recorded if isinstance(event, Mask)}
    steps = {event.position: event for event in recorded if isinstance(event, Step)}
    assert masks.keys() == steps.keys() and masks
    for position, mask in masks.items():
        assert 0 < mask.allowed < mask.vocabulary and 0 <= mask.banned <= 1
        assert steps[position].chosen not in [candidate.id for candidate in mask.favourites]
        assert all(
            candidate.fell == "mask"
            for candidate in steps[position].top
            if candidate.id in [f.id for f in mask.favourites]
        )
    assert check(session.trace) == []


def masked(config: LaneConfig) -> bool:
    """Whether the lane itself enforces the constraint, so that the probability of a forced token does not matter."""
    return not (find(config.strategy).owns_constraint or find(config.strategy).counts_forced)


@pytest.mark.parametrize("config", filter(masked, lanes(added=(choosing("The only answer there is"),))), ids=title)
def test_forced_tokens_are_written_without_a_forward(config):
    _, recorded = run(config)
    assert not [event for event in recorded if isinstance(event, Forward)]
    commit = next(event for event in recorded if isinstance(event, Commit))
    assert commit.text == "The only answer there is" and set(commit.origins) == {"forced"}
    assert recorded[-1] == Done("grammar")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "config", lanes("greedy_identical", added=(choosing("a red fox|a red fish|no bird at all"),)), ids=title
)
def test_speculation_writes_the_same_text_under_a_grammar(config):
    tokenizer = byte_tokenizer()
    for seed in range(6):
        models = {
            "target": TableModel(tokenizer=tokenizer, seed=seed),
            "draft": TableModel(tokenizer=tokenizer, seed=seed + 9),
        }
        plain = LaneConfig("greedy", {}, config.extras[-1:])
        texts = [
            write(assemble(lane), models, [54, 71], Limits(max_new_tokens=24), Draws(0)) for lane in (plain, config)
        ]
        assert texts[0].tokens == texts[1].tokens and texts[0].reason == texts[1].reason


@every_choosing_lane
def test_a_fork_cannot_leave_the_grammar(config):
    tokens = pair().target.tokens
    _, recorded = run(replace(config, forced=tokens.encode("blue")))
    assert isinstance(recorded[-1], Failed) and recorded[-1].message.startswith("The grammar does not allow 'b' here")
    _, recorded = run(replace(config, forced=tokens.encode("Gr")))
    assert "".join(event.text for event in recorded if isinstance(event, Commit) and not event.sequence) == "Größe"


def test_the_draft_model_proposes_allowed_tokens_only():
    at_one = ("temperature", {"t": 1.0})
    _, recorded = run(
        LaneConfig("speculative", {}, [("sample_match", {}), ("draft_model", {"width": 2}), choosing(COLOURS), at_one])
    )
    tests = [test for event in recorded if isinstance(event, Verdict) for test in event.tests]
    assert tests and all(test.p > 0 for test in tests)


def test_a_grammar_that_no_token_can_satisfy_is_refused_before_anything_runs():
    _, recorded = run(LaneConfig("greedy", {}, [("regex", {"pattern": "(("})]))
    assert [type(event) for event in recorded] == [Failed] and recorded[0].message.startswith(
        "The regex cannot be used"
    )


def test_a_text_truncated_by_its_length_is_not_reported_as_finished():
    _, recorded = run(LaneConfig("greedy", {}, [("regex", {"pattern": "[a-z]{40}"})]), max_new_tokens=3)
    assert recorded[-1] == Done("length")
