"""Files of the weights that `fit` learns for a strategy and a lane's models.

Each is a safetensors file named after the strategy and the models. Its header identifies the weights of the models it
was fitted to. Files fitted on this machine take precedence over bundled ones.
"""
from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from playground.contract import Strategy
from playground.engine.checkpoint.catalogue import BUNDLED_MODELS, made_models
from playground.errors import Refusal
from playground.weight_changes import JOINT, WeightChanges

BUNDLED_FITTED = BUNDLED_MODELS.parent / "fitted"
LONGEST = 60  # characters that changes of a model's layers take in the name of a file


class NamedWeights(Protocol):
    """What identifies the weights of a model, one that continues texts or one that fills canvases."""

    name: str
    revision: str
    quantization: str


Streams = Mapping[str, NamedWeights]
"""Models by the stream they serve, "target" and "draft"."""

Given = Mapping[str, dict[str, Tensor]]
"""Weights of published heads that a person named, by strategy."""


def digests(models: Streams) -> dict[str, str]:
    """What identifies the weights of each model, by stream: revision and quantization."""
    return {stream: f"{model.revision} {model.quantization}" for stream, model in sorted(models.items())}


def file_name(strategy: str, models: Streams) -> str:
    """The name of the file, such as specdec_plus_plus-pocket-draft-pocket.safetensors."""
    names = [re.sub(r"[^\w.-]+", "-", _called(models[stream])) for stream in sorted(models)]
    return "-".join([strategy, *names]) + ".safetensors"


def _called(model: NamedWeights) -> str:
    """The name of a model, and the changes of its layers if there are any: then a file does not replace that of the
    model without them.
    """
    name, layers = Path(model.name).name, JOINT.join(WeightChanges.of_model(model.quantization).layers)
    if len(layers) > LONGEST:
        layers = f"{layers[:LONGEST]}-{sha256(layers.encode()).hexdigest()[:8]}"
    return f"{name}-{layers}" if layers else name


def local_path(strategy: str, models: Streams) -> Path:
    """The path of weights fitted on this machine."""
    return made_models().parent / "fitted" / file_name(strategy, models)


def save(path: Path, weights: dict[str, Tensor], models: Streams) -> None:
    """Write weights and the digests of the models. Raises Refusal if the file cannot be written."""
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")  # another process may write the same file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: tensor.clone() for name, tensor in weights.items()},
            unfinished,
            {"models": json.dumps(digests(models))},
        )
        unfinished.chmod(0o644)
        unfinished.replace(path)
    except (OSError, SafetensorError) as reason:
        raise Refusal(f"{path} cannot be written ({reason}): name another file with --out.", "out") from None
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def find(strategy: Strategy, models: Streams, given: Given = MappingProxyType({})) -> dict[str, Tensor]:
    """The weights by name, of a head that was given or of one fitted here.

    Raises Refusal if there are none for these models, or only for other weights of them.
    """
    name = strategy.weights_of or strategy.name
    if (weights := _found(name, models, given)) is not None:
        return weights
    names = " and ".join(models[stream].name for stream in sorted(models))
    problem = (
        f"was fitted to other weights of {names} than those loaded"
        if _files(name, models)
        else f"has not been fitted to {names} yet"
    )
    raise Refusal(
        f"{strategy.name} {problem}: run `python -m playground fit {name}` with these models, "
        f"or {strategy.trained}.",
        strategy.name,
    )


def is_fitted(strategy: Strategy, models: Streams) -> bool:
    """Whether there are weights for exactly these models. Raises Refusal for a damaged file."""
    return stored(strategy.weights_of or strategy.name, fitted_to(strategy, models)) is not None


def find_all(
    strategies: Iterable[Strategy], models: Streams, given: Given = MappingProxyType({})
) -> dict[str, dict[str, Tensor]]:
    """The weights by strategy. Raises Refusal if there are none for a strategy that needs some."""
    found = {
        strategy.name: find(strategy, fitted_to(strategy, models), given)
        for strategy in strategies
        if strategy.trained
    }
    for strategy in strategies:
        own = fitted_to(strategy, models)
        name = strategy.weights_of or strategy.name
        if strategy.prefers_trained and (weights := _found(name, own, given)) is not None:
            found[strategy.name] = weights
            strategy.found_trained = True
        if strategy.name in found:
            strategy.begin_fitted(found[strategy.name])
    return found


def fitted_to(strategy: Strategy, models: Streams) -> Streams:
    """The models that a strategy's weights belong to: all of a lane, or the target alone."""
    return {"target": models["target"]} if strategy.fitted_to_target else models


def _files(strategy: str, models: Streams) -> list[Path]:
    """Files of weights for models of these names; those fitted on this machine come first."""
    return [
        path
        for path in (local_path(strategy, models), BUNDLED_FITTED / file_name(strategy, models))
        if path.is_file()
    ]


def _found(name: str, models: Streams, given: Given) -> dict[str, Tensor] | None:
    """Weights of a head that was given, or those fitted to these models."""
    return given[name] if name in given else stored(name, models)


def stored(strategy: str, models: Streams) -> dict[str, Tensor] | None:
    """Weights that were fitted to exactly these models."""
    for path in _files(strategy, models):
        weights, belongs_to = _read(path)
        if belongs_to == digests(models):
            return weights
    return None


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads((file.metadata() or {})["models"])
    except (OSError, SafetensorError, KeyError, ValueError):
        raise Refusal(f"The file {path} is damaged: delete it and run `fit` again.", path.name) from None
