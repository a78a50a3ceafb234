"""GGUF files, llama.cpp's format, read by the transformers library's own reader: the config, the tokenizer and weights.

The library dequantises the weights while it reads them, so they take the memory of the dtype; this is what estimates
count. Headers are bounded here before the library walks through them.
"""
from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path
from typing import Any

from huggingface_hub.utils import TensorInfo
from transformers import AutoConfig, AutoTokenizer, GgufConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
from transformers.utils import is_gguf_available

from playground.engine.checkpoint.config_limits import MAX_COUNTS
from playground.errors import Refusal

MOST_TENSORS, MOST_ENTRIES = 200_000, 10_000
COUNTS = {"block_count": MAX_COUNTS["layer"], "expert_count": MAX_COUNTS["expert"]}
ALIGNMENT = 32  # bytes to which the start of the data may be rounded up
PLAIN = {0: "F32", 1: "F16", 30: "BF16"}  # types of tensors that are not quantised
# the library's readers of files raise these for damaged ones, and for memory that a file asks for
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError, struct.error,
           AssertionError)


def check_gguf(name: str, path: Path) -> None:
    """Refuse a file that cannot be read: damaged, of an unknown architecture, or without the package for it."""
    kind = str(_metadata(name, path)["general.architecture"])[:60]
    if kind not in (*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS):
        raise Refusal(f"{name} is a GGUF file of the architecture {kind}, which the transformers library does not read:"
                      " choose the model with config.json and model.safetensors.", "model")
    if kind not in GGUF_CONFIG_ARCHS and not is_gguf_available():
        raise Refusal(f"{name} is a GGUF file, which is read with the package gguf: install it with `pip install gguf`,"
                      " or choose the model with config.json and model.safetensors.", "model")


def gguf_config(name: str, path: Path) -> PretrainedConfig:
    """The config that a file describes; raises Refusal."""
    for entry, value in _metadata(name, path).items():
        most = next((most for end, most in COUNTS.items() if entry.endswith(end)), None)
        if most and not (isinstance(value, int) and 0 <= value <= most):
            raise Refusal(f"The GGUF file {name} gives {entry[:60]} a value beyond {most:,}: choose another model.",
                          "model")
    try:
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as reason:  # the library's configs check their fields, each in its own way
        raise _damaged(name) from reason


def gguf_tensors(name: str, path: Path) -> dict[str, TensorInfo]:
    """Shape and size of every tensor by name, as if stored in float32, which dequantising makes of it."""
    infos = _header(name, path).tensors
    return {info.name: TensorInfo("F32", list(info.shape), (0, info.nbytes)) for info in infos}


def gguf_kind(name: str, path: Path) -> str:
    """What most numbers of a file are stored as, such as "gguf Q4_K"."""
    from transformers.integrations.gguf.dequant import GGML_NAME
    sizes: Counter[int] = Counter()
    for info in _header(name, path).tensors:
        sizes[info.ggml_type] += info.nbytes
    main = sizes.most_common(1)[0][0] if sizes else 0
    return f"gguf {PLAIN.get(main) or GGML_NAME.get(main) or f'type {main}'}"


def gguf_arguments(path: Path) -> dict[str, Any]:
    """Those of `from_pretrained`. Weights are dequantised on every machine, whether it has kernels for them or not."""
    return {"gguf_file": path.name, "quantization_config": GgufConfig(gguf_file=path.name, dequantize=True)}


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a file; raises whatever the library raises."""
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


def _metadata(name: str, path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            version, tensors, entries = struct.unpack("<4xIQQ", stream.read(24))
        if version not in (2, 3) or tensors > MOST_TENSORS or entries > MOST_ENTRIES:
            raise ValueError
        return read_gguf_metadata(str(path))[0]
    except DAMAGED:
        raise _damaged(name) from None


def _header(name: str, path: Path) -> GgufHeader:
    try:
        header = GgufHeader.from_file(str(path))
        end = max((info.offset + info.nbytes for info in header.tensors), default=0)
        if header.data_start + end > path.stat().st_size + ALIGNMENT:
            raise _damaged(name)
        return header
    except Refusal:
        raise
    except ValueError as reason:
        said = " ".join(str(reason).split())[:160].split(". ")[0].rstrip(".")
        raise Refusal(f"The GGUF file {name} cannot be read ({said}): choose another quantisation of the model.",
                      "model") from None
    except DAMAGED:
        raise _damaged(name) from None


def _damaged(name: str) -> Refusal:
    return Refusal(f"The GGUF file {name} is damaged or incomplete: fetch it again.", "model")
