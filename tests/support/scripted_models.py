"""Models whose most probable next token depends on the last one only, as a test writes it down."""
from __future__ import annotations

from itertools import pairwise

import torch
from toys import byte_tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from playground.engine.model import Model

WIDTH = 256
SCALE = 30.0  # the logit of the token that follows, times about one


def scripted_network(vocabulary: int, follows: dict[int, int], context: int = 512) -> LlamaForCausalLM:
    """A Llama whose layers add nothing, and whose lm_head maps the embedding of each token to the token after it."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=None,
    )
    network = LlamaForCausalLM(config).eval()
    embeddings = torch.randn(vocabulary, WIDTH, generator=torch.Generator().manual_seed(0))
    embeddings /= embeddings.pow(2).mean(1, keepdim=True).sqrt()
    head = torch.zeros(vocabulary, WIDTH)
    for token, following in follows.items():
        head[following] += embeddings[token] * SCALE / WIDTH
    with torch.no_grad():
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        network.model.embed_tokens.weight.copy_(embeddings)
        network.lm_head.weight.copy_(head)
    return network


def writes(
    tokens: list[int], tokenizer: PreTrainedTokenizerFast | None = None, context: int = 512, **generation
) -> Model:
    """A model that writes these tokens one after the other, from wherever it is in them; `generation` are the entries
    of its generation_config.json.
    """
    tokenizer = tokenizer or byte_tokenizer()
    network = scripted_network(len(tokenizer), dict(pairwise([*tokens, tokens[-1]])), context)
    network.generation_config = GenerationConfig(**generation)
    return Model(network, tokenizer, "scripted")
