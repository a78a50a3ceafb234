"""Aggressive decoding, and other implementations of prompt lookup."""
from __future__ import annotations

from random import Random

import pytest
from drafting_runs import follows, letters, recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import write

from playground.contract import find, make
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.events import Draft, Failed
from strategies.speculative.aggressive import Aggressive
from support.speculation import speculative_lane

# --- other implementations of prompt lookup ---

def looked_up(text: list[int], length: int, **knobs) -> list[int]:
    return make("prompt_lookup", **knobs).look_up(text, length, lambda token: token == 99)


def test_the_three_published_prompt_lookups_differ_as_documented():
    text, ending = [1, 2, 3, 4, 2, 3], [5, 6, 99, 7, 5, 6]
    assert [looked_up(text, 4, variant=v) for v in ("transformers", "vllm", "original")] == [[4, 2, 3], [4, 2, 3], []]
    assert looked_up(text, 3, variant="original") == [4, 2, 3]
    assert [looked_up(ending, 2, variant=v) for v in ("transformers", "vllm", "original")] == [[], [99, 7], [99, 7]]


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=14), n_max=st.integers(1, 5), length=st.integers(1, 5))
def test_the_original_takes_the_longest_suffix_followed_by_a_full_draft(text, n_max, length):
    whole = [
        (-n, i)
        for n in range(1, n_max + 1)
        for i in range(len(text) - n)
        if text[i : i + n] == text[len(text) - n :] and i + n + length <= len(text)
    ]
    n, start = min(whole, default=(0, 0))
    assert looked_up(text, length, n_max=n_max, variant="original") == (text[start - n:start - n + length] if n else [])


# --- aggressive decoding ---

def joined(source: str, answer: str, **knobs) -> int | None:
    drafter = make("aggressive", **knobs)
    drafter.read(letters(source))
    return drafter.join(letters(answer))[0]


@pytest.mark.parametrize("answer, place", [("ba", 3), ("a", None), ("xa", None), ("c", 4), ("x", None), ("", None)])
def test_an_answer_realigns_with_its_input_at_the_shortest_unique_suffix(answer, place):
    assert joined("abac", answer) == place


def test_an_ambiguous_longest_suffix_gives_no_position():
    assert joined("abcxabcy", "abc") is None
    assert joined("abcxabcy", "xabc", max_gram=4) == 7


def joined_by_scanning(source: list[int], answer: list[int], most: int) -> int | None:
    """The position after the shortest suffix of the answer that is unique in its input; None if there is none."""
    for n in range(1, min(most, len(answer)) + 1):
        places = [end for end in range(n, len(source) + 1) if source[end - n:end] == answer[len(answer) - n:]]
        if len(places) < 2:
            return places[0] if places else None
    return None


def check_aggressive(drafter: type[Aggressive]) -> None:
    """Where random answers realign with their input, and how many of their tokens copied it."""
    for seed in range(200):
        chance = Random(seed)
        source, answer = ([chance.randrange(4) for _ in range(chance.randrange(1, 14))] for _ in range(2))
        copying = drafter(max_gram=3)
        copying.read(source)
        alike = next((i for i, (a, b) in enumerate(zip(answer, source)) if a != b), min(len(answer), len(source)))
        assert copying.follow(answer) == alike
        assert copying._place == (alike if alike == len(answer) else None)
        assert copying.join(answer)[0] == joined_by_scanning(source, answer, 3)


class JoinsTheFirstOfSeveral(Aggressive):
    def join(self, answer):
        ends = self._ends.get(tuple(answer[-1:]), []) if answer else []
        return (ends[0], 1) if ends else (None, 1)


class LooksAtTheLastTokenAlone(Aggressive):
    """If it occurs several times, ignores the tokens before it."""

    def join(self, answer):
        ends = self._ends.get(tuple(answer[-1:]), []) if answer else []
        return (ends[0] if len(ends) == 1 else None), 1


class Stubborn(find("aggressive")):
    """Continues at its old position in the input after a mismatch instead of looking for a new one."""

    def follow(self, answer):
        copied = super().follow(answer)
        self._place = len(answer) if self._place is None else self._place
        return copied


@pytest.mark.oracle("aggressive")
def test_realignment_equals_a_scan_over_all_positions():
    check_aggressive(Aggressive)


@pytest.mark.refuses("aggressive")
@pytest.mark.parametrize("wrong", [JoinsTheFirstOfSeveral, LooksAtTheLastTokenAlone, Stubborn],
                         ids=lambda cls: cls.__name__)
def test_a_wrong_realignment_is_detected(wrong):
    with pytest.raises(AssertionError):
        check_aggressive(wrong)


SOURCE = letters("thequickbrownfx")
EDITS = {
    "nothing changed": (SOURCE, 1),
    "one letter for another": ([*SOURCE[:5], 25, *SOURCE[6:]], 3),  # up to it; the letter after it alone; from there on
    # its replacement is in the input once, so it realigns at once
    "one letter left out": ([*SOURCE[:5], *SOURCE[6:]], 2),
    "one letter put in": ([*SOURCE[:5], 25, *SOURCE[5:]], 3),
}


def passes_of(drafter, answer: list[int], source: list[int] = SOURCE) -> int:
    """Forwards of the target after the prompt for an answer to a source; every answer is right."""
    model, assembly = follows(answer, len(source)), assemble(speculative_lane("aggressive", "greedy_match"))
    assembly.decoder.drafter = drafter
    lane = write(assembly, {"target": model}, source, Limits(0, len(answer)), Draws(0))
    assert lane.tokens[len(source):] == answer
    return model.forwards - 1


@pytest.mark.oracle("aggressive")
@pytest.mark.parametrize("answer, expected", EDITS.values(), ids=EDITS)
def test_a_copy_takes_one_forward_and_an_edit_those_until_realignment(answer, expected):
    assert passes_of(make("aggressive"), answer) == expected


@pytest.mark.refuses("aggressive")
def test_keeping_the_position_after_a_mismatch_is_detected():
    for edit in ("one letter left out", "one letter put in"):
        answer, expected = EDITS[edit]
        assert passes_of(Stubborn(), answer) > expected + 2


def test_a_draft_ends_with_its_block_and_the_next_continues_there():
    assert passes_of(make("aggressive", block=4), SOURCE) == 3, "five tokens a pass"


def first_guess(config: LaneConfig, **prompt) -> str:
    _, events = recorded(config, **prompt)
    return "".join(next(event for event in events if isinstance(event, Draft)).pieces)


def test_the_input_is_the_passage_the_prompt_or_the_text_after_given_words():
    config = speculative_lane("aggressive", "greedy_match")
    assert first_guess(config, context="A red fox.", prompt="Copy it.") == "A red fox."
    assert first_guess(config, prompt="Copy me.") == "Copy me."
    assert (
        first_guess(speculative_lane("aggressive", "greedy_match", after="this:"), prompt="Mend this: a rad fox.")
        == "a rad fox."
    )


def test_words_missing_from_the_prompt_are_refused_in_one_sentence():
    _, events = recorded(speculative_lane("aggressive", "greedy_match", after="that:"), prompt="Mend this: a rad fox.")
    assert isinstance(events[-1], Failed) and events[-1].message.startswith("The prompt does not contain 'that:'")
