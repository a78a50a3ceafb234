"""What strategies declare, as plain data for the shell, the pages and the API. Imports neither torch nor gradio.

Everything is read from the class. Authors and year of a paper come from its docstring, which cites the paper in the
form "Holtzman et al. 2020, arXiv 1904.09751".
"""
from __future__ import annotations

import inspect
import re
from typing import Any

from playground.contract import Knob, Strategy

ARXIV = re.compile(r"\d{4}\.\d{4,5}")
BASELINE = "baseline"  # `paper` of a strategy without one


def facts(cls: type[Strategy]) -> dict[str, Any]:
    """A strategy as plain data.

    `slots` names the kind and the default strategy of each slot, [{"field", "kind", "default"}].
    """
    plain = ("name", "kind", "title", "paper", "sheet", "reconstruction", "sure")
    return {
        **{name: getattr(cls, name) for name in plain},
        "family": cls.family(),
        "summary": cls.summary(),
        "guarantee": list(cls.guarantee),
        "needs": list(cls.needs),
        "refuses": list(getattr(cls, "refuses", ())),
        "slots": _slots(cls),
        "knobs": [_knob(knob) for knob in cls.knobs()],
    }


def description(cls: type[Strategy]) -> list[str]:
    """The paragraphs of the docstring after the first, each on one line."""
    return [" ".join(paragraph.split()) for paragraph in _docstring(cls).split("\n\n")[1:]]


def citation(cls: type[Strategy]) -> str:
    """The citation of the paper, "Holtzman et al. 2020, arXiv 1904.09751"; empty for a baseline."""
    if not ARXIV.fullmatch(cls.paper):
        return "" if cls.paper == BASELINE else cls.paper
    names = re.search(
        rf"([A-Z][\w'-]+(?: et al\.| and [A-Z][\w'-]+)? \d{{4}}),? arXiv {re.escape(cls.paper)}",
        " ".join(_docstring(cls).split()),
    )
    return f"{names[1]}, arXiv {cls.paper}" if names else f"arXiv {cls.paper}"


def link(cls: type[Strategy]) -> str:
    """URL of the paper; empty if it is not on arXiv."""
    return f"https://arxiv.org/abs/{cls.paper}" if ARXIV.fullmatch(cls.paper) else ""


def _docstring(cls: type[Strategy]) -> str:
    return inspect.getdoc(cls) or ""


def _knob(knob: Knob) -> dict[str, Any]:
    return {
        "name": knob.name,
        "type": knob.type.__name__,
        "default": knob.default,
        "min": knob.min,
        "max": knob.max,
        "help": knob.help,
        "choices": list(knob.choices),
    }


def _slots(cls: type[Strategy]) -> list[dict[str, str]]:
    return [
        {"field": field, "kind": kind, "default": str(cls.__dataclass_fields__[field].default)}
        for field, kind in cls.slots().items()
    ]
