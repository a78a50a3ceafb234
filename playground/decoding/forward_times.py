"""How long a forward of a model takes on this machine, by its rows and by the tokens before them: measured once."""
from __future__ import annotations

from collections import defaultdict
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from playground.engine.forward_input import ForwardInput
from playground.engine.forward_timer import ForwardTimer

if TYPE_CHECKING:
    from playground.engine.cache.kv_cache import KVCache
    from playground.engine.model import Model

ForwardTimes = dict[tuple[int, int], float]
"""Seconds of a forward, by its rows and by the tokens before them: the fastest of several, since whatever else runs on
the machine only adds to them.
"""

ROWS = (1, 16, 4, 32, 8, 64, 2, 24, 48)  # those that say most come first, since a slow model is measured for some only
CONTEXTS = (32, 256)  # tokens before the rows
REPEATS, LEAST = 5, 3  # measurements of each size after one that warms up; sizes that are measured in any case
PATIENCE = 1.5  # seconds
_one_at_a_time = Lock()  # two at once would slow each other, and lanes should know the same times


def forward_times(model: Model) -> ForwardTimes:
    """The times of a model's forwards; measured at the first call, which takes about two seconds at most, or what three
    sizes take. Lanes that ask meanwhile wait for it.
    """
    with _one_at_a_time:
        if model.forward_times is None:
            model.forward_times = _measured(model)
        return model.forward_times


@torch.inference_mode()
def _measured(model: Model) -> ForwardTimes:
    seconds: dict[tuple[int, int], list[float]] = defaultdict(list)
    stores, begun = {}, perf_counter()
    contexts = [context for context in CONTEXTS if context + max(ROWS) <= model.context] or [1]
    sizes = [(rows, context) for context in contexts for rows in ROWS if context + rows <= model.context]
    for _ in range(REPEATS):
        for rows, context in sizes:
            if perf_counter() - begun > PATIENCE and len(seconds) >= LEAST:
                break
            if context not in stores:
                stores[context] = _read(model, context)
            if not seconds[rows, context]:
                _time(model, stores[context], rows)  # the first one allocates, records and compiles
            seconds[rows, context].append(_time(model, stores[context], rows))
    return {size: min(each) for size, each in seconds.items() if each}


def _read(model: Model, context: int) -> KVCache:
    """A cache with so many tokens."""
    store = model.new_store()
    model.forward([ForwardInput(store, [0] * context, list(range(-1, context - 1)), last_only=True)])
    store.commit(context - 1)
    return store


def _time(model: Model, store: KVCache, rows: int) -> float:
    """Seconds of a forward over so many rows."""
    timer = ForwardTimer(model.device)
    model.forward([ForwardInput(store, [0] * rows, list(range(-1, rows - 1)))])
    timer.stop()
    store.crop_scratch()
    return timer.seconds()
