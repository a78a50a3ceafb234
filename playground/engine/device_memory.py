"""How much memory weights take, and how much is free for them."""
from __future__ import annotations

from pathlib import Path

import psutil
import torch
from huggingface_hub.utils import TensorInfo

HEADROOM = 1.1  # what a run needs, relative to the weights: beside them activations, caches and replayed forwards
# a weight; in 4 bits with one float32 scale for 64 of them
QUANTIZED_BYTES = {"int8": 1.0, "nf4": 0.5625, "fp4": 0.5625}
UNQUANTIZED = ("embed", "wte", "wpe", "lm_head")  # parts of names of tensors that bitsandbytes leaves as they are


def stored_bytes(tensors: dict[str, TensorInfo]) -> int:
    """Size of the tensors as they lie in their files."""
    return sum(tensor.data_offsets[1] - tensor.data_offsets[0] for tensor in tensors.values())


def loaded_bytes(tensors: dict[str, TensorInfo], dtype: str, quantization: str) -> int:
    """Size of the tensors once they are converted; matrices count as quantised, all else keeps the dtype."""
    full = getattr(torch, dtype).itemsize
    small = QUANTIZED_BYTES.get(quantization, full)
    return round(
        sum(tensor.parameter_count * (small if _shrinks(name, tensor) else full) for name, tensor in tensors.items())
    )


def free_bytes(device: str) -> int:
    """Memory that new weights may take on a device, what torch holds in reserve included."""
    if device.startswith("cuda"):
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    limit = container_free()
    available = psutil.virtual_memory().available
    return available if limit is None else min(available, limit)


def gpu_memory() -> list[tuple[int, int]]:
    """Bytes of each CUDA device, in all and free."""
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return [(torch.cuda.mem_get_info(device)[1], free_bytes(device)) for device in devices]


def container_limit(control: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The most memory a container may take; None where there is no limit."""
    try:
        limit = (control / "memory.max").read_text().strip()
    except OSError:
        return None
    return None if limit == "max" else int(limit)


def container_free(control: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's own limit leaves, which the machine's figures do not show; None where there is no limit."""
    try:
        limit, used = ((control / file).read_text().strip() for file in ("memory.max", "memory.current"))
        pages = dict(line.split() for line in (control / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if limit == "max" else int(limit) - int(used) + int(pages["inactive_file"])


def size_text(count: float) -> str:
    """Bytes as a person reads them, "3.2 GB"."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _shrinks(name: str, tensor: TensorInfo) -> bool:
    return len(tensor.shape) == 2 and not any(part in name for part in UNQUANTIZED)
