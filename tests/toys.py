"""Small tokenizers and random networks of real architectures, made in milliseconds."""
from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SENTENCES = [
    "The green bird sings, and the red fox listens.",
    'Write {"name": "Ada", "age": 36, "likes": ["tea", "trees"]} as a record.',
    "Größe, naïve, “quoted” – and 日本 🙂.",
]
END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
TEMPLATE = ("{% for m in messages %}<|{{ m.role }}|> {{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def byte_tokenizer(merges: int = 60, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE: three special tokens, the 256 bytes, and `merges` longer tokens learned from SENTENCES."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=259 + merges, special_tokens=[END, USER, ASSISTANT], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, additional_special_tokens=[USER, ASSISTANT], chat_template=template
    )


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Pieces with "▁" for a space and bytes as <0x0A>, which put a space before every text and drop it when decoding.
    """
    names = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "c",
        "▁a",
        "▁b",
        "ab",
        "▁ab",
    ]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(
        models.BPE({name: id for id, name in enumerate(names)}, merges, byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def network(architecture: str = "llama", vocabulary: int = 320, seed: int = 0) -> PreTrainedModel:
    """Two random layers of width 64 of a real architecture: llama, qwen2 or gpt2."""
    torch.manual_seed(seed)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if architecture == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=vocabulary, n_embd=64, n_layer=2, n_head=4, n_positions=256, **ends)
        ).eval()
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[architecture]
    return model(
        config(
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            **ends,
        )
    ).eval()


def save(folder: Path, architecture: str = "llama", vocabulary: int = 320) -> Path:
    """A folder as `save_pretrained` leaves it: a random network and the byte-level tokenizer."""
    network(architecture, vocabulary).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
