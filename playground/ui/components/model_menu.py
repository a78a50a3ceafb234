"""The models in the page's menus: first the bundled ones, then those made on this machine, then some from the hub."""
from __future__ import annotations

from pathlib import Path

from playground.contract.lane_config import translating
from playground.engine.checkpoint.catalogue import (
    BUNDLED,
    OTHER_TOKENS,
    PACKED,
    SUGGESTED,
    TABLES,
    Entry,
    entries,
    listed_attention,
)
from playground.run_request import DEFAULT

Choices = list[tuple[str, str]]  # (label, value)


def targets(default: str) -> Choices:
    """Choices for the target, each model once; `default` is the one that the page was started with."""
    listed = {name: label for label, name in map(_choice, entries())}
    first = listed.pop(default, Path(default).name)
    return [(f"{first} · default", DEFAULT), *((label, name) for name, label in listed.items())]


def drafts() -> Choices:
    """Choices for the draft model.

    Models that fill masks are left out, since they cannot continue text. A draft with another vocabulary is labelled
    with the strategies that can translate it.
    """
    return [
        ("its own draft", DEFAULT),
        ("none", "none"),
        *(_draft(entry) for entry in entries() if not entry.fills),
        *((f"the model itself in {way}", way) for way in PACKED),
    ]


def _draft(entry: Entry) -> tuple[str, str]:
    title, name = _choice(entry)
    return (f"{title}, for {' and '.join(translating())}" if name == OTHER_TOKENS else title), name


def note(model: str) -> str:
    """The note on a model in the menu; empty for any other."""
    return next((entry.note for entry in entries() if entry.name == model), "")


def fills(model: str) -> bool:
    """Whether a model fills a canvas rather than continuing text, as far as is known before it is loaded."""
    return bool(model and listed_attention(model))


def _choice(entry: Entry) -> tuple[str, str]:
    table = "exact table, no network · " if entry.name in TABLES else ""
    return f"{entry.title} · {table}{_origin(entry)}", entry.name


def _origin(entry: Entry) -> str:
    return "bundled" if entry in BUNDLED else "from the hub" if entry in SUGGESTED else "made here"
