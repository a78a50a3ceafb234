"""The precision of matrix products in training: bfloat16 where the processor multiplies it fast, float32 elsewhere.

A CPU without such instructions computes products in bfloat16 up to thirty times slower than in float32.
"""
from functools import cache

import torch


@cache
def product_type(kind):
    """Type in which a device of this kind, "cpu" or "cuda", multiplies matrices in training."""
    fast = kind != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def mixed_precision(device):
    """Context manager in which products have `product_type`, and the weights stay in float32."""
    fast = product_type(device.type) is torch.bfloat16
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


def in_words(place):
    """Types of a training for its card, written on the machine that trained. place: that of the `TrainingState`."""
    kind = "cpu" if "CPU" in place else "cuda"
    return f"{str(product_type(kind)).removeprefix('torch.')} products, float32 weights"
