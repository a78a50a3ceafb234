"""Milliseconds of a forward and per token of lanes, for a network with random weights in bfloat16: JSON lines.

    python tests/gpu/times.py 0.5b

pocket is the bundled model; others are names of `bench speed --shapes`.
"""
from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from time import perf_counter

import torch

import playground
from playground.bench.speed.bandwidth_limit import bytes_a_token, copied_bytes, copier
from playground.bench.speed.model_shapes import build
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.engine.forward_input import ForwardInput
from playground.engine.loading.load import Loading
from playground.engine.model import Model
from playground.events import Commit

CONTEXTS, TOKENS, ROUNDS = (128, 2048), 40, 3
LANES = {
    "greedy": LaneConfig("greedy"),
    "sampling": LaneConfig("greedy", extras=[("temperature", {"t": 0.8}), ("top_p", {})]),
    "prompt lookup": LaneConfig("speculative", extras=[("prompt_lookup", {}), ("greedy_match", {})]),
    "min-p": LaneConfig("greedy", extras=[("temperature", {}), ("min_p", {})]),
}
CASES = [["greedy"], ["greedy"] * 4, ["sampling"], [*LANES]]


def prompt_of(model: Model, tokens: int) -> Prompt:
    ids = Prompt("the red fox and the old carp go to the lake where " * (tokens // 10)).encode(model)
    return Prompt(model.tokenizer.decode(ids[:tokens - TOKENS]))


def forward_ms(model: Model, prompt: Prompt, rows: int) -> float:
    """One forward of a block after the prompt, back to back."""
    ids, store = prompt.encode(model), model.new_store()
    model.forward([ForwardInput(store, ids, list(range(-1, len(ids) - 1)), last_only=True)])
    store.commit(len(ids) - 1)
    best = float("inf")
    for _ in range(ROUNDS + 1):  # the first records
        torch.cuda.synchronize()
        start = perf_counter()
        for _ in range(20):
            model.forward([ForwardInput(store, [5] * rows, list(range(-1, rows - 1)))])
            store.crop_scratch()
        torch.cuda.synchronize()
        best = min(best, (perf_counter() - start) / 20)
    store.done = True
    return 1000 * best


def token_ms(models: Models, lanes: list[str], prompt: Prompt) -> float:
    """Per token of all lanes, after every lane has its first."""
    texts: list[list[int]] = [[] for _ in lanes]
    start, before = None, 0
    for stamped in prepare(models, [LANES[name] for name in lanes], prompt, Limits(seed=1, max_new_tokens=TOKENS)):
        if isinstance(stamped.event, Commit):
            texts[stamped.lane] += stamped.event.ids
        if start is None and all(texts):
            torch.cuda.synchronize()
            start, before = perf_counter(), sum(map(len, texts))
    torch.cuda.synchronize()
    return 1000 * (perf_counter() - start) / (sum(map(len, texts)) - before)


def limit_ms(model: Model, context: int) -> float:
    """Of a token that reads all weights and its KV cache once, at the speed of large copies."""
    copies, seconds = copier(model.device), []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = perf_counter()
        copies.write(None)
        torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    return 1000 * min(seconds) * bytes_a_token(model.network, context) / copied_bytes(model.device)


def measured(model: Model, prompt: Prompt, context: int) -> Iterator[dict]:
    yield {"what": "bandwidth limit", "ms": [limit_ms(model, context)]}
    for rows in (1, 8):
        yield {"what": f"forward, {rows} rows", "ms": [forward_ms(model, prompt, rows)]}
    for lanes in CASES:
        token_ms(Models(model), lanes, prompt)  # warm-up
        name = " + ".join(lanes) if len(set(lanes)) == len(lanes) else f"{len(lanes)} {lanes[0]} lanes"
        yield {"what": name, "ms": sorted(token_ms(Models(model), lanes, prompt) for _ in range(ROUNDS))}


def main() -> None:
    shape = sys.argv[1]
    if shape == "pocket":
        model = playground.load(device="cuda", dtype="bfloat16").target
    else:
        model = build(shape, Loading("cuda", "bfloat16")).model
    model.end_ids = frozenset()  # every text has the same length
    for context in CONTEXTS:
        if context <= model.context:
            for row in measured(model, prompt_of(model, context), context):
                row["ms"] = [round(each, 3) for each in row["ms"]]
                print(json.dumps({"shape": shape, "context": context, **row}), flush=True)


if __name__ == "__main__":
    main()
