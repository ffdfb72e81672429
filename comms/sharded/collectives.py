"""FSDP2's reduce-scatter of gradients and all-gather of weights: exact, or with a codec between nodes.

On a CPU both kinds follow plans, in the lanes of a communicator's executor, which counts and times their phases, names
the rank that fails, and keeps their order: exact ones if the plan is predicted to beat the library, compressed ones
always, with a compressed phase between nodes (see `plan_compressed`). On CUDA exact ones stay NCCL's (see `apply`), and
compressed ones are issued on the current stream.

With a codec:

Reduce-scatter: inside each node the flat shards are summed exactly, so that a rank holds its node's sum of the flat
shards of its counterparts; it encodes each for its owner, exchanges, and sums what it receives in float32. int8 and
int4 round at random, without bias, and their compression error is dropped; that of waterfill4 is kept and added to the
next flat shard (`carried.py`). A rank's own contribution is not encoded.

All-gather: each rank encodes its flat shard, counterparts exchange payloads, then the ranks of a node pass them on; all
ranks, the owner included, decode the same bytes and compute with the same weights. The flat shards that the optimizer
changes stay exact. With waterfill4 flat shards are the differences from what was sent last, see `carried.py`.

Sources: exchange of encoded gradients in place of a reduce-scatter, and encoded weights: qgZ and qwZ of Wang et al.,
ZeRO++, 2023. Random rounding of gradients without bias: Alistarh et al., QSGD, NeurIPS 2017, section 3.1.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.backend.planned_collectives import PlannedCollectives
from gradwire.comms.backend.work import FutureTensors
from gradwire.comms.bootstrap.compat import BackendWork
from gradwire.comms.communicator import Communicator
from gradwire.comms.plan.plan import ALL_GATHER, REDUCE_SCATTER
from gradwire.comms.sharded.carried import RESIDUAL, SENT, LoadedShards, SentShards, ShardResidual
from gradwire.comms.sharded.flat_shards import add_payload, decode, encode, gather_runs, payload_nbytes, scatter_runs
from gradwire.comms.sharded.layout import NamedShard, ShardNames, ShardRuns, runs_of
from gradwire.comms.sharded.nodes import ShardNodes, ShardWork
from gradwire.comms.sharded.ordered_launches import OrderedCollective, TorchGroups
from gradwire.comms.sharded.overlap import Overlap
from gradwire.comms.sharded.param_groups import ShardedParamGroup
from gradwire.compressors.base import ALL_TO_ALL, Collective, Member, Request
from gradwire.compressors.codecs.base import FusedCodec
from gradwire.compressors.codecs.cast import CastCodec
from gradwire.compressors.codecs.quantize import QuantizeCodec
from gradwire.compressors.codecs.waterfill import WaterfillCodec
from gradwire.compressors.kernels.hashing import mix_key
from gradwire.compressors.rules import Rule

SHARD_CHOICES = ("exact", "bf16", "int8", "int4", "waterfill4")
"""Formats of gradients between nodes, in the reduce-scatter."""
WEIGHT_CHOICES = ("exact", "bf16", "int8", "waterfill4")
"""Formats of weights between nodes, in the all-gather."""

CARRIED = "waterfill4"
"""The choice, of gradients and of weights, that keeps its compression error for the next step."""


def codec_of(choice: str, key: int | None) -> FusedCodec:
    """Makes the codec of a format.

    Args:
        choice: "bf16", "int8", "int4" or "waterfill4".
        key: Key of the random rounding of int8 and int4; None rounds to nearest.
    """
    if choice == CARRIED:
        return WaterfillCodec(4)
    if choice == "bf16":
        return CastCodec("bfloat16")
    return QuantizeCodec({"int8": 8, "int4": 4}[choice], key)


@dataclass(slots=True)
class Rounding:
    """Keys of the random rounding of a model's reduce-scatters: reproducible after a restart, different on each rank.

    Attributes:
        seed: Seed of the job.
        rank: Rank in the default group.
        calls: Number of reduce-scatters so far; saved with the state.
    """

    seed: int
    rank: int
    calls: int = 0

    def next_key(self) -> int:
        """Counts one more reduce-scatter in `calls`, and returns its key."""
        self.calls += 1
        return mix_key(self.seed, self.calls, self.rank)


class Allocating:
    """Base of the objects that FSDP2 calls for a collective: allocates their tensors."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns an uninitialized tensor for the input or output of the collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class ReduceScatter(Allocating, ABC):
    """Base of what FSDP2 calls in place of its own reduce-scatter of one parameter group's gradients.

    Args:
        param_group: The parameter group.
        overlap: Keeps the reduce-scatters in flight on a CPU.
    """

    def __init__(self, param_group: ShardedParamGroup, overlap: Overlap) -> None:
        self._param_group = param_group
        self._overlap = overlap

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Writes the sum, or the average, of this rank's flat shard over all ranks to `output_tensor`.

        On a CPU it may return before the result is there, if torch does not read it before the backward pass ends.

        Args:
            output_tensor: (numel of a flat shard), floating; overwritten.
            input_tensor: (ranks * numel of a flat shard), of the same dtype; flat shard r goes to rank r. On a CPU
                overwritten.
            group: The ranks.
            op: SUM, AVG, or PREMUL_SUM of the parameter group's own factor.
            async_op: Torch never asks for it.
        """
        work = self._start(output_tensor, input_tensor, group, op)
        if work is not None:
            keeps = self._param_group.keeps(self._param_group.present, output_tensor.dtype)
            self._overlap.add(work, later=not self._param_group.hooked and keeps)

    @abstractmethod
    def _start(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object
    ) -> ShardWork | None:
        """Starts the reduce-scatter, with the arguments of `__call__`.

        Returns:
            Its work; None if the result is there, or was issued on the current CUDA stream.
        """


class GradientReduceScatter(ReduceScatter):
    """The reduce-scatter of one parameter group's gradients with a codec between nodes.

    On CUDA it runs on the current stream; on a CPU in the lanes of the communicator of `nodes`.

    Args:
        param_group: The parameter group.
        overlap: Keeps the reduce-scatters in flight on a CPU.
        names: Names of the model's parameters.
        nodes: Runs the collectives of the ranks, by their placement.
        choice: "bf16", "int8", "int4" or "waterfill4".
        rules: Rules that decide which parameters are sent uncompressed.
        rounding: Random keys of the model.
        loaded: Compares the residuals that the ranks have loaded.

    Attributes:
        residual: The compression error of earlier steps; None if the format keeps none.
    """

    def __init__(
        self,
        param_group: ShardedParamGroup,
        overlap: Overlap,
        names: ShardNames,
        nodes: ShardNodes,
        choice: str,
        rules: Sequence[Rule],
        rounding: Rounding,
        loaded: LoadedShards,
    ) -> None:
        super().__init__(param_group, overlap)
        self._names = names
        self._nodes = nodes
        self._choice = choice
        self._rules = tuple(rules)
        self._rounding = rounding
        self._loaded = loaded
        self._runs: dict[tuple[int, ...], ShardRuns] = {}
        self.residual: ShardResidual | None = None
        if choice == CARRIED:
            self.residual = ShardResidual(names.of(param_group.parameters), rules, len(nodes.members) - 1)

    def _start(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object
    ) -> ShardWork | None:
        """Starts the reduce-scatter, with the arguments of `__call__`.

        What may change before it runs is read now: which parameters have a gradient, the loss scale, and whether
        residuals are flushed.

        Returns:
            Its work; None on CUDA, where it was issued on the current stream.

        Raises:
            RuntimeError: The flat shard has another length than expected, or a rank did not load a state.
            ValueError: The ranks loaded different residuals; or `op` is one that `divisor_of` refuses.
        """
        runs = self._runs_of_present()
        if runs.numel != output_tensor.numel():
            raise RuntimeError(
                f"FSDP2 reduces rows of {output_tensor.numel()} elements where {runs.numel} were expected: this torch "
                f"({torch.__version__}) arranges them otherwise than gradwire knows"
            )
        divisor = divisor_of(op, group.size(), self._param_group)
        codec = codec_of(self._choice, self._rounding.next_key())
        present = self._names.of(self._param_group.present)
        flushing = False
        if self.residual is not None:
            flushing = self.residual.flushing
            # A flush lasts until the last micro-batch of the step.
            self.residual.flushing = flushing and self._param_group.accumulates
            self.residual.holds = not flushing
            self.residual.sums += 1
            self.residual.loss_scale.follow()
            self._loaded.compare()

        def exchange(rows: Sequence[Tensor], member: Member) -> Iterator[Request]:
            total = yield from self._sum(rows, member, codec, runs, present, flushing)
            output_tensor.copy_(total.div_(divisor))

        nbytes = payload_nbytes(codec, runs, input_tensor.dtype)
        return self._nodes.reduce_scatter(self._choice, nbytes, input_tensor.view(-1), exchange)

    def _runs_of_present(self) -> ShardRuns:
        """Returns the compressed and dense runs of a flat shard with the parameters that have a gradient now."""
        key = tuple(map(id, self._param_group.present))
        if key not in self._runs:
            self._runs[key] = runs_of(self._names.of(self._param_group.present), self._rules)
        return self._runs[key]

    def _sum(
        self,
        rows: Sequence[Tensor],
        member: Member,
        codec: FusedCodec,
        runs: ShardRuns,
        present: Sequence[NamedShard],
        flushing: bool,
    ) -> Generator[Request, None, Tensor]:
        """Exchanges encoded flat shards with the counterparts, and sums this rank's flat shard over all nodes.

        Args:
            rows: This node's sum of the flat shard of each counterpart, (numel of a flat shard) each; not changed.
            member: This rank's place among the counterparts.
            codec: Codec of the compressed runs.
            runs: Compressed and dense runs of a flat shard.
            present: Parameters with a gradient, in the order of the flat shard.
            flushing: Whether residuals are added to the flat shards, which are then sent exactly and leave residuals of
                zero.

        Returns:
            (numel of a flat shard) float32.
        """
        # Flush the residuals: add them to the flat shards, and send all of it exactly.
        own, residual, sums = member.rank, self.residual, list(rows)
        dtype, device = sums[own].dtype, sums[own].device
        kept: list[Tensor] | None = None if residual is None else residual.take(present, device)
        others = [index for index in range(member.size) if index != own]
        if flushing and kept is not None:
            for index, row in zip(others, kept, strict=True):
                sums[index] = sums[index].clone()
                scatter_runs(gather_runs(sums[index], runs.compressed) + row, sums[index], runs.compressed)
                row.zero_()
            runs = ShardRuns(runs.numel, (), ((0, runs.numel),))
        # Encode the flat shard of each other owner, exchange, and add this rank's own contribution, which is not
        # encoded.
        payloads = torch.zeros(member.size, payload_nbytes(codec, runs, dtype), dtype=torch.uint8, device=device)
        for place, index in enumerate(others):
            added = None if kept is None or flushing else kept[place]
            encode(codec, runs, sums[index], payloads[index], residual=added)
        if residual is not None and kept is not None:
            residual.put(present, kept)
        received = torch.empty_like(payloads)
        yield Collective(ALL_TO_ALL, (received, payloads))
        # Decode the other nodes' flat shards onto this rank's own.
        from_others = torch.cat([received[:own], received[own + 1 :]])
        return decode(codec, runs, from_others, dtype, sums[own])


def divisor_of(op: object, size: int, param_group: ShardedParamGroup) -> float:
    """Returns the divisor that turns a sum into what `op` asks for: 1, the number of ranks, or the group's own factor.

    Args:
        op: SUM, AVG, or PREMUL_SUM of the factor that the user gave to `set_gradient_divide_factor()`; any other one is
            taken for that, as torch gives none.
        size: Number of ranks.
        param_group: The parameter group, which has that factor.

    Raises:
        ValueError: `op` is neither SUM nor AVG, and no factor was given.
    """
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return float(size)
    if param_group.divide_factor is None:
        raise ValueError(f"`op` is {op}; wanted SUM, AVG, or the factor of set_gradient_divide_factor()")
    return param_group.divide_factor


class EncodedAllGather(Allocating, ABC):
    """Base of the all-gathers of one parameter group's weights with a codec between nodes.

    On CUDA it runs on the current stream; on a CPU in the lanes of the communicator of `nodes`. On a mesh of another
    size (`reshard_after_forward=2`) weights that were gathered once are sent exactly.

    Args:
        runs: Compressed and dense runs of a flat shard with all parameters of the group.
        nodes: Runs the collectives of the ranks, by their placement.
        choice: Format between nodes: "bf16", "int8" or "waterfill4"; rounds to nearest.
        exact: The exact all-gather that it replaces, called for other meshes.
    """

    def __init__(self, runs: ShardRuns, nodes: ShardNodes, choice: str, exact: Callable[..., object]) -> None:
        self._runs = runs
        self._nodes = nodes
        self._choice = choice
        self._codec = codec_of(choice, None)
        self._exact = exact

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> object:
        """Fills `output_tensor` with the decoded flat shards of all ranks.

        Args:
            output_tensor: (ranks * numel of a flat shard), floating.
            input_tensor: (numel of a flat shard), this rank's; it may be a part of `output_tensor`.
            group: The ranks.
            async_op: Passed on to the exact all-gather; else ignored.

        Returns:
            On a CPU the work that torch waits for. None on CUDA: the result is there for work that is queued on the
            current stream. The result of the exact all-gather on a mesh of another size.
        """
        if group.size() != self._nodes.size:
            return self._exact(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        return self._start(output_tensor, input_tensor)

    @abstractmethod
    def _start(self, output_tensor: Tensor, input_tensor: Tensor) -> ShardWork | None:
        """Starts the all-gather. What may change before it runs is read now, because a CPU runs it in other threads.

        Args:
            output_tensor: See `__call__`.
            input_tensor: See `__call__`.

        Returns:
            Its work; None on CUDA, where it was issued on the current stream.
        """

    def _check(self, row: Tensor) -> None:
        """Refuses a flat shard of another length than expected.

        Raises:
            RuntimeError: It is refused.
        """
        if self._runs.numel != row.numel():
            raise RuntimeError(
                f"FSDP2 gathers rows of {row.numel()} elements where {self._runs.numel} were expected: this torch "
                f"({torch.__version__}) arranges them otherwise than gradwire knows"
            )

    def _exchange(
        self, member: Member, runs: ShardRuns, row: Tensor, sent: Tensor | None = None
    ) -> Generator[Request, None, Tensor]:
        """Encodes this rank's flat shard, and gathers the payloads of its counterparts.

        Args:
            member: This rank's place among its counterparts.
            runs: Compressed and dense runs of the flat shard.
            row: (numel of a flat shard), floating: this rank's weights; not changed.
            sent: (numel of a flat shard) float32: the weights that the counterparts have of this flat shard already.
                Compressed runs are encoded as the difference from them (delta encoding). None encodes the weights
                themselves.

        Returns:
            (nodes, payload_nbytes) uint8: the payloads of the counterparts, in their order.
        """
        nbytes = payload_nbytes(self._codec, runs, row.dtype)
        payload = torch.empty(nbytes, dtype=torch.uint8, device=row.device)
        encode(self._codec, runs, row, payload, sent=sent)
        across = torch.empty(member.size, nbytes, dtype=torch.uint8, device=row.device)
        yield Collective(ALL_GATHER, (across.view(-1), payload))
        return across


class WeightAllGather(EncodedAllGather):
    """The all-gather of one parameter group's weights, each time encoded as a whole.

    The ranks of a node pass payloads on, and each of them decodes all.
    """

    def _start(self, output_tensor: Tensor, input_tensor: Tensor) -> ShardWork | None:
        self._check(input_tensor)
        rows, dtype = output_tensor.view(self._nodes.size, -1), input_tensor.dtype

        def exchange(member: Member) -> Generator[Request, None, Tensor]:
            return (yield from self._exchange(member, self._runs, input_tensor))

        def place(rank: int, payload: Tensor) -> None:
            rows[rank].copy_(decode(self._codec, self._runs, payload[None], dtype, None))

        nbytes = payload_nbytes(self._codec, self._runs, dtype)
        return self._nodes.all_gather(self._choice, nbytes, (nbytes, torch.uint8), exchange, place)


class DifferenceAllGather(EncodedAllGather):
    """The all-gather of one parameter group's weights as differences from those sent last; see `carried.py`.

    The first one is exact. In the backward pass nothing is sent between nodes: the weights are those of the forward
    pass.

    Args:
        param_group: The parameter group.
        loaded: Compares the sent weights that the ranks loaded.
        runs: Compressed and dense runs of a flat shard with all parameters of the group.
        nodes: Runs the collectives of the ranks, by their placement.
        exact: The exact all-gather that it replaces, called for other meshes.

    Attributes:
        sent: The weights that the counterparts have of each other: the base of the next differences.
    """

    def __init__(
        self,
        param_group: ShardedParamGroup,
        runs: ShardRuns,
        nodes: ShardNodes,
        exact: Callable[..., object],
        loaded: LoadedShards,
    ) -> None:
        super().__init__(runs, nodes, CARRIED, exact)
        self._param_group = param_group
        self._loaded = loaded
        self.sent = SentShards(runs, len(nodes.members))

    def _start(self, output_tensor: Tensor, input_tensor: Tensor) -> ShardWork | None:
        self._loaded.compare()
        self._check(input_tensor)
        rows, dtype = output_tensor.view(self._nodes.size, -1), input_tensor.dtype
        # The forward pass of this parameter group, which is over, has sent what its backward pass needs.
        known = self.sent.rows if self._param_group.gathers_again else None

        def exchange(member: Member) -> Generator[Request, None, Tensor]:
            found = known if known is not None else (yield from self._renewed(member, input_tensor))
            return found.to(dtype)

        def place(rank: int, row: Tensor) -> None:
            rows[rank].copy_(row)

        nbytes = 0 if known is not None else payload_nbytes(self._codec, self._runs, dtype)
        return self._nodes.all_gather(self._choice, nbytes, (input_tensor.numel(), dtype), exchange, place)

    def _renewed(self, member: Member, row: Tensor) -> Generator[Request, None, Tensor]:
        """Exchanges differences from the weights sent last (the first time whole flat shards), and adds them to `sent`.

        Args:
            member: This rank's place among its counterparts.
            row: (numel of a flat shard), floating: this rank's weights.

        Returns:
            (nodes, numel of a flat shard) float32, in the order of the counterparts: the same bits on all of them.
        """
        exact = self.sent.rows is None
        # Flat shards are kept and change in steps that train, so they are never made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if self.sent.rows is None:
                runs = ShardRuns(row.numel(), (), ((0, row.numel()),))
                rows = torch.empty(member.size, row.numel(), dtype=torch.float32, device=row.device)
            else:
                runs = self.sent.runs
                # A loaded state is on the CPU. Weights that were not finite do not stay so forever.
                rows = self.sent.rows.to(row.device).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        across = yield from self._exchange(member, runs, row, None if exact else rows[member.rank])
        with torch.inference_mode(False), torch.no_grad():
            for one, kept in zip(across, rows, strict=True):
                add_payload(self._codec, runs, one, row.dtype, kept)
        self.sent.rows = rows
        return rows


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ShardLink:
    """The objects that all collectives of one group of ranks share. Its communicator is closed when it is collected.

    Attributes:
        nodes: Placement of the ranks; None if nothing is compressed.
        communicator: Connects the ranks on a CPU; None on CUDA.
        planned: Exact collectives by plans, on a CPU; None if the group is gradwire's backend, which plans itself.
        torchs: Orders the launches of torch's collectives and gradwire's on one CUDA device; None without such.
        loaded: `RESIDUAL` and `SENT` -> what compares the state that the ranks have loaded; empty if nothing is
            compressed.
    """

    nodes: ShardNodes | None
    communicator: Communicator | None
    planned: PlannedCollectives | None
    torchs: TorchGroups | None = None
    loaded: Mapping[str, LoadedShards] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.communicator is not None:
            weakref.finalize(self, self.communicator.close)


class ExactReduceScatter(ReduceScatter):
    """The exact reduce-scatter of one parameter group on a CPU: by a plan, or torch's own; a failure names the rank.

    A plan is followed if it is predicted to be faster, or gloo has no such operation (PREMUL_SUM); never if `link` has
    no planned collectives.

    Args:
        param_group: The parameter group.
        overlap: Keeps the reduce-scatters in flight.
        link: Link of the ranks that share it.
        exact: Torch's own reduce-scatter, run where no plan is followed.
    """

    def __init__(
        self, param_group: ShardedParamGroup, overlap: Overlap, link: ShardLink, exact: Callable[..., object]
    ) -> None:
        super().__init__(param_group, overlap)
        assert link.communicator is not None
        self._link = link
        self._communicator = link.communicator
        self._exact = exact

    def _start(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object
    ) -> ShardWork | None:
        """Starts a planned reduce-scatter, or runs torch's own and waits for it; see the class.

        Returns:
            Work of the planned one; None if torch's own has ended.
        """
        planned = self._link.planned
        lacking = op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)  # gloo has no PREMUL_SUM
        if planned is None or not (lacking or planned.beats_library(REDUCE_SCATTER, input_tensor.nbytes)):
            issue = _issuing(self._exact, output_tensor, input_tensor, group, op=op)
            self._communicator.run_collective("reduce_scatter (of shards)", issue)
            return None
        divisor = divisor_of(op, group.size(), self._param_group)
        future = planned.reduce_scatter(output_tensor, input_tensor, keep=False)
        if divisor != 1.0:

            def divide(done: FutureTensors) -> list[Tensor]:
                done.value()
                with torch.no_grad():
                    return [output_tensor.div_(divisor)]

            future = future.then(divide)
        return ShardWork(future, self._communicator)


class ExactAllGather(Allocating):
    """The exact all-gather of one parameter group on a CPU: by a plan if that is predicted to be faster, else torch's.

    A failure names the rank, except in an all-gather of torch's own that torch wants to wait for itself (`async_op`).

    Args:
        link: Link of the ranks that share the parameter group.
        exact: Torch's own all-gather: runs if no plan is faster, and on the mesh of `reshard_after_forward=2`.
    """

    def __init__(self, link: ShardLink, exact: Callable[..., object]) -> None:
        assert link.communicator is not None
        self._link = link
        self._communicator = link.communicator
        self._exact = exact

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> object:
        """Fills `output_tensor` with every rank's flat shard.

        Args:
            output_tensor: (ranks * numel of a flat shard), any dtype.
            input_tensor: (numel of a flat shard), this rank's; it may be a part of `output_tensor`.
            group: The ranks.
            async_op: Whether torch's own may return before the result is there; a planned one does in any case.

        Returns:
            The work that torch waits for before it reads the result; None if the result is there.
        """
        planned = self._link.planned
        whole = group.size() == self._communicator.size
        if planned is not None and whole and planned.beats_library(ALL_GATHER, output_tensor.nbytes):
            return ShardWork(planned.all_gather(output_tensor, input_tensor), self._communicator)
        if async_op:
            return self._exact(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=True)
        issue = _issuing(self._exact, output_tensor, input_tensor, group)
        self._communicator.run_collective("all_gather (of shards)", issue)
        return None


def _issuing(
    exact: Callable[..., object], output: Tensor, source: Tensor, group: dist.ProcessGroup, **options: object
) -> Callable[[], BackendWork]:
    """Returns a function that starts torch's own collective `exact` on these tensors, and returns its work."""

    def issue() -> BackendWork:
        return cast(
            BackendWork, exact(output_tensor=output, input_tensor=source, group=group, async_op=True, **options)
        )

    return issue


def install(
    param_groups: Sequence[ShardedParamGroup],
    names: ShardNames,
    shards: str,
    weights: str,
    rules: Sequence[Rule],
    rounding: Rounding,
    link_of: Callable[[dist.ProcessGroup], ShardLink],
    overlap: Overlap,
) -> dict[str, ShardResidual | SentShards]:
    """Makes FSDP2 call gradwire's reduce-scatter and all-gather for the sharded parameter groups of a model.

    On a CPU exact ones follow a plan if that is predicted to beat the library, else they run torch's own. On CUDA
    torch's own stay where nothing is compressed; at most their launches are ordered with gradwire's. If the ranks of a
    parameter group are on several nodes, gradients and weights whose format is not "exact" are compressed between the
    nodes; inside a node they are always exact.

    Args:
        param_groups: Parameter groups of the model, changed in place. Groups that are not sharded, or over one rank,
            are skipped.
        names: Names of the model's parameters.
        shards: Format of gradients, one of `SHARD_CHOICES`.
        weights: Format of weights, one of `WEIGHT_CHOICES`.
        rules: Parameters that are sent uncompressed: those that a rule gives the compressor "none".
        rounding: Random keys of the model.
        link_of: Returns the communicator, placement and loaded state of a process group; called at the same point on
            all its ranks.
        overlap: Keeps the reduce-scatters in flight on a CPU.

    Returns:
        The state that compressed collectives keep from step to step: `residual/3` is the compression error of the
        gradients of parameter group 3, `sent/3` its weights as they were sent last. Empty if neither format is
        "waterfill4", or all ranks of each group are on one node.
    """
    carried: dict[str, ShardResidual | SentShards] = {}
    for number, param_group in enumerate(param_groups):
        group = param_group.shard_group
        if group is None or group.size() == 1:
            continue
        # Exact collectives first: those that are compressed below take their place, and call them on other meshes.
        link = link_of(group)
        if link.communicator is not None:
            param_group.set_reduce_scatter(ExactReduceScatter(param_group, overlap, link, param_group.reduce_scatter))
            param_group.set_all_gather(ExactAllGather(link, param_group.all_gather))
        if link.torchs is not None:
            param_group.set_reduce_scatter(OrderedCollective(param_group.reduce_scatter, link.torchs))
            param_group.set_all_gather(OrderedCollective(param_group.all_gather, link.torchs))
        nodes = link.nodes
        if nodes is None or not nodes.crosses:
            continue
        # Compress between nodes; if the ranks are on one node, all stays exact.
        if shards != "exact":
            loaded = link.loaded[RESIDUAL]
            reducing = GradientReduceScatter(param_group, overlap, names, nodes, shards, rules, rounding, loaded)
            param_group.set_reduce_scatter(reducing)
            if reducing.residual is not None:
                carried[f"{RESIDUAL}/{number}"] = reducing.residual
                loaded.add(f"{RESIDUAL}/{number}", reducing.residual)
        if weights != "exact":
            runs = runs_of(names.of(param_group.parameters), rules)
            if weights == CARRIED:
                differences = DifferenceAllGather(param_group, runs, nodes, param_group.all_gather, link.loaded[SENT])
                param_group.set_all_gather(differences)
                carried[f"{SENT}/{number}"] = differences.sent
                link.loaded[SENT].add(f"{SENT}/{number}", differences.sent)
            else:
                param_group.set_all_gather(WeightAllGather(runs, nodes, weights, param_group.all_gather))
    return carried
