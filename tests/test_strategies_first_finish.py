"""First finish search: which answer it chooses, by hand, and wrong variants against the same check."""
from __future__ import annotations

from collections import Counter

import pytest
from registry import Collapse
from tables import Law, TableModel, Text, distance, law, product_law

from playground.contract import Decoder, make
from playground.errors import Refusal
from playground.events import Forward, Note
from support.chosen_answers import END, model_of, same_law
from support.laws import EXACT, WRONG
from support.search_oracles import PROMPT, FirstFinish
from support.search_runs import chosen_by_brute_force, entire, logp, of, run
from support.speculation import GREEDY, MODEL
from support.wrong_variants import refused


def check_first_finish(cls: type[Decoder]) -> None:
    """The first of the shortest texts that ended; where none did, the largest log-probability per token."""
    model = model_of(3)

    def first(texts: list[Text]) -> Text:
        ended = [text for text in texts if text[-1] == END]
        return min(ended, key=len) if ended else max(texts, key=lambda text: logp(model, PROMPT, text) / len(text))

    same_law(cls(n=2, temperature=0.7), model, 0.7, first)


class WaitsForTwo(FirstFinish):
    def __post_init__(self):
        self.wait, self.answer = 2, "text"


class TheLastOfThem(FirstFinish):
    def decode(self, lm):
        self.wait = self.n
        return super().decode(lm)

    def _elected(self, ended):
        return ended[-1]


@pytest.mark.oracle("first_finish")
def test_first_finish_takes_the_shortest_text_that_ends():
    check_first_finish(FirstFinish)


@pytest.mark.refuses("first_finish")
@pytest.mark.parametrize("wrong", [WaitsForTwo, TheLastOfThem])
def test_a_wrong_first_finish_is_refused(wrong):
    refused(check_first_finish, wrong)


COLLAPSES = {
    "first_finish": [
        Collapse(of("first_finish", n=1, temperature=1.0), MODEL),
        Collapse(of("first_finish", n=3, temperature=0.0), GREEDY),
        Collapse(of("first_finish", n=3, wait=3, answer="text", temperature=0.0), GREEDY),
    ],
}


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
