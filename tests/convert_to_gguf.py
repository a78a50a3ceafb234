"""Convert a bundled model to GGUF, llama.cpp's format: python tests/convert_to_gguf.py assets/models/pocket OUT.gguf

Needs the packages gguf, safetensors, numpy and torch. Weights are written as float32, so that greedy texts can be
compared. Only for Llama models with a byte-level tokenizer that splits digits, as the bundled ones: llama.cpp calls
that "smollm".
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from numpy import ndarray
from safetensors.torch import load_file

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def convert(folder: Path, out: Path, kind: str = "F32") -> None:
    """Write the model in `folder` to the file `out`. kind: of matrices, such as Q8_0; all else is in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = GGUFWriter(out, "llama")
    _add_shape(writer, config)
    _add_tokenizer(writer, folder, config)
    for name, weight in load_file(folder / "model.safetensors").items():
        if name != "lm_head.weight" or not config["tie_word_embeddings"]:
            values, packed = _rotated(name, weight.float().numpy(), config), GGMLQuantizationType[kind]
            if values.ndim < 2 or kind == "F32":
                writer.add_tensor(_named(name), values)
            else:
                writer.add_tensor(_named(name), quants.quantize(values, packed), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"] for token in stored["added_tokens"]}
    pieces = sorted(stored["model"]["vocab"], key=stored["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(pieces)
    writer.add_token_types([TokenType.CONTROL if piece in special else TokenType.NORMAL for piece in pieces])
    writer.add_token_merges([" ".join(pair) for pair in stored["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((folder / "chat_template.jinja").read_text(encoding="utf-8"))


def _named(name: str) -> str:
    """The name of a tensor in GGUF."""
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.weight"


def _rotated(name: str, weight: ndarray, config: dict[str, Any]) -> ndarray:
    """llama.cpp rotates neighbouring dimensions of queries and keys, transformers the two halves of a head."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return weight
    number, (rows, columns) = config[heads], weight.shape
    return weight.reshape(number, 2, rows // number // 2, columns).swapaxes(1, 2).reshape(rows, columns)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
