"""The command line: results on standard output, everything else on standard error.

Exit code 0: success. 2: invalid input, or nothing could run; one line `error: ...` says why. 130: stopped with Ctrl-C;
one line says what was kept, the message of the KeyboardInterrupt.
"""
from __future__ import annotations

import os
import sys

from playground import __version__
from playground.cli.completion import answer_shell
from playground.cli.load_models import show_progress
from playground.cli.shared_options import Command, CommandParser, add_commands
from playground.cli.shell_words import in_shell_words
from playground.errors import Refusal

WRONG, INTERRUPTED = 2, 130
ABOVE = "stopped; what there was until then is above"
ANEW = "; run again to begin anew"  # times are shares of lanes of one run, so a second run measures all of them
COMMANDS = (
    Command("serve", "serve:serve", "open the page"),
    Command("list", "list_strategies:show", "show the strategies, or everything about one"),
    Command("run", "run_lanes:run", "run one strategy on a prompt"),
    Command("compare", "run_lanes:compare", "run several strategies on one prompt side by side"),
    Command("replay", "replay_trace:play", "show a recorded run again"),
    Command("bench", "bench:measure",
            "measure speed, compared with the transformers library on the same weights; or test strategies on "
            "questions"),
    Command("study", "run_study:study", "analyse recorded runs"),
    Command("fit", "training.fit:fit", "fit a strategy's knobs or weights to a model"),
    Command("variant", "training.variant:make_variant",
            "make a new model from another, or other weights for a lane"),
    Command("space", "space.prepare_space:prepare", "prepare the folder of a Hugging Face Space, and check it"),
)


def main(argv: list[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # characters that the terminal cannot encode become "?"
    try:
        return _run_command(argv)
    except Refusal as refusal:
        print("error:", in_shell_words(" ".join(str(refusal).split())), file=sys.stderr)
        return WRONG
    except KeyboardInterrupt as stopped:
        show_progress(1.0, "")
        print(stopped if stopped.args else "stopped", file=sys.stderr)
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


def parser() -> CommandParser:
    """The command line. Parsed options have `act`, the function of the command."""
    whole = CommandParser(prog="python -m playground", description="Watch language models decode.", allow_abbrev=False)
    whole.add_argument("--version", action="version", version=f"playground {__version__}")
    add_commands(whole, COMMANDS, dest="command", metavar="COMMAND", required=True)
    return whole


def _run_command(argv: list[str] | None) -> int:
    answer_shell(whole := parser())
    options = whole.parse_args(argv)
    stopped = options.act(options)
    sys.stdout.flush()
    if stopped:
        raise KeyboardInterrupt(ABOVE + (ANEW if options.command == "bench" else ""))
    return 0
