"""Selection among samples, labels by perplexity and superposed decoding against their formulas."""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from itertools import product

import pytest
import torch
from runs import run
from tables import Law, TableModel, Text, distance, law, product_law

from playground.contract import Decoder
from strategies.search.superposed.ngram_counts import Corpus
from support.search_oracles import (
    MBR,
    PROMPT,
    BestOfN,
    FirstFinish,
    Labels,
    SelfConsistency,
    Superposed,
    lane_of,
    logp,
    refused,
)

END = 2  # of the letters a, b and "."


# --- selection among independent samples ---

Choose = Callable[[list[Text]], Text]


def chosen(model: TableModel, n: int, t: float, choose: Choose) -> Law:
    """The law of a choice among n independent texts of two tokens drawn at a temperature, summed over all of them."""
    outcomes, total = product_law(model, PROMPT, 2, lambda scores, history: scores / t), defaultdict(float)
    for texts in product(outcomes, repeat=n):
        total[choose(list(texts))] += math.prod(outcomes[text] for text in texts)
    return dict(total)


def whole(texts: list[Text]) -> list[Text]:
    """Texts that ended; all of them where none did."""
    return [text for text in texts if text[-1] == END] or texts


def same_law(decoder: Decoder, model: TableModel, t: float, choose: Choose) -> None:
    found = law(lane_of(decoder), {"target": model}, PROMPT, 2)
    assert distance(found, chosen(model, decoder.n, t, choose)) < 1e-9


def model_of(seed: int) -> TableModel:
    return TableModel("ab.", ".", seed, spread=0.8)


def check_best_of_n(cls: type[Decoder]) -> None:
    """The model's log-probability decides, whatever the sampling temperature."""
    for seed, (score, power) in product((3,), (("mean", 1), ("sum", 0))):
        model = model_of(seed)

        def best(texts: list[Text], model=model, power=power) -> Text:
            return max(whole(texts), key=lambda text: logp(model, text) / len(text) ** power)

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


def reasoner(context: Text) -> torch.Tensor:
    """Answers a and b, a the more probable one; some texts end at once, and some not at all."""
    row = [0.25, 0.0, 0.75] if len(context) > len(PROMPT) else [0.5, 0.3, 0.2]
    return torch.tensor(row, dtype=torch.float64).log()


def check_self_consistency(cls: type[Decoder]) -> None:
    """Most votes win, of equals the larger sum of log-probabilities; the end alone is no answer and does not vote."""
    model = TableModel("ab.", ".", rule=reasoner)

    def elected(texts: list[Text]) -> Text:
        voters = [text for text in whole(texts) if text != (END,)] or whole(texts)
        return max(voters, key=lambda text: (voters.count(text), voters.count(text) * logp(model, text)))

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
        weigh = {text: voters.count(text) * math.exp(logp(model, text) / len(text)) for text in voters}
        return max(voters, key=lambda text: (weigh[text], voters.count(text) * logp(model, text)))

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


def check_first_finish(cls: type[Decoder]) -> None:
    """The first of the shortest texts that ended; where none did, the largest log-probability per token."""
    model = model_of(3)

    def first(texts: list[Text]) -> Text:
        ended = [text for text in texts if text[-1] == END]
        return min(ended, key=len) if ended else max(texts, key=lambda text: logp(model, text) / len(text))

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


# --- labels by perplexity ---

NAMES = ["a", "ab", "abba", "bcd", "dd"]


def readings(model: TableModel, prompt: list[int], label: str, end: bool) -> dict[str, float]:
    """Nats per token of the label, in sum, and per token of prompt and label; `end` counts the end as a token."""
    text = (*("abcde".index(letter) for letter in label), *([4] if end else []))
    cost, before = -logp(model, text, prompt), -logp(model, tuple(prompt[1:]), prompt[:1])
    return {
        "mean": cost / len(text),
        "sum": cost,
        "whole": (before + cost) / (len(prompt) - 1 + len(text)),
    }


def check_labels(cls: type[Decoder]) -> None:
    for seed, reading, end in product(range(4), ("mean", "sum", "whole"), (True, False)):
        model, prompt = TableModel("abcde", "e", seed), [3, 1, 2, 0]
        lane, _ = run(lane_of(cls(labels="|".join(NAMES), reading=reading, end=end)), {"target": model}, prompt, 8)
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


# --- superposed decoding ---

STORIES = [[0, 1, 2, 0, 1, 0, 2, 1], [2, 2, 0, 1, 1]]  # token 3 is in none of them
CONTEXTS = [[0, 1], [2, 0, 1], [3], [1, 2, 2, 0]]


def following(context: list[int], token: int) -> float:
    """Weighted share of a token among those after the context's last 1, 2, ... tokens, by counting in every story."""
    total = 0.0
    for size, weight in enumerate((0.01, 0.04, 0.15, 0.18, 0.12), 1):
        ending = context[-size:] if size <= len(context) else None
        after = [
            story[i + size] for story in STORIES for i in range(len(story) - size) if story[i : i + size] == ending
        ]
        total += weight * after.count(token) / len(after) if after else 0.0
    return total


def expected_gain(row: list[float], context: list[int], token: int, alpha: float) -> float:
    """(1 - alpha) ln q + alpha ln f among the three best tokens; a fixed loss where no n-gram knows any of them."""
    best = sorted(range(len(row)), key=lambda v: -row[v])[:3]
    if token not in best:
        return -math.inf
    logq = row[token] / 0.5 - math.log(sum(math.exp(row[v] / 0.5) for v in best))
    known = [following(context, v) for v in best]
    if not any(known):
        return (1 - alpha) * logq - 200
    share = following(context, token)
    return (1 - alpha) * logq + alpha * math.log(share) if share else -math.inf


def check_superposed(cls: type[Decoder]) -> None:
    for seed, alpha in product(range(5), (0.3, 0.54, 0.9)):
        row = torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        decoder, corpus = cls(drafts=2, kept=3, temperature=0.5, alpha=alpha), Corpus(STORIES, 5)
        found = decoder._gains(row, [corpus.followers(context) for context in CONTEXTS])
        expected = [[expected_gain(row.tolist(), context, v, alpha) for v in range(4)] for context in CONTEXTS]
        assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64))


class WeightsSwapped(Superposed):
    def _gains(self, raw, followers):
        self.alpha = 1 - self.alpha
        return super()._gains(raw, followers)


class NormalisedOverAll(Superposed):
    """Takes the probability of a token among all tokens in place of that among those kept."""

    def _gains(self, raw, followers):
        missing = (raw / self.temperature).log_softmax(-1).topk(self.kept).values.logsumexp(-1)
        return super()._gains(raw, followers) + (1 - self.alpha) * missing


class NeverLoses(Superposed):
    def __post_init__(self):
        self.penalty = 0.0


class ColdAfterwards(Superposed):
    """Ignores the temperature in the scores."""

    def _gains(self, raw, followers):
        return super()._gains(raw * self.temperature, followers)


@pytest.mark.oracle("superposed")
def test_superposed_draft_scores_equal_the_formula():
    check_superposed(Superposed)


@pytest.mark.refuses("superposed")
@pytest.mark.parametrize("wrong", [WeightsSwapped, NormalisedOverAll, NeverLoses, ColdAfterwards])
def test_a_wrong_superposed_is_refused(wrong):
    refused(check_superposed, wrong)
