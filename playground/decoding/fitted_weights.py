"""Weights that `fit` has learnt for a lane's models: where they lie, and whether they belong to these very models.

A file of safetensors is named for a strategy and the models, and its header says of which weights these were. Those
learnt on this machine come before those that come with the project.
"""
from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from playground.contract import Strategy
from playground.engine.catalogue import BUNDLED_MODELS, made_models
from playground.engine.model import Model
from playground.errors import Refusal

BUNDLED_FITTED = BUNDLED_MODELS.parent / "fitted"
Streams = Mapping[str, Model]
"""Models by the stream they serve, "target" and "draft"."""


def digests(models: Streams) -> dict[str, str]:
    """What tells the weights of each model from others, by stream: the revision, and how they are quantised."""
    return {stream: f"{model.revision} {model.quantization}" for stream, model in sorted(models.items())}


def file_name(strategy: str, models: Streams) -> str:
    """Such as specdec_plus_plus-pocket-draft-pocket.safetensors."""
    return (
        "-".join([strategy, *(re.sub(r"[^\w.-]+", "-", Path(models[stream].name).name) for stream in sorted(models))])
        + ".safetensors"
    )


def own_place(strategy: str, models: Streams) -> Path:
    """Where what is learnt on this machine is kept."""
    return made_models().parent / "fitted" / file_name(strategy, models)


def save(path: Path, weights: dict[str, Tensor], models: Streams) -> None:
    """Write weights and whose they are; raises Refusal where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        save_file(
            {name: tensor.clone() for name, tensor in weights.items()},
            unfinished,
            {"models": json.dumps(digests(models))},
        )
        unfinished.chmod(0o644)
        unfinished.replace(path)
    except (OSError, SafetensorError) as reason:
        raise Refusal(f"{path} cannot be written ({reason}): name another file with --out.", "out") from None


def find(strategy: Strategy, models: Streams) -> dict[str, Tensor]:
    """The weights by name; raises Refusal where none were learnt for these models, or only for others of their names.
    """
    places = own_place(strategy.name, models), BUNDLED_FITTED / file_name(strategy.name, models)
    there = [path for path in places if path.is_file()]
    for path in there:
        weights, learnt_for = _read(path)
        if learnt_for == digests(models):
            return weights
    names = " and ".join(models[stream].name for stream in sorted(models))
    said = (
        f"was fitted to other weights of {names} than those that are loaded"
        if there
        else f"has not been fitted to {names} yet"
    )
    raise Refusal(
        f"{strategy.name} {said}: run `python -m playground fit {strategy.name}` with these models, or {strategy.trained}.",
        strategy.name,
    )


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads((file.metadata() or {})["models"])
    except (OSError, SafetensorError, KeyError, ValueError):
        raise Refusal(f"The file {path} is damaged: delete it, and let `fit` learn it anew.", path.name) from None
