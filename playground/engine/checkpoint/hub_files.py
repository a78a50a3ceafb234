"""Locates and checks a model's files before anything large is read or fetched.

A model is named by the catalogue, by a folder, or by its id on the Hugging Face hub. What the hub's cache already holds
is used as it is, so a model that was loaded once loads without a network. Pickled weights and remote code are refused.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from os.path import exists, expanduser
from pathlib import Path

from huggingface_hub import (
    HfApi,
    ModelInfo,
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
)
from huggingface_hub.utils import SafetensorsFileMetadata, TensorInfo
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from playground.engine.canvas.masked_models import is_noise_model, public_config
from playground.engine.checkpoint.adapter_config import AdapterConfig, read_adapter_config
from playground.engine.checkpoint.catalogue import TABLES, is_local, local_folder, suggestion
from playground.engine.checkpoint.config_limits import check_raw_config
from playground.engine.checkpoint.download_progress import counting
from playground.engine.checkpoint.gguf_files import gguf_config, gguf_tensors
from playground.engine.checkpoint.model_files import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    WEIGHTS,
    ModelFiles,
    check_files,
    check_json,
    fingerprint,
    sizes,
    stored_headers,
    variant_parts,
)
from playground.engine.checkpoint.stored_forms import model_place
from playground.engine.device_memory import size_text
from playground.engine.encoder_decoder.configs import is_encoder_decoder
from playground.engine.loading.text_parts import sees_more, text_part
from playground.errors import Refusal
from playground.network_errors import connection_error
from playground.weight_changes import JOINT

Progress = Callable[[float, str], None]
"""Called with the share that is done, 0 to 1, and a few words on what is happening."""

NEEDED = (WEIGHTS, "*.json", "*.jinja", "*.model", "*.txt")
PATIENCE = 10.0  # seconds to wait for the hub's first answer
# errors of the code, not of its input
INTERNAL = (TypeError, AttributeError, LookupError, NameError, AssertionError, ArithmeticError)


class Unreachable(Refusal):
    """The hub does not answer; `cause` is the reason as part of a sentence."""

    def __init__(self, name: str, cause: str):
        super().__init__(
            f"{name} is not on this machine and the hub cannot be reached ({cause}): connect to the network, or choose "
            f"a bundled model or a folder.{suggestion(name)}",
            "model",
        )
        self.cause = cause


def unseen(share: float, text: str) -> None:
    """A progress callback that does nothing."""


def find_source(name: str) -> ModelFiles:
    """Location and files of the model of that name; raises Refusal.

    The name of an adapter means the adapter on its base model. "MODEL + ADAPTER" names another base.
    """
    model, *adapters = split_name(name)
    source = _with_base(_source(model))
    for adapter in adapters:
        source = _added(source, _checked_adapter(locate(adapter)))
    return replace(source, name=name)


def split_name(name: str) -> list[str]:
    """The name of a model and those of the adapters that are added to it."""
    return [name] if exists(expanduser(name)) else [part.strip() for part in name.split(JOINT)]


def read_adapters(source: ModelFiles) -> list[tuple[AdapterConfig, Path]]:
    """The adapters that are added to a network, fetched if need be, with their folders; raises Refusal."""
    found = [(adapter, fetch_files(adapter, ADAPTER, ADAPTER_WEIGHTS)) for adapter in source.adapters]
    return [(read_adapter_config(adapter.name, folder), folder) for adapter, folder in found]


def _source(name: str) -> ModelFiles:
    source = _local(name) or _cached(name) or _on_hub(name)
    if not source.is_adapter:
        check_files(source)
    return source


def _with_base(source: ModelFiles) -> ModelFiles:
    """A model's files; for those of an adapter its base model's, to which it is added. Raises Refusal."""
    if not source.is_adapter:
        return source
    source = _checked_adapter(source)
    config = read_adapter_config(source.name, fetch_files(source, ADAPTER))
    base = _base_of(source, config.base)
    return replace(_added(base, source), folder=base.folder)


def _base_of(adapter: ModelFiles, named: str) -> ModelFiles:
    """The base model that an adapter names; a path may be relative to the adapter's own folder."""
    advice = f"name the base as well, as in BASE{JOINT}{adapter.name}"
    if not named:
        raise Refusal(f"The adapter {adapter.name} does not name its base model: {advice}.", "model")
    local = is_folder(adapter.name) or is_local(adapter.name)
    beside = adapter.folder / named if local else None
    if beside and not exists(expanduser(named)) and exists(beside):
        named = str(beside)
    if not local and is_folder(named):  # an adapter from the hub may not open folders
        raise Refusal(f"The adapter {adapter.name} names a folder as its base model, {named}: {advice}.", "model")
    try:
        base = _source(named)
    except Refusal as refusal:
        why = str(refusal).split(": ")[0].rstrip(".")
        raise Refusal(f"The base model of the adapter {adapter.name} cannot be used ({why}): {advice}.",
                      "model") from None
    if base.is_adapter:
        raise Refusal(f"The base model of the adapter {adapter.name} is an adapter itself ({named}): {advice}.",
                      "model")
    return base


def _checked_adapter(source: ModelFiles) -> ModelFiles:
    """An adapter's files; raises Refusal if they are none, or incomplete."""
    if ADAPTER not in source.files:
        raise Refusal(f"{source.name} is no adapter, since it has no {ADAPTER}: name the folder of a LoRA adapter.",
                      "model")
    if ADAPTER_WEIGHTS not in source.files:
        raise Refusal(f"The adapter {source.name} has no {ADAPTER_WEIGHTS}: save it as safetensors with peft's"
                      " save_pretrained.", "model")
    return source


def _added(base: ModelFiles, adapter: ModelFiles) -> ModelFiles:
    revision = f"{base.revision}+{adapter.revision}"
    return replace(base, revision=revision, adapters=(*base.adapters, adapter))


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
    """Whether a name outside the catalogue means a local folder or file, or an adapter in one."""
    if len(parts := split_name(name)) > 1:
        return any(map(is_folder, parts))
    return not is_local(name) and (name.startswith((".", "/", "~")) or "\\" in name or exists(name))


def tensors(source: ModelFiles) -> dict[str, TensorInfo]:
    """Shape, type and place of every stored tensor, by name, from the headers of the weight files alone."""
    if source.gguf:
        return gguf_tensors(source.name, source.gguf)
    found = stored_headers(source) if source.folder else _hub_headers(source)
    return {name: info for file in found for name, info in file.tensors.items()}


def read_config(source: ModelFiles) -> PretrainedConfig:
    """The model's configuration; raises Refusal unless it is a causal language model of transformers."""
    if source.gguf:
        return gguf_config(source.name, source.gguf)
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
    if text := text_part(config):
        return text
    if is_encoder_decoder(config):
        return config
    if config.is_encoder_decoder or not _causal(config):
        if sees_more(config):
            raise Refusal(
                f"{source.name} is a {config.model_type} model, which sees more than text, and the library has no class"
                " for its text part that is known to compute the same: choose a causal language model.",
                "model",
            )
        raise Refusal(
            f"{source.name} is a {config.model_type} model that does not continue text: choose a causal language"
            " model.",
            "model",
        )
    return config


def fetch(source: ModelFiles, progress: Progress) -> Path:
    """The folder with the model's files, after downloading those that are missing; raises Refusal.

    `progress` is called with every part that arrives; what it raises ends the download.
    """
    if source.folder:
        return source.folder
    wanted = needed_files(source)
    done, total = 0, max(sum(wanted.values()), 1)

    def report(arrived: int) -> None:
        share = min(1.0, (done + arrived) / total)
        progress(share, f"Fetching {file}: {size_text(share * total)} of {size_text(total)}")

    for file, size in wanted.items():
        report(0)
        path = _fetch_file(source, file, report)
        done += size
    check_json(source.name, path.parent, wanted)
    return path.parent


def needed_files(source: ModelFiles) -> dict[str, int]:
    """The files that are read to load a model, with their sizes in bytes."""
    return {file: size for file, size in source.files.items() if _matches(file, NEEDED)}


def on_machine(name: str) -> ModelFiles | None:
    """The files of a model that can be loaded without a network; None if there are none. Raises Refusal for a folder
    that cannot be read.
    """
    return _local(name) or _cached(name)


def hub_info(name: str) -> ModelInfo:
    """What the hub says about a model, the sizes of its files included; raises Refusal."""
    with _asking_hub(name):
        return HfApi().model_info(name, files_metadata=True, timeout=PATIENCE)


def hub_files(name: str, info: ModelInfo) -> ModelFiles:
    """The files of a model on the hub, those in its folders left out."""
    files = {file.rfilename: file.size or 0 for file in info.siblings or [] if "/" not in file.rfilename}
    return ModelFiles(name, files, None, (info.sha or "")[:12])


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
        files = sizes(folder)
        check_json(name, folder, files)
        return ModelFiles(name, files, folder, fingerprint(folder, files, chosen), chosen)
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
    files = sizes(folder)
    check_json(name, folder, files)
    return ModelFiles(name, files, folder, folder.name[:12])


def _cached(name: str) -> ModelFiles | None:
    """The contents of the hub's cache, if complete."""
    source = _snapshot(name)
    try:
        check_files(source) if source and not source.is_adapter else None
    except Refusal:
        return None
    return source


def _on_hub(name: str) -> ModelFiles:
    if "/" not in name and (meant := suggestion(name)):  # answered without waiting for the network
        raise Refusal(f"There is no model {name!r}.{meant}", "model")
    return hub_files(name, hub_info(name))


def _causal(config: PretrainedConfig) -> bool:
    classes = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if is_noise_model(config):
        return True
    known = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return known and (not config.architectures or any(name in classes for name in config.architectures))


def _hub_headers(source: ModelFiles) -> list[SafetensorsFileMetadata]:
    with _asking_hub(source.name):
        if source.variant:
            parts = variant_parts(source) or [source.single]
            return [parse_safetensors_file_metadata(source.name, file) for file in parts]
        return list(get_safetensors_metadata(source.name).files_metadata.values())


def _fetch_file(source: ModelFiles, file: str, report: Callable[[int], None] = lambda arrived: None) -> Path:
    with _asking_hub(source.name):
        return Path(hf_hub_download(source.name, file, tqdm_class=counting(report)))


@contextmanager
def _asking_hub(name: str) -> Iterator[None]:
    """Turn every error of the hub into a Refusal."""
    try:
        yield
    except Refusal:  # raised by a report of progress, to end a download
        raise
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
        raise Unreachable(name, connection_error(reason) or first_sentence(reason)) from None


def _matches(file: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)
