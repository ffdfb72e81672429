"""Switches between torch versions, and private names of torch that gradwire uses. Written for 2.13 to 2.15.

Those of FSDP2 are in comms/sharded/param_groups.py.

What 2.15 brings for process groups, and why nothing here uses it:

- Abort hooks (`register_abort_hook`): gloo has none (`supports_abort_hooks` is False), and its `abort` still leaves a
  pending collective to its time-out, so transport/torch_group.py goes on shutting its sockets down.
- `reconfigure`, with gloo: gives a group new peers once the ranks have exchanged handles by other means. To agree on
  the survivors is that other means; what it saves is making a group, which 2.13 needs anyway.
- Pre and post hooks (`register_pre_hook`) see what is issued on a ProcessGroup. gradwire's transports are backends
  below one, or none of torch's.
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
]  # passed on, besides what is defined below

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
"""File of torch's wheel -> names in it that this module relies on: what `make torch-diff` compares between releases.

A file without names is compared as a whole.
"""

UNDECLARED = ("_dump_fr_trace", "_dump_nccl_trace", "_Options", "_devices", "_threads")
"""Private names of the compiled part that no file of the wheel declares; the tests on a new release meet them."""


class BackendWork(Protocol):
    """What a torch process group returns for a collective it has issued."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Blocks until done; raises what went wrong. With a time-out: raises when it is over, the work goes on."""

    def is_completed(self) -> bool:
        """Whether it is done, well or not."""

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """Completed with the tensors that were changed."""


class TorchGroup(Protocol):
    """The methods of torch's C++ process groups that gradwire calls, under the names of 2.13 and 2.14."""

    def allreduce(self, tensors: list[Tensor], options: object, /) -> BackendWork:
        """Sums in place."""

    def broadcast(self, tensors: list[Tensor], options: object, /) -> BackendWork:
        """Copies from a root, in place."""

    def reduce(self, tensors: list[Tensor], options: object, /) -> BackendWork:
        """Sums on a root, in place there; what the others give is unchanged."""

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_splits: list[int], source_splits: list[int], options: object, /
    ) -> BackendWork:
        """Exchanges slices of flat tensors."""

    def alltoall(self, outputs: list[Tensor], sources: list[Tensor], options: object, /) -> BackendWork:
        """Sends the r-th source to rank r, and takes what it sends into the r-th output; gloo has no such call."""

    def shutdown(self) -> None:
        """Waits for what is under way, and ends connections and threads."""

    def abort(self) -> None:
        """Gives up what is under way, and the connections; may itself take as long as the group's time-out."""

    def _set_default_timeout(self, timeout: timedelta, /) -> None:
        """Sets the time-out of what is issued from now on."""

    @property
    def options(self) -> Any:
        """What the group was made with; `_timeout` is a collective's time-out."""

    def eager_connect_single_device(self, device: torch.device, /) -> None:
        """Connects the ranks at once, not at their first collective; returns when all of them have joined."""

    def _start_coalescing(self) -> None:
        """Begins one group call of NCCL: what is issued from here on is under way together."""

    def _end_coalescing(self) -> BackendWork | None:
        """Ends the group call and launches it; the work of all of it. None where it is empty."""


class PairwiseGroup(TorchGroup, Protocol):
    """A group whose ranks can send to each other one by one: gloo."""

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> BackendWork:
        """Sends one tensor to one rank."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> BackendWork:
        """Receives one tensor from one rank, in place."""


GLOO_SEGMENT_NBYTES = 1 << 20
"""The most that gloo's ring all_reduce sends at a time. Source: gloo, gloo/allreduce.h, kMaxSegmentSize. With it go the
cuts and the order of its sums (gloo/allreduce.cc, `ring`), and that it rounds 16-bit sums after each addition."""

GLOO_DTYPES = frozenset(
    (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int8, torch.uint8, torch.int32, torch.int64),
    )
)
"""What gloo's collectives have elements of. Source: torch, ProcessGroupGloo.cpp, GENERATE_ALL_TYPES."""

_GLOO_CONNECTION_WORDS = ("gloo/transport/", "gloo/rendezvous/", "pair closure", "Connection closed", "Timed out")
"""What is in gloo's errors about a connection; those about an argument have none of them."""


def blames_connection(error: BaseException) -> bool:
    """Whether an error of gloo is about a connection, or a time-out, and not about an argument of the call."""
    return any(words in str(error) for words in _GLOO_CONNECTION_WORDS)


GLOO_SUMS_KNOWN_UP_TO = (2, 15)
"""The newest torch supported, whose gloo the tests compare with that order: of a later one nobody knows."""


def knows_gloo_sums(version: str = torch.__version__) -> bool:
    """Whether the order of gloo's sums is known of a release of torch, 2.13.0+cpu."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) <= GLOO_SUMS_KNOWN_UP_TO


def store_of(group: dist.ProcessGroup) -> Store:
    """The store that a process group was made with.

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
    """Whether torch.distributed has made a process group; frameworks make some that stand for what is theirs."""
    return group in distributed_c10d._world.pg_map


def group_members() -> dict[str, tuple[int, ...]]:
    """The process groups that this rank is in: name -> its ranks in the default group, in the group's order."""
    world = distributed_c10d._world
    names = world.pg_names.copy()  # at once: the watch's thread asks while the program makes groups
    return {
        name: tuple(sorted(ranks, key=ranks.__getitem__))
        for group, name in names.items()
        if (ranks := world.pg_group_ranks.get(group))
    }


def flight_records(*, collectives: bool, stacks: bool) -> dict[str, dict[str, Any]]:
    """What torch's flight recorders hold, of gloo and, where torch has it, of NCCL.

    Args:
        collectives: With an entry for each collective that is kept; else the state of the groups alone, which costs
            10 us and not 30 us a collective.
        stacks: With the lines that issued them: 300 us a collective.

    Returns:
        `gloo`, and `nccl` where torch has it -> `pg_status` (this process's number of a group -> numbers of the last
        collectives issued and ended) and `entries`.
    """
    names = {"gloo": "_dump_fr_trace", "nccl": "_dump_nccl_trace"}
    dumps = {key: getattr(c10d_native, name) for key, name in names.items() if hasattr(c10d_native, name)}
    return {key: pickle.loads(dump(collectives, stacks, False)) for key, dump in dumps.items()}


def device_types_of(group: dist.ProcessGroup) -> set[str]:
    """The types of the devices whose tensors a group takes: `cpu`, `cuda`."""
    return {each.type for each in group._device_types}


def bucket_parameters(model: DistributedDataParallel) -> list[list[tuple[str, int]]]:
    """The parameters of each bucket of a DDP model as (name, elements), in the order in which buckets are reduced.

    Waits while a backward pass ends. Empty before the first step has told DDP that order, and of a model that another
    thread is just making.
    """
    if getattr(model, "logger", None) is None:  # the last thing that DDP makes
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
    """The DDP models of this process, whoever holds them. Any thread.

    Among all objects of the garbage collector, those that refer to DDP's class: its instances do. All objects
    themselves (`gc.get_objects`) must not be held: a tuple that another thread is just making fails where somebody else
    holds it, too.
    """
    kinds = [DistributedDataParallel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [each for each in gc.get_referrers(*kinds) if issubclass(type(each), DistributedDataParallel)]


def wrap_method(kind: type, name: str, call: Callable[..., Any]) -> Callable[[], None]:
    """Has `call(method, self, ...)` run in place of a method of one of torch's C++ classes, for calls from Python.

    Returns:
        Puts the method back, unless another one has taken its place since.
    """
    method = getattr(kind, name)

    def wrapped(*arguments: object, **named: object) -> object:
        return call(method, *arguments, **named)

    def undo() -> None:
        if getattr(kind, name) is wrapped:
            setattr(kind, name, method)

    setattr(kind, name, wrapped)
    return undo


def make_gloo(
    store: Store, rank: int, size: int, timeout: timedelta, interfaces: Sequence[str] = (), threads: int | None = None
) -> TorchGroup:
    """A gloo group of its own, outside torch's registry: only its members take part in making it.

    Args:
        store: A store with a prefix of its own for this group.
        rank: This rank's index in the group.
        size: Number of ranks.
        timeout: For the connection and for every collective.
        interfaces: Network interfaces to use in turns; none takes the one that the hostname resolves to, or, where
            `threads` is None too, what GLOO_SOCKET_IFNAME says.
        threads: Each has one collective under way; None leaves it to torch, which has two for each interface.
    """
    if not interfaces and threads is None:
        return cast(TorchGroup, dist.ProcessGroupGloo(store, rank, size, timeout))
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's annotations leave it out
    options._timeout = timeout
    made = [dist.ProcessGroupGloo.create_device(interface=name) for name in interfaces]
    options._devices = made or [dist.ProcessGroupGloo.create_default_device()]
    options._threads = 2 * len(options._devices) if threads is None else threads
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
    """An NCCL group of its own, outside torch's registry, not connected yet.

    Torch 2.15 names the class ProcessGroupNCCL too, whichever implementation is behind the name `nccl`: this is always
    the one whose coalescing makes one group call of NCCL.

    Args:
        store: A store of C++, with a prefix of its own for this group.
        rank: This rank's index in the group.
        size: Number of ranks.
        timeout: For every collective.
        name: What the flight recorder and logs call the group.
        global_ranks: The members' ranks in the default group, for the same readers.
        max_ctas: Thread blocks that a collective of this group may take; None leaves it to NCCL.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    options.global_ranks_in_group = list(global_ranks)  # before the group is made: its constructor reads both
    options.group_name = GroupName(name)
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return cast(TorchGroup, dist.ProcessGroupNCCL(store, rank, size, options))


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta:
    """How long a process group's backend for a device gives a collective.

    Torch's own default for that type of device where the backend does not say (MPI has no time-out), or without a
    group.
    """
    backend: Any = group
    try:
        backend = None if group is None else group._get_backend(device)
    except RuntimeError:  # none for this type of device: a backend written in Python is the group itself
        log.debug("%s has no backend for %s: its own options count", group, device)
    wrapper = getattr(torch._C._distributed_c10d, "_ProcessGroupWrapper", None)  # not in every build
    if wrapper is not None and isinstance(backend, wrapper):
        backend = backend.wrapped_pg
    for holder in (backend, getattr(backend, "options", None), getattr(backend, "config", None)):
        for name in ("_timeout", "timeout"):
            found = getattr(holder, name, None)
            if isinstance(found, timedelta) and found > timedelta(0):
                return found
    of_nccl = constants.default_pg_nccl_timeout if device.type == "cuda" else None  # None without NCCL, too
    return of_nccl or constants.default_pg_timeout


NCCL_NAMES = ("nccl", "nccl2")
"""What NCCL backends of torch call themselves; `nccl2` is what is behind the name `nccl` from 2.15 on."""


def nccl_backend_of(group: dist.ProcessGroup, device: torch.device) -> TorchGroup | None:
    """The NCCL backend with which a process group serves a device; None where that is another one.

    Another one is gloo, what a user has registered, or the wrapper that TORCH_DISTRIBUTED_DEBUG=DETAIL puts around
    every backend, which compares shapes over gloo before each collective.
    """
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # no backend for this type of device
        return None
    wrapper = getattr(torch._C._distributed_c10d, "_ProcessGroupWrapper", None)  # not in every build
    if (wrapper is not None and isinstance(backend, wrapper)) or backend.name() not in NCCL_NAMES:
        return None
    return cast(TorchGroup, backend)


def nccl_has_run() -> bool:
    """Whether a communicator of NCCL is there already in a registered group: NCCL has read its variables then."""
    for group in list(distributed_c10d._world.pg_map):
        backend = nccl_backend_of(group, torch.device("cuda"))
        if backend is not None and getattr(backend, "_is_initialized", lambda: True)():
            return True
    return False


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that torch calls; empty in a torch without it."""
    if not hasattr(torch._C, "_nccl_version"):
        return ()
    return tuple(torch.cuda.nccl.version()[:3])  # type: ignore[no-untyped-call]


def makes_group_calls(backend: TorchGroup) -> bool:
    """Whether coalescing on this NCCL backend makes one group call of several collectives.

    That of torch 2.15 (`nccl2`) collects sends and receives alone: a collective inside is issued at once, and the work
    that `_end_coalescing` returns does not stand for it.
    """
    return dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL)


@lru_cache(maxsize=64)
def premultiplied_sum(factor: float) -> dist.ReduceOp:
    """NCCL's PreMulSum: the sum of `factor` times what each rank gives.

    For float16, float32 and float64 alone. Where the dtype is bfloat16, torch's ProcessGroupNCCL hands NCCL the address
    of a float32, of which NCCL reads the lower half (unpackPreMulSum<float, ncclBfloat16> in ProcessGroupNCCL.cpp; that
    of torch 2.15's `nccl2` passes a bfloat16): 0.25 becomes 0.
    """
    return torch._C._distributed_c10d._make_nccl_premul_sum(factor)


def factor_of(op: object) -> float | None:
    """The factor of a PREMUL_SUM, which FSDP2 issues for a gradient divide factor; None for any other op."""
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
    """Has autograd call `callback()` at the end of the running backward pass.

    Returns:
        False where no backward pass is running (a rank that has joined early calls hooks from outside).
    """
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True


def is_at_node() -> bool:
    """Whether this thread is at a node of a backward pass.

    At the end of a pass it is where another one has run that pass, as a reentrant checkpoint does.
    """
    return torch._C._current_autograd_node() is not None


def profiler_is_on() -> bool:
    """Whether a profiler of torch runs in this process, `torch.profiler.profile` or `emit_nvtx`, whatever its threads.

    torch keeps it in a global variable, for `torch.optim` to leave its own ranges out otherwise (2.13 to 2.15).
    """
    return bool(profiler._is_profiler_enabled)


def device_scale_of(scaler: object) -> Tensor | None:
    """The scale of a torch.amp.GradScaler, 0-dim on its device; None where the host has it, and asks `get_scale()`.

    `get_scale()` itself waits for the device.
    """
    scale = getattr(scaler, "_scale", None)
    return scale if isinstance(scale, Tensor) and scale.is_cuda else None


Method = TypeVar("Method", bound=Callable[..., object])


def outside_graphs(method: Method) -> Method:
    """Has torch.compile leave a method alone, however deep in a compiled function it is called.

    Does what `torch.compiler.disable` does, from the first call at which torch._dynamo is there: importing it takes
    seconds, and without it nothing is compiled.
    """
    disabled: list[Callable[..., object]] = []

    @wraps(method)
    def call(*arguments: object, **named: object) -> object:
        if not disabled and "torch._dynamo" in sys.modules:
            disabled.append(torch.compiler.disable(method))  # type: ignore[no-untyped-call]  # has no types
        return (disabled[0] if disabled else method)(*arguments, **named)

    return cast(Method, call)


STEPS_IN_BACKWARD = (
    "has parameters whose optimizer steps in backward (_apply_optimizer_in_backward), for which DDP registers a hook "
    "of its own in the first forward pass, and it takes one: step the optimizer after backward, or train without "
    "gradwire's hook"
)


def steps_in_backward(model: torch.nn.Module) -> bool:
    """Whether DDP is going to register its own hook in the first forward pass, for an optimizer that steps in backward.

    Of parameters that DDP averages alone, as in `DistributedDataParallel._setup_in_backward_optimizers`.
    """
    parameters = getattr(model, "_module_parameters", None) or model.parameters()
    return any(hasattr(each, "_in_backward_optimizers") for each in parameters)


SHARDED = {"FullyShardedDataParallel": "FSDP", "FSDPModule": "FSDP2", "DeepSpeedEngine": "DeepSpeed"}
"""Class of a model whose gradients DDP does not average -> how its users call it."""


def why_no_ddp_hook(model: torch.nn.Module) -> str | None:
    """Why a DDP hook would never be called for a model that is sharded, or that has a sharded module; else None."""
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
    """What a process group is made with; ranks are those of the new group, not of the world.

    Attributes:
        store: The store, with a prefix of its own for this group and device.
        group_rank: This rank in the group.
        group_size: Ranks of the group.
        timeout: The time-out of every collective.
        group_id: The group's name, unique in this process.
        global_ranks_in_group: Empty for the default group.
    """

    store: Store
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]

    @classmethod
    def of(cls, given: object) -> "GroupOptions":
        """What torch passes to the creator of a backend, under the same names."""
        return cls(*(getattr(given, entry.name) for entry in fields(cls)))


def clone_of(store: Store) -> Store:
    """A connection of its own to the same keys, which does not keep the server of a TCPStore alive.

    A server that outlives its group would still hold the old keys when the process group is made anew on its port.
    """
    return cast(Store, store.clone())  # type: ignore[attr-defined]  # missing from torch's stubs


def register_backends(groups: list[dist.ProcessGroup], options: GroupOptions) -> list[object]:
    """Gives `groups` the exact backends of torch, one for each device type, made once and shared by all of them.

    CPU tensors go to gloo; CUDA tensors to NCCL, or to gloo in a torch built without NCCL.

    Returns:
        The backends, to be kept alive.
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
    for _, _, backend in made:
        backend.options.global_ranks_in_group = options.global_ranks_in_group
        backend.options.group_name = GroupName(options.group_id)
        backend._set_sequence_number_for_group()
    for group in groups:
        group._set_default_backend(backend_type.GLOO)
        for device, kind, backend in made:
            group._register_backend(device, kind, backend)
    return [backend for _, _, backend in made]


def _lazy_nccl(options: GroupOptions) -> "dist.ProcessGroupNCCL":
    nccl_options = dist.ProcessGroupNCCL.Options()
    nccl_options._timeout = options.timeout
    return dist.ProcessGroupNCCL(
        PrefixStore("nccl", options.store), options.group_rank, options.group_size, nccl_options
    )


REGISTER_BUILTIN = "_register_builtin_comm_hook"
"""DDP's method (self, BuiltinCommHookType) that registers a hook written in C++."""


def swap_process_group(model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Has a DDP model use another process group from now on, for its buffers and the order of its buckets.

    Torch's own method for it. The buckets are built anew in the next forward pass but one, as after the first step.
    """
    model._update_process_group(group)  # type: ignore[no-untyped-call]


COMPILED_INSIDE = "_orig_mod"
"""What the module that `torch.compile` returns calls the module it was given."""


def comm_hook_name(model: DistributedDataParallel) -> str:
    """The name of the hook that was registered on a DDP model, a built-in one included; empty where none was."""
    return str(model._get_ddp_logging_data().get("comm_hook", ""))  # type: ignore[no-untyped-call]


def registered_hook(model: DistributedDataParallel) -> Callable[..., object] | None:
    """The hook that a DDP model was given by `register_comm_hook`; None where that was not called."""
    return next((hook for hook, _ in model._comm_hooks), None)


def rename_comm_hook(model: DistributedDataParallel, hook: Callable[..., object], state: object) -> None:
    """Notes another hook in place of the one that DDP calls, which passes on to it from now on.

    Raises:
        ValueError: The hook's annotations are not those of a hook.
        TypeError: It cannot be called.
    """
    model._check_comm_hook(hook)  # type: ignore[no-untyped-call]
    model.logger._set_comm_hook_name(hook.__qualname__)  # type: ignore[union-attr]
    model._comm_hooks[:] = [(hook, state)]
