"""An elastic job in simulated time: real memberships and survivors, on communicators that sum exactly or break."""

import errno
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import HashStore, PrefixStore, Store
from gradwire.comms.bootstrap.placement import PeerInfo
from gradwire.comms.communicator import FailurePolicy
from gradwire.comms.elastic.membership import Membership, View
from gradwire.comms.elastic.peer_info import packed
from gradwire.comms.elastic.resilient_ops import GenerationFailureReporter, ResilientOps
from gradwire.topology.host_summary import Hardware
from simulated.simulation import LATENCY_SECONDS, Process, Simulation

TIMEOUT = timedelta(seconds=60)
MOST = 8
"""Processes of one history, at most."""
CONNECT_SECONDS = 2.0
"""After that long a connection that cannot be made is an error."""
COMPUTING_SECONDS = 0.3
"""Of a step: failures come while ranks compute, too."""


@dataclass(slots=True)
class Diary:
    """What one process has gone through.

    Attributes:
        views: Every generation that its training thread has entered.
        applied: Step -> whose gradients were in the average that its model took: name -> how often.
        given_up: What ended it; None while it trains, or when it has come to the end.
        finished: Whether it has come to the end of the training.
    """

    views: list[View] = field(default_factory=list)
    applied: dict[int, dict[str, int]] = field(default_factory=dict)
    given_up: Exception | None = None
    finished: bool = False


class _Meeting:
    """One all-reduce of one generation."""

    def __init__(self) -> None:
        self.given: dict[int, Tensor] = {}
        self.done: set[int] = set()
        self.left: set[int] = set()


class SimCommunicator:
    """In place of a communicator on gloo: sums are there when all ranks have given theirs, or the connections break."""

    def __init__(self, job: "Job", view: View, reporter: Any) -> None:
        self.job = job
        self.view = view
        self.rank, self.size = view.rank, view.size
        self.device = torch.device("cpu")
        self.has_stopped = True
        self.executor = SimpleNamespace(deadline=None, release=lambda: None, failure=None)
        self._reporter = reporter
        self._process = job.simulation.process
        self._numbers = 0
        self._given_up: str | None = None
        self._key = (view.generation, view.members)

    def all_reduce(self, flat: Tensor) -> Any:
        """Sums in place, exactly."""
        number, self._numbers = self._numbers, self._numbers + 1
        meeting = self.job.meetings.setdefault((*self._key, number), _Meeting())
        meeting.given[self.rank] = flat.clone()
        return SimpleNamespace(wait=lambda: self._wait(meeting, flat))

    def _wait(self, meeting: _Meeting, flat: Tensor) -> Tensor:
        simulation = self.job.simulation
        if self._process.name in self.job.refused:
            refusal = OSError(errno.ENOMEM, "no shared memory")
            self.executor.failure = self._reporter.diagnose(refusal, "all_reduce", ())
            raise RuntimeError(str(self.executor.failure))  # as a future of torch's does
        began = simulation.now
        links = [frozenset((one, other)) for one in self.view.members for other in self.view.members]

        def unlinked(links: Sequence[frozenset[str]]) -> bool:
            return any(link in self.job.broken_links for link in links)

        def broken() -> str | None:
            if self._given_up is not None:
                return self._given_up
            if (reason := self._reporter.abort_reason()) is not None:
                return str(reason)
            for rank, name in enumerate(self.view.members):
                other = self.job.communicators.get((self._key, rank))
                gone = other is not None and (other._given_up is not None or other._process.dead)
                if gone and rank not in meeting.done and not self.job.is_dark(name):
                    return f"the connection to rank {rank} has ended"
                late = simulation.now - began >= CONNECT_SECONDS
                if late and unlinked([frozenset((self._process.name, name))]):
                    return f"the connection to rank {rank} cannot be made"
            return None

        def complete() -> bool:
            apart = any(
                not simulation.reaches(self._process.host, simulation.processes[name].host)
                for name in self.view.members
                if name in simulation.processes
            )
            through = not apart and not unlinked(links)
            return len(meeting.given) == self.size and (through or bool(meeting.done))

        while not simulation.block(lambda: complete() or broken() is not None, CONNECT_SECONDS):
            pass  # a connection that cannot be made shows in time
        simulation.block(lambda: broken() is not None, simulation.choose.choice((0.0, LATENCY_SECONDS, 0.02)))
        reason = broken()
        if reason is not None and not complete():
            raise self._failed(reason)
        if reason is not None and simulation.choose.random() < 0.5:  # what it had not received yet is lost
            raise self._failed(reason)
        meeting.done.add(self.rank)
        return flat.copy_(torch.stack([meeting.given[rank] for rank in range(self.size)]).sum(0))

    def _failed(self, reason: str) -> RuntimeError:
        self._reporter.signal_abort(f"an all-reduce failed: {reason}")
        return RuntimeError(reason)

    def abandon(self, reason: str) -> None:
        """Breaks its connections: who waits for it is woken."""
        self._given_up = self._given_up or reason

    def close(self, seconds: float = 0.0) -> None:
        """As `abandon`, in order."""
        self._given_up = self._given_up or "closed"


class _Requests:
    """In place of the requests in the store: who joins is started when it is told that it is among the members."""

    def __init__(self, job: "Job") -> None:
        self._job = job

    def answer(self, newcomers: Sequence[tuple[int, str, str]], view: View, said: dict[str, str]) -> None:
        for _, name, _ in newcomers:
            if name in view.members and name not in self._job.started:
                own = View(view.generation, view.members.index(name), view.members, joined=(name,))
                self._job.start(name, own, dict(said))


class Job:
    """A job of some processes on some hosts; `play` it to its end.

    Args:
        simulation: Its time.
        hosts: Host of each process that is there at the beginning.
        steps: How many all ranks train.
        joining: Step -> hosts of the processes that ask to join before it.
    """

    def __init__(self, simulation: Simulation, hosts: Sequence[str], steps: int, joining: dict[int, list[str]]) -> None:
        self.simulation = simulation
        self.steps = steps
        self.store: Store = PrefixStore("job", HashStore())
        self.meetings: dict[Any, _Meeting] = {}
        self.communicators: dict[Any, SimCommunicator] = {}
        self.broken_links: set[frozenset[str]] = set()
        self.dark: set[str] = set()
        self.failing: dict[tuple[str, int], int] = {}
        """Process and step -> how often what it computes there fails."""
        self.refused: set[str] = set()
        """Processes whose system refuses them memory for every connection."""
        self.slow: dict[tuple[str, int], float] = {}
        """Process and step -> how long it computes there."""
        self.doomed: dict[str, int] = {}
        """Process -> the step that it is lost in, when another one has ended it already."""
        self.diaries: dict[str, Diary] = {}
        self.started: set[str] = set()
        self.numbers: dict[str, int] = {}
        names = [f"p{number}" for number in range(len(hosts))]
        self.hosts = dict(zip(names, hosts, strict=True))
        self.waiting: dict[int, list[str]] = {}
        for step, wanted in joining.items():
            for host in wanted:
                name = f"p{len(self.hosts)}"
                self.hosts[name] = host
                self.waiting.setdefault(step, []).append(name)
        said = {name: self._said(name) for name in names}
        for rank, name in enumerate(names):
            self.start(name, View(0, rank, tuple(names)), said)

    def _said(self, name: str) -> str:
        host = self.hosts[name]
        nothing = Hardware(None, None, None)
        return packed(PeerInfo(0, 1, (host, "", ""), (), "cpu", "", nothing, {}, kernel=host))

    def is_dark(self, name: str) -> bool:
        """Whether a process is on a host of which nobody hears: its connections do not end."""
        return self.hosts[name] in self.dark

    def process(self, name: str) -> Process:
        """By its name; one that has not been started yet is made."""
        return self.simulation.processes.setdefault(name, Process(name, self.hosts[name]))

    def start(self, name: str, view: View, said: dict[str, str]) -> None:
        """Starts one process, as a member."""
        self.started.add(name)
        self.numbers[name] = len(self.numbers)
        self.diaries[name] = Diary()
        self.simulation.start(self.process(name), lambda: self._train(name, view, said))

    def _train(self, name: str, view: View, said: dict[str, str]) -> None:
        diary = self.diaries[name]
        try:
            membership = Membership(self.store, view, TIMEOUT, said)
            first = self._communicator(view, GenerationFailureReporter(view.rank, membership.failures))
            diary.views.append(view)

            def rebuild(view: View, store: Store, failure_policy: FailurePolicy) -> Any:
                diary.views.append(view)
                return self._communicator(view, failure_policy.reporter)

            resilient_ops = ResilientOps(membership, cast(Any, first), rebuild, TIMEOUT, joins=view.generation > 0)
            applied: Tensor | None = None
            if view.generation > 0:
                applied = self._hand_over(resilient_ops, None, list(view.joined))
            self._steps(name, resilient_ops, diary, applied)
            resilient_ops.close()
            diary.finished = True
        except RuntimeError as error:  # a PeerError is one
            diary.given_up = error
            membership.close(orderly=False)
            for each in self.communicators.values():
                if each._process.name == name:
                    each.abandon("given up")

    def _communicator(self, view: View, reporter: Any) -> SimCommunicator:
        made = SimCommunicator(self, view, reporter)
        self.communicators[made._key, view.rank] = made
        return made

    def _steps(self, name: str, resilient_ops: ResilientOps, diary: Diary, trained: Tensor | None) -> None:
        """The training: `trained` counts how often each process's gradient of each step is in the model."""
        trained = torch.zeros(self.steps, MOST, dtype=torch.int64) if trained is None else trained
        own = self.numbers[name]
        while (step := int((trained.sum(1) > 0).sum())) < self.steps:
            seconds = self.slow.get((name, step), COMPUTING_SECONDS * self.simulation.choose.random())
            self.simulation.block(None, seconds)
            gradient = torch.zeros(MOST, dtype=torch.int64)
            gradient[own] = 1
            averaged = [gradient]

            def attempt(step: int = step, gradient: Tensor = gradient, averaged: list[Tensor] = averaged) -> Tensor:
                if self.failing.get((name, step), 0) > 0:
                    self.failing[name, step] -= 1
                    raise RuntimeError(f"{name} fails in step {step}")
                averaged[0] = resilient_ops.wait(resilient_ops.communicator.all_reduce(gradient.clone()))
                listed = torch.zeros(1, dtype=torch.int64)
                if resilient_ops.communicator.rank == 0 and step + 1 in self.waiting:
                    listed += step + 1
                return resilient_ops.wait(resilient_ops.communicator.all_reduce(listed))

            listed = resilient_ops.complete(attempt, torch.zeros(1, dtype=torch.int64))
            trained[step] += averaged[0]
            for each, last in self.doomed.items():
                if last == step and each != name and step not in self.diaries[each].applied:
                    self.simulation.kill(self.process(each))
            if listed is not None and int(listed.item()):
                names = self.waiting[int(listed.item())]
                newcomers = [(number, each, self._said(each)) for number, each in enumerate(names)]
                resilient_ops.admit(newcomers, cast(Any, _Requests(self)))
                self._hand_over(resilient_ops, trained, names)
            diary.applied[step] = self._words(trained[step])

    def _hand_over(self, resilient_ops: ResilientOps, trained: Tensor | None, names: Sequence[str]) -> Tensor:
        """Gives the model to who joins: the first rank that was there before sends it."""
        like = torch.zeros(self.steps, MOST, dtype=torch.int64)

        def attempt() -> Tensor:
            members = resilient_ops.view.members
            first = next(rank for rank, each in enumerate(members) if each not in names)
            sent = trained if trained is not None and resilient_ops.view.rank == first else like
            return resilient_ops.wait(resilient_ops.communicator.all_reduce(sent.clone().view(-1))).view(like.shape)

        found = resilient_ops.complete(attempt, like)
        assert found is not None
        return found

    def _words(self, row: Tensor) -> dict[str, int]:
        known = {number: name for name, number in self.numbers.items()}
        return {known[number]: count for number, count in enumerate(row.tolist()) if count}

    def describe(self) -> str:
        """What became of everybody."""
        words = {
            name: [len(diary.applied), diary.finished, str(diary.given_up)] for name, diary in self.diaries.items()
        }
        return json.dumps(words, indent=1)
