"""ASAp: the distribution of its samples, what its trie learns from them, and what a visitor's next run reuses."""
from __future__ import annotations

import random
from collections import defaultdict, deque
from copy import deepcopy
from itertools import product
from math import exp, log

import pytest
import torch
from pairs import pair
from tables import Enumerating, Law, TableModel, distance
from toys import byte_tokenizer

from playground.contract import find
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.limits import Limits
from playground.decoding.recorder import Silent
from playground.decoding.rng import Draws
from playground.decoding.rows import Rows
from playground.decoding.sampler_chain import Chain
from playground.decoding.session import Models, Prompt, Runner, prepare
from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from playground.events import Branches, Commit, Done, Event, Failed, Figure, Forward, Note, Step
from playground.trace import check
from strategies.constrained.asap.prefix_trie import NEVER, ROOT, PrefixTrie
from support.laws import EXACT, WRONG

TOKENIZER = byte_tokenizer(merges=0)  # a token is a byte, so every text has one spelling
END = TOKENIZER.eos_token_id
START = TOKENIZER.convert_tokens_to_ids("q")
Spelt = tuple[int, ...]


def ids(text: str) -> Spelt:
    return tuple(TOKENIZER.convert_tokens_to_ids(list(text)))


def under(constraint: tuple[str, dict], **knobs) -> LaneConfig:
    return LaneConfig("asap", knobs, [constraint])


def choosing(*options: str, **knobs) -> LaneConfig:
    return under(("choice", {"options": "|".join(options)}), **knobs)


def one_lane(recipe: LaneConfig, model: TableModel, draws, memory: Memory | None = None, length: int = 12) -> Lane:
    """Run one lane to its end, with a visitor's memory."""
    assembly = assemble(recipe)
    lane = Lane(
        [START], {"target": model}, assembly, Limits(max_new_tokens=length), Silent(model.tokens), memory=memory
    )
    lane.draws, runner = draws, Runner(lane, assembly)
    while not runner.finished:
        failed = [event.message for event in runner.advance() if isinstance(event, Failed)]
        if failed:
            raise Refusal(failed[0])
    return lane


def law(recipe: LaneConfig, model: TableModel, memory: Memory | None = None) -> Law:
    """Exact probability of every text, where each run begins with what the visitor's memory holds."""
    draws, found = Enumerating(), defaultdict(float)
    for _ in draws.runs():
        lane = one_lane(recipe, model, draws, deepcopy(memory))
        found[tuple(lane.main.written)] += draws.weight
    return dict(found)


def taught(recipe: LaneConfig, model: TableModel, draws) -> Memory:
    """The memory of a visitor who ran this once."""
    memory = Memory()
    one_lane(recipe, model, draws, memory)
    return memory


class Evenly:
    """Replaces Draws: samples uniformly among the allowed tokens, so that every prefix is reached."""

    def __init__(self):
        self.chance = random.Random(0)

    def pick(self, p: torch.Tensor, purpose: str, position: int, lineage: int = 0) -> int:
        return self.chance.choice(p.nonzero()[:, 0].tolist())


def trie_of(memory: Memory) -> PrefixTrie:
    [trie] = memory._things.values()
    return trie


# --- the distribution by hand: texts of a choice, each with the end token the model has to write itself ---

def weights(model: TableModel, options: list[str], t: float = 1.0) -> Law:
    """P(option, end) of unconstrained sampling."""
    return {(*ids(option), END): exp(log_chance(model, (*ids(option), END), t)) for option in options}


def log_chance(model: TableModel, text: Spelt, t: float = 1.0) -> float:
    rows = [model.scores((START, *text[:i])) / t for i in range(len(text))]
    return sum(float(row.log_softmax(-1)[token]) for row, token in zip(rows, text))


def given_the_grammar(model: TableModel, options: list[str], t: float = 1.0) -> Law:
    """Q: the model's distribution given that the text is an option."""
    mass = weights(model, options, t)
    return {text: p / sum(mass.values()) for text, p in mass.items()}


def under_a_mask(model: TableModel, options: list[str]) -> Law:
    """The distribution if every row is renormalised over its allowed tokens."""
    texts, found = [(*ids(option), END) for option in options], {}
    for text in texts:
        p = 1.0
        for i, token in enumerate(text):
            row = model.scores((START, *text[:i])).softmax(-1)
            p *= float(
                row[token]
                / row[sorted({other[i] for other in texts if other[:i] == text[:i] and len(other) > i})].sum()
            )
        found[text] = p
    return found


def chances(model: TableModel, options: list[str]) -> dict[Spelt, float]:
    """Exact probability that unconstrained sampling after a prefix gives an option, summed over the options."""
    texts = [(*ids(option), END) for option in options]
    prefixes = {text[:i] for text in texts for i in range(len(text) + 1)}
    return {
        prefix: sum(
            exp(log_chance(model, text) - log_chance(model, prefix)) for text in texts if text[: len(prefix)] == prefix
        )
        for prefix in prefixes
    }


def prefixes_of(trie: PrefixTrie) -> dict[int, Spelt]:
    found = {ROOT: ()}
    for node in range(1, len(trie)):
        found[node] = (*found[trie.parents[node]], trie.tokens[node])
    return found


# --- T1: a fair coin five times; allowed are 00000 and all texts that begin with 1 ---

COIN = ("regex", {"pattern": "0{5}|1[01]{4}"})
ZEROS = (*ids("00000"), END)


def coins(tosses: int = 5) -> TableModel:
    def scores(context: Spelt) -> torch.Tensor:
        row = torch.full((len(TOKENIZER),), NEVER, dtype=torch.float64)
        row[list(ids("01")) if len(context) <= tosses else [END]] = 0.0
        return row
    return TableModel(tokenizer=TOKENIZER, rule=scores)


def visited(first: str) -> Memory:
    """The memory of a visitor whose only sample began with 0, and was 00000, or with 1."""
    memories = (taught(under(COIN, samples=1), coins(), Draws(seed)) for seed in range(20))
    return next(memory for memory in memories if trie_of(memory).tokens[1] == ids(first)[0])


def zeros(memory: Memory | None = None) -> float:
    """Probability that the next sample is 00000."""
    return law(under(COIN, samples=1), coins(), memory)[ZEROS]


def test_the_first_sample_is_drawn_as_under_a_plain_mask():
    assert abs(zeros() - 1 / 2) < EXACT


@pytest.mark.oracle("asap")
def test_one_sample_of_the_rare_text_reveals_its_probability():
    assert abs(zeros(visited("0")) - 1 / 17) < EXACT


def test_a_sample_of_another_text_reveals_nothing_about_the_rare_one():
    assert abs(zeros(visited("1")) - 1 / 2) < EXACT


def test_what_the_trie_learns_from_one_sample():
    trie = trie_of(visited("0"))
    found = {prefix: trie.chances[node] for node, prefix in prefixes_of(trie).items()}
    assert [exp(found[ids("0" * n)]) * 2 ** (5 - n) for n in range(1, 6)] == pytest.approx([1.0] * 5, abs=EXACT)
    assert abs(exp(found[()]) - (1 / 32 + 1 / 2)) < EXACT


def test_the_second_sample_of_a_run_uses_what_the_first_taught():
    found = law(under(("regex", {"pattern": "0{3}|1[01]{2}"}), samples=2), coins(3))
    assert abs(found[*ids("000"), END] - (1 / 2 * 1 / 5 + 1 / 2 * 1 / 2)) < EXACT


class RenormalisesFirst(PrefixTrie):
    def learn(self, node, legal):
        super().learn(node, legal - legal.logsumexp(0))

    def _add(self, token, parent, logp):
        super()._add(token, parent, 0.0 if logp > NEVER else logp)


class StaysWhereItLearned(PrefixTrie):
    def settle(self, node):
        pass


class KnowsOnlyWhatWasDrawn(PrefixTrie):
    def learn(self, node, legal):
        drawn = [*self.children[node]]
        super().learn(node, torch.full_like(legal, NEVER).index_copy(0, torch.tensor(drawn), legal[drawn]))


@pytest.mark.refuses("asap")
@pytest.mark.parametrize(
    "wrong, first, right",
    [(RenormalisesFirst, "0", 1 / 17), (StaysWhereItLearned, "0", 1 / 17), (KnowsOnlyWhatWasDrawn, "1", 1 / 2)],
)
def test_a_trie_that_learns_wrongly_is_detected(wrong, first, right, monkeypatch):
    monkeypatch.setattr("strategies.constrained.asap.PrefixTrie", wrong)
    assert abs(zeros(visited(first)) - right) > WRONG


def test_over_many_samples_the_rare_text_has_its_true_frequency():
    notes = [event.text for event in events(under(COIN, samples=100), Models(coins())) if isinstance(event, Note)]
    assert len(notes) == 100 and notes[6].startswith("Sample 7 of 100: ")
    assert 1 <= sum("'00000'" in note for note in notes) <= 14  # 6 on average; a plain mask draws 50


# --- T2, T3: bounds never rise and converge to the exact values, and so does the distribution ---

def languages() -> list[list[str]]:
    """Random sets of texts of up to four of three letters; one text may be a prefix of another."""
    texts = ["".join(letters) for length in range(1, 5) for letters in product("abc", repeat=length)]
    return [random.Random(seed).sample(texts, 7) for seed in range(4)]


def table(seed: int) -> TableModel:
    """A model that writes three letters and the end at probabilities of its own in every place."""
    opinions, silent = (
        TableModel(tokenizer=TOKENIZER, seed=seed, spread=1.0),
        torch.ones(len(TOKENIZER), dtype=torch.bool),
    )
    silent[[*ids("abc"), END]] = False
    return TableModel(tokenizer=TOKENIZER, rule=lambda context: opinions.scores(context).masked_fill(silent, NEVER))


def test_every_estimate_is_an_upper_bound_and_never_rises():
    for seed, options in enumerate(languages()):
        model, memory, before = table(seed), Memory(), {}
        exact = chances(model, options)
        for run in range(15):
            one_lane(choosing(*options, samples=1), model, Draws(run), memory)
            trie = trie_of(memory)
            now = {prefix: exp(trie.chances[node]) for node, prefix in prefixes_of(trie).items()}
            assert all(now[prefix] >= exact[prefix] - EXACT for prefix in now)
            assert all(now[prefix] <= before[prefix] + EXACT for prefix in before)
            before = now
        assert before[()] < 1


@pytest.fixture(scope="module")
def learned() -> list[tuple[TableModel, list[str], Memory]]:
    return [
        (table(seed), options, taught(choosing(*options, samples=80), table(seed), Evenly()))
        for seed, options in enumerate(languages())
    ]


def test_estimates_are_exact_once_every_prefix_was_read(learned):
    for model, options, memory in learned:
        trie, exact = trie_of(memory), chances(model, options)
        found = {prefix: exp(trie.chances[node]) for node, prefix in prefixes_of(trie).items()}
        assert found.keys() == exact.keys(), "samples did not reach every prefix"
        assert max(abs(found[prefix] / exact[prefix] - 1) for prefix in exact) < EXACT


@pytest.mark.oracle("asap")
def test_samples_follow_the_model_given_the_grammar_once_every_prefix_was_read(learned):
    for model, options, memory in learned:
        found, right = law(choosing(*options, samples=1), model, memory), given_the_grammar(model, options)
        assert distance(found, right) < EXACT
        assert distance(under_a_mask(model, options), right) > WRONG


def test_earlier_samples_are_already_closer_to_it_than_with_a_plain_mask():
    for seed, options in enumerate(languages()):
        model = table(seed)
        drawn = texts(events(choosing(*options, samples=60), Models(model)))[10:]
        frequencies = {(*ids(text), END): drawn.count(text) / len(drawn) for text in set(drawn)}
        right = given_the_grammar(model, options)
        assert divergence(frequencies, right) < divergence(under_a_mask(model, options), right)


def test_the_first_sample_has_the_distribution_of_a_plain_mask():
    for seed, options in enumerate(languages()):
        assert distance(law(choosing(*options, samples=1), table(seed)), under_a_mask(table(seed), options)) < EXACT


def divergence(p: Law, q: Law) -> float:
    return sum(chance * log(chance / q[text]) for text, chance in p.items())


def test_the_target_distribution_includes_the_temperature():
    options, model = languages()[0], table(0)
    memory = taught(choosing(*options, samples=80, temperature=0.6), model, Evenly())
    found = law(choosing(*options, samples=1, temperature=0.6), model, memory)
    assert distance(found, given_the_grammar(model, options, 0.6)) < EXACT
    assert distance(found, given_the_grammar(model, options)) > WRONG


# --- T4: no probability mass is lost ---

def two_letters(context: Spelt) -> torch.Tensor:
    """a, b or the end, with probabilities that depend on the text; the end is certain after two."""
    scores = torch.full((len(TOKENIZER),), NEVER, dtype=torch.float64)
    open_, odds = [*ids("ab"), END], [0.5, 1.2 * len(context), -0.4 * sum(context) % 3]
    scores[open_ if len(context) < 3 else [END]] = torch.tensor(
        odds if len(context) < 3 else [0.0], dtype=torch.float64
    )
    return scores


def test_if_all_tokens_are_allowed_it_is_plain_sampling():
    model = TableModel(tokenizer=TOKENIZER, rule=two_letters)
    everything = {
        (*ids(text), END): exp(log_chance(model, (*ids(text), END))) for text in ["", "a", "b", "aa", "ab", "ba", "bb"]
    }
    anything = under(("regex", {"pattern": "[ab]*"}), samples=2)
    assert distance(law(anything, model), everything) < EXACT
    assert all(abs(chance) < EXACT for chance in trie_of(taught(anything, model, Draws(0))).chances)


def test_if_one_text_is_allowed_it_is_always_written():
    assert law(choosing("abc", samples=3), table(0)) == {(*ids("abc"), END): 1.0}


@pytest.mark.parametrize("seed", range(5))
def test_one_sample_equals_a_plain_mask_with_the_same_random_numbers(seed):
    grammar = ("regex", {"pattern": "[a-f]{2,5}|x[0-9]+y"})
    for model in (pair().target, table(seed)):
        masked, ours = (one_lane(recipe, model, Draws(seed), length=20) for recipe in (
            LaneConfig("sample", {"temperature": 1.0, "top_p": 1.0}, [grammar]), under(grammar, samples=1)))
        assert ours.text == masked.text != ""


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

def events(
    recipe: LaneConfig, models: Models | None = None, memory: Memory | None = None, text: str = "q", seed: int = 0
) -> list[Event]:
    session = prepare(models or Models(table(2)), [recipe], Prompt(text), Limits(seed, 24), memory=memory)
    deque(session, maxlen=0)
    assert check(session.trace) == []
    return [stamped.event for stamped in session.trace.events]


def texts(recorded: list[Event]) -> list[str]:
    """Of every sample, by the number of its sequence."""
    found = defaultdict(str)
    for event in recorded:
        if isinstance(event, Commit) and event.sequence:
            found[event.sequence] += event.text
    return [found[number] for number in sorted(found)]


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


def header(memory: Memory | None, recipe: LaneConfig = OPTIONS, text: str = "q") -> str:
    return prepare(Models(table(2)), [recipe], Prompt(text), Limits(0, 24), memory=memory).headers[0].memory


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


@pytest.mark.parametrize("recipe, text", [(OPTIONS, "qq"), (choosing("ab", "b", samples=3), "q"), (WARMER, "q")])
def test_another_prompt_grammar_or_temperature_starts_with_empty_memory(recipe, text):
    memory = Memory()
    events(OPTIONS, memory=memory)
    assert timeless(events(recipe, memory=memory, text=text)) == timeless(events(recipe, text=text))
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
