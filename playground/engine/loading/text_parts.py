"""The text part of multimodal checkpoints, as a network of the library's own class for text alone.

What sees images or hears sound is not loaded, although estimates of memory count it. Of a model whose text class the
library does not have, the class of the same network under another name is used: with text alone the three positions of
a token in Qwen-VL's rotary embedding are equal, so that Qwen2-VL is Qwen2. Every type here is compared with the
library's multimodal class by a test.
"""
from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

ENTRY = "text_part_of"  # of a config made here: the multimodal type
SAME = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
KINDS = (
    "aria", "aya_vision", "cohere2_vision", "gemma3", "gemma4", "idefics2", "idefics3", "internvl",
    "lfm2_vl", "lighton_ocr", "llama4", "llava", "llava_next", "llava_next_video", "llava_onevision", "mistral3",
    "ovis2", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_5", "qwen3_vl", "smolvlm", "video_llava", "vipllava",
    "voxtral",
)
UNSCALED = ("aya_vision", "cohere2_vision")  # whose multimodal classes leave out the logit_scale of their text part
WHOLE = "ForConditionalGeneration"  # in the names of classes that see more than text
MROPE = ("mrope_section", "mrope_interleaved")
# names of stored weights as regular expressions, in older and newer files, and those of the text class
NAMES = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.model\.": "model.",
    r"^model\.(language_model|text_model)\.": "model.",
    r"^language_model\.": "model.",
}


def text_part(config: PretrainedConfig) -> PretrainedConfig | None:
    """The config of the text part of a multimodal checkpoint; None for all others."""
    inner = config.get_text_config(decoder=True)
    names = config.architectures or [WHOLE]
    if config.model_type not in KINDS or inner is config or not any(WHOLE in name for name in names):
        return None
    text = CONFIG_MAPPING[SAME.get(inner.model_type, inner.model_type)](**_fields(inner))
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    if config.model_type in UNSCALED:
        text.logit_scale = 1.0
    if (stored := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = stored
    setattr(text, ENTRY, config.model_type)
    return text


def sees_more(config: PretrainedConfig) -> bool:
    """Whether a config describes a network that sees images or hears sound besides text."""
    return any(getattr(config, name, None) is not None for name in ("vision_config", "audio_config"))


def text_names(config: PretrainedConfig) -> dict[str, str]:
    """Names of stored weights as regular expressions, and the text class's names for them; empty for other configs."""
    return NAMES if getattr(config, ENTRY, "") else {}


def _fields(inner: PretrainedConfig) -> dict[str, Any]:
    fields = {name: value for name, value in inner.to_dict().items() if name not in ("model_type", "architectures")}
    rope = fields.get("rope_parameters")
    if inner.model_type in SAME and isinstance(rope, dict):
        fields["rope_parameters"] = {name: value for name, value in rope.items() if name not in MROPE}
        if rope.get("rope_type") == "mrope":
            fields["rope_parameters"]["rope_type"] = "default"
    return fields
