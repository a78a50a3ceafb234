"""Searches over several texts: beams, selection among samples, and superposed drafts, against brute force."""
from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import pytest
import torch
from pairs import TOKENIZER, network, pair
from registry import Collapse
from tables import TableModel, Text, distance, law, product_law, watch, write

import playground
from playground.algorithms.search.beams import Offer, best, distinct, shared_start
from playground.contract import find, make
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.engine.forward_input import ForwardInput
from playground.engine.model import ForwardInput, Model
from playground.errors import Refusal
from playground.events import Branches, Cache, Forward, Note
from strategies.search.superposed.ngram_counts import Corpus, frequencies
from support.search_runs import chosen_by_brute_force, entire, logp, of, run
from support.speculation import GREEDY, MODEL

BEAMS = LaneConfig("beam_search", {"length_exponent": 0.0})


COLLAPSES = {
    "beam_search": [
        Collapse(of("beam_search", beams=1), GREEDY),
        Collapse(of("beam_search", beams=1, length_exponent=0.0, early_stop=True), GREEDY),
    ],
    "diverse_beam_search": [
        Collapse(of("diverse_beam_search", beams=1, groups=1), GREEDY),
        Collapse(of("diverse_beam_search", beams=4, groups=1, strength=2.0), BEAMS),
    ]
    + [Collapse(of("diverse_beam_search", beams=4 * groups, groups=groups, strength=0.0), BEAMS) for groups in (2, 3)],
    "best_of_n": [
        Collapse(of("best_of_n", n=1, temperature=1.0), MODEL),
        Collapse(of("best_of_n", temperature=0.0), GREEDY),
    ],
    "self_consistency": [
        Collapse(of("self_consistency", n=1, temperature=1.0), MODEL),
        Collapse(of("self_consistency", temperature=0.0, answer="text"), GREEDY),
    ],
    "superposed": [Collapse(of("superposed", drafts=1, alpha=0.0, temperature=t), GREEDY) for t in (0.06, 1.0)],
}


def all_texts(model: TableModel, prompt: list[int], length: int) -> list[Text]:
    """Every text that ends, or is as long as it may be."""
    return list(product_law(model, prompt, length))


# --- beam search ---

@pytest.mark.oracle("beam_search")
@pytest.mark.parametrize("letters, ends, length", [("abcd", "", 3), ("ab", "", 5), ("ab.", ".", 4)])
def test_a_beam_for_every_prefix_finds_the_most_probable_text(letters, ends, length):
    greedy_too = 0
    for seed in range(8):
        model, prompt = TableModel(letters, ends, seed, spread=0.5), [0, 1]
        truth = max(all_texts(model, prompt, length), key=lambda text: logp(model, prompt, text))
        assert run(of("beam_search", beams=16, length_exponent=0.0), model, prompt, length).texts()[0] == truth
        greedy_too += run(GREEDY, model, prompt, length).texts()[0] == truth
    assert greedy_too < 8, "a search is only tested where greedy misses"


@dataclass
class Hypothesis:
    tokens: Text = ()
    score: float = 0.0


@dataclass
class Group:
    live: list[Hypothesis] = field(default_factory=lambda: [Hypothesis()])
    finished: list[Hypothesis] = field(default_factory=list)


Price = Callable[[torch.Tensor, Counter, Counter], torch.Tensor]
"""price(scores [V], what earlier groups took in this step, what all groups took in the step before) -> gains [V]"""


@dataclass
class Reference:
    """Diverse beam search as specified: tokens in tuples, every context read again, nothing shared with the code under
    test.
    """

    model: TableModel
    prompt: list[int]
    width: int
    groups: int
    price: Price
    length: int

    def search(self) -> list[list[Hypothesis]]:
        groups, before = [Group() for _ in range(self.groups)], Counter()
        for _ in range(self.length):
            taken = Counter()
            for group in groups:
                group.live = self._step(group, taken, before) if group.live else []
                taken.update(hypothesis.tokens[-1] for hypothesis in group.live)
                group.live = [] if self._is_over(group) else group.live
            before = taken
        return [sorted([*group.finished, *group.live], key=lambda h: -h.score)[:self.width] for group in groups]

    def _step(self, group: Group, taken: Counter, before: Counter) -> list[Hypothesis]:
        offers = [
            Hypothesis((*h.tokens, token), h.score + gain)
            for h in group.live
            for token, gain in enumerate(
                self.price(self.model.scores((*self.prompt, *h.tokens)), taken, before).tolist()
            )
        ]
        offers.sort(key=lambda offer: -offer.score)
        ended = [offer for offer in offers[:self.width] if offer.tokens[-1] in self.model.end_ids]
        group.finished = sorted([*group.finished, *ended], key=lambda h: -h.score)[:self.width]
        return [offer for offer in offers if offer.tokens[-1] not in self.model.end_ids][:self.width]

    def _is_over(self, group: Group) -> bool:
        return len(group.finished) == self.width and all(h.score <= group.finished[-1].score for h in group.live)


STRENGTH = 0.6


def charged(gains: torch.Tensor, counts: Counter) -> torch.Tensor:
    return gains - torch.tensor([STRENGTH * counts[token] for token in range(len(gains))])


def by_the_book(scores, taken, before):
    return charged(scores.log_softmax(-1), taken)


def once_however_many_took_it(scores, taken, before):
    return charged(scores.log_softmax(-1), Counter(set(taken)))


def before_the_softmax(scores, taken, before):
    return charged(scores, taken).log_softmax(-1)


def what_the_step_before_took(scores, taken, before):
    return charged(scores.log_softmax(-1), before)


def nothing(scores, taken, before):
    return scores.log_softmax(-1)


def found(model: TableModel, prompt: list[int], length: int, beams: int, groups: int) -> list[list[tuple[Text, float]]]:
    """Finished texts of every group and their ranking scores, as reported by diverse beam search."""
    recorded = run(of("diverse_beam_search", beams=beams, groups=groups, strength=STRENGTH), model, prompt, length)
    figure, texts, columns = recorded.figure("finished texts"), recorded.texts(), defaultdict(list)
    group_of = {number: number for number in range(1, groups + 1)}
    for event in recorded.of(Branches):
        group_of |= {child: group_of[parent] for child, parent in event.born if parent}
    for label, (model_sum, penalties, score) in zip(figure["rows"], figure["values"]):
        text = texts[int(label[1:])]
        assert model_sum == pytest.approx(logp(model, prompt, text)) and score == pytest.approx(model_sum + penalties)
        columns[group_of[int(label[1:])]].append((text, score))
    return [columns[group] for group in range(1, groups + 1)]


def same(groups: list[list[tuple[Text, float]]], reference: list[list[Hypothesis]]) -> bool:
    return [[text for text, _ in group] for group in groups] == [[h.tokens for h in group] for group in reference]


@pytest.mark.oracle("diverse_beam_search")
@pytest.mark.parametrize("beams, groups", [(3, 1), (4, 2), (6, 3), (4, 4), (6, 2)])
@pytest.mark.parametrize("ends", ["", "e"])
def test_every_group_equals_the_algorithm_by_hand(beams, groups, ends):
    for seed in range(6):
        model, prompt = TableModel("abcde", ends, seed, spread=0.8), [0, 1, 2]
        reference, recorded = (
            Reference(model, prompt, beams // groups, groups, by_the_book, 6).search(),
            found(model, prompt, 6, beams, groups),
        )
        assert same(recorded, reference)
        assert [s for group in recorded for _, s in group] == pytest.approx(
            [h.score for group in reference for h in group]
        )


@pytest.mark.refuses("diverse_beam_search")
@pytest.mark.parametrize("wrong", [once_however_many_took_it, before_the_softmax, what_the_step_before_took, nothing])
def test_another_diversity_penalty_finds_other_texts(wrong):
    differ = [not same(found(model, [0], 6, 6, 3), Reference(model, [0], 2, 3, wrong, 6).search())
              for model in (TableModel("abcde", seed=seed, spread=0.8) for seed in range(4))]
    assert any(differ)


DIVERSE = {
    "a reward in place of a penalty": lambda right: lambda self, logp, taken: 2 * logp - right(self, logp, taken),
    "one price however many took it": lambda right: lambda self, logp, taken: right(self, logp, Counter(set(taken))),
    "no price": lambda right: lambda self, logp, taken: logp,
}


@pytest.mark.refuses("diverse_beam_search")
@pytest.mark.parametrize("wrong", DIVERSE.values(), ids=DIVERSE)
def test_a_wrong_diverse_beam_search_is_refused(wrong, monkeypatch):
    cls = find("diverse_beam_search")
    monkeypatch.setattr(cls, "_penalised", wrong(cls._penalised))
    with pytest.raises(AssertionError):
        test_every_group_equals_the_algorithm_by_hand(6, 3, "")


def test_the_first_group_is_a_beam_search_of_its_own_width():
    for seed in range(5):
        model = TableModel("abcde", "e", seed)
        plain = run(of("beam_search", beams=3, length_exponent=0.0), model, [0, 1], 7).finished()
        assert [text for text, _ in found(model, [0, 1], 7, 6, 2)[0]] == [text for text, _ in plain]


def test_groups_take_different_tokens_of_similar_probability():
    recorded = run(
        of("diverse_beam_search", beams=5, groups=5, strength=2.0), TableModel("abcdefg", spread=0.1), [0, 1], 8
    )
    texts = [text for text, _ in recorded.finished()]
    assert len(texts) == 5 and all(len(set(tokens)) == 5 for tokens in zip(*texts))


def test_the_text_is_the_group_winner_of_highest_model_probability():
    for seed in range(6):
        model = TableModel("abcd", seed=seed)
        recorded = run(of("diverse_beam_search", beams=6, groups=3, strength=STRENGTH), model, [0], 5)
        winners = [group[0][0] for group in found(model, [0], 5, 6, 3)]
        assert recorded.texts()[0] == max(winners, key=lambda text: logp(model, [0], text))


@pytest.mark.oracle("beam_search")
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("exponent, early", [(0.0, False), (1.0, False), (1.0, True)])
def test_beam_search_equals_the_librarys(architecture, exponent, early):
    prompt = [54, 71, 71, 54, 9]
    library, ours = network(architecture), network(architecture)
    end = run(GREEDY, pair(architecture).target, prompt, 4).texts()[0][-1]  # a token that occurs early
    ours.generation_config.eos_token_id = end
    expected = library.generate(
        torch.tensor([prompt]),
        num_beams=4,
        num_return_sequences=4,
        do_sample=False,
        max_new_tokens=12,
        length_penalty=exponent,
        early_stopping=early,
        eos_token_id=end,
        pad_token_id=319,
    )
    texts = [[token for token in row[len(prompt):] if token != 319] for row in expected.tolist()]
    recorded = run(
        of("beam_search", beams=4, length_exponent=exponent, early_stop=early),
        Model(ours, TOKENIZER, architecture),
        prompt,
        12,
    )
    assert [list(text) for text, _ in recorded.finished()] == texts
    assert any(text[-1] == end for text in texts) and list(recorded.texts()[0]) == texts[0]


def test_tied_candidates_are_ordered_by_beam_and_id():
    sums = torch.tensor([[0.0, 2.0, 1.0], [1.0, 2.0, -math.inf]])
    assert best(sums, 4) == [Offer(0, 1, 2.0), Offer(1, 1, 2.0), Offer(0, 2, 1.0), Offer(1, 0, 1.0)]
    assert len(best(sums, 9)) == 5


def test_enough_beams_continue_if_several_tokens_end_a_text():
    model = TableModel(
        "abxyz", "xyz", rule=lambda context: torch.tensor([0.0, -0.1, 5.0, 5.1, 5.2], dtype=torch.float64)
    )
    recorded = run(of("beam_search", beams=2, length_exponent=0.0), model, [0], 3)
    assert [text for text, _ in recorded.finished()] == [(4,), (3,)]
    assert [len(event.scores) for event in recorded.of(Branches) if event.scores] == [2]


def test_beams_that_cannot_be_split_are_refused():
    with pytest.raises(Refusal, match="4 beams cannot be split into 3 equal groups"):
        make("diverse_beam_search", beams=4, groups=3)


def test_diversity_counts_distinct_ngrams():
    assert distinct([[1, 2, 1], [1, 2, 3]], 1) == 3 / 6 and distinct([[1, 2, 1], [1, 2, 3]], 2) == 3 / 4
    assert shared_start([[1, 2, 1], [1, 2, 3]]) == 2 and shared_start([[1], [2]]) == 0


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


def gains(raw: torch.Tensor, contexts: list[list[int]], corpus: list[list[int]], **knobs) -> torch.Tensor:
    strategy, lookup = make("superposed", **knobs), Corpus(corpus, 5)
    return strategy._gains(raw, [lookup.followers(context) for context in contexts])


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
