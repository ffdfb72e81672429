"""Backend `gradwire`: the communicator that the hook uses, with a plan and, if asked for, a compressor.

The communicator only has all-reduces that sum or average. All else goes through gradwire's process group, the backend
"gradwire" of torch.distributed, and the facts of the table say so.
"""

from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.bench.nccl_tests.backends.backend import Issue
from gradwire.bench.nccl_tests.backends.torch_backend import TorchBackend
from gradwire.bench.nccl_tests.dtypes import ELEMENT_TYPES, MULSUM_FACTOR, NO_ARITHMETIC
from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.plan.plan import ALL_REDUCE
from gradwire.comms.report import Report
from gradwire.compressors.base import Compressor, Layout, Slice

_SCALES = ("sum", "avg", "mulsum")
_MATRIX_COLUMNS = 1024
"""Columns of the matrix as which low-rank compressors see the tensor, like the weight of a linear layer."""


class GradwireBackend:
    """Backend of gradwire's communicator, with a process group for the collectives that it does not have.

    Args:
        store: Store that all ranks reach.
        rank: This rank.
        size: Number of ranks.
        device: Device of the tensors.
        config: Options of the communicator: plan, chunks, timeout.
        group: Process group of the backend "gradwire".
        name: Name of the communicator, unique in `store`.
        compressor: Compressor of the all-reduce; None for exact sums.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        config: Config,
        group: dist.ProcessGroup,
        *,
        name: str,
        compressor: Compressor | None = None,
    ) -> None:
        self.rank = rank
        self._size = size
        self._config = config
        self._group = TorchBackend(group, "gradwire")
        self._communicator = Communicator(store, rank, size, device, config, name=name, compressor=compressor)
        self._compressor = compressor
        self._layouts: dict[int, Layout] = {}
        self._passed_on: set[str] = set()
        self._generation = 0

    def facts(self) -> dict[str, str]:
        """Returns the plans used so far, the compressor, and the collectives that went through the process group."""
        facts = {"algorithm": self._config.plan_name, "compressor": getattr(self._compressor, "name", "none")}
        plans = dict.fromkeys(_without_size(plan) for plan in self.report().plans)
        for number, plan in enumerate(plans):
            facts["plan" if len(plans) == 1 else f"plan {number + 1}"] = plan
        if self._compressor and plans and not any(f"({self._compressor.name}" in plan for plan in plans):
            facts["note"] = (
                "one node: nothing crosses between nodes, so nothing is compressed; the flat plan compresses"
            )
        if self._passed_on:
            facts["through the process group"] = ", ".join(sorted(self._passed_on))
        return facts

    def report(self) -> Report:
        """Returns the communicator's report of its plans and bytes."""
        return self._communicator.report()

    @property
    def compressor(self) -> Compressor:
        """Compressor of the all-reduce; there must be one."""
        assert self._compressor is not None
        return self._compressor

    def sent_nbytes(self) -> tuple[float, float]:
        """Returns the bytes that this rank has sent between nodes so far: (without compression, on the wire)."""
        chosen = [row for row in self.report().rows if row.op == ALL_REDUCE]
        return sum(row.logical_nbytes for row in chosen), sum(row.wire_nbytes for row in chosen)

    def shard_numel(self, numel: int) -> int:
        """Returns how many elements of a tensor this rank encodes: its shard of the node's sum, or all of them.

        Args:
            numel: Elements of the tensor.
        """
        cluster = self._communicator.cluster
        if len(cluster.nodes) == 1 or self._config.plan_name == "flat":
            return numel
        return max(1, numel // len(cluster.ranks(cluster.unit(self.rank, 0))))

    def forget(self) -> None:
        """Lets the next all-reduce begin without a residual, by a new name for its parameter."""
        self._generation += 1
        self._layouts.clear()

    def refusal(self, collective: str, element: str, operation: str) -> str | None:
        """Returns why gradwire cannot run this, with its compressor if there is one; None if it can."""
        kind = ELEMENT_TYPES[element]
        if collective == "all_reduce" and operation in _SCALES:
            if kind.torch in NO_ARITHMETIC:
                return f"gradwire does not reduce {element}"
            if self._compressor and element != "float":
                return "a compressor takes float"
            return None if operation == "sum" or kind.floating else f"{operation} needs a floating type"
        if self._compressor:
            return "a compressor applies to all_reduce with sum or avg"
        return self._group.refusal(collective, element, operation)

    def all_reduce(self, tensor: Tensor, operation: str) -> Issue:
        """Prepares an all-reduce of `tensor`, in place; max, min and prod by the process group."""
        if operation not in _SCALES:
            return self._pass("all_reduce").all_reduce(tensor, operation)
        scale = {"sum": 1.0, "avg": 1.0 / self._size, "mulsum": MULSUM_FACTOR}[operation]
        layout = self._layout(tensor)
        issue = partial(self._communicator.all_reduce, tensor, scale=scale, layout=layout)
        if self._compressor is None:
            return cast(Issue, issue)  # the future's wait() returns the tensor besides
        compressor = self._compressor
        return lambda: _Ending(issue(), compressor)

    def reduce(self, tensor: Tensor, root: int, operation: str) -> Issue:
        """Prepares a reduction of `tensor` to the root by the process group, in place."""
        return self._pass("reduce").reduce(tensor, root, operation)

    def reduce_scatter(self, output: Tensor, source: Tensor, operation: str) -> Issue:
        """Prepares a reduce-scatter of `source` into this rank's `output` by the process group."""
        return self._pass("reduce_scatter").reduce_scatter(output, source, operation)

    def all_gather(self, output: Tensor, source: Tensor) -> Issue:
        """Prepares an all-gather of every rank's `source` into `output` by the process group."""
        return self._pass("all_gather").all_gather(output, source)

    def broadcast(self, tensor: Tensor, root: int) -> Issue:
        """Prepares a broadcast of `tensor` from the root by the process group."""
        return self._pass("broadcast").broadcast(tensor, root)

    def all_to_all(self, output: Tensor, source: Tensor) -> Issue:
        """Prepares an all-to-all of equal parts of `source` into `output` by the process group."""
        return self._pass("alltoall").all_to_all(output, source)

    def send_receive(self, output: Tensor, source: Tensor) -> Issue:
        """Prepares a send to the next rank and a receive from the previous one, by the process group."""
        return self._pass("sendrecv").send_receive(output, source)

    def barrier(self) -> Issue:
        """Prepares a barrier of the process group."""
        return self._pass("barrier").barrier()

    def close(self) -> None:
        """Closes gradwire's communicator; the process group stays open."""
        self._communicator.close()

    def _pass(self, collective: str) -> TorchBackend:
        """Returns the backend of the process group, and records that a collective goes through it."""
        self._passed_on.add(collective)
        return self._group

    def _layout(self, tensor: Tensor) -> Layout | None:
        if self._compressor is None:
            return None
        numel = tensor.numel()
        if numel not in self._layouts:
            columns = _MATRIX_COLUMNS if numel % _MATRIX_COLUMNS == 0 else 1
            self._layouts[numel] = Layout(
                (Slice(f"bench{numel}.{self._generation}", (numel // columns, columns), 0, 0, numel),)
            )
        return self._layouts[numel]


def _without_size(plan: str) -> str:
    """Returns a plan's description without its prediction, which differs from size to size.

    Args:
        plan: Description of a plan: phases, prediction, reason.
    """
    phases, _, prediction = plan.partition(";")
    return f"{phases}. {prediction.rpartition('. ')[2]}" if ". " in prediction else phases


class _Ending:
    """Work of a compressed all-reduce whose wait also ends the compressor's step: each iteration is a training step."""

    def __init__(self, future: "torch.futures.Future[Tensor]", compressor: Compressor) -> None:
        self._future = future
        self._compressor = compressor

    def wait(self) -> None:
        self._future.wait()
        self._compressor.end_step(finite=True)
