"""The command line of `python -m playground`."""
from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, NoReturn

from playground.bench.caches.caches_defaults import BUDGETS, PACED, WEIGHED
from playground.bench.caches.caches_defaults import PARTS as CACHE_PARTS
from playground.bench.caches.caches_defaults import SHAPES as CACHE_SHAPES
from playground.bench.speed.speed_defaults import PARTS, SHAPES, Grid
from playground.errors import Refusal

SPECULATION, SPECULATION_PAGE = "docs/guessing.json", "docs/guessing.md"
SPECULATION_SUMMARY = "assets/speculation.json"
DIFFUSION, DIFFUSION_PAGE = "docs/diffusion.json", "docs/diffusion.md"
PARALLEL, PARALLEL_PAGE = "docs/parallel.json", "docs/parallel.md"
PAGE, EFFECTS, EFFECTS_PAGE = "docs/benchmark.md", "docs/effects.json", "docs/effects.md"
BOOKKEEPING, BOOKKEEPING_PAGE = "docs/bookkeeping.json", "docs/bookkeeping.md"
CACHES, CACHES_PAGE = "docs/caches.json", "docs/caches.md"
ENGINES_PAGE = "docs/engines.md"
COMPUTE, COMPUTE_PAGE = "docs/compute.json", "docs/compute.md"
ALIASES = {"speculation": ["guessing"]}  # former names, which keep working
HELD_OUT = "of each task, held out from training"


class CommandParser(argparse.ArgumentParser):
    """Reports errors as a Refusal in one sentence, like all other code here."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message.rstrip('.')}. `{self.prog} --help` shows the usage.")


def parser() -> CommandParser:
    """The whole command line. Parsed options have `act`, the function of the command, which returns whether Ctrl-C
    stopped it.
    """
    whole = CommandParser(prog="python -m playground", description="Watch language models decode.", allow_abbrev=False)
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add(commands, (
        ("list", "list_strategies:show", _list, "show the strategies, or everything about one"),
        ("run", "run_lanes:run", _run, "run one strategy on a prompt"),
        ("compare", "run_lanes:compare", _compare, "run several strategies on one prompt side by side"),
        ("replay", "replay_trace:play", _replay, "show a recorded run again"),
        ("bench", "bench.speed:measure", _bench,
         "measure speed, compared with the transformers library on the same weights; or test strategies on questions"),
        ("study", "run_study:study", _study, "analyse recorded runs"),
        ("fit", "fit_and_variant:fit", _fit, "fit a strategy's knobs or weights to a model"),
        ("variant", "fit_and_variant:make_variant", _variant, "make a new model from another; it joins the catalogue"),
        ("space", "space.prepare_space:prepare", _space, "prepare the folder of a Hugging Face Space, and check it"),
    ))
    return whole


def _add(commands: Any, entries: Iterable[tuple[str, str, Callable[[CommandParser], None], str]]) -> None:
    """Add commands by name, function, options and description."""
    for name, function, options, does in entries:
        command = commands.add_parser(
            name, aliases=ALIASES.get(name, []), help=does, description=does, allow_abbrev=False
        )
        command.set_defaults(act=_later(*function.split(":")))
        options(command)


def _later(module: str, function: str) -> Callable[[argparse.Namespace], bool]:
    """A command's function, imported only when it runs, since some modules import torch."""
    return lambda options: getattr(import_module(f"playground.cli.{module}"), function)(options)


def _list(command: CommandParser) -> None:
    command.add_argument("name", metavar="NAME", nargs="?", help="show this strategy with its knobs")
    forms = command.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print an array of objects")
    forms.add_argument("--bibtex", action="store_true", help="print the papers as BibTeX")
    forms.add_argument("--metrics", action="store_true", help="print what each metric of a lane means")


def _run(command: CommandParser) -> None:
    command.add_argument("name", metavar="NAME", nargs="?",
                         help="a decoder or preset, such as greedy; `list` shows them; none for --remote alone")
    _of_a_run(command)


def _compare(command: CommandParser) -> None:
    command.add_argument("names", metavar="NAME", nargs="+",
                         help="decoders or presets, or lanes as JSON, such as '{\"strategy\": \"greedy\", \"weights\": "
                         "\"int8\"}'; --set and --with apply to all that have the knob or slot")
    _of_a_run(command)


def _replay(command: CommandParser) -> None:
    command.add_argument("file", metavar="F.jsonl", help="a file written by --trace")
    command.add_argument("--speed", type=_number, default=1.0, metavar="X", help="2 is twice as fast, 0 all at once")
    command.add_argument("--csv", metavar="FILE", help="write one row per token instead of showing the run")
    command.add_argument("--html", metavar="FILE",
                         help="write a page that plays the run without a server, instead of showing it")


def _bench(command: CommandParser) -> None:
    _of_speed(command)
    command.set_defaults(only=["text"], shapes=[], beside=[], compiled=False)
    commands = command.add_subparsers(
        metavar="[speed | survey | effects | caches | compute | speculation | diffusion | parallel | schemas | "
        "engines | models | bookkeeping]"
    )
    _add(commands, (
        ("speed", "bench.speed:measure", _speed,
         "measure speed: texts, single forwards, lanes, first tokens, memory, and the machine's limits"),
        ("survey", "bench.survey:measure", _survey, "run strategies on questions: scores and costs"),
        ("effects", "bench.effects:record", _effects, "record the effects of strategies on the bundled models"),
        ("caches", "bench.caches:measure", _caches,
         "measure the cache policies side by side: recall, memory freed, and time per step"),
        ("compute", "bench.compute:measure", _compute,
         "measure the compute policies: score against the share of FLOPs and of time"),
        ("speculation", "bench.speculation:measure", _speculation,
         "measure every lossless speculative strategy, task by task, compared with the library's"),
        ("diffusion", "bench.diffusion:measure", _diffusion,
         "measure the decoders of masked canvases, task by task: scores, forwards and seconds"),
        ("parallel", "bench.parallel:measure", _parallel,
         "measure what filling positions together costs, on list tasks over the exact table of their answers"),
        ("schemas", "bench.schemas:measure", _schemas,
         "test JSON Schemas: which are refused, whether constrained texts are valid, and what token masks cost"),
        ("engines", "bench.engines:measure", _engines,
         "compare llguidance with XGrammar, which is installed separately: masks, times and differences"),
        ("models", "bench.models:measure", _model_types,
         "try every causal model type of the transformers library on a tiny random network"),
        ("bookkeeping", "bench.bookkeeping:measure", _bookkeeping,
         "measure the overhead of every strategy outside forwards: CPU time and recorded events"),
    ))


def _of_speed(command: CommandParser) -> None:
    _of_the_models(command)
    _threads(command)
    _count(command, "repeats", 1, 5, "measured rounds, after one that is dropped")
    _count(command, "max-new-tokens", 2, 64)
    command.add_argument("--prompts", metavar="FILE",
                         help='a JSON array of {"task": ..., "prompt": ..., "chat": true or false}')
    command.add_argument("--json", metavar="FILE", help="write every measurement")
    command.add_argument("--page", nargs="?", const=PAGE, metavar="FILE", help=f"write the tables as a page, {PAGE}")


def _speed(command: CommandParser) -> None:
    _of_speed(command)
    command.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
                         help=f"some of {', '.join(PARTS)}; default: all")
    command.add_argument("--shapes", nargs="+", choices=SHAPES, default=[], metavar="S",
                         help=f"further models with random weights and the shapes of public ones: {', '.join(SHAPES)}")
    for name, meaning in (
        ("contexts", "preceding tokens"), ("blocks", "tree nodes per forward"), ("lanes", "lanes at a time")
    ):
        command.add_argument(
            f"--{name}", nargs="+", type=_from(1), default=list(getattr(Grid(), name)), metavar="N", help=meaning
        )
    command.add_argument("--no-compile", dest="compiled", action="store_false",
                         help="leave out the library's compiled generate, which takes minutes to compile on a CPU")
    command.add_argument("--beside", nargs="+", default=[], metavar="F.json",
                         help="show measurements of other machines on the page, written by --json there")


def _survey(command: CommandParser) -> None:
    command.add_argument(
        "--with", nargs="+", action="extend", required=True, dest="entrants", metavar="NAME[:KNOB=VALUE,...][+NAME...]",
        help="a lane: greedy, sample:temperature=0.7, speculative+prompt_lookup:depth=10+greedy_match; the others are "
        "compared with the first. A knob may take an input of each question: gencls_ppl:labels={labels}",
    )
    _names(command, "tasks", "of the small world: records, arithmetic, ...", "TASK")
    _count(command, "questions", 1, 12, HELD_OUT)
    _count(command, "grade", 1, None, "difficulty of the questions; default: mixed")
    command.add_argument("--file", metavar="F.jsonl",
                         help='questions of your own, one {"prompt": ..., "answer": ...} per line')
    _count(command, "repeats", 1, 1, "measured rounds")
    _of_the_models(command)
    _threads(command)
    _count(command, "seed", 0, 0)
    _count(command, "max-new-tokens", 1, 330)
    command.add_argument("--out", metavar="F.json", help="write every answer, and the tables")
    command.add_argument("--csv", nargs="?", const="survey.csv", metavar="F.csv",
                         help="write a line per answer, survey.csv")
    command.add_argument("--page", metavar="F.md", help="write the tables as a page")


def _effects(command: CommandParser) -> None:
    _names(command, "only", "some of the effects; default: all", default=None)
    _count(command, "questions", 2, None, "of each kind, instead of the effect's own number, for a quick check")
    _count(command, "repeats", 1, 3, "measured rounds, if times are compared")
    _count(command, "seed", 0, 1)
    _of_the_models(command)
    _threads(command)
    _results(command, EFFECTS, EFFECTS_PAGE, "write a page, and its charts next to it")


def _speculation(command: CommandParser) -> None:
    _names(command, "only", "some of the drafters and presets; default: all")
    _names(command, "tasks", "of the small world: records, programs, ...; default: all", "TASK")
    _count(command, "questions", 1, 3, HELD_OUT)
    _count(command, "repeats", 1, 3, "measured rounds, after a warm-up that is dropped")
    _count(command, "seed", 0, 1)
    _count(command, "max-new-tokens", 2, 330)
    _of_the_models(command)
    command.set_defaults(shapes=[])
    _threads(command)
    _results(command, SPECULATION, SPECULATION_PAGE, "write the tables as a page")
    command.add_argument("--summary", nargs="?", const=SPECULATION_SUMMARY, metavar="F.json",
                         help=f"write a line for each strategy, as the library page shows it, {SPECULATION_SUMMARY}")


def _compute(command: CommandParser) -> None:
    _names(command, "only", "some of the compute policies; default: all")
    _names(command, "tasks", "of the small world: records, arithmetic, ...; default: all", "TASK")
    _count(command, "questions", 1, 12, HELD_OUT)
    _count(command, "repeats", 1, 1, "measured rounds, after a warm-up that is dropped")
    _count(command, "seed", 0, 1)
    _count(command, "max-new-tokens", 2, 160)
    command.add_argument("--add", metavar="F.json",
                         help="results written by --out with the same settings; policies measured again replace theirs")
    _of_the_models(command)
    _threads(command)
    _results(command, COMPUTE, COMPUTE_PAGE, "write the tables as a page, and a chart next to it")


def _caches(command: CommandParser) -> None:
    command.add_argument("--parts", nargs="+", choices=CACHE_PARTS, default=list(CACHE_PARTS), metavar="PART",
                         help=f"some of {', '.join(CACHE_PARTS)}; default: all")
    command.add_argument("--budgets", nargs="+", type=_from(8), default=list(BUDGETS), metavar="N",
                         help="score: budgets in tokens of the prompt")
    _count(command, "questions", 1, 12, f"score: {HELD_OUT}")
    command.add_argument("--shape", choices=CACHE_SHAPES, metavar="S",
                         help="memory, step: a network of random weights, one of "
                         f"{', '.join(CACHE_SHAPES)}; default: {WEIGHED} and {PACED}")
    _count(command, "kept", 8, 512, "memory, step: budget in tokens of the prompt")
    _count(command, "tokens", 16, 8000, "memory: tokens of the prompt")
    _count(command, "written", 2, 64, "memory: tokens after the prompt")
    _count(command, "behind", 16, 768, "step: tokens of the prompt")
    _count(command, "rounds", 1, 30, "step: measured steps per lane, after some that are dropped")
    _count(command, "seed", 0, 1)
    _of_the_model(command)
    command.set_defaults(draft=None, draft_device="")
    _threads(command)
    _results(command, CACHES, CACHES_PAGE, "write a page, and its figure next to it")


def _diffusion(command: CommandParser) -> None:
    _of_the_model(command)
    _threads(command)
    _count(command, "questions", 1, 8, "of each task")
    _count(command, "seed", 0, 11)
    command.set_defaults(model="pocket-diffusion", draft=None, draft_device="")
    _results(command, DIFFUSION, DIFFUSION_PAGE, "write the tables as a page")


def _parallel(command: CommandParser) -> None:
    _threads(command)
    _count(command, "questions", 1, 100, "of each task")
    _count(command, "seed", 0, 0)
    command.set_defaults(verbose=False)
    _results(command, PARALLEL, PARALLEL_PAGE, "write the tables as a page")


def _schemas(command: CommandParser) -> None:
    command.add_argument("folders", metavar="FOLDER", nargs="+",
                         help="schemas, as in JSONSchemaBench or in the official JSON Schema Test Suite; or a file")
    _count(command, "scribbles", 0, 4, "random texts per schema, besides the model's")
    _count(command, "max-new-tokens", 1, 64)
    _count(command, "seed", 0, 0)
    _of_the_model(command)
    command.set_defaults(draft=None, draft_device="")
    command.add_argument("--json", metavar="F.json", help="write everything, including every text")


def _engines(command: CommandParser) -> None:
    command.add_argument("folders", metavar="FOLDER", nargs="*",
                         help="JSON Schemas, besides the grammars of every kind that are compared in any case")
    _count(command, "scribbles", 1, 4, "random texts per grammar and engine")
    _count(command, "seed", 0, 0)
    _of_the_model(command)
    command.set_defaults(draft=None, draft_device="")
    command.add_argument("--json", metavar="F.json", help="write everything")
    command.add_argument("--page", nargs="?", const=ENGINES_PAGE, metavar="FILE",
                         help=f"write the tables as a page, {ENGINES_PAGE}")


def _model_types(command: CommandParser) -> None:
    command.add_argument("types", metavar="TYPE", nargs="*", help="model types, such as llama; default: all")
    command.add_argument("--json", metavar="FILE", help="write every result")
    command.add_argument("--page", nargs="?", const="docs/models.md", metavar="FILE",
                         help="write the table as a page, docs/models.md")


def _bookkeeping(command: CommandParser) -> None:
    _names(command, "only", "some of the strategies; default: all that generate text")
    command.add_argument("--quick", action="store_true", help="a small vocabulary and a short prompt")
    for name, low, meaning in (
        ("vocabulary", 2000, "tokens of the model"),
        ("layers", 1, "of the KV cache"),
        ("context", 600, "tokens of the prompt"),
        ("watched", 300, "tokens of the prompt where the attention weights or logits of all of it are read"),
        ("tokens", 2, "generated"),
        ("seconds", 1, "after which a strategy is stopped"),
    ):
        _count(command, name, low, None, meaning)
    command.add_argument("--add", metavar="F.json", help="add the results to those of an earlier run, written by --out")
    command.add_argument("--verbose", action="store_true", help="show the output of the libraries")
    command.set_defaults(threads=None)
    _results(command, BOOKKEEPING, BOOKKEEPING_PAGE, "write the tables as a page")


def _study(command: CommandParser) -> None:
    command.add_argument("name", metavar="NAME", help="a study, such as scaling_laws; `list` shows them")
    command.add_argument("files", metavar="F.jsonl", nargs="+", help="files written by --trace; every lane counts")
    _settings(command, "the study")
    command.add_argument("--json", action="store_true", help="print figures and notes as JSON")


def _fit(command: CommandParser) -> None:
    command.add_argument(
        "name", metavar="NAME",
        help="a strategy with fitted knobs, such as adadec, or with trained weights, such as specdec_plus_plus",
    )
    _of_the_texts(command)
    _of_the_models(command)
    _count(command, "seed", 0, 0, "of the training data that is sampled for weights")
    _count(command, "epochs", 0, 0, "passes over the texts that train a draft head; 0: as many as it needs")
    command.add_argument("--from", dest="published", metavar="FOLDER",
                         help="a published head to use instead of training one: EAGLE, EAGLE-3 or Medusa version 2")
    command.add_argument("--to", dest="exported", metavar="FOLDER",
                         help="a new folder for the head in the format of vLLM's speculators as well")
    command.add_argument("--out", metavar="FILE",
                         help="where to store the weights; default: with the other files made on this machine")
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def _variant(command: CommandParser) -> None:
    command.add_argument("name", metavar="NAME", help="a variant, such as hyperfitting; `list` shows them")
    _of_the_texts(command)
    command.add_argument("--name", dest="called", default="", metavar="NAME",
                         help="name of the new model; default: made from the base and the method")
    _settings(command, "the method")
    _count(command, "seed", 0, 0)
    _of_the_base(command)
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def _space(command: CommandParser) -> None:
    command.add_argument("folder", metavar="FOLDER", help="a new folder, for the files that are uploaded")
    command.add_argument("--name", default="YOU/decoding-playground", metavar="OWNER/NAME",
                         help="of the Space, in the commands that upload it")
    command.add_argument("--zero-gpu", action="store_true", help="for ZeroGPU hardware: torch with CUDA")
    command.add_argument("--check", action="store_true",
                         help="start it in a new environment as the Space would, and wait for an answer; minutes")


def _of_the_texts(command: CommandParser) -> None:
    command.add_argument(
        "--texts", nargs="+", action="extend", metavar="FILE",
        help='one text each, or a .jsonl with {"text": ...} per line; - is standard input; default: bundled texts',
    )


def _of_a_run(command: CommandParser) -> None:
    prompt = command.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="F",
                        help="read the prompt unchanged, including the last line break; - is standard input")
    command.add_argument("--chat", action="store_true", help="apply the model's chat template to the prompt")
    command.add_argument("--system", default="", metavar="TEXT", help="system message of the chat")
    command.add_argument("--before", nargs=2, action="append", default=[], metavar=("USER", "ASSISTANT"),
                         help="an earlier turn of the chat; may be repeated")
    command.add_argument("--context", default="", metavar="TEXT",
                         help="a passage to base the answer on; every lane reads it before the prompt")
    command.add_argument("--form", default="", metavar="TEXT",
                         help="how passage and prompt become one text, with {context} and {prompt}")
    command.add_argument("--tools", default="", metavar="FILE",
                         help="tools as JSON, as to a chat API: the model's chat template describes them")
    _settings(command, "the strategy")
    command.add_argument(
        "--with", action="append", default=[], metavar="NAME[:KNOB=VALUE,...]", dest="extras",
        help="add a toggle or fill a slot: top_p:p=0.9, prompt_lookup, json_schema:file=F, choice:options=a|b",
    )
    _of_the_models(command)
    _of_a_server(command)
    _count(command, "seed", 0, 0)
    _count(command, "max-new-tokens", 1, 64)
    command.add_argument("--stop", action="append", default=[], type=_stop, metavar="S",
                         help="end before this text; \\n is a line break")
    command.add_argument("--trace", metavar="F.jsonl", help="record all events")
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def _of_a_server(command: CommandParser) -> None:
    command.add_argument("--remote", metavar="URL",
                         help="one more lane, generated by a server with the OpenAI completions interface, such as "
                              "http://127.0.0.1:8000; its key, if any, is read from PLAYGROUND_REMOTE_KEY")
    command.add_argument("--remote-model", default="", metavar="M", help="the server's name of the model")
    command.add_argument("--remote-temperature", type=_number, default=0.0, metavar="T", help="0 is greedy")


def _of_the_models(command: CommandParser) -> None:
    command.add_argument(
        "--draft", metavar="M",
        help="smaller model with the same vocabulary, or the folder or hub id of a published draft head; nf4, fp4 or "
             "int8 for the model itself, quantised; none",
    )
    command.add_argument("--draft-device", default="", metavar="D", help="device of the draft; default: the model's")
    _of_the_model(command)


def _of_the_model(command: CommandParser) -> None:
    _of_the_base(command)
    command.add_argument("--dtype", default="auto", metavar="D")
    command.add_argument("--quantization", default="none", metavar="Q")


def _of_the_base(command: CommandParser) -> None:
    """A model that may be trained: number format and quantisation are not options."""
    command.add_argument("--model", metavar="M",
                         help="from the catalogue, a folder or a hub id; default: the bundled one")
    command.add_argument("--device", default="auto", metavar="D")
    command.add_argument("--verbose", action="store_true",
                         help="show the output of the libraries and the traceback of unexpected errors")


def _threads(command: CommandParser) -> None:
    _count(command, "threads", 1, None, "threads of torch")


def _settings(command: CommandParser, of: str) -> None:
    command.add_argument("--set", action="append", default=[], metavar="KNOB=VALUE", help=f"set a knob of {of}")


def _names(
    command: CommandParser, option: str, meaning: str, metavar: str = "NAME", default: Iterable[str] | None = ()
) -> None:
    default = default if default is None else list(default)
    command.add_argument(
        f"--{option}", nargs="+", action="extend", default=default, metavar=metavar, help=meaning
    )


def _count(command: CommandParser, option: str, low: int, default: int | None, meaning: str | None = None) -> None:
    """An option that takes a whole number of at least `low`."""
    command.add_argument(f"--{option}", type=_from(low), default=default, metavar="N", help=meaning)


def _results(command: CommandParser, out: str, page: str, pages: str) -> None:
    """Options for the files of a benchmark, with their default paths."""
    command.add_argument("--out", nargs="?", const=out, metavar="F.json", help=f"write every number, {out}")
    command.add_argument("--page", nargs="?", const=page, metavar="F.md", help=f"{pages}, {page}")


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
        raise argparse.ArgumentTypeError("an empty text cannot be a stop string; name the text to end before")
    return text.replace("\\n", "\n")
