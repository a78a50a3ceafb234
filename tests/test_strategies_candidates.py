"""An answer chosen among several samples, by the first to finish or by similarity: against exact distributions."""
from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from registry import Collapse
from tables import Law, TableModel, Text, distance, law, product_law

from playground.algorithms.search.similarity import MEASURES, edit_distance
from playground.contract import make
from playground.errors import Refusal
from playground.events import Forward, Note
from support.search_runs import chosen_by_brute_force, entire, logp, of, run
from support.speculation import GREEDY, MODEL

EXACT, WRONG = 1e-9, 1e-3


COLLAPSES = {
    "first_finish": [
        Collapse(of("first_finish", n=1, temperature=1.0), MODEL),
        Collapse(of("first_finish", n=3, temperature=0.0), GREEDY),
        Collapse(of("first_finish", n=3, wait=3, answer="text", temperature=0.0), GREEDY),
    ],
    "mbr": [Collapse(of("mbr", n=1), MODEL)]
    + [Collapse(of("mbr", n=3, temperature=0.0, likeness=name), GREEDY) for name in MEASURES],
}


# --- first finish ---

def first_finish_law(p: Law, n: int, ends: frozenset[int]) -> Law:
    """p(y) / p(length) * (S(length)^n - S(length + 1)^n) for texts that end; S is the chance to be as long, or never to
    end.
    """
    ended = {text: chance for text, chance in p.items() if text[-1] in ends}
    by_length = Counter()
    for text, chance in ended.items():
        by_length[len(text)] += chance

    def longer(length: int) -> float:
        return 1 - sum(chance for other, chance in by_length.items() if other < length)

    return {
        text: chance / by_length[len(text)] * (longer(len(text)) ** n - longer(len(text) + 1) ** n)
        for text, chance in ended.items()
    }


@pytest.mark.oracle("first_finish")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_first_finish_changes_the_distribution_of_lengths_only(n):
    model, prompt = TableModel("ab.", ".", seed=3, spread=0.7), [0, 1]
    p = product_law(model, prompt, 2)
    expected, ours = (
        first_finish_law(p, n, model.end_ids),
        law(of("first_finish", n=n, temperature=1.0), {"target": model}, prompt, 2),
    )
    assert all(ours[text] == pytest.approx(chance, abs=EXACT) for text, chance in expected.items())
    unfinished = sum(chance for text, chance in p.items() if text[-1] not in model.end_ids)
    assert sum(chance for text, chance in ours.items() if text[-1] not in model.end_ids) == pytest.approx(unfinished**n)


@pytest.mark.refuses("first_finish")
def test_choosing_the_last_to_finish_is_detected():
    model, prompt = TableModel("ab.", ".", seed=3, spread=0.7), [0, 1]
    p = product_law(model, prompt, 2)
    ours = law(of("first_finish", n=2, wait=2, answer="text", temperature=1.0), {"target": model}, prompt, 2)
    assert any(
        abs(ours.get(text, 0.0) - chance) > WRONG for text, chance in first_finish_law(p, 2, model.end_ids).items()
    )


@pytest.mark.parametrize("n", [2, 3])
def test_waiting_for_all_texts_is_a_vote_among_all(n):
    model, prompt = TableModel("ab.", ".", seed=3), [0, 1]

    def choose(texts: list[Text]) -> Text:
        order = sorted((text for text in entire(texts, model) if text[-1] in model.end_ids), key=len)
        voters = [text for text in order if text != (2,)]  # the end alone is no answer
        if not order:
            return max(texts, key=lambda text: logp(model, prompt, text) / len(text))
        return max(voters, key=voters.count) if voters else order[0]

    ours = law(of("first_finish", n=n, wait=n, answer="text", temperature=1.0), {"target": model}, prompt, 2)
    assert distance(ours, chosen_by_brute_force(model, prompt, 2, n, choose)) < EXACT


def test_the_winner_is_the_shortest_text_and_decoding_stops_there():
    model, lengths = TableModel("abcde", "e", spread=0.5), []
    for n in (1, 2, 4, 8):
        recorded, all_of_them = (
            run(of(name, n=n, temperature=1.0), model, [0, 1], 20, seed=5) for name in ("first_finish", "best_of_n")
        )
        whole = [text for number, text in sorted(all_of_them.texts().items()) if number]
        winner = min(whole, key=len)
        assert recorded.texts()[0] == winner and len(recorded.of(Forward)) == len(winner)
        written = [text for number, text in sorted(recorded.texts().items()) if number]
        assert written == [text[:len(winner)] for text in whole]
        lengths.append(len(winner))
    assert lengths == sorted(lengths, reverse=True) and lengths[-1] < lengths[0]


def test_if_no_text_ends_the_likeliest_per_token_wins_and_a_note_says_so():
    model = TableModel("abc", seed=1)
    recorded = run(of("first_finish", n=4, temperature=1.0), model, [0], 6)
    texts = [text for number, text in recorded.texts().items() if number]
    assert (
        recorded.texts()[0] == max(texts, key=lambda text: logp(model, [0], text))
        and "None of 4 texts ended" in recorded.of(Note)[-1].text
    )


def test_waiting_for_more_texts_than_are_sampled_is_refused():
    with pytest.raises(Refusal, match="3 of 2 texts cannot end"):
        make("first_finish", n=2, wait=3)


# --- minimum Bayes risk ---

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
