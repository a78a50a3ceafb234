"""Diverse beam search against brute force, and wrong variants against the same check."""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

import pytest
import torch
from registry import Collapse
from tables import TableModel, Text

from playground.contract import find, make
from playground.contract.lane_config import LaneConfig
from playground.errors import Refusal
from support.search_runs import logp, of, run
from support.searches import STRENGTH, found
from support.speculation import GREEDY

BEAMS = LaneConfig("beam_search", {"length_exponent": 0.0})
COLLAPSES = {"diverse_beam_search": [
        Collapse(of("diverse_beam_search", beams=1, groups=1), GREEDY),
        Collapse(of("diverse_beam_search", beams=4, groups=1, strength=2.0), BEAMS),
    ]
    + [Collapse(of("diverse_beam_search", beams=4 * groups, groups=groups, strength=0.0), BEAMS) for groups in (2, 3)]}


# --- beam search ---

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


def test_beams_that_cannot_be_split_are_refused():
    with pytest.raises(Refusal, match="4 beams cannot be split into 3 equal groups"):
        make("diverse_beam_search", beams=4, groups=3)
