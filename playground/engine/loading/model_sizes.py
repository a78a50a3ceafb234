"""How large a model is, on disk and in memory, as far as it is known without loading it.

Of a model on this machine everything is read from its files. Of one on the hub it is what the hub says: the sizes of
the files, and the number of parameters in them.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from huggingface_hub import try_to_load_from_cache

from playground.engine.checkpoint.hub_files import hub_files, hub_info, needed_files, on_machine
from playground.engine.device_memory import QUANTIZED_BYTES
from playground.engine.loading.load import Loading, estimate


@dataclass(frozen=True)
class ModelSize:
    """Sizes in bytes. `loaded`: of the weights in memory; `stored`: of the files that are read; `missing`: of those
    that still have to be downloaded. `parameters` and `loaded` are 0 where the hub does not say them.
    """

    parameters: int
    loaded: int
    stored: int
    missing: int = 0


def local_size(name: str, loading: Loading) -> ModelSize | None:
    """The size of a model on this machine; None if it is not there. Raises Refusal if it cannot be used."""
    source = on_machine(name)
    if source is None:
        return None
    cost = estimate(name, loading)
    return ModelSize(cost.parameters, cost.bytes, sum(needed_files(source).values()))


@dataclass(frozen=True)
class HubModel:
    """What the hub says about a model: its parameters, 0 if unknown, and the bytes of the files that loading reads."""

    name: str
    parameters: int
    files: dict[str, int]

    def size(self, loading: Loading) -> ModelSize:
        """Its size if it were loaded so. If the weights are to be quantised, all of them count as quantised, embeddings
        included. Raises Refusal for a device that is not there.
        """
        how = loading.resolve()
        each = QUANTIZED_BYTES.get(how.quantization, getattr(torch, how.dtype).itemsize)
        missing = sum(size for file, size in self.files.items() if not _is_cached(self.name, file))
        return ModelSize(self.parameters, round(self.parameters * each), sum(self.files.values()), missing)


def hub_model(name: str) -> HubModel:
    """Ask the hub about a model, by one request; raises Refusal."""
    info = hub_info(name)
    parameters = info.safetensors.total if info.safetensors else 0
    return HubModel(name, parameters, needed_files(hub_files(name, info)))


def _is_cached(name: str, file: str) -> bool:
    return isinstance(try_to_load_from_cache(name, file), str)
