"""What may be written after `python -m playground`."""
from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, NoReturn

from playground.bench.caches.caches_defaults import BUDGETS, PACED, WEIGHED
from playground.bench.caches.caches_defaults import PARTS as CACHE_PARTS
from playground.bench.caches.caches_defaults import SHAPES as CACHE_SHAPES
from playground.bench.speed_defaults import PARTS, SHAPES, Grid
from playground.errors import Refusal

GUESSING, GUESSING_PAGE = "docs/guessing.json", "docs/guessing.md"
PAGE, EFFECTS, EFFECTS_PAGE = "docs/benchmark.md", "docs/effects.json", "docs/effects.md"
CACHES, CACHES_PAGE = "docs/caches.json", "docs/caches.md"


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, like everything else here."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message.rstrip('.')}. `{self.prog} --help` shows what can be written there.")


def parser() -> Parser:
    """The whole command line. Parsed options have `act`, the function that carries the command out; it says whether it
    was stopped.
    """
    whole = Parser(prog="python -m playground", description="Watch language models decode.", allow_abbrev=False)
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add(
        commands,
        (
            ("list", "list_strategies:show", _list, "show the strategies, or everything about one"),
            ("run", "run_lanes:run", _run, "let one strategy continue a prompt"),
            ("compare", "run_lanes:compare", _compare, "let several strategies continue one prompt side by side"),
            ("replay", "replay_trace:play", _replay, "show a recorded run again"),
            (
                "bench",
                "bench_speed:measure",
                _bench,
                "measure speed, beside the transformers library on the same weights; or strategies on questions",
            ),
            ("study", "run_study:study", _study, "draw conclusions from recorded runs"),
            ("fit", "fit_and_variant:fit", _fit, "find the knobs that suit a model"),
            (
                "variant",
                "fit_and_variant:make_variant",
                _variant,
                "make a new model of another; it joins the catalogue",
            ),
        ),
    )
    return whole


def _add(commands: Any, written: Iterable[tuple[str, str, Callable[[Parser], None], str]]) -> None:
    """Commands by name, function, options and what they do."""
    for name, function, options, does in written:
        command = commands.add_parser(name, help=does, description=does, allow_abbrev=False)
        command.set_defaults(act=_later(*function.split(":")))
        options(command)


def _later(module: str, function: str) -> Callable[[argparse.Namespace], bool]:
    """A command's function, imported when it is its turn: some bring torch along."""
    return lambda options: getattr(import_module(f"playground.cli.{module}"), function)(options)


def _list(command: Parser) -> None:
    command.add_argument("name", metavar="NAME", nargs="?", help="show this strategy with its knobs")
    command.add_argument("--json", action="store_true", help="print an array of objects")


def _run(command: Parser) -> None:
    command.add_argument("name", metavar="NAME", help="a decoder or preset, such as greedy; `list` shows them")
    _of_a_run(command)


def _compare(command: Parser) -> None:
    command.add_argument(
        "names",
        metavar="NAME",
        nargs="+",
        help="decoders or presets; --set and --with apply to all that have the knob or slot",
    )
    _of_a_run(command)


def _replay(command: Parser) -> None:
    command.add_argument("file", metavar="F.jsonl", help="what --trace has written")
    command.add_argument("--speed", type=_number, default=1.0, metavar="X", help="2 is twice as fast, 0 all at once")
    command.add_argument("--csv", metavar="FILE", help="write one row a token instead of showing it")
    command.add_argument(
        "--html", metavar="FILE", help="write a page that plays the run without a server, instead of showing it"
    )


def _bench(command: Parser) -> None:
    _of_speed(command)
    command.set_defaults(only=["text"], shapes=[], beside=[], compiled=False)
    _add(
        command.add_subparsers(metavar="[speed | survey | effects | caches | guessing | schemas]"),
        (
            (
                "speed",
                "bench_speed:measure",
                _speed,
                "measure speed: texts, single forwards, lanes, first tokens, memory, and what the machine allows",
            ),
            (
                "survey",
                "bench_survey:measure",
                _survey,
                "let strategies answer questions: how right they are, and what it costs",
            ),
            ("effects", "bench_effects:record", _effects, "record what the bundled models show of the strategies"),
            (
                "caches",
                "bench_caches:measure",
                _caches,
                "measure the cache policies side by side: what they remember, what memory they free, what a step takes",
            ),
            (
                "guessing",
                "bench_speculation:measure",
                _guessing,
                "measure every lossless way to guess ahead, task by task, beside the library's own",
            ),
            (
                "schemas",
                "bench_schemas:measure",
                _schemas,
                "try JSON Schemas: which are refused, whether what is written under the others is valid, and what masks cost",
            ),
        ),
    )


def _of_speed(command: Parser) -> None:
    _of_the_models(command)
    command.add_argument("--threads", type=_from(1), metavar="N", help="threads torch computes with")
    command.add_argument(
        "--repeats", type=_from(1), default=5, metavar="N", help="measured rounds, after one that is dropped"
    )
    command.add_argument("--max-new-tokens", type=_from(2), default=64, metavar="N")
    command.add_argument(
        "--prompts", metavar="FILE", help='a JSON array of {"task": ..., "prompt": ..., "chat": true or false}'
    )
    command.add_argument("--json", metavar="FILE", help="write every measurement")
    command.add_argument("--page", nargs="?", const=PAGE, metavar="FILE", help=f"write the tables as a page, {PAGE}")


def _speed(command: Parser) -> None:
    _of_speed(command)
    command.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
                         help=f"some of {', '.join(PARTS)}; all where nothing is said")
    command.add_argument("--shapes", nargs="+", choices=SHAPES, default=[], metavar="S",
                         help=f"further models with random weights and the shapes of public ones: {', '.join(SHAPES)}")
    for name, means in (
        ("contexts", "tokens that come before"),
        ("blocks", "tree nodes in one forward"),
        ("lanes", "lanes at a time"),
    ):
        command.add_argument(
            f"--{name}", nargs="+", type=_from(1), default=list(getattr(Grid(), name)), metavar="N", help=means
        )
    command.add_argument("--no-compile", dest="compiled", action="store_false",
                         help="leave out the library's compiled way, which takes minutes to compile on a CPU")
    command.add_argument("--beside", nargs="+", default=[], metavar="F.json",
                         help="show measurements of other machines on the page, written by --json there")


def _survey(command: Parser) -> None:
    command.add_argument(
        "--with",
        nargs="+",
        action="extend",
        required=True,
        dest="entrants",
        metavar="NAME[:KNOB=VALUE,...][+NAME...]",
        help="a lane: greedy, sample:temperature=0.7, speculative+prompt_lookup:depth=10+greedy_match; the others are held against the first. "
        "A knob may take what each question brings: gencls_ppl:labels={labels}",
    )
    command.add_argument(
        "--tasks",
        nargs="+",
        action="extend",
        default=[],
        metavar="TASK",
        help="of the small world: records, arithmetic, ...",
    )
    command.add_argument(
        "--questions", type=_from(1), default=12, metavar="N", help="of each task, from those that training never shows"
    )
    command.add_argument(
        "--grade", type=_from(1), metavar="N", help="how hard the questions are; mixed where nothing is said"
    )
    command.add_argument(
        "--file", metavar="F.jsonl", help='questions of your own, one {"prompt": ..., "answer": ...} a line'
    )
    command.add_argument("--repeats", type=_from(1), default=1, metavar="N", help="measured rounds")
    _of_the_models(command)
    command.add_argument("--threads", type=_from(1), metavar="N", help="threads torch computes with")
    command.add_argument("--seed", type=_from(0), default=0, metavar="N")
    command.add_argument("--max-new-tokens", type=_from(1), default=330, metavar="N")
    command.add_argument("--out", metavar="F.json", help="write every answer, and the tables")
    command.add_argument(
        "--csv", nargs="?", const="survey.csv", metavar="F.csv", help="write a line for every answer, survey.csv"
    )
    command.add_argument("--page", metavar="F.md", help="write the tables as a page")


def _effects(command: Parser) -> None:
    command.add_argument(
        "--only", nargs="+", action="extend", metavar="NAME", help="some of the effects; all where nothing is said"
    )
    command.add_argument(
        "--questions",
        type=_from(2),
        metavar="N",
        help="of each kind in place of an effect's own number, for a quick look",
    )
    command.add_argument(
        "--repeats", type=_from(1), default=3, metavar="N", help="measured rounds where times are compared"
    )
    command.add_argument("--seed", type=_from(0), default=1, metavar="N")
    _of_the_models(command)
    command.add_argument("--threads", type=_from(1), metavar="N", help="threads torch computes with")
    command.add_argument("--out", nargs="?", const=EFFECTS, metavar="F.json", help=f"write every number, {EFFECTS}")
    command.add_argument(
        "--page",
        nargs="?",
        const=EFFECTS_PAGE,
        metavar="F.md",
        help=f"write a page, and its charts beside it, {EFFECTS_PAGE}",
    )


def _guessing(command: Parser) -> None:
    command.add_argument(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="some of the drafters and presets; all where nothing is said",
    )
    command.add_argument(
        "--tasks",
        nargs="+",
        action="extend",
        default=[],
        metavar="TASK",
        help="of the small world: records, programs, ...; all likewise",
    )
    command.add_argument(
        "--questions", type=_from(1), default=3, metavar="N", help="of each task, from those that training never shows"
    )
    command.add_argument(
        "--repeats", type=_from(1), default=3, metavar="N", help="measured rounds, after a warm-up that is dropped"
    )
    command.add_argument("--seed", type=_from(0), default=1, metavar="N")
    command.add_argument("--max-new-tokens", type=_from(2), default=330, metavar="N")
    _of_the_models(command)
    command.set_defaults(shapes=[])
    command.add_argument("--threads", type=_from(1), metavar="N", help="threads torch computes with")
    command.add_argument("--out", nargs="?", const=GUESSING, metavar="F.json", help=f"write every number, {GUESSING}")
    command.add_argument(
        "--page", nargs="?", const=GUESSING_PAGE, metavar="F.md", help=f"write the tables as a page, {GUESSING_PAGE}"
    )


def _caches(command: Parser) -> None:
    command.add_argument("--parts", nargs="+", choices=CACHE_PARTS, default=list(CACHE_PARTS), metavar="PART",
                         help=f"some of {', '.join(CACHE_PARTS)}; all where nothing is said")
    command.add_argument(
        "--budgets",
        nargs="+",
        type=_from(8),
        default=list(BUDGETS),
        metavar="N",
        help="score: tokens of a prompt that stay",
    )
    command.add_argument(
        "--questions",
        type=_from(1),
        default=12,
        metavar="N",
        help="score: of each task, from those that training never shows",
    )
    command.add_argument(
        "--shape",
        choices=CACHE_SHAPES,
        metavar="S",
        help=f"memory, step: a network of random weights, one of {', '.join(CACHE_SHAPES)}; {WEIGHED} and {PACED} where nothing is said",
    )
    command.add_argument(
        "--kept", type=_from(8), default=512, metavar="N", help="memory, step: tokens of the prompt that stay"
    )
    command.add_argument("--tokens", type=_from(16), default=8000, metavar="N", help="memory: tokens of the prompt")
    command.add_argument("--written", type=_from(2), default=64, metavar="N", help="memory: tokens behind it")
    command.add_argument("--behind", type=_from(16), default=768, metavar="N", help="step: tokens of the prompt")
    command.add_argument(
        "--rounds",
        type=_from(1),
        default=30,
        metavar="N",
        help="step: measured steps of each lane, after some that are dropped",
    )
    command.add_argument("--seed", type=_from(0), default=1, metavar="N")
    _of_the_model(command)
    command.set_defaults(draft=None, draft_device="")
    command.add_argument("--threads", type=_from(1), metavar="N", help="threads torch computes with")
    command.add_argument("--out", nargs="?", const=CACHES, metavar="F.json", help=f"write every number, {CACHES}")
    command.add_argument(
        "--page",
        nargs="?",
        const=CACHES_PAGE,
        metavar="F.md",
        help=f"write a page, and its figure beside it, {CACHES_PAGE}",
    )


def _schemas(command: Parser) -> None:
    command.add_argument(
        "folders",
        metavar="FOLDER",
        nargs="+",
        help="schemas, as JSONSchemaBench or the official JSON Schema Test Suite have them; or a file",
    )
    command.add_argument(
        "--scribbles",
        type=_from(0),
        default=4,
        metavar="N",
        help="texts a schema besides the model's, drawn from the grammar alone",
    )
    command.add_argument("--max-new-tokens", type=_from(1), default=64, metavar="N")
    command.add_argument("--seed", type=_from(0), default=0, metavar="N")
    _of_the_model(command)
    command.set_defaults(draft=None, draft_device="")
    command.add_argument("--json", metavar="F.json", help="write everything, every text too")


def _study(command: Parser) -> None:
    command.add_argument("name", metavar="NAME", help="a study, such as scaling_laws; `list` shows them")
    command.add_argument("files", metavar="F.jsonl", nargs="+", help="what --trace has written; every lane counts")
    command.add_argument("--set", action="append", default=[], metavar="KNOB=VALUE", help="set a knob of the study")
    command.add_argument("--json", action="store_true", help="print figures and notes as JSON")


def _fit(command: Parser) -> None:
    command.add_argument(
        "name",
        metavar="NAME",
        help="a strategy with knobs that are learnt, such as adadec, or with weights, such as specdec_plus_plus",
    )
    _of_the_texts(command)
    _of_the_models(command)
    command.add_argument("--seed", type=_from(0), default=0, metavar="N", help="of what is drawn to learn weights from")
    command.add_argument(
        "--out",
        metavar="FILE",
        help="where weights are kept; among what was made on this machine where nothing is named",
    )
    command.add_argument("--json", action="store_true", help="print what was found as JSON")


def _variant(command: Parser) -> None:
    command.add_argument("name", metavar="NAME", help="a variant, such as hyperfitting; `list` shows them")
    _of_the_texts(command)
    command.add_argument(
        "--name",
        dest="called",
        default="",
        metavar="NAME",
        help="name of the new model; made of the base and the method where none is given",
    )
    command.add_argument("--set", action="append", default=[], metavar="KNOB=VALUE", help="set a knob of the method")
    command.add_argument("--seed", type=_from(0), default=0, metavar="N")
    _of_the_base(command)
    command.add_argument("--json", action="store_true", help="print what was made as JSON")


def _of_the_texts(command: Parser) -> None:
    command.add_argument(
        "--texts",
        nargs="+",
        action="extend",
        metavar="FILE",
        help='one text each, or a .jsonl with {{"text": ...}} on every line; - is standard input; bundled ones where none is named',
    )


def _of_a_run(command: Parser) -> None:
    prompt = command.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument(
        "--prompt-file", metavar="F", help="read the prompt as it stands, last line break included; - is standard input"
    )
    command.add_argument("--chat", action="store_true", help="put the prompt into the model's chat form")
    command.add_argument("--system", default="", metavar="TEXT", help="system message of the chat")
    command.add_argument(
        "--before",
        nargs=2,
        action="append",
        default=[],
        metavar=("USER", "ASSISTANT"),
        help="an earlier turn of the chat; again for each",
    )
    command.add_argument(
        "--context",
        default="",
        metavar="TEXT",
        help="a passage to rest the answer on; every lane reads it before the prompt",
    )
    command.add_argument("--set", action="append", default=[], metavar="KNOB=VALUE", help="set a knob of the strategy")
    command.add_argument(
        "--with",
        action="append",
        default=[],
        metavar="NAME[:KNOB=VALUE,...]",
        dest="extras",
        help="add a toggle or fill a slot: top_p:p=0.9, prompt_lookup, json_schema:file=F, choice:options=a|b",
    )
    _of_the_models(command)
    command.add_argument("--seed", type=_from(0), default=0, metavar="N")
    command.add_argument("--max-new-tokens", type=_from(1), default=64, metavar="N")
    command.add_argument(
        "--stop", action="append", default=[], type=_stop, metavar="S", help="end before this text; \\n is a line break"
    )
    command.add_argument("--trace", metavar="F.jsonl", help="record everything that happens")
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def _of_the_models(command: Parser) -> None:
    command.add_argument(
        "--draft",
        metavar="M",
        help="smaller model with the same vocabulary; nf4, fp4 or int8 for the model itself, so quantised; none",
    )
    command.add_argument(
        "--draft-device", default="", metavar="D", help="where the draft goes, if not beside the model"
    )
    _of_the_model(command)


def _of_the_model(command: Parser) -> None:
    _of_the_base(command)
    for option in ("dtype", "quantization"):
        command.add_argument(
            f"--{option}", default="none" if option == "quantization" else "auto", metavar=option[0].upper()
        )


def _of_the_base(command: Parser) -> None:
    """A model that is not only run: it is loaded as it is to be trained."""
    command.add_argument(
        "--model", metavar="M", help="from the catalogue, a folder or a hub id; the bundled one where nothing is named"
    )
    command.add_argument("--device", default="auto", metavar="D")
    command.add_argument(
        "--verbose", action="store_true", help="show what the libraries say and where an unexpected error came from"
    )


def _from(low: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"give a whole number of at least {low}, not {text!r}")
        return int(text)

    return read


def _number(text: str) -> float:
    try:
        if math.isfinite(number := float(text)) and number >= 0:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"give a number of at least 0, not {text!r}")


def _stop(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("an empty text is everywhere; name the text to end before")
    return text.replace("\\n", "\n")
