"""The command line: results on standard output, everything else on standard error.

Exit code 0: success. 2: invalid input, or nothing could run; one line `error: ...` says why. 130: stopped with Ctrl-C.
"""
from __future__ import annotations

import os
import sys

from playground.cli.options import parser
from playground.errors import Refusal

WRONG, INTERRUPTED = 2, 130


def main(argv: list[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # characters that the terminal cannot encode become "?"
    try:
        return _run_command(argv)
    except Refusal as refusal:
        print("error:", " ".join(str(refusal).split()), file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe, as in `list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as reason:  # standard output on a full disk, or a file that was removed
        # otherwise flushing the buffered output fails again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(
            f"error: The result cannot be written ({reason.strerror or reason}): free disk space, or write elsewhere.",
            file=sys.stderr,
        )
        return WRONG


def _run_command(argv: list[str] | None) -> int:
    options = parser().parse_args(argv)
    stopped = options.act(options)
    sys.stdout.flush()
    return INTERRUPTED if stopped else 0
