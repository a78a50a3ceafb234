"""Whether a model's files may be read at all: sizes of its JSON files, and a config.json that its own weights bear out.

transformers allocates whatever a config asks for, and fills what the weight files lack with random numbers. A config
that asks for ten million layers would take the machine's memory before anything could be compared, so the raw JSON is
looked at first, then the network is built without memory (on torch's meta device) and its size held against the stored
weights.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from playground.engine.loading.network_class import built_network
from playground.errors import Refusal

JSON_BYTES = {
    "config.json": 2_000_000,
    "generation_config.json": 2_000_000,
    "tokenizer_config.json": 30_000_000,
    "special_tokens_map.json": 30_000_000,
    "tokenizer.json": 200_000_000,
    "chat_template.json": 2_000_000,
    "model.safetensors.index.json": 50_000_000,
}
MAX_SHARDS = 1000
# by part of a config entry's name: of each, transformers makes one object or more. The library's own default for doge
# are 16,384 experts
MAX_COUNTS = {"layer": 1000, "expert": 16_384, "label": 100_000}
SIZES = ("size", "dim", "width")  # parts of names of sizes, such as vocab_size_per_layer_input, which are no counts
MAX_INTEGER = 2**40
SLACK = 2  # parameters that a network may have for each stored one: heads tied to embeddings are stored once
PACKED = 16  # the same where the files hold quantised weights, up to eight of them in a number


def check_file_sizes(name: str, files: dict[str, int]) -> None:
    """Refuse a model with a JSON file too large to be read. `files` are sizes in bytes by file name."""
    for file, most in JSON_BYTES.items():
        if files.get(file, 0) > most:
            raise Refusal(
                f"The {file} of {name} has {files[file]:,} bytes, and {most:,} are the most: choose another model.",
                "model",
            )


def check_raw_config(name: str, path: Path) -> None:
    """Refuse a config.json whose counts would take memory as soon as transformers reads them. Malformed JSON is left to
    its reader.
    """
    try:
        entries = list(_integers(json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, RecursionError):
        return
    for entry, value in entries:
        if abs(value) > (most := _most(entry)):
            raise Refusal(
                f"The config.json of {name} gives {entry[:60]} a value beyond {most:,}: choose another model.", "model"
            )


def _most(entry: str) -> int:
    """The largest value that an entry of this name may have."""
    if any(part in entry for part in SIZES):
        return MAX_INTEGER
    return next((most for part, most in MAX_COUNTS.items() if part in entry), MAX_INTEGER)


def check_against_weights(name: str, config: PretrainedConfig, stored: int, quantized: bool, free_bytes: int) -> None:
    """Refuse a config whose network has far more parameters than the `stored` ones, or buffers that do not fit into
    memory.
    """
    try:
        with torch.device("meta"):
            network = built_network(config)
        parameters = sum(weights.numel() for weights in network.parameters())
        buffered = sum(buffer.numel() * buffer.element_size() for buffer in network.buffers())
    except Exception as reason:  # a config can break a network's constructor in any way
        says = isinstance(reason, (ValueError, ImportError)) and " ".join(str(reason).split())[:120]
        said = says or "an unexpected error inside the library"
        raise Refusal(
            f"The config.json of {name} describes no network that can be built ({said}): choose another model.", "model"
        ) from None
    if parameters > stored * (PACKED if quantized else SLACK) or buffered > free_bytes:
        raise Refusal(
            f"The config.json of {name} describes a network of {parameters:,} parameters, and its weight files hold"
            f" {stored:,}: save the model again, or choose another.",
            "model",
        )


def _integers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Every integer of a JSON value with the name of the entry it belongs to."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _integers(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _integers(inner)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield name, value
    elif isinstance(value, float) and value.is_integer():
        yield name, int(value)
