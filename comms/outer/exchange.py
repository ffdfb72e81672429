"""Runs the exchanges of pseudo-gradients between workers: starts them, and applies their results later.

A worker is a set of ranks that hold the same parameters at every step: the ranks of a node (or rack, or region) that
average gradients, or one rank. After `every` steps a fragment's pseudo-gradient, its anchor minus its parameters, is
averaged over all ranks, so each worker is weighted by its number of ranks. An outer SGD takes one step with it.

The progress of a worker while an exchange was in flight is kept: the parameters become the new anchor plus the
progress since the exchange began. Streaming DiLoCo (arXiv 2501.18512, section 2.3) instead mixes the worker's
parameters with the new ones, by a share alpha. Here no step is lost, none counts twice (the next pseudo-gradient
contains those steps), and there is nothing to tune.

An exchange is a transaction: anchor, momentum, residuals and parameters change when its result has arrived, and only if
every element of the result is finite. All ranks have the same result, so all take the same decision.
"""
# Invariant: after as many exchanges all workers have the same anchors and momenta, bit for bit.
# Invariant: at most one exchange is in flight, so a rank's state between two of them depends on their number alone.

import json
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.boundary.messages import MessageType
from gradwire.comms.elastic.resilient_ops import ResilientOps
from gradwire.comms.outer.averaging import FragmentAveraging, Pending
from gradwire.comms.outer.fragments import Fragment, OuterSettings
from gradwire.comms.outer.saved import Saved, parameters_checksum, read, written
from gradwire.comms.session import AveragingSession
from gradwire.comms.step.listeners import EndedStep
from gradwire.compressors.base import StateDict

log = logging.getLogger("gradwire")

POLL_SECONDS = 0.05
"""Seconds between two polls of the other ranks' counters, while ranks with different numbers of steps catch up."""

COMPARED_ROUNDS = 8
"""Rounds of all fragments between two rounds in which the ranks compare anchors. Anchors differ only after a fault (a
flipped bit, memory overwritten by another library), so a rare check is enough. It adds 8 bytes a rank to an
exchange."""

DIFFERENT = (
    "after {begun} exchanges the anchors of rank {ranks} (parameters at the last exchange, outer momentum) differ from "
    "those of rank 0, though they come from the same averages: memory was changed or a processor is faulty. Restart "
    "from the last checkpoint, or call outer.synchronize() on all ranks, which gives all of them those of rank 0"
)


OTHER_PARAMETERS = (
    "the parameters of `model` are not those that were saved with the state that Outer has loaded: its "
    "model.state_dict() was saved before outer.state_dict(), which finishes the exchange in flight and so changes the "
    "parameters, or it is of another step or worker. Load the model of the same save; if there is none, load it into a "
    "new Outer without a state. When you save, call outer.state_dict() first"
)
"""Message for a model that was saved too early."""

_WORD: MessageType[dict[str, Any]] = MessageType(dict[str, object])
"""Message about the state that a rank loads."""


class OuterExchange:
    """Exchanges the fragments of one model with the other workers, on one rank.

    Args:
        session: Ranks that hold the same parameters (of a sharded model: the same shards), whose listeners follow each
            exchange as a step; closed by the caller.
        fragments: Fragments of the model, in the order of their turns.
        settings: Schedule of the exchanges and rates of the outer SGD.
        agreement: Agreement of all ranks of the job; None if the session has all of them.
        alone: True if there is one worker: nothing is sent, and its own pseudo-gradient is the average.

    Attributes:
        steps: Number of steps of the optimizer; after `synchronize` that of the rank that has taken most.
        begun: Number of exchanges begun; the same on all ranks that have taken as many steps.
        done: Number of exchanges that took effect; `synchronize` counts as one of each fragment.
        skipped: Number of exchanges whose average was not finite, so that they changed nothing; a `synchronize` that
            fails for that reason counts as one of each fragment.
        averaging: Averages pseudo-gradients over the ranks.
        settings: Schedule of the exchanges and rates of the outer SGD.
        fragments: Fragments of the model, in the order of their turns.
    """

    def __init__(
        self,
        session: AveragingSession,
        fragments: Sequence[Fragment],
        settings: OuterSettings,
        *,
        agreement: Agreement | None = None,
        alone: bool = False,
    ) -> None:
        self.settings = settings
        self.fragments = tuple(fragments)
        self.averaging = FragmentAveraging(session, agreement, alone)
        self.steps = self.begun = self.done = self.skipped = 0
        self._pending: Pending | None = None
        self._halfway = False
        self._expected_parameters: str | None = None
        """Checksum of the parameters that belong to a state that was loaded; None once it has been compared."""
        self._different = ""
        """Error text if the ranks' anchors were found to differ; empty otherwise."""
        self._name_fragments()

    def _name_fragments(self) -> None:
        """Gives the session's observer the size and the parameters of each fragment, for its warnings."""
        self.averaging.session.observer.contents.update(
            (number, (fragment.numel, fragment.names)) for number, fragment in enumerate(self.fragments)
        )

    def adopt(self, settings: OuterSettings, fragments: Sequence[Fragment]) -> None:
        """Replaces the schedule and the fragments, before the first exchange; all ranks do so with the same ones.

        Args:
            settings: Schedule of the exchanges and rates of the outer SGD.
            fragments: Fragments of the model.
        """
        self.settings, self.fragments = settings, tuple(fragments)
        self._name_fragments()

    def survive(self, resilient_ops: ResilientOps) -> None:
        """Makes exchanges survive rank failures: one in flight is started again among the surviving ranks.

        Args:
            resilient_ops: Repeats the exchanges of this rank after a rank failure.
        """
        self.averaging.resilient_ops = resilient_ops
        resilient_ops.has_begun = lambda: self._pending is not None and self._pending.finite is None

    def reconnect(self, session: AveragingSession, agreement: Agreement) -> None:
        """Continues among the surviving ranks.

        Args:
            session: Session of the surviving ranks.
            agreement: Agreement of the same ranks.
        """
        self.averaging.reconnect(session, agreement)
        self._name_fragments()
        if self.averaging.alone:  # drops what an aborted attempt has staged; with other ranks the next attempt does
            self.averaging.decide(False, self.fragments)

    @property
    def numel(self) -> int:
        """Number of elements that this rank holds of all parameters."""
        return sum(fragment.numel for fragment in self.fragments)

    @torch.no_grad()
    def copy_from_first_rank(self, tensors: Sequence[Tensor]) -> None:
        """Broadcasts rank 0's values of some tensors, in place, and sets each fragment's anchor to its parameters.

        Args:
            tensors: Floating-point tensors, such as the parameters.

        Raises:
            RuntimeError: The ranks could not exchange them.
        """
        self.averaging.copy_from_first(tensors)
        for fragment in self.fragments:
            fragment.gather(fragment.anchor)

    @torch.no_grad()
    def step_ended(self) -> None:
        """Ends an exchange that was begun `delay` steps ago, and begins those whose turn it is; called after each step.

        A step is one of the optimizer. With `delay` 0 an exchange is begun and ended in the same call.

        Raises:
            RuntimeError: An exchange failed, and parameters, anchors and residuals are as they were before it; or a
                load has failed halfway, or anchors were found to differ between ranks.
        """
        self._refuse_halfway()
        self.steps += 1
        pending = self._pending
        if pending is not None and pending.due <= self.steps:
            self._apply_pending()
        delay = self.settings.delay_of(self.steps)
        for _ in range(self.settings.turns(self.steps)):
            self._begin(delay)
            if delay == 0:
                self._apply_pending()

    @torch.no_grad()
    def synchronize(self, buffers: Sequence[Tensor] = ()) -> None:
        """Finishes the exchange in flight, brings all ranks to one number of exchanges, and averages all parameters.

        The average is in full precision and includes residuals. The outer momentum is neither used, because it would
        carry the parameters past those of every worker, nor changed. If anchors differ between ranks afterwards, which
        is logged, all ranks take rank 0's anchors and momentum. All ranks call it, whatever numbers of steps they have
        taken.

        Args:
            buffers: Floating-point tensors that are averaged in place.

        Raises:
            RuntimeError: A rank did not arrive within the time-out, an exchange failed, or a load has failed halfway;
                or, on all ranks, a parameter is not finite.
        """
        # Finish the exchange in flight, and wait until all ranks have started equally many.
        self._refuse_halfway(different=False)
        for fragment in self.fragments:
            fragment.check()
        if self._pending is not None:
            self._apply_pending()
        if not self.averaging.alone:
            self._catch_up()
        # Average all fragments; nothing changes if an element is not finite.
        averages, nonfinite = self.averaging.averages(self.fragments, self._announce)
        if nonfinite:
            self.skipped += len(self.fragments)
            raise RuntimeError(
                f"`{nonfinite}` and perhaps more are not finite on a rank, so the ranks were not synchronized and "
                "each keeps its own: load the last checkpoint on all ranks"
            )
        for fragment, average in zip(self.fragments, averages, strict=True):
            fragment.update(average, None)
        self._make_same()
        for fragment in self.fragments:
            fragment.scatter(fragment.anchor)
        self.done += len(self.fragments)
        for buffer in [] if self.averaging.alone else buffers:
            buffer.copy_(self.averaging.mean_of(buffer.reshape(-1)).view(buffer.shape))

    def _make_same(self) -> None:
        """Compares all anchors after a synchronization; if some differ, all take rank 0's anchors and momentum."""
        self._different = ""
        if self.averaging.alone:
            return
        if differing := self.averaging.differing(self.fragments):
            log.warning(
                "gradwire: the anchors of rank %s differed from those of rank 0; all ranks have rank 0's now",
                ", ".join(map(str, differing)),
            )
            for fragment in self.fragments:
                self.averaging.copy_from_first([fragment.anchor])
                if fragment.momentum is not None:
                    self.averaging.copy_from_first([fragment.momentum])

    @torch.no_grad()
    def state_dict(self) -> StateDict:
        """Finishes the exchange in flight, and returns anchors, momenta, counters and the compressor's state.

        All ranks call it. The exchange takes effect now, so the parameters change: save the model afterwards. Ranks
        that have taken different numbers of steps catch up as in `synchronize`, so all states are of one moment.

        Raises:
            RuntimeError: A rank did not arrive within the time-out, has exited or has aborted; the exchange failed; a
                load has failed halfway; or the anchors were found to differ between ranks.
        """
        self._refuse_halfway()
        if self._pending is not None:
            self._apply_pending()
        if not self.averaging.alone:
            self._catch_up()
        if not self.averaging.alone:
            # Until all have read the store in `_catch_up`: the rank that serves it may exit after it has saved.
            self.averaging.mean_of(self.fragments[0].anchor.new_zeros(1), self._announce)
        flats = [(each.anchor, each.momentum) for each in self.fragments]
        saved = Saved(
            self.steps, self.begun, flats, self.averaging.session.state_dict(), parameters_checksum(self.fragments)
        )
        return written(saved, self.fragments, self.settings)

    @torch.no_grad()
    def load_state_dict(self, state: StateDict | Exception) -> None:
        """Restores a state that `state_dict` returned on this rank. All ranks call it.

        Args:
            state: The state; or the error because of which this rank has none, which is raised on all ranks.

        Raises:
            ValueError: The state of this rank or of another one is of another model or other settings, or is damaged;
                or the states are of different moments. Nothing was changed.
            RuntimeError: A rank did not join within the time-out; or the exchange in flight has failed.
        """
        # The result of an exchange in flight is dropped, but other ranks take part in it, so it is finished.
        if self._pending is not None:
            self._wait_for(self._pending)
            self.averaging.decide(False, [self.fragments[self._pending.number]])
            self._pending = None
        # Check the state without changing anything, and tell the other ranks about an error.
        try:
            if isinstance(state, Exception):
                raise state
            saved = read(state, self.fragments, self.settings)
            if (self.averaging.compression is None) != (not saved.held):
                raise ValueError(
                    f"`compressor` is {self.averaging.communicator.config.compressor!r}, and `state` was saved "
                    f"{'with' if saved.held else 'without'} one; wanted the compressor that saved it"
                )
            self.averaging.check_loadable(saved.held)
        except Exception as error:  # any error, because a damaged file may cause any, and the other ranks wait
            self.averaging.agreement.gather(json.dumps({"error": str(error)}))
            raise
        # All ranks can load: from here on a failure leaves a part of the state, which `_halfway` records.
        self._agree_on(saved)
        self._halfway = True
        self.averaging.session.load_state_dict(saved.held)
        self.steps, self.begun = saved.steps, saved.begun
        for fragment, (anchor, momentum) in zip(self.fragments, saved.flats, strict=True):
            fragment.anchor.copy_(anchor)
            fragment.momentum = momentum
        self.averaging.messages.forget()
        self._halfway, self._different, self._expected_parameters = False, "", saved.parameters

    @torch.no_grad()
    def check_parameters(self) -> None:
        """Checks, once after `load_state_dict`, that the model has the parameters that were saved with the state.

        A model that was saved before `state_dict` finished the exchange in flight lacks that exchange's update, while
        the anchors have it: the next pseudo-gradient would count it twice.

        Raises:
            RuntimeError: The parameters are others.
        """
        expected, self._expected_parameters = self._expected_parameters, None
        if expected is not None and expected != parameters_checksum(self.fragments):
            raise RuntimeError(OTHER_PARAMETERS)

    def _refuse_halfway(self, *, different: bool = True) -> None:
        """Checks that this rank has a whole state, and that its anchors are those of rank 0.

        Args:
            different: Whether to check the anchors; False for `synchronize`, which makes them equal.

        Raises:
            RuntimeError: A load has failed halfway, or the anchors were found to differ.
        """
        if self._halfway:
            raise RuntimeError(
                "load_state_dict() has failed after the ranks had agreed, so that this rank has a part of the state: "
                "load it again on all ranks"
            )
        if different and self._different:
            raise RuntimeError(self._different)

    def _agree_on(self, saved: Saved) -> None:
        """Checks that all ranks can load their states, and that these are of one moment of one run.

        They are if all have begun equally many exchanges, and those of ranks with the same shards have equal anchors
        and momenta.

        Raises:
            ValueError: On all ranks: a rank cannot load its state, or the states do not belong together.
            RuntimeError: A rank did not join within the time-out.
        """
        word = {
            "steps": saved.steps,
            "begun": saved.begun,
            "start": self.averaging.communicator.peer_infos.generation,  # one for all ranks with the same shards
            "anchors": saved.digest(),
        }
        found = [_WORD.read(each) for each in self.averaging.agreement.gather(json.dumps(word))]
        for rank, each in enumerate(found):
            if "error" in each:
                raise ValueError(f"`state` of rank {rank} does not fit, so no rank has loaded its own: {each['error']}")
        for rank, each in enumerate(found):
            if each["begun"] != found[0]["begun"]:
                raise ValueError(
                    f"`state` of rank 0 is of {found[0]['begun']} exchanges and {found[0]['steps']} steps, that of "
                    f"rank {rank} of {each['begun']} and {each['steps']}; wanted states that all ranks saved in one "
                    "call"
                )
            other = next(number for number, one in enumerate(found) if one["start"] == each["start"])
            if each["anchors"] != found[other]["anchors"]:
                raise ValueError(
                    f"`state` of rank {rank} has other parameters at the last exchange than that of rank {other}: they "
                    "are of other runs or moments; wanted states that all ranks saved in one call"
                )

    def _begin(self, delay: int) -> None:
        """Starts the exchange of the fragment whose turn it is, and counts it as begun; no other may be in flight.

        In elastic training an exchange that cannot be started, because a rank has failed, is started again when it is
        waited for.

        Args:
            delay: Number of steps after which its result takes effect. With 0 no copy of the parameters is kept by
                which later progress could be told, so the caller has to apply the result (`_apply_pending`) before the
                next step.

        Raises:
            RuntimeError: It could not be started, without elastic training.
        """
        if not self.averaging.alone:
            self.averaging.session.listeners.step_began(self.begun)
        number = self.begun % len(self.fragments)
        rounds = self.begun // len(self.fragments)
        compares = rounds > 0 and rounds % COMPARED_ROUNDS == 0
        due = self.steps + delay
        pending = self.averaging.prepared(self.fragments, number, due, kept=delay > 0, compares=compares)
        try:
            self.averaging.launch(self.fragments[number], pending)
        except (RuntimeError, OSError):
            if self.averaging.resilient_ops is None:
                raise
            pending.communicator = None  # a rank has failed: the exchange is started again when it is waited for
        self._pending = pending
        self.begun += 1

    def _apply_pending(self) -> None:
        """Waits for the exchange in flight, and applies its result; a result that is not finite changes nothing.

        Raises:
            RuntimeError: It failed, now or earlier, and stays in flight; or the anchors differ between ranks, and its
                result is dropped. Parameters and anchors are as they were before it.
        """
        pending = self._pending
        assert pending is not None
        fragment = self.fragments[pending.number]
        fragment.check()
        self._commit_or_drop(pending)
        self._pending = None
        if pending.finite:
            fragment.apply(pending.flat, pending.sent, None if self.settings.warms_up(self.begun) else self.settings)
        self.done += bool(pending.finite)
        self.skipped += not pending.finite
        if not self.averaging.alone:
            self._notify_listeners(pending)

    def _notify_listeners(self, pending: Pending) -> None:
        """Passes an exchange that has ended to the session's listeners, such as those of reports, as an ended step.

        In elastic training it is marked as a step that other ranks may not have taken (`EndedStep.taken_by_all` is
        False): then no listener reports it to other ranks.

        Args:
            pending: The exchange, whether its result was applied or skipped.
        """
        session = self.averaging.session
        buckets = [] if pending.bucket is None else [pending.bucket]
        taken_by_all, steps, communicator = self.averaging.resilient_ops is None, self.steps, session.communicator
        report = lambda number: communicator.report(steps)
        session.listeners.step_ended(EndedStep(self.begun, buckets, (), report, timed=False, taken_by_all=taken_by_all))

    def _wait_for(self, pending: Pending) -> None:
        """Waits for the average of an exchange in flight.

        Raises:
            RuntimeError: It failed, now or earlier.
        """
        if pending.error is not None:
            raise pending.error
        if pending.finite is None:
            self.averaging.finish(self.fragments[pending.number], pending, self.begun)

    def _commit_or_drop(self, pending: Pending) -> None:
        """Waits for the average of an exchange, and commits or drops the residuals that the compressor has staged.

        Drops them if the average is not finite, which is logged, or if anchors differ between ranks.

        Args:
            pending: The exchange in flight; its `finite` and `differing` are set.

        Raises:
            RuntimeError: The exchange failed; or, on all ranks, the anchors differ between ranks.
        """
        self._wait_for(pending)
        fragment = self.fragments[pending.number]
        if pending.differing:
            self._pending = None
            self.averaging.decide(False, [fragment])
            ranks = ", ".join(map(str, pending.differing))
            self._different = DIFFERENT.format(begun=self.begun - 1, ranks=ranks)
            raise RuntimeError(self._different)
        if not pending.finite:
            names = fragment.nonfinite(pending.flat)
            log.warning(
                "gradwire: exchange %d of fragment %d is not finite (`%s`%s) and is skipped: each worker continues "
                "with its own parameters",
                self.begun,
                pending.number,
                names[0],
                f" and {len(names) - 1} more" if len(names) > 1 else "",
            )
        self.averaging.decide(bool(pending.finite), [fragment])

    def _announce(self) -> None:
        """Publishes in the store that this rank has arrived at the barrier, with its counts of steps and exchanges."""
        self.averaging.messages.announce(self.steps, self.begun)

    def _catch_up(self) -> None:
        """Waits until all ranks have called `synchronize` and begun equally many exchanges, and evens out step counts.

        All go on at the highest step count of any rank, as the schedule counts steps. Ranks may have taken different
        numbers of them: a GradScaler skips some, or one rank has less data. A rank that is ahead waits in an exchange,
        and has published its count of exchanges in the store; ranks in this method that have begun fewer start that
        exchange, too.

        Raises:
            RuntimeError: A rank did not call `synchronize` within the time-out, has exited, or has aborted.
        """
        messages, timeout = self.averaging.messages, self.averaging.communicator.config.timeout
        deadline = time.monotonic() + timeout.total_seconds()
        wait = self.averaging.communicator.peer_wait()
        messages.announced = False
        while True:
            # After a rank failure the surviving ranks continue with a new communicator, and announce themselves again.
            if self.averaging.resilient_ops is not None:
                self.averaging.resilient_ops.follow()
            if self.averaging.alone:
                return
            if not messages.announced:
                self._announce()
                ranks, arrived = range(self.averaging.communicator.size), dict[int, int]()
            arrived |= messages.arrived([each for each in ranks if each not in arrived])
            waiting = messages.waiting([each for each in ranks if each not in arrived])
            # Take part in an exchange that this rank has not begun yet, as others wait in it; else wait for the rest.
            if max((*arrived.values(), *waiting.values())) > self.begun:
                self._begin(0)
                self._apply_pending()
            elif len(arrived) == len(ranks):  # the schedule counts steps, so all continue at the highest count
                self.steps = max(messages.steps(ranks).values())
                return
            elif time.monotonic() > deadline:
                missing = ", ".join(str(each) for each in ranks if each not in arrived)
                raise RuntimeError(
                    f"synchronize(): rank {missing} did not call it within `timeout` of {timeout}; all ranks must"
                )
            elif self.averaging.resilient_ops is None and (failed := wait.failure("before all arrived")) is not None:
                handler = self.averaging.communicator.executor.failure_handler
                raise handler.fail("synchronize()", (), failed) from None
            else:
                time.sleep(POLL_SECONDS)
