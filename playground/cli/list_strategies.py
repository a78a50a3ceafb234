"""`list`: the available strategies, their papers, and the metrics of their runs. No model is loaded."""
from __future__ import annotations

import json
from argparse import Namespace
from typing import NoReturn

from playground.cli.shared_options import CommandParser
from playground.cli.terminal_view import table
from playground.contract import KINDS, Knob, Strategy, discover, find
from playground.contract.bibliography import bibtex
from playground.contract.metadata import facts
from playground.errors import Refusal
from playground.trace.lane_metrics import definitions


def show_options(command: CommandParser) -> None:
    command.add_argument("name", metavar="NAME", nargs="?", help="show this strategy with its knobs")
    forms = command.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print an array of objects")
    forms.add_argument("--bibtex", action="store_true", help="print the papers as BibTeX")
    forms.add_argument("--metrics", action="store_true", help="print what each metric of a lane means")


def show(options: Namespace) -> bool:
    """Print all strategies or one, their papers, or the metrics."""
    if options.metrics:
        print("\n".join(f"{name}: {meaning}" for name, meaning in definitions().items()))
        return False
    classes = [find(options.name)] if options.name else list(discover().values())
    if options.json:
        print(json.dumps([facts(cls) for cls in classes], indent=2))
    elif options.bibtex:
        print(bibtex(classes) or _no_paper(options.name))
    elif options.name:
        print(_details(classes[0]))
    else:
        print(
            "\n\n".join(
                _group(kind, found) for kind in KINDS if (found := [cls for cls in classes if cls.kind == kind])
            )
        )
        print("\n`list NAME` shows everything about one, including its knobs.")
    return False


def _no_paper(name: str) -> NoReturn:
    raise Refusal(f"{name} is a baseline without a paper of its own: choose another, or leave the name out for all.")


def _group(kind: str, classes: list[type[Strategy]]) -> str:
    rows = [
        [f"  {cls.name}", cls.title, cls.paper, ", ".join([*cls.guarantee, *(f"needs {need}" for need in cls.needs)])]
        for cls in classes
    ]
    return "\n".join([kind.replace("_", " "), table(rows, left=4)])


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
