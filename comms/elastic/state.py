"""The hook's state in elastic training, which repeats a step if a rank fails before all ranks have its averages."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.comms.bootstrap.compat import GradBucket
from gradwire.comms.config import Config
from gradwire.comms.elastic.ddp import ElasticTraining, OnMembershipChange
from gradwire.comms.elastic.membership import View
from gradwire.comms.elastic.resilient_ops import Change
from gradwire.comms.elastic.transfer import Carried
from gradwire.comms.hook import HookState
from gradwire.comms.resume import Resume
from gradwire.comms.run.all_reduces import Bucket, FutureTensor
from gradwire.comms.session import GradientSession

if TYPE_CHECKING:
    from gradwire.comms.checkpoint import Checkpoint

log = logging.getLogger("gradwire")

JOINED = (
    "`state` was loaded by a process that has just joined a running job. That job has sent it the model, the objects "
    "in `extra_state` and the compressor's counters: load no checkpoint if GRADWIRE_ELASTIC names a job"
)


class ElasticHookState(HookState):
    """Completes the steps of a DDP model even if ranks fail: the `HookState` that `HookState(elastic=True)` creates.

    Overrides the points of a step at which ranks can change. `ElasticTraining` decides what is kept and repeated.

    Arguments as those of `HookState`; `model_or_group` is a DDP model or None.
    """

    NEEDS_LAYOUTS = True

    def __init__(
        self,
        model_or_group: nn.Module | dist.ProcessGroup | None = None,
        *,
        config: Config | None = None,
        extra_state: Sequence[Carried] = (),
        on_membership_change: OnMembershipChange | None = None,
        **options: object,
    ) -> None:
        self._elastic = ElasticTraining(self, extra_state, on_membership_change)
        super().__init__(model_or_group, config=config, extra_state=(), on_membership_change=None, **options)
        # A step that failed by a lost rank is repeated (`ResilientOps`), so its futures stay open. Any other error
        # leaves the hook at once, and DDP's reducer cannot be used any more.
        self._backward.kept = ()

    def bind(self, model: nn.Module) -> None:
        """Binds the DDP model as `HookState.bind` does, and gives it a process group that changes with the ranks."""
        super().bind(model)
        self._group = self._elastic.take_over_group()

    @property
    def view(self) -> View:
        """The present ranks and this rank's number among them."""
        return super().view if self._elastic.resilient_ops is None else self._elastic.resilient_ops.view

    @property
    def changes(self) -> tuple[Change, ...]:
        """The last changes of the ranks, oldest first, with their causes and durations."""
        return super().changes if self._elastic.resilient_ops is None else tuple(self._elastic.resilient_ops.changes)

    def admit_joining(self) -> None:
        """Admits the processes that wait to join, between two steps; all ranks call it at the same point."""
        self._elastic.admit_joining()

    def close(self) -> None:
        """Leaves the other ranks, and ends this rank's threads."""
        super().close()
        self._elastic.close()

    def send_again(self, buckets: list[Bucket], rows: Tensor | None) -> None:
        """Starts the all-reduces of a step again, after the ranks have changed.

        Args:
            buckets: The buckets of the step, with their gradients restored.
            rows: All-reduces that the step has to use, in the encoding of `Resume`; None if it is free.
        """
        session = self._connected("backward()")
        self._reduced_layouts.clear()
        self._buckets = buckets
        session.fusion.defers = self._backward.marks_last_bucket
        session.grouping = session.fusion if rows is None else Resume(rows, session.fusion)
        for bucket in buckets:
            self._elastic.equalize_decoders(session)
            super()._send(session, bucket)

    def send_rest(self, session: GradientSession) -> None:
        """Starts the all-reduces that fusion has deferred until the last bucket of the step arrived."""
        super()._send_rest(session)

    def _check_model(self, model: nn.Module) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(  # noqa: TRY004 - the option does not fit, not the type
                f"`elastic` is set, and `model` is a {type(model).__name__}; wanted the DistributedDataParallel "
                "model: its own process group has to change with the ranks"
            )
        self._elastic.bind(model)
        super()._check_model(model)

    def _check_group(self, bucket: GradBucket) -> None:
        """Does nothing: the group of the model is the state's own, and changes with the ranks."""

    def _connect_ranks(self, group: dist.ProcessGroup, device: torch.device) -> GradientSession:
        return self._elastic.connect(group, device)

    def _close_ranks(self, session: GradientSession) -> None:
        if self._elastic.resilient_ops is None:
            super()._close_ranks(session)

    def _restore(self, saved: "Checkpoint") -> None:
        if not self._elastic.has_just_joined:
            super()._restore(saved)
        elif saved is self._pending:
            # It was loaded before the process joined, as were the weights that the job has replaced.
            self._pending = None
            log.warning("a state was loaded, and this process has joined a running job: that job's state is used")
        else:
            raise ValueError(JOINED)

    def _begin_step(self, session: GradientSession) -> None:
        super()._begin_step(session)
        rows = session.grouping.prescribed
        saved = self._elastic.begin_step(session.communicator, rows)
        if saved is not None and saved is not rows:
            session.grouping = Resume(saved, session.fusion)

    def _reduce_sparse(self, bucket: GradBucket, sparse: Tensor, session: GradientSession) -> FutureTensor:
        raise TypeError("a sparse gradient in elastic training; wanted dense ones: nn.Embedding(sparse=False)")

    def _send(self, session: GradientSession, arrived: Bucket) -> FutureTensor:
        send = super()._send

        def start() -> None:
            self._elastic.equalize_decoders(session)
            send(session, arrived)

        return self._elastic.add(arrived, start)

    def _send_rest(self, session: GradientSession) -> None:
        self._elastic.complete_step()

    def _end_step(self) -> None:
        self._elastic.complete_step()
        super()._end_step()

    def _is_taken_by_all(self) -> bool:
        return self._elastic.ran_last_itself
