"""Compatibility with torch 2.13 to 2.15: switches between versions, and private names of torch that gradwire uses.

Those of FSDP2 are in comms/sharded/param_groups.py.

New features of torch 2.15 for process groups, and why they are not used:

- Abort hooks (`register_abort_hook`): gloo has none (`supports_abort_hooks` is False), and its `abort` still leaves a
  pending collective to its timeout, so transport/gloo_sockets.py shuts its sockets down itself.
- `reconfigure`, for gloo: gives a group new peers once the ranks have exchanged handles by other means. That exchange
  is the agreement on surviving ranks; `reconfigure` saves only making a group, which 2.13 needs anyway.
- Pre and post hooks (`register_pre_hook`) observe collectives on a ProcessGroup. gradwire's transports are backends
  below one, or not torch's at all.
"""

import gc
import logging
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import lru_cache, wraps
from typing import Any, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d_native
from torch._C._distributed_c10d import AllgatherOptions, GradBucket, HashStore, PrefixStore, Store, TCPStore, Work
from torch.autograd import profiler
from torch.distributed import constants, distributed_c10d
from torch.distributed.distributed_c10d import GroupName
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger("gradwire")

__all__ = [
    "AllgatherOptions",
    "GradBucket",
    "GroupName",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "Work",
]
"""Names of torch that other modules import from here; names defined in this module are not listed."""

_C10D = "torch/include/torch/csrc/distributed/c10d"
RELIED_ON: dict[str, tuple[str, ...]] = {
    "torch/distributed/distributed_c10d.py": ("_World", "_world", "Backend.register_backend"),
    "torch/distributed/constants.py": ("default_pg_timeout", "default_pg_nccl_timeout"),
    "torch/nn/parallel/distributed.py": (
        "DistributedDataParallel.__init__",
        "DistributedDataParallel.__setstate__",
        "DistributedDataParallel.register_comm_hook",
        "DistributedDataParallel._register_builtin_comm_hook",
        "DistributedDataParallel._check_comm_hook",
        "DistributedDataParallel._get_ddp_logging_data",
        "DistributedDataParallel._update_process_group",
        "DistributedDataParallel.require_manual_backward_finalization",
        "DistributedDataParallel.finalize_backward",
    ),
    "torch/_C/_distributed_c10d.pyi": (
        "BuiltinCommHookType",
        "GradBucket",
        "Reducer",
        "Logger",
        "Store",
        "HashStore",
        "TCPStore",
        "PrefixStore",
        "AllgatherOptions",
        "Work",
        "Backend",
        "ProcessGroup",
        "ProcessGroupGloo",
        "ProcessGroupNCCL",
        "_ProcessGroupWrapper",
        "_make_nccl_premul_sum",
    ),
    "torch/_C/__init__.pyi": ("_current_autograd_node", "_nccl_version"),
    "torch/autograd/profiler.py": ("_is_profiler_enabled",),
    "torch/autograd/variable.py": ("Variable",),
    "torch/distributed/optim/apply_optimizer_in_backward.py": ("_apply_optimizer_in_backward",),
    "torch/amp/grad_scaler.py": ("GradScaler.__init__", "GradScaler.get_scale"),
    "torch/_dynamo/eval_frame.py": ("OptimizedModule.__init__",),
    "torch/cuda/nccl.py": ("version",),
    f"{_C10D}/Backend.hpp": (),
    f"{_C10D}/Work.hpp": (),
    f"{_C10D}/ProcessGroupGloo.hpp": (),
}
"""File of torch's wheel -> names in it that this module uses; `make torch-diff` compares them between releases.

A file without names is compared as a whole.
"""

UNDECLARED = ("_dump_fr_trace", "_dump_nccl_trace", "_Options", "_devices", "_threads")
"""Private names of torch's compiled part that no file of the wheel declares; only tests notice if they change."""


class BackendWork(Protocol):
    """Handle of a collective that a torch process group has issued."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Blocks until the work is done, or raises its error. Also raises after the timeout, while the work goes on."""

    def is_completed(self) -> bool:
        """Returns whether the work has ended, with or without an error."""

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """Returns a future of the tensors that the collective changed."""


class TorchGroup(Protocol):
    """Methods of torch's C++ process groups that gradwire calls, under the names of 2.13 and 2.14."""

    def allreduce(self, tensors: list[Tensor], options: object, /) -> BackendWork:
        """Starts an all-reduce of one tensor over the ranks, in place, by the reduce op in `options`."""

    def broadcast(self, tensors: list[Tensor], options: object, /) -> BackendWork:
        """Starts a broadcast of one tensor from the root rank in `options`, in place on the other ranks."""

    def reduce(self, tensors: list[Tensor], options: object, /) -> BackendWork:
        """Starts a reduction of one tensor to the root rank in `options`, in place there.

        The tensors of the other ranks may be overwritten with partial sums, as gloo does.
        """

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_splits: list[int], source_splits: list[int], options: object, /
    ) -> BackendWork:
        """Starts an all-to-all: sends slice r of `source` to rank r, and fills slice r of `output` from it.

        Args:
            output: 1-D tensor, overwritten.
            source: 1-D tensor.
            output_splits: Elements of each slice of `output`; empty if all are equal.
            source_splits: Elements of each slice of `source`; empty if all are equal.
            options: Torch's AllToAllOptions.
        """

    def alltoall(self, outputs: list[Tensor], sources: list[Tensor], options: object, /) -> BackendWork:
        """Starts to send the r-th source to rank r, and to receive the r-th output from it; gloo has no such call."""

    def shutdown(self) -> None:
        """Waits for collectives in flight, then closes connections and threads."""

    def abort(self) -> None:
        """Aborts collectives in flight and closes the connections; may itself take as long as the group's timeout."""

    def _set_default_timeout(self, timeout: timedelta, /) -> None:
        """Sets the timeout of collectives issued from now on."""

    @property
    def options(self) -> Any:
        """Options of the group; `_timeout` is the timeout of a collective."""

    def eager_connect_single_device(self, device: torch.device, /) -> None:
        """Makes NCCL's communicator for a device now, not at the first collective; waits until all ranks call it.

        Args:
            device: CUDA device with an index.
        """

    def _start_coalescing(self) -> None:
        """Begins a group call of NCCL (ncclGroupStart): calls from here on are collected, to be launched together."""

    def _end_coalescing(self) -> BackendWork | None:
        """Launches what NCCL has collected (ncclGroupEnd), and returns one work for all; None if that is nothing."""


class PairwiseGroup(TorchGroup, Protocol):
    """A group with point-to-point messages: gloo."""

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> BackendWork:
        """Starts to send one tensor to one rank, which receives it with the same tag."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> BackendWork:
        """Starts to receive one tensor from one rank, in place; it must be sent with the same tag."""


GLOO_SEGMENT_NBYTES = 1 << 20
"""Bytes that gloo's ring all_reduce sends at a time, at most. Source: gloo, gloo/allreduce.h, kMaxSegmentSize. The
segments and the order of its sums depend on it (gloo/allreduce.cc, `ring`); 16-bit sums are rounded after each
addition."""

GLOO_DTYPES = frozenset(
    (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int8, torch.uint8, torch.int32, torch.int64),
    )
)
"""Dtypes that gloo's collectives support. Source: torch, ProcessGroupGloo.cpp, GENERATE_ALL_TYPES."""

_GLOO_CONNECTION_WORDS = ("gloo/transport/", "gloo/rendezvous/", "pair closure", "Connection closed", "Timed out")
"""Parts of gloo's error messages about a connection; messages about an argument contain none of them."""


def blames_connection(error: BaseException) -> bool:
    """Returns whether an error of gloo is about a connection or a timeout, and not about an argument of the call."""
    return any(words in str(error) for words in _GLOO_CONNECTION_WORDS)


GLOO_SUMS_KNOWN_UP_TO = (2, 15)
"""Newest release of torch whose gloo the tests compare with that order of sums."""


def knows_gloo_sums(version: str = torch.__version__) -> bool:
    """Returns whether the order of gloo's sums is known for a release of torch, such as 2.13.0+cpu."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) <= GLOO_SUMS_KNOWN_UP_TO


def numbers_from_zero(version: str = torch.__version__) -> bool:
    """Returns whether backends of a torch release number collectives by themselves: 2.14 warns if they are told to."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= (2, 14)


def store_of(group: dist.ProcessGroup) -> Store:
    """Returns the store that a process group was made with.

    Raises:
        TypeError: Torch does not know the group.
    """
    if not is_known(group):
        raise TypeError(
            f"`{type(group).__name__}` was not created by torch.distributed, so it has no store through which its "
            "ranks connect; wanted the default group, or one of torch.distributed.new_group()"
        )
    _, store = distributed_c10d._world.pg_map[group]
    return store


def is_known(group: dist.ProcessGroup) -> bool:
    """Returns whether torch.distributed has made a process group; frameworks also make groups of their own."""
    return group in distributed_c10d._world.pg_map


def group_members() -> dict[str, tuple[int, ...]]:
    """Returns the process groups of this rank: name -> members as ranks of the default group, in the group's order."""
    world = distributed_c10d._world
    # A copy, in one step: the watch's thread calls this while the program makes groups.
    names = world.pg_names.copy()
    return {
        name: tuple(sorted(ranks, key=ranks.__getitem__))
        for group, name in names.items()
        if (ranks := world.pg_group_ranks.get(group))
    }


def flight_records(*, collectives: bool, stacks: bool) -> dict[str, dict[str, Any]]:
    """Returns torch's flight recorders, of gloo and, if torch has it, of NCCL.

    Args:
        collectives: Include an entry for each recorded collective, at 30 us each; otherwise only the state of the
            groups, at 10 us.
        stacks: Include the stack that issued each collective, at 300 us each.

    Returns:
        `gloo`, and `nccl` if torch has it -> `pg_status` (number of a group in this process -> numbers of the last
        collectives issued and completed) and `entries`.
    """
    names = {"gloo": "_dump_fr_trace", "nccl": "_dump_nccl_trace"}
    dumps = {key: getattr(c10d_native, name) for key, name in names.items() if hasattr(c10d_native, name)}
    return {key: pickle.loads(dump(collectives, stacks, False)) for key, dump in dumps.items()}


def device_types_of(group: dist.ProcessGroup) -> set[str]:
    """Returns the device types whose tensors a group accepts: `cpu`, `cuda`."""
    return {each.type for each in group._device_types}


def bucket_parameters(model: DistributedDataParallel) -> list[list[tuple[str, int]]]:
    """Returns the parameters of each bucket of a DDP model as (name, elements), in the order of reduction.

    Blocks while a backward pass ends. Empty before the first step, after which DDP knows the order, and for a model
    that another thread is just constructing.
    """
    # DDP's constructor sets the logger last.
    if getattr(model, "logger", None) is None:
        return []
    indices = model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")  # type: ignore[no-untyped-call]
    named = [(name, each.numel()) for name, each in model.module.named_parameters() if each.requires_grad]
    ignored = model.parameters_to_ignore
    named = [(name, numel) for name, numel in named if name not in ignored]
    buckets = [[int(index) for index in bucket.split()] for bucket in str(indices).split(",")]
    if not any(buckets) or max(max(bucket, default=-1) for bucket in buckets) >= len(named):
        return []
    return [[named[index] for index in bucket] for bucket in buckets]


def ddp_models() -> list[DistributedDataParallel]:
    """Returns all DDP models of this process. Any thread may call this.

    They are found as the objects that refer to DDP's class. `gc.get_objects` must not be used: it also returns tuples
    that another thread is just constructing, which fails if their reference count is not one.
    """
    kinds = [DistributedDataParallel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [each for each in gc.get_referrers(*kinds) if issubclass(type(each), DistributedDataParallel)]


def wrap_method(kind: object, name: str, call: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a method of a class by `call(method, self, ...)`, or a module's function, for calls from Python.

    Args:
        kind: Class whose method is replaced, or module whose function is.
        name: Name of the method.
        call: Called with the original method and its arguments.

    Returns:
        Function that restores the method, unless it has been replaced again since.
    """
    method = getattr(kind, name)

    def wrapped(*arguments: object, **named: object) -> object:
        return call(method, *arguments, **named)

    def undo() -> None:
        if getattr(kind, name) is wrapped:
            setattr(kind, name, method)

    setattr(kind, name, wrapped)
    return undo


def make_gloo(store: Store, rank: int, size: int, timeout: timedelta, interfaces: Sequence[str] = ()) -> TorchGroup:
    """Makes a gloo group outside torch's registry: only its members take part in making it.

    Blocks until all of them have connected.

    Args:
        store: Store with a prefix of its own for this group.
        rank: Index of this rank in the group.
        size: Number of ranks.
        timeout: Timeout of connecting and of every collective.
        interfaces: Network interfaces, used in rotation, with two threads each. Empty uses the one in
            GLOO_SOCKET_IFNAME, or else the one that the host name resolves to.
    """
    if not interfaces:
        return cast(TorchGroup, dist.ProcessGroupGloo(store, rank, size, timeout))
    # torch's stubs lack _Options.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in interfaces]
    options._threads = 2 * len(options._devices)
    return cast(TorchGroup, dist.ProcessGroupGloo(store, rank, size, options))


def make_nccl(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    *,
    name: str,
    global_ranks: Sequence[int],
    max_ctas: int | None = None,
) -> TorchGroup:
    """Makes an NCCL group outside torch's registry, not connected yet.

    In torch 2.15, too, the class ProcessGroupNCCL is the implementation whose coalescing makes one NCCL group call,
    whichever one has the name `nccl`.

    Args:
        store: Store in C++, with a prefix of its own for this group.
        rank: Index of this rank in the group.
        size: Number of ranks.
        timeout: Timeout of every collective.
        name: Name of the group in the flight recorder and in logs.
        global_ranks: Members as ranks of the default group, for the same readers.
        max_ctas: Thread blocks per collective, at most; None leaves it to NCCL.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    # The constructor of the group reads both.
    options.global_ranks_in_group = list(global_ranks)
    options.group_name = GroupName(name)
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return cast(TorchGroup, dist.ProcessGroupNCCL(store, rank, size, options))


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta:
    """Returns the timeout of collectives of a process group's backend for a device.

    It is torch's default for that type of device if the backend has none (MPI), or without a group.
    """
    backend: Any = group
    try:
        backend = None if group is None else group._get_backend(device)
    except RuntimeError:
        # No backend for this type of device: one written in Python is the group itself.
        log.debug("%s has no backend for %s: its own options count", group, device)
    wrapper = getattr(torch._C._distributed_c10d, "_ProcessGroupWrapper", None)  # not in every build
    if wrapper is not None and isinstance(backend, wrapper):
        backend = backend.wrapped_pg
    for holder in (backend, getattr(backend, "options", None), getattr(backend, "config", None)):
        for name in ("_timeout", "timeout"):
            found = getattr(holder, name, None)
            if isinstance(found, timedelta) and found > timedelta(0):
                return found
    # torch's constant is None without NCCL.
    of_nccl = constants.default_pg_nccl_timeout if device.type == "cuda" else None
    return of_nccl or constants.default_pg_timeout


NCCL_NAMES = ("nccl", "nccl2")
"""Names of torch's NCCL backends; from 2.15 on `nccl2` is the implementation behind the name `nccl`."""


def nccl_backend_of(group: dist.ProcessGroup, device: torch.device) -> TorchGroup | None:
    """Returns the NCCL backend of a process group for a device; None if the backend is another one.

    Others are gloo, backends that users have registered, and the wrapper that TORCH_DISTRIBUTED_DEBUG=DETAIL puts
    around every backend, which compares shapes over gloo before each collective.
    """
    try:
        backend = group._get_backend(device)
    except RuntimeError:
        # No backend for this type of device.
        return None
    wrapper = getattr(torch._C._distributed_c10d, "_ProcessGroupWrapper", None)  # not in every build
    if (wrapper is not None and isinstance(backend, wrapper)) or backend.name() not in NCCL_NAMES:
        return None
    return cast(TorchGroup, backend)


def nccl_has_run() -> bool:
    """Returns whether a registered group has an NCCL communicator: then NCCL has read its environment variables."""
    for group in list(distributed_c10d._world.pg_map):
        backend = nccl_backend_of(group, torch.device("cuda"))
        if backend is not None and getattr(backend, "_is_initialized", lambda: True)():
            return True
    return False


def nccl_version() -> tuple[int, ...]:
    """Returns the version of NCCL that torch uses; empty for a torch without NCCL."""
    if not hasattr(torch._C, "_nccl_version"):
        return ()
    return tuple(torch.cuda.nccl.version()[:3])  # type: ignore[no-untyped-call]


def makes_group_calls(backend: TorchGroup) -> bool:
    """Returns whether coalescing on this NCCL backend makes one group call of several collectives.

    The backend `nccl2` of torch 2.15 coalesces only sends and receives: a collective inside is issued at once, and the
    work that `_end_coalescing` returns does not include it.
    """
    return dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL)


@lru_cache(maxsize=64)
def premultiplied_sum(factor: float) -> dist.ReduceOp:
    """Returns NCCL's PreMulSum: the sum over ranks of `factor` times their tensors.

    Use it only for float16, float32 and float64. For bfloat16, torch's ProcessGroupNCCL passes NCCL the address of a
    float32, of which NCCL reads the lower half, so that 0.25 becomes 0 (unpackPreMulSum<float, ncclBfloat16> in
    ProcessGroupNCCL.cpp; `nccl2` of torch 2.15 passes a bfloat16).
    """
    return torch._C._distributed_c10d._make_nccl_premul_sum(factor)


def factor_of(op: object) -> float | None:
    """Returns the factor of a PREMUL_SUM, which FSDP2 uses for its gradient divide factor.

    None for any other op, and for a factor that is not one number on the CPU.
    """
    if op != dist.ReduceOp.PREMUL_SUM or not isinstance(op, dist.ReduceOp):
        return None
    state: object = op.__getstate__()
    if not isinstance(state, tuple) or len(state) != 2:
        return None
    _, factor = state
    if isinstance(factor, Tensor):
        return float(factor) if factor.numel() == 1 and factor.device.type == "cpu" else None
    return float(factor)


_RENAMED = hasattr(dist.ProcessGroupGloo, "all_gather_single") and hasattr(dist.ProcessGroupGloo, "all_to_all_single")
ALL_GATHER_SINGLE = "all_gather_single" if _RENAMED else "_allgather_base"
"""Method of torch's groups: (output, source, options), flat tensors; renamed in torch 2.15."""
ALL_TO_ALL_SINGLE = "all_to_all_single" if _RENAMED else "alltoall_base"
"""Method of torch's groups: (output, source, output splits, source splits, options), flat tensors; renamed in 2.15."""
REDUCE_SCATTER_SINGLE = "reduce_scatter_single" if _RENAMED else "_reduce_scatter_base"
"""Method of torch's groups: (output, source, options), flat tensors; renamed in torch 2.15."""


def queue_end_of_backward(callback: Callable[[], None]) -> bool:
    """Lets autograd call `callback()` at the end of the running backward pass.

    Returns:
        False if no backward pass is running (a rank that has joined early calls hooks from outside).
    """
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True


_behind_finalization: "WeakKeyDictionary[torch.nn.Module, Callable[[], None]]" = WeakKeyDictionary()
"""DDP model -> what is called once its script has called `finalize_backward()`."""


def call_behind_finalization(model: torch.nn.Module, callback: Callable[[], None]) -> bool:
    """Calls `callback()` after the next `finalize_backward()` of a DDP model, if its script is to call that.

    Torch 2.15 lets it; only that call copies the averages into the gradients then. It is seen once
    `follow_finalizations` was called.

    Returns:
        False if torch finalizes the backward passes of the model, as always before 2.15.
    """
    if not getattr(model, "require_manual_backward_finalization", False):
        return False
    _behind_finalization[model] = callback
    return True


@lru_cache(maxsize=1)
def follow_finalizations() -> None:
    """Wraps DDP's `finalize_backward`, if torch has it, for `call_behind_finalization`."""

    def finalize(method: Callable[..., None], model: torch.nn.Module) -> None:
        method(model)
        _behind_finalization.pop(model, lambda: None)()

    if hasattr(DistributedDataParallel, "finalize_backward"):
        wrap_method(DistributedDataParallel, "finalize_backward", finalize)


def is_at_node() -> bool:
    """Returns whether this thread is at a node of a backward pass.

    At the end of a pass this is true if the pass ran inside another one, as in a reentrant checkpoint.
    """
    return torch._C._current_autograd_node() is not None


def profiler_is_on() -> bool:
    """Returns whether a torch profiler, `torch.profiler.profile` or `emit_nvtx`, is active in any thread.

    torch keeps this in a global variable, by which `torch.optim` omits its ranges without a profiler (2.13 to 2.15).
    """
    return bool(profiler._is_profiler_enabled)


def device_scale_of(scaler: object) -> Tensor | None:
    """Returns the scale of a torch.amp.GradScaler as a 0-dim CUDA tensor, without waiting for the device.

    None if it is not on a CUDA device; then `get_scale()` returns it without waiting, too.
    """
    scale = getattr(scaler, "_scale", None)
    return scale if isinstance(scale, Tensor) and scale.is_cuda else None


Method = TypeVar("Method", bound=Callable[..., object])


def outside_graphs(method: Method) -> Method:
    """Excludes a method from torch.compile, however deep in a compiled function it is called.

    Same as `torch.compiler.disable`, but applied at the first call after torch._dynamo was imported: importing it takes
    seconds, and without it nothing is compiled.
    """
    disabled: list[Callable[..., object]] = []

    @wraps(method)
    def call(*arguments: object, **named: object) -> object:
        if not disabled and "torch._dynamo" in sys.modules:
            disabled.append(torch.compiler.disable(method))  # type: ignore[no-untyped-call]
        return (disabled[0] if disabled else method)(*arguments, **named)

    return cast(Method, call)


CAPTURED = (
    "a CUDA graph is being captured, and gradwire's hook was called in it: each step issues other collectives than the "
    "one before (plans, residuals, timed steps), which a graph cannot hold. Capture forward and backward without "
    "DistributedDataParallel's hook, or leave torch.cuda.graph out of the training step"
)

PYTHON_REDUCER = (
    'torch.compile with optimize_ddp="python_reducer" calls the hook once a parameter from inside a compiled '
    "graph, which gradwire does not support: leave torch._dynamo.config.optimize_ddp at its default, "
    "with which compiled models work"
)

MIXED_PRECISION = (
    "`model` was made with DDP's `mixed_precision`, for which DDP registers a hook of its own, and it takes one: leave "
    'that option out, compute in torch.autocast, and send 16 bits with compressor="bf16"; or train without gradwire\'s '
    "hook"
)

STEPS_IN_BACKWARD = (
    "has parameters whose optimizer steps in backward (_apply_optimizer_in_backward), for which DDP registers a hook "
    "of its own in the first forward pass, and it takes one: step the optimizer after backward, or train without "
    "gradwire's hook"
)


def steps_in_backward(model: torch.nn.Module) -> bool:
    """Returns whether DDP will register its own hook in the first forward pass: an optimizer steps in backward.

    Only parameters that DDP averages count, as in `DistributedDataParallel._setup_in_backward_optimizers`.
    """
    parameters = getattr(model, "_module_parameters", None) or model.parameters()
    return any(hasattr(each, "_in_backward_optimizers") for each in parameters)


SHARDED = {"FullyShardedDataParallel": "FSDP", "FSDPModule": "FSDP2", "DeepSpeedEngine": "DeepSpeed"}
"""Class of a model whose gradients DDP does not average -> name of its framework in messages."""


def why_no_ddp_hook(model: torch.nn.Module) -> str | None:
    """Returns an error message if a model is or contains a sharded module, which calls no DDP hook; else None."""
    for module in model.modules():
        for base in type(module).__mro__:
            if base.__name__ in SHARDED:
                sharded = SHARDED[base.__name__]
                own_call = (
                    "gradwire.fsdp.apply(model, ...) compresses its gradients, and " if sharded == "FSDP2" else ""
                )
                named = "a" if module is model else f"a {type(model).__name__} with a"
                return (
                    f"{named} {type(module).__name__}: {sharded} reduces its gradients itself and takes no DDP hook; "
                    f"{own_call}as the backend gradwire plans its collectives: "
                    'torch.distributed.init_process_group("gradwire")'
                )
    return None


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Arguments with which torch makes a process group; ranks are those of the new group, not of the world.

    Attributes:
        store: Store with a prefix of its own for this group and device.
        group_rank: Rank of this process in the group.
        group_size: Number of ranks of the group.
        timeout: Timeout of every collective.
        group_id: Name of the group, unique in this process.
        global_ranks_in_group: Members as ranks of the default group; empty for the default group itself.
    """

    store: Store
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]

    @classmethod
    def of(cls, given: object) -> "GroupOptions":
        """Copies the options that torch passes to the creator of a backend; they have the same names."""
        return cls(*(getattr(given, entry.name) for entry in fields(cls)))


def clone_of(store: Store) -> Store:
    """Opens a second connection to a store, which does not keep the server of a TCPStore alive.

    A server that outlives its group would still hold the old keys when the process group is made again on its port.
    """
    # torch's stubs lack clone.
    return cast(Store, store.clone())  # type: ignore[attr-defined]


def register_backends(groups: list[dist.ProcessGroup], options: GroupOptions) -> list[object]:
    """Registers torch's own backends on `groups`, one per device type, made once and shared by all groups.

    CPU tensors use gloo; CUDA tensors use NCCL, or gloo in a torch built without NCCL.

    Args:
        groups: Process groups, changed in place.
        options: Options of the backends.

    Returns:
        The backends; the caller keeps them alive.
    """
    backend_type = dist.ProcessGroup.BackendType
    gloo = dist.ProcessGroupGloo(
        PrefixStore("gloo", options.store), options.group_rank, options.group_size, options.timeout
    )
    made: list[tuple[torch.device, dist.ProcessGroup.BackendType, dist.ProcessGroupGloo | dist.ProcessGroupNCCL]] = [
        (torch.device("cpu"), backend_type.GLOO, gloo)
    ]
    if torch.cuda.is_available():
        cuda = torch.device("cuda")
        if dist.is_nccl_available():
            made.append((cuda, backend_type.NCCL, _lazy_nccl(options)))
        else:
            made.append((cuda, backend_type.GLOO, gloo))
    # What torch's own constructor of process groups sets on backends.
    for _, _, backend in made:
        backend.options.global_ranks_in_group = options.global_ranks_in_group
        backend.options.group_name = GroupName(options.group_id)
        if not numbers_from_zero():
            backend._set_sequence_number_for_group()
    for group in groups:
        group._set_default_backend(backend_type.GLOO)
        for device, kind, backend in made:
            group._register_backend(device, kind, backend)
    return [backend for _, _, backend in made]


def _lazy_nccl(options: GroupOptions) -> "dist.ProcessGroupNCCL":
    """Makes an NCCL backend that connects at its first collective."""
    nccl_options = dist.ProcessGroupNCCL.Options()
    nccl_options._timeout = options.timeout
    return dist.ProcessGroupNCCL(
        PrefixStore("nccl", options.store), options.group_rank, options.group_size, nccl_options
    )


REGISTER_BUILTIN = "_register_builtin_comm_hook"
"""Method of DDP (self, BuiltinCommHookType) that registers a hook written in C++."""


def swap_process_group(model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Lets a DDP model use another process group from now on, for its buffers and the order of its buckets.

    DDP rebuilds its buckets in the second forward pass after this, as after the first step.
    """
    model._update_process_group(group)  # type: ignore[no-untyped-call]


COMPILED_INSIDE = "_orig_mod"
"""Attribute of the module that `torch.compile` returns, with the module it was given."""


def comm_hook_name(model: DistributedDataParallel) -> str:
    """Returns the name of the hook registered on a DDP model, built-in ones included; empty if there is none."""
    return str(model._get_ddp_logging_data().get("comm_hook", ""))  # type: ignore[no-untyped-call]


def registered_hook(model: DistributedDataParallel) -> Callable[..., object] | None:
    """Returns the hook that was passed to a DDP model's `register_comm_hook`; None if that was not called."""
    return next((hook for hook, _ in model._comm_hooks), None)


def rename_comm_hook(model: DistributedDataParallel, hook: Callable[..., object], state: object) -> None:
    """Records another hook as the registered one. DDP still calls the first hook, which forwards to this one.

    Args:
        model: DDP model, whose log and list of hooks are changed.
        hook: Hook to record.
        state: State of the hook.

    Raises:
        ValueError: The hook's annotations are not those of a hook.
        TypeError: It is not callable.
    """
    model._check_comm_hook(hook)  # type: ignore[no-untyped-call]
    model.logger._set_comm_hook_name(hook.__qualname__)  # type: ignore[union-attr]
    model._comm_hooks[:] = [(hook, state)]
