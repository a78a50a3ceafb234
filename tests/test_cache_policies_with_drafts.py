"""Cache policies where several tokens are read in one forward: the same text as without drafts, or a note that says why
it may differ; and one prompt for several texts.
"""
from __future__ import annotations

import pytest
from pairs import pair
from registry import registered
from runs import run

from playground.contract import find
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.sequence import Sequence
from playground.errors import Refusal
from playground.events import Event, Note, Verdict

PROMPT = [35, 80, 12, 77, 200, 9, 51, 144, 63, 7] * 3
BUDGET = 26  # tokens: fewer than the prompt has, and so many that the draft is often right
POLICIES = [cls.name for cls in registered("cache_policy")]
ON_THE_PROMPT = [name for name in POLICIES if find(name).prompt_only]
AS_IT_GOES = [name for name in POLICIES if not (find(name).prompt_only or find(name).row_wise)]
DRAFTERS = ["draft_model", "prompt_lookup"]
FALLS_BEHIND = "the text may differ from that of"


def tight(name: str) -> dict:
    """Knobs with which a policy acts on the prompt, if it has a number of tokens; else its defaults."""
    return find(name).knobs_for_budget(BUDGET, len(PROMPT)) or {}


def decoded(decoder: str, *extras: tuple[str, dict], **knobs) -> tuple[Sequence, list[Event]]:
    """The text of a lane with its log-probabilities, and its events. The draft model is nearly the target."""
    models = {"target": pair().target, "draft": pair(noise=1e-4).draft}
    lane, events = run(LaneConfig(decoder, knobs, list(extras)), models, PROMPT, 20)
    return lane.main, events


def notes_of(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


def alone(name: str) -> Sequence:
    return decoded("greedy", (name, tight(name)))[0]


def speculated(name: str, drafter: str) -> tuple[Sequence, list[Event]]:
    return decoded("speculative", (drafter, {}), ("greedy_match", {}), (name, tight(name)))


def agree(one: Sequence, other: Sequence) -> bool:
    """Whether two texts are the same, and every token had the same probability."""
    return one.written == other.written and one.logprobs == pytest.approx(other.logprobs, abs=1e-9)


def claims(name: str) -> list[str]:
    return assemble(LaneConfig("speculative", {}, [("greedy_match", {}), (name, tight(name))])).claims()


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", [name for name in POLICIES if name not in AS_IT_GOES])
def test_with_a_policy_by_position_or_on_the_prompt_drafts_change_nothing(name, drafter):
    drafted, events = speculated(name, drafter)
    assert agree(drafted, alone(name)) and "greedy_identical" in claims(name)
    assert not any(FALLS_BEHIND in note for note in notes_of(events))
    if drafter == "draft_model":
        accepted = [len(event.kept) for event in events if isinstance(event, Verdict)]
        assert max(accepted) > 0, "several tokens of one forward are committed"


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", AS_IT_GOES)
def test_a_policy_that_acts_as_the_text_grows_is_heuristic_with_drafts_and_says_why(name, drafter):
    _, events = speculated(name, drafter)
    assert "greedy_identical" not in claims(name) and "heuristic" in claims(name)
    assert any(FALLS_BEHIND in note for note in notes_of(events))
    assert not any(FALLS_BEHIND in note for note in notes_of(decoded("greedy", (name, tight(name)))[1]))


@pytest.mark.parametrize("name", ["h2o", "tova", "key_diff", "expected_attention", "random_keep"])
def test_drafts_change_what_later_tokens_see_of_a_policy_that_acts_as_the_text_grows(name):
    """Otherwise it would deserve the guarantee; the comparison notices it."""
    assert not all(agree(speculated(name, drafter)[0], alone(name)) for drafter in DRAFTERS)


@pytest.mark.parametrize("decoder, knobs", [
    ("best_of_n", {"n": 3, "temperature": 0.0}), ("self_consistency", {"n": 3, "temperature": 0.0}),
    ("beam_search", {"beams": 1}),
], ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("name", ON_THE_PROMPT)
def test_several_texts_continue_the_prompt_that_a_policy_left(name, decoder, knobs):
    several, _ = decoded(decoder, (name, tight(name)), **knobs)
    assert agree(several, alone(name))


def test_policies_that_act_as_the_text_grows_are_refused_where_several_texts_grow():
    for name in AS_IT_GOES:
        with pytest.raises(Refusal, match="depends on the path of one text"):
            assemble(LaneConfig("best_of_n", {}, [(name, {})]))
