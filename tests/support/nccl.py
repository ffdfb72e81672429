"""In place of torch's NCCL backend: its methods and its rules, with ranks as threads and CPU tensors, every call kept.

The signatures are those of `torch._C._distributed_c10d.Backend`. Collectives run when NCCL would launch them: at once,
or at the end of a group call; then all members must have come with the same collectives, as NCCL would hang otherwise.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

PREMULTIPLIED = (torch.float16, torch.float32, torch.float64)
"""Dtypes whose factor torch hands to NCCL as it should."""

Note = tuple[str, int | None, int, torch.dtype, str]
"""A collective: name, root or None, elements of its first tensor, dtype, operation or nothing."""
Asked = tuple[Note, list[Tensor], object]


@dataclass
class FakeWork:
    """A collective that ended when it was launched, unless the backend holds it."""

    held: Sequence[bool] = ()
    """Not empty: it never ends."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Makes the current stream wait: nothing to do here."""
        return True

    def is_completed(self) -> bool:
        """Whether the GPU is through with it."""
        return not self.held

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """Not asked for by transports."""
        raise NotImplementedError


@dataclass
class FakeNcclWorld:
    """What the members of one communicator share."""

    size: int
    timeout_seconds: float = 30.0
    slots: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=self.timeout_seconds)

    def backends(self) -> "list[FakeNccl]":
        """The backends of all members."""
        return [FakeNccl(self, rank) for rank in range(self.size)]


class FakeNccl:
    """One member's backend.

    Attributes:
        launches: For each launch the collectives in it: (name, root or None, elements, dtype, operation).
        timeouts: The group's time-out at each launch.
    """

    def __init__(self, world: FakeNcclWorld, rank: int) -> None:
        self.launches: list[list[Note]] = []
        self.aborts = self.shutdowns = self.connects = 0
        self.holds = False
        self.options = SimpleNamespace(_timeout=timedelta(minutes=10))
        self.timeouts: list[timedelta] = []
        self.fails: str | None = None
        self._world = world
        self._rank = rank
        self._group_call: list[Asked] | None = None

    def name(self) -> str:
        return "nccl"

    def allreduce(self, tensors: list[Tensor], opts: Any) -> FakeWork:
        (tensor,) = tensors
        return self._add("allreduce", None, [tensor], opts.reduceOp)

    def reduce(self, tensors: list[Tensor], opts: Any) -> FakeWork:
        (tensor,) = tensors
        return self._add("reduce", opts.rootRank, [tensor], opts.reduceOp)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> FakeWork:
        (tensor,) = tensors
        return self._add("broadcast", opts.rootRank, [tensor], None)

    def _reduce_scatter_base(
        self,
        outputTensor: Tensor,
        inputTensor: Tensor,
        opts: Any,
    ) -> FakeWork:
        assert inputTensor.numel() == outputTensor.numel() * self._world.size
        self._check_in_place(outputTensor, inputTensor)
        return self._add("reduce_scatter", None, [outputTensor, inputTensor], opts.reduceOp)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any) -> FakeWork:
        assert output.numel() == input.numel() * self._world.size
        self._check_in_place(input, output)
        return self._add("all_gather", None, [output, input], None)

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any,
    ) -> FakeWork:
        assert output_split_sizes == input_split_sizes == [], "unequal parts: fake_cuda has them"
        assert output.numel() == input.numel()
        assert input.numel() % self._world.size == 0
        assert _span(output)[1] <= _span(input)[0] or _span(input)[1] <= _span(output)[0], "never in place"
        return self._add("all_to_all", None, [output, input], None)

    def alltoall(self, outputs: list[Tensor], sources: list[Tensor], opts: Any) -> FakeWork:
        raise AssertionError("unequal parts: fake_cuda has them")

    reduce_scatter_single = _reduce_scatter_base
    all_gather_single = _allgather_base
    all_to_all_single = alltoall_base

    def _start_coalescing(self) -> None:
        assert self._group_call is None, "a group call is open"
        self._group_call = []

    def _end_coalescing(self) -> FakeWork | None:
        assert self._group_call is not None
        group_call, self._group_call = self._group_call, None
        return self._launch(group_call) if group_call else None

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connects += 1
        self._world.barrier.wait()

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    def abort(self) -> None:
        self.aborts += 1
        self._world.barrier.abort()

    def shutdown(self) -> None:
        self.shutdowns += 1

    @property
    def is_in_group_call(self) -> bool:
        """Whether a group call was left open."""
        return self._group_call is not None

    def _add(self, name: str, root: int | None, tensors: list[Tensor], operation: object) -> FakeWork:
        if name == self.fails:
            raise RuntimeError(f"NCCL error: {name} failed")
        for tensor in tensors:
            assert tensor.is_contiguous()
            assert not tensor.is_complex(), "NCCL has no complex dtype"
        if operation is not None:
            if operation == dist.ReduceOp.PREMUL_SUM:
                assert tensors[0].dtype in PREMULTIPLIED, "torch would pass a wrong factor"
            elif operation == dist.ReduceOp.AVG:
                assert tensors[0].is_floating_point()
        call = ((name, root, tensors[0].numel(), tensors[0].dtype, _text(operation)), tensors, operation)
        if self._group_call is not None:
            self._group_call.append(call)
            return FakeWork((True,))  # its work stands for nothing
        return self._launch([call])

    def _launch(self, calls: list[Asked]) -> FakeWork:
        world = self._world
        with _disable_current_modes():
            world.slots[self._rank] = [
                (note[:2] + note[3:], [each.clone() for each in tensors]) for note, tensors, _ in calls
            ]
            world.barrier.wait()
            everybody = list(world.slots)
            world.barrier.wait()
            for index, (note, tensors, operation) in enumerate(calls):
                given = []
                for theirs in everybody:
                    assert len(theirs) == len(calls), "ranks launch other group calls"
                    other, copies = theirs[index]
                    assert other == note[:2] + note[3:], f"ranks launch {other} and {note}"
                    assert copies[-1].numel() == tensors[-1].numel()
                    given.append(copies)
                self._run(note[0], note[1], tensors, given, operation)
        self.launches.append([note for note, _, _ in calls])
        self.timeouts.append(self.options._timeout)
        return FakeWork((True,) if self.holds else ())

    def _run(
        self, name: str, root: int | None, tensors: list[Tensor], given: list[list[Tensor]], operation: object
    ) -> None:
        size, rank = self._world.size, self._rank
        if name in ("allreduce", "reduce"):
            if root in (None, rank):
                tensors[0].copy_(_total([each[0] for each in given], operation))
        elif name == "broadcast":
            assert root is not None
            tensors[0].copy_(given[root][0])
        elif name == "reduce_scatter":
            tensors[0].copy_(_total([each[1] for each in given], operation).view(size, -1)[rank])
        elif name == "all_gather":
            tensors[0].copy_(torch.cat([each[1] for each in given]))
        else:
            tensors[0].copy_(torch.cat([each[1].view(size, -1)[rank] for each in given]))

    def _check_in_place(self, part: Tensor, whole: Tensor) -> None:
        """NCCL: a part that overlaps the whole must be this rank's own part of it."""
        (first, last), (start, stop) = _span(part), _span(whole)
        if first < stop and start < last:
            assert first == start + self._rank * part.nbytes, "not where NCCL wants it in place"


class NoAllocation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails where an operation returns memory of its own larger than a limit.

    Args:
        limit_nbytes: What is allowed.
    """

    def __init__(self, limit_nbytes: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_nbytes = limit_nbytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        known = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in known:
                nbytes = made.untyped_storage().nbytes()
                assert nbytes <= self.limit_nbytes, f"{func} has allocated {nbytes} bytes"
        return result


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _text(operation: object) -> str:
    if operation is None:
        return ""
    for name in ("SUM", "AVG", "PREMUL_SUM"):
        if operation == getattr(dist.ReduceOp, name):
            return name
    raise AssertionError(f"{operation} is none that gradwire uses")


def _total(given: list[Tensor], operation: Any) -> Tensor:
    factor = 1.0
    if operation == dist.ReduceOp.PREMUL_SUM:
        _, factor = operation.__getstate__()
    elif operation == dist.ReduceOp.AVG:
        factor = 1.0 / len(given)
    first, *others = [each * factor if factor != 1.0 else each for each in given]
    total = first.clone()
    for other in others:
        total += other
    return total
