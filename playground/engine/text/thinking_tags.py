"""The tags between which a model thinks, as its tokenizer and its chat template have them."""
from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from playground.engine.text.chat_template import is_bundled, template_of
from playground.errors import Refusal

Tags = tuple[str, str]
KNOWN: tuple[Tags, ...] = (
    ("<think>", "</think>"),  # Qwen3, DeepSeek R1, SmolLM3, GLM
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    ("<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"),  # gpt-oss
)
WORKED_STEPS: Tags = ("", "####")  # the bundled models write their steps first, then this sign and the answer


def read_tags(tokenizer: PreTrainedTokenizerBase) -> Tags | None:
    """The start and the end tag of a model's thinking; None if it has none that are known.

    Both are tokens of the vocabulary, or stand in the chat template. The start is empty where a text begins with its
    thinking.
    """
    template = _template(tokenizer)
    if is_bundled(template):
        return WORKED_STEPS
    return next((tags for tags in KNOWN if all(_has(tokenizer, template, tag) for tag in tags)), None)


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return template_of(tokenizer)
    except Refusal:  # it has none, which a prompt in plain text does not need
        return ""


def _has(tokenizer: PreTrainedTokenizerBase, template: str, tag: str) -> bool:
    return tag in template or tokenizer.backend_tokenizer.token_to_id(tag) is not None
