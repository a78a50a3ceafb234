"""Chosen answers and their law."""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from itertools import product

import pytest
from tables import Law, TableModel, Text, distance, law, product_law

import playground
from playground.contract import Decoder
from support.search_oracles import PROMPT, lane_of
from support.search_runs import logp

END = 2  # of the letters a, b and "."
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


def cost(model: TableModel, prompt: list[int], span: Text) -> float:
    """-log p of a span and the end after it, with every context recomputed."""
    ends = sorted(model.end_ids)
    after = model.scores((*prompt, *span)).log_softmax(-1)
    return -logp(model, prompt, span) - (float(after[ends].logsumexp(0)) if ends else 0.0)


@pytest.fixture(scope="module")
def bundled():
    return playground.load()
