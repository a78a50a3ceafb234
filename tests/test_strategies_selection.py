"""Selection among samples, and superposed decoding."""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
import torch
from pairs import pair
from tables import TableModel, Text, distance, law, product_law, watch, write

import playground
from playground.contract import make
from playground.contract.lane_config import assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.engine.forward_input import ForwardInput
from playground.engine.model import ForwardInput, Model
from playground.errors import Refusal
from playground.events import Branches, Cache, Forward, Note
from strategies.search.superposed.ngram_counts import Corpus, frequencies
from support.search_runs import chosen_by_brute_force, entire, logp, of, run
from support.searches import gains
from support.speculation import GREEDY

# --- selection among samples ---

@pytest.mark.oracle("best_of_n")
@pytest.mark.parametrize("score", ["mean", "sum"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_best_of_n_has_the_distribution_of_a_choice_among_independent_texts(score, n):
    model, prompt = TableModel("ab.", ".", seed=3), [0, 1]

    def choose(texts: list[Text]) -> Text:
        return max(
            entire(texts, model), key=lambda text: logp(model, prompt, text) / (len(text) if score == "mean" else 1)
        )

    ours = law(of("best_of_n", n=n, score=score, temperature=1.0), {"target": model}, prompt, 2)
    assert distance(ours, chosen_by_brute_force(model, prompt, 2, n, choose)) < 1e-9


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


def reasoner(context: Text) -> torch.Tensor:
    """One common way of reasoning leads to 1, two rarer ones lead to 2: letters a b c 1 2 and an end."""
    answer = [0, 0, 0, float(context[-1] == 0), float(context[-1] != 0), 0]
    steps = [[0.4, 0.3, 0.3, 0, 0, 0], answer, [0, 0, 0, 0, 0, 1]]
    return torch.tensor(steps[min(len(context), 3) - 1], dtype=torch.float64).log()


@pytest.mark.slow
@pytest.mark.parametrize("n, chance", [(1, 0.6), (3, 0.648), (5, 0.68256)])
def test_voting_finds_the_most_frequent_answer_where_greedy_finds_another(n, chance):
    model = TableModel("abc12.", ".", rule=reasoner)
    assert write(assemble(GREEDY), {"target": model}, [0], Limits(0, 5), Draws(0)).text == "a1"
    ours = law(of("self_consistency", n=n, temperature=1.0), {"target": model}, [0], 5)
    assert sum(p for text, p in ours.items() if 4 in text) == pytest.approx(chance)


@pytest.mark.parametrize("seed, last", [(1, 1), (2, 3), (0, 8)])
def test_the_note_shows_the_votes_and_the_deciding_text(seed, last):
    model = TableModel("abc12.", ".", rule=reasoner)
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


@pytest.fixture(scope="module")
def bundled():
    return playground.load()


@pytest.mark.slow
def test_eight_samples_share_one_prompt_in_the_cache(bundled):
    prompt = bundled.target.tokens.encode("Once upon a time there was a king who had three sons. " * 12)
    recorded = run(of("best_of_n", n=8, temperature=1.0), bundled.target, prompt, 24)
    caches = recorded.of(Cache)
    slot = caches[0].bytes / len(prompt)
    one_text_and_eight_tails = slot * (len(prompt) + 24 + 8 * 24)
    assert max(event.bytes for event in caches) < 1.3 * one_text_and_eight_tails < 0.5 * 8 * slot * (len(prompt) + 24)


def test_answers_of_the_bundled_model_are_parsed_and_voted_on(bundled):
    question = "Gecost buys 6 boxes of 7 keys. Then 3 of the keys are gone. How many keys does Gecost have now?"
    recorded = playground.run("self_consistency", question, models=bundled, chat=True, knobs={"n": 5})
    assert recorded.text.strip().endswith("#### 39")


# --- superposed decoding ---

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
