"""Self-consistency: which answer it chooses, by hand, and wrong variants against the same check."""
from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from tables import TableModel, Text, distance, law, write

import playground
from playground.contract import Decoder
from playground.contract.lane_config import assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.events import Note
from support.chosen_answers import END, bundled, same_law, whole  # noqa: F401 - a fixture
from support.search_oracles import PROMPT, SelfConsistency
from support.search_runs import chosen_by_brute_force, entire, logp, of, run
from support.speculation import GREEDY
from support.wrong_variants import refused


def reasoner(context: Text) -> torch.Tensor:
    """Answers a and b, a the more probable one; some texts end at once, and some not at all."""
    row = [0.25, 0.0, 0.75] if len(context) > len(PROMPT) else [0.5, 0.3, 0.2]
    return torch.tensor(row, dtype=torch.float64).log()


def check_self_consistency(cls: type[Decoder]) -> None:
    """Most votes win, of equals the larger sum of log-probabilities; the end alone is no answer and does not vote."""
    model = TableModel("ab.", ".", rule=reasoner)

    def elected(texts: list[Text]) -> Text:
        voters = [text for text in whole(texts) if text != (END,)] or whole(texts)
        return max(voters, key=lambda text: (voters.count(text), voters.count(text) * logp(model, PROMPT, text)))

    same_law(cls(n=3, answer="text", temperature=0.7), model, 0.7, elected)


def lopsided(context: Text) -> torch.Tensor:
    """Answer a is so probable that one text with it outweighs two with b."""
    row = [0.25, 0.0, 0.75] if len(context) > len(PROMPT) else [0.9, 0.06, 0.04]
    return torch.tensor(row, dtype=torch.float64).log()


def check_weighted(cls: type[Decoder]) -> None:
    """The answer with the largest sum of geometric means wins."""
    model = TableModel("ab.", ".", rule=lopsided)

    def elected(texts: list[Text]) -> Text:
        voters = [text for text in whole(texts) if text != (END,)] or whole(texts)
        weigh = {text: voters.count(text) * math.exp(logp(model, PROMPT, text) / len(text)) for text in voters}
        return max(voters, key=lambda text: (weigh[text], voters.count(text) * logp(model, PROMPT, text)))

    same_law(cls(n=3, answer="text", temperature=0.7, vote="weighted"), model, 0.7, elected)


class LikeliestAnswer(SelfConsistency):
    def _winner(self, votes):
        return max(votes, key=lambda answer: sum(sample.logp for sample in votes[answer]))


class FewestVotes(SelfConsistency):
    def _winner(self, votes):
        return min(votes, key=lambda answer: len(votes[answer]))


class FirstOfEquals(SelfConsistency):
    def _winner(self, votes):
        return max(votes, key=lambda answer: len(votes[answer]))


class SilenceVotes(SelfConsistency):
    """Counts a text without an answer as an answer of its own."""

    def _read(self, text):
        return super()._read(text) or ""


@pytest.mark.oracle("self_consistency")
def test_self_consistency_has_the_distribution_of_a_vote_among_independent_texts():
    check_self_consistency(SelfConsistency)


class CountsHeads(SelfConsistency):
    def _weight(self, voters):
        return len(voters)


@pytest.mark.oracle("self_consistency")
def test_a_weighted_vote_has_the_law_of_summed_probabilities_per_token():
    check_weighted(SelfConsistency)


@pytest.mark.refuses("self_consistency")
def test_a_weighted_vote_that_counts_heads_is_refused():
    refused(check_weighted, CountsHeads)


@pytest.mark.refuses("self_consistency")
@pytest.mark.parametrize("wrong", [LikeliestAnswer, FewestVotes, FirstOfEquals, SilenceVotes])
def test_a_wrong_self_consistency_is_refused(wrong):
    refused(check_self_consistency, wrong)


@pytest.mark.oracle("self_consistency")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_self_consistency_is_minimum_bayes_risk_with_exact_agreement(n):
    model, prompt = TableModel("ab.", ".", seed=3), [0, 1]

    def choose(texts: list[Text]) -> Text:
        voters = entire(texts, model)
        answering = [text for text in voters if text != (2,)]  # the end alone is no answer

        def agreement(text: Text) -> tuple[int, float]:
            alike = [other for other in answering if other == text]
            return len(alike), sum(logp(model, prompt, other) for other in alike)

        return max(answering or voters, key=agreement)

    ours = law(of("self_consistency", n=n, answer="text", temperature=1.0), {"target": model}, prompt, 2)
    assert distance(ours, chosen_by_brute_force(model, prompt, 2, n, choose)) < 1e-9


def two_ways(context: Text) -> torch.Tensor:
    """One common way of reasoning leads to 1, two rarer ones lead to 2: letters a b c 1 2 and an end."""
    answer = [0, 0, 0, float(context[-1] == 0), float(context[-1] != 0), 0]
    steps = [[0.4, 0.3, 0.3, 0, 0, 0], answer, [0, 0, 0, 0, 0, 1]]
    return torch.tensor(steps[min(len(context), 3) - 1], dtype=torch.float64).log()


@pytest.mark.slow
@pytest.mark.parametrize("n, chance", [(1, 0.6), (3, 0.648), (5, 0.68256)])
def test_voting_finds_the_most_frequent_answer_where_greedy_finds_another(n, chance):
    model = TableModel("abc12.", ".", rule=two_ways)
    assert write(assemble(GREEDY), {"target": model}, [0], Limits(0, 5), Draws(0)).text == "a1"
    ours = law(of("self_consistency", n=n, temperature=1.0), {"target": model}, [0], 5)
    assert sum(p for text, p in ours.items() if 4 in text) == pytest.approx(chance)


@pytest.mark.parametrize("seed, last", [(1, 1), (2, 3), (0, 8)])
def test_the_note_shows_the_votes_and_the_deciding_text(seed, last):
    model = TableModel("abc12.", ".", rule=two_ways)
    recorded = run(of("self_consistency", n=9, temperature=1.0), model, [0], 5, seed=seed)
    answers = [model.letters[text[1]] for number, text in sorted(recorded.texts().items()) if number]
    votes, figure = Counter(answers), recorded.figure("answers")
    assert dict(zip(figure["labels"], figure["values"])) == votes and len(votes) == 2
    # of equals 1: it is more probable
    in_front = ["1" if answers[:count].count("1") >= count / 2 else "2" for count in range(1, 10)]
    assert last == max((count + 1 for count, winner in enumerate(in_front, 1) if winner != in_front[-1]), default=1)
    assert (
        recorded.of(Note)[-1].text
        == f"'{in_front[-1]}' has {votes[in_front[-1]]} of 9 votes; no text after #{last} changed that."
    )


def test_answers_of_the_bundled_model_are_parsed_and_voted_on(bundled):
    question = "Gecost buys 6 boxes of 7 keys. Then 3 of the keys are gone. How many keys does Gecost have now?"
    recorded = playground.run("self_consistency", question, models=bundled, chat=True, knobs={"n": 5})
    assert recorded.text.strip().endswith("#### 39")
