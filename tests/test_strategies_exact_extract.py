"""Exact extraction: which span it answers with, by brute force, and wrong variants against the same check."""
from __future__ import annotations

import math
import random

import pytest
import torch
from tables import TableModel, Text, write

import playground
from playground.contract.lane_config import assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.events import Commit, Forward, Note
from playground.questions.questions import gallery
from strategies.search.exact_extract import SpanSearch
from support.chosen_answers import bundled, cost  # noqa: F401 - a fixture
from support.search_runs import logp, of, run
from support.speculation import GREEDY


def spans(passage: list[int], longest: int) -> set[Text]:
    return {
        tuple(passage[i : i + length])
        for i in range(len(passage))
        for length in range(1, longest + 1)
        if i + length <= len(passage)
    }


def passages(count: int = 12, letters: int = 4) -> list[tuple[list[int], str]]:
    """Ids and text of random passages over the first letters."""
    chance = random.Random(0)
    found = [[chance.randrange(letters) for _ in range(9)] for _ in range(count)]
    return [(ids, "".join("abcdefgh"[i] for i in ids)) for ids in found]


def extracted(model: TableModel, passage: str, prompt: list[int], **knobs):
    return run(of("exact_extract", passage=passage, **knobs), model, prompt, 9)


@pytest.mark.oracle("exact_extract")
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("longest", [1, 3, 9])
@pytest.mark.parametrize("ends", ["e", "ef"])
def test_the_span_is_the_cheapest_of_all_spans_scored_one_by_one(ends, longest, mean):
    beaten = 0
    for seed, (ids, text) in enumerate(passages()):
        model, prompt = TableModel("abcdef", ends, seed), [0, 1]
        prices = {span: cost(model, prompt, span) / (len(span) + 1 if mean else 1) for span in spans(ids, longest)}
        best = min(prices, key=prices.get)
        for prune in (True, False):
            written = extracted(
                model, text, prompt, longest=longest, prune=prune, score="mean" if mean else "sum"
            ).texts()[0]
            assert written[:-1] == best and written[-1] == max(
                model.end_ids, key=lambda end: float(model.scores((*prompt, *best))[end])
            )
        greedy = write(assemble(GREEDY), {"target": model}, prompt, Limits(0, 9), Draws(0)).main.written
        beaten += tuple(greedy[:-1]) != best
    assert beaten > 3, "a search is only tested where greedy misses"


def forgets_the_end(model, prompt, span):
    return -logp(model, prompt, span)


def reads_the_end_too_early(model, prompt, span):
    return cost(model, prompt, span[:-1]) - logp(model, prompt, span) + logp(model, prompt, span[:-1])


def looks_at_the_first_token_only(model, prompt, span):
    return cost(model, prompt, span[:1])


@pytest.mark.refuses("exact_extract")
@pytest.mark.parametrize("wrong", [forgets_the_end, reads_the_end_too_early, looks_at_the_first_token_only])
def test_another_span_cost_gives_another_span(wrong):
    differ = 0
    for seed, (ids, text) in enumerate(passages()):
        model = TableModel("abcdef", "e", seed)
        differ += extracted(model, text, [0, 1], longest=4).texts()[0][:-1] != min(
            spans(ids, 4), key=lambda span: wrong(model, [0, 1], span)
        )
    assert differ > 3


RACES = {
    "spans are dropped for what it costs to end them": (
        "living",
        lambda race, nodes, bound: [n for n in nodes if race.total(n) < bound],
    ),
    "the end costs nothing": ("total", lambda race, node: race.spent[node]),
    "the longest span wins": ("cost", lambda race, node, mean: -len(race.tree.path(node))),
}


@pytest.mark.refuses("exact_extract")
@pytest.mark.parametrize("part, wrong", RACES.values(), ids=RACES)
def test_a_wrong_extraction_is_refused(part, wrong, monkeypatch):
    monkeypatch.setattr(SpanSearch, part, wrong)
    with pytest.raises(AssertionError):
        test_the_span_is_the_cheapest_of_all_spans_scored_one_by_one("e", 9, False)


def test_pruning_scores_fewer_spans_with_unchanged_scores():
    for seed, (_, text) in enumerate(passages(6)):
        model = TableModel("abcdef", "e", seed)
        pruned, full = (extracted(model, text, [0, 1], longest=6, prune=prune) for prune in (True, False))
        rows = [sum(event.tokens for event in recorded.of(Forward)) for recorded in (pruned, full)]
        assert rows[0] < 0.8 * rows[1] and pruned.texts()[0] == full.texts()[0]
        cells, whole = (recorded.figure("-log p, by start and length")["values"] for recorded in (pruned, full))
        known = [
            (cell, other) for row, others in zip(cells, whole) for cell, other in zip(row, others) if cell is not None
        ]
        assert known and all(cell == pytest.approx(other) for cell, other in known)


def test_each_distinct_span_is_read_once_and_not_again_when_committed():
    recorded = extracted(TableModel("abcd"), "abcabcab", [0, 1], longest=3, prune=False)
    assert [event.tokens for event in recorded.of(Forward)] == [2, 3, 3, 3], (
        "the prompt, then a b c, ab bc ca, abc bca cab"
    )


def test_a_span_that_occurs_twice_is_one_span_with_two_positions():
    recorded = extracted(
        TableModel("abcd", "d", rule=lambda context: torch.tensor([0.0, 2.0, -9.0, 0.0])), "acbac", [0], longest=1
    )
    assert recorded.texts()[0] == (1, 3) and "it occurs 1 time in the passage." in recorded.of(Note)[-1].text
    recorded = extracted(
        TableModel("abcd", "d", rule=lambda context: torch.tensor([2.0, 0.0, -9.0, 0.0])), "acbac", [0], longest=1
    )
    assert recorded.texts()[0] == (0, 3) and "it occurs 2 times in the passage." in recorded.of(Note)[-1].text


def test_probabilities_of_all_spans_sum_to_no_more_than_one():
    recorded = extracted(TableModel("abcde", "e", spread=3.0), "abcd", [0], longest=4, prune=False)
    cells = [
        cell for row in recorded.figure("-log p, by start and length")["values"] for cell in row if cell is not None
    ]
    assert len(cells) == 10 and 0.1 < sum(math.exp(-cell) for cell in cells) <= 1


@pytest.mark.slow
def test_the_answer_is_in_the_passage_and_at_least_as_probable_as_a_greedy_answer_in_it(
    bundled,
):
    for question in [question for question in gallery() if question.task == "context_qa"]:
        greedy, exact = (
            playground.run(name, question.prompt, models=bundled, chat=True, context=question.context)
            for name in ("greedy", "exact_extract")
        )
        assert exact.text.startswith(" ") and exact.text.strip() in question.context
        if f" {greedy.text.strip()}" in f" {question.context}" and greedy.trace.events[-1].event.reason == "end":
            assert chance(exact) >= chance(greedy) - 1e-4


def chance(result) -> float:
    """Log-probability of a text and its end."""
    commits = [stamped.event for stamped in result.trace.events if isinstance(stamped.event, Commit)]
    return sum(value for commit in commits if commit.sequence == 0 for value in commit.logprobs)


def test_without_a_passage_spans_come_from_the_prompt():
    assert set(run(of("exact_extract"), TableModel("abcd", "d"), [0, 1, 1, 0, 2], 5).texts()[0][:-1]) <= {0, 1, 2}
