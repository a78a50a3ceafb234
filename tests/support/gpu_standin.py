"""A stand-in for a GPU, for tests of what only such a device refuses or waits for.

    with Standin() as machine:  # a CUDA device; Standin("mps") is an Apple GPU
        model = Model(machine.move(network), tokenizer, "tiny")
        ...
    machine.waits  # how often the host waited for the device, by reason

Tensors on the device are `DeviceTensor`s, which say that they are on cuda:0 or mps:0 and hold a tensor on the CPU. As
on a GPU, operations between devices are refused, and so are waiting while a graph is recorded and float64 on an Apple
GPU. A recording leaves NaN in its results until it is replayed. Kernels and times are not emulated, nor are memory
limits, but `memory` says what is free. Standin(count=2) is two CUDA devices, and `moves` counts the copies between
them.
"""
from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
# operations whose result the host has to know, because its shape or the next step depends on it
WAITS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim",
         "unique_consecutive", "bincount", "histc"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
COPIES = {"_to_copy", "to", "copy_"}
NOT_ON_MPS = "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64"


class DeviceTensor(Tensor):
    """A tensor on the stand-in, whose elements are in a CPU tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, machine: Standin, device: torch.device | None = None) -> DeviceTensor:
        with torch.inference_mode(held.is_inference()):
            self = Tensor._make_wrapper_subclass(
                cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
                device=device or machine.device,
            )
        self.held, self.machine = held, machine
        return self

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        machine = next(leaf.machine for leaf in tree_leaves((args, kwargs)) if is_here(leaf))
        return machine.dispatch(operation, args, kwargs or {})

    def __getitem__(self, index):
        view, indices = self._viewed(index)
        return aten.index(view, indices) if any(i is not None for i in indices) else view

    def __setitem__(self, index, value):
        view, indices = self._viewed(index)
        if any(i is not None for i in indices):
            value = value if isinstance(value, Tensor) else torch.full((), value, dtype=self.dtype, device=self.device)
            aten.index_put_(view, indices, value)
        elif isinstance(value, Tensor):
            view.copy_(value)
        else:
            view.fill_(value)

    def _viewed(self, index) -> tuple[Tensor, list[Tensor | None]]:
        """The part that integers, slices and None select, and the tensors that index its dimensions.

        torch's own indexing is written in C++ and asks for a CUDA build.
        """
        items = list(index) if isinstance(index, tuple) else [index]
        view, dim, indices = self, 0, []
        for item in self._without_ellipsis(items):
            if item is None:
                view, dim = view.unsqueeze(dim), dim + 1
                indices.append(None)
            elif isinstance(item, slice):
                view, dim = aten.slice(view, dim, item.start, item.stop, 1 if item.step is None else item.step), dim + 1
                indices.append(None)
            elif is_number(item):
                view = view.select(dim, operator.index(item))
            else:
                if not isinstance(item, Tensor):
                    item = torch.tensor(item, dtype=torch.long if item in ([], range(0)) else None)
                indices.append(item)
                dim += item.dim() if item.dtype == torch.bool else 1
        return view, indices

    def _without_ellipsis(self, items: list) -> list:
        """Ellipses replaced by as many slices as are missing."""
        at = next((i for i, item in enumerate(items) if item is Ellipsis), None)
        if at is None:
            return items
        others = [*items[:at], *items[at + 1:]]
        taken = sum(
            item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1
            for item in others if item is not None
        )
        return [*items[:at], *[slice(None)] * (self.dim() - taken), *items[at + 1:]]

    # torch's own versions of these ask for a build with the device

    def copy_(self, source: Tensor, non_blocking: bool = False) -> DeviceTensor:
        return self.machine.dispatch(aten.copy_.default, (self, source), {"non_blocking": non_blocking})

    def contiguous(self) -> DeviceTensor:
        return self if self.is_contiguous() else self.clone(memory_format=torch.contiguous_format)

    def nonzero(self, *, as_tuple: bool = False) -> Tensor | tuple[Tensor, ...]:
        found = aten.nonzero(self)
        return found.unbind(1) if as_tuple else found

    def new_tensor(self, data, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=self.device)

    def __invert__(self) -> Tensor:
        return aten.bitwise_not(self)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    __index__ = __int__

    def tolist(self):
        self.machine.wait("read")
        return self.held.tolist()

    def numpy(self, *args, **kwargs):
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    __array__ = numpy

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self):
        return self.held.untyped_storage()

    def __repr__(self, *args, **kwargs) -> str:
        return f"DeviceTensor({self.held!r})"

    @property
    def data(self) -> DeviceTensor:
        return DeviceTensor(self.held.detach(), self.machine, self.device)

    @data.setter
    def data(self, new: DeviceTensor) -> None:
        self.held = new.held


def is_number(item) -> bool:
    """Whether an index is an integer; a tensor without dimensions is one, and is read."""
    if isinstance(item, Tensor):
        return item.dim() == 0 and item.dtype not in (torch.bool, torch.uint8)
    return not isinstance(item, bool) and hasattr(item, "__index__")


class Graph:
    """A recording, as `torch.cuda.CUDAGraph`."""

    def __init__(self, machine: Standin):
        self._machine, self.operations = machine, []

    def capture_begin(self, pool=None, capture_error_mode="global") -> None:
        self._machine.recording = self

    def capture_end(self) -> None:
        """Spoil the results: on a GPU nothing has run yet."""
        self._machine.recording = None
        self._machine.captured += 1
        for *_, results in self.operations:
            for result in results:
                if result.is_floating_point():
                    result.fill_(torch.nan)

    def replay(self) -> None:
        self._machine.replayed += 1
        self._machine.launched += 1
        with torch.inference_mode():
            for operation, args, kwargs, results in self.operations:
                again = operation(*args, **kwargs)
                for old, new in zip(results, tensors(again)):
                    old.copy_(new)


class Stream:
    """A stream, which does everything at once."""

    def __init__(self, machine: Standin):
        self._machine = machine

    def synchronize(self) -> None:
        self._machine.wait("stream")

    def wait_stream(self, other: Stream) -> None:
        """Streams are in step."""


class Event:
    """An event on a stream, as `torch.cuda.Event`. It has happened once the host has waited for anything after it."""

    def __init__(self, machine: Standin):
        self._machine, self.at = machine, 0

    def record(self, stream: Stream | None = None) -> None:
        self.at = self._machine.launched

    def query(self) -> bool:
        return self._machine.ended >= self.at

    def synchronize(self) -> None:
        if not self.query():
            self._machine.wait("event")

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds. Raises RuntimeError if the device has not come so far."""
        if not later.query():
            raise RuntimeError("device not ready")
        return 1e-3 * (later.at - self.at)


class Standin(TorchDispatchMode):
    """The device, or several, while the context is open. Only graphs of a CUDA device are recorded."""

    def __init__(self, kind: str = "cuda", count: int = 1):
        super().__init__()
        self.devices = [torch.device(kind, index) for index in range(count)]
        self.device, self.float64 = self.devices[0], kind != "mps"
        self.memory = [(2 ** 30, 2 ** 30)] * count  # bytes of each device, free and in all
        self.waits, self.captured, self.replayed, self.moves = Counter(), 0, 0, 0
        self.launched = self.ended = 0  # operations, and those of them that the host knows to have ended
        self.recording: Graph | None = None
        self._pinned: dict[int, object] = {}  # storages by address
        self._patches = ExitStack()

    def __enter__(self):
        stream = Stream(self)
        fakes = {
            "is_available": lambda: True, "device_count": lambda: len(self.devices), "current_device": lambda: 0,
            "mem_get_info": lambda device=None: self.memory[self._number(device)],
            "memory_reserved": lambda device=None: 0, "memory_allocated": lambda device=None: 0,
            "_lazy_init": lambda: None, "is_initialized": lambda: True, "empty_cache": lambda: None,
            "synchronize": lambda device=None: self.wait("device"), "graph_pool_handle": object,
            "Stream": lambda device=None: stream, "current_stream": lambda device=None: stream,
            "stream": lambda stream: nullcontext(), "device": lambda device: nullcontext(),
            "CUDAGraph": lambda: Graph(self), "Event": lambda **how: Event(self),
        }
        if self.device.type == "cuda":
            self._patches.enter_context(patch.multiple(torch.cuda, **fakes))
        else:
            self._patches.enter_context(patch.object(torch.mps, "synchronize", lambda: self.wait("device")))
        # modules that move here get new weights, since the old ones are of another class
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self._patches.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        self._patches.enter_context(patch.object(ThreadPoolExecutor, "submit", in_every_thread(self)))
        torch._C._set_only_lift_cpu_tensors(True)
        self._patches.callback(torch._C._set_only_lift_cpu_tensors, False)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._patches.close()

    def _number(self, device: torch.device | str | int | None) -> int:
        if device is None or isinstance(device, int):
            return device or 0
        return torch.device(device).index or 0

    def move(self, network: nn.Module, places: dict[str, int] | None = None) -> nn.Module:
        """Move parameters and buffers to the first device, tied ones together.

        `places` gives parts of the network another device, by the beginning of their names.
        """
        moved: dict[int, Tensor] = {}

        def to_device(tensor: Tensor, device: torch.device) -> Tensor:
            if id(tensor) not in moved:
                there = DeviceTensor(tensor.detach(), self, device)
                is_weight = isinstance(tensor, nn.Parameter)
                moved[id(tensor)] = nn.Parameter(there, requires_grad=False) if is_weight else there
            return moved[id(tensor)]

        for path, module in network.named_modules():
            device = self.devices[next((at for part, at in (places or {}).items() if f"{path}.".startswith(f"{part}.")),
                                       0)]
            for place in (module._parameters, module._buffers, vars(module)):
                ours = {name: value for name, value in place.items() if type(value) in (Tensor, nn.Parameter)}
                place.update({name: to_device(value, device) for name, value in ours.items()})
        return network

    def wait(self, why: str) -> None:
        """The host waits for the device."""
        if self.recording:
            raise RuntimeError(f"operation not permitted when stream is capturing ({why})")
        self.waits[why] += 1
        self.ended = self.launched

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return self.dispatch(operation, args, kwargs or {})

    def dispatch(self, operation, args: tuple, kwargs: dict):
        """Run an operation on the held tensors; what it returns is on the device."""
        name, leaves = operation.overloadpacket.__name__, tree_leaves((args, kwargs))
        here = any(map(is_here, leaves))
        asked = kwargs.get("device") or next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        there = asked is not None and torch.device(asked).type == self.device.type
        if not here and not there:
            return self._on_host(operation, name, args, kwargs)
        if name == "_has_compatible_shallow_copy_type":
            return False
        if name in COPIES:
            return self._copy(operation, name, args, kwargs)
        if asked is not None and not there:  # a CPU tensor in the shape of one on the device
            return operation(*tree_map(held, args), **tree_map(held, kwargs))
        self._check(name, args, kwargs, leaves)
        kwargs = {**kwargs, "device": torch.device("cpu")} if there else kwargs
        device = self.devices[self._number(asked)] if there else self._device_of(name, leaves)
        return self._run(operation, tree_map(held, args), tree_map(held, kwargs), leaves, device)

    def _device_of(self, name: str, leaves: list) -> torch.device:
        """The device that all tensors on a device have; raises RuntimeError if there are two."""
        found = {leaf.device for leaf in leaves if is_here(leaf)}
        if len(found) > 1:
            names = " and ".join(sorted(map(str, found)))
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {names} (in {name})")
        return found.pop()

    def _on_host(self, operation, name: str, args: tuple, kwargs: dict):
        if name == "is_pinned":
            return args[0].untyped_storage().data_ptr() in self._pinned
        if name in ("pin_memory", "_pin_memory"):
            return self._pin(args[0].clone())
        out = operation(*args, **{**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs)
        return self._pin(out) if kwargs.get("pin_memory") else out

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    def _check(self, name: str, args: tuple, kwargs: dict, leaves: list) -> None:
        """Raise RuntimeError for what a device refuses, and count what the host waits for."""
        indices = [i for i in args[1] if i is not None] if name in INDEXING else []
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise RuntimeError(f"Expected a device generator but found one of the CPU (in {name})")
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                continue
            if not self.float64 and torch.float64 in (leaf.dtype, kwargs.get("dtype")):
                raise TypeError(f"{NOT_ON_MPS} (in {name})")
            on_host = not is_here(leaf)
            if on_host and any(leaf is index for index in indices):
                self.wait("copy")  # an index on the CPU is copied first
            elif on_host and leaf.dim() and not name.endswith("_like"):
                raise RuntimeError(f"Expected all tensors to be on the same device, {self.device} and cpu (in {name})")
        if not self.float64 and kwargs.get("dtype") == torch.float64:
            raise TypeError(f"{NOT_ON_MPS} (in {name})")
        counts_rows = name in INDEXING and any(index.dtype == torch.bool for index in indices)
        if name in WAITS or counts_rows and not (name != "index" and args[2].dim() == 0):
            self.wait("read")

    def _copy(self, operation, name: str, args: tuple, kwargs: dict):
        """Between devices, or to another type."""
        if name == "copy_":
            into, source = args[:2]
            self._transfer(source, into, kwargs.get("non_blocking") or any(args[2:]))
            self._computed(operation, (held(into), held(source)), {})
            return into
        wanted = {argument.name: value for argument, value in zip(operation._schema.arguments, args)} | kwargs
        like = wanted.get("other")
        source, like = args[0], args[0] if like is None else like
        device, dtype = torch.device(wanted.get("device") or like.device), wanted.get("dtype") or like.dtype
        to_device = device.type == self.device.type
        device = self.devices[self._number(device)] if to_device else device
        if to_device and not self.float64 and dtype == torch.float64:
            raise TypeError(NOT_ON_MPS)
        if name == "to" and not wanted.get("copy") and (device, dtype) == (source.device, source.dtype):
            return source
        out = self._computed(aten._to_copy.default, (held(source),), {"dtype": dtype})
        out = DeviceTensor(out, self, device) if to_device else out
        self._transfer(source, out, wanted.get("non_blocking"))
        return out

    def _transfer(self, source: Tensor, into: Tensor, asynchronous: bool) -> None:
        """A copy between host and device waits unless it is asynchronous and the host's memory is pinned."""
        host = [end for end in (source, into) if not is_here(end)]
        self.moves += not host and source.device != into.device
        pinned = all(end.untyped_storage().data_ptr() in self._pinned for end in host)
        if host and (self.recording or not (asynchronous and pinned)):
            self.wait("copy")

    def _run(self, operation, args: tuple, kwargs: dict, leaves: list, device: torch.device):
        """An input that is returned is the very same object."""
        known = {id(leaf.held): leaf for leaf in leaves if is_here(leaf)}

        def wrapped(out):
            if not isinstance(out, Tensor):
                return out
            return known[id(out)] if id(out) in known else DeviceTensor(out, self, device)

        return tree_map(wrapped, self._computed(operation, args, kwargs))

    def _computed(self, operation, args: tuple, kwargs: dict):
        self.launched += 1
        out = operation(*args, **kwargs)
        if self.recording:
            inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
            new = [tensor for tensor in tensors(out) if tensor.untyped_storage().data_ptr() not in inputs]
            if new or operation._schema.is_mutable:
                self.recording.operations.append((operation, args, kwargs, new))
        return out


class InThread(TorchDispatchMode):
    """The mode of a device in another thread."""

    def __init__(self, machine: Standin):
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return self._machine.dispatch(operation, args, kwargs or {})


def in_every_thread(machine: Standin) -> Callable[..., Future]:
    """`ThreadPoolExecutor.submit` for work that uses the device: torch's modes hold in one thread only."""
    submit = ThreadPoolExecutor.submit

    def submitted(pool: ThreadPoolExecutor, work: Callable, *args, **kwargs) -> Future:
        def with_device(*args, **kwargs):
            with InThread(machine):
                return work(*args, **kwargs)

        return submit(pool, with_device, *args, **kwargs)

    return submitted


def is_here(value) -> bool:
    return isinstance(value, DeviceTensor)


def tensors(values) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def held(value):
    return value.held if isinstance(value, DeviceTensor) else value
