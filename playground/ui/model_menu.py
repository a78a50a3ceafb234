"""The models in the page's menus: those that came along first, then those made on this machine, then some from the hub.
"""
from __future__ import annotations

from playground.contract.lane_config import translating
from playground.engine.catalogue import BUNDLED, ORACLE, OTHER_TOKENS, PACKED, SUGGESTED, Entry, entries
from playground.ui.settings import DEFAULT

Choices = list[tuple[str, str]]  # what is read, what is meant


def targets(default: str) -> Choices:
    """Models that may be chosen as the target; `default` is the one the page was started with."""
    return [(f"{default} (default)", DEFAULT), *(_choice(entry) for entry in entries())]


def drafts() -> Choices:
    """Models that may guess ahead. The oracle continues no text; one with other tokens is for those lanes only that
    translate them, and says so.
    """
    return [
        ("its own draft", DEFAULT),
        ("none", "none"),
        *(_draft(entry) for entry in entries() if entry.name != ORACLE),
        *((f"the model itself in {way}", way) for way in PACKED),
    ]


def _draft(entry: Entry) -> tuple[str, str]:
    title, name = _choice(entry)
    return (f"{title}, for {' and '.join(translating())}" if name == OTHER_TOKENS else title), name


def note(model: str) -> str:
    """What there is to say of a model on offer; empty for any other."""
    return next((entry.note for entry in entries() if entry.name == model), "")


def fills(model: str) -> bool:
    """Whether a model fills a canvas and does not continue text, as far as can be told before it is loaded."""
    return model == ORACLE


def _choice(entry: Entry) -> tuple[str, str]:
    return f"{entry.title} · {_origin(entry)}", entry.name


def _origin(entry: Entry) -> str:
    return "bundled" if entry in BUNDLED else "from the hub" if entry in SUGGESTED else "made here"
