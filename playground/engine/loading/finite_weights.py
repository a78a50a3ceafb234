"""Refuses weights and logits that are NaN or infinite, and names the cause: a damaged file, or the range of float16."""
from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from playground.engine.loading.stored_weights import is_plain
from playground.errors import Refusal

ROWS = 4096  # of a matrix that are looked at in one step, so that no copy of all of it is made


@torch.no_grad()
def check_finite(name: str, network: PreTrainedModel) -> None:
    """Refuse a network with a weight that is NaN or infinite, naming the weight."""
    for weight_name, weight in network.named_parameters():
        if not is_plain(weight) or not weight.numel():
            continue
        # a sum is not finite if a number is not, and takes no memory; a sum that overflows is looked at once more
        if not weight.sum(dtype=torch.float32).isfinite() and not _all_finite(weight):
            raise _refusal(name, weight_name, weight)


def logits_refusal(name: str, dtype: torch.dtype) -> Refusal:
    """Why a network cannot be run whose weights are finite and whose logits are not."""
    if dtype == torch.float16:
        return Refusal(
            f"The logits of {name} overflow in float16, whose numbers end at 65,504: choose bfloat16 or float32.",
            "dtype",
        )
    return Refusal(
        f"The logits of {name} are NaN or infinite in {str(dtype).removeprefix('torch.')} although its weights are"
        " finite: fetch or save the model again, or choose another.",
        "model",
    )


def _refusal(name: str, weight_name: str, weight: Tensor) -> Refusal:
    if weight.dtype == torch.float16 and not weight.isnan().any():
        return Refusal(
            f"The weights {weight_name} of {name} overflow in float16, whose numbers end at 65,504: choose bfloat16 or"
            " float32.",
            "dtype",
        )
    kind = "NaN" if weight.isnan().any() else "infinite numbers"
    return Refusal(
        f"There are {kind} in the weights {weight_name} of {name}, so the files are damaged: fetch or save the model"
        " again, or choose another.",
        "model",
    )


def _all_finite(weight: Tensor) -> bool:
    return all(bool(part.isfinite().all()) for part in weight.split(ROWS))
