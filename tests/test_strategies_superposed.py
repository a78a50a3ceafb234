"""Superposed decoding: which answer it chooses, by hand, and wrong variants against the same check."""
from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from pairs import pair
from tables import TableModel, Text, watch

from playground.contract import Decoder, make
from playground.contract.lane_config import assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.engine.model import ForwardInput, Model
from playground.errors import Refusal
from playground.events import Branches, Forward
from strategies.search.superposed.ngram_counts import Corpus, frequencies
from support.search_oracles import Superposed
from support.search_runs import logp, of, run
from support.searches import gains
from support.wrong_variants import refused

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


def after(model: Model, node: Callable[[ForwardInput], None] | None, token: int) -> torch.Tensor:
    """The row after a prompt and one more token, which `node` may replace by a mixture."""
    store = model.new_store()
    work = ForwardInput(store, [54, 71, 9, token], [-1, 0, 1, 2])
    if node:
        node(work)
    return model.forward([work])[0][0][-1]


def test_a_mixture_dominated_by_one_token_gives_that_tokens_row():
    model = pair("llama").target
    plain = after(model, None, 12)
    shares = torch.tensor([0.0, -50.0], dtype=torch.float64).softmax(0).tolist()
    assert (after(model, lambda work: work.blends.update({3: ([12], [1.0])}), 12) - plain).abs().max() < 1e-9
    assert (after(model, lambda work: work.blends.update({3: ([12, 40], shares)}), 12) - plain).abs().max() < 1e-6
    assert (after(model, lambda work: work.blends.update({3: ([12, 40], [0.5, 0.5])}), 12) - plain).abs().max() > 1e-2


@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_a_token_takes_one_forward_and_one_slot_for_any_number_of_drafts(drafts):
    recorded = run(
        of("superposed", drafts=drafts, audit=False, corpus="abcabdabe"), TableModel("abcdefgh"), [0, 1, 2], 10
    )
    forwards = recorded.of(Forward)
    assert [event.tokens for event in forwards] == [3] + [1] * 9 and forwards[-1].context == 3 + 8


def test_mixture_weights_are_those_of_the_scores_and_sum_to_one():
    recorded = run(
        of("superposed", drafts=3, temperature=1.0, corpus="abcabdabe"), TableModel("abcdefgh"), [0, 1, 2], 2
    )
    scores, shares = (
        next(event.scores for event in recorded.of(Branches) if event.scores),
        recorded.figure("mixture weights"),
    )
    expected = torch.tensor([scores[int(label[1:])] for label in shares["labels"]], dtype=torch.float64).softmax(0)
    assert shares["values"] == pytest.approx(expected.tolist()) and sum(shares["values"]) == pytest.approx(1)


def test_without_ngrams_all_drafts_prefer_the_same_tokens():
    found_ = gains(torch.randn(8, dtype=torch.float64), [[0, 1], [2, 3], [4]], [[0, 1, 2]], alpha=0.0, drafts=2, kept=4)
    assert bool((found_ == found_[0]).all()) and int((found_[0] > -math.inf).sum()) == 4
    assert float(found_[0].exp().sum()) == pytest.approx(1), "what is kept is a distribution again"


def test_a_draft_without_ngram_support_ranks_below_all_supported_ones():
    found_ = gains(torch.zeros(4, dtype=torch.float64), [[0], [3]], [[0, 1, 0, 2]], drafts=2, kept=4)
    supported, lost = found_[0][found_[0] > -math.inf], found_[1]
    assert len(supported) == 2 and float(lost.max()) < float(supported.min()) - 150


def naive_frequency(text: list[int], token: int, corpus: list[list[int]]) -> float:
    """The weighted n-gram frequency by counting substrings."""
    total = 0.0
    for length, weight in enumerate((0.01, 0.04, 0.15, 0.18, 0.12), 1):
        following = [
            story[i + length]
            for story in corpus
            for i in range(len(story) - length)
            if story[i : i + length] == text[-length:]
        ]
        total += weight * following.count(token) / len(following) if following and length <= len(text) else 0.0
    return total


@pytest.mark.oracle("superposed")
def test_ngram_frequencies_are_counts_within_each_text():
    stories = [[0, 1, 2, 0, 1, 0, 2, 1], [2, 2, 0, 1, 1], [1]]
    for context in ([0], [1, 2], [2, 0, 1], [1, 1, 2, 2, 0, 1], [2, 1, 2]):
        found_ = frequencies(Corpus(stories, 5).followers(context), (0.01, 0.04, 0.15, 0.18, 0.12), 3)
        assert found_.tolist() == pytest.approx([naive_frequency(context, token, stories) for token in range(3)])


@pytest.mark.oracle("superposed")
def test_with_ngrams_alone_drafts_are_the_beams_of_the_ngram_model():
    text, prompt = "abcacbbacabcbabcca", [0, 1]
    corpus = [["abc".index(letter) for letter in text]]
    recorded = run(of("superposed", drafts=9, alpha=1.0, corpus=text), TableModel("abc", spread=0.0), prompt, 3)

    def score(written: Text) -> float:
        chances = [naive_frequency([*prompt, *written[:i]], token, corpus) for i, token in enumerate(written)]
        return sum(map(math.log, chances)) if all(chances) else -math.inf

    ranked = sorted((text for text in product(range(3), repeat=3) if score(text) > -math.inf), key=score, reverse=True)
    assert len(ranked) >= 9 and [score(text) / 3 for text in ranked[:9]] == pytest.approx(
        [rank for _, rank in recorded.finished()]
    )
    assert recorded.finished()[0][0] == ranked[0] == recorded.texts()[0]


def test_drafts_are_distinct_and_contain_no_inner_end_token():
    most = 0
    for seed in range(4):
        model = TableModel("abcde", "e", seed)
        for lane in watch(
            assemble(of("superposed", drafts=4, corpus="abcdeabdcae")),
            {"target": model},
            [0, 1],
            Limits(0, 10),
            Draws(0),
        ):
            texts = [tuple(leaf.written) for leaf in lane.leaves.values() if leaf.written]
            assert len(set(texts)) == len(texts) and all(4 not in text[:-1] for text in texts)
            assert all((text[-1] == 4) == (leaf.reason == "end") for text, leaf in zip(texts, lane.leaves.values()))
            most = max(most, len(texts))
    assert most > 4


def test_true_log_probabilities_are_reported_with_the_scores():
    model, prompt = TableModel("abcde", "e", seed=2), [0, 1]
    recorded = run(of("superposed", corpus="abcdabdcae"), model, prompt, 6)
    figure, texts = recorded.figure("finished drafts"), recorded.texts()
    truth = [logp(model, prompt, texts[int(label[1:])]) for label in figure["rows"]]
    assert len(truth) == 3 and [row[1] for row in figure["values"]] == pytest.approx(truth)
    assert all(abs(score - true) > 0.1 for score, true in figure["values"])


def test_a_mixture_of_equal_tokens_is_that_token():
    """Two drafts that end in the same token: on a real network the row is that of the token."""
    model = pair("llama").target
    assert (
        after(model, lambda work: work.blends.update({3: ([12, 12], [0.3, 0.7])}), 12) - after(model, None, 12)
    ).abs().max() < 1e-9


def test_fewer_kept_tokens_than_drafts_are_refused():
    with pytest.raises(Refusal, match="2 kept tokens are too few for 3 drafts"):
        make("superposed", kept=2)
