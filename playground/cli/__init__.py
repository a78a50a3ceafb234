"""The playground from a shell: results on standard output, everything else on standard error.

Exit code 0: it worked. 2: the input was wrong or nothing could run, said in one line `error: ...`. 130: stopped with
Ctrl-C.
"""
from __future__ import annotations

import os
import sys

from playground.cli.options import parser
from playground.errors import Refusal

WRONG, INTERRUPTED = 2, 130


def main(argv: list[str] | None = None) -> int:
    """Carry out a command line; returns the exit code."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter shows "?"
    try:
        return _carry_out(argv)
    except Refusal as refusal:
        print("error:", " ".join(str(refusal).split()), file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough, as in `list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as reason:  # a full disk behind standard output, or a file that went away
        # or what is still unwritten fails once more at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(
            f"error: The result cannot be written ({reason.strerror or reason}): free some space, or write elsewhere.",
            file=sys.stderr,
        )
        return WRONG


def _carry_out(argv: list[str] | None) -> int:
    options = parser().parse_args(argv)
    stopped = options.act(options)
    sys.stdout.flush()
    return INTERRUPTED if stopped else 0
