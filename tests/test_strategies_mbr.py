"""Minimum Bayes risk: which answer it chooses, by hand, and wrong variants against the same check."""
from __future__ import annotations

from itertools import product

import pytest
from registry import Collapse
from tables import TableModel, Text, distance, law

from playground.algorithms.search.similarity import MEASURES, edit_distance
from playground.contract import Decoder
from support.chosen_answers import same_law
from support.laws import EXACT, WRONG
from support.search_oracles import MBR
from support.search_runs import chosen_by_brute_force, entire, logp, of
from support.speculation import GREEDY, MODEL
from support.wrong_variants import refused


def chrf(a: str, b: str) -> float:
    """Mean F1 of single letters and of pairs of two texts of two letters."""
    found = []
    for n in (1, 2):
        left, right = ([text[i : i + n] for i in range(len(text) - n + 1)] for text in (a, b))
        both = sum(min(left.count(gram), right.count(gram)) for gram in set(left))
        found.append(2 * both / (len(left) + len(right)))
    return sum(found) / 2


def letters(text: Text) -> str:
    return "".join("ab"[token] for token in text)


def check_mbr(cls: type[Decoder]) -> None:
    """The text with the highest mean similarity to all texts, itself included; on ties the first."""
    model = TableModel("ab", seed=3, spread=0.8)

    def most_alike(texts: list[Text]) -> Text:
        means = [sum(chrf(letters(one), letters(other)) for other in texts) for one in texts]
        return texts[means.index(max(means))]

    same_law(cls(n=3, likeness="letters", temperature=0.9), model, 0.9, most_alike)


class LeastAlike(MBR):
    def _table(self, samples):
        return [[-value for value in row] for row in super()._table(samples)]


class OneThatIsAlike(MBR):
    """Takes the text with the single most similar other one."""

    def _table(self, samples):
        table = super()._table(samples)
        others = [[value for j, value in enumerate(row) if j != i] for i, row in enumerate(table)]
        return [[max(row, default=1.0)] for row in others]


@pytest.mark.oracle("mbr")
def test_mbr_has_the_distribution_of_the_text_most_similar_to_all():
    check_mbr(MBR)


@pytest.mark.refuses("mbr")
@pytest.mark.parametrize("wrong", [LeastAlike, OneThatIsAlike])
def test_a_wrong_mbr_is_refused(wrong):
    refused(check_mbr, wrong)


COLLAPSES = {"mbr": [Collapse(of("mbr", n=1), MODEL)]
    + [Collapse(of("mbr", n=3, temperature=0.0, likeness=name), GREEDY) for name in MEASURES]}


def risk(texts: list[str], like) -> int:
    means = [sum(like(text, other) for other in texts) for text in texts]
    return means.index(max(means))


@pytest.mark.oracle("mbr")
@pytest.mark.parametrize("likeness", MEASURES)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_minimum_bayes_risk_has_the_distribution_of_the_text_most_similar_to_all(likeness, n):
    model, prompt = TableModel(["a1 ", "b", "."], ".", seed=3), [0, 1]

    def choose(texts: list[Text]) -> Text:
        voters = entire(texts, model)
        return voters[
            risk(["".join(model.letters[token] for token in text if token != 2) for text in voters], MEASURES[likeness])
        ]

    ours = law(of("mbr", n=n, likeness=likeness), {"target": model}, prompt, 2)
    assert distance(ours, chosen_by_brute_force(model, prompt, 2, n, choose)) < EXACT


@pytest.mark.slow
@pytest.mark.refuses("mbr")
def test_choosing_the_most_probable_text_instead_is_detected():
    model, prompt = TableModel(["a1 ", "b", "."], ".", seed=3), [0, 1]
    likeliest = chosen_by_brute_force(
        model, prompt, 2, 3, lambda texts: max(entire(texts, model), key=lambda text: logp(model, prompt, text))
    )
    assert distance(law(of("mbr", n=3), {"target": model}, prompt, 2), likeliest) > WRONG


WORDS = ["the red fox", "the  red fox", "a fox", "12 foxes", "", "the fox, red!", "no. 12", "xyz"]


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_similarity_is_symmetric_within_zero_and_one_and_one_for_equal_texts(measure):
    for left, right in product(WORDS, repeat=2):
        assert measure(left, right) == measure(right, left) and 0 <= measure(left, right) <= 1
        assert measure(left, left) == 1
    assert measure("the red fox", "pqw") == 0


def test_worked_examples_of_similarity():
    assert MEASURES["words"]("the red fox", "a red fox") == pytest.approx(2 / 3)
    assert MEASURES["edits"]("the red fox", "the old red fox") == pytest.approx(3 / 4)
    assert MEASURES["letters"]("abc", "abd") == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)
    assert MEASURES["number"]("6 * 7 = 42", "#### 42.0") == 1 and MEASURES["number"]("it is 4", "it is 5") == 0
    assert edit_distance("kitten", "sitting") == 3
