"""Transfer Q* adds the reward of completions to the logits of the most probable tokens."""
from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from registry import Collapse
from runs import figures, run
from tables import Law, TableModel, Text, distance, law, product_law

from playground.contract import find, make
from playground.contract.lane_config import LaneConfig
from playground.errors import Refusal
from support.laws import AT_ONE, EXACT, WRONG
from support.scripted_rewards import Scripted, hashed, scripted

TransferQStar = find("transfer_q_star")
BRIEF = {"transfer_q_star": {"reward": "likelihood", "k": 2, "horizon": 1}}
GREEDY, PLAIN = LaneConfig("greedy"), LaneConfig("greedy", {}, [AT_ONE])


def of(**knobs) -> LaneConfig:
    return LaneConfig("transfer_q_star", {"reward": "likelihood", "horizon": 3, **knobs})


COLLAPSES = {"transfer_q_star": [Collapse(of(weight=0.0), GREEDY), Collapse(of(k=1, weight=9.0), GREEDY)]}
PROMPT, END = [0, 1], 3
MODEL = TableModel("abc.", ".", seed=4)
DRAFT = TableModel("abc.", ".", seed=7)


def completed(model: TableModel, text: Text, horizon: int) -> Text:
    """The greedy completion of a text."""
    for _ in range(horizon):
        if text[-1] == END:
            break
        text = (*text, int(model.scores(text).argmax()))
    return text


def by_hand(model: TableModel, horizon: int, weight: float, t: float, k: int):
    """Scores of a row: logit / t + weight * Q / t for the k best tokens, the others removed."""
    def reshape(scores, history):
        kept, room = scores.topk(k).indices.tolist(), LENGTH - (len(history) - len(PROMPT)) - 1
        q = {token: hashed(completed(model, (*history, token), min(horizon, room))) for token in kept}
        row = torch.full_like(scores, float("-inf"))
        for token in kept:
            row[token] = (scores[token] + weight * q[token]) / t
        return row
    return reshape


LENGTH = 3


def error(cls: type | None = None, horizon: int = 2, baseline: str = "target") -> float:
    lane = scripted(
        "transfer_q_star", hashed, cls, k=3, horizon=horizon, weight=4.0, temperature=0.7, baseline=baseline
    )
    expected = by_hand({"target": MODEL, "draft": DRAFT}[baseline], horizon, 4.0, 0.7, 3)
    found = law(lane, {"target": MODEL, "draft": DRAFT}, PROMPT, LENGTH)
    return distance(found, product_law(MODEL, PROMPT, LENGTH, expected))


@pytest.mark.oracle("transfer_q_star")
@pytest.mark.parametrize("horizon, baseline", [(0, "target"), (2, "target"), (1, "draft")])
def test_the_output_distribution_is_the_one_by_hand(horizon, baseline):
    assert error(horizon=horizon, baseline=baseline) < EXACT


class DividesByTheWeight(TransferQStar):
    def _values(self, lm, rows, tokens):
        values, texts = yield from super()._values(lm, rows, tokens)
        return values / self.weight**2, texts


class ScoresTheCompletionAlone(TransferQStar):
    """Wrong: the reward does not see the text before the candidate."""

    def rewards(self, lm, texts):
        for text in texts:
            text.tokens = text.tokens[len(lm.tokens):]
        return (yield from super().rewards(lm, texts))


class ShiftsTheCandidates(TransferQStar):
    """Wrong: each candidate gets the value of its neighbour."""

    def _values(self, lm, rows, tokens):
        values, texts = yield from super()._values(lm, rows, tokens)
        return values.roll(1), texts


@pytest.mark.refuses("transfer_q_star")
@pytest.mark.parametrize("wrong", [DividesByTheWeight, ScoresTheCompletionAlone, ShiftsTheCandidates])
def test_other_values_fail(wrong):
    assert error(wrong) > WRONG


def sampled_by_hand(other=None, beta: float = 1.0) -> Law:
    """One token chosen greedily after two completions of one token each: a greedy one and a sampled one."""
    found, scores = defaultdict(float), MODEL.scores(tuple(PROMPT))
    kept = scores.topk(2).indices.tolist()

    def value(texts: list[Text]) -> float:
        weights = [torch.tensor((hashed(t) - other(t)) / beta).exp().item() if other else 1.0 for t in texts]
        return sum(w * hashed(t) for w, t in zip(weights, texts)) / sum(weights)

    def outcomes(token: int) -> list[tuple[float, float]]:
        text = (*PROMPT, token)
        if token == END:
            return [(1.0, value([text, text]))]
        first, chances = completed(MODEL, text, 1), MODEL.scores(text).softmax(0).tolist()
        return [(p, value([first, (*text, following)])) for following, p in enumerate(chances)]

    for p, left in outcomes(kept[0]):
        for q, right in outcomes(kept[1]):
            better = scores[kept[0]] + 4.0 * left >= scores[kept[1]] + 4.0 * right
            found[kept[0] if better else kept[1]] += p * q
    return dict(found)


def first_token(lane) -> Law:
    found = defaultdict(float)
    for text, p in law(lane, {"target": MODEL}, PROMPT, 2).items():
        found[text[0]] += p
    return dict(found)


@pytest.mark.oracle("transfer_q_star")
def test_further_completions_are_sampled_and_averaged():
    lane = scripted("transfer_q_star", hashed, k=2, horizon=1, rollouts=2, weight=4.0)
    assert distance(first_token(lane), sampled_by_hand()) < EXACT


def other(text: Text) -> float:
    return hashed((9, *text))


@pytest.mark.oracle("transfer_q_star")
def test_indirect_transfer_weights_completions_by_the_difference_of_the_rewards():
    lane = scripted("transfer_q_star", hashed, k=2, horizon=1, rollouts=2, weight=4.0, transfer="indirect",
                    other_classifier="of the baseline", beta=0.5)
    lane.decoder._other = Scripted(other)
    assert distance(first_token(lane), sampled_by_hand(other, 0.5)) < EXACT


def test_the_divergence_of_every_token_respects_its_bound():
    lane = scripted("transfer_q_star", hashed, k=4, horizon=2, weight=3.0, temperature=1.0)
    events = run(lane, {"target": MODEL}, PROMPT, 12)[1]
    shown = figures(events, "divergence from the model among the candidates, nats")
    assert shown and all(0 <= d["series"]["this token"] <= d["series"]["bound of this token"] + 1e-9 for d in shown)
    assert any(d["series"]["this token"] > 0.01 for d in shown)


def test_a_candidate_that_ends_the_text_is_not_completed():
    lane = scripted("transfer_q_star", hashed, k=4, horizon=2, weight=3.0)
    asked = run(lane, {"target": MODEL}, PROMPT, 6)[0].assembly.decoder._reward.asked
    assert any(END in text for text in asked) and all(END not in text[:-1] for text in asked)


def test_indirect_transfer_without_the_other_reward_is_refused():
    with pytest.raises(Refusal, match="other_classifier"):
        make("transfer_q_star", transfer="indirect")
