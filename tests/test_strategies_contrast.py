"""Rows held against other rows, and against texts a model has read: DoLa, ICD, LOL, kNN-LM, CAAD, anchored decoding. Each is reckoned again plainly."""
from __future__ import annotations

import copy
import math

import pytest
import torch
from pairs import network, pair
from registry import Collapse
from tables import TableModel, distance, law, prepared, product_law
from test_strategies_adaptive import divergence as jensen_shannon_by_definition
from test_strategies_adaptive import figures, random_rows, run, told, written
from torch import Tensor

from playground.errors import Refusal
from playground.events import Done, Note
from playground.parts import plausible
from playground.recipe import Recipe
from playground.session import Prompt
from playground.strategy import Inner, find, make
from strategies.sampling import anchored as anchoring
from strategies.sampling.caad import Grounding
from strategies.sampling.dola import candidates, mixture_first
from strategies.sampling.knn_lm import Store

GREEDY, MODEL = Recipe("greedy"), Recipe("greedy", {}, [("temperature", {"t": 1.0})])
PROMPT = [54, 71, 71, 9]


def alone(name: str, **knobs) -> Recipe:
    return Recipe("greedy", {}, [(name, knobs)])


def anchored(**knobs) -> Recipe:
    return Recipe("anchored", knobs)


COLLAPSES = {
    "dola": [Collapse(alone("dola", alpha=1.0), GREEDY), Collapse(alone("dola", layers="one", at=1.0, norm=True), GREEDY)],
    "icd": [Collapse(alone("icd", rho=1.0), GREEDY)],
    "lol": [Collapse(alone("lol", omega=0.0, gamma=-1.0), alone("icd")), Collapse(alone("lol", omega=0.0, gamma=-1.0, rho=0.3), alone("icd", rho=0.3)),
            Collapse(alone("lol", gamma=-1.0, layer=1.0), alone("icd")), Collapse(alone("lol", rho=1.0), GREEDY)],
    "knn_lm": [Collapse(alone("knn_lm", lam=0.0), GREEDY), Collapse(Recipe("greedy", {}, [("knn_lm", {"lam": 0.0}), ("temperature", {"t": 1.0})]), MODEL)],
    "caad": [Collapse(alone("caad", alpha=0.0), GREEDY), Collapse(alone("caad", tau=1.0), GREEDY)],
    "anchored": [Collapse(anchored(k=0.0), MODEL, on="draft"), Collapse(anchored(k=20.0, debt=False), MODEL),
                 Collapse(anchored(k=0.2, debt=False), MODEL, twins=True)],
}


def library_states(ids: list[int], architecture: str = "llama") -> tuple[Tensor, ...]:
    """What enters each layer at the last token, and after all what the head reads, [d] each."""
    with torch.no_grad():
        return tuple(states[0, -1] for states in network(architecture)(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states)


def contrasted(logp: list[float], weaker: list[float], share: float) -> int:
    """The token with the largest difference among those with at least this share of the best one's probability."""
    return max((v for v in range(len(logp)) if math.exp(logp[v]) >= share * math.exp(max(logp))), key=lambda v: logp[v] - weaker[v])


# --- what competes ---

def test_tokens_compete_that_have_a_share_of_the_best_ones_probability():
    logits = torch.tensor([[0.5, 0.3, 0.05, 0.15]], dtype=torch.float64).log()
    for share, competing in [(0.0, [0, 1, 2, 3]), (0.1, [0, 1, 2, 3]), (0.2, [0, 1, 3]), (0.5, [0, 1]), (1.0, [0])]:
        assert plausible.plausible(logits, share)[0].nonzero().flatten().tolist() == competing


def test_where_nothing_differs_the_likeliest_comes_first_and_not_the_lowest_id():
    logits = random_rows(1)
    assert torch.equal(plausible.among(torch.zeros_like(logits), logits, 0.1).argmax(-1), logits.argmax(-1))
    assert not torch.equal(torch.where(plausible.plausible(logits, 0.1), 0.0, -math.inf).argmax(-1), logits.argmax(-1))


def test_implausible_tokens_are_never_drawn_but_keep_the_models_order_for_a_grammar_that_leaves_no_other():
    logits = random_rows(2)
    kept, scores = plausible.plausible(logits, 0.1), plausible.among(random_rows(3), logits, 0.1)
    assert bool(((scores / 2).softmax(-1)[~kept] == 0).all())
    left = ~kept
    assert torch.equal(scores.masked_fill(~left, -math.inf).argmax(-1), logits.masked_fill(~left, -math.inf).argmax(-1))


# --- DoLa ---

@pytest.mark.parametrize("depth, tied, low, high", [
    (8, False, [0, 2], [4, 6]), (8, True, [2], [4, 6]), (32, False, list(range(0, 16, 2)), list(range(16, 32, 2))),
    (48, True, list(range(2, 20, 2)), list(range(28, 48, 2))), (3, False, [0], [1]), (2, True, [1], [1]), (1, True, [0], [0]),
])
def test_the_candidates_are_those_of_the_library(depth, tied, low, high):
    assert candidates("low", 0.5, depth, tied) == low and candidates("high", 0.5, depth, tied) == high


def test_one_layer_is_a_share_of_all():
    assert [candidates("one", share, 8, True) for share in (0.0, 0.5, 1.0)] == [[0], [4], [8]]


def as_released(q: list[float], e: list[float]) -> float:
    """The divergence of the authors' code: of the mixture from each row."""
    return sum(0.5 * m * (math.log(m / a) + math.log(m / b)) for a, b in zip(q, e) for m in [(a + b) / 2])


def test_the_divergence_has_the_mixture_first_and_is_no_jensen_shannon_divergence():
    z1, z2 = random_rows(2), random_rows(3)
    pairs_ = list(zip(z1.softmax(-1).tolist(), z2.softmax(-1).tolist()))
    assert mixture_first(z1, z2).tolist() == pytest.approx([as_released(p, q) for p, q in pairs_])
    assert all(as_released(p, q) > jensen_shannon_by_definition(p, q) + 1e-3 for p, q in pairs_)


@pytest.mark.parametrize("name, measure", [("mixture first", as_released), ("Jensen-Shannon", jensen_shannon_by_definition)])
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
        kept = plausible.plausible(rows["target"][i], 0.1)
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


@pytest.mark.parametrize("knobs, layer, norm", [({"layers": "high"}, 1, False), ({"layers": "low", "norm": True}, 0, True),
                                                ({"layers": "one", "at": 0.67, "norm": True}, 2, True)])
def test_the_inner_layers_of_a_network_are_what_the_library_reads_from_the_beginning(knobs, layer, norm):
    found = written(alone("dola", **knobs), {"target": pair().target}, PROMPT, 8)
    assert found == dola_text(len(found), layer, norm)


def test_a_faulty_contrast_of_layers_writes_another_text():
    found = written(alone("dola"), {"target": pair().target}, PROMPT, 8)
    for fault in ({"layer": 2, "norm": False}, {"layer": 1, "norm": True}, {"layer": 1, "norm": False, "share": 0.0},
                  {"layer": 1, "norm": False, "flipped": True}):
        assert dola_text(8, **fault) != found, fault


def test_dola_shows_every_candidate_and_costs_no_forward():
    model = TableModel("abcde")
    _, events = run(alone("dola"), {"target": model}, [0, 1], 6)
    assert model.forwards == 6
    assert [len(data["labels"]) for data in figures(events, "first choice of each layer, by divergence")] == [1] * 6
    assert all(1 <= data["series"]["tokens"] <= 5 for data in figures(events, "plausible tokens"))


# --- induce, then contrast; and LOL ---

def test_both_streams_are_read_from_the_beginning_and_the_first_is_held_against_the_second():
    for seed in range(5):
        model, text = TableModel("abcde", seed=seed), []
        for _ in range(10):
            p, a = (model.scores((*prompt, *text)).log_softmax(-1).tolist() for prompt in ([0, 1, 2], [3, 2]))
            text.append(contrasted(p, a, 0.1))
        assert written(alone("icd"), {"target": model}, [0, 1, 2], 10, other=[3, 2]) == text
    assert any(written(alone("icd"), {"target": TableModel("abcde", seed=s)}, [3, 2], 10, other=[0, 1, 2])
               != written(alone("icd"), {"target": TableModel("abcde", seed=s)}, [0, 1, 2], 10, other=[3, 2]) for s in range(5))


SAID = Prompt("The green bird")


@pytest.mark.parametrize("chat", [False, True])
def test_the_second_stream_reads_the_instruction_before_the_question(chat):
    prompt = Prompt("The green bird", chat=chat, context="A bird.")
    whole = prompt.instructed("Sing.").whole()
    assert whole.endswith("Sing. The green bird" if chat else "Sing.\nThe green bird") and "A bird." in whole
    assert prompt.instructed("  ") == prompt


def test_an_instruction_matters_and_without_one_the_text_is_greedys():
    greedy = told(GREEDY, SAID)[0]
    assert told(alone("icd", instruction=""), SAID)[0] == greedy != told(alone("icd"), SAID)[0]
    for gamma in (-1.0, 0.0, 2.0):  # an empty call for truth changes nothing, however it is amplified
        assert told(alone("lol", refocus="", gamma=gamma, omega=0.0), SAID)[0] == told(alone("icd"), SAID)[0]


def test_lol_adds_up_the_last_layer_the_lower_layer_and_the_call_for_truth():
    lol = make("lol", omega=0.5, gamma=0.5, layer=0.75)
    own, induced = lol.inner(8, True)
    assert (own, induced) == (Inner("target", 6), Inner("induced", 6))
    rows = {name: random_rows(seed) for seed, name in enumerate(["target", "induced", "refocused", own, induced])}
    p, a, r, pl, al = (rows[name].log_softmax(-1) for name in ["target", "induced", "refocused", own, induced])
    expected, kept = 1.5 * r - 0.5 * p - a + 0.5 * (pl - al), plausible.plausible(rows["target"], 0.1)
    assert (lol.mix(rows) - expected)[kept].abs().max() < 1e-4
    for wrong in (1.5 * r - 0.5 * p - a, 1.5 * r - 0.5 * p - a + 0.5 * (al - pl), r - a + 0.5 * (pl - al)):
        assert (lol.mix(rows) - wrong)[kept].abs().max() > 0.1


def test_samplers_that_read_different_layers_do_not_mix_them_up():
    both = Recipe("greedy", {}, [("dola", {"layers": "low"}), ("lol", {"rho": 1.0})])
    _, events = told(both, SAID)
    assert isinstance(events[-1], Done)
    assert {label.split(":")[0] for data in figures(events, "first choice of each layer, by divergence") for label in data["labels"]} == {"layer 0"}


# --- kNN-LM ---

TEXT = "The green bird sings, and the red fox listens. The red bird sings, and the green fox sleeps."


def knn(model=None, **knobs):
    """The sampler with its store, of a network that read the text."""
    return prepared([make("knn_lm", text=TEXT, **knobs)], {"target": model or pair().target}, PROMPT)[0]


def ids_of(text: str) -> list[int]:
    return pair().target.tokens.encode(text)


def test_every_place_is_its_own_nearest_neighbour_and_holds_the_token_that_comes_next():
    store, ids = knn().store, ids_of(TEXT)
    distances, at = store.nearest(store.keys, 1)
    assert at[:, 0].tolist() == list(range(len(ids) - 1)) and float(distances.max()) == 0
    assert store.values.tolist() == ids[1:]
    with torch.inference_mode():
        assert (store.keys[4] - library_states(ids[:5])[-1]).abs().max() < 1e-5


def test_a_text_that_begins_like_the_stored_one_goes_on_like_it():
    ids = ids_of(TEXT)
    for lam, follows in [(0.99, True), (0.0, False)]:
        found = written(alone("knn_lm", text=TEXT, lam=lam, t=0.05), {"target": pair().target}, ids[:6], 10)
        assert (found == ids[6:16]) == follows


def test_the_votes_are_a_softmax_of_squared_distances_by_brute_force():
    sampler, states = knn(k=5, t=2.0), torch.randn(3, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    store, found = sampler.store, sampler.neighbours(states, 320).p
    for state, p in zip(states.tolist(), found):
        apart = sorted((sum((a - b) ** 2 for a, b in zip(state, key)), value) for key, value in zip(store.keys.tolist(), store.values.tolist()))[:5]
        weights = [math.exp(-(far - apart[0][0]) / (2.0 * store.scale)) for far, _ in apart]
        expected = torch.zeros(320, dtype=torch.float64)
        for weight, (_, value) in zip(weights, apart):
            expected[value] += weight / sum(weights)
        assert (p - expected).abs().max() < 1e-9
        roots = [math.exp(-(math.sqrt(far) - math.sqrt(apart[0][0])) / (2.0 * store.scale)) for far, _ in apart]
        assert max(abs(w / sum(weights) - r / sum(roots)) for w, r in zip(weights, roots)) > 1e-3  # distances that are not squared


def test_one_neighbour_is_certain_and_at_a_high_temperature_all_vote_alike():
    states = knn().store.keys[:4]
    assert knn(k=1).neighbours(states, 320).p.max(-1).values.tolist() == [1.0] * 4
    near = knn(k=8, t=20.0)
    object.__setattr__(near.store, "scale", 1e12)
    assert near.neighbours(states, 320).weights.flatten().tolist() == pytest.approx([1 / 8] * 32)


@pytest.mark.parametrize("lam", [0.25, 0.9])
def test_no_token_loses_more_than_the_share_of_the_neighbours(lam):
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
    sampler.store = Store(store.keys[order], store.ids, store.places[order])
    assert sampler.store.scale == pytest.approx(store.scale) and (sampler.neighbours(states, 320).p - before).abs().max() < 1e-12


def test_windows_know_nothing_of_each_other_and_none_says_what_follows_its_last_token():
    sampler = prepared([make("knn_lm", tokens=176, text="ab" * 88)], {"target": TableModel("ab")}, [0])[0]
    assert sampler.store.places.tolist() == [*range(127), *range(128, 175)]


def test_sequences_that_fork_share_what_was_read():
    assert copy.deepcopy(knn()).store is not None and copy.deepcopy(sampler := knn()).store is sampler.store


# --- kNN-LM: where it helps, and why its text is no better ---

def geometric(sampler, rows):
    """A mixture of logarithms: what one of the two rules out, nobody may say."""
    near = sampler.neighbours(rows["hidden"], rows["target"].shape[-1]).p.to(rows["target"])
    return ((1 - sampler.lam) * rows["target"].log_softmax(-1) + sampler.lam * near.log().clamp(min=-1e4)).log_softmax(-1)


def worst(sampler, mix) -> float:
    """By how much the likeliest loser falls below the share of the model, in nats; nothing where the promise is kept."""
    rows = {"target": random_rows(3, 20, 320), "hidden": random_rows(4, 20, 32)}
    return float((math.log(1 - sampler.lam) + rows["target"].log_softmax(-1) - mix(rows)).max())


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_promise_holds_for_a_mixture_of_probabilities_and_not_for_one_of_their_logarithms(adaptive):
    sampler = knn(lam=0.4, adaptive=adaptive)
    assert worst(sampler, sampler.mix) < 1e-9 < 1 < worst(sampler, lambda rows: geometric(sampler, rows))


def test_neighbours_that_disagree_are_trusted_less_and_those_of_one_mind_fully():
    states, logits = random_rows(4, 6, 32), random_rows(3, 6, 320)
    adaptive, plain = knn(lam=0.5, k=8, adaptive=True), knn(lam=0.5, k=8)
    near, rows = plain.neighbours(states, 320), {"target": logits, "hidden": states}
    shares = 0.5 * (1 - torch.special.entr(near.p).sum(-1) / math.log(8))[:, None]
    expected = (1 - shares) * logits.softmax(-1) + shares * near.p
    assert (adaptive.mix(rows).exp() - expected).abs().max() < 1e-9 and (plain.mix(rows).exp() - expected).abs().max() > 1e-3
    alone = {"adaptive": knn(k=1, adaptive=True), "plain": knn(k=1)}
    assert torch.equal(alone["adaptive"].mix(rows), alone["plain"].mix(rows))


LONGER = TEXT + " The old bird listens to the green fox, and the red bird sings to the old fox."


def test_the_text_it_is_held_against_is_the_one_that_follows_and_its_gains_are_those_of_the_tokens_that_come_next():
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
        assert float(effects.logps[i]) == pytest.approx(model_logp) and float(effects.gains[i]) == pytest.approx(float(mixed[i, token]) - model_logp)
    shown = [data["series"]["of the model's row"] for data in true_text(LONGER, 16)]
    assert shown == pytest.approx(effects.model.tolist(), abs=1e-4)
    one_off = sampler.effects(logits, states, ids[16:31])
    assert (one_off.gains - effects.gains).abs().max() > 1e-2


def true_text(text: str, held: int) -> list[dict]:
    """What is told of the entropies on text that follows the sixteen stored tokens."""
    _, events = told(alone("knn_lm", text=text, tokens=16, held=held), SAID)
    return figures(events, "true text: entropy, nats")


def test_nothing_is_held_against_a_text_that_is_stored_whole():
    assert not true_text(TEXT, 0) and not true_text("The green bird", 64)


def test_gains_split_into_those_helped_and_those_hurt_and_none_lies_beyond_the_wall():
    sampler, states = knn(lam=0.25), knn().store.keys
    effects = sampler.effects(random_rows(7, len(states), 320), states, sampler.store.values.tolist())
    split, bars = effects.split().data, effects.histogram(math.log(0.75)).data
    table = {name: dict(zip(split["columns"], row)) for name, row in zip(split["rows"], split["values"])}
    assert table["all"]["tokens"] == len(states) == sum(bars["values"])
    for half, other in (("helped", "hurt"), ("model sure", "model unsure"), ("neighbours sure", "neighbours unsure")):
        parts = [table[name] for name in (half, other) if name in table]
        assert sum(part["tokens"] for part in parts) == len(states)
        assert sum(part["tokens"] * part["mean gain"] for part in parts) == pytest.approx(len(states) * table["all"]["mean gain"])
    assert table["helped"]["mean gain"] > 0 and table["helped"]["with neighbours"] < table["helped"]["perplexity"]
    assert bool((effects.gains >= math.log(0.75) - 1e-9).all())


def test_growth_is_the_least_squares_slope_of_what_stands_and_forgets_what_was_taken_back():
    sampler = knn()
    for position, value in enumerate([9.0, 1.0, 2.0, 4.0, 3.0, 5.0, 5.0, 8.0, 7.0]):
        list(sampler._uncertain(position, value, 2 * value))
    told_again = list(sampler._uncertain(8, 1.0, 30.0))[-1].data["series"]
    expected = torch.linalg.lstsq(torch.stack([torch.arange(9.0), torch.ones(9)], 1), torch.tensor([9.0, 1, 2, 4, 3, 5, 5, 8, 1])[:, None]).solution
    assert told_again["of the model's row"] == pytest.approx(float(expected[0]), abs=1e-5)
    assert told_again["of the neighbours"] > told_again["of the model's row"]


def test_a_text_of_one_token_is_refused():
    _, events = told(alone("knn_lm", text="a"), SAID)
    assert "at least two tokens" in events[-1].message


# --- CAAD ---

GROUNDED = {"pairs": "The green bird => sings\nThe red fox => listens"}


def caad(**knobs):
    return prepared([make("caad", **GROUNDED, **knobs)], {"target": pair().target}, PROMPT)[0]


def test_a_place_is_known_again_by_its_own_state_and_gives_the_logits_the_model_had_there():
    sampler, model = caad(), pair().target
    ids = [*model.tokens.encode("The green bird"), *model.tokens.encode(" sings")]
    states = [library_states(ids[:end])[-1] for end in range(len(model.tokens.encode("The green bird")), len(ids))]
    for place, state in enumerate(states):
        similarities = sampler.grounding.similarities(state[None])[0]
        assert int(similarities.argmax()) == place and float(similarities[place]) == pytest.approx(1, abs=1e-5)
        assert (sampler.grounding.logits[place] - network("llama").lm_head(state)).abs().max() < 1e-5


def single(logits: Tensor, **knobs):
    sampler = make("caad", **knobs)
    sampler.grounding = Grounding(torch.randn(len(logits), 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64), logits, [""] * len(logits))
    return sampler


def test_one_entry_adds_alpha_times_its_logits():
    entry, z = random_rows(1, 1), random_rows(2, 5)
    rows = {"target": z, "hidden": random_rows(3, 5, 8)}
    assert torch.allclose(single(entry, tau=-1.0, alpha=0.7).mix(rows) - z, 0.7 * entry.expand(5, -1))
    assert torch.allclose(single(entry, tau=-1.0, alpha=0.7, mode="delta").mix(rows), 0.3 * z + 0.7 * entry)


def near_and_far(**knobs):
    """The distance between what a grounding of two entries gives and the mean of the nearer one alone, where the other lies opposite."""
    sampler, z = make("caad", alpha=0.5, tau=0.7, **knobs), random_rows(2, 1)
    states = torch.tensor([[1.0, 0.2], [-1.0, 0.2]], dtype=torch.float64)
    sampler.grounding = Grounding(states, random_rows(1, 2), ["near", "far"])
    mixed = sampler.mix({"target": z, "hidden": torch.tensor([[0.9, 0.2]], dtype=torch.float64)})
    return float((mixed - z - 0.5 * sampler.grounding.logits[0]).abs().max())


def test_only_what_is_similar_counts():
    assert near_and_far() < 1e-12


@pytest.mark.parametrize("broken", ["_weights", "_shaped"])
def test_a_wrong_grounding_is_found_out(broken, monkeypatch):
    wrong = {"_weights": lambda self, similarities: torch.full_like(similarities, 1 / similarities.shape[-1]),
             "_shaped": lambda self, logits, mean: logits + self.alpha * mean.softmax(-1)}
    monkeypatch.setattr(find("caad"), broken, wrong[broken])
    assert near_and_far() > 0.1


def test_where_nothing_is_similar_every_mode_leaves_the_model_alone():
    rows = {"target": random_rows(2, 5), "hidden": random_rows(3, 5, 8)}
    for mode in ("linear", "delta", "probabilities"):
        assert torch.equal(single(random_rows(1, 4), tau=1.0, mode=mode).mix(rows), rows["target"])


@pytest.mark.parametrize("knobs", [{}, {"weighted": False}, {"most": 2}], ids=str)
def test_weights_are_positive_and_sum_to_one_and_only_the_best_count(knobs):
    sampler = single(random_rows(1, 9), tau=-1.0, **knobs)
    similarities = sampler.grounding.similarities(random_rows(3, 20, 8))
    weights = sampler._weights(similarities)
    assert weights.sum(-1).tolist() == pytest.approx([1.0] * 20) and bool((weights >= 0).all())
    for row, similar in zip(weights, similarities):
        used = row > 0
        assert int(used.sum()) == knobs.get("most", 9) and float(similar[used].min()) >= float(similar[~used].max() if bool((~used).any()) else -1)


def test_a_constant_added_to_stored_logits_changes_nothing_and_mixed_probabilities_sum_to_one():
    rows = {"target": random_rows(2, 5), "hidden": random_rows(3, 5, 8)}
    for mode in ("linear", "delta", "probabilities"):
        plain, shifted = (single(random_rows(1, 9) + by, tau=-1.0, mode=mode).mix(rows).softmax(-1) for by in (0, 7))
        assert torch.allclose(plain, shifted)
    assert single(random_rows(1, 9), tau=-1.0, mode="probabilities").mix(rows).exp().sum(-1).tolist() == pytest.approx([1.0] * 5, abs=1e-5)


def test_at_a_stored_place_the_model_meets_its_own_logits_so_nothing_turns():
    knobs = {"pairs": "The green bird => sings", "tau": 0.95, "weighted": False, "alpha": 2.0}
    text, events = told(alone("caad", **knobs), SAID, length=1)
    assert figures(events, "entries averaged")[0]["series"]["entries"] == 1
    assert text == told(GREEDY, SAID, length=1)[0] and not [e for e in events if isinstance(e, Note) and "before" in e.text]


def test_settings_that_mean_nothing_are_refused():
    for knobs, said in [({"pairs": "no arrow"}, "question => answer"), ({"pairs": " "}, "at least one"), ({"alpha": 1.5, "mode": "delta"}, "exceed 1")]:
        with pytest.raises(Refusal, match=said):
            make("caad", **knobs)


# --- anchored decoding ---

def log_laws(seed: int, size: int = 6) -> tuple[Tensor, Tensor]:
    p, r = random_rows(seed, 2, size).log_softmax(-1)
    return p, r


def kl(q: dict, p: dict) -> float:
    """Of laws of whole texts, in nats."""
    return sum(chance * math.log(chance / p[text]) for text, chance in q.items() if chance > 0)


def test_the_divergence_from_the_safe_law_grows_with_theta_and_the_largest_theta_that_can_be_paid_is_taken():
    for seed in range(10):
        p, r = log_laws(seed)
        spent = [anchoring.divergence(anchoring.between(p, r, i / 200), p) for i in range(201)]
        assert all(a <= b + 1e-12 for a, b in zip(spent, spent[1:]))
        for budget in (0.01, 0.3, 1.0):
            theta, law_ = anchoring.nearest(p, r, budget)
            best = max(i for i, cost in enumerate(spent) if cost <= budget) / 200
            assert best <= theta < best + 0.006 and anchoring.divergence(law_, p) <= budget


def test_no_other_law_within_the_budget_is_closer_to_the_risky_one():
    p, r = log_laws(3)
    _, best = anchoring.nearest(p, r, 0.3)
    others = [other for other in random_rows(8, 4000, 6).log_softmax(-1) if anchoring.divergence(other, p) <= 0.3]
    nearby = [((1 - mix) * best.exp() + mix * other.exp()).log() for other in others for mix in (0.05, 0.3)]
    allowed = [other for other in others + nearby if anchoring.divergence(other, p) <= 0.3]
    assert len(allowed) > 20
    assert all(anchoring.divergence(other, r) >= anchoring.divergence(best, r) - 1e-9 for other in allowed)


def test_at_the_ends_it_is_one_of_the_two_models_and_removed_tokens_stay_removed():
    p, r = log_laws(4)
    assert anchoring.nearest(p, r, 0.0) == (0.0, p) and anchoring.nearest(p, r, 50.0) == (1.0, r) and anchoring.nearest(p, p, 0.1)[0] == 1.0
    gone = torch.tensor([True, False, False, False, False, False])
    masked_p, masked_r = (row.masked_fill(gone, -math.inf).log_softmax(-1) for row in (p, r))
    theta, law_ = anchoring.nearest(masked_p, masked_r, 0.2)
    assert 0 < theta < 1 and float(law_[0]) == -math.inf and not bool(law_.isnan().any())
    theta, law_ = anchoring.nearest(masked_p, r, 0.2)  # the safe model cannot write a token the risky one likes
    assert theta < 1 and float(law_[0]) == -math.inf and anchoring.divergence(law_, masked_p) <= 0.2


@pytest.mark.parametrize("k", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("indebted", [False, True])
def test_whole_texts_stay_within_the_budget_of_the_safe_models_law(k, indebted):
    models, prompt = {"target": TableModel("abcd", seed=2), "draft": TableModel("abcd", seed=5)}, [0, 1, 3, 2]
    found, safe = law(anchored(k=k, debt=indebted, n=2), models, prompt, 3), product_law(models["draft"], prompt, 3)
    owed = debt_by_hand(models, prompt, 2) if indebted else 0.0
    assert kl(found, safe) <= max(0.0, 3 * k - owed) + 1e-9
    assert kl(found, safe) > 0.5 * max(0.0, 3 * k - owed), "hardly anything is spent, so the bound says nothing"
    assert sum(found.values()) == pytest.approx(1)


def debt_by_hand(models: dict, prompt: list[int], count: int) -> float:
    gains = []
    for end in range(1, len(prompt)):
        risky, safe = (models[name].scores(tuple(prompt[:end])).log_softmax(-1)[prompt[end]] for name in ("target", "draft"))
        gains.append(max(0.0, float(risky - safe)))
    return sum(sorted(gains)[-count:]) / count


WRONG = {
    "divergence the wrong way round": lambda q, p, right=anchoring.divergence: right(p, q),
    "half of what is spent": lambda q, p, right=anchoring.divergence: right(q, p) / 2,
    "the largest difference alone": lambda q, p: max(0.0, float((q.exp() * (q - p)).max())) / 2,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_account_breaks_the_bound(wrong, monkeypatch):
    monkeypatch.setattr(anchoring, "divergence", wrong)
    over = []
    for seed in range(4):
        models, prompt = {"target": TableModel("abcd", seed=seed), "draft": TableModel("abcd", seed=seed + 9)}, [0, 1, 3, 2]
        over.append(kl(law(anchored(k=0.3, debt=False), models, prompt, 2), product_law(models["draft"], prompt, 2)) - 0.6)
    assert max(over) > 1e-3


def test_what_is_not_spent_is_saved_and_no_step_overdraws():
    models = {"target": TableModel("abcd", seed=2), "draft": TableModel("abcd", seed=5)}
    _, events = run(anchored(k=0.2, debt=False), models, [0, 1], 12)
    account, spent = [data["series"] for data in figures(events, "account, nats")], 0.0
    for step, entry in enumerate(account, 1):
        assert entry["could be spent"] == pytest.approx(0.2 * step - spent)
        spent += entry["spent on this token"]
        assert spent <= 0.2 * step + 1e-9 and entry["left"] == pytest.approx(0.2 * step - spent)
    assert max(entry["spent on this token"] for entry in account) > 0.2  # some step spent what others had saved


def test_a_prompt_that_the_risky_model_knows_by_heart_starts_in_debt_and_the_safe_model_writes_until_it_is_paid():
    by_heart = TableModel("abcd", rule=lambda text: torch.eye(4, dtype=torch.float64)[(text[-1] + 1) % 4] * 4)
    models = {"target": by_heart, "draft": TableModel("abcd", seed=5, spread=0.1)}
    _, events = run(anchored(k=0.3), models, [0, 1, 2, 3, 0, 1], 8)
    owed = debt_by_hand(models, [0, 1, 2, 3, 0, 1], 5)
    thetas = [data["series"]["theta"] for data in figures(events, "from safe (0) to risky (1)")]
    assert owed > 1 and [theta == 0 for theta in thetas] == [0.3 * (step + 1) <= owed for step in range(8)]
    assert f"{owed:.2f} nats" in next(event.text for event in events if isinstance(event, Note))


def test_the_debt_is_the_mean_of_the_largest_gains_with_missing_ones_counted_as_zero():
    assert anchoring.debt([3.0, -1.0, 1.0, 2.0], 2, 5) == 2.5
    assert anchoring.debt([3.0, -1.0], 5, 6) == pytest.approx(0.6)
    assert anchoring.debt([], 5, 1) == 0.0


def test_temperature_acts_on_both_models_before_they_meet():
    models, prompt = {"target": TableModel("abc", seed=2), "draft": TableModel("abc", seed=5)}, [0, 1]
    found = law(anchored(k=0.0, t=0.5), models, prompt, 2)
    assert distance(found, product_law(models["draft"], prompt, 2, lambda scores, history: scores / 0.5)) < 1e-9
