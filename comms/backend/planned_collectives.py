"""Runs all_gather, reduce_scatter and broadcast of CPU tensors by a plan: see plan/collectives.py.

The process group and the hooks of sharded training call it, with flat, strided or listed tensors. Collectives run in
the lanes of a communicator, in the order of the calls, between its all-reduces; everything is exact.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gradwire.comms.backend.strided import is_plain, overwrite
from gradwire.comms.backend.work import FutureTensors, finished
from gradwire.comms.communicator import Communicator
from gradwire.comms.plan.collectives import BROADCAST, SMALL_NBYTES, CollectivePlan, beats_library, plan_collective
from gradwire.comms.plan.plan import ALL_GATHER, REDUCE_SCATTER
from gradwire.comms.plan.rank_plans import RankPlan
from gradwire.comms.run.all_reduces import AllReduce, Bucket


class PlannedCollectives:
    """Runs one rank's part of planned collectives of CPU tensors with any strides.

    Every rank makes one, and calls the same methods in the same order. The methods return at once; tensors must not be
    touched until the returned future is done. It raises if the collective fails.

    Args:
        communicator: Communicator for the CPU, whose executor runs the plans. Its `config` gives the option `plan` and
            the number of chunks.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._rank = communicator.rank
        self._size = communicator.size
        self._plans: dict[tuple[str, int, int, int], tuple[CollectivePlan, RankPlan]] = {}
        self._better: dict[tuple[str, int, int], bool] = {}

    def beats_library(self, op: str, nbytes: int, root: int = 0) -> bool:
        """Returns whether a collective shall run by a plan here, rather than by gloo; the same on all ranks.

        With plan="auto" on several nodes that is so if the plan is predicted to be clearly faster; on one node, where
        plans use shared memory, from `SMALL_NBYTES` on. A plan asked for by name runs every tensor that has elements,
        except `flat`, which leaves all to gloo.

        Args:
            op: `all_gather`, `reduce_scatter` or `broadcast`.
            nbytes: Bytes of the whole tensor, that is, of the pieces of all ranks together.
            root: Sending rank of a broadcast; not used for other ops.
        """
        key = (op, nbytes, root)
        if key not in self._better:
            asked, cluster = self._communicator.config.plan_name, self._communicator.cluster
            if asked == "auto" and len(cluster.nodes) == 1:  # shared memory, where gloo goes through sockets
                self._better[key] = nbytes >= SMALL_NBYTES
            elif asked == "auto":
                self._better[key] = beats_library(cluster, op, nbytes, root)
            else:
                self._better[key] = asked != "flat" and nbytes > 0
        return self._better[key]

    def all_gather(self, output: Tensor, source: Tensor) -> FutureTensors:
        """Starts an all-gather: fills `output` with every rank's `source`, in rank order.

        Args:
            output: CPU tensor of any shape and strides with size * source.numel() elements, of the dtype of `source`;
                overwritten.
            source: CPU tensor of any dtype; the same numel and dtype on all ranks. May be this rank's part of `output`.

        Returns:
            Future of [output].

        Raises:
            ValueError: Numels or dtypes do not fit, or a tensor is sparse or not on the CPU.
        """
        self._check("output", output, source, self._size)
        flat = _flat_view(output)
        target = _empty_flat(output) if flat is None else flat
        self._place(target, source)

        def finish() -> list[Tensor]:
            if flat is None:
                overwrite(output, target.view(output.shape))
            return [output]

        return finished(self._run(ALL_GATHER, _bytes_of(target), source.nbytes), finish)

    def all_gather_list(self, outputs: list[Tensor], source: Tensor) -> FutureTensors:
        """Fills `outputs[r]` with rank r's `source`; without a further copy if they lie end to end in memory.

        Args:
            outputs: One tensor for each rank, with the numel and dtype of `source`. The future's value is `outputs`.
            source: Any dtype; the same numel and dtype on all ranks.

        Raises:
            ValueError: Numels or dtypes do not fit, or a tensor is not on the CPU.
        """
        for output in outputs:
            self._check("outputs", output, source, 1)
        flat = _end_to_end(outputs)
        if flat is not None:
            return self.all_gather(flat, source).then(_value_of(outputs))
        target = _empty_flat(source, len(outputs))
        self._place(target, source)

        def finish() -> list[Tensor]:
            for output, contribution in zip(outputs, target.view(len(outputs), -1), strict=True):
                overwrite(output, contribution.view(output.shape))
            return outputs

        return finished(self._run(ALL_GATHER, _bytes_of(target), source.nbytes), finish)

    def reduce_scatter(self, output: Tensor, source: Tensor, scale: float = 1.0, *, keep: bool = True) -> FutureTensors:
        """Fills `output` with this rank's piece of the sum over all ranks of `scale * source`.

        The order of the sums is fixed: inside each node by rank, then the nodes' sums by the ranks that made them.
        float16 and bfloat16 are added in float32 and rounded once inside the node and once between the nodes. The same
        bits in every run.

        Args:
            output: Any shape; the future's value is [output]. May overlap `source`.
            source: size * output.numel() elements of a dtype in `planned.SUMMED`. Used as working memory until the
                future is done, then as it was, except where `output` overlaps it.
            scale: Factor on every rank's contribution; 1 for integers.
            keep: False leaves intermediate sums in `source`, and so saves a copy of what is overwritten.

        Raises:
            ValueError: Numels or dtypes do not fit, or a tensor is not on the CPU.
        """
        self._check("source", source, output, self._size)
        flat = _flat_view(source)
        if flat is not None:
            return self._reduce_scatter(output, flat, scale, keep=keep)
        copied = _empty_flat(source)
        copied.view(source.shape).copy_(source.detach())
        return self._reduce_scatter(output, copied, scale, keep=False)

    def reduce_scatter_list(self, output: Tensor, sources: Sequence[Tensor], scale: float = 1.0) -> FutureTensors:
        """Fills `output` on each rank r with the sum over all ranks of `scale * sources[r]`.

        The sums are made in the order and precision of `reduce_scatter`. `sources` are not changed, unless `output`
        overlaps them.

        Args:
            output: Any shape; the future's value is [output].
            sources: One tensor for each rank, with the numel and dtype of `output`; copied before this returns.
            scale: Factor on every rank's contribution; 1 for integers.

        Raises:
            ValueError: Numels or dtypes do not fit, or a tensor is not on the CPU.
        """
        for source in sources:
            self._check("sources", source, output, 1)
        copied = _empty_flat(output, len(sources))
        for row, source in zip(copied.view(len(sources), -1), sources, strict=True):
            row.view(source.shape).copy_(source.detach())
        return self._reduce_scatter(output, copied, scale, keep=False)

    def broadcast(self, tensor: Tensor, root: int) -> FutureTensors:
        """Copies `tensor` of rank `root` to all ranks, in place.

        Args:
            tensor: Any dtype; the same numel and dtype on all ranks. The future's value is [tensor].
            root: Sending rank in this group, 0 <= root < size.

        Raises:
            ValueError: `root` is out of range, or `tensor` is not on the CPU.
        """
        if not 0 <= root < self._size:
            raise ValueError(f"`root` is {root}; wanted 0 <= root < {self._size}")
        self._check("tensor", tensor, tensor, 1)
        flat = _flat_view(tensor)
        target = _empty_flat(tensor) if flat is None else flat
        if flat is None and self._rank == root:
            target.view(tensor.shape).copy_(tensor.detach())

        def finish() -> list[Tensor]:
            if flat is None and self._rank != root:
                overwrite(tensor, target.view(tensor.shape))
            return [tensor]

        return finished(self._run(BROADCAST, _bytes_of(target), tensor.nbytes, root=root), finish)

    def _place(self, target: Tensor, source: Tensor) -> None:
        """Copies this rank's piece to its place among those of all ranks, unless it is there already.

        Args:
            target: Flat tensor for the pieces of all ranks, end to end; changed in place.
            source: This rank's piece, of any strides.
        """
        numel = source.numel()
        own = target[self._rank * numel : (self._rank + 1) * numel]
        if own.data_ptr() != source.data_ptr() or not is_plain(source):
            own.view(source.shape).copy_(source.detach())

    def _reduce_scatter(self, output: Tensor, flat: Tensor, scale: float, *, keep: bool) -> FutureTensors:
        """Does what `reduce_scatter` does, with a flat source; see there for `output`, `scale` and `keep`."""
        cluster, numel = self._communicator.cluster, output.numel()
        plan, _ = self._plan(REDUCE_SCATTER, numel, flat.element_size(), 0)
        if scale != 1.0 and len(cluster.ranks(cluster.unit(self._rank, 0))) == 1:
            with torch.inference_mode(False):  # no rank shares memory with this one: there is no pass to scale in
                flat, scale, keep = flat * scale, 1.0, False
        with torch.inference_mode(False):
            runs = [flat[start:stop] for start, stop in plan.own_runs(self._rank)] if keep else []
            kept = [run.clone() for run in runs]
        own = flat[self._rank * numel : (self._rank + 1) * numel]

        def finish() -> list[Tensor]:
            total = own.clone() if keep else own  # `output` may overlap what is restored
            for run, was in zip(runs, kept, strict=True):
                run.copy_(was)
            overwrite(output, total.view(output.shape))
            return [output]

        return finished(self._run(REDUCE_SCATTER, flat, numel, scale), finish)

    def _run(
        self, op: str, flat: Tensor, numel: int, scale: float = 1.0, root: int = 0
    ) -> torch.futures.Future[Tensor]:
        """Starts a collective on the executor.

        Args:
            op: `all_gather`, `reduce_scatter` or `broadcast`.
            flat: Contiguous 1-D tensor with the pieces of all ranks, or that is broadcast; changed in place.
            numel: Elements of `flat` in one rank's piece, or in the tensor that is broadcast.
            scale: Factor on every rank's contribution to a sum.
            root: Sending rank of a broadcast.

        Returns:
            Future that is done when `flat` holds the result.
        """
        _, rank_plan = self._plan(op, numel, flat.element_size(), root)
        bucket = Bucket.of(flat)
        self._communicator.executor.start(AllReduce((flat,), None, (bucket,)), rank_plan, scale, flush=False)
        return bucket.result()

    def _plan(self, op: str, numel: int, width: int, root: int) -> tuple[CollectivePlan, RankPlan]:
        """Returns the plan of a collective, and this rank's part of it; each is made once.

        Args:
            op: `all_gather`, `reduce_scatter` or `broadcast`.
            numel: Elements in one rank's piece, or in the tensor that is broadcast.
            width: Bytes of an element.
            root: Sending rank of a broadcast.
        """
        key = (op, numel, width, root)
        if key not in self._plans:
            communicator = self._communicator
            plan = plan_collective(communicator.cluster, op, numel, width, root=root, chunks=communicator.config.chunks)
            self._plans[key] = plan, plan.rank_plan(self._rank)
        return self._plans[key]

    def _check(self, name: str, whole: Tensor, part: Tensor, times: int) -> None:
        """Refuses tensors that are not dense on the CPU, or where `whole` is not `times` as large as `part`.

        Args:
            name: Name of the parameter that `whole` was passed as, for the message.
            whole: Larger tensor.
            part: Smaller tensor, which must have the same dtype.
            times: Number of parts that `whole` must hold.

        Raises:
            ValueError: They do not fit.
        """
        for tensor in (whole, part):
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                raise ValueError(f"`{name}` is a {tensor.layout} tensor on {tensor.device}; wanted dense CPU tensors")
        if whole.dtype != part.dtype or whole.numel() != times * part.numel():
            raise ValueError(
                f"`{name}` has {whole.numel()} elements of {whole.dtype}; wanted {times * part.numel()} of {part.dtype}"
            )


def together(futures: Sequence[FutureTensors]) -> FutureTensors:
    """Returns one future for several collectives.

    Its value is the list of all their tensors. If one fails, it raises that one's error; if several do, the first one's
    in the order of `futures`.

    Args:
        futures: Futures of the collectives.
    """

    def join(done: "torch.futures.Future[list[FutureTensors]]") -> list[Tensor]:
        return [tensor for each in done.value() for tensor in each.value()]

    return torch.futures.collect_all(list(futures)).then(join)


def _flat_view(tensor: Tensor) -> Tensor | None:
    """Returns a 1-D view of a tensor's memory that any thread may write to; None if a copy must be sent instead.

    A copy is needed of a tensor that is not contiguous, is a lazy conjugate or negative, or was made in inference mode:
    torch refuses writes to the last one from threads that are not in that mode.
    """
    if not is_plain(tensor) or tensor.is_inference():
        return None
    with torch.inference_mode(False):
        return tensor.detach().view(-1)


def _bytes_of(flat: Tensor) -> Tensor:
    """Returns a view of a flat tensor with dtype uint8.

    It is made outside inference mode, whatever the caller's mode: torch refuses writes to a view made in that mode
    from threads that are not in it.
    """
    with torch.inference_mode(False):
        return flat.view(torch.uint8)


def _empty_flat(like: Tensor, times: int = 1) -> Tensor:
    """Returns an uninitialized 1-D tensor that any thread may write to, even if the caller is in inference mode.

    Args:
        like: Tensor that gives the dtype, the device and, with `times`, the number of elements.
        times: Factor on the elements of `like`.
    """
    with torch.inference_mode(False):
        return torch.empty(times * like.numel(), dtype=like.dtype, device=like.device)


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns a flat view of several tensors that lie end to end in one storage; None if they do not."""
    if any(_flat_view(tensor) is None for tensor in tensors):
        return None
    first = tensors[0].detach()
    if any(left.data_ptr() + left.nbytes != right.data_ptr() for left, right in pairwise(tensors)):
        return None
    storage = first.untyped_storage().data_ptr()
    if any(tensor.untyped_storage().data_ptr() != storage for tensor in tensors):
        return None
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def _value_of(outputs: list[Tensor]) -> Callable[[FutureTensors], list[Tensor]]:
    """Returns a callback for `Future.then` that gives `outputs` as the value, or raises the future's error."""

    def value(done: FutureTensors) -> list[Tensor]:
        done.value()
        return outputs

    return value
