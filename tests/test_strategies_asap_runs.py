"""ASAp: how texts end, its trie, its events and costs, and what one run learns for the next."""
from __future__ import annotations

from collections import defaultdict, deque
from copy import deepcopy
from math import exp, log

import pytest
import torch
from pairs import pair
from tables import TableModel, distance

from playground.contract import find
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.rows import Rows
from playground.decoding.sampler_chain import Chain
from playground.decoding.session import prepare
from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from playground.events import Branches, Commit, Done, Event, Figure, Forward, Step
from strategies.constrained.asap.prefix_trie import NEVER, ROOT, PrefixTrie
from support.asap_trials import (
    COIN,
    END,
    START,
    TOKENIZER,
    Evenly,
    Spelt,
    choosing,
    coins,
    events,
    given_the_grammar,
    ids,
    languages,
    law,
    log_chance,
    one_lane,
    prefixes_of,
    table,
    taught,
    texts,
    trie_of,
    under,
    weights,
)
from support.laws import EXACT, WRONG

# --- how a text ends ---

def test_the_probability_of_the_end_counts_even_if_nothing_else_is_allowed():
    options, model = ["b", "ca"], table(8)
    ends = [float(model.scores((START, *ids(option))).softmax(-1)[END]) for option in options]
    assert abs(ends[0] - ends[1]) > WRONG
    memory = taught(choosing(*options, samples=20), model, Evenly())
    assert distance(law(choosing(*options, samples=1), model, memory), given_the_grammar(model, options)) < EXACT


def test_the_grammar_ends_the_text_of_a_model_without_end_tokens():
    model = table(0)
    model.end_ids, model.grammars.eos_ids = frozenset(), frozenset()
    lane = one_lane(choosing("ab", "cb", samples=4), model, Draws(0))
    assert lane.reason == "grammar" and lane.text in ("ab", "cb")


def test_a_truncated_text_teaches_nothing_about_its_end():
    model, memory = table(1), Memory()
    one_lane(choosing("abcab", "abcac", samples=6), model, Draws(0), memory, length=3)
    trie = trie_of(memory)
    cut = {prefix: node for node, prefix in prefixes_of(trie).items()}[ids("abc")]
    assert (trie.unseen[cut], trie.chances[cut]) == (None, 0.0)
    assert abs(trie.chances[ROOT] - log_chance(model, ids("abc"))) < EXACT


def test_the_answer_is_a_complete_text_if_one_was_found():
    model = TableModel(tokenizer=TOKENIZER, rule=lambda context: torch.zeros(len(TOKENIZER), dtype=torch.float64))
    for samples, endings in ((1, {("a", "end"), ("bbb", "length")}), (2, {("a", "end")})):
        lanes = [one_lane(choosing("a", "bbbbbb", samples=samples), model, Draws(seed), length=3) for seed in range(12)]
        assert {(lane.text, lane.reason) for lane in lanes} == endings


def test_the_answer_may_be_the_most_probable_text_found():
    options, model = languages()[1], table(1)
    lane = one_lane(choosing(*options, samples=80, text="most probable"), model, Draws(0))
    assert tuple(lane.main.written) == max(weights(model, options).items(), key=lambda item: item[1])[0]


# --- dead ends ---

def blocked(*prefixes: str):
    """A model that writes a, b and the end with equal chance, but never an x, which is the only way on after these
    prefixes.
    """
    def scores(context: Spelt) -> torch.Tensor:
        row = torch.full((len(TOKENIZER),), NEVER, dtype=torch.float64)
        row[[*ids("ab"), END]] = 0.0
        return row
    return TableModel(tokenizer=TOKENIZER, rule=scores), [prefix + "x" for prefix in prefixes]


def test_a_dead_end_is_learned_and_the_sample_repeated():
    model, dead = blocked("a", "ba")
    assert law(choosing("bb", *dead, samples=1), model) == pytest.approx({(*ids("bb"), END): 1.0})
    memory = Memory()
    one_lane(choosing("bb", *dead, samples=20), model, Draws(0), memory)
    found = {prefix: trie_of(memory).chances[node] for node, prefix in prefixes_of(trie_of(memory)).items()}
    assert found[ids("a")] == found[ids("ba")] == NEVER
    assert abs(found[()] - 3 * log(1 / 3)) < EXACT


def test_a_grammar_of_dead_ends_only_is_refused_in_one_sentence():
    model, dead = blocked("a", "ba", "bb")
    with pytest.raises(Refusal, match="dead ends only, where it allows no token: loosen it"):
        one_lane(choosing(*dead), model, Draws(0))


def test_a_row_without_allowed_tokens_is_no_error_for_a_decoder_that_owns_the_grammar():
    class Blocked:
        state = "dead end"

        def masks_of_tree(self, tokens, parents):
            return torch.zeros(1, 3, dtype=torch.bool)

    lane = one_lane(LaneConfig("greedy"), TableModel("abc"), Draws(0), length=1)
    lane.main.chain = Chain(matcher=Blocked(), masking=False)
    assert not Rows("target", torch.zeros(1, 3), lane.main, lane.target.seen.tree).masks.any()
    lane.main.chain = Chain(matcher=Blocked())
    with pytest.raises(Refusal, match="allows no token of this model here"):
        Rows("target", torch.zeros(1, 3), lane.main, lane.target.seen.tree)


# --- the trie alone ---

def uniform(*allowed: int) -> torch.Tensor:
    """Four tokens of equal probability, of which these are allowed."""
    return torch.tensor([log(1 / 4) if token in allowed else NEVER for token in range(4)], dtype=torch.float64)


def test_the_trie_weighs_each_token_by_the_probability_of_a_valid_continuation():
    trie = PrefixTrie()
    inner = trie.descend(ROOT, uniform(0, 1, 2), 1)
    trie.learn(inner, uniform(3))
    trie.settle(inner)
    assert trie.weigh(ROOT, uniform(0, 1, 2)).exp().tolist() == pytest.approx([1 / 4, 1 / 16, 1 / 4, 0])
    assert exp(trie.chances[ROOT]) == pytest.approx(9 / 16)


def test_a_full_trie_assumes_the_upper_bound_for_new_prefixes():
    trie = PrefixTrie(most=2)
    inner = trie.descend(ROOT, uniform(0, 1), 0)
    assert trie.descend(ROOT, uniform(0, 1), 1) is None and len(trie) == 2
    trie.learn(trie.descend(None, uniform(0), 0), uniform())
    assert trie.weigh(None, uniform(2)).tolist() == uniform(2).tolist()
    trie.learn(inner, uniform(2))
    trie.settle(inner)
    assert exp(trie.chances[ROOT]) == pytest.approx(1 / 4 + 1 / 16)


def test_a_long_sample_takes_time_that_grows_with_its_length(monkeypatch):
    """Probabilities are summed twice per token of a sample: when its row is learned, and on the way back."""
    summed, inner = [], PrefixTrie._update
    monkeypatch.setattr(PrefixTrie, "_update", lambda self, node: summed.append(node) or inner(self, node))
    model = TableModel(tokenizer=TOKENIZER, rule=lambda context: torch.zeros(len(TOKENIZER), dtype=torch.float64))
    lane = one_lane(under(("regex", {"pattern": "[ab]{150}"}), samples=1), model, Draws(0), length=200)
    assert len(lane.text) == 150
    assert 2 * 150 <= len(summed) <= 2 * 151


def test_equal_tries_have_equal_digests_and_learning_changes_them():
    one, other = PrefixTrie(), PrefixTrie()
    assert one.digest() == other.digest()
    node = one.descend(ROOT, uniform(0, 1), 0)
    assert one.digest() != other.digest()
    other.descend(ROOT, uniform(0, 1), 0)
    assert one.digest() == other.digest()
    one.learn(node, uniform(2))
    assert one.digest() != other.digest()


def test_a_trie_of_a_very_long_text_can_be_copied():
    trie, node = PrefixTrie(), ROOT
    for _ in range(5000):
        trie._add(0, node, -1.0)
        node = len(trie) - 1
    assert deepcopy(trie).digest() == trie.digest()


def test_an_outline_lists_parents_before_children():
    trie = PrefixTrie()
    for text in ([0, 1, 2], [1, 1], [0, 3]):
        node = ROOT
        for token in text:
            node = trie.descend(node, uniform(0, 1, 2, 3), token)
    nodes, parents = trie.outline(5)
    assert [prefixes_of(trie)[node] for node in nodes] == [(), (0,), (1,), (0, 1), (0, 3)] and parents == [
        -1,
        0,
        0,
        1,
        1,
    ]
    assert len(trie.outline(2)[0]) == 2 and len(trie.outline(99)[0]) == len(trie)


# --- events and costs ---

def test_every_sample_starts_from_the_prompt_without_reading_it_again():
    recorded = events(choosing("ab", "b", "cab", samples=5))
    forwards = [event for event in recorded if isinstance(event, Forward)]
    written = [event.sequence for event in recorded if isinstance(event, Commit) and event.sequence]
    assert [event.phase for event in forwards].count("prefill") == 1
    assert len(forwards) == 1 + len(written) - 5  # the row after the prompt is known; no row is read after an end


def test_the_cache_holds_the_prompt_and_one_sample_at_a_time():
    models = Models(pair().target)
    session = prepare(
        models, [under(("regex", {"pattern": "[a-f]{6}"}), samples=8)], Prompt("The green bird"), Limits(0, 24)
    )
    store, most = session._runners[0].lane.target.store, 0
    while not session.finished:
        session.advance()
        most = max(most, len(store.parents))
    assert 3 <= most <= 6 and store.length == len(session.headers[0].prompt_ids)


def test_each_sample_is_scored_and_only_the_answer_is_committed():
    model = table(2)
    recorded = events(choosing("ab", "b", "cab", samples=5), Models(model))
    scores = {
        number: score for event in recorded if isinstance(event, Branches) for number, score in event.scores.items()
    }
    expected = [log_chance(model, (*ids(text), END)) for text in texts(recorded)]
    assert [scores[number] for number in range(1, 6)] == pytest.approx(expected)
    assert [number for event in recorded if isinstance(event, Branches) for number in event.dropped] == [1, 2, 3, 4]
    answer = [event for event in recorded if isinstance(event, Commit)][-1]
    assert (answer.sequence, answer.grown_on, answer.text) == (0, 5, texts(recorded)[-1]) and recorded[-1] == Done(
        "end"
    )


def test_a_step_shows_the_probabilities_its_token_was_drawn_with():
    recorded = events(under(COIN, samples=8), Models(coins()))
    firsts = [event for event in recorded if isinstance(event, Step) and event.position == 0 and event.sequence]
    zero = [next(candidate.final for candidate in step.top if candidate.id == ids("0")[0]) for step in firsts]
    seen = [text == "00000" for text in texts(recorded)].index(True)
    assert zero == pytest.approx([1 / 2] * (seen + 1) + [1 / 17] * (7 - seen), abs=1e-6)


def test_a_step_says_of_every_other_token_that_the_mask_removed_it():
    recorded = events(choosing("ab", "b", samples=2), Models(TableModel(tokenizer=TOKENIZER)))
    fallen = [
        candidate
        for event in recorded
        if isinstance(event, Step) and event.sequence
        for candidate in event.top
        if candidate.final == 0
    ]
    assert fallen and {candidate.fell for candidate in fallen} == {"mask"}


def test_the_figures_show_what_the_samples_taught():
    recorded = events(under(COIN, samples=8), Models(coins()))
    figures = defaultdict(list)
    for event in recorded:
        if isinstance(event, Figure):
            figures[event.shape].append(event.data)
    assert sum(figures["bars"][-1]["values"]) == 8 and set(figures["bars"][-1]["labels"]) == set(texts(recorded))
    at_most = [data["series"]["at most"] for data in figures["scalar"]]
    assert at_most == sorted(at_most, reverse=True) and at_most[-1] == pytest.approx(17 / 32)
    first, last = (dict(zip(data["rows"], data["values"])) for data in (figures["matrix"][0], figures["matrix"][-6]))
    assert first["0"] == pytest.approx([1 / 2, 1 / 2, 1 / 2, 1]) and last["0"] == pytest.approx(
        [1 / 2, 1 / 2, 1 / 17, 1 / 16]
    )
    assert dict(zip(figures["tree"][-1]["labels"], figures["tree"][-1]["values"]))["the prompt"] == pytest.approx(
        17 / 32
    )


def test_other_samplers_are_refused_since_they_would_change_the_distribution():
    for name in ("top_k", "temperature", "repetition_penalty"):
        with pytest.raises(Refusal, match="ASAp: grammar-aligned sampling does not work with a sampler"):
            assemble(LaneConfig("asap", {}, [("choice", {}), (name, {})]))
    assert [sampler.name for sampler in assemble(choosing("a", "b")).samplers] == ["temperature"]
    with pytest.raises(Refusal, match="needs a constraint"):
        assemble(LaneConfig("asap"))


def test_it_declares_that_it_uses_memory():
    assert find("asap").remembers and find("asap").owns_constraint


# --- from one run of a visitor to the next ---

OPTIONS = choosing("ab", "b", "cab", "ac", samples=3)


def timeless(recorded: list[Event]) -> list[dict]:
    return [{key: value for key, value in event.to_json().items() if key != "seconds"} for event in recorded]


def header(memory: Memory | None, config: LaneConfig = OPTIONS, text: str = "q") -> str:
    return prepare(Models(table(2)), [config], Prompt(text), Limits(0, 24), memory=memory).headers[0].memory


def bounds(recorded: list[Event]) -> list[float]:
    return [
        event.data["series"]["at most"] for event in recorded if isinstance(event, Figure) and event.shape == "scalar"
    ]


def test_a_visitors_second_run_continues_from_the_first_runs_trie():
    memory = Memory()
    first, second = events(OPTIONS, memory=memory), events(OPTIONS, memory=memory, seed=1)
    assert bounds(second)[0] <= bounds(first)[-1] < bounds(first)[0]
    assert bounds(events(OPTIONS, seed=1))[0] > bounds(second)[0]


def test_the_header_names_what_was_remembered():
    memory = Memory()
    assert header(memory) == ""
    events(OPTIONS, memory=memory)
    after_one = header(memory)
    events(OPTIONS, memory=memory, seed=1)
    assert len({"", after_one, header(memory)}) == 3
    assert header(memory, LaneConfig("greedy")) == ""


def test_an_emptied_memory_gives_the_first_run_again():
    memory = Memory()
    first, second = events(OPTIONS, memory=memory), events(OPTIONS, memory=memory)
    memory.clear()
    assert timeless(events(OPTIONS, memory=memory)) == timeless(first) != timeless(second)


WARMER = choosing("ab", "b", "cab", "ac", samples=3, temperature=1.5)


@pytest.mark.parametrize("config, text", [(OPTIONS, "qq"), (choosing("ab", "b", samples=3), "q"), (WARMER, "q")])
def test_another_prompt_grammar_or_temperature_starts_with_empty_memory(config, text):
    memory = Memory()
    events(OPTIONS, memory=memory)
    assert timeless(events(config, memory=memory, text=text)) == timeless(events(config, text=text))
    assert len(memory) == 2


def test_memory_does_not_depend_on_the_requested_number_of_samples():
    memory = Memory()
    events(OPTIONS, memory=memory)
    events(choosing("ab", "b", "cab", "ac", samples=1, text="most probable"), memory=memory)
    assert len(memory) == 1


def test_memory_is_never_shared_between_visitors():
    one, other = Memory(), Memory()
    events(OPTIONS, memory=one)
    assert len(other) == 0
    assert timeless(events(OPTIONS, memory=other)) == timeless(events(OPTIONS))
    assert one.digest() == other.digest() != ""


def test_lanes_side_by_side_learn_separately():
    memory = Memory()
    session = prepare(Models(table(2)), [OPTIONS, OPTIONS], Prompt("q"), Limits(0, 24), memory=memory)
    deque(session, maxlen=0)
    first, second = (
        [stamped.event for stamped in session.trace.lane(lane).events if not isinstance(stamped.event, Forward)]
        for lane in (0, 1)
    )
    assert timeless(first) == timeless(second)


def test_a_run_that_is_stopped_keeps_what_it_learned():
    memory = Memory()
    session = prepare(Models(table(2)), [OPTIONS], Prompt("q"), Limits(0, 24), memory=memory)
    while not any(isinstance(event, Figure) for event in recorded_so_far(session)):
        session.advance()
    session.advance()
    assert len(memory) == 0
    session.stop()
    assert len(trie_of(memory)) > 1


def recorded_so_far(session) -> list[Event]:
    return [stamped.event for stamped in session.trace.events]
