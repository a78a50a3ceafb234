"""Answers chosen among the spans of a passage and among labels: against brute force."""
from __future__ import annotations

import math
import random
from collections import defaultdict

import pytest
import torch
from tables import TableModel, Text, write

import playground
from playground.contract import make
from playground.contract.lane_config import assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.errors import Refusal
from playground.events import Commit, Forward, Note
from playground.questions.questions import gallery
from strategies.search.exact_extract import SpanSearch
from support.search_runs import logp, of, run
from support.speculation import GREEDY

# --- exact extraction ---


def cost(model: TableModel, prompt: list[int], span: Text) -> float:
    """-log p of a span and the end after it, with every context recomputed."""
    ends = sorted(model.end_ids)
    after = model.scores((*prompt, *span)).log_softmax(-1)
    return -logp(model, prompt, span) - (float(after[ends].logsumexp(0)) if ends else 0.0)


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


@pytest.fixture(scope="module")
def bundled():
    return playground.load()


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


# --- labels by perplexity ---

def label_costs(model: TableModel, prompt: list[int], labels: list[Text], end: bool) -> dict[str, list[float]]:
    """The three scores of every label, with every context recomputed."""
    before, length = (
        -sum(float(model.scores(tuple(prompt[:i])).log_softmax(-1)[prompt[i]]) for i in range(1, len(prompt))),
        len(prompt) - 1,
    )
    found = {"mean": [], "sum": [], "whole": []}
    for label in labels:
        count = len(label) + end
        total = cost(model, prompt, label) if end else -logp(model, prompt, label)
        for reading, value in (("mean", total / count), ("sum", total), ("whole", (before + total) / (length + count))):
            found[reading].append(value)
    return found


LABELS = ["a", "ab", "abba", "bcd", "dd"]


@pytest.mark.oracle("gencls_ppl")
@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("prompt", [[0], [0, 1], [3, 1, 2, 2, 0, 1, 3]], ids=len)
def test_each_mode_chooses_the_label_of_lowest_perplexity(prompt, end):
    winners = defaultdict(set)
    for seed in range(6):
        model = TableModel("abcde", "e", seed)
        spelt = [tuple("abcd".index(letter) for letter in label) for label in LABELS]
        costs = label_costs(model, prompt, spelt, end)
        for reading, values in costs.items():
            recorded = run(of("gencls_ppl", labels="|".join(LABELS), reading=reading, end=end), model, prompt, 8)
            best = LABELS[values.index(min(values))]
            assert recorded.lane.text == best
            winners[seed].add(best)
        table = recorded.figure("labels by three scores")
        for name, row in zip(table["rows"], table["values"]):
            mean, total, whole = (costs[reading][LABELS.index(name)] for reading in ("mean", "sum", "whole"))
            assert row == pytest.approx([math.exp(mean), math.exp(-total), math.exp(whole)])
    assert any(len(found) > 1 for found in winners.values()), "where readings never differ, they are not recorded apart"


def test_labels_take_one_forward_and_the_prompt_two():
    recorded = run(of("gencls_ppl", labels="ab|ac|b"), TableModel("abcde", "e"), [0, 1, 2, 3], 6)
    assert [(event.stream, event.tokens) for event in recorded.of(Forward)] == [
        ("reading", 3),
        ("target", 4),
        ("target", 4),
    ], "a, ab, ac and b"


def test_label_order_is_irrelevant_and_modes_agree_on_single_token_labels():
    for seed in range(5):
        model = TableModel("abcd", "d", seed)
        found = {run(of("gencls_ppl", labels=labels, reading=reading), model, [0, 1], 5).lane.text
                 for labels in ("a|b|c", "c|a|b") for reading in ("mean", "sum", "whole")}
        assert len(found) == 1


def test_the_best_label_is_found_even_if_its_first_token_is_not_the_best():
    rows = {1: [0.6, 0.4, 0, 0, 0], 2: [0, 0, 0.3, 0.3, 0.4], 3: [0, 0, 0, 0, 1.0]}

    def scores(context):
        row = [0, 0, 0.9, 0.05, 0.05] if context[1:] == (1,) else rows[min(len(context), 3)]
        return torch.tensor(row, dtype=torch.float64).log()

    model = TableModel("abcde", "e", rule=scores)
    assert run(of("gencls_ppl", labels="ac|ad|bc", reading="sum"), model, [0], 5).lane.text == "bc"
    assert write(assemble(GREEDY), {"target": model}, [0], Limits(0, 5), Draws(0)).text == "a"


@pytest.mark.parametrize("labels, says", [("yes", "nothing to choose"), (" | a | a", "nothing to choose")])
def test_a_single_label_is_refused(labels, says):
    with pytest.raises(Refusal, match=says):
        make("gencls_ppl", labels=labels)


def test_the_bundled_model_chooses_among_the_given_towns_only(bundled):
    question = next(question for question in gallery() if question.task == "context_qa" and question.answer == "Braval")
    recorded = playground.run("gencls_ppl", question.prompt, models=bundled, chat=True, context=question.context,
                          knobs={"labels": "Braval|Kapak|summer|pears"})
    assert (
        recorded.text.strip() in {"Braval", "Kapak", "summer", "pears"}
        and recorded.trace.events[-1].event.reason == "end"
    )
