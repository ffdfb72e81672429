"""What gradwire keeps for a model that FSDP2 shards or replicates, and the step it goes through.

FSDP2 reduce-scatters a parameter group's gradients over the ranks that share its parameters; then it calls a hook with
this rank's row, which the state averages over the replicas. What the hook is given is divided by the number of shards
only. torch goes on as soon as the hook returns: on CUDA the average is in the order of the stream that the hook runs
on. On a CPU it is under way until the end of the backward pass, where torch makes nothing but views of it until then;
else the hook waits for it.

A parameter group of `replicate()` has no shards: torch is told to leave its all-reduce out, and calls the hook with
the whole gradients of this rank.
"""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import UnionType
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.comms.bootstrap.compat import BackendWork
from gradwire.comms.bootstrap.failure_reporter import StoreFailureReporter
from gradwire.comms.checkpoint import JOB, PREFIX, SHARDS, Checkpoint, refuse_other_kinds, unpack, without_job
from gradwire.comms.communicator import Communicator
from gradwire.comms.compression import is_finite
from gradwire.comms.config import COMPRESSION, PLANNING, WATCHING, Config
from gradwire.comms.loss_scale import LossScale, refuse_odd_scale
from gradwire.comms.plan.plan import BUCKET_NBYTES
from gradwire.comms.report import Report
from gradwire.comms.run.all_reduces import AllReduce, Bucket, FutureTensor
from gradwire.comms.run.phase_stats import PhaseStats
from gradwire.comms.session import HOMELESS, NO_COMPRESSOR, AveragingSession, GradientState, SessionRanks, refused
from gradwire.comms.sharded.carried import CARRIED_ON, RESIDUAL, SUMS_OF, LoadedRows, SentRows, ShardResidual
from gradwire.comms.sharded.collectives import Rounding
from gradwire.comms.sharded.layout import ShardNames
from gradwire.comms.sharded.ordered_launches import TorchGroups
from gradwire.comms.sharded.overlap import Overlap
from gradwire.comms.sharded.param_groups import (
    ShardedParameter,
    ShardedParamGroup,
    at_end_of_sharded_backward,
    sharded_param_groups,
)
from gradwire.comms.step.backward_tracker import is_timed
from gradwire.comms.step.listeners import EndedStep
from gradwire.compressors.base import StateDict

NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")

log = logging.getLogger("gradwire")

ROUNDING = PREFIX + "rounding"
"""Key in a rank's entry: reduce-scatters so far, from which the random rounding of the next one follows."""

NODES = PREFIX + "nodes"
"""Key in a rank's entry: which ranks that share parameters are on one node. Residuals fit this placement only."""

TRANSFERS = PREFIX + "transfers"
"""Key in a rank's entry with the state of the compressor between replicas."""

SCALE_OF = PREFIX + "loss_scale/"
"""Prefix of the keys in a rank's entry with the loss scale of a residual; followed as `CARRIED_ON` is."""

OF_SHARDS = ", of the ranks that share parameters"
"""Suffix of a level's name in a report's rows."""


@dataclass(frozen=True, slots=True)
class ShardTraffic:
    """The collectives between ranks that share parameters, and their state.

    Attributes:
        communicators: On a CPU, one for each of this rank's groups with several ranks; closed with the model.
        stats: Counters of compressed collectives on CUDA; None if none is compressed.
        rounding: Keys of random rounding, saved with the state; None if no collective is compressed.
        described: Description for a report, one line.
        overlap: The reduce-scatters in flight, on a CPU.
        nodes: Which ranks of each group are on one node, as text; empty if no state depends on it.
        torchs: On CUDA, orders launches on torch's groups with gradwire's.
        carried: State that compressed collectives carry from step to step, by kind and number of parameter group.
        rows: What this rank loaded of `carried`, for each group and kind.
    """

    communicators: tuple[Communicator, ...] = ()
    stats: PhaseStats | None = None
    rounding: Rounding | None = None
    described: str = ""
    overlap: Overlap | None = None
    torchs: TorchGroups | None = None
    nodes: str = ""
    carried: Mapping[str, ShardResidual | SentRows] = field(default_factory=dict)
    rows: tuple[LoadedRows, ...] = ()

    @property
    def residuals(self) -> list[ShardResidual]:
        """The gradient residuals among the state in `carried`."""
        return [each for each in self.carried.values() if isinstance(each, ShardResidual)]


class FsdpState(GradientState[AveragingSession]):
    """Gradient averaging and residuals of one sharded model; `gradwire.fsdp.apply` makes it.

    Args:
        model: What was sharded.
        param_groups: Of the model.
        names: Of its parameters.
        replicas: The ranks that hold the same shards as this one; None leaves the gradients to torch.
        config: The configuration.
        reporter: Where all ranks of the grid hear that one of them has failed.

    Raises:
        RuntimeError: A replica did not join within the time-out.
        ValueError: A replica joined with another configuration; or an option does not fit sharded models.
    """

    OPTIONS = (*PLANNING, *COMPRESSION, *WATCHING)
    MARK = SHARDS
    NOT_CONNECTED = "`replicas` is not set: {call} has nothing to say about torch's own collectives"

    samples = refused("samples", "FSDP2 averages over ranks; deal equal shares, or train with DDP and HookState")

    def __init__(
        self,
        model: nn.Module,
        param_groups: Sequence[ShardedParamGroup],
        names: ShardNames,
        replicas: dist.ProcessGroup | None,
        config: Config,
        reporter: StoreFailureReporter,
    ) -> None:
        super().__init__(config, reporter.peer_wait)
        self._model = weakref.ref(model)
        self._param_groups = tuple(param_groups)
        self._names = names
        self._shard_groups = shard_groups(param_groups)
        self._partial: dict[int, tuple[tuple[ShardedParameter, ...], Tensor]] = {}
        """Parameter group -> whose gradients, and their sum over the micro-batches that have not been averaged."""
        self._put_back = [param_group.remember_collectives() for param_group in param_groups]
        """What `close()` calls, to give torch's collectives back."""
        self._shards = ShardTraffic()
        self._in_step = False
        self._reduced: set[int] = set()
        self._finite = True
        self._under_way: list[tuple[Tensor, FutureTensor]] = []
        """Averages on a CPU that torch has made gradients of already, each with its future."""
        self._buckets: list[Bucket] = []
        self._sizes: list[int] = []
        if replicas is not None:
            self._connect(replicas, param_groups[0].device, reporter)
            for param_group in param_groups:
                param_group.set_hook(lambda flat, param_group=param_group: self._reduce(param_group, flat))  # type: ignore[misc]
                if param_group.replica_group is not None:
                    self._put_back.append(param_group.leave_out_all_reduce())
            at_end_of_sharded_backward(model, self._end_backward)

    def _connect(self, group: dist.ProcessGroup, device: torch.device, reporter: StoreFailureReporter) -> None:
        ranks = SessionRanks.of(group, "sharded", reporter=reporter.of_group(dist.get_process_group_ranks(group)))
        self._connection = connection = AveragingSession(ranks, device, self.config, self._names.numels())
        connection.communicator.executor.checking = connection.compression is not None
        connection.connect(BUCKET_NBYTES)
        connection.compare_loaded()
        connection.watch_steps()

    def _take_shards(self, model: nn.Module, shards: "ShardTraffic") -> None:
        """Takes in what goes on between the ranks that share parameters."""
        self._shards = shards
        if shards.overlap is not None:
            at_end_of_sharded_backward(model, self._settle_shards)
        if self._compresses_replicas or self._shards.residuals:
            self._check_optimizers(self._names)

    def report(self) -> Report:
        """Calls, bytes and seconds of every phase so far, and the plans in use with their reasons.

        Torch's own collectives are not in it; of those in fewer bits, calls and bytes between nodes are.
        """
        every = [link.executor.stats for link in self._shards.communicators]
        every += [] if self._shards.stats is None else [self._shards.stats]
        rows = [replace(row, level=f"{row.level}{OF_SHARDS}") for stats in every for row in stats.totals()]
        described = [self._shards.described] if rows else []
        if self._connection is None:
            return Report(self._shards.described or "torch's own collectives", (), tuple(rows), 0, self.steps)
        found = self._connection.report(self.steps)
        return replace(found, plans=(*found.plans, *described), rows=(*found.rows, *rows))

    def close(self) -> None:
        """Stop the threads and release shared memory. Also runs when the model is collected, and at exit.

        Torch's own collectives are put back. A model of `replicate()` can be trained on with them; a sharded one can
        still be evaluated, and with `replicas` it can be trained no more.
        """
        self._check_no_optimizers(self._names)
        for put_back in self._put_back:
            put_back()
        if self._connection is not None:
            self._connection.observer.close()
        if self._shards.torchs is not None:
            self._shards.torchs.close()
        for communicator in (
            *([] if self._connection is None else [self._connection.communicator]),
            *self._shards.communicators,
        ):
            communicator.close()

    def _flush_shards(self) -> bool:
        for each in self._shards.carried.values():
            if isinstance(each, ShardResidual):
                each.flushing = True
            else:
                each.restore(None)
        return bool(self._shards.carried)

    def _loss_scales(self, call: str) -> list[LossScale]:
        shards = [each.loss_scale for each in self._shards.residuals]
        return [*shards, *(super()._loss_scales(call) if self._compresses_replicas or not shards else [])]

    @property
    def dirty(self) -> bool:
        """Whether residuals are pending, so that the state fits these ranks only; the same on all ranks."""
        return super().dirty or any(each.holds for each in self._shards.residuals)

    def _starts_anew(self) -> str:
        shards = "`shards`" if any(each.rows is not None for each in self._shards.residuals) else ""
        return " and ".join(filter(None, (super()._starts_anew(), shards)))

    @property
    def _compresses_replicas(self) -> bool:
        return self._connection is not None and self._connection.compression is not None

    @property
    def _keeps(self) -> bool:
        return self._shards.rounding is not None or self._compresses_replicas

    def _place(self) -> tuple[int, int]:
        return dist.get_rank(), dist.get_world_size()

    def _own_state(self) -> StateDict:
        own = super()._own_state()
        if self._shards.rounding is not None:
            own[ROUNDING] = self._shards.rounding.calls
        for key, each in self._shards.carried.items():
            if each.rows is not None:
                own[CARRIED_ON + key] = each.rows.clone()  # they change in place
            if isinstance(each, ShardResidual):
                own |= {SCALE_OF + key: float(each.loss_scale.value), SUMS_OF + key: each.sums}
        return own | {SHARDS: _size_of_first(self._shard_groups), NODES: self._shards.nodes}

    def _refuse_homeless(self, found: Checkpoint) -> None:
        saved = {key for part in without_job(found) for key in part}
        if TRANSFERS in saved and not self._compresses_replicas:
            raise ValueError(HOMELESS.format(found=NO_COMPRESSOR))
        residuals = {key.removeprefix(CARRIED_ON) for key in saved if key.startswith(CARRIED_ON + RESIDUAL)}
        homes = {key for key, each in self._shards.carried.items() if isinstance(each, ShardResidual)}
        if residuals and not homes:
            raise ValueError(HOMELESS.format(found="`shards` keeps no residual here"))
        if more := residuals - homes:
            raise ValueError(
                f"`state` holds residuals of {len(more)} parameter groups that `model` does not have: it is of "
                "another model, or fully_shard was called on other modules"
            )

    def _restore(self, found: Checkpoint) -> None:
        own = unpack(found, *self._place())
        if own is None:
            self._drop_half_step()
            return
        dirty = bool(dict(found[JOB])["dirty"])
        refuse_other_kinds(own, {key: kind for key in own if (kind := _kind_of(key)) is not None})
        count = _size_of_first(self._shard_groups)
        if own.pop(SHARDS, None) != count:
            if dirty:
                raise ValueError(
                    f"`state` is of another mesh than {count} shards, and it still holds residuals that "
                    "belong to its shards: call state.flush() and train one more step before saving, or load it on the "
                    "mesh that saved it"
                )
            log.info("a flushed state of another mesh: the compressor starts anew")
            self._drop_half_step()
            return
        calls, nodes = own.pop(ROUNDING, None), own.pop(NODES, self._shards.nodes)
        saved = {key: own.pop(key) for key in list(own) if key.startswith(CARRIED_ON)}
        rows = {key: cast(Tensor, value) for key, value in saved.items()}
        scales = {key: float(own.pop(key)) for key in list(own) if key.startswith(SCALE_OF)}
        sums = {key: int(own.pop(key)) for key in list(own) if key.startswith(SUMS_OF)}
        if nodes != self._shards.nodes and dirty and any(key.startswith(CARRIED_ON + RESIDUAL) for key in rows):
            raise ValueError(
                f"`state` was saved with the ranks that share parameters on the nodes {nodes}, which are on "
                f"{self._shards.nodes} now, and it still holds residuals for those nodes: call "
                "state.flush() and train one more step before saving, or place the ranks as they were"
            )
        for key, each in self._shards.carried.items():
            if nodes != self._shards.nodes or (isinstance(each, ShardResidual) and not dirty):
                # Start from zero: the placement changed, or the saved residual was flushed and is zero.
                rows.pop(CARRIED_ON + key, None)
            each.check(rows.get(CARRIED_ON + key))
        for scale in scales.values():
            refuse_odd_scale(scale)
        if self._connection is not None and self._compresses_replicas:
            if TRANSFERS not in own:
                raise ValueError(
                    f"`compressor` is {self.config.compressor!r}, and `state` was saved without one between replicas: "
                    "load it without, or train on from the weights without the state"
                )
            self._connection.load_state_dict(own)
        for key, each in self._shards.carried.items():
            each.restore(rows.get(CARRIED_ON + key))
            if isinstance(each, ShardResidual):
                each.loss_scale.value = scales.get(SCALE_OF + key, 0.0)
                each.sums = sums.get(SUMS_OF + key, 0)
        for group in self._shards.rows:
            group.note()
        if self._shards.rounding is not None and calls is not None:
            self._shards.rounding.calls = int(calls)
        self._drop_half_step()

    def _drop_half_step(self) -> None:
        """Drops what is summed of a step that is under way: a state is of the end of one."""
        if self._partial:
            log.warning(
                "a state was loaded within a step: dropped the sums of earlier micro-batches of %d parameter groups, "
                "which were not averaged over the replicas yet",
                len(self._partial),
            )
            self._partial.clear()

    def _reduce(self, param_group: ShardedParamGroup, flat: Tensor) -> None:
        """Averages this rank's row of one parameter group over the replicas, in place; torch's hook.

        Args:
            param_group: Whose.
            flat: 1-D, in the parameter group's reduce dtype, divided by the number of shards.
        """
        connection = self._connected("backward()")
        communicator, compression = connection.communicator, connection.compression
        present = tuple(param_group.present)
        numel = sum(one.padded_numel for one in present)
        if numel != flat.numel():
            raise RuntimeError(
                f"FSDP2 reduces {flat.numel()} elements where {numel} were expected of {len(present)} parameters: this "
                f"torch ({torch.__version__}) arranges them otherwise than gradwire knows"
            )
        if not self._whole_sum(param_group, present, flat):
            return
        if (
            id(param_group) in self._reduced
        ):  # a parameter group that runs twice in a backward pass: residuals of its first run count now
            self._end_step(connection)
        if not self._in_step:
            self._begin_step(connection)
        self._reduced.add(id(param_group))
        layout = None if compression is None else self._names.layout(present)
        index, contents = len(self._buckets), connection.observer.contents
        if index not in contents or contents[index][0] != flat.numel():
            contents[index] = flat.numel(), tuple(shard.name for shard in self._names.of(present))
        bucket = Bucket.of(flat, layout, communicator.executor.stats.now(), index)
        scale = 1.0 / communicator.size if param_group.divide_factor is None else 1.0
        all_reduce = AllReduce((flat,), layout, (bucket,))
        try:
            communicator.start(all_reduce, scale=scale, flush=compression is not None and compression.flushing)
            future = bucket.result()
            self._under_way.append((flat, future))
            if flat.is_cuda or not param_group.keeps(present, flat.dtype):
                self._settle()
        except BaseException:
            self._finite = False  # whoever catches it and goes on: this step's state is dropped
            raise
        if flat.is_cuda:  # allocated on the stream of the reduce-scatter; torch drops it while this stream writes to it
            flat.record_stream(torch.cuda.current_stream(flat.device))
        self._buckets.append(replace(bucket, flat=NOTHING, future=None))  # its times alone
        self._sizes.append(flat.nbytes)

    def _settle_shards(self) -> None:
        """Waits for reduce-scatters that are under way. Also keeps this state as long as its model."""
        if self._shards.overlap is not None:
            self._shards.overlap.settle()

    def _settle(self) -> None:
        """Waits for the averages that are under way; on CUDA in the order of the stream.

        Raises:
            RuntimeError: One of them failed; none is under way any more.
        """
        under_way, self._under_way = self._under_way, []
        compresses = self._connection is not None and self._connection.compression is not None
        failed: RuntimeError | None = None
        for flat, future in under_way:
            try:
                future.wait()
            except RuntimeError as error:
                failed = failed or error
            if compresses and not flat.is_cuda and self._finite:
                self._finite = is_finite(flat)
        if failed is not None:
            self._finite = False
            raise failed

    def _whole_sum(self, param_group: ShardedParamGroup, present: tuple[ShardedParameter, ...], flat: Tensor) -> bool:
        """Adds up micro-batches: `flat` becomes zero but for the last, where it becomes the sum.

        Returns:
            Whether it is the sum.
        """
        before = self._partial.pop(id(param_group), None)
        if before is not None and before[0] != present:
            names = {shard.name for shard in self._names.of(before[0])} ^ {one.name for one in self._names.of(present)}
            raise RuntimeError(
                f"{', '.join(sorted(names))} had a gradient in one micro-batch and none in the next: call "
                "model.set_reduce_scatter_unused_params(True), or leave out set_requires_all_reduce(False)"
            )
        if before is not None:
            flat.add_(before[1])
        if param_group.accumulates:
            self._partial[id(param_group)] = present, flat.clone()
            flat.zero_()
            return False
        return True

    def _begin_step(self, connection: AveragingSession) -> None:
        if self.steps == 0:
            _refuse_late_param_groups(self._model(), self._param_groups)
        self._in_step = True
        self._finite = True
        communicator, compression = connection.communicator, connection.compression
        if communicator.device.type == "cuda":
            communicator.executor.stats.timing = is_timed(self.steps) or connection.listeners.wants_times
        if compression is not None and compression.loss_scale.follows_scaler:
            with communicator.exclusive():
                compression.loss_scale.follow()
        connection.listeners.step_began(self.steps)

    def _end_backward(self) -> None:
        """Runs at the end of each backward pass, on all ranks at the same point; see `at_end_of_sharded_backward`."""
        ended = self._in_step
        if ended:
            self._end_step(self._connected("backward()"))
        # By hand a step ends once, behind its last micro-batch: what has not been averaged by then never would be.
        if self._partial and (ended or self._param_groups[0].finalized_by_hand):
            left = [shard.name for present, _ in self._partial.values() for shard in self._names.of(present)]
            self._partial.clear()
            raise RuntimeError(
                f"{', '.join(left)} had gradients in earlier micro-batches, and their parameter group has none in the "
                "last: call model.set_reduce_scatter_unused_params(True), or leave out set_requires_all_reduce(False)"
            )

    def _end_step(self, connection: AveragingSession) -> None:
        communicator, compression = connection.communicator, connection.compression
        self._settle()
        self._in_step = False
        self.steps += 1
        self._reduced.clear()
        communicator.executor.release()
        communicator.executor.stats.read_times()
        if compression is not None:
            if communicator.device.type == "cuda":
                with communicator.exclusive():
                    compression.end_step_on_device(self._agreed_extremes(communicator), ())
            else:
                compression.decide(self._agreed(), ())
        buckets, self._buckets = self._buckets, []
        connection.note_sizes(self._sizes)
        self._sizes.clear()
        timed = communicator.executor.stats.timing
        connection.listeners.step_ended(EndedStep(self.steps, buckets, (), self.report, timed=timed))

    def _agreed(self) -> bool:
        """Whether the step is finite on all ranks: other ranks hold other shards."""
        verdict = torch.tensor(int(self._finite), dtype=torch.int32, device="cpu")
        for group, link in zip(self._shard_groups, self._shards.communicators, strict=True):
            issue = partial(dist.all_reduce, verdict, op=dist.ReduceOp.MIN, group=group, async_op=True)
            link.run_collective("agreement on whether the step is finite", cast(Callable[[], BackendWork], issue))
        return bool(verdict)

    def _agreed_extremes(self, communicator: Communicator) -> list[Tensor]:
        """As `_agreed`, on CUDA: a 0-dim float32 that is finite if and only if the step is, everywhere."""
        extremes = communicator.executor.extremes()
        finite = torch.ones((), dtype=torch.bool, device=communicator.device)
        for each in extremes:
            finite &= each.isfinite()
        verdict = finite.int()
        for group in self._shard_groups:
            dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=group)
        return [torch.where(verdict.bool(), 0.0, torch.inf)]


def _refuse_late_param_groups(model: nn.Module | None, param_groups: Sequence[ShardedParamGroup]) -> None:
    if model is not None and len(sharded_param_groups(model)) != len(param_groups):
        raise RuntimeError(
            f"`model` had {len(param_groups)} sharded parameter groups when gradwire was applied and has "
            f"{len(sharded_param_groups(model))} now: call gradwire.fsdp.apply() after all fully_shard"
        )


def _kind_of(key: str) -> type | UnionType | None:
    """What a rank's entry under this key is; None where it is not one of a sharded model alone."""
    fixed: dict[str, type | UnionType] = {SHARDS: int, ROUNDING: int, NODES: str}
    if key.startswith(CARRIED_ON):
        return Tensor
    if key.startswith(SUMS_OF):
        return int
    return int | float if key.startswith(SCALE_OF) else fixed.get(key)


def _size_of_first(groups: Sequence[dist.ProcessGroup]) -> int:
    return groups[0].size() if groups else 1


def shard_groups(param_groups: Sequence[ShardedParamGroup]) -> list[dist.ProcessGroup]:
    """The groups of several ranks that parameters are sharded over; equal ones once."""
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for param_group in param_groups:
        group = param_group.shard_group
        if group is not None and group.size() > 1:
            groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    return list(groups.values())
