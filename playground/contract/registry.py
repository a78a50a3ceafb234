"""Finds strategies under `strategies/`, and in the folders that the environment variable PLAYGROUND_STRATEGIES names.

One that is asked for by name is imported alone; all of them only if all are asked for, or none declares that name.
"""
from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from difflib import get_close_matches
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, TypeVar

from playground.contract.base import REGISTERED, Strategy
from playground.errors import Refusal
from playground.request_limits import QUOTED, quoted
from playground.strategy_files import declared

KINDS = ("decoder", "canvas_decoder", "preset", "sampler", "drafter", "verifier", "constraint", "cache_policy",
         "compute_policy", "overlay", "variant", "study")

Kind = TypeVar("Kind", bound=Strategy)
OWN = "PLAYGROUND_STRATEGIES"  # folders of a person's own strategies, separated as in PATH


def discover() -> dict[str, type[Strategy]]:
    """Every strategy by name, sorted."""
    _import_all()
    return dict(sorted(REGISTERED.items()))


@cache
def _import_all() -> None:
    """Import all modules under `strategies`, and a person's own, which registers them. Once is enough."""
    package = importlib.import_module("strategies")
    for module in pkgutil.walk_packages(package.__path__, "strategies."):
        importlib.import_module(module.name)
    for folder in filter(None, os.environ.get(OWN, "").split(os.pathsep)):
        import_own(Path(folder).expanduser())


def import_own(folder: Path) -> None:
    """Import the Python files of a folder, which registers the strategies in them. Raises Refusal.

    Each is a module `own.NAME`; they do not import each other.
    """
    if not folder.is_dir():
        raise Refusal(f"{OWN} names {folder}, which is no folder: name one with strategies, or unset it.", OWN)
    for file in sorted(folder.glob("*.py")):
        spec = spec_from_file_location(f"own.{file.stem}", file)
        if spec is None or spec.loader is None:
            continue
        module = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except Exception as reason:  # whatever a person's own file may do wrong
            del sys.modules[spec.name]
            why = " ".join(f"{type(reason).__name__}: {reason}".split())
            raise Refusal(f"The strategy {file} cannot be imported ({why}): mend it, or take it out of {OWN}.", OWN
                          ) from reason


def find(name: str) -> type[Strategy]:
    """The strategy of that name. Raises Refusal with the closest names."""
    if not isinstance(name, str):
        raise Refusal(f"A strategy is given by its name, a text such as 'greedy', not {quoted(name)}.", "strategy")
    if (cls := lookup(name)) is None:
        near = get_close_matches(name[:QUOTED], discover(), 3)
        hint = f" Did you mean {' or '.join(near)}?" if near else " `python -m playground list` shows them all."
        raise Refusal(f"There is no strategy named {quoted(name)}.{hint}", name[:QUOTED])
    return cls


def lookup(name: str) -> type[Strategy] | None:
    """The strategy of that name, if there is one."""
    if name not in REGISTERED and name in declared():
        importlib.import_module(declared()[name])
    if name not in REGISTERED:  # a person's own
        _import_all()
    return REGISTERED.get(name)


def make(name: str, /, **settings: Any) -> Strategy:
    """Instantiate a strategy with its knobs set. A slot takes a strategy or its name. Raises Refusal if anything is
    wrong.
    """
    return made(find(name), settings)


def made(cls: type[Kind], settings: dict[str, Any]) -> Kind:
    """As `make`, of a class that was found."""
    knobs = {k.name: k for k in cls.knobs()}
    _check_known(cls, settings, knobs)
    filled = {slot: _fill(slot, kind, settings.get(slot, _default(cls, slot))) for slot, kind in cls.slots().items()}
    strategy = cls(**filled, **{k: knobs[k].read(v) for k, v in settings.items() if k in knobs})
    strategy.check()
    return strategy


def _check_known(cls: type[Strategy], settings: dict[str, Any], knobs: dict[str, Any]) -> None:
    for given in settings:
        if given not in knobs and given not in cls.slots():
            near = get_close_matches(given[:QUOTED], knobs, 1)
            known = f"its knobs are {', '.join(knobs)}" if knobs else "it has none"
            hint = f"did you mean {near[0]}?" if near else f"{known}."
            raise Refusal(f"{cls.name} has no knob {quoted(given)}; {hint}", given)


def _fill(slot_name: str, kind: str, filling: Any) -> Strategy:
    filled = filling if isinstance(filling, Strategy) else make(str(filling))
    if filled.kind != kind:
        raise Refusal(f"{slot_name} takes a {kind}, and {filled.name} is a {filled.kind.replace('_', ' ')}.", slot_name)
    return filled


def _default(cls: type[Strategy], field_name: str) -> str:
    return str(cls.__dataclass_fields__[field_name].default)
