"""EvoPress: dropped blocks equal a smaller model, and the search finds what enumeration finds."""
from __future__ import annotations

from itertools import combinations, product
from random import Random

import pytest
import torch
from registry import Collapse
from runs import run
from tables import write

from playground.contract import find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Note
from playground.training.calibration import CalibrationTexts
from strategies.adaptive_compute.evopress.drop_search import Dropped, SearchSizes, mutated, random_state, search
from support.compute_runs import PROMPT, deep, deep_network, policy_lane

COLLAPSES = {
    "evopress": [
        Collapse(policy_lane("evopress", sparsity=0.0), LaneConfig("greedy")),
        Collapse(policy_lane("evopress", "sample", sparsity=0.0), LaneConfig("sample")),
    ],
}
EVOPRESS = find("evopress")
Divergence = EVOPRESS.calibrate.__func__.__globals__["Divergence"]
TEXTS = [[5, 9, 2, 7, 7, 1, 30, 31], [17, 3, 3, 8, 90], list(range(40, 60))]


def dropped_by_hand(state: Dropped):
    """The library's network whose dropped blocks have output projections of zeros, which add nothing."""
    network = deep_network()
    for layer in state.attention:
        network.model.layers[layer].self_attn.o_proj.weight.data.zero_()
    for layer in state.ffn:
        network.model.layers[layer].mlp.down_proj.weight.data.zero_()
    return network


def library_text(network, length: int) -> list[int]:
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(length):
            ids.append(int(network(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids


CASES = {
    "2 attn, 4 mlp": Dropped(frozenset({2}), frozenset({4})),
    "0 attn+mlp, 5 mlp": Dropped(frozenset({0}), frozenset({0, 5})),
    "1 attn\n3 attn+mlp\n4 attn": Dropped(frozenset({1, 3, 4}), frozenset({3})),
}


@pytest.mark.oracle("evopress")
@pytest.mark.parametrize("blocks, state", CASES.items(), ids=CASES)
def test_the_text_is_that_of_the_librarys_model_whose_dropped_blocks_add_nothing(blocks, state):
    lane = write(assemble(policy_lane("evopress", blocks=blocks)), {"target": deep()}, PROMPT, Limits(0, 12), Draws(0))
    assert lane.tokens == library_text(dropped_by_hand(state), 12)
    store = lane.target.store
    assert [bool(keys.heads) for keys in store.keys] == [layer not in state.attention for layer in range(6)]
    held = 6 - len(state.attention)
    assert store.bytes() == store.length * held * 2 * 2 * 8 * 8, "layers without attention hold no keys and values"


class DropsTheNextBlock(EVOPRESS):
    """Leaves out the neighbours of the blocks."""

    def begin(self, parts, weights):
        super().begin(parts, weights)
        self._dropped = Dropped(*(frozenset((layer + 1) % parts.depth for layer in each) for each in self._dropped))


@pytest.mark.refuses("evopress")
def test_the_librarys_model_refuses_other_blocks():
    for blocks, state in CASES.items():
        policy = DropsTheNextBlock(blocks=blocks)
        lane = write(Assembly(make("greedy"), compute_policy=policy), {"target": deep()}, PROMPT, Limits(0, 12),
                     Draws(0))
        assert lane.tokens != library_text(dropped_by_hand(state), 12)


def divergence(state: Dropped) -> float:
    """KL of the dropped model from the whole one, per token, from the library's logits."""
    total = count = 0.0
    with torch.no_grad():
        for ids in TEXTS:
            whole, part = (network(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
                           for network in (deep_network(), dropped_by_hand(state)))
            total, count = total + float((whole.exp() * (whole - part)).sum()), count + len(ids) - 1
    return total / count


@pytest.mark.oracle("evopress")
def test_the_fitness_is_the_divergence_of_the_librarys_distributions():
    fitness = Divergence(CalibrationTexts(deep(), TEXTS), 0)
    assert fitness(list(CASES.values()), 10 ** 6) == pytest.approx([divergence(state) for state in CASES.values()],
                                                                   rel=1e-6)


def scripted(depth: int = 6, seed: int = 0):
    """A fitness with interactions: a random number for every block, and for every pair of layers."""
    chance = Random(seed)
    single = {(kind, layer): chance.random() for kind in (0, 1) for layer in range(depth)}
    joint = {pair: chance.uniform(-0.5, 0.5) for pair in product(range(depth), repeat=2)}

    def fitness(states, tokens):
        return [sum(single[kind, layer] for kind in (0, 1) for layer in state[kind])
                + sum(joint[pair] for pair in product(sorted(state.attention), sorted(state.ffn))) for state in states]
    return fitness


@pytest.mark.oracle("evopress")
def test_the_search_finds_the_best_of_all_states_in_nine_of_ten_seeds():
    states = [Dropped(frozenset(a), frozenset(b)) for a, b in product(combinations(range(6), 2), repeat=2)]
    hits = blind = 0
    for seed in range(10):
        fitness = scripted(seed=seed)
        best = min(states, key=lambda state: fitness([state], 0)[0])
        hits += list(search(6, 2, fitness, SearchSizes(generations=20), seed))[-1][0] == best
        blind += list(search(6, 2, fitness, SearchSizes(starts=4, offspring=1, generations=1), seed))[-1][0] == best
    assert hits >= 9
    assert blind < 5, "hardly any search would not do"


def test_with_the_same_tokens_the_best_fitness_never_rises():
    values = [value for _, value in search(6, 2, scripted(seed=3), SearchSizes(starts=2, offspring=2), 1)]
    assert values == sorted(values, reverse=True)


def test_every_state_drops_exactly_as_many_of_either_kind():
    chance, state, seen = Random(0), random_state(8, 3, Random(0)), set()
    for _ in range(200):
        state = mutated(state, 8, 3, chance)
        seen.add(state)
        assert len(state.attention) == len(state.ffn) == 3
    assert len(seen) > 100


@pytest.mark.slow
def test_calibration_finds_a_block_that_adds_nothing():
    network = deep_network()
    network.model.layers[2].mlp.down_proj.weight.data.zero_()
    network.model.layers[4].self_attn.o_proj.weight.data.zero_()
    events = EVOPRESS.calibrate(CalibrationTexts(Model(network, deep().tokenizer, "llama"), TEXTS), 0)
    notes = []
    while True:
        try:
            event = next(events)
            notes += [event.text] if isinstance(event, Note) else []
        except StopIteration as end:
            found = end.value
            break
    assert notes[0] == "1 of 6: 2 mlp, 4 attn"
    assert sorted(found) == ["1", "2", "3"] and [int(masks.sum()) for masks in found.values()] == [2, 4, 6]


@pytest.mark.slow
def test_the_sparsity_selects_the_result_of_the_search(monkeypatch):
    from playground.decoding import fitted_weights as fitted
    masks = {"1": torch.zeros(2, 6, dtype=torch.bool), "3": torch.zeros(2, 6, dtype=torch.bool)}
    masks["1"][0, 2] = masks["1"][1, 4] = True
    masks["3"][:, 1:4] = True
    monkeypatch.setattr(fitted, "find_all", lambda parts, models, given=None: {part.name: masks for part in parts})
    for sparsity, state in ((0.1875, "2 attn, 4 mlp"), (0.375, "2 attn, 4 mlp"), (0.5, "1 attn+mlp, 2 attn+mlp, "
                                                                                     "3 attn+mlp")):
        by_search, _ = run(policy_lane("evopress", sparsity=sparsity), {"target": deep()}, PROMPT, 10)
        by_hand, _ = run(policy_lane("evopress", blocks=state), {"target": deep()}, PROMPT, 10)
        assert by_search.tokens == by_hand.tokens


@pytest.mark.parametrize("blocks, message", [
    ("3 attention", "is no block"), ("mlp", "is no block"), ("7 mlp", "There is no layer 7"),
])
def test_blocks_that_do_not_exist_are_refused(blocks, message):
    with pytest.raises(Refusal, match=message):
        run(policy_lane("evopress", blocks=blocks), {"target": deep()}, PROMPT, 4)


def test_a_cache_policy_beside_layers_without_attention_is_refused():
    with pytest.raises(Refusal, match="needs the keys and values of every layer"):
        assemble(LaneConfig("greedy", {}, [("h2o", {}), ("evopress", {})]))
