"""A tensor that says it is on a GPU: its memory is the host's, every operation on it runs at once and is noted.

To torch's C++ it is a CPU tensor of a subclass (a wrapper with `device="cuda"` would get no further than the first
slice: "not linked with support for cuda devices"); only what Python asks (`device`, `is_cuda`, `record_stream`, ...)
answers for a GPU. What an operation reads and writes is in its schema: alias annotations name the arguments that are
written, and those that are returned as views.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fake_cuda.clocks import Block
from fake_cuda.machine import device_index, machine
from fake_cuda.streams import FakeStream

WAITING = {
    "aten._local_scalar_dense",
    "aten.equal",
    "aten.nonzero",
    "aten.masked_select",
    "aten.unique_consecutive",
    "aten._unique",
    "aten._unique2",
    "aten.unique_dim",
    "aten.bincount",
    "aten.repeat_interleave",
}
"""Operations that make the host wait: they return a number, or a tensor whose size depends on values."""
BLANK = ("aten.empty", "aten.new_empty", "aten._empty")
"""Operations that allocate and leave the memory as it is begin so."""
COPIES = {"aten.copy_", "aten._foreach_copy_", "aten._to_copy"}
UNSAFE_VIEW = "aten._unsafe_view"
INDEXING = {"aten.index", "aten.index_put_", "aten._index_put_impl_", "aten.index_put", "aten._unsafe_index"}


class Spec:
    """What an operation does to its arguments, by its schema."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name: str = schema.name.replace("::", ".")
        self.written = [
            argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments
        ]
        self.written_by_name = {
            argument.name: written for argument, written in zip(schema.arguments, self.written, strict=True)
        }
        returned = [each.alias_info for each in schema.returns]
        views = any(alias is not None and not alias.is_write for alias in returned)
        self.is_view = (views and not any(self.written)) or self.name == UNSAFE_VIEW
        self.waits = self.name in WAITING
        self.blank = self.name.startswith(BLANK)
        # What returns and writes nothing is bookkeeping of the host's: fsdp.record_grad_output_stream of torch 2.15.
        self.launches = bool(returned) or any(self.written)
        self.copies = self.name in COPIES
        self.indexes = self.name in INDEXING


_specs: dict[Any, Spec] = {}


def spec_of(func: Any) -> Spec:
    """The same, worked out once."""
    found = _specs.get(func)
    if found is None:
        found = _specs[func] = Spec(func)
    return found


class FakeTensor(Tensor):
    """See the module. `block` is the memory it views; pinned host memory is a block without a stream."""

    block: Block
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, dict(kwargs or {}))

    @property
    def pinned(self) -> bool:
        """Whether it is page-locked host memory, which copies read and write on streams."""
        return self.block.stream is None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu") if self.pinned else torch.device("cuda", self.block.device)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return not self.pinned

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.pinned

    def get_device(self) -> int:
        return -1 if self.pinned else self.block.device

    def is_pinned(self, device: object = None) -> bool:
        return self.pinned

    def pin_memory(self, device: object = None) -> Tensor:
        if self.pinned:
            return self
        raise RuntimeError("cannot pin a tensor on CUDA: only dense CPU tensors can be pinned")

    def record_stream(self, stream: FakeStream) -> None:  # type: ignore[override]
        """Its memory is not handed out again before what is on `stream` when it is freed is done."""
        self.block.recorded[stream.timeline.number] = stream.timeline

    def to(self, *arguments: Any, **named: Any) -> Tensor:
        device, dtype, non_blocking, copy = _parse_to(self, arguments, named)
        return moved(self, device, dtype, non_blocking, copy)

    def cpu(self, memory_format: object = None) -> Tensor:
        return moved(self, torch.device("cpu"), self.dtype, False, False)

    def cuda(self, device: object = None, non_blocking: bool = False, memory_format: object = None) -> Tensor:
        return moved(self, torch.device("cuda", device_index(device)), self.dtype, non_blocking, False)

    def tolist(self) -> Any:
        if self.pinned:
            return host_copy(self).tolist()
        return moved(self, torch.device("cpu"), self.dtype, False, True).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not (force or self.pinned):
            raise TypeError("can't convert cuda device type tensor to numpy. Use Tensor.cpu() first.")
        return self.cpu().numpy() if not self.pinned else host_copy(self).numpy()

    def new_empty(self, *size: Any, **named: Any) -> Tensor:
        return self._new("empty", *size, **named)

    def new_zeros(self, *size: Any, **named: Any) -> Tensor:
        return self._new("zeros", *size, **named)

    def new_ones(self, *size: Any, **named: Any) -> Tensor:
        return self._new("ones", *size, **named)

    def new_full(self, *size: Any, **named: Any) -> Tensor:
        return self._new("full", *size, **named)

    def new_tensor(self, data: Any, **named: Any) -> Tensor:  # type: ignore[override]
        return self._new("tensor", data, **named)

    def _new(self, factory: str, *arguments: Any, **named: Any) -> Tensor:
        options = {"device": self.device, "dtype": self.dtype} | {
            key: each for key, each in named.items() if each is not None
        }
        made: Tensor = getattr(torch, factory)(*arguments, **options)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.clone()
        return copied

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{plain(self)!r} on fake {self.device}"

    __str__ = __repr__


def plain(tensor: Tensor) -> Tensor:
    """The values as they are now, as a CPU tensor of its own, unseen by the recorder."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_like(tensor, device="cpu").as_subclass(Tensor).copy_(view_of(tensor))


def view_of(tensor: Tensor) -> Tensor:
    """The same memory as a CPU tensor, unseen by the recorder."""
    with torch._C._DisableTorchDispatch():
        return tensor.as_subclass(Tensor).detach() if isinstance(tensor, FakeTensor) else tensor


def wrap(raw: Tensor, block: Block) -> FakeTensor:
    """A fake tensor on a CPU tensor's memory."""
    made: FakeTensor = torch.Tensor._make_subclass(FakeTensor, raw)
    made.block = block
    if raw.layout == torch.strided:
        block.base = block.base or raw.untyped_storage().data_ptr()
    return made


def fresh(raw: Tensor, device: int, *, pinned: bool = False) -> FakeTensor:
    """A fake tensor in new memory, which `raw` gives."""
    return wrap(raw, machine().new_block(raw.numel() * raw.element_size(), device, pinned=pinned))


def made_on(raw: Tensor, device: object, op: str, *, blank: bool, waits: bool = False) -> FakeTensor:
    """What a factory function returns on CUDA.

    Args:
        raw: The same on the CPU.
        device: Where it shall be.
        op: Name of the factory.
        blank: Whether it leaves the memory as it is.
        waits: Whether the host waits until the values are copied.
    """
    index = device_index(device)
    tensor = fresh(raw, index)
    running = machine()
    if not blank:
        running.access(running.current(index), op, [], [(tensor.block, tensor)])
    if waits:
        running.host_wait(op, index, running.current(index))
    return tensor


def host_copy(tensor: FakeTensor) -> Tensor:
    """The values of pinned memory, read by the host now."""
    running = machine()
    running.access(running.devices[tensor.block.device].host, "host read", [(tensor.block, tensor)], [])
    return plain(tensor)


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype, non_blocking: bool, copy: bool) -> Tensor:
    """`tensor.to(device, dtype, non_blocking, copy)`."""
    here, running = tensor.device, machine()
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", device_index(device))
    if here == device:
        if dtype == tensor.dtype and not copy:
            return tensor
        return torch.ops.aten._to_copy(tensor, dtype=dtype)  # type: ignore[no-any-return]
    if device.type == "cuda" and here.type == "cuda":
        raise RuntimeError(f"a copy from {here} to {device}: the recorder knows ranks with one device each")
    if device.type == "cuda":
        target = made_on(torch.empty(tensor.shape, dtype=dtype), device, "to", blank=True)
        target.copy_(tensor, non_blocking=non_blocking)
        return target
    assert isinstance(tensor, FakeTensor)
    if non_blocking:  # torch takes pinned memory for it
        pinned = fresh(torch.empty(tensor.shape, dtype=dtype), tensor.block.device, pinned=True)
        pinned.copy_(tensor, non_blocking=True)
        return pinned
    stream = running.current(tensor.block.device)
    running.access(stream, "copy to host", [(tensor.block, tensor)], [], "copy")
    running.host_wait("copy to host", tensor.block.device, stream)
    return plain(tensor).to(dtype)


def _parse_to(
    tensor: Tensor, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[torch.device, torch.dtype, bool, bool]:
    device, dtype = named.get("device"), named.get("dtype")
    non_blocking, copy = named.get("non_blocking", False), named.get("copy", False)
    rest = list(arguments)
    other = named.get("other")
    if rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
    if other is not None:
        device, dtype = other.device, other.dtype
    elif rest and not isinstance(rest[0], torch.dtype):
        device = rest.pop(0)
    if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
        dtype = rest.pop(0)
    if rest:
        non_blocking = rest.pop(0)
    if rest:
        copy = rest.pop(0)
    if isinstance(device, int):
        device = torch.device("cuda", device)
    return torch.device(device or tensor.device), dtype or tensor.dtype, bool(non_blocking), bool(copy)


def _fakes(value: Any) -> list[FakeTensor]:
    if isinstance(value, FakeTensor):
        return [value]
    if isinstance(value, list | tuple):
        return [each for each in value if isinstance(each, FakeTensor)]
    return []


def _strangers(value: Any) -> list[Tensor]:
    """CPU tensors that are no single numbers."""
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, Tensor) and not isinstance(each, FakeTensor) and each.dim()]


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation with fake tensors among its arguments, and notes what it does."""
    spec, running = spec_of(func), machine()
    if kwargs.get("device") is not None:
        kwargs["device"] = "cpu"
    kwargs.pop("pin_memory", None)
    named = [(spec.written[place], each) for place, each in enumerate(args)]
    named += [(spec.written_by_name.get(key, False), each) for key, each in kwargs.items()]
    reads = [tensor for written, each in named if not written for tensor in _fakes(each)]
    writes = [tensor for written, each in named if written for tensor in _fakes(each)]
    first = (writes or reads)[0]
    if spec.is_view:
        with torch._C._DisableTorchDispatch():
            return _wrapped(func(*args, **kwargs), lambda _: first.block)
    on_device = [tensor for tensor in (*reads, *writes) if not tensor.pinned]
    devices = {tensor.block.device for tensor in on_device}
    strangers = [tensor for _, each in named for tensor in _strangers(each)]
    if len(devices) > 1 or (on_device and strangers and not (spec.copies or spec.indexes)):
        places = {*(f"cuda:{each}" for each in devices), *(["cpu"] if strangers else [])}
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices in {spec.name}: "
            f"{', '.join(sorted(places))}"
        )
    index = (on_device or [first])[0].block.device
    stream = running.current(index) if on_device else running.devices[index].host
    blocking_copy = spec.copies and strangers and on_device and not _non_blocking(args, kwargs)
    with torch._C._DisableTorchDispatch():
        result = func(*args, **kwargs)
    made: list[FakeTensor] = []

    def block_for(raw: Tensor) -> Block:
        return running.new_block(raw.numel() * raw.element_size(), index, pinned=not on_device)

    wrapped = _wrapped(result, block_for, made)
    written = [(tensor.block, tensor) for tensor in (*writes, *([] if spec.blank else made))]
    read = [] if spec.blank or not spec.launches else [(tensor.block, tensor) for tensor in reads]
    if read or written:
        running.access(
            stream,
            spec.name,
            read,
            written,
            "copy" if spec.copies and (strangers or len({*map(_is_pinned, reads + writes)}) > 1) else "kernel",
        )
    waits = spec.waits or blocking_copy or (spec.indexes and (strangers or _has_mask(args)))
    if waits and on_device:
        running.host_wait(spec.name, index, stream)
    return wrapped


def _is_pinned(tensor: FakeTensor) -> bool:
    return tensor.pinned


def _has_mask(args: tuple[Any, ...]) -> bool:
    """Whether an index is a mask, whose elements must be counted first."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else []
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


def _wrapped(result: Any, block_of: Callable[[Tensor], Block], made: list[FakeTensor] | None = None) -> Any:
    if isinstance(result, FakeTensor):
        return result
    if isinstance(result, Tensor):
        tensor = wrap(result, block_of(result))
        if made is not None:
            made.append(tensor)
        return tensor
    if isinstance(result, list):
        return [_wrapped(each, block_of, made) for each in result]
    if isinstance(result, tuple):
        return (
            type(result)(*[_wrapped(each, block_of, made) for each in result])
            if hasattr(result, "_fields")
            else tuple(_wrapped(each, block_of, made) for each in result)
        )
    return result
