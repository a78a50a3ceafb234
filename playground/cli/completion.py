"""Completion of commands, options and names in bash, zsh and fish, by the library argcomplete where it is installed.

The shell starts the program for every completion, so nothing here imports torch.
"""
from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Collection

from playground.strategy_files import declared

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
    return sorted(name for name in declared() if name.startswith(prefix))
