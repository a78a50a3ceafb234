"""Tokenizers of the kinds that checkpoints bring, trained on a few sentences in milliseconds.

Each kind has the normalizer, the pre-tokenizer and the decoder of a family; the vocabularies are our own.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
OWN = ["The red fox reads the answer, and the green bird sings.", "naïve café, 日本語 😀 {\"answer\": 1.5e3}"]
CORPUS = (ROOT / "LICENSE").read_text(encoding="utf-8").splitlines() + OWN * 20
SIZE = 700
SPLIT = Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHAT = ["<|user|>", "<|assistant|>", "<|end|>"]  # control tokens of the kinds that have some


def gpt2() -> PreTrainedTokenizerFast:
    """Byte-level BPE with one special token, which begins, ends and pads."""
    tokenizer = _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )


def llama3() -> PreTrainedTokenizerFast:
    """Byte-level BPE with control tokens, a begin token before every text and a second end token."""
    split = pre_tokenizers.Sequence([
        pre_tokenizers.Split(SPLIT, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ])
    tokenizer = _byte_level(split, ["<|begin|>", "<|end_of_text|>", *CHAT])
    _begin_with(tokenizer, "<|begin|>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end_of_text|>")


def qwen() -> PreTrainedTokenizerFast:
    """Byte-level BPE that normalises, without a begin token, with added tokens that decoding does not skip."""
    tokenizer = _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>", *CHAT])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(["<think>", "</think>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|endoftext|>")


def phi() -> PreTrainedTokenizerFast:
    """Byte-level BPE with runs of spaces and tabs as added tokens."""
    tokenizer = _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"])
    tokenizer.add_tokens([AddedToken(" " * count, normalized=False) for count in (8, 4, 2)] + ["\t\t"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def llama2() -> PreTrainedTokenizerFast:
    """SentencePiece BPE with bytes: a space is put before each text, and decoding drops the first one."""
    tokenizer = _sentencepiece(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([*_spaces(), decoders.Strip(" ", 1, 0)])
    _begin_with(tokenizer, "<s>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def mistral() -> PreTrainedTokenizerFast:
    """SentencePiece BPE with bytes that puts a space before the first word only, not after special tokens."""
    tokenizer = _sentencepiece(["<unk>", "<s>", "</s>", *CHAT])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([*_spaces(), decoders.Strip(" ", 1, 0)])
    _begin_with(tokenizer, "<s>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def gemma() -> PreTrainedTokenizerFast:
    """SentencePiece BPE with bytes that adds no space; runs of spaces are added tokens with spaces as "▁"."""
    tokenizer = _sentencepiece(["<pad>", "<eos>", "<bos>", "<unk>", *CHAT])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(_spaces())
    tokenizer.add_tokens([AddedToken("▁▁", normalized=False), AddedToken("\n\n", normalized=False)])
    _begin_with(tokenizer, "<bos>")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def t5() -> PreTrainedTokenizerFast:
    """Unigram with "▁" before each word, an end token after each text, and no bytes: some letters are unknown."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    special = ["<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(CORPUS, trainers.UnigramTrainer(
        vocab_size=SIZE, special_tokens=special, unk_token="<unk>", show_progress=False
    ))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


def bert() -> PreTrainedTokenizerFast:
    """WordPiece that lowercases and cleans up the spaces before punctuation."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(
        vocab_size=SIZE, special_tokens=special, show_progress=False
    ))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", bos_token="[CLS]", eos_token="[SEP]", pad_token="[PAD]"
    )


def words() -> PreTrainedTokenizerFast:
    """Whole words without a decoder: the library joins tokens with spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(CORPUS, trainers.WordLevelTrainer(
        vocab_size=SIZE, special_tokens=["<unk>", "</s>"], show_progress=False
    ))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    maker.__name__: cache(maker) for maker in (gpt2, llama3, qwen, phi, llama2, mistral, gemma, t5, bert, words)
}


def _byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer, special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=SIZE, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ))
    return tokenizer


def _sentencepiece(special: list[str]) -> Tokenizer:
    """BPE over words with "▁" for spaces. Letters without a token are written as the tokens of their bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.train_from_iterator(
        [line for line in CORPUS if line.isascii()], trainers.BpeTrainer(vocab_size=SIZE, show_progress=False)
    )
    names = [*special, *BYTES, *sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)]
    merges = [tuple(pair) for pair in json.loads(tokenizer.model.__getstate__())["merges"]]
    written = Tokenizer(models.BPE(
        {name: id for id, name in enumerate(names)}, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True
    ))
    written.add_special_tokens(special)
    return written


def _spaces() -> list[decoders.Decoder]:
    return [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def _begin_with(tokenizer: Tokenizer, begin: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
