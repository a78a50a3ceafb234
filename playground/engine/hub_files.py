"""Locates and checks a model's files before anything large is read or fetched.

A model is named by the catalogue, by a folder, or by its id on the Hugging Face hub. What the hub's cache already holds
is used as it is, so a model that was loaded once loads without a network. Pickled weights and remote code are refused.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import sha256
from os.path import exists, expanduser
from pathlib import Path

from huggingface_hub import (
    HfApi,
    get_local_safetensors_metadata,
    get_safetensors_metadata,
    hf_hub_download,
    parse_safetensors_file_metadata,
    snapshot_download,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.utils import SafetensorsFileMetadata, TensorInfo
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from playground.engine.catalogue import TABLES, is_local, local_folder, suggestion
from playground.engine.config_limits import MAX_SHARDS, check_file_sizes, check_raw_config
from playground.engine.masked_models import is_noise_model, public_config
from playground.engine.stored_forms import check_pointers, model_place, no_config, no_weights, variant_of
from playground.errors import Refusal
from playground.network_errors import connection_error

Progress = Callable[[float, str], None]
"""Called with the share that is done, 0 to 1, and a few words on what is happening."""

WEIGHTS = "model*.safetensors"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
NEEDED = (WEIGHTS, "*.json", "*.jinja", "*.model", "*.txt")
PATIENCE = 10.0  # seconds to wait for the hub's first answer
SAMPLED = 1 << 20  # bytes of each file that a fingerprint includes
# errors of the code, not of its input
INTERNAL = (TypeError, AttributeError, LookupError, NameError, AssertionError, ArithmeticError)


def unseen(share: float, text: str) -> None:
    """A progress callback that does nothing."""


@dataclass(frozen=True)
class ModelFiles:
    """A model's files with their sizes in bytes. `folder` is None where they must still be fetched from the hub.

    chosen: the file in the folder that was named, if not its usual weights.
    """

    name: str
    files: dict[str, int]
    folder: Path | None = None
    revision: str = ""
    chosen: str = ""

    @property
    def variant(self) -> str:
        """The variant under which the weights are stored, such as fp16; empty for the usual names. Raises Refusal if
        there are several and none was chosen.
        """
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


def find_source(name: str) -> ModelFiles:
    """Location and files of the model of that name; raises Refusal."""
    source = _local(name) or _cached(name) or _on_hub(name)
    _check_files(source)
    return source


def locate(name: str) -> ModelFiles:
    """Location and files of that name, a model's or not; raises Refusal if there is nothing."""
    return _local(name) or _snapshot(name) or _on_hub(name)


def fetch_files(source: ModelFiles, *patterns: str) -> Path:
    """The folder with the files that match a pattern, after downloading those that are missing; raises Refusal."""
    if source.folder:
        return source.folder
    paths = [_fetch_file(source, file) for file in source.files if _matches(file, patterns)]
    return paths[0].parent


def is_folder(name: str) -> bool:
    """Whether a name outside the catalogue means a local folder or file."""
    return not is_local(name) and (name.startswith((".", "/", "~")) or "\\" in name or exists(name))


def tensors(source: ModelFiles) -> dict[str, TensorInfo]:
    """Shape, type and place of every stored tensor, by name, from the headers of the weight files alone."""
    found = _stored_headers(source) if source.folder else _hub_headers(source)
    return {name: info for file in found for name, info in file.tensors.items()}


def read_config(source: ModelFiles) -> PretrainedConfig:
    """The model's configuration; raises Refusal unless it is a causal language model of transformers."""
    folder = source.folder or _fetch_file(source, "config.json").parent
    try:
        check_raw_config(source.name, folder / "config.json")
        if masked := public_config(source.name, folder / "config.json"):
            return masked
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Refusal:
        raise
    except Exception as reason:  # the classes of configs check their fields, each in its own way
        if "trust_remote_code" in str(reason):
            raise Refusal(
                f"{source.name} needs code of its own, which is never run here: choose a model that transformers"
                " knows.",
                "model",
            ) from None
        raise Refusal(
            f"The config.json of {source.name} cannot be used ({first_sentence(reason)}): choose another model.",
            "model",
        ) from None
    if config.is_encoder_decoder or not _causal(config):
        raise Refusal(
            f"{source.name} is a {config.model_type} model that does not continue text: choose a causal language"
            " model.",
            "model",
        )
    return config


def fetch(source: ModelFiles, progress: Progress) -> Path:
    """The folder with the model's files, after downloading those that are missing; raises Refusal."""
    if source.folder:
        return source.folder
    wanted = {file: size for file, size in source.files.items() if _matches(file, NEEDED)}
    done, total = 0, max(sum(wanted.values()), 1)
    for file, size in wanted.items():
        progress(done / total, f"Fetching {file} ({size / 1e6:.0f} MB)")
        path = _fetch_file(source, file)
        done += size
    return path.parent


def first_sentence(reason: BaseException) -> str:
    """The first sentence of a library's error, without its full stop and system error numbers. Errors about
    the library's own code are not quoted.
    """
    if isinstance(reason, INTERNAL):
        return "an unexpected error inside the library"
    text = re.sub(r"\[Errno -?\d+\] ?", "", str(reason)).strip() or type(reason).__name__
    return text.splitlines()[0].split(". ")[0].rstrip(".: ")


def _local(name: str) -> ModelFiles | None:
    if name in TABLES:
        raise Refusal(
            "The oracle is a table without weights, and serves masked diffusion only: choose a language model here.",
            "model",
        )
    if is_local(name):
        folder = local_folder(name)
    elif is_folder(name):
        folder = Path(expanduser(name))
    else:
        return None
    if not exists(folder):
        raise Refusal(f"There is no folder {name}: check the path.", "model")
    try:
        folder, chosen = model_place(name, folder)
        files = _sizes(folder)
        return ModelFiles(name, files, folder, _fingerprint(folder, files), chosen)
    except OSError as reason:
        raise Refusal(
            f"The folder {name} cannot be read ({reason.strerror}): check who may open it.", "model"
        ) from None


def _snapshot(name: str) -> ModelFiles | None:
    """What the hub's cache holds under a name."""
    with _asking_hub(name):
        try:
            folder = Path(snapshot_download(name, local_files_only=True))
        except LocalEntryNotFoundError:
            return None
    return ModelFiles(name, _sizes(folder), folder, folder.name[:12])


def _cached(name: str) -> ModelFiles | None:
    """The contents of the hub's cache, if complete."""
    source = _snapshot(name)
    try:
        _check_files(source) if source else None
    except Refusal:
        return None
    return source


def _on_hub(name: str) -> ModelFiles:
    if "/" not in name and (meant := suggestion(name)):  # answered without waiting for the network
        raise Refusal(f"There is no model {name!r}.{meant}", "model")
    with _asking_hub(name):
        info = HfApi().model_info(name, files_metadata=True, timeout=PATIENCE)
    files = {file.rfilename: file.size or 0 for file in info.siblings or [] if "/" not in file.rfilename}
    return ModelFiles(name, files, None, (info.sha or "")[:12])


def _check_files(source: ModelFiles) -> None:
    """Refuse a model that lacks a file, naming the file."""
    if "config.json" not in source.files:
        raise no_config(source.name, source.files, source.folder, source.chosen)
    check_file_sizes(source.name, source.files)
    if source.folder:
        check_pointers(source.name, source.files, source.folder)
    if source.single not in source.files and source.index not in source.files:
        raise no_weights(source.name, source.files, source.folder)
    if missing := _missing_shards(source):
        raise Refusal(f"{source.name} lacks {missing[0]}: fetch or save the missing weight files.", "model")
    if not any(file in source.files for file in TOKENIZER):
        raise Refusal(
            f"{source.name} has no tokenizer (tokenizer.json): save its tokenizer beside the weights.", "model"
        )


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


def _causal(config: PretrainedConfig) -> bool:
    classes = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if is_noise_model(config):
        return True
    known = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return known and (not config.architectures or any(name in classes for name in config.architectures))


def _stored_headers(source: ModelFiles) -> list[SafetensorsFileMetadata]:
    shards = _shards(source) or ([source.single] if source.variant else [""])
    try:
        found = [get_local_safetensors_metadata(source.folder / file) for file in shards]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorsParsingError):
        raise _damaged(source) from None
    return [file for part in found for file in part.files_metadata.values()]


def _shards(source: ModelFiles) -> list[str]:
    """The files of weights that are stored in several parts under a variant's name."""
    parts = f"model.{source.variant}-*.safetensors"
    return [file for file in source.files if fnmatch(file, parts)] if source.single not in source.files else []


def _hub_headers(source: ModelFiles) -> list[SafetensorsFileMetadata]:
    with _asking_hub(source.name):
        if source.variant:
            return [parse_safetensors_file_metadata(source.name, file) for file in _shards(source) or [source.single]]
        return list(get_safetensors_metadata(source.name).files_metadata.values())


def _fetch_file(source: ModelFiles, file: str) -> Path:
    with _asking_hub(source.name):
        return Path(hf_hub_download(source.name, file))


@contextmanager
def _asking_hub(name: str) -> Iterator[None]:
    """Turn every error of the hub into a Refusal."""
    try:
        yield
    except GatedRepoError:
        raise Refusal(
            f"{name} is gated: accept its licence at https://huggingface.co/{name}, then log in with `hf auth login`.",
            "model",
        ) from None
    except RepositoryNotFoundError:
        raise Refusal(
            f"The hub has no model {name!r}, or it is private: check the spelling, or log in with `hf auth login`."
            f"{suggestion(name)}",
            "model",
        ) from None
    except HFValidationError:
        raise Refusal(
            f"{name!r} is neither a folder nor a hub id such as Qwen/Qwen3-0.6B: check the spelling.{suggestion(name)}",
            "model",
        ) from None
    except (
        Exception
    ) as reason:  # the hub's client raises errors of its HTTP library, which changes
        raise Refusal(
            f"{name} is not on this machine and the hub cannot be reached "
            f"({connection_error(reason) or first_sentence(reason)}): connect to the network, or choose a bundled "
            f"model or a folder.{suggestion(name)}",
            "model",
        ) from None


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


def _fingerprint(folder: Path, files: dict[str, int]) -> str:
    """Twelve letters that identify a state of a folder: sizes, and the start of the configuration and of every
    weight file.
    """
    digest = sha256()
    for file in (file for file in files if file == "config.json" or fnmatch(file, WEIGHTS)):
        with (folder / file).open("rb") as stream:
            digest.update(f"{file} {files[file]}".encode() + stream.read(SAMPLED))
    return digest.hexdigest()[:12]


def _matches(file: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)
