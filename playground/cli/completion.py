"""Completion of commands, options and names in bash, zsh and fish, by the library argcomplete where it is installed.

The shell starts the program for every completion, so nothing here imports torch: names of strategies are read from
their files.
"""
from __future__ import annotations

import os
import re
from argparse import ArgumentParser
from collections.abc import Collection
from pathlib import Path

STRATEGIES = Path(__file__).resolve().parents[2] / "strategies"
NAME = re.compile(r'^    name\b[^=\n]*= \(?\s*"(\w+)"', re.MULTILINE)
ASKED, LINE = "_ARGCOMPLETE", "COMP_LINE"  # set by the shell that asks, with what was typed


def answer_shell(parser: ArgumentParser) -> None:
    """Print completions and end the process, if a shell asks for them."""
    if is_asked():
        import argcomplete
        argcomplete.autocomplete(parser, always_complete_options="long")


def is_asked(words: Collection[str] = ()) -> bool:
    """Whether a shell asks, about a line with one of the words if any are given."""
    asked = ASKED in os.environ
    return asked and (not words or not {*words}.isdisjoint(os.environ.get(LINE, "").split()))


def strategy_names(prefix: str, **about: object) -> list[str]:
    """The strategies whose names begin so."""
    found = {name for file in STRATEGIES.rglob("*.py") for name in NAME.findall(file.read_text(encoding="utf-8"))}
    return sorted(name for name in found if name.startswith(prefix))
