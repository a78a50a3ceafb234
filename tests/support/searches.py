"""Runs of searches."""
from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from tables import TableModel, Text

from playground.contract import make
from playground.events import Branches
from strategies.search.superposed.ngram_counts import Corpus
from support.search_runs import logp, of, run


def gains(raw: torch.Tensor, contexts: list[list[int]], corpus: list[list[int]], **knobs) -> torch.Tensor:
    strategy, lookup = make("superposed", **knobs), Corpus(corpus, 5)
    return strategy._gains(raw, [lookup.followers(context) for context in contexts])


STRENGTH = 0.6


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
