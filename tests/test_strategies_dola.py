"""DoLa: the last layer contrasted with an earlier one, among plausible tokens. Compared with an
independent computation.
"""
from __future__ import annotations

import math

import pytest
import torch
from pairs import library_states, network, pair
from registry import Collapse
from runs import alone, divergence, figures, random_rows, run, written
from runs import divergence as jensen_shannon_by_definition
from tables import TableModel

from playground.algorithms.sampling import contrastive
from playground.contract import EarlyExit, Sampler, make
from playground.contract.lane_config import LaneConfig
from strategies.sampling.dola import candidates, mixture_first
from support.contrast_oracles import DoLa, Row, check_contrasted, drawn, logs, softmax
from support.contrasting import contrasted
from support.wrong_variants import refused

GREEDY = LaneConfig("greedy")
PROMPT = [54, 71, 71, 9]


COLLAPSES = {
    "dola": [
        Collapse(alone("dola", alpha=1.0), GREEDY),
        Collapse(alone("dola", layers="one", at=1.0, norm=True), GREEDY),
        Collapse(alone("dola", layers="one", at=1.0), GREEDY),
    ],
}


# --- plausible tokens ---

def test_plausible_tokens_have_a_share_of_the_best_ones_probability():
    logits = torch.tensor([[0.5, 0.3, 0.05, 0.15]], dtype=torch.float64).log()
    for share, competing in [(0.0, [0, 1, 2, 3]), (0.1, [0, 1, 2, 3]), (0.2, [0, 1, 3]), (0.5, [0, 1]), (1.0, [0])]:
        assert contrastive.plausible(logits, share)[0].nonzero().flatten().tolist() == competing


def test_without_divergence_the_likeliest_token_comes_first_not_the_lowest_id():
    logits = random_rows(1)
    assert torch.equal(contrastive.restricted(torch.zeros_like(logits), logits, 0.1).argmax(-1), logits.argmax(-1))
    assert not torch.equal(
        torch.where(contrastive.plausible(logits, 0.1), 0.0, -math.inf).argmax(-1), logits.argmax(-1)
    )


def test_implausible_tokens_are_never_sampled_but_keep_their_order_if_a_grammar_allows_no_others():
    logits = random_rows(2)
    kept, scores = contrastive.plausible(logits, 0.1), contrastive.restricted(random_rows(3), logits, 0.1)
    assert bool(((scores / 2).softmax(-1)[~kept] == 0).all())
    left = ~kept
    assert torch.equal(scores.masked_fill(~left, -math.inf).argmax(-1), logits.masked_fill(~left, -math.inf).argmax(-1))


# --- DoLa ---

@pytest.mark.parametrize(
    "depth, tied, low, high",
    [
        (8, False, [0, 2], [4, 6]),
        (8, True, [2], [4, 6]),
        (32, False, list(range(0, 16, 2)), list(range(16, 32, 2))),
        (48, True, list(range(2, 20, 2)), list(range(28, 48, 2))),
        (3, False, [0], [1]),
        (2, True, [1], [1]),
        (1, True, [0], [0]),
    ],
)
def test_the_candidates_are_those_of_the_library(depth, tied, low, high):
    assert candidates("low", 0.5, depth, tied) == low and candidates("high", 0.5, depth, tied) == high


@pytest.mark.strategy("dola")
def test_the_last_layer_gives_the_models_logits_and_the_greedy_text():
    knobs = {"layers": "one", "at": 1.0}
    last, middle = (make("dola", layers="one", at=at).inner(8, False)[0] for at in (1.0, 0.5))
    assert last.norm and not middle.norm
    models = {"target": pair().target}
    assert written(alone("dola", **knobs), models, PROMPT, 8) == written(GREEDY, models, PROMPT, 8)


def test_one_layer_is_a_share_of_all():
    assert [candidates("one", share, 8, True) for share in (0.0, 0.5, 1.0)] == [[0], [4], [8]]


def as_released(q: list[float], e: list[float]) -> float:
    """The divergence of the authors' code: of the mixture from each row."""
    return sum(0.5 * m * (math.log(m / a) + math.log(m / b)) for a, b in zip(q, e) for m in [(a + b) / 2])


def test_the_divergence_takes_the_mixture_first_unlike_jensen_shannon():
    z1, z2 = random_rows(2), random_rows(3)
    pairs_ = list(zip(z1.softmax(-1).tolist(), z2.softmax(-1).tolist()))
    assert mixture_first(z1, z2).tolist() == pytest.approx([as_released(p, q) for p, q in pairs_])
    assert all(as_released(p, q) > jensen_shannon_by_definition(p, q) + 1e-3 for p, q in pairs_)


@pytest.mark.parametrize(
    "name, measure", [("mixture first", as_released), ("Jensen-Shannon", jensen_shannon_by_definition)]
)
def test_each_row_is_contrasted_with_the_candidate_that_diverges_most(name, measure):
    dola = make("dola", layers="low", divergence=name)
    exits = dola.inner(16, False)
    rows = {"target": random_rows(0)} | {at: random_rows(seed) for seed, at in enumerate(exits, 1)}
    scores, chosen = dola.mix(rows), []
    for i in range(len(scores)):
        p = rows["target"][i].softmax(-1).tolist()
        apart = [measure(p, rows[at][i].softmax(-1).tolist()) for at in exits]
        chosen.append(apart.index(max(apart)))
        expected = rows["target"][i].log_softmax(-1) - rows[exits[chosen[-1]]][i].log_softmax(-1)
        kept = contrastive.plausible(rows["target"][i], 0.1)
        assert (scores[i] - expected)[kept].abs().max() < 1e-4
    assert len(set(chosen)) == len(exits), "some candidate was never chosen, so this says little"


def dola_text(length: int, layer: int, norm: bool, share: float = 0.1, flipped: bool = False) -> list[int]:
    twin, text = network("llama"), list(PROMPT)
    with torch.no_grad():
        for _ in range(length):
            states = library_states(text)
            early = twin.model.norm(states[layer]) if norm else states[layer]
            last, inner = (twin.lm_head(state).log_softmax(-1).tolist() for state in (states[-1], early))
            text.append(contrasted(last, [-value for value in inner] if flipped else inner, share))
    return text[len(PROMPT):]


@pytest.mark.oracle("dola")
@pytest.mark.parametrize(
    "knobs, layer, norm",
    [
        ({"layers": "high"}, 1, False),
        ({"layers": "low", "norm": True}, 0, True),
        ({"layers": "one", "at": 0.67, "norm": True}, 2, True),
    ],
)
def test_early_exits_equal_the_librarys_forwards_over_the_whole_text(knobs, layer, norm):
    found = written(alone("dola", **knobs), {"target": pair().target}, PROMPT, 8)
    assert found == dola_text(len(found), layer, norm)


@pytest.mark.refuses("dola")
def test_a_faulty_layer_contrast_changes_the_text():
    found = written(alone("dola"), {"target": pair().target}, PROMPT, 8)
    for fault in ({"layer": 2, "norm": False}, {"layer": 1, "norm": True}, {"layer": 1, "norm": False, "share": 0.0},
                  {"layer": 1, "norm": False, "flipped": True}):
        assert dola_text(8, **fault) != found, fault


def test_dola_reports_every_candidate_and_takes_no_extra_forward():
    model = TableModel("abcde")
    _, events = run(alone("dola"), {"target": model}, [0, 1], 6)
    assert model.forwards == 6
    assert [len(data["labels"]) for data in figures(events, "first choice of each layer, by divergence")] == [1] * 6
    assert all(1 <= data["series"]["tokens"] <= 5 for data in figures(events, "plausible tokens"))


def mixture_in_front(p: Row, q: Row) -> float:
    """The divergence of the authors' code: the mean of KL(m || p) and KL(m || q), m the mixture."""
    return sum(0.5 * m * (math.log(m / a) + math.log(m / b)) for a, b in zip(p, q) for m in [(a + b) / 2])


def check_dola(cls: type[Sampler]) -> None:
    """Each row minus that of the candidate layer that diverges most from it."""
    for name, measure in (("mixture first", mixture_in_front), ("Jensen-Shannon", divergence)):
        dola = cls(layers="low", divergence=name)
        exits = dola.inner(16, False)
        assert [exit.layer for exit in exits] == [0, 2, 4, 6]
        rows = {"target": drawn(9)} | {exit: drawn(seed) * (1 + seed) for seed, exit in enumerate(exits)}
        scores = []
        for i, z in enumerate(rows["target"].tolist()):
            early = max((rows[exit][i].tolist() for exit in exits), key=lambda y: measure(softmax(z), softmax(y)))
            scores.append([a - b for a, b in zip(logs(z), logs(early))])
        check_contrasted(dola.mix(rows), rows["target"], scores, 0.1)


class LeastDivergent(DoLa):
    def _divergences(self, rows):
        return -super()._divergences(rows)


class LayerOfTheFirstRow(DoLa):
    """Chooses one layer for a whole batch."""

    def _divergences(self, rows):
        return super()._divergences(rows)[:, :1].expand(-1, len(rows["target"]))


class TheOtherDivergence(DoLa):
    def _divergences(self, rows):
        given = self.divergence
        self.divergence = "Jensen-Shannon" if given == "mixture first" else "mixture first"
        found = super()._divergences(rows)
        self.divergence = given
        return found


class EveryLayer(DoLa):
    def inner(self, depth, tied):
        self.exits = [EarlyExit("target", layer, self.norm) for layer in range(depth // 2)]
        return self.exits


@pytest.mark.oracle("dola")
def test_dola_subtracts_the_most_divergent_layer_row_by_row():
    check_dola(DoLa)


@pytest.mark.refuses("dola")
@pytest.mark.parametrize("wrong", [LeastDivergent, LayerOfTheFirstRow, TheOtherDivergence, EveryLayer])
def test_a_wrong_dola_is_refused(wrong):
    refused(check_dola, wrong)
