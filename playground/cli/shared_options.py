"""Options that several commands have, and the parser of a command."""
from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from itertools import takewhile
from typing import Any, NamedTuple, NoReturn

from playground.cli.completion import is_asked, strategy_names
from playground.errors import Refusal
from playground.request_limits import quoted

HELD_OUT = "of each task, held out from training"
CLOSE = 0.75  # likeness of an option that is probably meant, by difflib


class CommandParser(argparse.ArgumentParser):
    """Reports errors as a Refusal in one sentence, like all other code here. `source` is the command whose options it
    has; its module is imported once they are parsed, since some modules import torch.
    """

    def __init__(self, *args: Any, source: Command | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._source = source

    def describe(self) -> None:
        """Add the command's options, once."""
        source, self._source = self._source, None
        if source:
            source.describe(self)

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        self.describe()
        self._check_options(args[0] if args else sys.argv[1:])
        return super().parse_known_args(*args, **kwargs)

    def _check_options(self, words: Sequence[str] | None) -> None:
        """Raise Refusal, with the nearest name, for an option that there is not. Otherwise the first complaint would be
        of an option that is required, and probably misspelt.
        """
        if self._subparsers or is_asked():  # the options of a command are checked by its own parser
            return
        for word in takewhile(lambda word: word != "--", words or []):
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in name and name not in self._option_string_actions:
                near = get_close_matches(name, self._option_string_actions, 1, CLOSE)
                self.error(f"There is no option {quoted(name)}{f'; did you mean {near[0]}?' if near else ''}")

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith("?") else "."
        raise Refusal(f"{message.rstrip('.')}{end} `{self.prog} --help` shows the usage.")


class Command(NamedTuple):
    """A command: its name, the function that runs it as "module:function", and what it does.

    Beside the function, the module has `{function}_options`, which adds the options to a parser.
    """

    name: str
    function: str
    does: str
    aliases: tuple[str, ...] = ()  # former names, which keep working

    def describe(self, parser: CommandParser) -> None:
        """Add the options, and as `act` the function, which returns whether Ctrl-C stopped it."""
        module, function = self.function.split(":")
        own = import_module(f"playground.cli.{module}")
        parser.set_defaults(act=getattr(own, function))
        getattr(own, f"{function}_options")(parser)


def add_commands(parser: CommandParser, commands: Iterable[Command], **kwargs: Any) -> None:
    """Let a parser choose between commands."""
    choice = parser.add_subparsers(**kwargs)
    for command in commands:
        made = choice.add_parser(
            command.name, aliases=command.aliases, help=command.does, description=command.does, allow_abbrev=False,
            source=command,
        )
        if is_asked({command.name, *command.aliases}):  # argcomplete looks at the options before they are parsed
            made.describe()


def add_strategy(command: CommandParser, name: str, **about: Any) -> None:
    """An argument that names strategies, which a shell completes."""
    command.add_argument(name, **about).completer = strategy_names  # type: ignore[attr-defined]


def add_texts(command: CommandParser) -> None:
    command.add_argument(
        "--texts", nargs="+", action="extend", metavar="FILE",
        help='one text each, or a .jsonl with {"text": ...} per line; - is standard input; default: bundled texts',
    )


def add_models(command: CommandParser) -> None:
    command.add_argument(
        "--draft", metavar="M",
        help="smaller model with the same vocabulary, or the folder or hub id of a published draft head; nf4, fp4 or "
             "int8 for the model itself, quantised; none",
    )
    command.add_argument("--draft-device", default="", metavar="D", help="device of the draft; default: the model's")
    add_model(command)


def add_model(command: CommandParser) -> None:
    add_base(command)
    command.add_argument("--dtype", default="auto", metavar="D")
    command.add_argument("--quantization", default="none", metavar="Q",
                         help="int8, nf4 or fp4; on two CPU cores nf4 doubled the speed of a 0.36 B model")


def add_base(command: CommandParser) -> None:
    """A model that may be trained: number format and quantisation are not options."""
    command.add_argument("--model", metavar="M",
                         help="from the catalogue, a folder or a hub id; default: the bundled one")
    command.add_argument("--device", default="auto", metavar="D")
    command.add_argument("--verbose", action="store_true",
                         help="show the output of the libraries and the traceback of unexpected errors")


def add_threads(command: CommandParser) -> None:
    add_count(command, "threads", 1, None, "threads of torch")


def add_settings(command: CommandParser, of: str) -> None:
    command.add_argument("--set", action="append", default=[], metavar="KNOB=VALUE", help=f"set a knob of {of}")


def add_names(
    command: CommandParser, option: str, meaning: str, metavar: str = "NAME", default: Iterable[str] | None = ()
) -> None:
    default = default if default is None else list(default)
    command.add_argument(
        f"--{option}", nargs="+", action="extend", default=default, metavar=metavar, help=meaning
    )


def add_count(command: CommandParser, option: str, low: int, default: int | None, meaning: str | None = None) -> None:
    """An option that takes a whole number of at least `low`."""
    command.add_argument(f"--{option}", type=at_least(low), default=default, metavar="N", help=meaning)


def add_results(command: CommandParser, out: str, page: str, pages: str) -> None:
    """Options for the files of a benchmark, with their default paths."""
    add_out(command, out)
    command.add_argument("--page", nargs="?", const=page, metavar="F.md", help=f"{pages}, {page}")


def add_out(command: CommandParser, out: str, *former: str) -> None:
    """The option for everything a benchmark found, with its default path and its former names, which keep working."""
    command.add_argument("--out", nargs="?", const=out, metavar="F.json", help=f"write every number, {out}")
    for name in former:
        command.add_argument(name, dest="out", nargs="?", const=out, help=argparse.SUPPRESS)


def at_least(low: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"give a whole number of at least {low}, not {text!r}")
        return int(text)

    return read


def not_negative(text: str) -> float:
    try:
        if math.isfinite(number := float(text)) and number >= 0:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"give a number of at least 0, not {text!r}")
