"""What gradwire keeps for a model that FSDP2 shards, and the step it goes through.

FSDP2 reduce-scatters a unit's gradients over the ranks that share its parameters; then it calls a hook with this rank's
row, which the state averages over the replicas. What the hook is given is divided by the number of shards only. torch
goes on as soon as the hook returns: on CUDA the average is in the order of the stream that the hook runs on. On a CPU
it is under way until the end of the backward pass, where torch makes nothing but views of it until then; else the hook
waits for it.
"""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.comms.bootstrap.compat import (
    BackendWork,
    ShardedParameter,
    ShardedUnit,
    at_end_of_sharded_backward,
    sharded_units,
    store_of,
)
from gradwire.comms.bootstrap.failure import FailureBoard
from gradwire.comms.checkpoint import JOB, PREFIX, Checkpoint, normalize, pack, unpack
from gradwire.comms.communicator import Communicator
from gradwire.comms.compression import Compression, LossScaler, is_finite
from gradwire.comms.config import Config
from gradwire.comms.execute import Bucket, FutureTensor, Launch, PhaseTotals
from gradwire.comms.plan.plan import BUCKET_NBYTES
from gradwire.comms.report import Report
from gradwire.comms.sharded.collectives import Rounding
from gradwire.comms.sharded.layout import ShardNames
from gradwire.comms.sharded.overlap import Overlap
from gradwire.comms.sharded.turns import TorchGroups
from gradwire.comms.step.features import watch_steps
from gradwire.comms.step.life import is_timed
from gradwire.comms.step.listeners import EndedStep, Listeners
from gradwire.compressors.base import StateDict

if TYPE_CHECKING:
    from gradwire.comms.autotune.job_advice import JobAdvice

NOTHING = torch.empty(0)

log = logging.getLogger("gradwire")

SHARDS = PREFIX + "shards"
"""Key in a rank's entry: over how many ranks the first unit's parameters are sharded."""

ROUNDING = PREFIX + "rounding"
"""Key in a rank's entry: reduce-scatters so far, from which the random rounding of the next one follows."""

OF_SHARDS = ", of the ranks that share parameters"
"""Behind a level's name in a report's rows."""

_numbers: "dict[str, count[int]]" = {}
"""Replica group -> numbers for the states that are made on it, in the same order on all ranks."""


class FsdpState:
    """The gradients, and what is held back of them, of one sharded model; `gradwire.fsdp.apply` makes it.

    Args:
        model: What was sharded.
        units: Of the model.
        names: Of its parameters.
        replicas: The ranks that hold the same shards as this one; None leaves the gradients to torch.
        config: The configuration.
        board: Where all ranks of the grid hear that one of them has failed.

    Raises:
        RuntimeError: A replica did not join within the time-out.
        ValueError: A replica joined with another configuration; or an option does not fit sharded models.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ShardedUnit],
        names: ShardNames,
        replicas: dist.ProcessGroup | None,
        config: Config,
        board: FailureBoard,
    ) -> None:
        self.config = config
        self.steps = 0
        """Backward passes so far, whose gradients were averaged over the replicas."""
        self._model = weakref.ref(model)
        self._units = tuple(units)
        self._names = names
        self._communicator: Communicator | None = None
        self._compression: Compression | None = None
        self._shard_groups = shard_groups(units)
        self._partial: dict[int, tuple[tuple[ShardedParameter, ...], Tensor]] = {}
        """Unit -> whose gradients, and their sum over the micro-batches that have not been averaged."""
        self._links: tuple[Communicator, ...] = ()
        self._torchs = [(unit.all_gather, unit.reduce_scatter) for unit in units]
        self._overlap: Overlap | None = None
        self._beside: TorchGroups | None = None
        self._shard_totals: tuple[PhaseTotals, ...] = ()
        self._rounding: Rounding | None = None
        self._described = ""
        self._in_step = False
        self._reduced: set[int] = set()
        self._finite = True
        self._under_way: list[tuple[Tensor, FutureTensor]] = []
        """On a CPU: averages that torch has made gradients of already."""
        self._buckets: list[Bucket] = []
        self._sizes: list[int] = []
        self._last_sizes: list[int] = []
        if replicas is not None:
            self._connect(replicas, units[0].device, board)
            for unit in units:
                unit.set_hook(lambda flat, unit=unit: self._reduce(unit, flat))  # type: ignore[misc]
            at_end_of_sharded_backward(units, self._end_backward)

    def _connect(self, group: dist.ProcessGroup, device: torch.device, board: FailureBoard) -> None:
        config = self.config
        if config.compressor not in (None, "none"):
            self._compression = Compression(
                config.compressor, config.compressor_options, config.rules, group.rank(), group.size()
            )
            self._compression.compressor.bind_model(self._names.numels())
        self._communicator = Communicator(
            store_of(group),
            group.rank(),
            group.size(),
            device,
            config,
            name=f"sharded{next(_numbers.setdefault(group.group_name, count()))}",
            compressor=self._compression.compressor if self._compression else None,
            group=group,
            board=board.of_group(dist.get_process_group_ranks(group)),
        )
        weakref.finalize(self, self._communicator.close)
        self._communicator.executor.checking = self._compression is not None
        self._communicator.routes.settle(BUCKET_NBYTES)
        self._communicator.connect(BUCKET_NBYTES)
        self._listeners = Listeners()
        self._watch, self._observer = watch_steps(self._listeners, self._communicator, config, group)
        weakref.finalize(self, self._observer.close)

    def take_links(
        self,
        communicators: Sequence[Communicator],
        totals: Sequence[PhaseTotals],
        rounding: Rounding | None,
        described: str,
        overlap: Overlap | None,
        torchs: TorchGroups | None,
    ) -> None:
        """Takes in what goes on between the ranks that share parameters.

        Args:
            communicators: On a CPU, of this rank's groups of several ranks; they end with the model, or with `close`.
            totals: Counted while the model trains; for reports.
            rounding: Saved and restored with the state; None where nothing is rounded.
            described: In one line.
            overlap: Carries the collectives out, on a CPU.
            torchs: Has torch's collectives and gradwire's take turns, on CUDA.
        """
        self._overlap = overlap
        self._beside = torchs
        if overlap is not None:
            at_end_of_sharded_backward(self._units, self._settle_shards)
        self._links = tuple(communicators)
        self._shard_totals = tuple(totals)
        self._rounding = rounding
        self._described = described

    def report(self) -> Report:
        """Calls, bytes and seconds of every phase so far, and the plans in use with their reasons.

        Torch's own collectives are not in it; of those in fewer bits, calls and bytes between nodes are.
        """
        rows = [replace(total) for total in self._shard_totals]
        for link in self._links:
            rows += [replace(row, level=f"{row.level}{OF_SHARDS}") for row in link.executor.totals()]
        described = [self._described] if rows else []
        if self._communicator is None:
            return Report(self._described or "torch's own collectives", (), tuple(rows), 0, self.steps)
        found = self._listeners.add_to(self._communicator.report(self.steps))
        return replace(found, plans=(*found.plans, *described), rows=(*found.rows, *rows))

    def advise(self, optimizer: str = "sgd") -> "JobAdvice":
        """Recommends a plan and a compressor between replicas, from what this rank has measured.

        Args:
            optimizer: `sgd`, `adam`, ...: some compressors require one.

        Raises:
            RuntimeError: There are no `replicas`, or fewer than three steps have been seen.
        """
        routes = self._between_replicas("advise()").routes
        observed = self._watch.observed()
        if observed is None:
            raise RuntimeError("this state has seen fewer than three steps: call advise() later")
        from gradwire.comms.autotune.job_advice import advise_job  # here: it knows every compressor

        return advise_job(routes.cluster, self._last_sizes, observed, optimizer, routes.library)

    def watch(self, scaler: LossScaler) -> None:
        """Follows a torch.amp.GradScaler: residuals are rescaled when it changes its scale.

        Raises:
            ValueError: There is no compressor.
        """
        self._compressed().watch(scaler)

    def set_loss_scale(self, scale: float) -> None:
        """Sets the factor that the next gradients carry, where no GradScaler does; call it before backward.

        Raises:
            ValueError: There is no compressor, or `scale` is not a positive number.
        """
        self._compressed().set_loss_scale(scale)

    def flush(self) -> None:
        """Sends the next step's gradients dense, with every residual added: afterwards nothing is held back.

        To be called on all ranks before the same step; before a checkpoint that is to be loaded on another mesh.

        Raises:
            ValueError: There is no compressor.
        """
        self._compressed().flushing = True

    @property
    def dirty(self) -> bool:
        """Whether residuals are held back, so that the state fits this mesh alone; the same on all ranks."""
        return self._compression is not None and self._compression.dirty

    def state_dict(self) -> Checkpoint:
        """This rank's residuals, momenta and factors; every rank saves its own.

        Keys and values are as those of `HookState.state_dict`, by the rank in the default group, so that
        torch.distributed.checkpoint may be given the state itself. Empty where nothing is kept.
        """
        own = self._own_state()
        return pack(own, dist.get_rank(), dist.get_world_size(), self.dirty) if own else {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restores what `state_dict` returned on this rank; training goes on bit for bit.

        On another mesh a state is taken only if it was flushed before it was saved (`flush()`, one step, save);
        momenta and warm-start factors then build up again.

        Raises:
            ValueError: The state is of another model, compressor, rank or mesh; nothing was changed.
        """
        mine = self._own_state()
        if not state and not mine:
            return
        found = normalize(state)
        dirty = bool(dict(found[JOB])["dirty"])
        if self._compression is None and dirty:
            raise ValueError(
                "`compressor` is not set, and `state` holds residuals that would be lost: set the compressor that "
                "saved it, or call state.flush() and train one more step before saving"
            )
        own = unpack(found, dist.get_rank(), dist.get_world_size()) if mine else None
        if own is None:
            return
        if own.pop(SHARDS, None) != mine[SHARDS]:
            if dirty:
                raise ValueError(
                    f"`state` is of another mesh than {mine[SHARDS]} shards, and it still holds residuals that belong "
                    "to its shards: call state.flush() and train one more step before saving, or load it on the mesh "
                    "that saved it"
                )
            log.info("a flushed state of another mesh: the compressor starts anew")
            return
        self._take_over(own)

    def close(self) -> None:
        """Ends the threads and releases shared memory; happens by itself when the model is collected or at exit.

        Torch's own collectives are put back between the ranks that share parameters, so the model can still be
        evaluated; with `replicas` it can be trained no more.
        """
        for unit, (all_gather, reduce_scatter) in zip(self._units, self._torchs, strict=True):
            unit.set_all_gather(all_gather)
            unit.set_reduce_scatter(reduce_scatter)
        if self._communicator is not None:
            self._observer.close()
        if self._overlap is not None:
            self._overlap.close()
        if self._beside is not None:
            self._beside.close()
        for communicator in (self._communicator, *self._links):
            if communicator is not None:
                communicator.close()

    def _own_state(self) -> StateDict:
        own: StateDict = {}
        if self._compression is not None and self._communicator is not None:
            with self._communicator.alone():
                own |= self._compression.state_dict()
            self._communicator.rejoin()
        if self._rounding is not None:
            own[ROUNDING] = self._rounding.calls
        if own:
            own[SHARDS] = self._shard_groups[0].size() if self._shard_groups else 1
        return own

    def _take_over(self, own: StateDict) -> None:
        calls = own.pop(ROUNDING, None)
        if self._compression is not None and self._communicator is not None:
            with self._communicator.alone():
                self._compression.load_state_dict(own)
            self._communicator.state_loaded()
        if self._rounding is not None and calls is not None:
            self._rounding.calls = int(calls)

    def _compressed(self) -> Compression:
        if self._compression is None:
            raise ValueError("`compressor` is not set: there is no state to keep")
        return self._compression

    def _between_replicas(self, call: str) -> Communicator:
        if self._communicator is None:
            raise RuntimeError(f"`replicas` is not set: {call} has nothing to say about torch's own collectives")
        return self._communicator

    def _reduce(self, unit: ShardedUnit, flat: Tensor) -> None:
        """Averages this rank's row of one unit over the replicas, in place; torch's hook.

        Args:
            unit: Whose.
            flat: 1-D, in the unit's reduce dtype, divided by the number of shards.
        """
        communicator = self._between_replicas("backward()")
        present = tuple(unit.present)
        numel = sum(one.padded_numel for one in present)
        if numel != flat.numel():
            raise RuntimeError(
                f"FSDP2 reduces {flat.numel()} elements where {numel} were expected of {len(present)} parameters: this "
                f"torch ({torch.__version__}) arranges them otherwise than gradwire knows"
            )
        if not self._whole_sum(unit, present, flat):
            return
        if id(unit) in self._reduced:  # a unit that runs twice in a backward pass: residuals of its first run count now
            self._end_step(communicator)
        if not self._in_step:
            self._begin_step(communicator)
        self._reduced.add(id(unit))
        compression = self._compression
        layout = None if compression is None else self._names.layout(present)
        index, contents = len(self._buckets), self._observer.contents
        if index not in contents or contents[index][0] != flat.numel():
            contents[index] = flat.numel(), tuple(shard.name for shard in self._names.of(present))
        bucket = Bucket.of(flat, layout, communicator.clock.now() if communicator.executor.timing else None, index)
        scale = 1.0 / communicator.size if unit.divide_factor is None else 1.0
        launch = Launch((flat,), layout, (bucket,))
        try:
            communicator.start(launch, scale=scale, flush=compression is not None and compression.flushing)
            future = bucket.result()
            self._under_way.append((flat, future))
            if flat.is_cuda or not unit.keeps(present, flat.dtype):
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
        if self._overlap is not None:
            self._overlap.settle()

    def _settle(self) -> None:
        """Waits for the averages that are under way; on CUDA in the order of the stream.

        Raises:
            RuntimeError: One of them failed; none is under way any more.
        """
        under_way, self._under_way = self._under_way, []
        failed: RuntimeError | None = None
        for flat, future in under_way:
            try:
                future.wait()
            except RuntimeError as error:
                failed = failed or error
            if self._compression is not None and not flat.is_cuda and self._finite:
                self._finite = is_finite(flat)
        if failed is not None:
            self._finite = False
            raise failed

    def _whole_sum(self, unit: ShardedUnit, present: tuple[ShardedParameter, ...], flat: Tensor) -> bool:
        """Adds up micro-batches: `flat` becomes zero but for the last, where it becomes the sum.

        Returns:
            Whether it is the sum.
        """
        before = self._partial.pop(id(unit), None)
        if before is not None and before[0] != present:
            names = {shard.name for shard in self._names.of(before[0])} ^ {one.name for one in self._names.of(present)}
            raise RuntimeError(
                f"{', '.join(sorted(names))} had a gradient in one micro-batch and none in the next: call "
                "model.set_reduce_scatter_unused_params(True), or leave out set_requires_all_reduce(False)"
            )
        if before is not None:
            flat.add_(before[1])
        if unit.accumulates:
            self._partial[id(unit)] = present, flat.clone()
            flat.zero_()
            return False
        return True

    def _begin_step(self, communicator: Communicator) -> None:
        if self.steps == 0:
            self._refuse_late_units()
        self._in_step = True
        self._finite = True
        if communicator.device.type == "cuda":
            communicator.executor.timing = is_timed(self.steps) or self._listeners.wants_times
        if self._compression is not None and self._compression.follows_scaler:
            with communicator.alone():
                self._compression.begin_step()
        self._listeners.step_began(self.steps)

    def _refuse_late_units(self) -> None:
        model = self._model()
        if model is not None and len(sharded_units(model)) != len(self._units):
            raise RuntimeError(
                f"`model` had {len(self._units)} sharded units when gradwire was applied and has "
                f"{len(sharded_units(model))} now: call gradwire.fsdp.apply() after all fully_shard"
            )

    def _end_backward(self) -> None:
        """Runs at the end of each backward pass, on all ranks at the same point."""
        if not self._in_step:
            return
        self._end_step(self._between_replicas("backward()"))
        if self._partial:
            left = [shard.name for present, _ in self._partial.values() for shard in self._names.of(present)]
            self._partial.clear()
            raise RuntimeError(
                f"{', '.join(left)} had gradients in earlier micro-batches, and the unit has none in the last: call "
                "model.set_reduce_scatter_unused_params(True), or leave out set_requires_all_reduce(False)"
            )

    def _end_step(self, communicator: Communicator) -> None:
        self._settle()
        self._in_step = False
        self.steps += 1
        self._reduced.clear()
        communicator.executor.release()
        communicator.executor.read_times()
        if self._compression is not None:
            if communicator.device.type == "cuda":
                with communicator.alone():
                    self._compression.end_step_on_device(self._agreed_extremes(communicator), ())
            else:
                self._compression.decide(self._agreed(), ())
        buckets, self._buckets = self._buckets, []
        self._last_sizes, self._sizes = self._sizes, []
        timed = communicator.executor.timing
        self._listeners.step_ended(EndedStep(self.steps, buckets, (), self.report, timed=timed))

    def _agreed(self) -> bool:
        """Whether the step is finite on all ranks: other ranks hold other shards."""
        verdict = torch.tensor(int(self._finite), dtype=torch.int32)
        for group, link in zip(self._shard_groups, self._links, strict=True):
            issue = partial(dist.all_reduce, verdict, op=dist.ReduceOp.MIN, group=group, async_op=True)
            link.carry_out("agreement on whether the step is finite", cast(Callable[[], BackendWork], issue))
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


def shard_groups(units: Sequence[ShardedUnit]) -> list[dist.ProcessGroup]:
    """The groups of several ranks that parameters are sharded over; equal ones once."""
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for unit in units:
        group = unit.shard_group
        if group is not None and group.size() > 1:
            groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    return list(groups.values())
