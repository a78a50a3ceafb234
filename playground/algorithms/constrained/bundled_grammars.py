"""Grammars that come with the project, in the Lark dialect of llguidance."""
from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "assets" / "grammars"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.lark")))


def ready_grammar(name: str) -> str:
    """One of NAMES."""
    return (FOLDER / f"{name}.lark").read_text(encoding="utf-8")
