"""Reflective verification: its draft tokens and its text, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch
from pairs import pair
from registry import Collapse
from tables import TableModel, write

from playground.contract import Verifier, find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.rng import Draws
from playground.engine.forward_input import ForwardInput
from playground.engine.model import Model
from playground.trace import metrics
from support.laws import AT_ONE
from support.speculation import GREEDY
from support.speculative_runs import CHAIN, recorded

COLLAPSES = {
    "reflective": [
        Collapse(LaneConfig("reflective", {"alpha": 0.0}), GREEDY),
        Collapse(LaneConfig("reflective", {"alpha": 0.0}, [("draft_model", {"depth": 3}), AT_ONE]), CHAIN),
        Collapse(
            LaneConfig("reflective", {"alpha": 0.0, "mix": "probabilities"}, [("draft_model", {"depth": 3}), AT_ONE]),
            CHAIN,
        ),
    ],
}
START = [5, 9, 2, 7, 7, 1]
Reflective = find("reflective")


class Shifted(Reflective):
    """Takes each second row for that of the position before it."""

    def mixed(self, first, second):
        return super().mixed(first, second.roll(1, 0))


def reflecting(cls: type = Reflective, drafter: str = "draft_model", **knobs) -> Assembly:
    assembly = assemble(LaneConfig("reflective", {}, [(drafter, {"depth": 3})]))
    return Assembly(cls(assembly.decoder.drafter, assembly.decoder.verifier, **knobs))


def read_after(model: Model, tokens: list[int], count: int) -> torch.Tensor:
    """The last `count` rows [count, V] of a fresh forward."""
    return model.forward([ForwardInput(model.new_store(), tokens, list(range(-1, len(tokens) - 1)))])[0][0][-count:]


@pytest.mark.oracle("reflective")
@pytest.mark.refuses("reflective")
@pytest.mark.parametrize("cls, right", [(Reflective, True), (Shifted, False)], ids=["aligned", "shifted"])
@pytest.mark.parametrize("ending", [0, 4])
def test_draft_tokens_are_verified_with_a_mixture_of_two_rows(cls, right, ending):
    models, off = {"target": pair().target, "draft": pair().draft}, []

    class Comparing(Verifier):
        def judge(self, lm, tree, rows):
            if len(tree) and lm.generated:
                behind = [*lm.spell("again:"), *lm.tokens[len(lm.tokens) - ending:], *tree.tokens]
                first = read_after(models["target"], lm.tokens + tree.tokens, len(tree) + 1)
                second = read_after(models["target"], lm.tokens + tree.tokens + behind, len(tree) + 1)
                off.append(float((rows.scores[:len(tree) + 1] - (0.7 * first + 0.3 * second)).abs().max()))
            return make("rejection").judge(lm, tree, rows)

    assembly = reflecting(cls, ask="again:", ending=ending)
    assembly.decoder.verifier = Comparing()
    write(assembly, models, START, Limits(0, 16), Draws(0))
    assert len(off) > 2 and (max(off) < 1e-9) == right


def copying() -> TableModel:
    """Repeats the earlier continuation of the same two tokens; for new ones any continuation."""
    opinion = TableModel("abcdefgh", seed=5)

    def scores(context):
        earlier = [context[i + 2] for i in range(len(context) - 2) if context[i:i + 2] == context[-2:]]
        return 9 * torch.eye(8, dtype=torch.float64)[earlier[-1]] if earlier else opinion.scores(context)

    return TableModel("abcdefgh", rule=scores)


def accepted(alpha: float, **knobs) -> float:
    """Acceptance rate of an uninformed draft with a target that copies from its context."""
    models = Models(copying(), TableModel("abcdefgh", seed=9))
    config = LaneConfig("reflective", {"alpha": alpha, "ask": "", **knobs}, [("draft_model", {"depth": 4})])
    return metrics(recorded(config, models, 40, "abc")[0].trace)["acceptance_rate"]


@pytest.mark.slow
def test_a_copying_target_accepts_more_wrong_tokens_as_the_second_row_gains_weight():
    shares = [accepted(alpha) for alpha in (0.0, 0.5, 1.0)]
    assert shares[0] < 0.3 and shares == sorted(shares) and shares[-1] > 0.6


@pytest.mark.slow
def test_tokens_accepted_only_by_reflection_are_reported():
    models = Models(copying(), TableModel("abcdefgh", seed=9))
    config = LaneConfig("reflective", {"alpha": 1.0, "ask": ""}, [("draft_model", {"depth": 4})])
    notes = [event.text for event in recorded(config, models, 40, "abc")[1] if event.kind == "note"]
    assert notes and all("top token" in note for note in notes)
    assert not [
        event
        for event in recorded(LaneConfig("reflective", {"alpha": 0.0}), models, 40, "abc")[1]
        if event.kind == "note"
    ]


def test_without_context_for_a_second_row_one_is_used():
    models = {"target": TableModel("abcde", context=24), "draft": TableModel("abcde", seed=1, context=24)}
    plain, reflected = (write(assemble(config), models, [0, 1, 2], Limits(0, 50), Draws(0)) for config in
                        (GREEDY, LaneConfig("reflective", {"alpha": 0.0, "ending": 4})))
    assert plain.tokens == reflected.tokens and len(plain.tokens) == 24
