"""Random encoder-decoder networks of the library, small, with weights so large that every token matters."""
from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from pairs import TOKENIZER, VOCABULARY
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

from playground.decoding.models import Models
from playground.engine.encoder_decoder.model import EncoderDecoder

END, START, FORCED = 1, 0, 7  # the texts of these networks end at their limit, but for the tests of ends


def t5() -> PreTrainedModel:
    """Relative positions, and a decoder that starts with the padding token."""
    return T5ForConditionalGeneration(T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=START, pad_token_id=START, eos_token_id=END))


def bart() -> PreTrainedModel:
    """Learnt positions, a decoder that starts with the end token of a source, and a forced first token."""
    network = BartForConditionalGeneration(BartConfig(
        **_like_bart(), decoder_start_token_id=END, bos_token_id=START, forced_eos_token_id=None))
    network.generation_config.forced_bos_token_id = FORCED
    return network


def marian() -> PreTrainedModel:
    """Sinusoidal positions, and a bias on its logits."""
    network = MarianMTModel(MarianConfig(**_like_bart(), decoder_start_token_id=START, forced_eos_token_id=None))
    network.final_logits_bias.uniform_(-1, 1)
    return network


def t5gemma() -> PreTrainedModel:
    """Rotary positions, grouped heads and sliding windows; its config does not name the start."""
    part = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
            "sliding_window": 6, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]}
    return T5GemmaForConditionalGeneration(T5GemmaConfig(
        encoder=part, decoder=part, vocab_size=VOCABULARY, bos_token_id=2, pad_token_id=START, eos_token_id=END))


KINDS: dict[str, Callable[[], PreTrainedModel]] = {"t5": t5, "bart": bart, "marian": marian, "t5gemma": t5gemma}


def network(kind: str, seed: int = 0, ends: bool = False) -> PreTrainedModel:
    """In float64. `ends`: its texts may end by themselves."""
    torch.manual_seed(seed)
    made = KINDS[kind]().double().eval()
    for weights in made.parameters():
        weights.data.mul_(3.0 if weights.dim() > 1 else 1.0)
    if not ends:
        made.generation_config.eos_token_id = made.config.eos_token_id = None
        made.config.get_text_config(decoder=True).eos_token_id = None
    return made


@cache
def encoder_decoders(kind: str) -> Models:
    """A network and a draft, which is the same with noise."""
    target, draft = network(kind), network(kind)
    torch.manual_seed(1)
    for weights in draft.parameters():
        weights.data += torch.randn_like(weights) * 0.02 * weights.std(correction=0)
    return Models(EncoderDecoder(target, TOKENIZER, kind), EncoderDecoder(draft, TOKENIZER, f"{kind} with noise"))


def _like_bart() -> dict:
    return {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
            "max_position_embeddings": 128, "pad_token_id": START, "eos_token_id": END}
