"""The thinking budget: cut, extended and left early, against texts written by hand, and wrong variants."""
from __future__ import annotations

import math

import pytest
import torch
from registry import Collapse
from runs import figures, run
from tables import TableModel, Text, write

import playground
from playground.contract import Decoder, find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.errors import Refusal
from playground.events import Branches, Forward, Note, Rollback
from support.speculation import GREEDY
from support.wrong_variants import refused

ThinkingBudget = find("thinking_budget")
COLLAPSES = {
    "thinking_budget": [
        Collapse(LaneConfig("thinking_budget", {"budget": -1, "start": "", "end": "de"}), GREEDY),
        Collapse(LaneConfig("thinking_budget", {"budget": 0}), GREEDY),  # these texts have no tags
        Collapse(
            LaneConfig("thinking_budget", {
                "budget": -1, "start": "", "end": "de", "confidence": 1.0, "marks": "a b", "longest": 2
            }),
            GREEDY,
        ),
    ],
}
LETTERS = "<>/tuwxyz.é"
TAGS = {"start": "<", "end": ">"}


def thinker(script: str, sure: float = 0.9, after: dict[str, str] | None = None) -> TableModel:
    """Writes a script after the prompt; once the text departs from it, it goes on with the script from where it is, or
    with what `after` says follows an ending.
    """
    def rule(context: Text) -> torch.Tensor:
        written = "".join(LETTERS[token] for token in context[1:])
        follows = next((text for ending, text in (after or {}).items() if written.endswith(ending)), None)
        wanted = follows or (script[len(written):len(written) + 1] if script.startswith(written) else "") or "."
        p = torch.full((len(LETTERS),), (1 - sure) / (len(LETTERS) - 1), dtype=torch.float64)
        p[LETTERS.index(wanted[0])] = sure
        return p.log()

    return TableModel(LETTERS, ".", rule=rule)


def text_of(decoder: Decoder, model: TableModel, length: int = 30, forced: tuple[int, ...] = ()) -> str:
    limits = Limits(0, length, forced=forced)
    lane = write(Assembly(decoder, decoder.toggles()), {"target": model}, [0], limits, Draws(0))
    return "".join(LETTERS[token] for token in lane.main.written)


# --- cut ---

def check_budget(cls: type[Decoder]) -> None:
    """Prompt "<": the part is open. Then the budget, the message and the tag; afterwards the model is free."""
    model = thinker("tututututu>y.", after={">": "y", "y": "."})
    for budget, wanted in ((-1, "tututututu>y."), (0, "xz>y."), (3, "tutxz>y."), (10, "tututututuxz>y."),
                           (11, "tututututu>y.")):
        assert text_of(cls(budget=budget, message="xz", **TAGS), model) == wanted, budget
    # tags in the text, twice: each part has its own budget
    model = thinker("", after={"w": "<", "<": "t", "t": "u", "u": "t", ">": "y", "y": "w"})
    assert text_of(cls(budget=2, **TAGS), model, 14, forced=(1, 5)) == ">w<tu>yw<tu>yw"


class CountsThePrompt(ThinkingBudget):
    def decode(self, lm):
        self.budget -= lm.prompt_length if self.budget > 0 else 0
        return super().decode(lm)


class CutsOneLate(ThinkingBudget):
    def decode(self, lm):
        self.budget += self.budget > 0
        return super().decode(lm)


class ForgetsTheTag(ThinkingBudget):
    def _force(self, lm, part, rows, text):
        return super()._force(lm, part, rows, self.message or "x")


@pytest.mark.oracle("thinking_budget")
def test_the_part_has_the_tokens_of_its_budget_and_then_its_end():
    check_budget(ThinkingBudget)


@pytest.mark.refuses("thinking_budget")
@pytest.mark.parametrize("wrong", [CountsThePrompt, CutsOneLate, ForgetsTheTag])
def test_a_wrong_budget_is_refused(wrong):
    refused(check_budget, wrong)


# --- extended ---

def check_waits(cls: type[Decoder]) -> None:
    """Each of the first n end tags, of one token or of two, becomes the word; the next one stays."""
    for end in (">", "/z"):
        model = thinker(f"tu{end}y.", after={"w": "t", f"wt{end[:-1]}": end[-1], "wt": end[0], end: "y", "y": "."})
        for waits in range(4):
            found = text_of(cls(budget=-1, waits=waits, wait="w", start="<", end=end), model)
            assert found == "tu" + "wt" * waits + f"{end}y.", (end, waits)


class WaitsOnceMore(ThinkingBudget):
    def decode(self, lm):
        self.waits += 1
        return super().decode(lm)


class KeepsTheTag(ThinkingBudget):
    """Writes the word behind the beginning of the tag."""

    def _go_on(self, lm, part, rows):
        part.waits += 1
        return (yield from self._force(lm, part, rows, self.wait))


@pytest.mark.oracle("thinking_budget")
def test_the_first_end_tags_are_replaced():
    check_waits(ThinkingBudget)


@pytest.mark.refuses("thinking_budget")
@pytest.mark.parametrize("wrong", [WaitsOnceMore, KeepsTheTag])
def test_a_wrong_extension_is_refused(wrong):
    refused(check_waits, wrong)


# --- left early ---

TRIALS = {"confidence": 0.85, "marks": "t", "longest": 2, "opener": "x", "budget": -1, **TAGS}


def unsure_until(thoughts: int) -> TableModel:
    """Answers y, with a probability of .5 after fewer thoughts t, and of .95 from then on."""
    def rule(context: Text) -> torch.Tensor:
        written = "".join(LETTERS[token] for token in context[1:])
        wanted = {"x": "y", "y": ".", ">": "x"}.get(written[-1:], "t" if written.count("t") < 6 else ">")
        sure = 0.95 if wanted != "y" or written.count("t") >= thoughts else 0.5
        p = torch.full((len(LETTERS),), (1 - sure) / (len(LETTERS) - 1), dtype=torch.float64)
        p[LETTERS.index(wanted)] = sure
        return p.log()

    return TableModel(LETTERS, ".", rule=rule)


def check_trials(cls: type[Decoder]) -> None:
    """The first thought whose trial answer reaches the bar is the last: sqrt(.5 .95) = .69, sqrt(.95 .95) = .95."""
    for thoughts in (1, 3, 6):
        assert text_of(cls(**TRIALS), unsure_until(thoughts)) == "t" * thoughts + ">xy."
    for bar, wanted in ((0.0, "tttttt>xy."), (1.0, "tttttt>xy."), (0.6, "t>xy.")):
        assert text_of(cls(**{**TRIALS, "confidence": bar}), unsure_until(4)) == wanted, bar


class TrustsTheOpener(ThinkingBudget):
    """Asks for the answer without the end tag, while the model is still thinking."""

    def _open(self, lm, leaf):
        yield from ()


class NeverSure(ThinkingBudget):
    def _try(self, lm, part):
        self.confidence = 1.0
        return super()._try(lm, part)


@pytest.mark.oracle("thinking_budget")
def test_thinking_ends_at_the_first_trial_answer_that_is_certain():
    check_trials(ThinkingBudget)


@pytest.mark.refuses("thinking_budget")
@pytest.mark.parametrize("wrong", [TrustsTheOpener, NeverSure])
def test_a_wrong_trial_is_refused(wrong):
    refused(check_trials, wrong)


def test_a_trial_leaves_no_trace_but_its_forwards():
    """The end tag, the opener and two tokens for each of six marks, which are dropped; one row serves the text too."""
    plain, _ = run(LaneConfig("thinking_budget", {**TRIALS, "confidence": 0.0}), {"target": unsure_until(9)}, [0], 30)
    lane, events = run(LaneConfig("thinking_budget", TRIALS), {"target": unsure_until(9)}, [0], 30)
    assert lane.tokens == plain.tokens and lane.target.store.keys[0].rows[0, :9, 0].tolist() == lane.tokens[:9]
    assert sum(len(event.dropped) for event in events if isinstance(event, Branches)) == 6
    assert sum(isinstance(event, Forward) for event in events) == 1 + 9 + 6 * 3
    shown = figures(events, "probability of the trial answer")
    assert [data["labels"] for data in shown] == [["y"]] * 6
    assert [data["values"][0] for data in shown] == pytest.approx([math.sqrt(0.5 * 0.95)] * 6)


# --- what is shown and refused ---

def test_the_thinking_part_is_shaded_and_counted_apart():
    model = thinker("", after={"t": "u", "u": "t", ">": "y", "y": "."})
    lane, events = run(LaneConfig("thinking_budget", {"budget": 4, **TAGS}), {"target": model}, [0, 3], 20)
    shades = [span for data in figures(events, "thinking") for span in data["spans"]]
    assert [span[3] for span in shades[:-1]] == [1.0] * 5 + [0.0] and lane.generated == 7  # then the end
    assert figures(events, "forced text")[0]["spans"] == [[4, 5, "forced", 1]]
    notes = [event.text for event in events if isinstance(event, Note)]
    assert "The thinking part has 5 tokens, its tags included." in notes


def test_a_tag_that_is_only_begun_resets_nothing():
    model = thinker("t/u/z.")
    _, events = run(LaneConfig("thinking_budget", {"budget": -1, "waits": 1, "wait": "w", "start": "", "end": "/z"}),
                    {"target": model}, [0], 12)
    assert [event.count for event in events if isinstance(event, Rollback)] == [1]


@pytest.mark.parametrize("knobs, says", [({"end": ""}, "needs an end")])
def test_a_part_without_an_end_is_refused(knobs, says):
    with pytest.raises(Refusal, match=says):
        make("thinking_budget", **knobs)


@pytest.mark.parametrize("toggle", [("regex", {"pattern": "a*"}), ("sink_window", {}), ("mirostat", {})])
def test_what_cannot_wait_or_be_undone_is_refused(toggle):
    with pytest.raises(Refusal, match="Thinking budget does not work with"):
        assemble(LaneConfig("thinking_budget", {}, [toggle]))


def test_worked_steps_of_the_bundled_model_are_cut():
    question = "Gecost buys 6 boxes of 7 keys. Then 3 of the keys are gone. How many keys does Gecost have now?"
    knobs = {"start": "", "end": "####", "budget": 5}
    cut = playground.run("thinking_budget", question, chat=True, knobs=knobs)
    whole = playground.run("thinking_budget", question, chat=True, knobs={**knobs, "budget": -1})
    assert whole.text.strip().endswith("#### 39") and "####" in cut.text and len(cut.text) < len(whole.text)
