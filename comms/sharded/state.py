"""The state of gradwire for a model that FSDP2 shards or replicates, and the steps of its training.

FSDP2 reduce-scatters a parameter group's gradients over the ranks that share its parameters; then it calls a hook with
this rank's flat shard, divided by the number of shards only. The hook averages the flat shard over the replicas. torch
goes on as soon as the hook returns. On CUDA the average is queued on the hook's stream. On a CPU it may be in flight
until the backward pass ends, if torch only makes views of the flat shard until then; else the hook waits for it.

A parameter group of `replicate()` has no shards: torch's own all-reduce is switched off, and torch calls the hook with
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
from gradwire.comms.run.phase_stats import PhaseStats, PhaseTotals
from gradwire.comms.session import NO_COMPRESSOR, UNUSABLE, AveragingSession, GradientState, SessionRanks, refused
from gradwire.comms.sharded.carried import CARRIED_ON, RESIDUAL, SUMS_OF, LoadedShards, SentShards, ShardResidual
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
from gradwire.comms.step.features import count_passes
from gradwire.comms.step.listeners import EndedStep
from gradwire.compressors.base import StateDict

NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")

log = logging.getLogger("gradwire")

ROUNDING = PREFIX + "rounding"
"""Key in a rank's entry with the number of reduce-scatters so far, on which the next random rounding depends."""

NODES = PREFIX + "nodes"
"""Key in a rank's entry with the placement of the ranks that share parameters. Residuals fit no other placement."""

TRANSFERS = PREFIX + "transfers"
"""Key in a rank's entry with the state of the compressor between replicas."""

SCALE_OF = PREFIX + "loss_scale/"
"""Prefix of the keys in a rank's entry with the loss scale of a residual; followed as `CARRIED_ON` is."""

OF_SHARDS = ", of the ranks that share parameters"
"""Suffix of a level's name in the rows of a report."""


@dataclass(frozen=True, slots=True)
class ShardTraffic:
    """FSDP2's collectives between ranks that share parameters: what runs and describes them, and the state they keep.

    Attributes:
        communicators: On a CPU, one for each process group with several ranks; closed with the model. Empty on CUDA.
        stats: Counters of compressed collectives on CUDA; None if none is compressed.
        rounding: Keys of random rounding, saved with the state; None if no collective is compressed.
        described: One line for a report, about formats and placement; empty if there are no collectives of gradwire.
        plans: Returns a paragraph about each plan of a compressed collective, for a report; none on CUDA.
        overlap: Holds the reduce-scatters in flight on a CPU, and waits for them; None on CUDA.
        torchs: Orders launches on torch's groups with gradwire's on CUDA; None on a CPU, or if only torch launches.
        nodes: Placement of the ranks as text, see `ShardLinks.nodes`; empty if no state depends on it.
        carried: State that compressed collectives keep from step to step, by key: `residual/3` is the compression error
            of the gradients of parameter group 3, `sent/3` its weights as they were sent last.
        rows: Compare between ranks what each has loaded into `carried`; one for each process group and kind of state.
    """

    communicators: tuple[Communicator, ...] = ()
    stats: PhaseStats | None = None
    rounding: Rounding | None = None
    described: str = ""
    plans: Callable[[], tuple[str, ...]] = tuple
    overlap: Overlap | None = None
    torchs: TorchGroups | None = None
    nodes: str = ""
    carried: Mapping[str, ShardResidual | SentShards] = field(default_factory=dict)
    rows: tuple[LoadedShards, ...] = ()

    @property
    def residuals(self) -> list[ShardResidual]:
        """The gradient residuals among the state in `carried`."""
        return [each for each in self.carried.values() if isinstance(each, ShardResidual)]

    def totals(self) -> tuple[PhaseTotals, ...]:
        """Returns calls, bytes and seconds of gradwire's collectives between these ranks so far."""
        every = [link.executor.stats for link in self.communicators] + ([] if self.stats is None else [self.stats])
        return tuple(replace(row, level=f"{row.level}{OF_SHARDS}") for stats in every for row in stats.totals())

    def add_to(self, report: Report) -> Report:
        """Returns a report with these collectives and their plans added."""
        rows = self.totals()
        plans = (*report.plans, *([self.described] if rows else []), *self.plans())
        return replace(report, plans=plans, rows=(*report.rows, *rows))


class FsdpState(GradientState[AveragingSession]):
    """Averages the gradients of one sharded model over its replicas, and keeps its residuals; made by `fsdp.apply`.

    Args:
        model: The sharded or replicated model; kept by a weak reference.
        param_groups: The model's parameter groups.
        names: Names of the model's parameters.
        replicas: The ranks that hold the same shards as this one, over which gradients are averaged; None if there are
            none. Then there is no session: no listener follows the steps, and `straggler_every` and `stall_seconds`
            change nothing. Collectives between the ranks that share parameters do not depend on it; see `_take_shards`.
        config: The configuration.
        reporter: Reports a rank failure to all ranks of the grid.

    Raises:
        RuntimeError: A replica did not join within the time-out.
        ValueError: A replica joined with another configuration; or an option does not fit sharded models.
    """

    OPTIONS = (*PLANNING, *COMPRESSION, *WATCHING)
    MARK = SHARDS
    NOT_CONNECTED = "`replicas` is not set: {call} does not cover torch's own collectives"

    samples = refused("samples", "FSDP2 averages over ranks; use equal shares of the data, or DDP with HookState")

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
        """`id` of a parameter group -> (parameters with a gradient, sum of their flat shards that is not averaged
        yet)."""
        self._put_back = [param_group.remember_collectives() for param_group in param_groups]
        """Functions that `close()` calls to restore torch's collectives."""
        self._shards = ShardTraffic()
        self._in_step = False
        self._reduced: set[int] = set()
        """`id` of each parameter group that the hook has averaged in this step."""
        self._finite = True
        self._in_flight: list[tuple[Tensor, FutureTensor]] = []
        """(flat shard, future of its average) for each average in flight."""
        self._buckets: list[Bucket] = []
        """This step's flat shards, without their tensors: they keep the times for the listeners."""
        self._sizes: list[int] = []
        """Bytes of each flat shard of this step."""
        if replicas is not None:
            self._connect(replicas, param_groups[0].device, reporter)
            for param_group in param_groups:
                param_group.set_hook(lambda flat, param_group=param_group: self._reduce(param_group, flat))  # type: ignore[misc]
                if param_group.replica_group is not None:
                    self._put_back.append(param_group.leave_out_all_reduce())
            at_end_of_sharded_backward(model, self._end_backward, self._drop_iteration)

    def _connect(self, group: dist.ProcessGroup, device: torch.device, reporter: StoreFailureReporter) -> None:
        """Connects the replicas, and makes the compressor between them; all replicas call it at the same point."""
        ranks = SessionRanks.of(group, "sharded", reporter=reporter.of_group(dist.get_process_group_ranks(group)))
        self._session = session = AveragingSession(ranks, device, self.config, self._names.numels())
        session.communicator.executor.checking = session.compression is not None
        session.connect(BUCKET_NBYTES)
        session.compare_loaded()
        session.watch_steps()
        if session.compression is not None:
            count_passes(session.listeners, session.compression, dict(self._names.named_parameters()).values())

    def _take_shards(self, model: nn.Module, shards: "ShardTraffic") -> None:
        """Takes over the collectives between the ranks that share parameters; `apply` calls it once.

        Args:
            model: The sharded model.
            shards: Collectives between those ranks, and their state.
        """
        self._shards = shards
        if shards.overlap is not None:
            at_end_of_sharded_backward(model, self._wait_for_shards)
        if self._compresses_replicas or self._shards.residuals:
            self._check_optimizers(self._names)

    def report(self) -> Report:
        """Returns calls, bytes and seconds of every phase so far, and the plans in use with their reasons.

        Torch's own collectives are left out. Compressed ones on CUDA have rows for their part between nodes only,
        without seconds.
        """
        if self._session is None:
            title = self._shards.described or "torch's own collectives"
            return Report(title, self._shards.plans(), self._shards.totals(), 0, self.steps)
        return self._shards.add_to(self._session.report(self.steps))

    def close(self) -> None:
        """Stops the threads, releases shared memory and restores torch's own collectives.

        A model can be trained on with torch's collectives. Only if torch does not know its replicas, because
        `fully_shard` was given one dimension of the mesh, can it just be evaluated: nothing averages over them. Also
        runs when the model is collected, and at exit.
        """
        self._check_no_optimizers(self._names)
        for put_back in self._put_back:
            put_back()
        if self._session is not None:
            self._session.observer.close()
        if self._shards.torchs is not None:
            self._shards.torchs.close()
        for communicator in (
            *([] if self._session is None else [self._session.communicator]),
            *self._shards.communicators,
        ):
            communicator.close()

    def _flush_shards(self) -> bool:
        """Makes the next step send the residuals, and the next all-gather exact; returns whether any state is kept."""
        for each in self._shards.carried.values():
            if isinstance(each, ShardResidual):
                each.flushing = True
            else:
                each.restore(None)
        return bool(self._shards.carried)

    def _loss_scales(self, call: str) -> list[LossScale]:
        """Returns the loss scales of all residuals: of those between nodes, then of those between replicas.

        Args:
            call: Name of the method that the user called, for errors.
        """
        shards = [each.loss_scale for each in self._shards.residuals]
        return [*shards, *(super()._loss_scales(call) if self._compresses_replicas or not shards else [])]

    @property
    def dirty(self) -> bool:
        """True if residuals are pending, so that the state fits these ranks only; the same on all ranks."""
        return super().dirty or any(each.holds for each in self._shards.residuals)

    def _kept_in_words(self) -> str:
        """Returns the options by which this state keeps tensors from step to step, such as residuals; "" without any.

        That is the compressor's name, "`shards`", or both with "and". A warning names them if the optimizer has loaded
        a checkpoint and this state has not, so that these tensors are lost. `weights` is never named: without the flat
        shards that were sent last, the next all-gather is just exact.
        """
        shards = "`shards`" if any(each.rows is not None for each in self._shards.residuals) else ""
        return " and ".join(filter(None, (super()._kept_in_words(), shards)))

    @property
    def _compresses_replicas(self) -> bool:
        return self._session is not None and self._session.compression is not None

    @property
    def _keeps(self) -> bool:
        return self._shards.rounding is not None or self._compresses_replicas

    def _place(self) -> tuple[int, int]:
        """Returns (rank, number of ranks) of the default group: each rank has an entry of its own in a checkpoint."""
        return dist.get_rank(), dist.get_world_size()

    def _own_state(self) -> StateDict:
        """Returns this rank's entry of a checkpoint: also the carried flat shards and the placement of ranks."""
        own = super()._own_state()
        if self._shards.rounding is not None:
            own[ROUNDING] = self._shards.rounding.calls
        for key, each in self._shards.carried.items():
            if each.rows is not None:
                own[CARRIED_ON + key] = each.rows.clone()  # they change in place
            if isinstance(each, ShardResidual):
                own |= {SCALE_OF + key: float(each.loss_scale.value), SUMS_OF + key: each.sums}
        return own | {SHARDS: _size_of_first(self._shard_groups), NODES: self._shards.nodes}

    def _refuse_unknown_residuals(self, saved: Checkpoint) -> None:
        """Refuses a checkpoint with residuals that this model does not keep.

        Raises:
            ValueError: No compressor, or no residual of `shards`, or no such parameter group is here.
        """
        keys = {key for part in without_job(saved) for key in part}
        if TRANSFERS in keys and not self._compresses_replicas:
            raise ValueError(UNUSABLE.format(found=NO_COMPRESSOR))
        residuals = {key.removeprefix(CARRIED_ON) for key in keys if key.startswith(CARRIED_ON + RESIDUAL)}
        homes = {key for key, each in self._shards.carried.items() if isinstance(each, ShardResidual)}
        if residuals and not homes:
            raise ValueError(UNUSABLE.format(found="`shards` keeps no residual here"))
        if more := residuals - homes:
            raise ValueError(
                f"`state` holds residuals of {len(more)} parameter groups that `model` does not have: it is of "
                "another model, or fully_shard was called on other modules"
            )

    def _restore(self, saved: Checkpoint) -> None:
        """Loads this rank's entry of a checkpoint; nothing is changed before all of it was accepted.

        Raises:
            ValueError: The entry is of another model, mesh or placement and still holds residuals; it was saved without
                the compressor that is used between replicas; or it is damaged.
        """
        own = unpack(saved, *self._place())
        if own is None:
            self._starts_afresh(saved)
            self._drop_half_step()
            return
        # Refuse damaged entries. A flushed state of another mesh holds nothing that could be used.
        dirty = bool(dict(saved[JOB])["dirty"])
        refuse_other_kinds(own, {key: kind for key in own if (kind := _kind_of(key)) is not None})
        count = _size_of_first(self._shard_groups)
        if own.pop(SHARDS, None) != count:
            if dirty:
                raise ValueError(
                    f"`state` is of another mesh than {count} shards, and it still holds residuals that "
                    "belong to its shards: call state.flush() and train one more step before saving, or load it on the "
                    "mesh that saved it"
                )
            self._starts_afresh(saved)
            self._drop_half_step()
            return
        # Take the entries of the shards out; the others are the compressor's between replicas.
        calls, nodes = own.pop(ROUNDING, None), own.pop(NODES, self._shards.nodes)
        carried = {key: own.pop(key) for key in list(own) if key.startswith(CARRIED_ON)}
        rows = {key: cast(Tensor, value) for key, value in carried.items()}
        scales = {key: float(own.pop(key)) for key in list(own) if key.startswith(SCALE_OF)}
        sums = {key: int(own.pop(key)) for key in list(own) if key.startswith(SUMS_OF)}
        # Check everything, then load it.
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
        if self._session is not None and self._compresses_replicas:
            if TRANSFERS not in own:
                raise ValueError(
                    f"`compressor` is {self.config.compressor!r}, and `state` was saved without one between replicas: "
                    "load it without, or train on from the weights without the state"
                )
            self._session.load_state_dict(own)
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
        """Drops the sums of earlier micro-batches: a loaded state is that of the end of a step."""
        if self._partial:
            log.warning(
                "a state was loaded within a step: dropped the sums of earlier micro-batches of %d parameter groups, "
                "which were not averaged over the replicas yet",
                len(self._partial),
            )
            self._partial.clear()

    def _drop_iteration(self) -> None:
        """Drops what belongs to an iteration that the script has reset: sums, and what the compressor has kept of it.

        A step that has begun ends with the next flat shard, when all ranks are there, as one that is not finite.
        """
        self._partial.clear()
        if self._in_step:
            self._finite = False
            self._reduced.update(map(id, self._param_groups))

    def _reduce(self, param_group: ShardedParamGroup, flat: Tensor) -> None:
        """Averages one parameter group's flat shard over the replicas; torch calls it after the reduce-scatter.

        Before a step's last micro-batch it only adds the flat shard to the sum that is kept. On a CPU the average may
        be in flight when this returns, if torch does not read it before the backward pass ends.

        Args:
            param_group: The parameter group of the flat shard.
            flat: 1-D flat shard in the parameter group's reduce dtype, divided by the number of shards; changed in
                place.

        Raises:
            RuntimeError: The flat shard has another length than expected, or the average failed; or other parameters
                had a gradient than in the micro-batch before.
        """
        session = self._connected("backward()")
        communicator, compression = session.communicator, session.compression
        present = tuple(param_group.present)
        numel = sum(one.padded_numel for one in present)
        if numel != flat.numel():
            raise RuntimeError(
                f"FSDP2 reduces {flat.numel()} elements where {numel} were expected of {len(present)} parameters: this "
                f"torch ({torch.__version__}) arranges them otherwise than gradwire knows"
            )
        # Average only with the last micro-batch, and begin a step with its first flat shard.
        if not self._whole_sum(param_group, present, flat):
            return
        if (
            id(param_group) in self._reduced
        ):  # a parameter group that runs twice in a backward pass: residuals of its first run count now
            self._end_step(session)
        if not self._in_step:
            self._begin_step(session)
        for listener in session.listeners.for_buckets:
            listener.bucket_arrived(None, [one.sharded for one in present], flat)
        self._reduced.add(id(param_group))
        # Describe the flat shard to the executor and to the observer, and start its average.
        layout = None if compression is None else self._names.layout(present)
        index, contents = len(self._buckets), session.observer.contents
        if index not in contents or contents[index][0] != flat.numel():
            contents[index] = flat.numel(), tuple(shard.name for shard in self._names.of(present))
        bucket = Bucket.of(flat, layout, communicator.executor.stats.now(), index)
        scale = 1.0 / communicator.size if param_group.divide_factor is None else 1.0
        all_reduce = AllReduce((flat,), layout, (bucket,))
        try:
            communicator.start(all_reduce, scale=scale, flush=compression is not None and compression.flushing)
            future = bucket.result()
            self._in_flight.append((flat, future))
            if flat.is_cuda or not param_group.keeps(present, flat.dtype):
                self._wait_for_averages()
        except BaseException:
            self._finite = False  # if the caller catches it and continues, this step's state is dropped
            raise
        if flat.is_cuda:  # allocated on the stream of the reduce-scatter; torch drops it while this stream writes to it
            flat.record_stream(torch.cuda.current_stream(flat.device))
        self._buckets.append(replace(bucket, flat=NOTHING, future=None))  # its times alone
        self._sizes.append(flat.nbytes)

    def _wait_for_shards(self) -> None:
        """Waits for the reduce-scatters in flight. The model keeps this method, and so this state, alive."""
        if self._shards.overlap is not None:
            self._shards.overlap.wait_all()

    def _wait_for_averages(self) -> None:
        """Waits for the averages in flight; on CUDA the current stream waits, and the host does not.

        Raises:
            RuntimeError: One of them failed; none is in flight afterwards.
        """
        in_flight, self._in_flight = self._in_flight, []
        compresses = self._session is not None and self._session.compression is not None
        failed: RuntimeError | None = None
        for flat, future in in_flight:
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
        """Adds the gradients of a step's earlier micro-batches to a flat shard; all are averaged once, at the last one.

        Args:
            param_group: Parameter group whose flat shard it is.
            present: Parameters of the group with a gradient in this micro-batch.
            flat: 1-D flat shard of this micro-batch, changed in place: at the last micro-batch of the step it becomes
                the sum of all of them. At the others that sum is kept for the next micro-batch, and `flat` becomes
                zero.

        Returns:
            True at the last micro-batch, when `flat` has to be averaged; False at all others.

        Raises:
            RuntimeError: Other parameters than in the micro-batch before had a gradient, so the flat shards do not
                match.
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

    def _begin_step(self, session: AveragingSession) -> None:
        """Begins a step at its first flat shard: says if it is timed, takes over the loss scale, calls the listeners.

        Raises:
            RuntimeError: In the first step: `fully_shard` was called after `apply`. Or what a listener raises.
        """
        if self.steps == 0:
            _refuse_late_param_groups(self._model(), self._param_groups)
        self._finite = True
        communicator, compression = session.communicator, session.compression
        if communicator.device.type == "cuda":
            communicator.executor.stats.timing = is_timed(self.steps) or session.listeners.wants_times
        if compression is not None and compression.loss_scale.follows_scaler:
            with communicator.exclusive():
                compression.loss_scale.follow()
        session.listeners.step_began(self.steps)
        self._in_step = True  # only now: a step that a listener refuses has not begun, and the next one is refused, too

    def _end_backward(self) -> None:
        """Ends the step at the end of a backward pass; called as `at_end_of_sharded_backward` says, on all ranks alike.

        Raises:
            RuntimeError: Parameters had gradients in earlier micro-batches that the last one did not average.
        """
        ended = self._in_step
        if ended:
            self._end_step(self._connected("backward()"))
        # A step ends once, after its last micro-batch: a sum that is left now would never be averaged.
        if self._partial and (ended or self._param_groups[0].finalized_by_hand):
            left = [shard.name for present, _ in self._partial.values() for shard in self._names.of(present)]
            self._partial.clear()
            raise RuntimeError(
                f"{', '.join(left)} had gradients in earlier micro-batches, and their parameter group has none in the "
                "last: call model.set_reduce_scatter_unused_params(True), or leave out set_requires_all_reduce(False)"
            )

    def _end_step(self, session: AveragingSession) -> None:
        """Ends a step: waits for its averages, commits or drops the compressor's state, and calls the listeners."""
        communicator, compression = session.communicator, session.compression
        self._wait_for_averages()
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
                compression.end_pass(finite=self._agreed(), layouts=())
        buckets, self._buckets = self._buckets, []
        session.note_sizes(self._sizes)
        self._sizes.clear()
        shards, timed = self._shards, communicator.executor.stats.timing
        report = lambda steps: shards.add_to(communicator.report(steps))
        session.listeners.step_ended(EndedStep(self.steps, buckets, (), report, timed=timed))

    def _agreed(self) -> bool:
        """Returns whether the step is finite on all ranks that share parameters; blocks for an all-reduce."""
        verdict = torch.tensor(int(self._finite), dtype=torch.int32, device="cpu")
        for group, link in zip(self._shard_groups, self._shards.communicators, strict=True):
            issue = partial(dist.all_reduce, verdict, op=dist.ReduceOp.MIN, group=group, async_op=True)
            link.run_collective("agreement on whether the step is finite", cast(Callable[[], BackendWork], issue))
        return bool(verdict)

    def _agreed_extremes(self, communicator: Communicator) -> list[Tensor]:
        """Makes the number by which the device decides whether the step is finite on all ranks; the host does not wait.

        Args:
            communicator: Communicator of the replicas, whose averages are checked.

        Returns:
            One 0-dim float32: 0 if the step is finite on all ranks that share parameters, else inf.
        """
        extremes = communicator.executor.extremes()
        finite = torch.full((), self._finite, dtype=torch.bool, device=communicator.device)
        for each in extremes:
            finite &= each.isfinite()
        verdict = finite.int()
        for group in self._shard_groups:
            dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=group)
        return [torch.where(verdict.bool(), 0.0, torch.inf)]


def _refuse_late_param_groups(model: nn.Module | None, param_groups: Sequence[ShardedParamGroup]) -> None:
    """Refuses a model on which `fully_shard` was called after `apply`; a collected model (None) passes.

    Raises:
        RuntimeError: The model has other parameter groups than `apply` has seen.
    """
    if model is not None and len(sharded_param_groups(model)) != len(param_groups):
        raise RuntimeError(
            f"`model` had {len(param_groups)} sharded parameter groups when gradwire was applied and has "
            f"{len(sharded_param_groups(model))} now: call gradwire.fsdp.apply() after all fully_shard"
        )


def _kind_of(key: str) -> type | UnionType | None:
    """Returns the type that a value of a rank's saved state must have, by its key; for the check of a checkpoint.

    Args:
        key: Key in the state that a rank has saved.

    Returns:
        The type; None for keys of the compressor between replicas, which checks these itself.
    """
    fixed: dict[str, type | UnionType] = {SHARDS: int, ROUNDING: int, NODES: str}
    if key.startswith(CARRIED_ON):
        return Tensor
    if key.startswith(SUMS_OF):
        return int
    return int | float if key.startswith(SCALE_OF) else fixed.get(key)


def _size_of_first(groups: Sequence[dist.ProcessGroup]) -> int:
    """Returns the number of ranks of the first group; 1 if there is none."""
    return groups[0].size() if groups else 1


def shard_groups(param_groups: Sequence[ShardedParamGroup]) -> list[dist.ProcessGroup]:
    """Returns the process groups of two ranks or more over which parameters are sharded, each set of ranks once."""
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for param_group in param_groups:
        group = param_group.shard_group
        if group is not None and group.size() > 1:
            groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    return list(groups.values())
