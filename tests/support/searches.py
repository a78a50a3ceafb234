"""Runs of searches."""
from __future__ import annotations

import torch

from playground.contract import make
from strategies.search.superposed.ngram_counts import Corpus


def gains(raw: torch.Tensor, contexts: list[list[int]], corpus: list[list[int]], **knobs) -> torch.Tensor:
    strategy, lookup = make("superposed", **knobs), Corpus(corpus, 5)
    return strategy._gains(raw, [lookup.followers(context) for context in contexts])
