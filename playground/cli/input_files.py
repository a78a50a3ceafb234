"""Reads and writes the files named on the command line. Bad paths are refused before a run rather than after it."""
from __future__ import annotations

import sys
from pathlib import Path

from playground.errors import Refusal
from playground.request_limits import without_mark


def read_text(path: str) -> str:
    """The text of a file, or of standard input for `-`, without a byte order mark; raises Refusal."""
    try:
        return without_mark(sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8"))
    except OSError as reason:
        raise Refusal(
            f"The file {path} cannot be read ({reason.strerror or reason}): check the path.", "file"
        ) from None
    except ValueError:
        raise Refusal(f"The file {path} is not UTF-8 text: save it as UTF-8.", "file") from None


def check_place(path: str | None) -> None:
    """Raise Refusal if no file can be written there; None is allowed and means no file."""
    if path is not None and (Path(path).is_dir() or not Path(path).parent.is_dir()):
        raise Refusal(f"{path} cannot be written: name a file in a folder that exists.", "file")


def write_text(path: str | None, text: str) -> None:
    """Write a file at a place that passed `check_place`, line endings as they are; None writes nothing.

    Raises Refusal, for instance if the disk is full.
    """
    if path is not None:
        try:
            Path(path).write_text(text, encoding="utf-8", newline="")
        except OSError as reason:
            raise Refusal(
                f"{path} cannot be written ({reason.strerror or reason}): free disk space, or name another file.",
                "file",
            ) from None
