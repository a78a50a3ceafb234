"""The benchmarks of `python -m playground bench`."""
from __future__ import annotations

from playground.cli.bench.speed import measure, text_options
from playground.cli.shared_options import Command, CommandParser, add_commands

__all__ = ["measure", "measure_options"]

BENCHMARKS = (
    Command("speed", "bench.speed:measure",
            "measure speed: texts, single forwards, lanes, first tokens, memory, and the machine's limits"),
    Command("survey", "bench.survey:measure", "run strategies on questions: scores and costs"),
    Command("effects", "bench.effects:record", "record the effects of strategies on the bundled models"),
    Command("caches", "bench.caches:measure",
            "measure the cache policies side by side: recall, memory freed, and time per step"),
    Command("compute", "bench.compute:measure",
            "measure the compute policies: score against the share of FLOPs and of time"),
    Command("weights", "bench.weights:measure",
            "measure changes of weights: bits, bytes, divergence from the loaded model, perplexity"),
    Command("repair", "bench.repair:measure",
            "measure learnt prompts for compressed weights: losses and scores, beside those of the loaded model"),
    Command("speculation", "bench.speculation:measure",
            "measure every lossless speculative strategy, task by task, compared with the library's", ("guessing",)),
    Command("diffusion", "bench.diffusion:measure",
            "measure the decoders of masked canvases, task by task: scores, forwards and seconds"),
    Command("parallel", "bench.parallel:measure",
            "measure what filling positions together costs, on list tasks over the exact table of their answers"),
    Command("schemas", "bench.schemas:measure",
            "test JSON Schemas: which are refused, whether constrained texts are valid, and what token masks cost"),
    Command("models", "bench.models:measure",
            "try every causal model type of the transformers library on a tiny random network"),
    Command("bookkeeping", "bench.bookkeeping:measure",
            "measure the overhead of every strategy outside forwards: CPU time and recorded events"),
)


def measure_options(command: CommandParser) -> None:
    """Without a benchmark's name, the speed of texts is measured."""
    text_options(command)
    command.set_defaults(only=["text"], shapes=[], beside=[], compiled=False)
    add_commands(command, BENCHMARKS, metavar=f"[{' | '.join(benchmark.name for benchmark in BENCHMARKS)}]")
