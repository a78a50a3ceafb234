"""What the memory allows: every token needs all weights and the whole cache read once, and memory gives only so many
bytes a second.

Small models can stay in the caches of a processor, which are faster than its memory; for those this is no limit.
"""
from __future__ import annotations

import torch
from transformers import PreTrainedModel

from playground.bench.baselines import Baseline
from playground.bench.speed_defaults import LIMIT

SIZES = {"cuda": 1 << 30, "cpu": 1 << 27}  # bytes of the tensor that is copied; far more than any cache holds
COPIES = 4  # timed together


def copier(device: torch.device) -> Baseline:
    """Copies a large tensor, in turn with those who write, so that the bandwidth is that of the same moments; it writes
    no tokens.
    """
    source = torch.ones(_size_on(device), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def write(asked: None) -> None:
        for _ in range(COPIES):
            target.copy_(source)

    return Baseline(LIMIT, lambda task: None, write, lambda left: [], device)


def copied_bytes(device: torch.device) -> int:
    """Bytes that the copier reads and writes each time."""
    return 2 * COPIES * _size_on(device)


def _size_on(device: torch.device) -> int:
    return SIZES.get(device.type, SIZES["cpu"])


def bytes_a_token(network: PreTrainedModel, context: float) -> float:
    """Bytes read for one token behind `context` tokens: weights and cache."""
    return weight_bytes(network) + context * cache_bytes_a_token(network)


def weight_bytes(network: PreTrainedModel) -> int:
    """Of all weights a token goes through; of an embedding table that is not the head as well, a token reads but one
    row.
    """
    table, head = network.get_input_embeddings().weight, network.get_output_embeddings().weight
    return sum(_held(weight) for weight in network.parameters() if weight is not table or table is head)


def cache_bytes_a_token(network: PreTrainedModel) -> int:
    """Keys and values of one token in all layers, by the formula: 2 x layers x KV heads x width of a head x bytes of a
    number.
    """
    config = network.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return (
        2
        * config.num_hidden_layers
        * (getattr(config, "num_key_value_heads", None) or heads)
        * width
        * network.dtype.itemsize
    )


def _held(weight: torch.Tensor) -> int:
    """With the scales of a quantised weight."""
    state = getattr(weight, "quant_state", None)
    return weight.nbytes + (state.absmax.nbytes if state is not None else 0)
