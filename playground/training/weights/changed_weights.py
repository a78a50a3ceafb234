"""The file of changed weights: those of each layer that differs from the loaded model, and a card that describes them.

A file is named by the content that it was made from: source weights, changes with their knobs, and calibration texts.
"""
from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from playground.engine.checkpoint.catalogue import made_models
from playground.engine.checkpoint.hub_files import first_sentence
from playground.errors import Refusal

FORMAT = 1
MOST_KEPT = 64  # files; the one that was read longest ago makes room


@dataclass(frozen=True)
class ChangedWeights:
    """card: what was made, of what, calibrated on what, and what it costs and loses. tensors: weights by layer."""

    card: dict[str, Any]
    tensors: dict[str, Tensor]


def folder() -> Path:
    return made_models().parent / "weights"


def key_of(*parts: Any) -> str:
    """The name of what was made of these parts, plain data."""
    return sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()[:32]


def digest_of(network: nn.Module) -> str:
    """What identifies the values of all weights of a network."""
    digest = sha256()
    for name, weight in network.named_parameters():
        plain = weight.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {list(plain.shape)}".encode())
        digest.update(plain.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def find(key: str) -> ChangedWeights | None:
    """What was made under a name; None if there is no such file, or a damaged one, which is made again."""
    path = _path(key)
    try:
        with safe_open(path, "pt") as file:
            card = json.loads((file.metadata() or {})["card"])
            found = ChangedWeights(card, {name: file.get_tensor(name) for name in file.keys()})
        os.utime(path)
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    return found


def save(key: str, made: ChangedWeights) -> None:
    """Write a file whole or not at all; raises Refusal if it cannot be written."""
    path = _path(key)
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")  # another process may write the same file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: weight.detach().cpu().contiguous().clone() for name, weight in made.tensors.items()}
        save_file(tensors, unfinished, {"card": json.dumps(made.card)})
        unfinished.replace(path)
    except (OSError, SafetensorError) as reason:
        raise Refusal(
            f"The changed weights cannot be saved in {path.parent} ("
            f"{getattr(reason, 'strerror', None) or first_sentence(reason)}): free some space, or set PLAYGROUND_HOME "
            "to another folder.", "weights") from None
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    _drop_oldest()


def cards() -> list[dict[str, Any]]:
    """The cards of all that was made, the newest first, each with its "file" and the bytes that it takes "on disk"."""
    found = []
    for path in sorted(folder().glob("*.safetensors"), key=_age, reverse=True):
        with suppress(OSError, SafetensorError, KeyError, ValueError), safe_open(path, "pt") as file:
            card = json.loads((file.metadata() or {})["card"])
            found.append(card | {"file": str(path), "on disk": path.stat().st_size})
    return found


def _path(key: str) -> Path:
    return folder() / f"{key}.safetensors"


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # deleted meanwhile
        return 0.0


def _drop_oldest() -> None:
    for path in sorted(folder().glob("*.safetensors"), key=_age, reverse=True)[MOST_KEPT:]:
        with suppress(OSError):
            path.unlink(missing_ok=True)
