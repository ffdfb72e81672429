"""`fake_cuda()`: puts the fakes into torch, and takes them out again. Nothing else in the process is changed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from fake_cuda import streams
from fake_cuda.machine import Machine, activate, deactivate, device_index, machine
from fake_cuda.nccl import FakeNccl
from fake_cuda.tensor import FakeTensor, _parse_to, fresh, host_copy, made_on, moved

FACTORIES = {
    "arange": False,
    "empty": True,
    "empty_strided": True,
    "eye": False,
    "full": False,
    "linspace": False,
    "ones": False,
    "rand": False,
    "randint": False,
    "randn": False,
    "randperm": False,
    "zeros": False,
}
"""Functions that make tensors from nothing, and whether they leave the memory as it is."""
LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like")
FROM_DATA = ("as_tensor", "asarray", "scalar_tensor", "tensor")
"""They copy values from the host's pageable memory, and wait for that."""

MIB_80 = 80 << 30


def is_cuda(device: object) -> bool:
    """Whether a device argument means a GPU."""
    if device is None or isinstance(device, int):
        return isinstance(device, int)
    return str(device).startswith("cuda")


def _factory(name: str, real: Callable[..., Tensor], blank: bool, waits: bool) -> Callable[..., Tensor]:
    @wraps(real)
    def make(*arguments: Any, **named: Any) -> Tensor:
        device, pin = named.get("device"), named.pop("pin_memory", False)
        if pin:
            raw = real(*arguments, **named)
            return fresh(raw, machine().here.device, pinned=True)
        if not is_cuda(device):
            return real(*arguments, **named)
        if waits and isinstance(arguments[0], FakeTensor):
            return arguments[0].to(device=device, dtype=named.get("dtype"))
        return made_on(real(*arguments, **named | {"device": "cpu"}), device, name, blank=blank, waits=waits)

    return make


def _like(name: str, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(real)
    def make(source: Tensor, *arguments: Any, **named: Any) -> Tensor:
        device, pin = named.pop("device", None), named.pop("pin_memory", False)
        target = source.device if device is None else device
        if pin:
            return fresh(real(_as_cpu(source), *arguments, **named), machine().here.device, pinned=True)
        if isinstance(source, FakeTensor) and (device is None or torch.device(device) == source.device):
            return real(source, *arguments, **named)
        raw = real(_as_cpu(source), *arguments, **named)
        return made_on(raw, target, name, blank=name == "empty_like") if is_cuda(target) else raw

    return make


def _as_cpu(source: Tensor) -> Tensor:
    """An uninitialised CPU tensor of the same shape, strides and dtype."""
    return torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)


def _sparse_coo_tensor(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """It takes over the memory of values that are on the device; others would be copied, which nothing needs yet."""

    @wraps(real)
    def make(places: Tensor, values: Tensor, *arguments: Any, **named: Any) -> Tensor:
        device = named.pop("device", None)
        if device is not None and torch.device(device) != values.device:
            raise NotImplementedError(
                f"a sparse tensor on {device} from values on {values.device}: the recorder copies none"
            )
        return real(places, values, *arguments, **named)

    return make


def _to(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(real)
    def to(tensor: Tensor, *arguments: Any, **named: Any) -> Tensor:
        device, dtype, non_blocking, copy = _parse_to(tensor, arguments, named)
        if device.type == "cuda":
            return moved(tensor, device, dtype, non_blocking, copy)
        return real(tensor, *arguments, **named)

    return to


def _cuda(tensor: Tensor, device: object = None, non_blocking: bool = False, memory_format: object = None) -> Tensor:
    return moved(tensor, torch.device("cuda", device_index(device)), tensor.dtype, non_blocking, False)


def _pin_memory(tensor: Tensor, device: object = None) -> Tensor:
    return fresh(tensor.clone(), machine().here.device, pinned=True)


def _set_device(device: object) -> None:
    machine().here.device = device_index(device)


def _capability(device: object = None) -> tuple[int, int]:
    return 9, 0


def _memory(device: object = None) -> int:
    return machine().devices[device_index(device)].allocated_nbytes


def _peak(device: object = None) -> int:
    return machine().devices[device_index(device)].peak_nbytes


def _reset_peak(device: object = None) -> None:
    own = machine().devices[device_index(device)]
    own.peak_nbytes = own.allocated_nbytes


def _properties(device: object = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="fake GPU", major=9, minor=0, total_memory=MIB_80, multi_processor_count=132, warp_size=32
    )


class _CurrentDevice:
    """Named like the function it stands for."""

    def __call__(self) -> int:
        return machine().here.device


@contextmanager
def fake_cuda(devices: int = 1) -> Iterator[Machine]:
    """Gives this torch so many GPUs until the context ends; checks nothing by itself: see `Machine.check`.

    Args:
        devices: Of all ranks together; rank r, a thread, uses `cuda:r` (`ranks.run_ranks` sets it).

    Raises:
        RuntimeError: This torch has CUDA: the tool is for one without.
    """
    if torch.version.cuda is not None and torch.cuda.is_available():
        raise RuntimeError("fake_cuda() wants a torch without CUDA, or a machine without a GPU")
    made = Machine(devices)
    cuda: dict[str, Any] = {
        "Stream": streams.FakeStream,
        "Event": streams.FakeEvent,
        "StreamContext": streams.FakeStreamContext,
        "stream": streams.FakeStreamContext,
        "device": streams.FakeDeviceContext,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "set_stream": streams.set_stream,
        "synchronize": streams.synchronize,
        "current_device": _CurrentDevice(),
        "set_device": _set_device,
        "device_count": lambda: devices,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": _capability,
        "get_device_name": lambda device=None: "fake GPU",
        "get_device_properties": _properties,
        "mem_get_info": lambda device=None: (MIB_80 - _memory(device), MIB_80),
        "memory_allocated": _memory,
        "max_memory_allocated": _peak,
        "reset_peak_memory_stats": _reset_peak,
        "empty_cache": lambda: None,
        "_lazy_init": lambda: None,
    }
    with ExitStack() as stack:
        for name, fake in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, fake, create=True))
        for name, blank in FACTORIES.items():
            stack.enter_context(patch.object(torch, name, _factory(name, getattr(torch, name), blank, False)))
        for name in FROM_DATA:
            stack.enter_context(patch.object(torch, name, _factory(name, getattr(torch, name), False, True)))
        for name in LIKE:
            stack.enter_context(patch.object(torch, name, _like(name, getattr(torch, name))))
        sparse = _sparse_coo_tensor(torch.sparse_coo_tensor)
        stack.enter_context(patch.object(torch, "sparse_coo_tensor", sparse))
        for name, method in (("to", _to(torch.Tensor.to)), ("cuda", _cuda), ("pin_memory", _pin_memory)):
            stack.enter_context(patch.object(torch.Tensor, name, method, create=True))
        stack.enter_context(patch.object(torch.futures, "Future", streams.FakeFuture))
        stack.enter_context(patch.object(torch.futures, "collect_all", streams.collect_all))
        stack.enter_context(patch.object(torch.futures, "wait_all", streams.wait_all))
        for module in (dist, distributed_c10d):
            stack.enter_context(patch.object(module, "ProcessGroupNCCL", FakeNccl, create=True))
            stack.enter_context(patch.object(module, "is_nccl_available", lambda: True))
            stack.enter_context(patch.object(module, "is_initialized", lambda: True))
        activate(made)
        try:
            yield made
        finally:
            deactivate(made)


__all__ = ["fake_cuda", "host_copy"]
