"""Lanes of the bundled pair on the GPU, as JSON lines: waits per token, races between threads, repeatability, and too
little memory.
"""
from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from threading import Thread
from time import perf_counter

import torch

import playground
from playground.contract.lane_config import LaneConfig
from playground.decoding.models import Models
from playground.trace.result import Result

PROMPT, TOKENS = "Tell me a story about Mia.", 64
LANES = {
    "greedy": LaneConfig("greedy"),
    "sampling": LaneConfig("greedy", extras=[("temperature", {"t": 0.8}), ("top_p", {})]),
    "regex": LaneConfig("greedy", extras=[("regex", {"pattern": "[A-Z][a-z ,.]{5,200}"})]),
    "speculative": LaneConfig("speculative"),
    "speculative, tree": LaneConfig("speculative", extras=[("draft_model", {"width": 2})]),
    "prompt lookup": LaneConfig("speculative", extras=[("prompt_lookup", {}), ("greedy_match", {})]),
    "beam search": LaneConfig("beam_search"),
    "EAGLE-2": LaneConfig("speculative", extras=[("eagle_2", {})]),
    "Medusa": LaneConfig("speculative", extras=[("medusa", {})]),
    "DoLa": LaneConfig("greedy", extras=[("dola", {})]),
    "H2O": LaneConfig("greedy", extras=[("h2o", {})]),
    "SnapKV": LaneConfig("greedy", extras=[("snapkv", {})]),
}


def run(models: Models, lanes: list[LaneConfig], tokens: int = TOKENS, seed: int = 1) -> list[Result]:
    return playground.compare(lanes, PROMPT, models=models, chat=True, seed=seed, max_new_tokens=tokens)


def texts(models: Models, lanes: list[LaneConfig], **how) -> list[str]:
    return [result.text for result in run(models, lanes, **how)]


def say(**numbers) -> None:
    print(json.dumps(numbers), flush=True)


def waits(models: Models, lane: LaneConfig) -> int:
    """How often the host waited for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run(models, [lane])
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in found)


def measure(models: Models, name: str, lane: LaneConfig) -> None:
    run(models, [lane])  # warm-up
    seconds, result = [], None
    for _ in range(3):
        start = perf_counter()
        (result,) = run(models, [lane])
        seconds.append(perf_counter() - start)
    tokens = result.metrics["tokens"]
    say(lane=name, tokens=tokens, ms_per_token=[round(1000 * each / tokens, 3) for each in sorted(seconds)],
        waits_per_token=round(waits(models, lane) / tokens, 2), reason=result.reason,
        forwards=result.metrics.get("tokens_per_target_forward"))


def beside_scoring(models: Models) -> bool:
    """Whether a text is the same while another thread scores one."""
    wanted, running = texts(models, [LANES["greedy"]], tokens=96), True

    def score() -> None:
        while running:
            playground.score("The red fox listens. " * 4, models=models)

    thread = Thread(target=score)
    thread.start()
    found = [texts(models, [LANES["greedy"]], tokens=96) for _ in range(6)]
    running = False
    thread.join()
    return all(text == wanted for text in found)


def in_threads(models: Models) -> bool:
    """Whether two runs at once write what each writes alone."""
    names = ("greedy", "speculative")
    wanted, found = {name: texts(models, [LANES[name]]) for name in names}, {}
    threads = [Thread(target=lambda name=name: found.update({name: [texts(models, [LANES[name]]) for _ in range(4)]}))
               for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return all(text == wanted[name] for name in names for text in found[name])


def as_alone(models: Models) -> list[bool]:
    """Whether four lanes side by side write what each writes alone."""
    lanes = [LANES[name] for name in ("greedy", "speculative", "sampling", "H2O")]
    together = texts(models, lanes, seed=5)
    return [text == texts(models, [lane], seed=5)[0] for lane, text in zip(lanes, together)]


def in_little_memory() -> bool:
    """Whether a text goes on where its recordings find no memory."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 48e6) / total)
    (result,) = run(playground.load(device="cuda", dtype="float32"), [LANES["greedy"]], tokens=300)
    return result.reason in ("length", "end")


def check(what: str, holds: Callable[[], bool | list[bool]]) -> None:
    say(check=what, holds=holds())


def main() -> None:
    exact, half = (playground.load(device="cuda", dtype=dtype) for dtype in ("float32", "bfloat16"))
    for name, lane in LANES.items():
        measure(half, name, lane)
    check("a text beside scoring", lambda: beside_scoring(exact))
    check("two threads", lambda: in_threads(exact))
    check("side by side as alone, float32", lambda: as_alone(exact))
    check("repeats, bfloat16", lambda: texts(half, [LANES["sampling"]]) == texts(half, [LANES["sampling"]]))
    check("little memory", in_little_memory)


if __name__ == "__main__":
    main()
