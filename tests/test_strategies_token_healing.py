"""Token healing: what is taken back by trying all ends, the law by comparing whole texts, and wrong variants."""
from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from pairs import pair
from registry import Collapse
from tables import TableModel, distance, law, product_law

import playground
from playground.contract import find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.events import Failed, Figure
from support.laws import AT_ONE, EXACT
from support.wrong_variants import refused

TokenHealing = find("token_healing")
OFF = LaneConfig("greedy", {}, [("token_healing", {"most": 0})])
COLLAPSES = {"token_healing": [Collapse(OFF, LaneConfig("greedy"))]}
PIECES = ["x", "a", "ab", "xab", "abx", "."]  # no token begins with "b": of "ab", "a" alone leads nowhere
PROMPTS = [[0, 1], [5, 0, 1], [5, 2], [5, 0, 2], [0, 5, 1], [1, 5], [5, 3]]


def longest_end(prompt: list[int], most: int) -> str:
    """The text of the tokens that hold the longest end of a prompt with which a longer token begins."""
    last = [PIECES[token] for token in prompt[1:]][-most:] if most else []
    text = "".join(last)
    ends = [text[start:] for start in range(len(text))]
    end = next((end for end in ends if any(piece != end and piece.startswith(end) for piece in PIECES)), "")
    wholes = ["".join(last[start:]) for start in range(len(last), -1, -1)]
    return next(whole for whole in wholes if len(whole) >= len(end))


def tokenisable(text: str, owed: str) -> bool:
    """Whether some tokens take a text to the end of what is owed, or beyond it."""
    if len(text) >= len(owed):
        return text.startswith(owed)
    return owed.startswith(text) and any(tokenisable(text + piece, owed) for piece in PIECES)


def healed(owed: str, start: int) -> Callable:
    """A row in which only tokens remain whose text agrees with what is owed."""

    def reshape(scores, history):
        text = "".join(PIECES[token] for token in history[start:])
        if len(text) >= len(owed):
            return scores
        bad = torch.tensor([not tokenisable(text + piece, owed) for piece in PIECES])
        return scores.masked_fill(bad, -torch.inf)

    return reshape


def check_healing(cls: type) -> None:
    """What is taken back for several prompts and limits, and the law of two tokens after it."""
    for prompt, most in product(PROMPTS, (0, 1, 2, 4)):
        model, sampler = TableModel(PIECES, seed=len(prompt)), cls(most=most)
        count = sampler.take_back(prompt, model)
        owed = longest_end(prompt, most)
        assert "".join(PIECES[token] for token in prompt[len(prompt) - count:]) == owed
        if most == 4:
            check_law(sampler, model, prompt[:len(prompt) - count], owed)


def check_law(sampler: TokenHealing, model: TableModel, prompt: list[int], owed: str) -> None:
    lane = Assembly(make("greedy"), [sampler, make("temperature", t=1.0)])
    expected = product_law(model, prompt, 2, healed(owed, len(prompt)))
    assert distance(law(lane, {"target": model}, prompt, 2), expected) < EXACT


class OnlyTheLastToken(TokenHealing):
    """Wrong: as a healer that looks at one token."""

    def _last(self, prompt):
        return super()._last(prompt)[-1:]


class MayEmptyThePrompt(TokenHealing):
    def _last(self, prompt):
        return super()._last([prompt[0], *prompt])


class OnlyLongerTokens(TokenHealing):
    """Wrong: the text has to come back within one token."""

    def _leads(self, text, rest):
        return False


class DoesNotLookAhead(TokenHealing):
    """Wrong: takes a token after which none goes on, so that the rest is never written."""

    def _leads(self, text, rest):
        return rest.startswith(text)


class OnlyTheFirstRow(TokenHealing):
    """Wrong: what remains after one token is not held."""

    def _rest(self, history):
        return self._owed if len(history) == self.start else b""


class ComparesTokens(TokenHealing):
    """Wrong: counts tokens that were written, not their text."""

    def _rest(self, history):
        return self._owed[len(history) - self.start:]


@pytest.mark.oracle("token_healing")
def test_what_is_taken_back_and_the_law_are_those_of_whole_texts():
    assert {longest_end(prompt, 4) for prompt in PROMPTS} >= {"", "a", "ab"}
    check_healing(TokenHealing)


@pytest.mark.refuses("token_healing")
@pytest.mark.parametrize("wrong", [
    OnlyTheLastToken, MayEmptyThePrompt, OnlyLongerTokens, DoesNotLookAhead, OnlyTheFirstRow, ComparesTokens,
])
def test_a_wrong_healing_is_refused(wrong):
    refused(check_healing, wrong)


# --- in a run ---

def lane_of(prompt: Prompt, *extras: tuple[str, dict], strategy: str = "greedy"):
    """The header and the events of a lane."""
    session = prepare(pair(), [LaneConfig(strategy, {}, list(extras))], prompt, Limits(0, 8))
    return session.headers[0], [stamped.event for stamped in session]


def healed_spans(trace) -> list[list]:
    return [span for stamped in trace.events if isinstance(stamped.event, Figure)
            and stamped.event.name == "written again" for span in stamped.event.data["spans"]]


def test_a_run_reads_the_shorter_prompt_and_shades_what_it_writes_again():
    plain, whole = playground.run("greedy", "She said: ", max_new_tokens=8), "She said: "
    healed = playground.run("greedy", whole, max_new_tokens=8, extras=["token_healing"])
    header = healed.header
    assert "".join(header.prompt_pieces) == "She said:" and header.prompt == whole
    assert healed.text.startswith(" ") and healed.text != plain.text
    assert healed_spans(healed.trace)[0][:2] == [0, 1]


def test_drafts_and_a_chat_prompt():
    raw = Prompt("The red fox lis")
    header, events = lane_of(raw, ("token_healing", {}), AT_ONE, strategy="speculative")
    assert not [event for event in events if isinstance(event, Failed)]
    assert len(header.prompt_ids) < len(raw.encode(pair().target))
    answers = [playground.run("greedy", "Tell me a story.", chat=True, max_new_tokens=8, extras=extras)
               for extras in ([], ["token_healing"])]
    assert answers[0].text == answers[1].text
    assert answers[0].header.prompt_ids == answers[1].header.prompt_ids


def test_a_constraint_beside_it_is_refused():
    _, events = lane_of(Prompt("The red fox lis"), ("token_healing", {}), ("regex", {"pattern": "[a-z]+"}))
    assert "use one of them" in events[-1].message
