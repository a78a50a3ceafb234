"""Labels by perplexity: which answer it chooses, by hand, and wrong variants against the same check."""
from __future__ import annotations

import math
from collections import defaultdict
from itertools import product

import pytest
import torch
from runs import run as run_lane
from tables import TableModel, Text, write

import playground
from playground.contract import Decoder, make
from playground.contract.lane_config import assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.errors import Refusal
from playground.events import Forward
from playground.questions.questions import gallery
from support.chosen_answers import bundled, cost  # noqa: F401 - a fixture
from support.search_oracles import Labels, lane_of
from support.search_runs import logp, of, run
from support.speculation import GREEDY
from support.wrong_variants import refused

NAMES = ["a", "ab", "abba", "bcd", "dd"]


def readings(model: TableModel, prompt: list[int], label: str, end: bool) -> dict[str, float]:
    """Nats per token of the label, in sum, and per token of prompt and label; `end` counts the end as a token."""
    text = (*("abcde".index(letter) for letter in label), *([4] if end else []))
    cost, before = -logp(model, prompt, text), -logp(model, prompt[:1], tuple(prompt[1:]))
    return {
        "mean": cost / len(text),
        "sum": cost,
        "whole": (before + cost) / (len(prompt) - 1 + len(text)),
    }


def check_labels(cls: type[Decoder]) -> None:
    for seed, reading, end in product(range(4), ("mean", "sum", "whole"), (True, False)):
        model, prompt = TableModel("abcde", "e", seed), [3, 1, 2, 0]
        lane, _ = run_lane(lane_of(cls(labels="|".join(NAMES), reading=reading, end=end)), {"target": model}, prompt, 8)
        assert lane.text == min(NAMES, key=lambda name: readings(model, prompt, name, end)[reading])


class ForgetsTheEnd(Labels):
    def _closed(self, lm):
        return False


class ForgetsThePrompt(Labels):
    def _prompt(self, lm):
        yield from super()._prompt(lm)
        return 0.0, 0


class MostSurprising(Labels):
    def _label(self, lm, text, tokens, path, rows):
        label = super()._label(lm, text, tokens, path, rows)
        label.costs = [-cost for cost in label.costs]
        return label


class PriceOfTheFirstToken(Labels):
    def _label(self, lm, text, tokens, path, rows):
        label = super()._label(lm, text, tokens, path, rows)
        label.costs = label.costs[:1]
        return label


@pytest.mark.oracle("gencls_ppl")
def test_labels_by_perplexity_takes_the_label_of_lowest_perplexity():
    check_labels(Labels)


@pytest.mark.refuses("gencls_ppl")
@pytest.mark.parametrize("wrong", [ForgetsTheEnd, ForgetsThePrompt, MostSurprising, PriceOfTheFirstToken])
def test_wrong_labels_by_perplexity_are_refused(wrong):
    refused(check_labels, wrong)


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
