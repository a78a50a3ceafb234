"""Two models in turns: which writes each token, compared with the rule written out by hand."""
from __future__ import annotations

from math import log

import pytest
import torch
from pairs import pair
from registry import Collapse
from tables import TableModel, write

from playground.algorithms.speculative.verification import Ruling
from playground.contract import find
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.events import Draft, Forward, Switch, Verdict
from support.laws import AT_ONE
from support.speculation import GREEDY, MODEL
from support.speculative_runs import of, recorded

BiLD = find("bild")
PROMPT, LENGTH = [0, 1, 0, 2], 40


def bild(*samplers: tuple[str, dict], **knobs) -> LaneConfig:
    return LaneConfig("bild", knobs, [*samplers])


COLLAPSES = {
    "bild": [
        Collapse(bild(most=0), GREEDY),
        Collapse(bild(fallback=1.0), GREEDY),
        Collapse(bild(fallback=0.0, rollback=0.0), GREEDY),
        Collapse(bild(AT_ONE, most=0), MODEL),
        Collapse(bild(AT_ONE, fallback=1.0), MODEL),
        Collapse(bild(), GREEDY, twins=True),
    ],
}


def little_and_big(ends: str = "", seed: int = 0) -> dict[str, TableModel]:
    """A draft that mostly agrees with the target and is sometimes certain of another token."""
    big, own = TableModel("abcd" + ends, ends, seed, spread=3.0), TableModel("abcd" + ends, ends, seed + 1, spread=3.0)
    return {
        "target": big,
        "draft": TableModel("abcd" + ends, ends, rule=lambda context: big.scores(context) + 0.8 * own.scores(context)),
    }


def odds(model: TableModel, text: list[int]) -> torch.Tensor:
    return model.scores(tuple(text)).softmax(-1)


def written_by_hand(
    models: dict[str, TableModel], fallback: float, rollback: float, most: int
) -> tuple[list[int], int]:
    """Tokens of the text, and how many of the small model's were rolled back."""
    big, small = models["target"], models["draft"]
    text, taken = [*PROMPT, int(odds(big, PROMPT).argmax())], 0
    end = len(PROMPT) + LENGTH
    while len(text) < end and text[-1] not in big.end_ids:
        wrote = _little(small, text, min(most, end - len(text) - 1), fallback)
        stands = next(
            (i for i in range(len(wrote)) if _wrong(odds(big, text + wrote[:i]), wrote[i], rollback)), len(wrote)
        )
        taken += len(wrote) - stands
        text += wrote[:stands]
        if text[-1] not in big.end_ids:
            text.append(int(odds(big, text).argmax()))
    return text[len(PROMPT):], taken


def _little(small: TableModel, text: list[int], most: int, fallback: float) -> list[int]:
    wrote: list[int] = []
    while len(wrote) < most and (text + wrote)[-1] not in small.end_ids:
        q = odds(small, text + wrote)
        if q.max() < fallback:
            break
        wrote.append(int(q.argmax()))
    return wrote


def _wrong(p: torch.Tensor, token: int, rollback: float) -> bool:
    return -log(p[token]) > rollback and int(p.argmax()) != token


class WritesOnBeforeHandingOver(BiLD):
    """Switches after the uncertain token, as a switch by entropy does."""

    def _draft(self, lm):
        tree = yield from super()._draft(lm)
        if len(tree) < min(self.most, lm.remaining - 1):
            rows = lm.stream("draft").seen
            tree.add(rows.best(len(tree) - 1), len(tree) - 1)
        return tree


class TakesBackWhatItWouldWrite(BiLD):
    """Uses the surprise alone, and rolls back a token it then writes again."""

    def _verify(self, lm, tree, rows, node, children):
        ruling = super()._verify(lm, tree, rows, node, children)
        surprised = ruling.tests[0].p < 2.718281828 ** -self.rollback
        return Ruling(None, rows.best(node), ruling.tests) if surprised else ruling


class NeverTakesBack(BiLD):
    def _verify(self, lm, tree, rows, node, children):
        return Ruling(children[0], tests=super()._verify(lm, tree, rows, node, children).tests)


def of_class(cls: type, **knobs) -> Assembly:
    return Assembly(cls(**knobs))


@pytest.mark.oracle("bild")
@pytest.mark.parametrize("ends", ["", "."], ids=["endless", "with an end token"])
@pytest.mark.parametrize(
    "fallback, rollback, most", [(0.6, 5.0, 10), (0.6, 2.0, 10), (0.9, 1.0, 3), (0.0, 2.0, 10), (0.7, 20.0, 32)]
)
def test_the_text_equals_the_rule_by_hand(fallback, rollback, most, ends):
    for seed in range(0, 12, 2):
        models = little_and_big(ends, seed)
        lane = write(
            assemble(bild(fallback=fallback, rollback=rollback, most=most)), models, PROMPT, Limits(0, LENGTH), Draws(0)
        )
        assert lane.tokens[len(PROMPT):] == written_by_hand(models, fallback, rollback, most)[0]


def test_in_the_example_some_tokens_are_rolled_back_and_most_accepted():
    taken = sum(written_by_hand(little_and_big(seed=seed), 0.6, 2.0, 10)[1] for seed in range(0, 12, 2))
    assert 20 < taken < 200


@pytest.mark.refuses("bild")
@pytest.mark.parametrize("wrong", [WritesOnBeforeHandingOver, NeverTakesBack])
def test_switching_too_late_or_never_rolling_back_changes_the_text(wrong):
    off = 0
    for seed in range(0, 12, 2):
        models = little_and_big(seed=seed)
        lane = write(of_class(wrong, fallback=0.6, rollback=2.0, most=10), models, PROMPT, Limits(0, LENGTH), Draws(0))
        off += lane.tokens[len(PROMPT):] != written_by_hand(models, 0.6, 2.0, 10)[0]
    assert off >= 5


def test_a_token_that_is_the_large_models_argmax_is_never_rolled_back():
    """The best of many tokens may have probabilities below any threshold."""
    flat = TableModel("abcdefgh", rule=lambda context: torch.linspace(0.1, 0.0, 8, dtype=torch.float64))
    sure = TableModel("abcdefgh", rule=lambda context: 9.0 * torch.eye(8, dtype=torch.float64)[0])
    for cls, forwards in ((BiLD, 3), (TakesBackWhatItWouldWrite, 20)):
        flat.forwards = 0
        lane = write(of_class(cls, rollback=1.5), {"target": flat, "draft": sure}, [0, 1], Limits(0, 21), Draws(0))
        assert lane.text == "a" * 21 and (flat.forwards <= forwards if cls is BiLD else flat.forwards >= forwards)


def test_the_large_model_takes_one_forward_per_segment_and_is_named_at_switches():
    session, events = recorded(bild(fallback=0.1, rollback=2.0), pair(noise=0.04), LENGTH)
    small, large = ([turn for turn in of(Switch, events) if turn.to == who] for who in ("small", "large"))
    assert (
        len(small) > 3
        and any("rolled back" in turn.why for turn in large)
        and any("uncertain" in turn.why for turn in large)
    )
    asked = sum(event.stream == "target" for event in of(Forward, events)) - 1  # the prompt
    assert 0 < len(of(Draft, events)) <= asked < LENGTH - 1
    assert asked + sum(len(verdict.kept) for verdict in of(Verdict, events)) >= LENGTH - 1
