"""`list`: the available strategies, their papers, and the metrics of their runs. No model is loaded."""
from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace
from typing import NoReturn

from playground.cli.shared_options import CommandParser, add_strategy
from playground.cli.terminal_view import table
from playground.contract import KINDS, Knob, Strategy, discover, find
from playground.contract.bibliography import bibtex
from playground.contract.metadata import facts
from playground.errors import Refusal
from playground.trace.lane_metrics import definitions


def show_options(command: CommandParser) -> None:
    add_strategy(command, "name", metavar="NAME", nargs="?", help="show this strategy with its knobs")
    command.add_argument("--kind", choices=KINDS, help="only strategies of this kind")
    command.add_argument("--family", choices=sorted({cls.family() for cls in discover().values()}),
                         help="only strategies of this folder")
    command.add_argument("--search", default="", metavar="WORDS",
                         help="only strategies with all of these words in name, title, family or summary")
    forms = command.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print an array of objects")
    forms.add_argument("--bibtex", action="store_true", help="print the papers as BibTeX")
    forms.add_argument("--metrics", action="store_true", help="print what each metric of a lane means")


def show(options: Namespace) -> bool:
    """Print all strategies or one, their papers, or the metrics."""
    if options.metrics:
        print("\n".join(f"{name}: {meaning}" for name, meaning in definitions().items()))
        return False
    classes = [find(options.name)] if options.name else _filtered(options)
    if options.json:
        print(json.dumps([facts(cls) for cls in classes], indent=2))
    elif options.bibtex:
        print(bibtex(classes) or _no_paper(options.name))
    elif options.name:
        print(_details(classes[0]))
    else:
        by_kind = {kind: [cls for cls in classes if cls.kind == kind] for kind in KINDS}
        print("\n\n".join(_group(kind, found) for kind, found in by_kind.items() if found))
        print(f"\n{len(classes)} strategies. `list NAME` shows everything about one, with its knobs; --search, --kind "
              "and --family show fewer.")
    return False


def _no_paper(name: str) -> NoReturn:
    raise Refusal(f"{name} is a baseline without a paper of its own: choose another, or leave the name out for all.")


def _filtered(options: Namespace) -> list[type[Strategy]]:
    """The strategies that were asked for. Raises Refusal if there are none."""
    words = options.search.lower().split()
    found = [
        cls for cls in discover().values()
        if options.kind in (None, cls.kind) and options.family in (None, cls.family())
        and all(word in f"{cls.name} {cls.title} {cls.family()} {cls.summary()}".lower() for word in words)
    ]
    if not found:
        raise Refusal("No strategy is like this: use fewer words, or leave --kind and --family out.", "search")
    return found


def _group(kind: str, classes: list[type[Strategy]]) -> str:
    """A line for each strategy: its name, family and summary, as long as the terminal is wide; whole in a pipe."""
    lines = table([[f"  {cls.name}", cls.family(), cls.summary()] for cls in classes], left=2).split("\n")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return "\n".join([kind.replace("_", " "), *(_shortened(line, width) for line in lines)])


def _shortened(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else f"{line[:width - 1].rstrip()}…"


def _details(cls: type[Strategy]) -> str:
    """Everything needed to run one strategy."""
    lines = [f"{cls.name}: {cls.title} ({cls.kind.replace('_', ' ')}, {cls.paper})", cls.summary()]
    lines += [f"guarantee: {', '.join(cls.guarantee)}"] if cls.guarantee else []
    lines += [f"needs: {', '.join(cls.needs)}"] if cls.needs else []
    lines += [f"slot for a {kind}: {getattr(cls(), name)} unless --with fills it" for name, kind in cls.slots().items()]
    rows = [[f"  {knob.name}", json.dumps(knob.default), _limits(knob), knob.help] for knob in cls.knobs()]
    return "\n".join(lines + (["knobs", table(rows, left=4)] if rows else []))


def _limits(knob: Knob) -> str:
    if knob.choices:
        return " | ".join(knob.choices)
    return knob.type.__name__ if knob.min is None else f"{knob.min} to {knob.max}"
