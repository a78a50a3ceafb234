"""SpecDec++ ends a draft where its acceptance head doubts, and changes no text by it."""
from __future__ import annotations

import pytest
import torch
from pairs import pair
from tables import TableModel, write
from torch import Tensor

from playground.algorithms.speculative.acceptance_head import AcceptanceHead
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.events import Done, Draft, Verdict
from support.acceptance_heads import SpecDec, alone, keep, random_head, streams, with_head  # noqa: F401
from support.laws import AT_ONE, EXACT, WRONG, tables
from support.speculation import GREEDY, first_drafts, speculative_lane
from support.speculative_runs import DropsDoubtful, figures, law_distance, of, recorded, with_drafter

# --- stopping a chain ---

def predicting(*chances: float) -> dict:
    """Draft models whose state after n draft tokens is the log-probability that the last one is accepted; the most
    probable token is always the first.
    """
    def scores(context):
        chance = chances[min(len(context), len(chances)) - 1]
        return torch.tensor([9.0, 0.0, torch.tensor(chance).logit().item()], dtype=torch.float64)

    return {"target": TableModel("abc"), "draft": TableModel("abc", rule=scores)}


def read_third() -> dict[str, Tensor]:
    head = AcceptanceHead(3, 0)
    head.read.weight.data = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    return head.requires_grad_(False).state_dict()


def chain_length(cls, models: dict, **knobs) -> int:
    """Of the first chain, in a lane of 30 tokens behind a prompt of one."""
    lengths = []

    class Watched(cls):
        def observe(self, tree, rows, verdict):
            lengths.append(len(tree))
            super().observe(tree, rows, verdict)

    keep(models, read_third())
    write(
        with_drafter(Watched(predictor="head", **knobs), verifier="greedy_match"), models, [0], Limits(0, 30), Draws(0)
    )
    return lengths[0]


class StopsOnTheProduct(SpecDec):
    """Compares h with the probability that all are accepted."""

    def _should_stop(self, tree):
        return len(tree) >= self.least and self.survival(self._chances(tree))[-1] > self.h


class StopsOnTheLast(SpecDec):
    """Considers each draft token separately."""

    def survival(self, chances):
        return chances


class WithoutLag(SpecDec):
    """Takes the state before a draft token for the state that has read it."""

    def _predict(self, lm, node):
        self._predicted[node + 1] = float(self._head.chances(lm.stream("draft").seen.hidden[-1]))

    def survival(self, chances):
        return super().survival([*chances, 1.0])


@pytest.mark.parametrize("cls, guesses", [(SpecDec, 4), (StopsOnTheProduct, 1), (WithoutLag, 1)])
def test_a_chain_ends_one_draft_token_after_the_doubtful_one(alone, cls, guesses):
    """1 - .9 = .1, 1 - .72 = .28, 1 - .36 = .64. The first number is of the prompt, and counts for nothing."""
    assert chain_length(cls, predicting(.4, .9, .8, .5, .99), h=0.5, least=1) == guesses


@pytest.mark.parametrize("cls, right", [(SpecDec, True), (StopsOnTheLast, False)])
def test_many_fairly_certain_draft_tokens_are_doubtful_together(alone, cls, right):
    assert (chain_length(cls, predicting(.9), h=0.5, least=1, most=20) == 8) == right  # .9 ^ 7 = .48


@pytest.mark.parametrize(
    "chance, knobs, guesses",
    [
        (1e-9, {"least": 1}, 2),
        (1e-9, {"least": 1, "h": 0.0}, 2),
        (1e-9, {"least": 4}, 4),
        (1e-9, {"h": 1.0, "most": 7}, 7),
        (0.999, {"most": 9}, 9),
    ],
    ids=str,
)
def test_a_pessimistic_head_drafts_two_tokens_and_an_optimistic_one_the_maximum(
    alone, chance, knobs, guesses
):
    assert chain_length(SpecDec, predicting(chance), **knobs) == guesses


@pytest.mark.slow
def test_sampling_and_greedy_lanes_use_different_heads(alone):
    models = tables("abc")
    keep(models, random_head(3, 50.0, 0.0), random_head(3, -50.0, 0.0))
    lengths = [
        {len(tree) for _, tree, _ in first_drafts(with_head(*samplers, least=1, most=4), models, 20)}
        for samplers in ((AT_ONE,), ())
    ]
    assert lengths == [{4}, {2}]


@pytest.mark.slow
def test_with_h_one_the_chains_are_those_of_a_fixed_length(alone):
    models = tables("abc")
    keep(models, random_head(3))
    chains = [[tree.tokens for _, tree, _ in first_drafts(config, models, 20)] for config in
              (with_head(AT_ONE, h=1.0, most=4), speculative_lane("draft_model", "rejection", AT_ONE, depth=4))]
    assert chains[0] == chains[1] != []


# --- what it does not change ---

@pytest.mark.slow
@pytest.mark.parametrize(
    "bias, scale", [(0.0, 1.0), (-50.0, 0.0), (50.0, 0.0)], ids=["random", "trusts nothing", "trusts all"]
)
def test_the_greedy_text_is_plain_greedys_whatever_the_head_says(alone, bias, scale):
    keep(streams(pair()), random_head(pair().draft.width, bias, scale))
    plain, guessed = (
        recorded(config)[0]._runners[0].lane.tokens for config in (GREEDY, with_head(verifier="greedy_match", least=1))
    )
    assert plain == guessed


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs", [{"h": 0.5, "least": 1, "most": 3}, {"h": 0.2, "least": 1}, {"h": 0.9, "least": 2, "most": 4}], ids=str
)
def test_the_output_distribution_is_the_targets_with_an_untrained_head(alone, knobs):
    keep(tables("ab"), random_head(2))
    assert law_distance(with_drafter(SpecDec(predictor="head", **knobs), AT_ONE), tables("ab")) < EXACT


class DropsWhatTheHeadDoubts(DropsDoubtful):
    """Lets the draft process its last draft token too, and withdraws it if its own probability is small."""

    def propose(self, lm, budget):
        tree = yield from SpecDec.propose(self, lm, budget)
        if not len(tree):
            return tree
        yield lm.stream("draft").extend(tree)
        self._predict(lm, len(tree) - 1)
        return tree.only(list(range(len(tree) - 1))) if self._predicted[len(tree) - 1] < 0.5 else tree


@pytest.mark.slow
def test_withdrawing_a_draft_token_by_its_prediction_changes_the_distribution(alone):
    keep(tables("ab"), random_head(2))
    assert (
        law_distance(
            with_drafter(DropsWhatTheHeadDoubts(predictor="head", h=0.5, least=1, most=3), AT_ONE), tables("ab")
        )
        > WRONG
    )


@pytest.mark.parametrize("beside", [("knn_lm", {"tokens": 16}), ("dola", {})], ids=lambda added: added[0])
def test_samplers_that_mix_target_rows_do_not_affect_the_draft(alone, beside):
    keep(streams(pair()), random_head(pair().draft.width))
    plain, guessed = (
        recorded(config, length=12)[1]
        for config in (with_drafted(GREEDY, beside), with_drafted(with_head(verifier="greedy_match"), beside))
    )
    assert [event.reason for event in of(Done, guessed)] == [event.reason for event in of(Done, plain)] == ["length"]


def with_drafted(config, beside):
    return type(config)(config.strategy, config.knobs, [*config.extras, beside])


# --- what is shown ---

@pytest.mark.slow
def test_tested_draft_tokens_are_reported_with_prediction_and_outcome(alone):
    keep(streams(pair()), random_head(pair().draft.width))
    events = recorded(with_head(verifier="greedy_match", h=0.9, least=3), length=40)[1]
    shown = figures(events, "predicted and actual acceptance")
    verdicts, drafts = of(Verdict, events), of(Draft, events)
    came = [
        [float(test.kept) for test in verdict.tests if test.node < len(draft.tokens) - 1]
        for verdict, draft in zip(verdicts, drafts)
    ]
    assert len(shown) > 3 and [data["values"][1] for data in shown] == [row for row in came if row][:len(shown)]
    assert all(0 <= chance <= 1 for data in shown for chance in data["values"][0])
