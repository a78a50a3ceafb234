"""From a model's name to a network in memory: first what it would take, then the weights, each network once.

Every failure is a Refusal that says what to do; nothing large is read before it is known to fit.
"""
from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Generic, TypeVar

import psutil
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from playground.engine.canvas.masked_models import masking_of
from playground.engine.checkpoint.config_limits import check_against_weights
from playground.engine.checkpoint.gguf_files import gguf_arguments, gguf_kind
from playground.engine.checkpoint.hub_files import (
    Progress,
    fetch,
    find_source,
    first_sentence,
    is_folder,
    read_adapters,
    read_config,
    tensors,
    unseen,
)
from playground.engine.checkpoint.model_files import ModelFiles, has_tokenizer
from playground.engine.device_memory import (
    HEADROOM,
    container_limit,
    free_bytes,
    gpu_memory,
    loaded_bytes,
    size_text,
)
from playground.engine.heap_memory import give_back
from playground.engine.loading.adapters import add_adapter
from playground.engine.loading.device_map import spread_over_gpus
from playground.engine.loading.read_network import WeightReading, read_network
from playground.engine.loading.read_tokenizer import read_tokenizer
from playground.engine.loading.stored_weights import StoredForm, parameter_count, stored_form, weight_bytes
from playground.engine.loading.unused_weights import check_plain, check_quantised
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal

DEVICES = ("auto", "cuda", "mps", "cpu")
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
QUANTIZATIONS = ("none", "int8", "nf4", "fp4")

Held = TypeVar("Held")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loading:
    """How a model is to be loaded; raises Refusal for a setting that does not exist or cannot go with another."""

    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    # resolved from "auto" on a machine with several GPUs: weights that do not fit on `device` are spread over all
    may_spread: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not re.fullmatch("|".join(DEVICES) + r"|cuda:\d+", self.device):
            raise Refusal(f"There is no device {self.device!r}; choose one of {', '.join(DEVICES)}.", "device")
        if self.dtype not in DTYPES:
            raise Refusal(f"There is no dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}.", "dtype")
        if self.quantization not in QUANTIZATIONS:
            raise Refusal(
                f"There is no quantization {self.quantization!r}; choose one of {', '.join(QUANTIZATIONS)}.",
                "quantization",
            )
        if self.quantization != "none" and self.dtype == "float64":
            raise Refusal(
                f"{self.quantization} weights cannot compute in float64: choose float32, or no quantization.", "dtype"
            )

    def resolve(self) -> Loading:
        """The same with every "auto" decided for this machine; raises Refusal where the device is not there."""
        device = pick_device(self.device)
        if device == "mps" and self.dtype == "float64":
            raise Refusal("Apple GPUs have no float64: choose float32, or the cpu.", "dtype")
        several = device == "cuda" and torch.cuda.device_count() > 1
        return Loading(device, _pick_dtype(device) if self.dtype == "auto" else self.dtype, self.quantization,
                       self.may_spread or several and self.device == "auto")


@dataclass(frozen=True)
class Estimate:
    """What the weights take on the device, from the headers of their files, against what is free there."""

    bytes: int
    parameters: int
    free_bytes: int
    spread: bool = False  # over all GPUs, whose free memory `free_bytes` is then
    form: StoredForm | None = None  # how the files are quantised

    @property
    def fits(self) -> bool:
        return self.bytes * HEADROOM <= self.free_bytes


@dataclass(frozen=True)
class Facts:
    """What was loaded, as stored in a trace's header."""

    name: str
    revision: str
    device: str
    dtype: str
    quantization: str
    parameters: int
    bytes: int


def pick_device(wanted: str = "auto") -> str:
    """The device to use, "cuda", "cuda:1", "mps" or "cpu"; raises Refusal where the wanted one is not there.

    "cuda:0" is "cuda", so that no model is loaded on one device twice.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return next(device for device, is_there in there.items() if is_there)
    kind, _, index = wanted.partition(":")
    if not there[kind] or int(index or 0) >= max(torch.cuda.device_count(), 1):
        raise Refusal(f"There is no {wanted} device on this machine: choose auto or cpu.", "device")
    return "cuda" if wanted == "cuda:0" else wanted


def estimate(name: str, loading: Loading) -> Estimate:
    """What loading would take, before anything is loaded; raises Refusal where the model cannot be found or used."""
    return _estimate(find_source(name), loading.resolve())


def device_memory(device: str, may_spread: bool = False) -> tuple[int, int]:
    """Bytes of a device in all and free; on a CPU the machine's memory, or a container's limit where that is less.

    With `may_spread` those of all GPUs together.
    """
    if may_spread:
        totals, free = zip(*gpu_memory())
        return sum(totals), sum(free)
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[1], free_bytes(device)
    total, limit = psutil.virtual_memory().total, container_limit()
    return total if limit is None else min(total, limit), free_bytes(device)


def release_unused() -> None:
    """Collect cycles and hand freed memory back to the system."""
    gc.collect()
    give_back()


def load(
    name: str, loading: Loading, progress: Progress = unseen
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Facts]:
    """Network (in evaluation mode, on its device), tokenizer and facts; raises Refusal."""
    loading = loading.resolve()
    progress(0.0, f"Looking for {name}")
    source = find_source(name)
    cost = _estimate(source, loading)
    if not cost.fits:
        raise _too_large(name, loading, cost)
    config = read_config(source)
    masking_of(config)  # refuses an unusable entry before anything large is read
    form = cost.form
    check_against_weights(name, config, cost.parameters, form is not None, cost.free_bytes)
    folder = fetch(source, lambda share, text: progress(0.05 + 0.65 * share, text))
    progress(0.7, f"Reading {name}")
    adapters = read_adapters(source)
    own = next((place for _, place in reversed(adapters) if has_tokenizer(place)), None)
    tokenizer = read_tokenizer(name, own or folder, None if own else source.gguf)
    places = {"": loading.device}
    if cost.spread:
        places = spread_over_gpus(name, config, loading.dtype, form.weights if form else loading.quantization)
    reading = WeightReading(getattr(torch, loading.dtype), places, loading.quantization, form, source.variant)
    network = read_network(name, folder, config, reading)
    for adapter, place in adapters:
        add_adapter(network, adapter, place)
    progress(1.0, f"{name} is ready")
    facts = Facts(
        name,
        source.revision,
        " + ".join(sorted(set(places.values()))),
        loading.dtype,
        form.name if form else loading.quantization,
        parameter_count(network) if form else cost.parameters,
        weight_bytes(network),
    )
    return network, tokenizer, facts


def check_draft(target: Tokens, draft: Tokens) -> None:
    """Refuse a draft model whose token ids mean something else."""
    if said := differences(target, draft):
        raise Refusal(
            f"The draft model has another vocabulary ({said}): choose a draft of the same model family.", "draft"
        )


def differences(target: Tokens, draft: Tokens) -> str:
    """How the token ids of a draft mean something else, in a few words; empty where they do not. Rows without tokens
    may differ in number.
    """
    ours, theirs = target.names(), draft.names()
    if ours == theirs:
        return ""
    differing = sorted(id for id in ours.keys() | theirs.keys() if ours.get(id) != theirs.get(id))
    ours_say, theirs_say = (
        repr(tokens[differing[0]]) if differing[0] in tokens else "nothing" for tokens in (ours, theirs)
    )
    return (
        f"{len(differing)} tokens differ; id {differing[0]} is {ours_say} for the target and {theirs_say} for the draft"
    )


class Shelf(Generic[Held]):
    """Loaded models, each once however many lanes ask for it. `factory` makes of network, tokenizer and facts what is
    held.

    A public deployment sets `folders` to False, so that no path of the machine can be opened, and `most_bytes`.
    """

    def __init__(self, factory: Callable[[PreTrainedModel, PreTrainedTokenizerBase, Facts], Held], folders: bool = True,
                 most_bytes: int | None = None):
        self._factory, self._folders, self._most_bytes = factory, folders, most_bytes
        self._held: dict[tuple[str, Loading], Held] = {}
        self._loading = Lock()  # one load at a time: two at once would both count the same free memory

    def get(self, name: str, loading: Loading, progress: Progress = unseen) -> Held:
        """The model of that name, loaded now if it is not held yet; raises Refusal."""
        key = (name, loading.resolve())
        if (held := self._held.get(key)) is not None:
            return held
        with self._loading:
            if key not in self._held:
                self._held[key] = self._load(*key, progress)
            return self._held[key]

    def check_folder(self, name: str) -> None:
        """Raise Refusal for a folder if none may be opened."""
        if not self._folders and is_folder(name):
            raise Refusal("Folders cannot be opened here: choose a bundled model or one from the hub.", "model")

    def held(self) -> list[tuple[str, Loading]]:
        """Names and settings of what is held, oldest first."""
        return list(self._held)

    def drop(self, name: str) -> None:
        """Let go of a model in all its settings; its memory is free once no lane uses it any more."""
        with self._loading:
            self._held = {key: model for key, model in self._held.items() if key[0] != name}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _load(self, name: str, loading: Loading, progress: Progress) -> Held:
        self.check_folder(name)
        if self._most_bytes is not None and (needed := estimate(name, loading).bytes) > self._most_bytes:
            raise Refusal(
                f"{name} takes {size_text(needed)}, and this page allows {size_text(self._most_bytes)}: choose a"
                " smaller model.",
                "model",
            )
        loaded = load(name, loading, progress)
        try:
            return self._factory(*loaded)
        except Refusal:
            raise
        except Exception as reason:
            log.info("%s cannot be used", name, exc_info=reason)
            raise Refusal(
                f"{name} cannot be used ({first_sentence(reason)}): choose another model or another setting.", "model"
            ) from None


def _pick_dtype(device: str) -> str:
    if not device.startswith("cuda"):
        return "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"


def _stored_form(source: ModelFiles, loading: Loading) -> StoredForm | None:
    """How the files themselves are quantised; Refusal where the loading cannot go with that."""
    if source.gguf:
        form = StoredForm(gguf_kind(source.name, source.gguf), 8, dense=True, arguments=gguf_arguments(source.gguf))
    else:
        form = stored_form(source.name, read_config(source), loading.device)
    if form and loading.quantization != "none":
        raise Refusal(
            f"The weights of {source.name} are stored as {form.method}, quantised already: choose no quantization.",
            "quantization",
        )
    if form and not form.dense and loading.dtype == "float64":
        raise Refusal(f"{form.name} weights cannot compute in float64: choose float32.", "dtype")
    return form


def _estimate(source: ModelFiles, loading: Loading) -> Estimate:
    form, found = _stored_form(source, loading), tensors(source)
    if form:
        check_quantised(source.name, form.method, found)
        needed, count = form.bytes(found, loading.dtype), form.parameters(found)
    else:
        check_plain(source.name, found)
        needed = loaded_bytes(found, loading.dtype, loading.quantization)
        count = sum(tensor.parameter_count for tensor in found.values())
    needed += source.adapter_bytes
    free = free_bytes(loading.device)
    spread = loading.may_spread and needed * HEADROOM > free
    return Estimate(needed, count, sum(free for _, free in gpu_memory()) if spread else free, spread, form)


def _too_large(name: str, loading: Loading, cost: Estimate) -> Refusal:
    form = cost.form
    whole = loading.quantization == "none" and form is None
    advice = "choose nf4 weights or a smaller model" if whole else "choose a smaller model"
    weights = form.method if form and not form.dense else loading.dtype if whole or form else loading.quantization
    return Refusal(
        f"{name} takes about {size_text(cost.bytes * HEADROOM)} in {weights}, and {size_text(cost.free_bytes)} are free"
        f" on {'all GPUs together' if cost.spread else loading.device}: {advice}, or free memory first.",
        "model",
    )
