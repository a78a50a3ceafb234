"""Drafting with the model's own early layers, or with its quantised copy."""
from __future__ import annotations

from itertools import product

import pytest
import torch
from architectures import tiny
from tables import write
from toys import byte_tokenizer

from playground import load
from playground.contract import Verifier, find, make
from playground.contract.lane_config import LaneConfig, assemble
from playground.contract.token_tree import ROOT
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.rng import Draws
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan
from playground.engine.model import Model
from playground.events import Verdict
from playground.trace import metrics
from support.early_exits import EarlyTable
from support.laws import AT_ONE, EXACT, WRONG, tables
from support.parallel_drafting import pearl
from support.speculation import GREEDY, collapses, speculative_lane
from support.speculative_runs import law_distance, recorded, with_drafter

COLLAPSES = {
    "del_exit": collapses("del_exit", most=0),
}


# --- DEL: the exit layer is chosen by the acceptance rate of each layer ---

DEL = find("del_exit")
tokens_per_layer = DEL.plan.__globals__["tokens_per_layer"]


def layered(architecture: str) -> Model:
    return Model(tiny(architecture), byte_tokenizer(), architecture)


def counted(hits: dict[int, tuple[float, float]], depth: int = 8, **knobs):
    """DEL after counting so many hits and misses, by layer."""
    drafter = make("del_exit", **knobs)
    drafter.inner(depth, False)
    for layer, (right, wrong) in hits.items():
        drafter.statistics[layer].hits, drafter.statistics[layer].misses = right, wrong
    return drafter


@pytest.mark.parametrize("alpha, guesses, layer", product([0.0, 0.3, 0.9, 1.0], [0, 1, 5], [1, 4]))
def test_expected_tokens_of_a_layer_equal_an_enumeration_of_rounds(alpha, guesses, layer):
    expected = sum(
        (alpha**stood * (1 - alpha) if stood < guesses else alpha**stood) * (stood + 1) for stood in range(guesses + 1)
    )
    assert tokens_per_layer(alpha, guesses, layer, 8) == pytest.approx(expected / (8 + guesses * layer))


@pytest.mark.parametrize("hits, plan", [
    ({}, (1, 1)),
    ({layer: (5, 0) for layer in range(1, 8)}, (1, 17)),
    ({layer: (0, 5) for layer in range(1, 8)}, (1, 0)),
    ({layer: (9, 1) if layer == 3 else (0, 9) for layer in range(1, 8)}, (3, 4)),
], ids=["nothing known", "all right", "all wrong", "one right"])
def test_the_plan_is_optimal_and_prefers_the_lowest_layer_on_ties(hits, plan):
    drafter = counted(hits)
    assert drafter.plan() == plan
    worth = {
        (layer, n): sum((h / (h + m)) ** j for j in range(n + 1)) / (8 + n * layer)
        for layer, (h, m) in hits.items()
        for n in range(18)
    }
    assert not hits or worth[plan] == pytest.approx(max(worth.values()))


def test_a_layer_without_statistics_is_not_chosen():
    assert counted({5: (9, 1)}).plan()[0] == 5


def test_counts_decay_from_round_to_round():
    tally = counted({}).statistics[1]
    for right in (True, False, True):
        tally.add([right], [0.5], 0.5)
    assert (tally.hits, tally.misses) == (1 + 0.25, 0.5)
    tally.add([True, True, False], [0.9, 0.7, 0.2], 0.0)
    assert (tally.hits, tally.misses, tally.threshold) == (2, 1, pytest.approx((0.8 + 0.2) / 2)), (
        "at decay 0 only the last round counts"
    )


def read_by_layers(model: Model, tokens: list[int]) -> dict[int, torch.Tensor]:
    """Rows [n, V] of the lm_head after every layer of a fresh forward, by number of layers."""
    inner = range(1, model.depth)
    work = ForwardInput(model.new_store(), tokens, list(range(-1, len(tokens) - 1)))
    (logits,), captured = model.forward([work], LayerPlan(capture=frozenset(inner)))
    return {**{layer: model.read_out(captured[layer]) for layer in inner}, model.depth: logits}


START = [5, 9, 2, 7, 7, 1]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("samplers", [(), (AT_ONE,)], ids=["greedy", "drawn"])
def test_early_exit_rows_equal_a_fresh_forward_and_the_chosen_layer_gives_the_draft_tokens(
    architecture, samplers
):
    model, compared = layered(architecture), set()

    class Comparing(Verifier):
        def judge(self, lm, tree, rows):
            verdict = make("rejection").judge(lm, tree, rows)
            for node in (ROOT, *verdict.kept):
                fresh = read_by_layers(model, lm.tokens + tree.prefix(node))
                for exit, found in rows.others.items():
                    assert (found[rows.row(node)] - fresh[exit.layer][-1]).abs().max() < 1e-9
                    compared.add((exit.layer, len(tree) > 0))
            return verdict

    assembly = assemble(speculative_lane("del_exit", "rejection", *samplers))
    assembly.decoder.verifier = Comparing()
    write(assembly, {"target": model}, START, Limits(0, 18), Draws(0))
    assert compared == set(product([1, 2], [True, False]))


class CountsRefused(DEL):
    """Counts layer predictions after a rejected draft token."""

    def observe(self, tree, rows, verdict):
        super().observe(tree, rows, Verdict(kept=list(range(len(tree)))))


@pytest.mark.oracle("del_exit")
@pytest.mark.refuses("del_exit")
@pytest.mark.parametrize("cls, right", [(DEL, True), (CountsRefused, False)], ids=["standing", "refused too"])
@pytest.mark.parametrize("samplers", [(), (AT_ONE,)], ids=["greedy", "drawn"])
def test_counts_equal_those_of_one_forward_over_the_finished_text(cls, right, samplers):
    model = layered("llama")
    lane = write(with_drafter(cls(decay=1.0), *samplers), {"target": model}, START, Limits(0, 30), Draws(1))
    fresh = {layer: rows[len(START) - 1:].argmax(-1) for layer, rows in read_by_layers(model, lane.tokens[:-1]).items()}
    expected = {layer: int((fresh[layer] == fresh[model.depth]).sum()) for layer in (1, 2)}
    found = lane.assembly.decoder.drafter.statistics
    assert (
        {layer: (tally.hits, tally.misses) for layer, tally in found.items()}
        == {n: (hits, 30 - hits) for n, hits in expected.items()}
    ) == right


def test_a_chain_ends_with_its_first_uncertain_draft_token_which_is_verified_too():
    chains = []

    class Watched(DEL):
        def propose(self, lm, budget):
            bar = self.statistics[self.plan()[0]].threshold
            tree = yield from super().propose(lm, budget)
            chains.append((tree.confidence, bar, budget))
            return tree

    write(with_drafter(Watched()), {"target": layered("llama")}, START, Limits(0, 60), Draws(0))
    ended = [(made, bar) for made, bar, budget in chains if made and len(made) < min(budget, 18)]
    assert len(ended) > 3 and all(made[-1] < bar <= min(made[:-1], default=1) for made, bar in ended)


class TwoLayers(EarlyTable):
    """Its first layer has other preferences, available as an early exit."""

    depth = 2

    def state(self, layer, context):
        return self.early.scores(context) if layer == 1 else super().state(layer, context)


class DropsUnsure(DEL):
    """Withdraws a last draft token with low confidence."""

    def propose(self, lm, budget):
        tree = yield from super().propose(lm, budget)
        return tree.only(list(range(len(tree) - 1))) if len(tree) and tree.confidence[-1] < 0.5 else tree


@pytest.mark.parametrize(
    "knobs, verifier",
    [({}, "rejection"), ({}, "k_seq"), ({"dynamic": False}, "rejection"), ({"decay": 0.0}, "rejection")],
    ids=str,
)
def test_the_output_distribution_is_the_full_models_whatever_early_layers_predict(knobs, verifier):
    assert law_distance(with_drafter(DEL(**knobs), AT_ONE, verifier=verifier), {"target": TwoLayers("ab")}, 4) < EXACT


def test_withdrawing_an_uncertain_draft_token_changes_the_distribution():
    assert law_distance(with_drafter(DropsUnsure(), AT_ONE), {"target": TwoLayers("ab")}, 4) > WRONG


def test_del_combines_with_a_sampler_that_reads_early_exits():
    plain, guessed = (
        recorded(config, length=12)[0]
        for config in (
            LaneConfig("greedy", {}, [("dola", {})]),
            speculative_lane("del_exit", "rejection", ("dola", {})),
        )
    )
    assert guessed._runners[0].lane.tokens == plain._runners[0].lane.tokens


def test_a_model_of_one_layer_is_decoded_without_drafts():
    lane = write(assemble(speculative_lane("del_exit")), tables("abc"), [0], Limits(0, 8), Draws(0))
    assert not lane.target._left_early and set(lane.main.origins) == {"sampled"}


# --- a quantised copy as the draft ---

@pytest.fixture(scope="module")
def packed() -> Models:
    return load(draft="nf4")


@pytest.mark.slow
def test_an_nf4_copy_drafts_for_its_full_precision_model_and_is_named_as_such(packed):
    session, events = recorded(LaneConfig("speculative"), packed, 30, "Once upon a time")
    assert (packed.target.quantization, packed.draft.quantization) == ("none", "nf4")
    assert (session.headers[0].draft, session.headers[0].quantization) == ("pocket in nf4", "none")
    assert metrics(session.trace)["acceptance_rate"] > 0.8, "what four bits lose changes few first choices"


@pytest.mark.slow
def test_the_text_is_that_of_the_full_weights_whose_rows_differ_from_the_quantised_ones(packed):
    texts = [
        recorded(config, packed, 30, "Once upon a time")[0]._runners[0].lane.tokens
        for config in (GREEDY, LaneConfig("speculative"), pearl())
    ]
    assert texts[0] == texts[1] == texts[2]
    full, small = (
        model.forward([ForwardInput(model.new_store(), [40, 50, 60], [-1, 0, 1])])[0][0]
        for model in (packed.target, packed.draft)
    )
    assert (full - small).abs().max() > 1e-3
