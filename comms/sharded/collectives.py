"""FSDP2's reduce-scatter of gradients and all-gather of weights: exact, or with a codec between nodes.

On a CPU both kinds run in the lanes of a communicator's executor, which counts and times them, names the rank that
fails, and keeps their order: exact ones by a plan if that is predicted to beat the library, compressed ones as a
coroutine of two steps, inside the node and between nodes. On CUDA exact ones stay NCCL's (see `apply`), and compressed
ones are issued on the current stream.

With a codec:

Reduce-scatter: inside each node the rows are summed exactly, so that a rank holds its node's sum of the rows of its
counterparts; it encodes each for its owner, exchanges, and sums what it receives in float32. int8 and int4 round at
random, without bias, and their compression error is dropped; that of waterfill4 is kept and added to the next row
(`carried.py`). A rank's own contribution is not encoded.

All-gather: each rank encodes its row, counterparts exchange payloads, then the ranks of a node pass them on; all ranks,
the owner included, decode the same bytes and compute with the same weights. The rows that the optimizer changes stay
exact. With waterfill4 rows are the differences from what was sent last, see `carried.py`.

Sources: exchange of encoded gradients in place of a reduce-scatter, and encoded weights: qgZ and qwZ of Wang et al.,
ZeRO++, 2023. Random rounding of gradients without bias: Alistarh et al., QSGD, NeurIPS 2017, section 3.1.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.backend.planned_collectives import PlannedCollectives
from gradwire.comms.backend.work import FutureTensors
from gradwire.comms.bootstrap.compat import BackendWork
from gradwire.comms.communicator import Communicator
from gradwire.comms.lanes import Hop
from gradwire.comms.plan.plan import ALL_GATHER, REDUCE_SCATTER
from gradwire.comms.run.phase_stats import PhaseStats
from gradwire.comms.sharded.carried import RESIDUAL, SENT, LoadedRows, SentRows, ShardResidual
from gradwire.comms.sharded.layout import NamedShard, RowRuns, ShardNames, runs_of
from gradwire.comms.sharded.nodes import BETWEEN, INSIDE, Members, ShardNodes, ShardWork, Steps
from gradwire.comms.sharded.ordered_launches import OrderedCollective, TorchGroups
from gradwire.comms.sharded.param_groups import ShardedParamGroup
from gradwire.comms.sharded.rows import add_payload, decode_rows, encode_row, gather_runs, payload_nbytes, scatter_runs
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

SHARD_PHASE = 30
"""Sort key of these collectives in a report: they come after the phases of plans and of sparse sums."""

BETWEEN_NODES = "between nodes"
"""Name of the level in a report's rows of these collectives."""

Count = Callable[[int, float], None]
"""Counts one exchange: (bytes that this rank contributed, bytes that it sent)."""


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
        """Returns the key of the next reduce-scatter."""
        self.calls += 1
        return mix_key(self.seed, self.calls, self.rank)


class Allocating:
    """Base of the objects that FSDP2 calls for a collective: allocates their tensors."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates an input or output tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(Allocating, ABC):
    """An all-gather in the form that FSDP2 calls."""

    @abstractmethod
    def start(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup) -> ShardWork | None:
        """Starts the all-gather in the lanes of a communicator, behind all collectives that were started there before.

        Args:
            output_tensor: (ranks * numel of a row), overwritten with every rank's row.
            input_tensor: (numel of a row), this rank's.
            group: The ranks.

        Returns:
            Its work; None if nothing was started, because this all-gather runs on torch's group or on a CUDA stream:
            call the object instead. The same on all ranks.
        """

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> object:
        """Runs the all-gather, with the arguments of `start`.

        Args:
            output_tensor: See `start`.
            input_tensor: See `start`.
            group: See `start`.
            async_op: Whether it may return before the result is there.

        Returns:
            The work to wait for; None if the result is there.
        """


class ReduceScatter(Allocating, ABC):
    """A reduce-scatter in the form that FSDP2 calls."""

    @abstractmethod
    def start(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object
    ) -> ShardWork | None:
        """Starts the reduce-scatter in the lanes of a communicator; see `AllGather.start`.

        Args:
            output_tensor: (numel of a row), overwritten with this rank's row of the sum or average.
            input_tensor: (ranks * numel of a row); row r goes to rank r.
            group: The ranks.
            op: SUM, AVG, or PREMUL_SUM of the parameter group's own factor.

        Returns:
            Its work; None if nothing was started: call the object instead.
        """

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Runs the reduce-scatter with the arguments of `start`, and waits for the result; `async_op` is ignored."""


class GradientReduceScatter(ReduceScatter):
    """The reduce-scatter of one parameter group's gradients with a codec between nodes.

    On CUDA it runs on the current stream; on a CPU in the lanes of the communicator of `nodes`.

    Args:
        param_group: The parameter group.
        names: Names of the model's parameters.
        nodes: Placement of the ranks, and the members of the two steps.
        choice: "bf16", "int8", "int4" or "waterfill4".
        rules: Rules that decide which parameters are sent uncompressed.
        rounding: Random keys of the model.
        count: Called with (contributed bytes, sent bytes) of each exchange between nodes.
        loaded: Compares the residuals that the ranks have loaded.

    Attributes:
        residual: The compression error of earlier steps; None if the format keeps none.
    """

    def __init__(
        self,
        param_group: ShardedParamGroup,
        names: ShardNames,
        nodes: ShardNodes,
        choice: str,
        rules: Sequence[Rule],
        rounding: Rounding,
        count: Count,
        loaded: LoadedRows,
    ) -> None:
        self._param_group = param_group
        self._names = names
        self._nodes = nodes
        self._choice = choice
        self._rules = tuple(rules)
        self._rounding = rounding
        self._count = count
        self._loaded = loaded
        self._runs: dict[tuple[int, ...], RowRuns] = {}
        self.residual: ShardResidual | None = None
        if choice == CARRIED:
            self.residual = ShardResidual(names.of(param_group.parameters), rules, len(nodes.members) - 1)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Writes the sum, or the average, of this rank's row over all ranks to `output_tensor`.

        Args:
            output_tensor: (numel of a row), floating.
            input_tensor: (ranks * numel of a row), of the same dtype; row r goes to rank r.
            group: The ranks.
            op: SUM, AVG, or PREMUL_SUM of the parameter group's own factor.
            async_op: Torch never asks for it.
        """
        if (work := self._started(output_tensor, input_tensor, group, op)) is not None:
            work.wait()

    def start(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object
    ) -> ShardWork | None:
        """See `AllGather.start`."""
        return None if input_tensor.is_cuda else self._started(output_tensor, input_tensor, group, op)

    def _started(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object
    ) -> ShardWork | None:
        """Reads all that may change before the collective runs (present parameters, loss scale, flush), then starts it.

        Returns:
            Its work; None on CUDA, where it was issued on the current stream.

        Raises:
            RuntimeError: The row has another length than expected.
        """
        nodes, runs = self._nodes, self._runs_of_present()
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
            self.residual.flushing = (
                flushing and self._param_group.accumulates
            )  # until the last micro-batch of the step
            self.residual.holds = not flushing
            self.residual.sums += 1
            self.residual.loss_scale.follow()
            self._loaded.compare()

        def steps() -> Steps:
            mine = yield from self._sum_inside(input_tensor.view(nodes.size, -1))
            assert nodes.between is not None  # else it is exact
            total = yield from self._exchange(nodes.between, codec, runs, mine, present, flushing)
            total.div_(divisor)
            output_tensor.copy_(total)

        return nodes.start(f"reduce_scatter {self._choice} (of shards)", steps(), INSIDE)

    def _runs_of_present(self) -> RowRuns:
        """Returns the compressed and dense runs of a row with the parameters that have a gradient now."""
        key = tuple(map(id, self._param_group.present))
        if key not in self._runs:
            self._runs[key] = runs_of(self._names.of(self._param_group.present), self._rules)
        return self._runs[key]

    def _sum_inside(self, rows: Tensor) -> Generator[Hop, None, Tensor]:
        """Sums the rows inside this node, for the owners that are this rank and its counterparts.

        Args:
            rows: (ranks, numel of a row), this rank's; row r is for rank r.

        Returns:
            (nodes, numel of a row): this node's sum of the row of each counterpart, by the counterpart's node number.
        """
        nodes = self._nodes
        if nodes.inside is None:
            return _select(rows, [indices[0] for indices in nodes.members])
        order = [indices[place] for place in nodes.places for indices in nodes.members]
        mine = torch.empty(len(nodes.members), rows.shape[1], dtype=rows.dtype, device=rows.device)
        yield from nodes.inside.reduce_scatter(mine.view(-1), _select(rows, order).view(-1))
        return mine

    def _exchange(
        self,
        between: Members,
        codec: FusedCodec,
        runs: RowRuns,
        mine: Tensor,
        present: Sequence[NamedShard],
        flushing: bool,
    ) -> Generator[Hop, None, Tensor]:
        """Exchanges encoded rows with the counterparts, and sums this rank's row over all nodes.

        Args:
            between: Counterparts of this rank, itself included.
            codec: Codec of the compressed runs.
            runs: Compressed and dense runs of a row.
            mine: (nodes, numel of a row): this node's sums, as `_sum_inside` returns them; not changed.
            present: Parameters with a gradient, in the order of the row.
            flushing: Whether residuals are added to the rows, which are then sent exactly and leave residuals of zero.

        Returns:
            (numel of a row) float32.
        """
        # Flush the residuals: add them to the rows, and send all of it exactly.
        own, residual = between.rank, self.residual
        kept: list[Tensor] | None = None if residual is None else residual.take(present, mine.device)
        others = [index for index in range(between.size) if index != own]
        if flushing and kept is not None:
            mine = mine.clone()
            for index, row in zip(others, kept, strict=True):
                sums = mine[self._nodes.numbers[index]]
                scatter_runs(gather_runs(sums, runs.compressed) + row, sums, runs.compressed)
                row.zero_()
            runs = RowRuns(runs.numel, (), ((0, runs.numel),))
        # Encode the row of each other owner, exchange, and add this rank's own contribution, which is not encoded.
        nbytes = payload_nbytes(codec, runs, mine.dtype)
        payloads = torch.zeros(between.size, nbytes, dtype=torch.uint8, device=mine.device)
        for place, index in enumerate(others):
            added = None if kept is None or flushing else kept[place]
            encode_row(codec, runs, mine[self._nodes.numbers[index]], payloads[index], residual=added)
        if residual is not None and kept is not None:
            residual.put(present, kept)
        received = torch.empty_like(payloads)
        yield from between.all_to_all(received, payloads)
        self._count(mine.nbytes, nbytes * (between.size - 1))
        # Decode the other nodes' rows onto this rank's own.
        from_others = torch.cat([received[:own], received[own + 1 :]])
        return decode_rows(codec, runs, from_others, mine.dtype, mine[self._nodes.numbers[own]])


def divisor_of(op: object, size: int, param_group: ShardedParamGroup) -> float:
    """Returns the divisor that turns a sum into what `op` asks for.

    Args:
        op: SUM, AVG, or PREMUL_SUM of the parameter group's own factor.
        size: Number of ranks.
        param_group: The parameter group, which has the factor of `set_gradient_divide_factor()`.

    Raises:
        ValueError: `op` is none of these.
    """
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return float(size)
    if param_group.divide_factor is None:
        raise ValueError(f"`op` is {op}; wanted SUM, AVG, or the factor of set_gradient_divide_factor()")
    return param_group.divide_factor


class EncodedAllGather(AllGather):
    """Base of the all-gathers of one parameter group's weights with a codec between nodes.

    On CUDA it runs on the current stream; on a CPU in the lanes of the communicator of `nodes`. On a mesh of another
    size (`reshard_after_forward=2`) weights that were gathered once are sent exactly.

    Args:
        runs: Compressed and dense runs of a row with all parameters of the group.
        nodes: Placement of the ranks, and the members of the two steps.
        choice: Format between nodes: "bf16", "int8" or "waterfill4"; rounds to nearest.
        exact: The exact all-gather that it replaces, called for other meshes.
        count: Called with (contributed bytes, sent bytes) of each exchange between nodes.
    """

    def __init__(
        self, runs: RowRuns, nodes: ShardNodes, choice: str, exact: Callable[..., object], count: Count
    ) -> None:
        self._runs = runs
        self._nodes = nodes
        self._choice = choice
        self._codec = codec_of(choice, None)
        self._exact = exact
        self._count = count

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> object:
        """Fills `output_tensor` with the decoded rows of all ranks.

        Args:
            output_tensor: (ranks * numel of a row), floating.
            input_tensor: (numel of a row), this rank's; it may be a part of `output_tensor`.
            group: The ranks.
            async_op: Passed on to the exact all-gather; else ignored.

        Returns:
            None: the result is there, on CUDA for work that is queued on the current stream. The result of the exact
            all-gather on a mesh of another size.
        """
        if group.size() != self._nodes.size:
            return self._exact(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        if (work := self._started(output_tensor, input_tensor)) is not None:
            work.wait()
        return None

    def start(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup) -> ShardWork | None:
        """See `AllGather.start`."""
        if input_tensor.is_cuda or group.size() != self._nodes.size:
            return None
        return self._started(output_tensor, input_tensor)

    def _started(self, output_tensor: Tensor, input_tensor: Tensor) -> ShardWork | None:
        return self._nodes.start(
            f"all_gather {self._choice} (of shards)", self._steps(output_tensor, input_tensor), BETWEEN
        )

    @abstractmethod
    def _steps(self, output_tensor: Tensor, input_tensor: Tensor) -> Steps:
        """Reads all that may change before the collective runs, and returns the collective as a coroutine."""

    def _between(self, row: Tensor) -> Members:
        """Returns the members of the step between nodes, after a check of the row's length.

        Raises:
            RuntimeError: The row is of another length than expected.
        """
        assert self._nodes.between is not None  # else it is exact
        if self._runs.numel != row.numel():
            raise RuntimeError(
                f"FSDP2 gathers rows of {row.numel()} elements where {self._runs.numel} were expected: this torch "
                f"({torch.__version__}) arranges them otherwise than gradwire knows"
            )
        return self._nodes.between

    def _exchange(
        self, between: Members, runs: RowRuns, row: Tensor, sent: Tensor | None = None
    ) -> Generator[Hop, None, Tensor]:
        """Encodes this rank's row, and gathers the payloads of its counterparts.

        Args:
            between: Counterparts of this rank, itself included.
            runs: Compressed and dense runs of the row.
            row: (numel of a row), floating: this rank's weights; not changed.
            sent: (numel of a row) float32: the weights that the counterparts have of this row already. Compressed runs
                are encoded as the difference from them (delta encoding). None encodes the weights themselves.

        Returns:
            (nodes, payload_nbytes) uint8: the payloads in the order of `between.ranks`.
        """
        nbytes = payload_nbytes(self._codec, runs, row.dtype)
        payload = torch.empty(nbytes, dtype=torch.uint8, device=row.device)
        encode_row(self._codec, runs, row, payload, sent=sent)
        across = torch.empty(between.size, nbytes, dtype=torch.uint8, device=row.device)
        yield from between.all_gather(across.view(-1), payload)
        self._count(row.nbytes, nbytes * (between.size - 1))
        return across

    def _of_all_ranks(self, across: Tensor) -> Generator[Hop, None, list[tuple[int, Tensor]]]:
        """Gathers inside the node what each of its ranks has received from its counterparts on other nodes.

        Args:
            across: (nodes, ...), what this rank's counterparts have sent, in the order of `nodes.between.ranks`.

        Returns:
            (rank, its payload or row) for every rank of the group.
        """
        nodes = self._nodes
        by_node = _select(across, [nodes.numbers.index(number) for number in range(len(nodes.members))])
        everyone = by_node.unsqueeze(0)
        if nodes.inside is not None:
            everyone = torch.empty(len(nodes.places), *by_node.shape, dtype=by_node.dtype, device=by_node.device)
            yield from nodes.inside.all_gather(everyone.view(-1), by_node.contiguous().view(-1))
        return [
            (indices[place], one)
            for theirs, place in zip(everyone, nodes.places or (nodes.place,), strict=True)
            for one, indices in zip(theirs, nodes.members, strict=True)
        ]


class WeightAllGather(EncodedAllGather):
    """The all-gather of one parameter group's weights, each time encoded as a whole."""

    def _steps(self, output_tensor: Tensor, input_tensor: Tensor) -> Steps:
        across = yield from self._exchange(self._between(input_tensor), self._runs, input_tensor)
        rows = output_tensor.view(self._nodes.size, -1)
        for index, payload in (yield from self._of_all_ranks(across)):
            rows[index].copy_(decode_rows(self._codec, self._runs, payload[None], input_tensor.dtype, None))


class DifferenceAllGather(EncodedAllGather):
    """The all-gather of one parameter group's weights as differences from those sent last; see `carried.py`.

    The first one is exact. In the backward pass nothing is sent between nodes: the weights are those of the forward
    pass.

    Args:
        param_group: The parameter group.
        loaded: Compares the sent weights that the ranks loaded.
        runs, nodes, exact, count: See `EncodedAllGather`.

    Attributes:
        sent: The weights that the counterparts have of each other: the base of the next differences.
    """

    def __init__(
        self,
        param_group: ShardedParamGroup,
        runs: RowRuns,
        nodes: ShardNodes,
        exact: Callable[..., object],
        count: Count,
        loaded: LoadedRows,
    ) -> None:
        super().__init__(runs, nodes, CARRIED, exact, count)
        self._param_group = param_group
        self._loaded = loaded
        self.sent = SentRows(runs, len(nodes.members))

    def _steps(self, output_tensor: Tensor, input_tensor: Tensor) -> Steps:
        self._loaded.compare()
        return self._gathered(output_tensor, input_tensor, again=self._param_group.gathers_again)

    def _gathered(self, output_tensor: Tensor, input_tensor: Tensor, *, again: bool) -> Steps:
        """Fills `output_tensor` with every rank's row, as a coroutine.

        Args:
            output_tensor: (ranks * numel of a row), floating.
            input_tensor: (numel of a row), this rank's.
            again: Whether the weights are those of the last all-gather: nothing is sent between nodes then.
        """
        between, rows = self._between(input_tensor), self.sent.rows
        if rows is None or not again:
            rows = yield from self._renewed(between, input_tensor)
        found = output_tensor.view(self._nodes.size, -1)
        for index, row in (yield from self._of_all_ranks(rows.to(input_tensor.dtype))):
            found[index].copy_(row)

    def _renewed(self, between: Members, row: Tensor) -> Generator[Hop, None, Tensor]:
        """Exchanges differences from the weights sent last (the first time whole rows), and adds them to `sent`.

        Args:
            between: Counterparts of this rank, itself included.
            row: (numel of a row), floating: this rank's weights.

        Returns:
            (nodes, numel of a row) float32, in the order of `between.ranks`: the same bits on all counterparts.
        """
        exact = self.sent.rows is None
        # Rows are kept and change in steps that train, so they are never made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if self.sent.rows is None:
                runs = RowRuns(row.numel(), (), ((0, row.numel()),))
                rows = torch.empty(between.size, row.numel(), dtype=torch.float32, device=row.device)
            else:
                runs = self.sent.runs
                # A loaded state is on the CPU. Weights that were not finite do not stay so forever.
                rows = self.sent.rows.to(row.device).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        across = yield from self._exchange(between, runs, row, None if exact else rows[between.rank])
        with torch.inference_mode(False), torch.no_grad():
            for one, kept in zip(across, rows, strict=True):
                add_payload(self._codec, runs, one, row.dtype, kept)
        self.sent.rows = rows
        return rows


def _select(rows: Tensor, order: Sequence[int]) -> Tensor:
    """Returns the rows in another order; stacks views, because an index tensor would be copied to the device."""
    if list(order) == list(range(len(rows))):
        return rows
    return torch.stack([rows[index] for index in order])


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ShardLink:
    """The objects that all collectives of one group of ranks share. Its communicator is closed when it is collected.

    Attributes:
        nodes: Placement of the ranks; None if nothing is compressed.
        communicator: Connects the ranks on a CPU; None on CUDA.
        planned: Exact collectives by plans, on a CPU; None if the group is gradwire's backend, which plans itself.
        torchs: Orders the launches of torch's collectives and gradwire's on one CUDA device; None without such.
        loaded: `RESIDUAL` and `SENT` -> description of the state that this rank loaded; empty if nothing is compressed.
    """

    nodes: ShardNodes | None
    communicator: Communicator | None
    planned: PlannedCollectives | None
    torchs: TorchGroups | None = None
    loaded: Mapping[str, LoadedRows] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.communicator is not None:
            weakref.finalize(self, self.communicator.close)


class ExactReduceScatter(ReduceScatter):
    """The exact reduce-scatter of one parameter group on a CPU: planned if that is faster, and watched in any case.

    Args:
        param_group: The parameter group.
        link: Link of the ranks that share it.
        exact: Torch's own reduce-scatter, run if no plan is faster.
    """

    def __init__(self, param_group: ShardedParamGroup, link: ShardLink, exact: Callable[..., object]) -> None:
        assert link.communicator is not None
        self._param_group = param_group
        self._link = link
        self._communicator = link.communicator
        self._exact = exact

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Writes this rank's row, summed or averaged over all ranks, to `output_tensor`.

        Args:
            output_tensor: (numel of a row), floating.
            input_tensor: (ranks * numel of a row), of the same dtype; overwritten where the sum is planned.
            group: The ranks.
            op: SUM, AVG, or PREMUL_SUM of the parameter group's own factor.
            async_op: Torch never asks for it.
        """
        if (work := self.start(output_tensor, input_tensor, group, op)) is not None:
            work.wait()
            return
        issue = _issuing(self._exact, output_tensor, input_tensor, group, op=op)
        self._communicator.run_collective("reduce_scatter (of shards)", issue)

    def start(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object
    ) -> ShardWork | None:
        """See `AllGather.start`."""
        planned = self._link.planned
        lacking = op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)  # gloo has no PREMUL_SUM
        if planned is None or not (lacking or planned.beats_library(REDUCE_SCATTER, input_tensor.nbytes)):
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


class ExactAllGather(AllGather):
    """The exact all-gather of one parameter group on a CPU: planned if that is faster, and watched in any case.

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
        """Fills `output_tensor` with every rank's row.

        Args:
            output_tensor: (ranks * numel of a row), any dtype.
            input_tensor: (numel of a row), this rank's; it may be a part of `output_tensor`.
            group: The ranks.
            async_op: Whether it may return before the result is there; a planned one is waited for in any case.

        Returns:
            The work to wait for; None if the result is there.
        """
        if (work := self.start(output_tensor, input_tensor, group)) is not None:
            work.wait()
            return None
        if async_op:
            return self._exact(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=True)
        issue = _issuing(self._exact, output_tensor, input_tensor, group)
        self._communicator.run_collective("all_gather (of shards)", issue)
        return None

    def start(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup) -> ShardWork | None:
        """See `AllGather.start`."""
        planned = self._link.planned
        if planned is None or group.size() != self._communicator.size:
            return None
        if not planned.beats_library(ALL_GATHER, output_tensor.nbytes):
            return None
        return ShardWork(planned.all_gather(output_tensor, input_tensor), self._communicator)


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
    stats: PhaseStats,
) -> dict[str, ShardResidual | SentRows]:
    """Replaces the reduce-scatter and the all-gather of parameter groups by gradwire's.

    Args:
        param_groups: Parameter groups of the model. Groups that are not sharded, or over one rank, are skipped.
        names: Names of the model's parameters.
        shards: Format of gradients, one of `SHARD_CHOICES`.
        weights: Format of weights, one of `WEIGHT_CHOICES`.
        rules: Parameters that are sent uncompressed: those that a rule gives the compressor "none".
        rounding: Random keys of the model.
        link_of: Returns the link of a group; called at the same point on all its ranks.
        stats: Counts what is sent on CUDA; on a CPU the executor of a link's communicator has counters of its own.

    Returns:
        The state that the collectives carry from step to step, by kind and number of the parameter group.
    """
    carried: dict[str, ShardResidual | SentRows] = {}
    for number, param_group in enumerate(param_groups):
        group = param_group.shard_group
        if group is None or group.size() == 1:
            continue
        # Exact collectives first: those that are compressed below take their place, and call them on other meshes.
        link = link_of(group)
        if link.communicator is not None:
            param_group.set_reduce_scatter(ExactReduceScatter(param_group, link, param_group.reduce_scatter))
            param_group.set_all_gather(ExactAllGather(link, param_group.all_gather))
        if link.torchs is not None:
            param_group.set_reduce_scatter(OrderedCollective(param_group.reduce_scatter, link.torchs))
            param_group.set_all_gather(OrderedCollective(param_group.all_gather, link.torchs))
        nodes = link.nodes
        if nodes is None or nodes.between is None:
            continue
        # Compress between nodes; if the ranks are on one node, all stays exact.
        counted_in = stats if link.communicator is None else link.communicator.executor.stats
        if shards != "exact":
            loaded = link.loaded[RESIDUAL]
            reduced = partial(counted_in.add, SHARD_PHASE, f"reduce_scatter {shards}", BETWEEN_NODES)
            reducing = GradientReduceScatter(param_group, names, nodes, shards, rules, rounding, reduced, loaded)
            param_group.set_reduce_scatter(reducing)
            if reducing.residual is not None:
                carried[f"{RESIDUAL}/{number}"] = reducing.residual
                loaded.add(f"{RESIDUAL}/{number}", reducing.residual)
        if weights != "exact":
            runs = runs_of(names.of(param_group.parameters), rules)
            gathered = partial(counted_in.add, SHARD_PHASE + 1, f"all_gather {weights}", BETWEEN_NODES)
            if weights == CARRIED:
                differences = DifferenceAllGather(
                    param_group, runs, nodes, param_group.all_gather, gathered, link.loaded[SENT]
                )
                param_group.set_all_gather(differences)
                carried[f"{SENT}/{number}"] = differences.sent
                link.loaded[SENT].add(f"{SENT}/{number}", differences.sent)
            else:
                param_group.set_all_gather(WeightAllGather(runs, nodes, weights, param_group.all_gather, gathered))
    return carried
