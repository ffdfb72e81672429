"""Runs the all-reduces of a process group by a plan, where that is faster; here they are chosen, and made flat."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.backend.strided import is_plain, overwrite
from gradwire.comms.backend.work import FutureTensors, FutureWork, finished
from gradwire.comms.bootstrap.compat import GroupOptions, Store, factor_of
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.plan.planner import plan_all_reduce

TIMED_EVERY, STEPS_IN_A_ROW = 100, 3
"""Number of sums on CUDA after which timing starts again, and number of sums that are then timed. Few are, because
events cost host time."""

SUMMED = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.int8)
)
"""Dtypes that shared memory and gloo can both add up."""


class PlannedAllReduce:
    """Sums and averages by a plan: one rank's communicators, one for each device type.

    The one for the CPU is made at once: it finds out which ranks share a node. The one for CUDA is made at the first
    sum of a CUDA tensor, which is on the device that the rank has chosen by then.

    Args:
        options: Store, rank, size and name of the group.
        config: Options of planning; a compressor in it is ignored.
        inner: Torch's own group of the same ranks, whose NCCL runs phases among all ranks; None if there is none.

    Attributes:
        cluster: Placement of the ranks, with the link rates as the communicator for the CPU has them.
    """

    def __init__(self, options: GroupOptions, config: Config, inner: dist.ProcessGroup | None = None) -> None:
        self._options = options
        self._config = config
        self._inner = inner
        self._communicators: dict[str, Communicator] = {}
        self._better: dict[tuple[str, int], bool] = {}
        self._sums = 0
        self.cluster = self._communicator(torch.device("cpu")).cluster

    @property
    def store(self) -> Store:
        """Store for other messages among the ranks of this group, without keys of an earlier generation."""
        return self._communicators["cpu"].plain_store

    @property
    def on_cpu(self) -> Communicator:
        """Communicator for CPU tensors."""
        return self._communicators["cpu"]

    def scale(self, op: object, tensors: Sequence[Tensor]) -> float | None:
        """Returns the factor with which a plain sum gives what a reduce op asks for.

        Args:
            op: Reduce op.
            tensors: Tensors to reduce, at least one.

        Returns:
            1 for SUM, 1 / size for AVG, the op's factor for PREMUL_SUM. None if no plan can run it: for other ops, for
            AVG and PREMUL_SUM of integers, for dtypes outside `SUMMED`, and for tensors that are sparse, of different
            dtypes or devices, or neither on the CPU nor on CUDA.
        """
        first = tensors[0]
        if first.dtype not in SUMMED or first.device.type not in ("cpu", "cuda"):
            return None
        for tensor in tensors:
            if tensor.layout != torch.strided or tensor.dtype != first.dtype or tensor.device != first.device:
                return None
        if op == dist.ReduceOp.SUM:
            return 1.0
        if op == dist.ReduceOp.AVG and first.is_floating_point():
            return 1.0 / self._options.group_size
        return factor_of(op) if first.is_floating_point() else None

    def beats_inner(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether a plan shall sum these tensors, rather than the inner group's all-reduce over all ranks.

        On one node that is so for CPU tensors, which go through shared memory, and not for CUDA tensors. On several
        nodes it is so if a plan other than `flat` (one all-reduce over all ranks, as the inner group's) is asked for by
        name or, with plan="auto", is predicted to be faster. It is never so for tensors without elements. The result
        depends on bytes and device type alone, so it is the same on all ranks.

        Args:
            tensors: Tensors to sum together, at least one, on one device. With plan="auto" on several nodes the first
                CUDA tensor makes the communicator for CUDA, on all ranks.
        """
        device, nbytes = tensors[0].device, sum(tensor.nbytes for tensor in tensors)
        key = (device.type, nbytes)
        if key not in self._better:
            self._better[key] = self._is_better(device, nbytes)
        return self._better[key]

    def all_reduce(self, tensors: list[Tensor], scale: float) -> FutureWork:
        """Starts an all-reduce that replaces each tensor by the sum over all ranks of `scale * tensor`.

        Args:
            tensors: Dense, of one dtype and device; the same shapes in the same order on all ranks. Changed in place;
                several are sent end to end as one.
            scale: Factor on every rank's contribution; 1 for integers.

        Returns:
            The work, whose result is `tensors`.
        """
        communicator = self._communicator(tensors[0].device)
        on_cuda = tensors[0].is_cuda
        if on_cuda:
            communicator.executor.stats.timing = self._sums % TIMED_EVERY < STEPS_IN_A_ROW
            if self._sums % TIMED_EVERY == STEPS_IN_A_ROW:
                communicator.executor.stats.read_times()
        self._sums += 1
        future = self._start(communicator, tensors, scale)
        if not on_cuda:
            return FutureWork(future, self._config.timeout)
        communicator.executor.release()  # a sum that went directly is watched from here on, too
        return FutureWork(future, self._config.timeout, communicator.executor.last)

    def _start(self, communicator: Communicator, tensors: list[Tensor], scale: float) -> FutureTensors:
        """Starts the sum: in place for one plain tensor, else on a flat copy of all tensors, end to end.

        Plain is a tensor that is contiguous, no lazy conjugate or negative (`is_plain`), and not made in inference
        mode. The sums in a copy are copied back into `tensors` when they are done, before the future is.

        Args:
            communicator: Communicator of the tensors' device.
            tensors: Dense, of one dtype and device; at least one.
            scale: Factor on every rank's contribution; 1 for integers.

        Returns:
            Future whose value is `tensors`.
        """
        views = [tensor.detach() for tensor in tensors]
        if len(views) == 1 and is_plain(views[0]) and not views[0].is_inference():
            return finished(communicator.all_reduce(views[0].view(-1), scale=scale), lambda: tensors)
        with torch.inference_mode(False):
            flat = torch.cat([view.reshape(-1) for view in views])

        def scatter() -> list[Tensor]:
            for view, total in zip(views, torch.split(flat, [view.numel() for view in views]), strict=True):
                overwrite(view, total.view(view.shape))
            return tensors

        return finished(communicator.all_reduce(flat, scale=scale), scatter)

    def abort(self, reason: str) -> None:
        """Aborts all communicators; see `Communicator.abort`. Wakes the ranks that wait for this one with the reason.

        Args:
            reason: Text of the error that those ranks raise.
        """
        for communicator in self._communicators.values():
            communicator.abort(reason)

    def close(self) -> None:
        """Closes all communicators."""
        for communicator in self._communicators.values():
            communicator.close()

    def _is_better(self, device: torch.device, nbytes: int) -> bool:
        """Decides what `beats_inner` returns, for tensors of `nbytes` together on one type of device.

        - Without bytes: False.
        - On one node: True on the CPU, where sums go through shared memory; False on CUDA.
        - On several nodes, with a plan asked for by name: True, except for `flat`.
        - On several nodes, with `auto`: True if the plan that is predicted to be fastest is not `flat`. For CUDA this
          makes the communicator, if there is none yet, and so waits for all ranks.
        """
        if nbytes == 0:
            return False
        if len(self.cluster.nodes) == 1:
            return device.type == "cpu"
        if self._config.plan_name != "auto":
            return self._config.plan_name != "flat"
        rank_plans = self._communicator(device).rank_plans
        plan = plan_all_reduce(rank_plans.cluster, nbytes, chunks=self._config.chunks, library=rank_plans.library)
        return plan.name != "flat"

    def _communicator(self, device: torch.device) -> Communicator:
        """Returns the communicator for a device's type; makes it at the first call, which waits for all ranks."""
        if device.type not in self._communicators:
            options = self._options
            self._communicators[device.type] = Communicator(
                options.store,
                options.group_rank,
                options.group_size,
                device,
                replace(self._config, compressor=None),
                name=device.type,
                group=self._inner,
                global_ranks=options.global_ranks_in_group,
            )
        return self._communicators[device.type]
