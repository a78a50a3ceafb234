"""Which file declares which strategy, read from the text of the files: importing them all imports torch and takes
seconds.
"""
from __future__ import annotations

import re
from functools import cache
from pathlib import Path

STRATEGIES = Path(__file__).resolve().parents[1] / "strategies"
NAME = re.compile(r'^    name\b[^=\n]*= \(?\s*"(\w+)"', re.MULTILINE)


@cache
def declared() -> dict[str, str]:
    """The module of every strategy under `strategies`, by the strategy's name, such as {"top_p":
    "strategies.sampling.top_p"}.
    """
    return {
        name: _module(file)
        for file in sorted(STRATEGIES.rglob("*.py"))
        for name in NAME.findall(file.read_text(encoding="utf-8"))
    }


def _module(file: Path) -> str:
    parts = file.relative_to(STRATEGIES.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")
