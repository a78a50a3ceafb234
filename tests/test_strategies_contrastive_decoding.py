"""Contrastive decoding against the library or its formula in plain loops, and wrong variants against the same check."""
from __future__ import annotations

import pytest
from registry import Collapse
from runs import written
from tables import TableModel, distance, law

from playground.contract import Decoder, find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from strategies.sampling.contrastive_decoding import contrasted
from support.guided_rows import Row, softmax
from support.laws import AT_ONE, EXACT, WRONG
from support.wrong_variants import refused

Contrastive = find("contrastive_decoding")
GREEDY = LaneConfig("greedy")
COLLAPSES = {"contrastive_decoding": [Collapse(LaneConfig("contrastive_decoding", {"alpha": 1.0}), GREEDY)]}


def contrastive_row(p: Row, q: Row, alpha: float, t: float) -> Row:
    """Probabilities in proportion to p / q, q at temperature t, among tokens with at least alpha of the best p."""
    sharp = [x ** (1 / t) for x in q]
    weights = [a / (b / sum(sharp)) if a >= alpha * max(p) else 0.0 for a, b in zip(p, sharp)]
    return [weight / sum(weights) for weight in weights]


def check_contrastive(cls: type[Decoder]) -> None:
    """The law of two sampled tokens, and the argmax."""
    for seed, alpha, t in ((1, 0.1, 0.5), (2, 0.4, 1.0), (3, 0.0, 2.0)):
        models = {"target": TableModel("abcd", seed=seed), "draft": TableModel("abcd", seed=seed + 9)}

        def row(text, alpha=alpha, t=t, models=models):
            p, q = (softmax(models[name].scores(text).tolist()) for name in ("target", "draft"))
            return contrastive_row(p, q, alpha, t)

        expected = {(a, b): x * y for a, x in enumerate(row((0, 1))) for b, y in enumerate(row((0, 1, a))) if x * y}
        sampled = Assembly(cls(alpha=alpha, temperature=t), [make(AT_ONE[0], **AT_ONE[1])])
        assert distance(law(sampled, models, [0, 1], 2), expected) < EXACT
        first = row((0, 1))
        assert written(Assembly(cls(alpha=alpha, temperature=t)), models, [0, 1], 1) == [first.index(max(first))]


class AmateurAsItIs(Contrastive):
    def __post_init__(self):
        self.temperature = 1.0


class EveryTokenCompetes(Contrastive):
    def __post_init__(self):
        self.alpha = 0.0


class SwapsTheModels(Contrastive):
    """The small model is the better one."""

    def decode(self, lm):
        rows = yield lm.prefill()
        weaker = yield lm.stream("draft").extend()
        rows.add_stage("swapped", contrasted(weaker.scores[-1], rows.scores[-1] / self.temperature, self.alpha)[None])
        yield lm.keep(lm.pick(rows))


@pytest.mark.oracle("contrastive_decoding")
def test_the_law_is_the_ratio_of_the_models_among_plausible_tokens():
    check_contrastive(Contrastive)


@pytest.mark.refuses("contrastive_decoding")
@pytest.mark.parametrize("wrong", [AmateurAsItIs, EveryTokenCompetes, SwapsTheModels])
def test_a_wrong_contrast_is_refused(wrong):
    refused(check_contrastive, wrong)


def test_two_equal_models_leave_all_eligible_tokens_equally_probable():
    model = TableModel("abc", seed=1)
    lane = Assembly(Contrastive(alpha=0.0, temperature=1.0), [make(AT_ONE[0], **AT_ONE[1])])
    found = law(lane, {"target": model, "draft": model}, [0, 1], 1)
    assert all(abs(p - 1 / 3) < WRONG for p in found.values())
