"""PPD: the target's logits after prompt tokens, in the library's own forward, and trees that carry them."""
from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod

import numpy
import pytest
import torch
from pairs import greedy_text, pair
from runs import figures, run
from tables import write

from playground.contract import find, make
from playground.contract.assembly import Assembly
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from strategies.draft_heads.ppd.prompt_trees import (
    RoundSize,
    best_split,
    last_accepted,
    prompt_trees,
    round_sizes,
    share_of,
    sized,
    tokens_per_round,
)
from support.draft_heads import PROMPT, differing, embed, head, library, proposals, random_weights, written
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane

FIXED = {"sized": "fixed"}  # the same on every machine
NAME, KNOBS = "ppd", {"inputs": 24, "depth": 2, "ranks": 2, **FIXED}
BRIEF = {"ppd": {"weights": "random", "inputs": 6, "depth": 2, "ranks": 2, "sized": "fixed"}}
COLLAPSES = {"ppd": collapses("ppd", weights="random", inputs=0)}
ACCURACY = ((0.5, 0.2, 0.1), (0.4, 0.15, 0.1), (0.3, 0.1, 0.05))


def guesses(read: list[int]):
    """The two best tokens after each prompt token, in one causal forward of the library over the text and them."""
    prompts = random_weights(NAME)["prompt_embeddings"]
    with torch.no_grad():
        rows = torch.cat([embed(read), prompts])[None]
        logits = library()(inputs_embeds=rows, use_cache=False).logits[0, -len(prompts):]
    return logits.topk(2).indices.tolist()


def expected(proposal):
    """All combinations of the guesses: two prompt tokens after every node fit into the inputs."""
    lists = guesses(proposal.tokens[:-proposal.unread])[proposal.unread - 1:2]
    return {path for depth in range(1, len(lists) + 1) for path in product(*lists[:depth])}


@pytest.mark.oracle("ppd")
def test_draft_tokens_are_the_targets_own_after_the_prompt_tokens():
    assert list(differing(head(NAME, random_weights(NAME), **KNOBS), expected)) == []


class PromptsInReverse(find("ppd")):
    """Wrong: the prompt tokens follow in another order than they were trained in."""

    @classmethod
    def build(cls, weights):
        return super().build({**weights, "prompt_embeddings": weights["prompt_embeddings"].flip(0)})


class GuessesOffByOne(find("ppd")):
    """Wrong: the logits of the second prompt token guess the first draft token."""

    def observe(self, tree, rows, verdict):
        super().observe(tree, rows, verdict)
        if self._guesses.logits is not None:
            self._guesses.logits = self._guesses.logits[1:]


class GuessesOfAnotherNode(find("ppd")):
    """Wrong: the prompt tokens of the last node count, whichever was accepted."""

    def observe(self, tree, rows, verdict):
        super().observe(tree, rows, verdict)
        if self._guesses.logits is not None:
            self._guesses.logits = rows.probes[-len(self._guesses.logits):]


@pytest.mark.refuses("ppd")
@pytest.mark.parametrize("wrong", [PromptsInReverse, GuessesOffByOne, GuessesOfAnotherNode])
def test_prompt_tokens_in_the_wrong_place_are_detected(wrong):
    assert list(differing(head(NAME, random_weights(NAME), wrong, **KNOBS), expected))


@pytest.mark.strategy("ppd")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", inputs=8, **FIXED)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT


@pytest.mark.strategy("ppd")
def test_random_prompt_tokens_leave_greedy_text_unchanged():
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = head(NAME, random_weights(NAME), inputs=20, **FIXED)
    lane = write(Assembly(decoder), {"target": pair().target}, PROMPT, Limits(0, 16), Draws(0))
    assert lane.tokens[len(PROMPT):] == greedy_text("llama", PROMPT, 16)


class RecordsStates(find("ppd")):
    """Records the guesses of every round, and the prompt tokens of the node accepted before it."""

    def drafted(self, lm, budget):
        self.seen = [*getattr(self, "seen", []), (len(self._guesses.after(lm)), getattr(self, "carried", 0))]
        return (yield from super().drafted(lm, budget))

    def observe(self, tree, rows, verdict):
        super().observe(tree, rows, verdict)
        self.carried = len(tree.probes.get(verdict.kept[-1] if verdict.kept else -1, ()))


@pytest.mark.strategy("ppd")
def test_a_round_begins_with_the_guesses_of_the_node_that_was_accepted_last():
    drafter = head(NAME, random_weights(NAME), RecordsStates, inputs=7, **FIXED)
    proposals(drafter, sampled=True)
    assert len(drafter.seen) > 10 and all(guesses == carried for guesses, carried in drafter.seen)
    assert len({carried for _, carried in drafter.seen}) > 1


def test_nothing_is_drafted_deeper_than_the_text_may_grow():
    found = proposals(head(NAME, random_weights(NAME), inputs=40, **FIXED))
    assert all(max(map(len, proposal.prefixes)) <= proposal.budget for proposal in found)


# --- trees ---


def test_the_probabilities_of_ending_at_a_node_sum_to_one():
    paths = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]
    last = last_accepted(paths, ACCURACY)
    assert sum(last.values()) == pytest.approx(1) and min(last.values()) >= 0
    assert last[(0,)] == pytest.approx(0.5 * (1 - 0.4 - 0.15))


@pytest.mark.parametrize("inputs", [0, 1, 3, 7, 12, 40])
def test_trees_fit_their_inputs_and_are_no_deeper_than_their_state(inputs):
    for state, tree in enumerate(prompt_trees(ACCURACY, inputs)):
        assert len(tree.paths) + sum(tree.prompts.values()) <= inputs
        assert max(map(len, tree.paths), default=0) <= state
        assert not tree.paths or min(tree.prompts.values()) >= 1
        assert tree.tokens == pytest.approx(1 + sum(share_of(ACCURACY, path) for path in tree.paths))


def test_the_prompt_token_whose_loss_costs_least_is_dropped_first():
    paths, values = [(0,), (1,), (0, 0)], [1.0, 1.5, 1.8, 1.9]
    kept, last = dict.fromkeys([(), *paths], 3), last_accepted(paths, ACCURACY)
    for inputs in range(14, 7, -1):
        costs = {path: last[path] * (values[n] - values[n - 1]) for path, n in kept.items() if n > 1}
        kept[min(costs, key=costs.get)] -= 1
        assert sorted(sized(paths, ACCURACY, inputs, values).prompts.values()) == sorted(kept.values())


def test_the_split_is_the_best_of_all_numbers_of_nodes():
    values, inputs = [1.0, 1.5, 1.8, 1.9], 10
    best = best_split(ACCURACY, 3, inputs, values)
    every = sorted(
        (path for depth in (1, 2, 3) for path in product(range(3), repeat=depth)),
        key=lambda path: -prod(ACCURACY[d][r] for d, r in enumerate(path)),
    )
    for count in range(5):
        assert best.value(values) >= sized(every[:count], ACCURACY, inputs, values).value(values) - 1e-12


def test_the_expected_tokens_are_those_of_the_stationary_distribution():
    trees = prompt_trees(ACCURACY, 12)
    moves = numpy.zeros((4, 4))
    for state, tree in enumerate(trees):
        for path, share in tree.last.items():
            moves[state, tree.prompts[path]] += share
    share, vectors = numpy.linalg.eig(moves.T)
    stationary = vectors[:, share.real.argmax()].real
    stationary /= stationary.sum()
    assert tokens_per_round(trees) == pytest.approx(sum(stationary * [tree.tokens for tree in trees]))


# --- the number of inputs ---


def machine(fixed: float, row: float) -> Callable[[int], float]:
    """Seconds of a forward by its rows."""
    return lambda rows: fixed + row * rows


def best_on(seconds: Callable[[int], float], most: int = 64) -> RoundSize:
    return max(round_sizes(ACCURACY, most, seconds), key=lambda size: size.speed)


@pytest.mark.oracle("ppd")
def test_the_number_of_inputs_has_the_most_expected_tokens_per_second():
    """Against the quotient written out; the first of them is plain decoding, a token in the time of one row."""
    seconds = machine(1e-3, 2e-5)
    plain, *others = round_sizes(ACCURACY, 40, seconds)
    assert (plain.inputs, plain.tokens, plain.seconds) == (0, 1.0, seconds(1))
    for size in others:
        assert size.speed == tokens_per_round(prompt_trees(ACCURACY, size.inputs)) / (1e-3 + 2e-5 * (size.inputs + 1))
    assert best_on(seconds).speed == max(size.speed for size in round_sizes(ACCURACY, 64, seconds))


def test_where_rows_cost_nothing_the_largest_tree_is_read_and_where_they_cost_as_a_forward_none():
    assert best_on(machine(1e-3, 0.0)).tokens == max(size.tokens for size in round_sizes(ACCURACY, 64, machine(1, 0)))
    assert best_on(machine(0.0, 1e-3)).inputs == 0
    sizes = [best_on(machine(1e-3, row)).inputs for row in (1e-7, 1e-5, 1e-4, 1e-3)]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 2


def size_on(monkeypatch, row: float, cls: type | None = None) -> int:
    """Most inputs of a round, on a machine whose forwards take 1 ms and so much for each row."""
    times = {(rows, 32): 1e-3 + row * rows for rows in (1, 8, 64)}
    monkeypatch.setattr("playground.decoding.lane.lm.forward_times", lambda model: times)
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = head(NAME, random_weights(NAME), cls)
    _, events = run(Assembly(decoder), {"target": pair().target}, PROMPT, 16)
    rounds = [each["series"] for each in figures(events, "guesses a round began with, and its inputs")]
    return int(max(series["draft tokens"] + series["prompt tokens"] for series in rounds))


def test_a_lane_sizes_its_rounds_by_the_forwards_of_this_machine(monkeypatch):
    assert size_on(monkeypatch, 1.0) == 0 and size_on(monkeypatch, 1e-9) > 16


class IgnoresTheMachine(find("ppd")):
    """Wrong: the number of inputs is a knob, whatever they cost."""

    def __post_init__(self):
        super().__post_init__()
        self._size = self.inputs


@pytest.mark.refuses("ppd")
def test_a_fixed_number_of_inputs_is_detected(monkeypatch):
    assert size_on(monkeypatch, 1.0, IgnoresTheMachine) > 0


@pytest.mark.parametrize("row", [1.0, 1e-9])
def test_whatever_the_size_of_a_round_the_text_is_the_same(monkeypatch, row):
    times = {(rows, 32): 1e-3 + row * rows for rows in (1, 8, 64)}
    monkeypatch.setattr("playground.decoding.lane.lm.forward_times", lambda model: times)
    assert written(head(NAME, random_weights(NAME))) == written(head(NAME, random_weights(NAME), inputs=0))
