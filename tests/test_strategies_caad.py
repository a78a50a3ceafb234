"""CAAD: similarity with rows of texts that are known to be right, compared with an independent computation."""
from __future__ import annotations

import math

import pytest
import torch
from pairs import library_states, network, pair
from registry import Collapse
from runs import alone, figures, random_rows, recorded
from tables import prepared
from torch import Tensor

from playground.contract import Sampler, find, make
from playground.contract.lane_config import LaneConfig
from playground.decoding.prompt import Prompt
from playground.errors import Refusal
from playground.events import Note
from strategies.sampling.caad import Grounding
from support.contrast_oracles import CAAD, WIDTH, Row, drawn
from support.stored_texts import squared
from support.wrong_variants import refused

GREEDY = LaneConfig("greedy")
PROMPT = [54, 71, 71, 9]


BRIEF = {"caad": {"pairs": "ab => ba"}}
COLLAPSES = {
    "caad": [Collapse(alone("caad", alpha=0.0), GREEDY), Collapse(alone("caad", tau=1.0), GREEDY)],
}


SAID = Prompt("The green bird")

GROUNDED = {"pairs": "The green bird => sings\nThe red fox => listens"}


def caad(**knobs):
    return prepared([make("caad", **GROUNDED, **knobs)], {"target": pair().target}, PROMPT)[0]


def test_a_stored_position_is_retrieved_by_its_own_state_with_the_models_logits():
    sampler, model = caad(), pair().target
    ids = [*model.tokens.encode("The green bird"), *model.tokens.encode(" sings")]
    states = [library_states(ids[:end])[-1] for end in range(len(model.tokens.encode("The green bird")), len(ids))]
    for place, state in enumerate(states):
        similarities = sampler.grounding.similarities(state[None])[0]
        assert int(similarities.argmax()) == place and float(similarities[place]) == pytest.approx(1, abs=1e-5)
        assert (sampler.grounding.logits[place] - network("llama").lm_head(state)).abs().max() < 1e-5


def single(logits: Tensor, **knobs):
    sampler = make("caad", **knobs)
    sampler.grounding = Grounding(
        torch.randn(len(logits), 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
        logits,
        [""] * len(logits),
    )
    return sampler


def test_one_entry_adds_alpha_times_its_logits():
    entry, z = random_rows(1, 1), random_rows(2, 5)
    rows = {"target": z, "hidden": random_rows(3, 5, 8)}
    assert torch.allclose(single(entry, tau=-1.0, alpha=0.7).mix(rows) - z, 0.7 * entry.expand(5, -1))
    assert torch.allclose(single(entry, tau=-1.0, alpha=0.7, mode="delta").mix(rows), 0.3 * z + 0.7 * entry)


def near_and_far(**knobs):
    """The distance between what a grounding of two entries gives and the mean of the nearer one alone, where the other
    lies opposite.
    """
    sampler, z = make("caad", alpha=0.5, tau=0.7, **knobs), random_rows(2, 1)
    states = torch.tensor([[1.0, 0.2], [-1.0, 0.2]], dtype=torch.float64)
    sampler.grounding = Grounding(states, random_rows(1, 2), ["near", "far"])
    mixed = sampler.mix({"target": z, "hidden": torch.tensor([[0.9, 0.2]], dtype=torch.float64)})
    return float((mixed - z - 0.5 * sampler.grounding.logits[0]).abs().max())


def test_only_similar_entries_count():
    assert near_and_far() < 1e-12


@pytest.mark.parametrize("broken", ["_weights", "_shaped"])
def test_a_wrong_grounding_is_detected(broken, monkeypatch):
    wrong = {"_weights": lambda self, similarities: torch.full_like(similarities, 1 / similarities.shape[-1]),
             "_shaped": lambda self, logits, mean: logits + self.alpha * mean.softmax(-1)}
    monkeypatch.setattr(find("caad"), broken, wrong[broken])
    assert near_and_far() > 0.1


def test_without_similar_entries_no_mode_changes_the_model():
    rows = {"target": random_rows(2, 5), "hidden": random_rows(3, 5, 8)}
    for mode in ("linear", "delta", "probabilities"):
        assert torch.equal(single(random_rows(1, 4), tau=1.0, mode=mode).mix(rows), rows["target"])


@pytest.mark.parametrize("knobs", [{}, {"weighted": False}, {"most": 2}], ids=str)
def test_only_the_best_entries_have_weights_which_are_positive_and_sum_to_one(knobs):
    sampler = single(random_rows(1, 9), tau=-1.0, **knobs)
    similarities = sampler.grounding.similarities(random_rows(3, 20, 8))
    weights = sampler._weights(similarities)
    assert weights.sum(-1).tolist() == pytest.approx([1.0] * 20) and bool((weights >= 0).all())
    for row, similar in zip(weights, similarities):
        used = row > 0
        assert int(used.sum()) == knobs.get("most", 9) and float(similar[used].min()) >= float(
            similar[~used].max() if bool((~used).any()) else -1
        )


def test_a_constant_added_to_stored_logits_changes_nothing_and_mixed_probabilities_sum_to_one():
    rows = {"target": random_rows(2, 5), "hidden": random_rows(3, 5, 8)}
    for mode in ("linear", "delta", "probabilities"):
        plain, shifted = (single(random_rows(1, 9) + by, tau=-1.0, mode=mode).mix(rows).softmax(-1) for by in (0, 7))
        assert torch.allclose(plain, shifted)
    assert single(random_rows(1, 9), tau=-1.0, mode="probabilities").mix(rows).exp().sum(-1).tolist() == pytest.approx(
        [1.0] * 5, abs=1e-5
    )


def test_at_a_stored_position_nothing_changes_since_the_logits_are_the_models_own():
    knobs = {"pairs": "The green bird => sings", "tau": 0.95, "weighted": False, "alpha": 2.0}
    text, events = recorded(alone("caad", **knobs), SAID, length=1)
    assert figures(events, "entries averaged")[0]["series"]["entries"] == 1
    assert text == recorded(GREEDY, SAID, length=1)[0] and not [
        e for e in events if isinstance(e, Note) and "above" in e.text
    ]


def test_invalid_settings_are_refused():
    for knobs, said in [
        ({"pairs": "no arrow"}, "question => answer"),
        ({"pairs": " "}, "at least one"),
        ({"alpha": 1.5, "mode": "delta"}, "exceed 1"),
    ]:
        with pytest.raises(Refusal, match=said):
            make("caad", **knobs)


ENTRIES = drawn(5, 9, WIDTH)  # states of stored positions
STORED = drawn(6, 9)  # and the logits the model had there


def cosine(a: Row, b: Row) -> float:
    return sum(x * y for x, y in zip(a, b)) / math.sqrt(squared(a, [0.0] * WIDTH) * squared(b, [0.0] * WIDTH))


def grounded(z: Row, state: Row, alpha: float, tau: float, weighted: bool, most: int) -> Row:
    """z + alpha * mean logits of the entries more similar than tau, states taken less their mean over the entries."""
    mean = [sum(column) / len(column) for column in zip(*ENTRIES.tolist())]
    centred = [[x - m for x, m in zip(entry, mean)] for entry in [state, *ENTRIES.tolist()]]
    similar = sorted(((cosine(centred[0], entry), at) for at, entry in enumerate(centred[1:])), reverse=True)
    near = [(s, at) for s, at in similar[: most or None] if s > tau]
    total = sum(s if weighted else 1 for s, _ in near)
    return [
        x + alpha * sum((s if weighted else 1) / total * float(STORED[at, v]) for s, at in near)
        for v, x in enumerate(z)
    ]


def check_caad(cls: type[Sampler]) -> None:
    rows = {"target": drawn(0), "hidden": drawn(8, size=WIDTH)}
    for alpha, tau, weighted, most in ((0.5, 0.2, True, 0), (1.5, 0.1, False, 0), (0.8, 0.0, True, 2)):
        caad = cls(alpha=alpha, tau=tau, weighted=weighted, most=most)
        caad.grounding = Grounding(ENTRIES, STORED, [""] * len(ENTRIES))
        expected = [
            grounded(z, state, alpha, tau, weighted, most)
            for z, state in zip(rows["target"].tolist(), rows["hidden"].tolist())
        ]
        assert (caad.mix(rows) - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-6


class EveryEntryCounts(CAAD):
    def _weights(self, similarities):
        self.tau = -1.0
        return super()._weights(similarities)


class EvenlyWeighted(CAAD):
    def _weights(self, similarities):
        self.weighted = False
        return super()._weights(similarities)


class SumsTheEntries(CAAD):
    """Does not divide by the sum of the weights."""

    def _weights(self, similarities):
        return super()._weights(similarities) * (similarities > self.tau).sum(-1, keepdim=True)


class StatesAsTheyAre(CAAD):
    """Takes cosines of states without their common mean."""

    def mix(self, rows):
        self.grounding._mean = torch.zeros(WIDTH, dtype=torch.float64)
        self.grounding._keys = ENTRIES / ENTRIES.norm(dim=-1, keepdim=True)
        return super().mix(rows)


@pytest.mark.oracle("caad")
def test_caad_adds_the_mean_logits_of_similar_positions():
    check_caad(CAAD)


@pytest.mark.refuses("caad")
@pytest.mark.parametrize("wrong", [EveryEntryCounts, EvenlyWeighted, SumsTheEntries, StatesAsTheyAre])
def test_a_wrong_caad_is_refused(wrong):
    refused(check_caad, wrong)
