"""Searches over several texts: beams, selection among samples, and superposed drafts, against brute force."""
from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

import pytest
import torch
from pairs import TOKENIZER, network, pair
from registry import Collapse
from tables import TableModel, Text, product_law

from playground.algorithms.search.beams import Offer, best, distinct, shared_start
from playground.contract import find, make
from playground.contract.lane_config import LaneConfig
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Branches
from support.search_runs import logp, of, run
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
    "a reward in place of a penalty": lambda right: lambda self, lm, own, earlier, logp: -right(
        self, lm, own, earlier, logp
    ),
    "one price however many took it": lambda right: lambda self, lm, own, earlier, logp: right(
        self, lm, own, earlier, logp
    ).clamp(max=1),
    "no price": lambda right: lambda self, lm, own, earlier, logp: torch.zeros_like(logp),
}


@pytest.mark.refuses("diverse_beam_search")
@pytest.mark.parametrize("wrong", DIVERSE.values(), ids=DIVERSE)
def test_a_wrong_diverse_beam_search_is_refused(wrong, monkeypatch):
    cls = find("diverse_beam_search")
    monkeypatch.setattr(cls, "_penalties", wrong(cls._penalties))
    with pytest.raises(AssertionError):
        test_every_group_equals_the_algorithm_by_hand(6, 3, "")


# --- other diversity functions, token by token, as the paper words them ---

VECTORS = torch.randn(5, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def cumulative_by_hand(text: list[int], token: int, earlier: list[list[int]]) -> float:
    return sum(math.exp(-sum(a != b for a, b in zip([*text, token], other)) / 1.5) for other in earlier)


def ngrams_by_hand(text: list[int], token: int, earlier: list[list[int]]) -> float:
    gram = [*text, token][-2:]
    return sum(other[i:i + 2] == gram for other in earlier for i in range(len(other) - 1)) if len(gram) == 2 else 0


def embedding_by_hand(text: list[int], token: int, earlier: list[list[int]]) -> float:
    return sum(float(torch.cosine_similarity(VECTORS[token], VECTORS[other[-1]], dim=0)) for other in earlier)


BY_HAND = {"cumulative": cumulative_by_hand, "n-gram": ngrams_by_hand, "embedding": embedding_by_hand}


def check_diversity(kind: str, reference: Callable, **knobs) -> None:
    chance, lm = Random(1), SimpleNamespace(embed=lambda tokens: VECTORS[tokens])
    decoder = make("diverse_beam_search", diversity=kind, **{"n": 2, "backoff": 1.5, **knobs})
    for length in (0, 1, 4):
        own = [[chance.randrange(5) for _ in range(length)] for _ in range(2)]
        earlier = [[chance.randrange(5) for _ in range(length + 1)] for _ in range(6)]
        found = decoder._penalties(lm, own, earlier, torch.zeros(2, 5, dtype=torch.float64))
        expected = [[reference(text, token, earlier) for token in range(5)] for text in own]
        assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.oracle("diverse_beam_search")
@pytest.mark.parametrize("kind", BY_HAND)
def test_every_diversity_function_is_the_papers(kind):
    check_diversity(kind, BY_HAND[kind])


@pytest.mark.refuses("diverse_beam_search")
@pytest.mark.parametrize("kind, knobs", [("cumulative", {"backoff": 3.0}), ("n-gram", {"n": 1}), ("hamming", {})])
def test_a_wrong_diversity_function_is_detected(kind, knobs):
    for reference in BY_HAND.values():
        with pytest.raises(AssertionError):
            check_diversity(kind, reference, **knobs)


@pytest.mark.strategy("diverse_beam_search")
@pytest.mark.parametrize("kind", BY_HAND)
def test_a_penalty_of_any_kind_changes_the_texts_and_is_part_of_their_sums(kind):
    model = TableModel("abcdefg", spread=0.3)
    plain, diverse = (
        run(of("diverse_beam_search", beams=4, groups=4, strength=strength, diversity=kind), model, [0, 1], 6)
        for strength in (0.0, 2.0)
    )
    assert {text for text, _ in plain.finished()} != {text for text, _ in diverse.finished()}
    for model_sum, penalties, score in diverse.figure("finished texts")["values"]:
        assert score == pytest.approx(model_sum + penalties)


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


PROCESSED = {
    "n-grams": ({"no_repeat_ngram_size": 2}, ("no_repeat_ngram", {"n": 2})),
    "length": ({"min_new_tokens": 9}, ("min_new_tokens", {"count": 9})),
}


@pytest.mark.oracle("beam_search")
@pytest.mark.parametrize("theirs, ours", PROCESSED.values(), ids=PROCESSED)
def test_beams_with_processors_equal_the_librarys(theirs, ours):
    prompt, model = [54, 71, 71, 54, 9], network("llama")
    end = run(GREEDY, pair("llama").target, prompt, 4).texts()[0][-1]
    options = {"num_beams": 4, "do_sample": False, "max_new_tokens": 12, "length_penalty": 1.0, "pad_token_id": 319}
    expected = model.generate(
        torch.tensor([prompt]), **options, eos_token_id=end, renormalize_logits=True, **theirs
    )[0, len(prompt):].tolist()
    model.generation_config.eos_token_id = end
    target = Model(model, TOKENIZER, "llama")
    lane = LaneConfig("beam_search", {"beams": 4}, [ours])
    plain = run(LaneConfig("beam_search", {"beams": 4}), target, prompt, 12).texts()[0]
    assert list(run(lane, target, prompt, 12).texts()[0]) == [token for token in expected if token != 319]
    assert list(plain) != expected, "the processor changes nothing"


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
