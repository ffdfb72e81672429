"""The process group that DDP and users call in elastic training: its members change, the object stays.

DDP broadcasts its buffers in each forward pass, and the order of its buckets once, through its own group; torch's
default group would wait for a failed rank for ever. Every collective here is run by `ResilientOps` as an all-reduce, to
which ranks that have nothing to send contribute zeros, and has ended when the call returns. That is slower than a real
broadcast or gather, but the tensors are small.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions

from gradwire.comms.backend.work import FutureWork
from gradwire.comms.bootstrap.compat import factor_of, outside_graphs
from gradwire.comms.elastic.resilient_ops import ResilientOps, as_bytes

SUMMED = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8))
"""Dtypes that `ElasticGroup.allreduce` sums."""

_LENGTH_NBYTES = 8
"""Bytes of the length in front of each rank's bytes, which are padded to the longest."""


class ElasticGroup(dist.ProcessGroup):
    """Runs broadcasts, sums, gathers and barriers over the ranks that are left, and repeats them after a rank failure.

    Each call blocks until the operation has ended on this rank, so the works that are returned are done. All raise what
    `ResilientOps.complete` raises: EvictedError if the other ranks go on without this one or none is left, RuntimeError
    if the operation fails again and again among the same ranks.

    Args:
        resilient_ops: Repeats the collectives of this rank after a rank failure.
    """

    def __init__(self, resilient_ops: ResilientOps) -> None:
        # The stubs know the form with a store alone, for which torch makes no trampoline.
        super().__init__(resilient_ops.view.rank, resilient_ops.view.size)  # type: ignore[call-arg]
        self._resilient_ops = resilient_ops

    def rank(self) -> int:
        """Returns this rank's number among the ranks that are left, from 0."""
        return self._resilient_ops.view.rank

    def size(self) -> int:
        """Returns the number of ranks that are left."""
        return self._resilient_ops.view.size

    getRank = rank
    getSize = size

    def getBackendName(self) -> str:
        """Returns the name by which torch's C++ code knows this group."""
        return "gradwire elastic"

    name = getBackendName

    @outside_graphs
    def broadcast(self, *arguments: object, **named: object) -> dist.Work:
        """Copies the root's tensor to all ranks, in place; `arguments` are ([tensor], options).

        The root is a number among the present members. If it fails, its number may be that of another rank in a
        repetition, whose tensor is copied then; if no rank has the number, all tensors become zeros.

        Raises:
            NotImplementedError: The arguments are of another form.
        """
        match arguments:
            case [[Tensor() as tensor], dist.BroadcastOptions() as options] if not named:
                root = options.rootRank
                return self._done([self._replace(tensor, lambda: tensor if self.rank() == root else None)])
        self._refuse("broadcast")

    @outside_graphs
    def allreduce(self, *arguments: object, **named: object) -> dist.Work:
        """Sums one tensor over the ranks that are left, in place, and blocks until it is done.

        `arguments` are ([tensor], options). The operation is SUM or, of a floating-point tensor, PREMUL_SUM or AVG,
        which divides by the number of ranks that are left. After a rank failure the sum is repeated among these from a
        copy of the tensor, or taken from ranks that had completed it.

        Raises:
            NotImplementedError: The arguments are of another form, or the dtype (see `SUMMED`) or the operation is
                another one.
            EvictedError: The other ranks go on without this one, or no rank is left to go on with.
            RuntimeError: The sum failed several times in a row (`MOST_REPEATS`) among the same ranks.
        """
        match arguments:
            case [[Tensor() as tensor], AllreduceOptions() as options] if not named and tensor.dtype in SUMMED:
                op: object = options.reduceOp
                factor = 1.0 if op == dist.ReduceOp.SUM else factor_of(op)
                average = op == dist.ReduceOp.AVG and tensor.is_floating_point()
                if average or factor == 1.0 or (factor is not None and tensor.is_floating_point()):
                    return self._done([self._sum(tensor, average, 1.0 if factor is None else factor)])
        self._refuse("this all_reduce")

    @outside_graphs
    def allgather(self, *arguments: object, **named: object) -> dist.Work:
        """Gathers the tensors of all ranks on all ranks; `arguments` are ([outputs], [source], options).

        Outputs beyond the number of ranks that are left are filled with zeros.

        Raises:
            NotImplementedError: The arguments are of another form.
        """
        match arguments:
            case [[list() as outputs], [Tensor() as source], AllgatherOptions()] if not named:
                rows = self._gather(source, len(outputs))
                for output, row in zip(outputs, rows, strict=True):
                    output.copy_(row.view(output.shape))
                return self._done(outputs)
        self._refuse("all_gather")

    @outside_graphs
    def all_gather_single(self, *arguments: object, **named: object) -> dist.Work:
        """Gathers the tensors of all ranks end to end in one tensor; `arguments` are (output, source, options).

        `output` has as many elements as the sources of the ranks for which the caller made it; those of ranks that have
        failed meanwhile, at its end, are filled with zeros.

        Raises:
            NotImplementedError: The arguments are of another form.
        """
        match arguments:
            case [Tensor() as output, Tensor() as source, *_] if not named:
                output.copy_(self._gather(source, output.numel() // max(source.numel(), 1)).view(output.shape))
                return self._done([output])
        self._refuse("all_gather")

    _allgather_base = all_gather_single

    @outside_graphs
    def barrier(self, *arguments: object, **named: object) -> dist.Work:
        """Waits until all ranks that are left have called it; `arguments`, the options, are ignored."""
        device = self._resilient_ops.communicator.device
        return self._done([self._sum(torch.ones(1, dtype=torch.int32, device=device), False, 1.0)])

    def _replace(self, tensor: Tensor, own: Callable[[], Tensor | None]) -> Tensor:
        """Fills `tensor` on all ranks with that of one rank, and returns it.

        Args:
            tensor: This rank's tensor; replaced in place.
            own: Returns a tensor on the sending rank and None on all others; called again in each attempt, as a rank
                failure renumbers the ranks.
        """
        given = tensor.detach().clone(memory_format=torch.contiguous_format)

        def attempt() -> Tensor:
            flat = as_bytes(given.clone() if own() is not None else torch.zeros_like(given))
            self._resilient_ops.wait(self._resilient_ops.communicator.all_reduce(flat))
            return flat.view(given.dtype).view(given.shape)

        return self._complete(attempt, given, tensor)

    def _sum(self, tensor: Tensor, average: bool, factor: float) -> Tensor:
        given = tensor.detach().clone(memory_format=torch.contiguous_format)

        def attempt() -> Tensor:
            flat = given.clone().view(-1)
            scale = 1.0 / self.size() if average else factor
            self._resilient_ops.wait(self._resilient_ops.communicator.all_reduce(flat, scale=scale))
            return flat.view(given.shape)

        return self._complete(attempt, given, tensor)

    def _complete(self, attempt: Callable[[], Tensor], given: Tensor, tensor: Tensor) -> Tensor:
        """Runs an operation to its end among the ranks that are left, and copies its result into `tensor`.

        Args:
            attempt: Runs the operation once and returns its result; called again after a rank failure. It must read its
                input from a copy, because the attempt before may have been interrupted.
            given: Copy of the operation's input; here only a template of the shape, dtype and device of the result,
                which a rank that missed the operation receives from another one.
            tensor: The user's tensor; replaced in place.

        Returns:
            `tensor`, detached.
        """
        result = self._resilient_ops.complete(attempt, given)
        assert result is not None
        with torch.no_grad():
            return tensor.detach().copy_(result)

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """Gathers the bytes of every rank that is left, on all of them.

        Args:
            own: Bytes of this rank; their number may differ between ranks.

        Returns:
            The bytes of each rank, in the order of the ranks. A rank that fails meanwhile has no entry.
        """
        device = self._resilient_ops.communicator.device
        message = len(own).to_bytes(_LENGTH_NBYTES, "big") + own
        longest = int(self._rows(torch.tensor([len(message)], dtype=torch.int64, device=device)).max())
        padded = torch.frombuffer(bytearray(message.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
        rows = [bytes(row.cpu().numpy()) for row in self._rows(padded)]
        ends = [_LENGTH_NBYTES + int.from_bytes(row[:_LENGTH_NBYTES], "big") for row in rows]
        return [row[_LENGTH_NBYTES:end] for row, end in zip(rows, ends, strict=True)]

    def _gather(self, source: Tensor, size: int) -> Tensor:
        """Returns the tensors of all ranks as a (size, elements) tensor; the last rows are zeros if ranks have failed.

        Args:
            source: Tensor of this rank, of one shape and dtype on all ranks.
            size: Number of rows, that of the ranks when the caller made its output. Row r is from the present rank r.
        """
        found = self._rows(source)
        rows = torch.zeros((size, found.shape[1]), dtype=found.dtype, device=found.device)
        rows[: len(found)] = found[:size]
        return rows

    def _rows(self, source: Tensor) -> Tensor:
        """Returns the flattened tensors of the ranks that are left, as a row for each."""
        given = source.detach().clone(memory_format=torch.contiguous_format).view(-1)

        def attempt() -> Tensor:
            # As many as there are now: who has been interrupted in the operation before knows of a loss already.
            mine = torch.zeros((self.size(), given.numel()), dtype=given.dtype, device=given.device)
            mine[self.rank()] = given
            flat = as_bytes(mine)
            self._resilient_ops.wait(self._resilient_ops.communicator.all_reduce(flat))
            return mine

        result = self._resilient_ops.complete(attempt, given.new_zeros((self.size(), given.numel())))
        assert result is not None
        return result

    def _done(self, tensors: Sequence[Tensor]) -> dist.Work:
        devices: list[int | str | torch.device] = [tensors[0].device] if tensors and tensors[0].is_cuda else []
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
        future.set_result(list(tensors))
        return FutureWork(future, timedelta(0))  # is done

    def _refuse(self, call: str) -> NoReturn:
        raise NotImplementedError(
            f"the group of elastic training has no {call}: wanted broadcast, all_gather, barrier, or a sum or average "
            f"of {', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in SUMMED))}, of one tensor"
        )
