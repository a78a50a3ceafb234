"""Networks whose greedy text is known beforehand, saved as checkpoints are."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WIDTH = 128


def scripted(vocabulary: int, following: Mapping[int, int], **config) -> LlamaForCausalLM:
    """A network whose most probable next token depends on the last one only: {token: the next one}."""
    sizes = dict(hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=1, max_position_embeddings=512, bos_token_id=None, eos_token_id=None)
    network = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes | config)).eval()
    directions = torch.randn(vocabulary, WIDTH, generator=torch.Generator().manual_seed(0))
    directions /= directions.pow(2).mean(1, keepdim=True).sqrt()
    with torch.no_grad():
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        network.model.embed_tokens.weight.copy_(directions)
        network.lm_head.weight.zero_()
        for token, after in following.items():
            network.lm_head.weight[after] += directions[token] * 30 / WIDTH
    return network


def chain(ids: Sequence[int]) -> dict[int, int]:
    """The next token of each but the last, which may not occur twice with different ones after it."""
    return dict(zip(ids, ids[1:]))


def save(folder: Path, network: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> str:
    """A folder as `save_pretrained` leaves it."""
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
