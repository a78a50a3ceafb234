"""Best of N: which answer it chooses, by hand, and wrong variants against the same check."""
from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from tables import TableModel, Text, law, product_law

from playground.contract import Decoder
from playground.events import Cache, Forward
from support.chosen_answers import bundled, model_of, same_law, whole  # noqa: F401 - a fixture
from support.option_searches import END, LETTERS, START, answer
from support.search_oracles import PROMPT, BestOfN
from support.search_runs import entire, logp, of, run
from support.wrong_variants import refused


def check_best_of_n(cls: type[Decoder]) -> None:
    """The model's log-probability decides, whatever the sampling temperature."""
    for seed, (score, power) in product((3,), (("mean", 1), ("sum", 0))):
        model = model_of(seed)

        def best(texts: list[Text], model=model, power=power) -> Text:
            return max(whole(texts), key=lambda text: logp(model, PROMPT, text) / len(text) ** power)

        same_law(cls(n=2, score=score, temperature=0.5), model, 0.5, best)


class TakesTheWorst(BestOfN):
    def _score(self, sample):
        return -super()._score(sample)


class MeanForSum(BestOfN):
    def _score(self, sample):
        return sample.mean


class SumForMean(BestOfN):
    def _score(self, sample):
        return sample.logp


@pytest.mark.oracle("best_of_n")
def test_best_of_n_has_the_distribution_of_a_choice_among_independent_texts():
    check_best_of_n(BestOfN)


@pytest.mark.refuses("best_of_n")
@pytest.mark.parametrize("wrong", [TakesTheWorst, MeanForSum, SumForMean])
def test_a_wrong_best_of_n_is_refused(wrong):
    refused(check_best_of_n, wrong)


@pytest.mark.refuses("best_of_n")
def test_a_best_of_n_that_scores_unfinished_texts_is_refused(monkeypatch):
    monkeypatch.setitem(BestOfN.decode.__globals__, "whole", list)
    refused(check_best_of_n, BestOfN)


@pytest.mark.oracle("best_of_n")
@pytest.mark.parametrize("name", ["best_of_n", "self_consistency"])
def test_forced_tokens_and_the_end_count_in_the_score_of_a_sample(name):
    """Of equally frequent texts, the one the model finds more probable wins, even if most of it was forced."""
    def scores(context: tuple[int, ...]) -> torch.Tensor:
        """a or b, of equal chance; what is forced after an a is a thousand times less probable than after a b."""
        row = torch.full((len(LETTERS),), -40.0, dtype=torch.float64)
        a, b, c, d = LETTERS.convert_tokens_to_ids(list("abcd"))
        row[[a, b]] = math.log(0.499) if context[-1] == START else math.log(0.2)
        row[c], row[d] = math.log(1e-4), math.log(0.3)
        row[END] = math.log(0.1)
        return row

    model = TableModel(tokenizer=LETTERS, rule=scores)
    knobs = {"n": 12, "score": "sum"} if name == "best_of_n" else {"n": 12, "answer": "text"}
    found = answer(name, ("choice", {"options": "acc|bdd"}), model, [START], **knobs)
    assert found.reason == "end" and found.origins == ["sampled"] * 4
    assert name != "best_of_n" or found.text == "bdd"


@pytest.mark.parametrize("n", [2, 4])
def test_best_of_n_follows_from_the_ranks_of_texts_and_has_a_bounded_divergence(n):
    model, prompt = TableModel("ab", seed=1), [0]
    p = product_law(model, prompt, 2)
    ours, below, divergence = law(of("best_of_n", n=n, temperature=1.0), {"target": model}, prompt, 2), 0.0, 0.0
    for text in sorted(p, key=p.get):
        expected = (below + p[text]) ** n - below ** n
        assert ours[text] == pytest.approx(expected)
        below, divergence = below + p[text], divergence + expected * math.log(expected / p[text])
    assert 0 < divergence <= math.log(n) - (n - 1) / n


def test_a_sample_does_not_depend_on_n_and_the_best_score_never_falls():
    model, texts, tops = TableModel("abcde", "e"), {}, []
    for n in (1, 2, 3, 8):
        recorded = run(of("best_of_n", n=n, score="sum", temperature=1.0), model, [0, 1], 10, seed=4)
        texts[n] = [recorded.texts()[number] for number in range(1, n + 1)]
        tops.append(max(logp(model, [0, 1], text) for text in entire(texts[n], model)))
        assert logp(model, [0, 1], recorded.texts()[0]) == pytest.approx(tops[-1])
    assert texts[8][:3] == texts[3] and texts[3][:2] == texts[2] and texts[2][:1] == texts[1]
    assert tops == sorted(tops) and len(set(texts[8])) > 4


def test_many_texts_take_as_many_forwards_as_the_longest_of_them():
    model = TableModel("abcde", "e")
    recorded = run(of("best_of_n", n=8, temperature=1.0), model, [0, 1], 12)
    longest = max(len(text) for number, text in recorded.texts().items() if number)
    assert len(recorded.of(Forward)) == longest < sum(len(text) for number, text in recorded.texts().items() if number)


@pytest.mark.slow
def test_eight_samples_share_one_prompt_in_the_cache(bundled):
    prompt = bundled.target.tokens.encode("Once upon a time there was a king who had three sons. " * 12)
    recorded = run(of("best_of_n", n=8, temperature=1.0), bundled.target, prompt, 24)
    caches = recorded.of(Cache)
    slot = caches[0].bytes / len(prompt)
    one_text_and_eight_tails = slot * (len(prompt) + 24 + 8 * 24)
    assert max(event.bytes for event in caches) < 1.3 * one_text_and_eight_tails < 0.5 * 8 * slot * (len(prompt) + 24)
