"""Whether a published head can be used at all: its folder may come from anyone.

Sizes are compared before memory is taken for them, and the network is built once, so that a head that is damaged or
made to break something is refused when it is named, not in the middle of a run.
"""
from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from playground.contract import find
from playground.engine.device_memory import free_bytes
from playground.engine.model import Model
from playground.errors import Refusal

Weights = dict[str, Tensor]
# of what a config gives in place of numbers, lists and objects, and of tensors in shapes that nothing can be made of
MALFORMED = (TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RuntimeError)
RANGES = {
    "block_size": (1, 1024), "steps": (1, 64), "head_dim": (2, 4096), "selector_top_k": (1, 1024),
    "num_jacobi_passes": (1, 64),
}
POSITIVE = ("rope_theta", "rms_norm_eps")


def check_fits(folder: Path, files: list[Path]) -> None:
    """Raise Refusal if the weights of a head are larger than the free memory."""
    size, free = sum(path.stat().st_size for path in files), free_bytes("cpu")
    if size > free:
        raise Refusal(
            f"The weights in {folder} have {size:,} bytes, and {free:,} bytes of memory are free: free some, or choose "
            "another head.",
            "from",
        )


def check_usable(folder: Path, strategy: str, weights: Weights, model: Model) -> None:
    """Raise Refusal unless the values of a head are in range and its network can be built."""
    if problem := _out_of_range(weights, model) or _wrong_tokens(weights, model):
        raise _damaged(folder, problem)
    try:
        drafter = find(strategy)()
        drafter.begin_fitted(weights)
        if hasattr(drafter, "build"):
            drafter.build(weights)
    except (KeyError, *MALFORMED):
        raise _damaged(folder, "has weights or a config.json that no network can be made of") from None


def _out_of_range(weights: Weights, model: Model) -> str:
    """What a value is out of range of; empty if all are within."""
    if name := next((name for name in (*RANGES, *POSITIVE) if name in weights and weights[name].dim()), ""):
        return f"gives a list as {name}"
    for name, (least, most) in RANGES.items():
        if name in weights and not least <= int(weights[name]) <= most:
            return f"gives {name} as {int(weights[name])}, which is not from {least} to {most}"
    for name in POSITIVE:
        if name in weights and not float(weights[name]) > 0:
            return f"gives {name} as {float(weights[name])}, which is not positive"
    layers = weights.get("layers", torch.tensor([0]))
    if layers.is_floating_point() or not all(0 <= layer <= model.depth for layer in layers.tolist()):
        return f"reads layers that {model.name} does not have"
    infinite = (name for name, tensor in weights.items() if tensor.is_floating_point() and not _finite(tensor))
    return f"has NaN or infinite numbers in {name}" if (name := next(infinite, "")) else ""


def _wrong_tokens(weights: Weights, model: Model) -> str:
    """What is wrong with the table from draft tokens to those of the target; empty if there is none, or nothing is."""
    if "d2t" not in weights:
        return ""
    tokens = weights["d2t"] + torch.arange(len(weights["d2t"]))
    known = not tokens.is_floating_point() and bool(((tokens >= 0) & (tokens < model.vocabulary)).all())
    if not known or not len(tokens) == len(weights.get("lm_head.weight", tokens)):
        return f"drafts tokens that {model.name} does not have"
    return ""


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.float().isfinite().all())


def _damaged(folder: Path, problem: str) -> Refusal:
    return Refusal(f"The head in {folder} {problem}: download it again, or choose another.", "from")
