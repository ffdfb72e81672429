"""Observer of the steps of one hook state, or sharded model: stragglers, stalls, traces, profiler ranges, metrics.

The code that reduces buckets does not depend on the observer: buckets carry the times at which they arrived and were
reduced, the executor counts launches, and the observer gets both at the end of a step. Only while a trace or a profiler
is on, the executor has a recorder to which it adds notes.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from gradwire.comms.bootstrap.compat import PrefixStore, profiler_is_on
from gradwire.comms.bootstrap.store import PollingStore, unprefixed
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.report import Report
from gradwire.comms.step.listeners import EndedStep, StepListener

# Each of these is imported when it is first needed.
if TYPE_CHECKING:
    from gradwire.comms.observe.metrics import Metrics
    from gradwire.comms.observe.stall import StallWatch
    from gradwire.comms.observe.stragglers import StragglerWatch
    from gradwire.comms.observe.trace import Trace

log = logging.getLogger("gradwire")

GET_TIMEOUT = timedelta(seconds=2)
"""Timeout of reading a key of the store. Keys are only read after a check that they exist, so it is rarely needed."""

WAITS = "gradwire/waits"
"""Prefix of the keys with the waits of all ranks; the same for all communicators of a job."""

TRACE_AFTER = 5
"""Steps before the trace that GRADWIRE_TRACE requests. In the first ones, DDP rebuilds its buckets and connections are
opened."""


class Observer(StepListener):
    """Observes the steps of one communicator.

    In elastic training each generation has its own observer. Some ranks may end a step that others repeat in the next
    generation, so the ranks exchange numbers about a step only if all of them took it in this generation.

    Thread safety: all methods are for the training thread.

    Args:
        communicator: Communicator of the gradients.
        config: Options that select what is observed.
        group: Torch's group of the same ranks in the same order. Messages then name ranks of the default group; with
            None they name ranks of the communicator.
    """

    def __init__(self, communicator: Communicator, config: Config, group: dist.ProcessGroup | None = None) -> None:
        self.contents: dict[int, tuple[int, tuple[str, ...]]] = {}
        """Bucket -> (elements, names of its parameters). The owner of the observer fills it in."""
        self.phase = "backward"
        """Name of a step in a timeline."""
        self._communicator = communicator
        self._config = config
        self._trace: Trace | None = None
        self._trace_given_up = False
        self._metrics: Metrics | None = None
        self._text: Callable[[], str] | None = None
        """Makes the metrics of the steps so far; None before the first step."""
        self._stragglers: StragglerWatch | None = None
        self._stall: StallWatch | None = None
        if config.marks_nvtx and communicator.device.type != "cuda" and communicator.rank == 0:
            log.warning(
                "`trace` is 'nvtx', which marks what is issued on CUDA, and the tensors are on a %s: nothing is "
                "marked; wanted a file there, such as 'steps.json', or torch.profiler",
                communicator.device.type,
            )
        if communicator.size == 1:
            return
        ranks = tuple(range(communicator.size)) if group is None else tuple(dist.get_process_group_ranks(group))
        if config.straggler_every:
            self._stragglers = self._watch_stragglers(ranks)
        if config.stall_seconds:
            self._stall = self._watch_for_stalls(ranks)

    def _watch_stragglers(self, ranks: Sequence[int]) -> "StragglerWatch":
        """Returns the straggler detection of this rank.

        Args:
            ranks: Rank in the default group of each rank of the communicator.
        """
        from gradwire.comms.observe.stragglers import StragglerWatch

        contents = self.contents
        return StragglerWatch(
            self._communicator, self._config.straggler_every, lambda index: contents.get(index, (0, ()))[1], ranks
        )

    def _watch_for_stalls(self, ranks: Sequence[int]) -> "StallWatch":
        """Returns a started stall watch of this rank.

        Args:
            ranks: Rank in the default group of each rank of the communicator.
        """
        from gradwire.comms.observe.order import Waits
        from gradwire.comms.observe.stall import StallWatch, WatchedJob

        communicator = self._communicator
        on_cuda = communicator.device.type == "cuda"
        store = PollingStore(communicator.plain_store, GET_TIMEOUT)
        shared = PollingStore(PrefixStore(WAITS, unprefixed(communicator.plain_store)), GET_TIMEOUT)
        waits = Waits(shared, communicator.peer_infos.generation, ranks[communicator.rank])
        job = WatchedJob(communicator.rank, communicator.hostnames, tuple(ranks), self.contents, on_cuda, waits)
        return StallWatch(store, job, communicator.executor, self._config.stall_seconds)

    @property
    def wants_times(self) -> bool:
        """Whether a trace is being made, so that the buckets of the next step must be timed on CUDA as well."""
        return self._trace is not None

    def step_began(self, steps: int) -> None:
        """Gives the executor the recorder that this step needs for a trace, torch.profiler or Nsight Systems, or none.

        Called before the first bucket of the step is sent.

        Args:
            steps: Number of finished steps; not read.
        """
        executor, on_cuda = self._communicator.executor, self._communicator.device.type == "cuda"
        ranges, nvtx = profiler_is_on(), self._config.marks_nvtx and on_cuda
        if self._trace is not None:
            executor.stats.recorder = self._trace.recorder
            executor.stats.recorder.ranges, executor.stats.recorder.nvtx = ranges, nvtx
            self._trace.step_began()
        elif ranges or nvtx:
            from gradwire.comms.observe.recorder import Recorder

            executor.stats.recorder = Recorder(self._communicator.clock, keeps=False, ranges=ranges, nvtx=nvtx)
        else:
            executor.stats.recorder = None

    def step_ended(self, step: EndedStep) -> None:
        """Passes a step that has ended to the straggler detection, the trace and the metrics.

        All ranks call it at the same point of their sequence of all-reduces. Straggler detection and trace, which
        exchange numbers, get it only if all ranks took the step in this generation. If that exchange fails in elastic
        training, both end with this generation.

        Raises:
            RuntimeError: The exchange failed, outside elastic training; also OSError.
        """
        if step.taken_by_all:
            try:
                self._ask_others(step)
            except (RuntimeError, OSError) as error:
                if not self._config.elastic:
                    raise
                log.debug(
                    "a generation has ended while its ranks exchanged numbers about step %d: %s", step.number, error
                )
                self._trace_given_up |= self._trace is not None
                self._stragglers = self._trace = self._communicator.executor.stats.recorder = None
        if self._metrics is not None:
            number, report = step.number, step.report
            self._text = lambda: self.add_to(report(number)).to_prometheus()
            self._metrics.step_ended(self._text)

    def _ask_others(self, step: EndedStep) -> None:
        """Passes a step to straggler detection and trace, which exchange numbers between all ranks.

        At step `TRACE_AFTER` it starts the trace that the option `trace` asks for.
        """
        if self._stragglers is not None:
            self._stragglers.step_ended(step.number, [bucket.times for bucket in step.buckets])
        if self._trace is not None:
            if self._trace.step_ended(step.number, step.buckets):
                self._trace = self._communicator.executor.stats.recorder = None
        elif (file := self._config.trace_file) is not None and step.number == TRACE_AFTER:
            try:
                self.trace(Path(file), self._config.trace_steps)
            except (OSError, RuntimeError) as error:
                # Training continues without the trace.
                log.error("`trace` is %s: %s", file, error)

    def trace(self, file: Path, steps: int) -> None:
        """Begins a trace of the next steps; every rank calls it between the same two steps, see `HookState.trace`.

        Blocks until all ranks have called it and their clocks are compared. Rank 0 creates the file now.

        Args:
            file: Path of the file, which rank 0 writes when the last of the steps has ended.
            steps: Number of steps.

        Raises:
            ValueError: `steps` is less than one.
            OSError: Rank 0 cannot write the file; raised on all ranks.
            RuntimeError: A trace is being made already, or a collective of the group has failed before.
        """
        if steps < 1:
            raise ValueError(f"`steps` is {steps}; wanted a number of steps >= 1")
        if self._trace is not None:
            raise RuntimeError("a trace is being made already: wait for its last step")
        problem: OSError | None = None
        if self._communicator.rank == 0:
            try:
                file.open("a").close()
            except OSError as error:
                problem = error
        from gradwire.comms.observe.number_exchange import NumberExchange
        from gradwire.comms.observe.trace import Trace

        problems = NumberExchange(self._communicator, [float(problem is not None)]).read()
        if problem is not None or (problems is not None and problems[0][0]):
            reason = "see rank 0" if problem is None else problem.strerror
            raise OSError(
                f"`file` is {file}, which rank 0 cannot write ({reason}): name a file in a folder that is there"
            )
        self._trace = Trace(self._communicator, file, steps, self.contents, self.phase)

    def export_metrics(self, file: Path | None, port: int | None, address: str, every_seconds: float) -> int | None:
        """Exports metrics from the next step on, into a file, at an HTTP port, or both; see `Metrics.change`.

        Args:
            file: Text file; None leaves it as it is.
            port: Port; 0 chooses a free one, None leaves it as it is.
            address: Address of this host for `port`.
            every_seconds: Least time between two exports.

        Returns:
            The port that is served; None if none is.

        Raises:
            ValueError: Neither `file` nor `port` is given, or `port` or `every_seconds` is out of range.
            OSError: The file cannot be written, or the port is in use.
        """
        if file is None and port is None:
            raise ValueError("neither `file` nor `port` is given: give one of them")
        if self._metrics is None:
            from gradwire.comms.observe.metrics import Metrics

            self._metrics = Metrics(file, port, address, every_seconds)
        else:
            self._metrics.change(file, port, address, every_seconds)
        return self._metrics.port

    def add_to(self, report: Report) -> Report:
        """Returns a copy of a report with the present stragglers, the last stall and the number of stalls in it.

        Of a part that this object does not observe, the report's own values stay.
        """
        if self._stragglers is not None:
            once = () if self._stragglers.once is None else (self._stragglers.once,)
            report = replace(report, stragglers=(*self._stragglers.found, *once))
        if self._stall is not None:
            report = replace(report, stall=self._stall.last, stalls=self._stall.count)
        return report

    def follow(self, previous: "Observer") -> None:
        """Replaces the observer of an earlier set of ranks, which ends; keeps its metrics, with their file and port.

        A trace is not kept, because its ranks no longer exist.
        """
        given_up = previous._trace is not None or previous._trace_given_up
        if given_up and self._communicator.rank == 0:
            log.warning(
                "the trace is given up, and its file is not written: the ranks have changed; ask for another one"
            )
        self._metrics, previous._metrics = previous._metrics, None
        previous._trace = None
        previous.close()

    def close(self) -> None:
        """Ends the stall watch, and the metrics after a last export; gives up an incomplete trace, which is logged."""
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.end_early()
        # The text refers to this observer, so a reference that stayed would keep it and its communicator.
        metrics, self._metrics, text, self._text = self._metrics, None, self._text, None
        if metrics is not None:
            try:
                metrics.close(None if text is None else text())
            except RuntimeError as error:  # of the device, after a failure
                log.warning("the metrics lack what was sent last: %s", error)
                metrics.close()
        if self._stall is not None:
            self._stall.close()
