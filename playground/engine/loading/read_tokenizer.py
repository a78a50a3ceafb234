"""Reads the tokenizer of a model, with its chat template, from its files."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name
from transformers.utils import is_protobuf_available, is_sentencepiece_available

from playground.engine.checkpoint.gguf_files import gguf_tokenizer
from playground.engine.checkpoint.hub_files import first_sentence
from playground.engine.checkpoint.model_files import tokenizer_folder
from playground.engine.checkpoint.stored_forms import first_bytes
from playground.errors import Refusal

GENERAL_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
TEMPLATE = "chat_template.json"  # where older releases put the template of a multimodal model
FAILURES = (
    OSError,
    ValueError,
    ImportError,
    RuntimeError,
    LookupError,
    AttributeError,
    TypeError,
    ArithmeticError,
    AssertionError,
    SafetensorError,
)


def read_tokenizer(name: str, folder: Path, gguf: Path | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of the model in a folder, or in its GGUF file; raises Refusal if it cannot be read or is not a fast
    one.
    """
    folder = tokenizer_folder(folder)
    try:
        if gguf:
            return gguf_tokenizer(gguf)
        tokenizer = _tokenizer_class(folder).from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except FAILURES as reason:
        if gguf:
            raise Refusal(f"The tokenizer in the GGUF file {name} cannot be read ({first_sentence(reason)}): choose "
                          "the model with config.json and model.safetensors.", "model") from None
        if "custom code" in str(reason):
            raise Refusal(f"The tokenizer of {name} is code of its own, which is never run here: save a tokenizer.json "
                          "beside the weights.", "model") from None
        if pieces := _sentencepiece_alone(folder):
            raise Refusal(f"The tokenizer of {name} is stored for SentencePiece alone ({pieces}): install the packages "
                          "sentencepiece and protobuf, or save a tokenizer.json beside the weights.", "model") from None
        raise Refusal(f"The tokenizer of {name} cannot be read ({first_sentence(reason)}): "
                      "save a tokenizer.json beside the weights.", "model") from None
    if not tokenizer.is_fast:
        raise Refusal(
            f"{name} has no fast tokenizer: convert it to a tokenizer.json, or choose another model.", "model"
        )
    _without_dropout(tokenizer)
    tokenizer.chat_template = tokenizer.chat_template or _processors_template(folder)
    return tokenizer


def _sentencepiece_alone(folder: Path) -> str:
    """The name of a file of SentencePiece in a folder without a tokenizer.json, if the packages that read it are not
    both there: the library takes it for one of tiktoken then. It begins with a piece, field 1 of its message.
    """
    if (folder / "tokenizer.json").exists() or is_sentencepiece_available() and is_protobuf_available():
        return ""
    return next((path.name for path in sorted(folder.glob("*.model")) if first_bytes(path, 1) == b"\n"), "")


def _without_dropout(tokenizer: PreTrainedTokenizerBase) -> None:
    """Leave no merge of BPE out at random, as some tokenizers still do after training: a text has the same tokens
    whenever it is encoded.
    """
    if getattr(model := tokenizer.backend_tokenizer.model, "dropout", None):
        model.dropout = None


def _processors_template(folder: Path) -> Any:
    """The chat template of a multimodal model, which older releases of the library stored for its processor alone; None
    if there is none.
    """
    try:
        fields = json.loads((folder / TEMPLATE).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    return fields.get("chat_template") if isinstance(fields, dict) else None


def _tokenizer_class(folder: Path) -> type:
    """The general class if the folder names it: AutoTokenizer would choose by architecture and add its family's
    tokens. Also if the folder names a class of its own code, which is never run, and has a tokenizer.json.
    """
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    named = fields.get("tokenizer_class") if isinstance(fields, dict) else None
    if named in GENERAL_TOKENIZERS or _has_own_tokenizer(folder, fields):
        return PreTrainedTokenizerFast
    return AutoTokenizer


def _has_own_tokenizer(folder: Path, fields: Any) -> bool:
    """Whether a tokenizer is code of its own that the library does not know, with a tokenizer.json beside it."""
    if not isinstance(fields, dict) or "auto_map" not in fields or not (folder / "tokenizer.json").exists():
        return False
    named = fields.get("tokenizer_class")
    return not isinstance(named, str) or tokenizer_class_from_name(named) is None
