"""Caches that a codec has compressed."""
from __future__ import annotations

from dataclasses import dataclass

from tables import watch, write
from torch import Tensor

from playground.contract import CachePolicy, make
from playground.contract.assembly import Assembly
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from strategies.kv_cache.gear import Blocks
from support.packed_caches import LENGTH, PROMPT, models

TEXT = "The green bird sings, and the red fox listens. " * 3


@dataclass
class Held:
    """What the first layer of a lane's target holds after a commit."""

    length: int
    keys: object
    values: object
    rows: tuple[Tensor, Tensor]  # keys and values as attention receives them


def course(policy: CachePolicy, decoder: str = "greedy", architecture: str = "llama") -> list[Held]:
    found = []
    for lane in watch(
        Assembly(make(decoder), cache_policy=policy), models(architecture), PROMPT, Limits(0, LENGTH), Draws(0)
    ):
        store = lane.target.store
        if lane.generated and not (found and found[-1].length == store.length):
            read = tuple(pools[0].read(store.length) for pools in (store.keys, store.values))
            found.append(
                Held(
                    store.length,
                    store.keys[0].quantised_rows,
                    store.values[0].quantised_rows,
                    tuple(part.clone() for part in read),
                )
            )
    return found


def text(policy: CachePolicy | None, decoder: str = "greedy") -> list[int]:
    return write(Assembly(make(decoder), cache_policy=policy), models(), PROMPT, Limits(0, LENGTH), Draws(0)).tokens


def norm(x: Tensor) -> float:
    return float(x.norm())


def packed(part: str, written: Tensor, **knobs) -> Blocks:
    return make("gear", **knobs).quantise(part, written, None)
