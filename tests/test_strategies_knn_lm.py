"""kNN-LM: rows mixed with the tokens after similar states of stored texts. Compared with a plain computation."""
from __future__ import annotations

import copy
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pairs import library_states, network, pair
from registry import Collapse
from runs import alone, figures, random_rows, recorded, written
from tables import TableModel, prepared

from playground.contract import Sampler, make
from playground.contract.lane_config import LaneConfig
from playground.decoding.prompt import Prompt
from playground.decoding.stream import Piece
from strategies.sampling.knn_lm import Datastore
from support.contrast_oracles import KNNLM, WIDTH, Row, V, drawn, softmax
from support.stored_texts import squared
from support.wrong_variants import refused

GREEDY, MODEL = LaneConfig("greedy"), LaneConfig("greedy", {}, [("temperature", {"t": 1.0})])
PROMPT = [54, 71, 71, 9]


BRIEF = {"knn_lm": {"tokens": 16, "held": 0}}
COLLAPSES = {
    "knn_lm": [
        Collapse(alone("knn_lm", lam=0.0), GREEDY),
        Collapse(LaneConfig("greedy", {}, [("knn_lm", {"lam": 0.0}), ("temperature", {"t": 1.0})]), MODEL),
    ],
}


SAID = Prompt("The green bird")


# --- kNN-LM ---

TEXT = "The green bird sings, and the red fox listens. The red bird sings, and the green fox sleeps."


def knn(model=None, **knobs):
    """The sampler with its datastore of a text, built with a network."""
    return prepared([make("knn_lm", text=TEXT, **knobs)], {"target": model or pair().target}, PROMPT)[0]


def ids_of(text: str) -> list[int]:
    return pair().target.tokens.encode(text)


def test_every_stored_position_is_its_own_nearest_neighbour_with_the_next_token():
    store, ids = knn().store, ids_of(TEXT)
    distances, at = store.nearest(store.keys, 1)
    assert at[:, 0].tolist() == list(range(len(ids) - 1)) and float(distances.max()) == 0
    assert store.values.tolist() == ids[1:]
    with torch.inference_mode():
        assert (store.keys[4] - library_states(ids[:5])[-1]).abs().max() < 1e-5


def test_a_text_that_begins_like_the_stored_one_continues_like_it():
    ids = ids_of(TEXT)
    for lam, follows in [(0.99, True), (0.0, False)]:
        found = written(alone("knn_lm", text=TEXT, lam=lam, t=0.05), {"target": pair().target}, ids[:6], 10)
        assert (found == ids[6:16]) == follows


def test_logits_of_the_stored_text_are_dropped_once_its_hidden_states_are_read():
    """Four windows are read; while one is, no earlier logits [128, V] are alive."""
    lm = SimpleNamespace(context=512, spell=lambda text: list(range(500)), reading=lambda window: [window])
    reading, alive = make("knn_lm", text=TEXT, tokens=512, held=0).prepare(lm), []
    window = next(reading)
    while isinstance(window, list):
        assert all(logits() is None for logits in alive[:-1])
        piece = Piece(window, torch.zeros(len(window), 7), torch.randn(len(window), 3))
        alive.append(weakref.ref(piece.logits))
        window = reading.send(piece)
    assert len(alive) == 4


@pytest.mark.oracle("knn_lm")
def test_the_votes_are_a_softmax_of_squared_distances_by_brute_force():
    sampler, states = (
        knn(k=5, t=2.0),
        torch.randn(3, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    )
    store, found = sampler.store, sampler.neighbours(states, 320).p
    for state, p in zip(states.tolist(), found):
        apart = sorted(
            (sum((a - b) ** 2 for a, b in zip(state, key)), value)
            for key, value in zip(store.keys.tolist(), store.values.tolist())
        )[:5]
        weights = [math.exp(-(far - apart[0][0]) / (2.0 * store.scale)) for far, _ in apart]
        expected = torch.zeros(320, dtype=torch.float64)
        for weight, (_, value) in zip(weights, apart):
            expected[value] += weight / sum(weights)
        assert (p - expected).abs().max() < 1e-9
        roots = [math.exp(-(math.sqrt(far) - math.sqrt(apart[0][0])) / (2.0 * store.scale)) for far, _ in apart]
        # distances that are not squared
        assert max(abs(w / sum(weights) - r / sum(roots)) for w, r in zip(weights, roots)) > 1e-3


def test_a_single_neighbour_has_weight_one_and_high_temperature_equalises_weights():
    states = knn().store.keys[:4]
    assert knn(k=1).neighbours(states, 320).p.max(-1).values.tolist() == [1.0] * 4
    near = knn(k=8, t=20.0)
    object.__setattr__(near.store, "scale", 1e12)
    assert near.neighbours(states, 320).weights.flatten().tolist() == pytest.approx([1 / 8] * 32)


@pytest.mark.parametrize("lam", [0.25, 0.9])
def test_no_token_loses_more_than_the_interpolation_weight(lam):
    sampler, logits = knn(lam=lam), random_rows(3, 20, 320)
    states = torch.randn(20, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mixed = sampler.mix({"target": logits, "hidden": states})
    assert bool((mixed >= math.log(1 - lam) + logits.log_softmax(-1) - 1e-9).all())
    assert mixed.exp().sum(-1).tolist() == pytest.approx([1.0] * 20)
    entropy = torch.special.entr(sampler.neighbours(states, 320).p).sum(-1)
    assert bool((entropy <= math.log(32) + 1e-9).all())


def test_with_neighbours_alone_only_stored_tokens_are_possible():
    mixed = knn(lam=1.0).mix({"target": random_rows(3, 6, 320), "hidden": random_rows(4, 6, 32)}).softmax(-1)
    assert set(mixed.sum(0).nonzero().flatten().tolist()) <= set(ids_of(TEXT)[1:])


def test_the_order_of_the_store_does_not_matter():
    store = knn().store
    order = torch.randperm(len(store.keys), generator=torch.Generator().manual_seed(0))
    sampler, states = knn(k=6), random_rows(5, 4, 32)
    before = sampler.neighbours(states, 320).p
    sampler.store = Datastore(store.keys[order], store.ids, store.places[order])
    assert (
        sampler.store.scale == pytest.approx(store.scale)
        and (sampler.neighbours(states, 320).p - before).abs().max() < 1e-12
    )


def test_windows_are_independent_and_their_last_positions_have_no_next_token():
    sampler = prepared([make("knn_lm", tokens=176, text="ab" * 88)], {"target": TableModel("ab")}, [0])[0]
    assert sampler.store.places.tolist() == [*range(127), *range(128, 175)]


def test_forked_sequences_share_the_stored_states():
    assert copy.deepcopy(knn()).store is not None and copy.deepcopy(sampler := knn()).store is sampler.store


# --- kNN-LM: on which tokens it helps ---

def geometric(sampler, rows):
    """A mixture of log-probabilities: a token that one of the two excludes is impossible."""
    near = sampler.neighbours(rows["hidden"], rows["target"].shape[-1]).p.to(rows["target"])
    return ((1 - sampler.lam) * rows["target"].log_softmax(-1) + sampler.lam * near.log().clamp(min=-1e4)).log_softmax(
        -1
    )


def worst(sampler, mix) -> float:
    """By how much the worst token falls below the model's share, in nats; 0 if the guarantee holds."""
    rows = {"target": random_rows(3, 20, 320), "hidden": random_rows(4, 20, 32)}
    return float((math.log(1 - sampler.lam) + rows["target"].log_softmax(-1) - mix(rows)).max())


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_guarantee_holds_for_mixed_probabilities_not_for_mixed_log_probabilities(adaptive):
    sampler = knn(lam=0.4, adaptive=adaptive)
    assert worst(sampler, sampler.mix) < 1e-9 < 1 < worst(sampler, lambda rows: geometric(sampler, rows))


def test_the_weight_falls_with_disagreement_of_the_neighbours():
    states, logits = random_rows(4, 6, 32), random_rows(3, 6, 320)
    adaptive, plain = knn(lam=0.5, k=8, adaptive=True), knn(lam=0.5, k=8)
    near, rows = plain.neighbours(states, 320), {"target": logits, "hidden": states}
    shares = 0.5 * (1 - torch.special.entr(near.p).sum(-1) / math.log(8))[:, None]
    expected = (1 - shares) * logits.softmax(-1) + shares * near.p
    assert (adaptive.mix(rows).exp() - expected).abs().max() < 1e-9 and (
        plain.mix(rows).exp() - expected
    ).abs().max() > 1e-3
    alone = {"adaptive": knn(k=1, adaptive=True), "plain": knn(k=1)}
    assert torch.equal(alone["adaptive"].mix(rows), alone["plain"].mix(rows))


LONGER = TEXT + " The old bird listens to the green fox, and the red bird sings to the old fox."


def test_gains_are_measured_on_the_tokens_of_the_held_out_continuation():
    ids, model = ids_of(LONGER), pair().target
    sampler = prepared([make("knn_lm", text=LONGER, tokens=16, held=16)], {"target": model}, PROMPT)[0]
    assert sampler.store.ids == ids[:16]
    with torch.inference_mode():
        states = torch.stack([library_states(ids[16:end])[-1] for end in range(17, 32)])
        logits = network("llama").lm_head(states).double()
        effects = sampler.effects(logits, states, ids[17:32])
        mixed = sampler.mix({"target": logits, "hidden": states})
    for i, token in enumerate(ids[17:32]):
        model_logp = float(logits[i].log_softmax(-1)[token])
        assert float(effects.logps[i]) == pytest.approx(model_logp) and float(effects.gains[i]) == pytest.approx(
            float(mixed[i, token]) - model_logp
        )
    shown = [data["series"]["of the model"] for data in true_text(LONGER, 16)]
    assert shown == pytest.approx(effects.model.tolist(), abs=1e-4)
    one_off = sampler.effects(logits, states, ids[16:31])
    assert (one_off.gains - effects.gains).abs().max() > 1e-2


def true_text(text: str, held: int) -> list[dict]:
    """Reported entropies on text that follows the sixteen stored tokens."""
    _, events = recorded(alone("knn_lm", text=text, tokens=16, held=held), SAID)
    return figures(events, "held-out text: entropy, nats")


def test_without_a_held_out_continuation_no_gains_are_reported():
    assert not true_text(TEXT, 0) and not true_text("The green bird", 64)


def test_gains_split_into_helped_and_hurt_tokens_within_the_bound():
    sampler, states = knn(lam=0.25), knn().store.keys
    effects = sampler.effects(random_rows(7, len(states), 320), states, sampler.store.values.tolist())
    split, bars = effects.split().data, effects.histogram(math.log(0.75)).data
    table = {name: dict(zip(split["columns"], row)) for name, row in zip(split["rows"], split["values"])}
    assert table["all"]["tokens"] == len(states) == sum(bars["values"])
    for half, other in (("helped", "hurt"), ("model sure", "model unsure"), ("neighbours sure", "neighbours unsure")):
        parts = [table[name] for name in (half, other) if name in table]
        assert sum(part["tokens"] for part in parts) == len(states)
        assert sum(part["tokens"] * part["mean gain"] for part in parts) == pytest.approx(
            len(states) * table["all"]["mean gain"]
        )
    assert table["helped"]["mean gain"] > 0 and table["helped"]["with neighbours"] < table["helped"]["perplexity"]
    assert bool((effects.gains >= math.log(0.75) - 1e-9).all())


def test_growth_is_the_least_squares_slope_without_rolled_back_tokens():
    sampler = knn()
    for position, value in enumerate([9.0, 1.0, 2.0, 4.0, 3.0, 5.0, 5.0, 8.0, 7.0]):
        list(sampler._entropies(position, value, 2 * value))
    later = list(sampler._entropies(8, 1.0, 30.0))[-1].data["series"]
    expected = torch.linalg.lstsq(
        torch.stack([torch.arange(9.0), torch.ones(9)], 1), torch.tensor([9.0, 1, 2, 4, 3, 5, 5, 8, 1])[:, None]
    ).solution
    assert later["of the model"] == pytest.approx(float(expected[0]), abs=1e-5)
    assert later["of the neighbours"] > later["of the model"]


def test_a_text_of_one_token_is_refused():
    _, events = recorded(alone("knn_lm", text="a"), SAID)
    assert "at least two tokens" in events[-1].message


def test_neighbours_at_one_place_leave_a_distribution_where_most_stored_states_are_equal():
    sampler = make("knn_lm", k=2)
    keys = torch.tensor([[0.0, 0.0]] * 9 + [[3.0, 0.0]])
    sampler.store = Datastore(keys, list(range(11)), torch.arange(10))
    near = sampler.neighbours(torch.tensor([[1.0, 0.0]]), 11)
    assert bool(near.p.isfinite().all()) and float(near.p.sum()) == pytest.approx(1.0)


IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]  # the text that is stored
KEYS = drawn(7, len(IDS) - 1, WIDTH)


def votes(state: Row, k: int, t: float) -> Row:
    """Softmax of negative squared distances over the k nearest states, summed by the token that followed each."""
    keys = KEYS.tolist()
    usual = sorted(min(squared(key, other) for other in keys if other is not key) for key in keys)[(len(keys) - 1) // 2]
    near = sorted((squared(state, key), place) for place, key in enumerate(keys))[:k]
    weights = [math.exp(-distance / (t * usual)) for distance, _ in near]
    return [sum(w for w, (_, at) in zip(weights, near) if IDS[at + 1] == v) / sum(weights) for v in range(V)]


def check_knn_lm(cls: type[Sampler]) -> None:
    """(1 - lam) p + lam p_kNN, as probabilities."""
    rows = {"target": drawn(0), "hidden": drawn(8, size=WIDTH)}
    for lam, k, t in ((0.25, 3, 1.0), (0.9, 1, 1.0), (0.5, 8, 5.0), (0.3, 1000, 2.0)):
        knn = cls(lam=lam, k=k, t=t)
        knn.store = Datastore(KEYS, IDS, torch.arange(len(IDS) - 1))
        expected = []
        for z, state in zip(rows["target"].tolist(), rows["hidden"].tolist()):
            expected.append([(1 - lam) * p + lam * q for p, q in zip(softmax(z), votes(state, k, t))])
        assert (knn.mix(rows).exp() - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-9


class MixesLogits(KNNLM):
    def mix(self, rows):
        near = self.neighbours(rows["hidden"], V).p.clamp(min=1e-9).log()
        return ((1 - self.lam) * rows["target"].log_softmax(-1) + self.lam * near).log_softmax(-1)


class FurthestNeighbours(KNNLM):
    def neighbours(self, states, vocabulary):
        return super().neighbours(-states, vocabulary)


class OneNeighbourMore(KNNLM):
    def neighbours(self, states, vocabulary):
        self.k += 1
        return super().neighbours(states, vocabulary)


class VotesForThePlaceItself(KNNLM):
    """Takes the token at a position for the one that follows it."""

    def neighbours(self, states, vocabulary):
        object.__setattr__(self.store, "values", torch.tensor(self.store.ids)[self.store.places])
        return super().neighbours(states, vocabulary)


class DistancesNotSquared(KNNLM):
    def neighbours(self, states, vocabulary):
        near = super().neighbours(states, vocabulary)
        weights = (-near.distances.sqrt() / (self.t * self.store.scale)).softmax(-1)
        p = torch.zeros_like(near.p).scatter_add(1, self.store.values[near.at], weights)
        return replace(near, p=p, weights=weights)


@pytest.mark.oracle("knn_lm")
def test_knn_lm_mixes_in_the_votes_of_the_nearest_neighbours():
    check_knn_lm(KNNLM)


@pytest.mark.refuses("knn_lm")
@pytest.mark.parametrize(
    "wrong", [MixesLogits, FurthestNeighbours, OneNeighbourMore, VotesForThePlaceItself, DistancesNotSquared]
)
def test_a_wrong_knn_lm_is_refused(wrong):
    refused(check_knn_lm, wrong)
