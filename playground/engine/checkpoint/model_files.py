"""The files of a model in a folder or on the hub: which they are, whether they are complete, what their headers say."""
from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path

from huggingface_hub import get_local_safetensors_metadata
from huggingface_hub.errors import SafetensorsParsingError
from huggingface_hub.utils import SafetensorsFileMetadata

from playground.engine.checkpoint.adapter_config import CONFIG as ADAPTER
from playground.engine.checkpoint.adapter_config import WEIGHTS as ADAPTER_WEIGHTS
from playground.engine.checkpoint.catalogue import BUNDLED, TEXT_MODEL
from playground.engine.checkpoint.config_limits import JSON_BYTES, MAX_SHARDS, check_file_sizes
from playground.engine.checkpoint.gguf_files import check_gguf
from playground.engine.checkpoint.stored_forms import check_pointers, no_config, no_weights, variant_of
from playground.errors import Refusal
from playground.weight_changes import JOINT

WEIGHTS = "model*.safetensors"
GENERATION = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
READ_BY_LIBRARY = ("*config*.json", "*token*.json", "*index*.json", "vocab.json", "tekken.json", "chat_template.json")
SAMPLED = 1 << 20  # bytes of each file that a fingerprint includes
IDENTIFYING = ("config.json", ADAPTER, ADAPTER_WEIGHTS)


@dataclass(frozen=True)
class ModelFiles:
    """A model's files with their sizes in bytes. `folder` is None where they must still be fetched from the hub.

    chosen: the file in the folder that was named, if not its usual weights. adapters: LoRA adapters that are added to
    the network, in this order.
    """

    name: str
    files: dict[str, int]
    folder: Path | None = None
    revision: str = ""
    chosen: str = ""
    adapters: tuple[ModelFiles, ...] = ()

    @property
    def gguf(self) -> Path | None:
        """The GGUF file with the whole model, if it is stored so."""
        is_other = not self.chosen or self.chosen.endswith(".safetensors") or self.folder is None
        return None if is_other else self.folder / self.chosen

    @property
    def is_adapter(self) -> bool:
        """Whether these are the files of an adapter, whose base model is elsewhere."""
        return ADAPTER in self.files and SINGLE not in self.files and INDEX not in self.files

    @property
    def adapter_bytes(self) -> int:
        """Size of the adapters' weights."""
        return sum(adapter.files.get(ADAPTER_WEIGHTS, 0) for adapter in self.adapters)

    @property
    def variant(self) -> str:
        """The variant under which the weights are stored, such as fp16; empty for the usual names. Raises Refusal if
        there are several and none was chosen.
        """
        if self.gguf:
            return ""
        usual = not self.chosen and (SINGLE in self.files or INDEX in self.files)
        return "" if usual else variant_of(self.name, self.files, self.chosen)

    @property
    def single(self) -> str:
        """The name of the file with all weights, whether it is there or not."""
        return f"model.{self.variant}.safetensors" if self.variant else SINGLE

    @property
    def index(self) -> str:
        """The name of the list of files, if the weights are in several."""
        return f"model.safetensors.index.{self.variant}.json" if self.variant else INDEX


def check_files(source: ModelFiles) -> None:
    """Refuse a model that lacks a file, naming the file."""
    if source.gguf:
        return check_gguf(source.name, source.gguf)
    if "config.json" not in source.files:
        raise no_config(source.name, source.files, source.folder)
    check_file_sizes(source.name, source.files)
    if ADAPTER in source.files:  # which the library would add by itself where peft is installed
        raise Refusal(f"{source.name} holds a whole model and an adapter as well: move {ADAPTER} and the adapter's "
                      f"weights to a folder of their own, and name them as MODEL{JOINT}ADAPTER.", "model")
    if source.folder:
        check_pointers(source.name, source.files, source.folder)
    if source.single not in source.files and source.index not in source.files:
        raise no_weights(source.name, source.files, source.folder)
    if missing := _missing_shards(source):
        raise Refusal(f"{source.name} lacks {missing[0]}: fetch or save the missing weight files.", "model")
    if not any(file in source.files for file in TOKENIZER) and not _shares_tokenizer(source.folder):
        raise Refusal(
            f"{source.name} has no tokenizer (tokenizer.json): save its tokenizer beside the weights.", "model"
        )


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return any((folder / file).exists() for file in TOKENIZER)


def tokenizer_folder(folder: Path) -> Path:
    """The folder of the tokenizer of the model in `folder`: bundled models without one use that of `pocket` beside
    them, since the same vocabulary is stored once.
    """
    beside = folder.absolute().parent / TEXT_MODEL
    is_bundled = folder.absolute().name in {entry.name for entry in BUNDLED}
    return beside if is_bundled and not has_tokenizer(folder) and has_tokenizer(beside) else folder


def _shares_tokenizer(folder: Path | None) -> bool:
    return folder is not None and tokenizer_folder(folder) != folder


def _missing_shards(source: ModelFiles) -> list[str]:
    if not source.folder or source.single in source.files:
        return []
    try:
        shards = set(json.loads((source.folder / source.index).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise _damaged(source) from None
    if len(shards) > MAX_SHARDS or not all(isinstance(shard, str) for shard in shards):
        raise _damaged(source)
    return sorted(shards - set(source.files))


def _damaged(source: ModelFiles) -> Refusal:
    return Refusal(f"The weight files of {source.name} are damaged: fetch or save them again.", "model")


def check_json(name: str, folder: Path, files: Iterable[str]) -> None:
    """Refuse JSON that the library fails at or goes on without: what begins with a byte order mark, and a
    generation_config.json that is no object, whose ends would be lost.
    """
    files = sorted(file for file in files if fnmatch(file, "*.json"))
    for file in files:
        with (folder / file).open("rb") as stream:
            marked = stream.read(len(BOM_UTF8)) == BOM_UTF8
        if marked and any(fnmatch(file, pattern) for pattern in READ_BY_LIBRARY):
            raise Refusal(f"{file} of {name} begins with a byte order mark: save it as UTF-8 without one.", "model")
    if GENERATION in files and not _is_object(folder / GENERATION):
        raise Refusal(f"The {GENERATION} of {name} is no JSON object: fetch it again, or remove it.", "model")


def _is_object(path: Path) -> bool:
    """Whether a file holds a JSON object. One that is too large to be read is refused for its size elsewhere."""
    if path.stat().st_size > JSON_BYTES[path.name]:
        return True
    try:
        return isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    except (ValueError, RecursionError):
        return False


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file in a folder, by name."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


def fingerprint(folder: Path, files: dict[str, int], chosen: str = "") -> str:
    """Twelve letters that identify a state of a folder: sizes, and the start of the configuration and of every
    weight file.
    """
    digest = sha256()
    for file in (file for file in files if file in (*IDENTIFYING, chosen) or fnmatch(file, WEIGHTS)):
        with (folder / file).open("rb") as stream:
            digest.update(f"{file} {files[file]}".encode() + stream.read(SAMPLED))
    return digest.hexdigest()[:12]


def stored_headers(source: ModelFiles) -> list[SafetensorsFileMetadata]:
    """The headers of the weight files in a folder; raises Refusal for damaged ones."""
    parts = variant_parts(source) or ([source.single] if source.variant else [""])
    try:
        found = [get_local_safetensors_metadata(source.folder / file) for file in parts]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorsParsingError):
        raise _damaged(source) from None
    files = {name: file for part in found for name, file in part.files_metadata.items()}
    if not all(_is_whole(source.folder / name, file) for name, file in files.items()):
        raise _damaged(source)
    return list(files.values())


def _is_whole(path: Path, file: SafetensorsFileMetadata) -> bool:
    """Whether a file is as long as its header says: downloads that break off leave the beginning."""
    with path.open("rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
    end = max((tensor.data_offsets[1] for tensor in file.tensors.values()), default=0)
    return path.stat().st_size >= 8 + header + end


def variant_parts(source: ModelFiles) -> list[str]:
    """The files of weights that are stored in several parts under a variant's name."""
    parts = f"model.{source.variant}-*.safetensors"
    return [file for file in source.files if fnmatch(file, parts)] if source.single not in source.files else []
