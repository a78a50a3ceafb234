"""A lane for every strategy that generates text, with the defaults of its knobs."""
from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from playground.contract import Strategy, discover, find
from playground.contract.lane_config import LaneConfig, assemble
from playground.errors import Refusal

MEASURED = ("decoder", "preset", "sampler", "constraint", "cache_policy", "compute_policy", "drafter",
            "verifier")
PREFERRED = {
    "drafter": ("draft_model", "prompt_lookup", "layer_skip_draft"),
    "verifier": ("rejection", "sample_match", "k_seq", "greedy_match"),
}
LETTERS = "[a-z ]{200}"
SETTINGS = {  # of strategies whose defaults end the text after a few tokens
    "choice": {"options": "|".join(map("".join, product((" yes", " no"), repeat=9)))},
    "json_schema": {"source": '{"type": "array", "items": {"type": "string", "minLength": 9}, "minItems": 99}'},
    "regex": {"pattern": LETTERS},
}
PLAIN = ("temperature", {"t": 1.0})  # draws from the model's own distribution
Parts = list[tuple[str, dict]]


def settings_of(name: str) -> dict:
    """The knobs of a strategy that is measured: random weights for a draft head, since none is fitted to the stand-in
    for a model.
    """
    cls = find(name)
    random = cls.kind == "drafter" and any(k.name == "weights" and "random" in k.choices for k in cls.knobs())
    return {"weights": "random"} if random else SETTINGS.get(name, {})


def measured_names() -> list[str]:
    """Names of the strategies that are measured."""
    return [name for name, cls in discover().items() if cls.kind in MEASURED]


def lane_of(name: str) -> LaneConfig:
    """The first lane with this strategy that can be assembled. Raises Refusal if there is none, or for other kinds."""
    reason = Refusal(f"{name} generates no text: choose a {', '.join(MEASURED).replace('_', ' ')}.", name)
    for lane in _candidates(find(name)):
        try:
            assemble(lane)
        except Refusal as refusal:
            reason = refusal
        else:
            return lane
    raise reason


def _candidates(cls: type[Strategy]) -> Iterator[LaneConfig]:
    """Lanes that may be possible, those that sample first."""
    if cls.kind in ("decoder", "preset"):
        yield from _filled(cls.name, cls, {})
    elif cls.kind in ("drafter", "verifier"):
        yield from _filled("speculative", find("speculative"), {cls.kind: cls.name})
    else:
        added = [(cls.name, settings_of(cls.name))] if cls.kind in MEASURED else []
        yield from (LaneConfig("greedy", {}, [*added, *drawn]) for drawn in ([PLAIN], []) if added)


def _filled(decoder: str, cls: type[Strategy], given: dict[str, str]) -> Iterator[LaneConfig]:
    """Every filling of a decoder's slots, drawing from the model's own distribution if that is possible."""
    choices = [[given[kind]] if kind in given else PREFERRED[kind] for kind in cls.slots().values()]
    constraint: Parts = [("regex", SETTINGS["regex"])] if "constraint" in cls.needs else []
    samplers: tuple[Parts, ...] = ([PLAIN], []) if choices else ([],)
    for drawn, chosen in product(samplers, product(*choices)):
        yield LaneConfig(decoder, {}, [*((name, settings_of(name)) for name in chosen), *constraint, *drawn])
