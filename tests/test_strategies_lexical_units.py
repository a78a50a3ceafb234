"""Lexical units: several tokens from placeholders in one forward, against the rule by hand."""
from __future__ import annotations

import pytest
import torch
from pairs import TOKENIZER, network, pair
from registry import Collapse
from runs import run
from tables import TableModel, Text

from playground.contract import find
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Forward

LexicalUnits = find("lexical_units")
BRIEF = {"lexical_units": {"k": 3, "beta": 0.5}}
GREEDY = LaneConfig("greedy")
COLLAPSES = {
    "lexical_units": [
        Collapse(LaneConfig("lexical_units", {"beta": 1.01}), GREEDY),
        Collapse(LaneConfig("lexical_units", {"k": 1}), GREEDY),
        Collapse(LaneConfig("lexical_units", {"beta": 1.01, "rule": "whole", "k": 8}), GREEDY),
    ]
}
PROMPT, PAD = [0, 1], 4
MODEL = TableModel("abc_.", ".", seed=1, spread=2.5)


def by_hand(model: TableModel, length: int, k: int, beta: float, rule: str) -> tuple[list[int], int]:
    """The text, and the number of steps, each of which predicts up to k tokens."""
    text: list[int] = []
    steps = 0
    while len(text) < length and (not text or text[-1] not in model.end_ids):
        context: Text = (*PROMPT, *text)
        predicted = [
            (int(row.argmax()), float(row.softmax(0).max()))
            for row in (model.scores((*context, *[PAD] * j)) for j in range(min(k, length - len(text))))
        ]
        kept = [predicted[0][0]]
        for token, q in predicted[1:]:
            if q < beta:
                break
            kept.append(token)
        if rule == "whole" and len(kept) < len(predicted):
            kept = kept[:1]
        end = next((i + 1 for i, token in enumerate(kept) if token in model.end_ids), len(kept))
        text += kept[:end]
        steps += 1
    return text, steps


def written(cls: type, model: TableModel, k: int, beta: float, rule: str) -> tuple[list[int], int]:
    lane, events = run(Assembly(cls(k=k, beta=beta, rule=rule)), {"target": model}, PROMPT, 12)
    return lane.main.written, sum(isinstance(event, Forward) for event in events)


def agrees(cls: type) -> bool:
    """Whether texts are those by hand, for both rules and several models, some of which end."""
    several = 0
    for seed in range(6):
        model = TableModel("abc_.", ".", seed=seed, spread=2.5)
        for rule, k, beta in (("prefix", 4, 0.7), ("whole", 3, 0.6), ("prefix", 8, 0.9)):
            text, steps = by_hand(model, 12, k, beta, rule)
            several += len(text) > steps
            if written(cls, model, k, beta, rule)[0] != text:
                return False
    assert several > 6, "some steps keep several tokens"
    return True


@pytest.mark.oracle("lexical_units")
def test_the_kept_tokens_are_those_of_the_rule_by_hand():
    assert agrees(LexicalUnits)


class ProductOfProbabilities(LexicalUnits):
    """Wrong: the threshold applies to the product of the probabilities."""

    def _unit(self, rows, node, count, lm):
        places = [rows.row(each) for each in range(node, node + count + 1)]
        q, tokens = rows.logp[places].exp().max(-1)
        total, kept = 1.0, [int(tokens[0])]
        for token, share in zip(tokens.tolist()[1:], q.tolist()[1:]):
            total *= share
            if total < self.beta or lm.ends(kept[-1]):
                break
            kept.append(token)
        self._considered = []
        return kept


class KeepsOneTooMany(LexicalUnits):
    """Wrong: the first uncertain token is kept as well."""

    def _unit(self, rows, node, count, lm):
        unit = super()._unit(rows, node, count, lm)
        more = [token for token, _, kept in self._considered if not kept][:1]
        return unit if lm.ends(unit[-1]) or len(unit) >= lm.remaining else unit + more


@pytest.mark.refuses("lexical_units")
@pytest.mark.parametrize("wrong", [ProductOfProbabilities, KeepsOneTooMany])
def test_another_rule_is_refused(wrong):
    assert not agrees(wrong)


def test_a_step_takes_one_forward():
    text, forwards = written(LexicalUnits, MODEL, 4, 0.6, "prefix")
    steps = by_hand(MODEL, 12, 4, 0.6, "prefix")[1]
    assert forwards <= steps + 2, "beside the steps, the prompt and the first placeholders"


@pytest.mark.oracle("lexical_units")
def test_on_a_real_network_placeholders_never_stay_in_the_cache():
    """Every token is what the library predicts from the text and placeholders alone."""
    own, prompt = network("llama"), [54, 71, 71, 54, 9]
    lane, _ = run(Assembly(LexicalUnits(k=3, beta=0.5)), {"target": pair().target}, prompt, 12)
    pad, at = lane.padding, 0
    while at < len(lane.main.written) - 3:
        ids = torch.tensor([[*prompt, *lane.main.written[:at], pad, pad]])
        with torch.inference_mode():
            p = own(input_ids=ids, use_cache=False).logits[0, -3:].softmax(-1)
        q, tokens = (part.tolist() for part in p.max(-1))
        kept = 1 + (q[1] >= 0.5) + (q[1] >= 0.5 and q[2] >= 0.5)
        assert lane.main.written[at:at + kept] == tokens[:kept]
        at += kept


def test_a_model_that_was_not_tuned_is_refused_with_what_to_run():
    untuned = Model(network("llama"), TOKENIZER, "untuned")
    with pytest.raises(Refusal, match="playground variant lexical_unit_tuning"):
        run(LaneConfig("lexical_units"), {"target": untuned}, PROMPT, 8)
    for knobs in ({"k": 1}, {"beta": 1.01}):
        lane, _ = run(LaneConfig("lexical_units", knobs), {"target": untuned}, PROMPT, 8)
        assert lane.main.written == run(GREEDY, {"target": untuned}, PROMPT, 8)[0].main.written
