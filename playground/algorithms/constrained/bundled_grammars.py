"""Grammars that come with the project, in the Lark dialect of llguidance."""
from __future__ import annotations

from playground.asset_files import ASSETS

FOLDER = ASSETS / "grammars"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.lark")))


def ready_grammar(name: str) -> str:
    """One of NAMES."""
    return (FOLDER / f"{name}.lark").read_text(encoding="utf-8")
