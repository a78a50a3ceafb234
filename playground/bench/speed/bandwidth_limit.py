"""The memory-bandwidth limit of decoding: every token reads all weights and the whole KV cache once.

Models that fit into a processor's caches, which are faster than its memory, can exceed it.
"""
from __future__ import annotations

import torch
from transformers import PreTrainedModel

from playground.bench.speed.baselines import Baseline
from playground.bench.speed.speed_defaults import LIMIT

SIZES = {"cuda": 1 << 30, "cpu": 1 << 27}  # bytes of the tensor that is copied; far larger than any cache
COPIES = 4  # timed together


def copier(device: torch.device) -> Baseline:
    """A baseline that copies a large tensor and writes no tokens. It is interleaved with the others, so that the
    bandwidth is measured under the same load.
    """
    source = torch.ones(_size_on(device), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def write(prepared: None) -> None:
        for _ in range(COPIES):
            target.copy_(source)

    return Baseline(LIMIT, lambda task: None, write, lambda output: [], device)


def copied_bytes(device: torch.device) -> int:
    """Bytes that one timed run of the copier reads and writes."""
    return 2 * COPIES * _size_on(device)


def _size_on(device: torch.device) -> int:
    return SIZES.get(device.type, SIZES["cpu"])


def bytes_a_token(network: PreTrainedModel, context: float) -> float:
    """Bytes of weights and KV cache that one token after `context` tokens reads."""
    return weight_bytes(network) + context * cache_bytes_a_token(network)


def weight_bytes(network: PreTrainedModel) -> int:
    """Bytes of all weights that a token reads. An embedding table that is not tied to the lm_head is left out: a token
    reads one row of it.
    """
    table, head = network.get_input_embeddings().weight, network.get_output_embeddings().weight
    return sum(_nbytes(weight) for weight in network.parameters() if weight is not table or table is head)


def cache_bytes_a_token(network: PreTrainedModel) -> int:
    """KV cache of one token in all layers, in bytes: 2 x layers x KV heads x head_dim x bytes per number."""
    heads, head_dim = kv_heads(network)
    return 2 * network.config.get_text_config().num_hidden_layers * heads * head_dim * network.dtype.itemsize


def kv_heads(network: PreTrainedModel) -> tuple[int, int]:
    """Number of KV heads and head_dim of a network."""
    config = network.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads, head_dim


def _nbytes(weight: torch.Tensor) -> int:
    """Bytes of a weight, the scales of a quantised one included."""
    state = getattr(weight, "quant_state", None)
    return weight.nbytes + (state.absmax.nbytes if state is not None else 0)
