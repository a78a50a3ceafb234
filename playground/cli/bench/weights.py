"""`bench weights`: what changes of weights cost and lose, side by side."""
from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from playground.bench.report_text import report_json
from playground.bench.weights import weights_report as report
from playground.cli.bench.survey import gather
from playground.cli.input_files import check_place, write_text
from playground.cli.load_models import load
from playground.cli.remaining_time import RemainingTime
from playground.cli.shared_options import CommandParser, add_model, add_names, add_results, add_threads
from playground.cli.terminal_view import table as screen_table
from playground.contract.weight_change import check_changes
from playground.errors import Refusal
from playground.weight_changes import WeightChanges

if TYPE_CHECKING:
    from playground.decoding.models import Models

PROMPT = "Once upon a time"
TOKENS, RUNS = 96, 3


def measure_options(command: CommandParser) -> None:
    add_names(command, "only", "some weights, as in a lane, such as gptq:bits=3; default: every change", "WEIGHTS")
    command.add_argument("--speed", action="store_true", help="measure tokens/s of a greedy lane as well")
    add_model(command)
    add_threads(command)
    add_results(command, "docs/weights.json", "docs/weights.md", "write the table as a page")


def measure(options: Namespace) -> bool:
    """Make what is not on the disk yet, print the table, and write the requested files, after Ctrl-C with what is made;
    when it is run again, that is found on the disk. Raises Refusal.
    """
    wanted = list(dict.fromkeys(options.only or ()))
    for weights in wanted:
        check_changes(weights)
        if not WeightChanges.read(weights).layers or WeightChanges.read(weights).loaded:
            raise Refusal(f"This table has changes of layers, not {weights}: name some as in a lane.", "only")
    for path in (options.out, options.page):
        check_place(path)
    options.draft, options.draft_device = None, ""
    models = load(options, draft=False)
    wanted = wanted or list(report.OF_EXPERTS if models.target.experts else report.WEIGHTS)
    from playground.bench.speed.speed_report import machine
    stopped = gather(measured := [], _measured(models, wanted, options.speed))
    cards, speeds = [card for card, _ in measured], {card["weights"]: rate for card, rate in measured if rate}
    print(screen_table(report.table(cards, speeds)))
    facts = {"settings": _settings(models, cards), "machine": machine(models.target.device)}
    write_text(options.out, report_json(report.document(facts, cards, speeds)))
    write_text(options.page, report.page(facts, cards, speeds))
    if stopped:
        raise KeyboardInterrupt("stopped; what there was until then is above; run again to resume")
    return False


def _measured(models: Models, wanted: list[str], speed: bool) -> Iterator[tuple[dict[str, Any], float | None]]:
    """The card of each change as it is made, and a lane's tokens per second in its weights where that is asked."""
    from playground.training.weights.change_weights import WeightMaker
    for weights in wanted:
        card = WeightMaker(models.target, RemainingTime()).make(WeightChanges.read(weights).layers).card
        yield card, _tokens_per_second(models, weights) if speed else None


def _tokens_per_second(models: Models, weights: str) -> float:
    """Median of a greedy lane's, after a run that warms up."""
    import playground
    own = replace(models, target=playground.in_weights(models.target, weights, None))
    rates = [playground.run("greedy", PROMPT, models=own, max_new_tokens=TOKENS).metrics["tokens_per_second"]
             for _ in range(1 + RUNS)]
    return median(rates[1:])


def _settings(models: Models, cards: list[dict[str, Any]]) -> dict[str, Any]:
    target = models.target
    return {"model": target.name, "revision": target.revision, "dtype": str(target.dtype).removeprefix("torch."),
            "held-out tokens": cards[0]["tokens"], "perplexity before": round(cards[0]["perplexity before"], 4),
            "MB before": round(cards[0]["bytes before"] / 1e6, 2)}
