"""Recognises by content what a path holds: the folder of a model, a file in it, a folder of the hub's cache, or a form
that cannot be loaded, for which the sentence says what it is and what to do.
"""
from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path

from playground.errors import Refusal

GGUF = b"GGUF"
LFS_POINTER = b"version https://git-lfs"
SMALLEST = 1024  # bytes; a pointer of Git LFS is smaller, and weights are larger
MOST_ENTRIES = 1000  # of a folder that are looked at
SHARD = re.compile(r"model(\..+)?-\d{5}-of-\d{5}\.safetensors")
VARIANT = re.compile(r"model\.([^.]+?)(?:-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.([^.]+)\.json")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TRANSFORMERS = "choose the model in the form of transformers, with config.json and model.safetensors"
FOREIGN = (  # patterns of file names, what such a folder holds, what to do; the first that fits
    (("*.incomplete", "*.crdownload", "*.part"), "an unfinished download ({file})", "fetch the model again"),
    (("zero_to_fp32.py", "*.distcp"), "a training checkpoint in parts of several processes ({file})",
     "consolidate it to model.safetensors first"),
    (("model_index.json",), "a pipeline of diffusers, which makes images",
     "choose a causal language model"),
    (("mlc-chat-config.json",), "weights compiled for MLC", TRANSFORMERS),
    (("*.onnx",), "weights for ONNX ({file})", TRANSFORMERS),
    (("openvino_model.xml",), "weights for OpenVINO", TRANSFORMERS),
    (("*.engine",), "weights compiled for TensorRT-LLM ({file})", TRANSFORMERS),
    (("*.h5",), "weights for TensorFlow ({file})", TRANSFORMERS),
    (("*.msgpack",), "weights for Flax ({file})", TRANSFORMERS),
    (("*.npz",), "weights for MLX in NumPy's format ({file})", TRANSFORMERS),
    (("*.nemo",), "a checkpoint of NeMo ({file})", TRANSFORMERS),
    (("*.task", "*.litertlm", "*.tflite"), "weights for LiteRT ({file})", TRANSFORMERS),
    (("params.json", "consolidated*"), "weights in the original format of their makers ({file})", TRANSFORMERS),
)
FILE_KINDS = (  # first bytes, what such a file is, what to do
    (LFS_POINTER, "a pointer of Git LFS in place of the file itself", "run `git lfs pull` in its folder"),
    (b"PK", "an archive or pickled weights", "unpack it and name the folder of a model in safetensors"),
    (b"\x80", "pickled weights, which can run code of their own", "save the model as safetensors and name its folder"),
    (b"\x1f\x8b", "an archive", "unpack it and name the folder of a model"),
    (b"\x89HDF", "a file of weights for Keras", TRANSFORMERS),
    *((magic, "a GGML file, older than GGUF", "choose the model in GGUF") for magic in (b"lmgg", b"fmgg", b"tjgg")),
)


def model_place(name: str, path: Path) -> tuple[Path, str]:
    """The folder of the model that a path means, and the name of the file in it that was chosen; empty for its usual
    weights. Raises Refusal.
    """
    if path.is_file():
        return path.parent, _chosen_file(name, path)
    folder = _snapshot_of(name, path)
    if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
        return folder, ""
    held = sorted(file.name for file in islice(folder.iterdir(), MOST_ENTRIES) if is_gguf(file))
    if len(held) > 1:
        raise Refusal(f"{name} holds {len(held)} GGUF files: name one of them, such as {folder / held[0]}.", "model")
    return folder, held[0] if held else ""


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do, whatever its name."""
    return path.is_file() and first_bytes(path).startswith(GGUF)


def first_bytes(path: Path, count: int = 64) -> bytes:
    """The first bytes of a file."""
    with path.open("rb") as stream:
        return stream.read(count)


def variant_of(name: str, files: Iterable[str], chosen: str = "") -> str:
    """The variant under which weights are stored, such as fp16 of model.fp16.safetensors; empty if there is none.

    Raises Refusal if there are several.
    """
    found = sorted({match[1] or match[2] for file in files if (match := VARIANT.fullmatch(file))})
    if match := VARIANT.fullmatch(chosen):
        return match[1] or match[2]
    if len(found) > 1:
        raise Refusal(
            f"{name} has its weights in several variants ({', '.join(found[:8])}) and none under the usual name: name"
            f" one of the files, such as model.{found[0]}.safetensors in that folder.",
            "model",
        )
    return found[0] if found else ""


def no_config(name: str, files: Iterable[str], folder: Path | None) -> Refusal:
    """Why a place without config.json cannot be loaded."""
    if refusal := _foreign(name, files):
        return refusal
    inside = _models_inside(folder) if folder else []
    if inside:
        listed = ", ".join(inside[:4]) + (" and others" if len(inside) > 4 else "")
        return Refusal(f"{name} holds no model itself, but folders of models ({listed}): name one of these.", "model")
    if any(fnmatch(file, "*.gguf") for file in files):
        return Refusal(f"{name} holds GGUF files alone: fetch one of them and name its path.", "model")
    return Refusal(
        f"{name} has no config.json: name a folder or hub model saved by transformers' save_pretrained.", "model"
    )


def no_weights(name: str, files: Iterable[str], folder: Path | None) -> Refusal:
    """Why a place without the usual files of weights cannot be loaded."""
    files = list(files)
    if lost := folder and _dangling(folder):
        return Refusal(f"The file {lost} of {name} is a link to nothing: fetch the model again.", "model")
    if pickled := next((file for file in files if _matches(file, PICKLES)), ""):
        return Refusal(
            f"{name} has only pickled weights ({pickled}), which can run code of their own and are refused: if you "
            "trust them, load them with transformers and save it as safetensors with save_pretrained.",
            "model",
        )
    if refusal := _foreign(name, files):
        return refusal
    if other := next((file for file in files if file.endswith(".safetensors") and not SHARD.fullmatch(file)), ""):
        return Refusal(
            f"{name} has weights under a name that transformers does not use ({other}): rename the file to "
            "model.safetensors if it holds them all.",
            "model",
        )
    if any(SHARD.fullmatch(file) for file in files):
        return Refusal(
            f"{name} has parts of weights without their list (model.safetensors.index.json): fetch it too.", "model"
        )
    return Refusal(f"{name} has no weights (model.safetensors): save or choose a complete model.", "model")


def check_pointers(name: str, files: dict[str, int], folder: Path) -> None:
    """Refuse a folder whose files were cloned without Git LFS. `files`: sizes in bytes."""
    for file, size in files.items():
        if size < SMALLEST and first_bytes(folder / file).startswith(LFS_POINTER):
            raise Refusal(
                f"The file {file} of {name} is a pointer of Git LFS in place of the file itself: run `git lfs pull` "
                "there.",
                "model",
            )


def _chosen_file(name: str, path: Path) -> str:
    """The file's name if it chooses among the weights of its folder; raises Refusal if it is no model's."""
    start = first_bytes(path)
    if start.startswith(GGUF):
        return path.name
    for magic, kind, advice in FILE_KINDS:
        if start.startswith(magic):
            raise Refusal(f"{name} is {kind}: {advice}.", "model")
    if path.suffix != ".safetensors":
        raise Refusal(f"{name} is a file that holds no model: name the folder of a model.", "model")
    if path.name == "adapter_model.safetensors" and (path.parent / "adapter_config.json").is_file():
        return ""
    if not (path.parent / "config.json").is_file():
        raise Refusal(
            f"{name} holds weights alone: put the config.json and tokenizer.json of the model beside it, and name the"
            " folder.",
            "model",
        )
    if VARIANT.fullmatch(path.name):
        return path.name
    if path.name == "model.safetensors" or SHARD.fullmatch(path.name):
        return ""
    raise Refusal(
        f"{name} has a name that transformers does not use for weights: rename it to model.safetensors in a folder with"
        " the model's config.json.",
        "model",
    )


def _snapshot_of(name: str, path: Path) -> Path:
    """The snapshot in a folder of the hub's cache, models--org--name: of refs/main, or the only one. Any other folder
    is its own. Raises Refusal.
    """
    held = path if path.name == "snapshots" else path / "snapshots"
    if not held.is_dir() or (path / "config.json").is_file():
        return path
    main = held.parent / "refs" / "main"
    if main.is_file() and main.stat().st_size < SMALLEST:
        if (folder := held / Path(main.read_text(encoding="utf-8", errors="replace").strip()).name).is_dir():
            return folder
    found = sorted(folder for folder in islice(held.iterdir(), MOST_ENTRIES) if folder.is_dir())
    if len(found) == 1:
        return found[0]
    if not found:
        raise Refusal(f"{name} is a folder of the hub's cache without a snapshot: fetch the model again.", "model")
    raise Refusal(f"{name} holds {len(found)} snapshots: name one of them, such as {found[0]}.", "model")


def _models_inside(folder: Path) -> list[str]:
    entries = sorted(entry for entry in islice(folder.iterdir(), MOST_ENTRIES) if entry.is_dir())
    marks = ("config.json", "adapter_config.json", "snapshots")
    return [entry.name for entry in entries if any((entry / mark).exists() for mark in marks)]


def _dangling(folder: Path) -> str:
    """The name of a link whose target is missing, as in a cache whose blobs were deleted; empty if there is none."""
    entries = islice(folder.iterdir(), MOST_ENTRIES)
    return next((entry.name for entry in entries if entry.is_symlink() and not entry.exists()), "")


def _foreign(name: str, files: Iterable[str]) -> Refusal | None:
    for patterns, kind, advice in FOREIGN:
        if file := next((file for file in files if _matches(file, patterns)), ""):
            return Refusal(f"{name} holds {kind.format(file=file)}, which cannot be read here: {advice}.", "model")
    return None


def _matches(file: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)
