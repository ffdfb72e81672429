"""Processes, threads, sockets and a store in simulated time: the real protocol runs on them, one thread at a time.

A scheduler lets one thread go on at a time, until it waits; who is next is drawn. Time passes only where all wait, so
minutes take milliseconds, and a history that fails can be played again. Faked are the edges alone: the clock, threads'
waits, sockets, what a kernel knows of its own processes, and how long a store takes to answer.
"""

import errno
import random
import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self
from unittest.mock import patch

from gradwire.comms.bootstrap import kernel, liveness, pending_connections, probe, ring_connections, store
from gradwire.comms.bootstrap.store import StoreUnreachableError
from gradwire.comms.elastic import membership, resilient_ops

LATENCY_SECONDS = 0.0005
"""Of a message, and of the store's answer."""

BROKEN_SECONDS = 11.0
"""After that long without a way between two hosts TCP's keep-alive breaks a connection; see `KEEPALIVE`."""

NAP_SECONDS = 0.1
"""Between two looks, where a rank looks again and again: each costs a change of threads, and decides nothing."""

STARTED = 1000.0
"""The clock when a history begins: no moment is 0."""


class Killed(BaseException):
    """Ends a thread of a process that is gone."""


class StuckError(AssertionError):
    """Somebody waits for what cannot come."""


class Process:
    """One process of the history.

    Args:
        name: Unique.
        host: Where it runs.
    """

    def __init__(self, name: str, host: str) -> None:
        self.name = name
        self.host = host
        self.dead = False
        self.frozen = False
        self.sockets: set[SimSocket] = set()


class _Task:
    def __init__(self, process: Process, target: Callable[[], object]) -> None:
        self.process = process
        self.target = target
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = None
        self.wake: float | None = None
        self.ended = False
        self.thread: object = None

    def may_run(self, now: float) -> bool:
        return (self.wake is not None and self.wake <= now) or (self.ready is not None and self.ready())


class Simulation:
    """A history that is played.

    Args:
        choose: Draws whose turn it is.
    """

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.now = STARTED
        self.processes: dict[str, Process] = {}
        self.apart: set[frozenset[str]] = set()
        """Pairs of hosts without a way between them."""
        self.cut: dict[frozenset[str], float] = {}
        """Since when."""
        self.store_host = ""
        self._tasks: list[_Task] = []
        self._events: list[tuple[float, Callable[[], None]]] = []
        self._current: _Task | None = None
        self.changes = 0
        """Of threads: what a history costs."""
        self._player = threading.Semaphore(0)
        self._most = STARTED
        self._error: BaseException | None = None
        self._ending = False
        self._ports = 10_000
        self.listeners: dict[int, SimSocket] = {}

    @property
    def process(self) -> Process:
        """Whose thread runs."""
        assert self._current is not None
        return self._current.process

    @property
    def thread(self) -> object:
        """The one that runs, as the protocol knows it."""
        return None if self._current is None else self._current.thread

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        """Has something happen so long after the beginning."""
        self._events.append((STARTED + seconds, event))

    def start(self, process: Process, target: Callable[[], object]) -> _Task:
        """A new thread."""
        self.processes.setdefault(process.name, process)
        task = _Task(process, target)
        task.wake = self.now
        self._tasks.append(task)

        def run() -> None:
            task.turn.acquire()
            try:
                if not process.dead:
                    task.target()
            except Killed:
                pass  # what ends with its process says nothing
            except BaseException as error:  # noqa: BLE001 - raised by `play`
                self._error = self._error or error
            task.ended = True
            self._go_on(None if self._ending else self._next())

        threading.Thread(target=run, daemon=True).start()
        return task

    def block(self, ready: Callable[[], bool] | None, seconds: float | None) -> bool:
        """Waits in simulated time; whether it was for what `ready` says, and not for the time."""
        task = self._current
        assert task is not None
        if task.process.dead:
            raise Killed
        task.ready = ready
        task.wake = None if seconds is None else self.now + max(seconds, 0.0)
        following = self._next()
        if following is not task:
            self._go_on(following)
            task.turn.acquire()
            if task.process.dead:
                raise Killed
        return ready is not None and ready()

    def play(self, seconds: float) -> None:
        """Plays the history, to the end of all threads.

        Raises:
            StuckError: Some have not ended after so many seconds, or wait for nothing that can come.
        """
        self._most = STARTED + seconds
        try:
            if (first := self._next()) is not None:
                self._go_on(first)
                self._player.acquire()
        finally:
            self._end()
        if self._error is not None:
            raise self._error

    def _next(self) -> _Task | None:
        """Whose turn it is, once time has passed as far as it must; None at the end."""
        while self._error is None:
            for event in [each for each in self._events if each[0] <= self.now]:
                self._events.remove(event)
                event[1]()
            self._tasks = [task for task in self._tasks if not task.ended]
            alive = [task for task in self._tasks if not task.process.dead]
            if not alive:
                return None
            moving = [task for task in alive if not task.process.frozen]
            runnable = [task for task in moving if task.may_run(self.now)]
            if runnable:
                return self.choose.choice(runnable)
            moments = [task.wake for task in moving if task.wake is not None]
            moments += [moment for moment, _ in self._events]
            moments += [moment for moment in self._arrivals() if moment > self.now]
            if not moments or min(moments) > self._most:
                waiting = sorted({task.process.name for task in alive})
                self._error = StuckError(f"after {self.now - STARTED:.1f} s {waiting} wait still")
                return None
            self.now = max(self.now, min(moments))
        return None

    def _go_on(self, following: _Task | None) -> None:
        """Hands the turn over: to a thread, or back to who plays."""
        self.changes += 1
        self._current = following
        if following is None:
            self._player.release()
        else:
            following.turn.release()

    def kill(self, process: Process) -> None:
        """Ends a process: its kernel closes what it had open."""
        process.dead = True
        for each in list(process.sockets):
            each.end(self.now + LATENCY_SECONDS)

    def lose_host(self, host: str) -> None:
        """Ends all processes of a host that goes dark: nobody hears of it but by silence."""
        for process in self.processes.values():
            if process.host == host:
                process.dead = True
                for each in list(process.sockets):
                    each.end(self.now + BROKEN_SECONDS, broken=True)
        others = {process.host for process in self.processes.values()} - {host}
        for other in others:
            self.part(host, other)

    def part(self, one: str, other: str) -> None:
        """Cuts the way between two hosts."""
        pair = frozenset((one, other))
        self.apart.add(pair)
        self.cut.setdefault(pair, self.now)

    def heal(self, one: str, other: str) -> None:
        """Mends it: what was sent meanwhile arrives, unless the connections have been broken."""
        pair = frozenset((one, other))
        self.apart.discard(pair)
        self.cut.pop(pair, None)

    def reaches(self, one: str, other: str) -> bool:
        """Whether there is a way between two hosts."""
        return one == other or frozenset((one, other)) not in self.apart

    def port(self) -> int:
        """A free one."""
        self._ports += 1
        return self._ports

    def _arrivals(self) -> Iterator[float]:
        for process in self.processes.values():
            for each in process.sockets:
                yield from each.moments()

    def _end(self) -> None:
        """Ends the threads that are left."""
        self._ending = True
        for task in self._tasks:
            task.process.dead = True
        for task in self._tasks:
            if not task.ended:
                self._current = task
                task.turn.release()
                self._player.acquire()


class SimSocket:
    """One end of a connection, or a listener."""

    simulation: Simulation

    def __init__(self, process: Process, port: int = 0) -> None:
        self.process = process
        self.port = port
        self.peer: SimSocket | None = None
        self.closed = False
        self.dialling: tuple[str, int] | None = None
        """Where an attempt to connect is under way to: it ends a latency after there is a way."""
        self.dialled_at = self.simulation.now
        self._came: list[tuple[float, Any]] = []
        """(moment, what): bytes, a connection, b"" for the end, an OSError for a broken one."""
        process.sockets.add(self)

    def is_readable(self) -> bool:
        return any(moment <= self.simulation.now for moment in self.moments())

    def moments(self) -> list[float]:
        """When the first thing arrives, or an attempt to connect has ended."""
        if self.dialling is not None:
            reached = self.simulation.reaches(self.process.host, self.dialling[0])
            return [max(self.dialled_at + LATENCY_SECONDS, self.simulation.now)] if reached else []
        broken = self._broken()
        if broken is not None and broken <= self.simulation.now:
            return [broken]
        if self._came and self._is_reached():
            return [self._came[0][0]]
        return [] if broken is None else [broken]

    def _is_reached(self) -> bool:
        return self.peer is None or self.simulation.reaches(self.process.host, self.peer.process.host)

    def _broken(self) -> float | None:
        """When keep-alive ends it; None while there is a way."""
        if self.peer is None or self._is_reached():
            return None
        return self.simulation.cut[frozenset((self.process.host, self.peer.process.host))] + BROKEN_SECONDS

    def end(self, moment: float, *, broken: bool = False) -> None:
        """What its kernel does when it is closed."""
        if self.closed:
            return
        self.closed = True
        self.process.sockets.discard(self)
        self.simulation.listeners.pop(self.port, None)
        if self.peer is not None and not self.peer.closed:
            self.peer._came.append((moment, ConnectionResetError("keep-alive") if broken else b""))
        for _, what in self._came:
            if isinstance(what, SimSocket):  # connected, and never accepted
                what.end(moment)

    def close(self) -> None:
        self.end(self.simulation.now + LATENCY_SECONDS)

    def sendall(self, said: bytes) -> None:
        if self.closed or self.peer is None or self.peer.closed:
            raise BrokenPipeError("closed")
        self.peer._came.append((self.simulation.now + LATENCY_SECONDS, bytes(said)))

    def recv(self, nbytes: int) -> bytes:
        if self.closed:
            raise OSError("closed")
        if not self.is_readable():
            self.simulation.block(self.is_readable, liveness.CLOSING_SECONDS)
            if not self.is_readable():
                raise TimeoutError("nothing came")
        if (broken := self._broken()) is not None and broken <= self.simulation.now:
            raise TimeoutError("keep-alive")
        moment, what = self._came.pop(0)
        if isinstance(what, OSError):
            raise what
        if what == b"":
            self._came.insert(0, (moment, what))
        elif len(what) > nbytes:
            self._came.insert(0, (moment, what[nbytes:]))
        return bytes(what[:nbytes])

    def accept(self) -> "tuple[SimSocket, tuple[str, int]]":
        if not self.is_readable():
            raise BlockingIOError("nobody has connected")
        _, accepted = self._came.pop(0)
        return accepted, ("", 0)

    def getsockname(self) -> tuple[str, int]:
        return address_of(self.process.host), self.port

    def settimeout(self, seconds: float) -> None: ...

    def setblocking(self, flag: bool) -> None: ...

    def setsockopt(self, *option: int) -> None: ...

    def getsockopt(self, *option: int) -> int:
        """Ends the attempt to connect that made this end: 0, or the number of its error."""
        host, port = self.dialling or ("", 0)
        self.dialling = None
        listening = self.simulation.listeners.get(port)
        if listening is None or listening.closed or not self.simulation.reaches(self.process.host, host):
            return errno.ECONNREFUSED
        theirs = SimSocket(listening.process)
        self.peer, theirs.peer = theirs, self
        listening._came.append((self.simulation.now + LATENCY_SECONDS, theirs))
        return 0


class _Selector:
    EVENT_READ, EVENT_WRITE = 1, 2

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._watched: dict[SimSocket, None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def register(self, watched: SimSocket, event: int) -> None:
        self._watched[watched] = None

    def modify(self, watched: SimSocket, event: int) -> None: ...

    def unregister(self, watched: SimSocket) -> None:
        del self._watched[watched]

    def select(self, seconds: float) -> list[tuple[Any, int]]:
        def ready() -> bool:
            return any(each.closed or each.is_readable() for each in self._watched)

        if not ready() and seconds > 0:
            self._simulation.block(ready, seconds)
        found = [each for each in self._watched if not each.closed and each.is_readable()]
        return [(type("Key", (), {"fileobj": each}), 1) for each in found]


class _Event:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, seconds: float | None = None) -> bool:
        return self._set or self._simulation.block(self.is_set, seconds)


class _Lock:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._held = False

    def __enter__(self) -> Self:
        while self._held:
            self._simulation.block(lambda: not self._held, None)
        self._held = True
        return self

    def __exit__(self, *error: object) -> None:
        self._held = False

    def wait_for(self, predicate: Callable[[], bool], seconds: float) -> bool:
        self._held = False
        found = predicate() or self._simulation.block(predicate, seconds)
        self.__enter__()
        return found

    def notify_all(self) -> None:
        """Who waits looks at what he waits for by himself."""


class _Thread:
    def __init__(self, simulation: Simulation, name: str, target: Callable[[], object], **other: object) -> None:
        self._simulation = simulation
        self._target = target
        self.task: _Task | None = None

    def start(self) -> None:
        self.task = self._simulation.start(self._simulation.process, self._target)
        self.task.thread = self

    def join(self, seconds: float | None = None) -> None:
        task = self.task
        if task is not None:
            self._simulation.block(lambda: task.ended, seconds)


def _call_each(simulation: Simulation, function: Callable[[Any], Any], items: Iterable[Any], name: str) -> list[Any]:
    """In place of `threads.call_each`: each call in a thread of the simulation's own."""
    found: dict[int, Any] = {}

    def call(number: int, item: Any) -> None:
        found[number] = function(item)

    tasks = [simulation.start(simulation.process, partial(call, number, item)) for number, item in enumerate(items)]
    simulation.block(lambda: all(task.ended for task in tasks), None)
    return [found[number] for number in sorted(found)]


class _Names:
    """A module's stand-in: the names that are given, the rest from the module itself."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def address_of(host: str) -> str:
    """The address of a host, whose name is a letter: ranks take no other text for an address."""
    return f"10.0.0.{ord(host)}"


@contextmanager
def simulated(simulation: Simulation) -> Iterator[None]:
    """Has the membership, the ring and the store wait in simulated time, on simulated sockets."""
    SimSocket.simulation = simulation

    def listener(waiting: int) -> SimSocket:
        made = SimSocket(simulation.process, simulation.port())
        simulation.listeners[made.port] = made
        return made

    def start_connecting(address: str, port: int) -> SimSocket:
        made = SimSocket(simulation.process)
        made.dialling = chr(int(address.rpartition(".")[2])), port
        return made

    def socketpair() -> tuple[SimSocket, SimSocket]:
        one, other = SimSocket(simulation.process), SimSocket(simulation.process)
        one.peer, other.peer = other, one
        return one, other

    def listener_state(name: str, port: int, addresses: Sequence[str]) -> str:
        own, listening = simulation.process.host, simulation.listeners.get(port)
        there = listening is not None and not listening.process.dead
        if name == own:
            return kernel.LISTENS if there else kernel.NOTHING_LISTENS
        if not simulation.reaches(own, name):
            simulation.block(lambda: simulation.reaches(own, name), kernel.CONNECT_SECONDS)
            if not simulation.reaches(own, name):
                return kernel.UNKNOWN
        simulation.block(None, LATENCY_SECONDS)
        listening = simulation.listeners.get(port)
        return kernel.LISTENS if listening is not None and not listening.process.dead else kernel.REFUSED

    def ask(asked: Any, words: str, question: Callable[[], Any], seconds: float | None = None) -> Any:
        reaches = partial(simulation.reaches, simulation.process.host, simulation.store_host)
        if not reaches():
            simulation.block(reaches, asked._seconds if seconds is None else seconds)
            if not reaches():
                raise StoreUnreachableError(f"the store does not answer to `{words}`")
        simulation.block(None, LATENCY_SECONDS * simulation.choose.random())
        return question()

    clock = {
        "monotonic": lambda: simulation.now,
        "perf_counter": lambda: simulation.now,
        "time": lambda: simulation.now,
        "sleep": lambda seconds: simulation.block(None, seconds),
    }
    threads = {
        "Event": lambda: _Event(simulation),
        "Lock": lambda: _Lock(simulation),
        "Condition": lambda: _Lock(simulation),
        "current_thread": lambda: simulation.thread,
    }
    with ExitStack() as stack:
        for module in (liveness, membership, pending_connections, resilient_ops, ring_connections, store):
            stack.enter_context(patch.object(module, "time", _Names(module.time, **clock)))
        for module in (liveness, membership, ring_connections):
            stack.enter_context(patch.object(module, "threading", _Names(threading, **threads)))
        thread = partial(_Thread, simulation)
        stack.enter_context(patch.object(liveness, "BackgroundThread", thread))
        sockets = _Names(socket, socket=SimSocket, socketpair=socketpair)
        waits = _Names(selectors, DefaultSelector=lambda: _Selector(simulation), EVENT_READ=1, EVENT_WRITE=2)
        for module in (liveness, ring_connections):
            stack.enter_context(patch.object(module, "socket", sockets))
            stack.enter_context(patch.object(module, "selectors", waits))
        for name, replacement in {
            "start_connecting": start_connecting,
            "listener": listener,
            "FIRST_NAP_SECONDS": NAP_SECONDS,
        }.items():
            stack.enter_context(patch.object(ring_connections, name, replacement))
        for name, replacement in {
            "listener_state": listener_state,
            "own_kernel": lambda: simulation.process.host,
            "own_addresses": lambda *toward: [address_of(simulation.process.host)],
            "addresses_to_try": lambda name, addresses: list(addresses),
        }.items():
            stack.enter_context(patch.object(probe, name, replacement))
        stack.enter_context(patch.object(membership, "call_each", partial(_call_each, simulation)))
        stack.enter_context(patch.object(store.PollingStore, "_ask", ask))
        stack.enter_context(patch.object(membership, "NAP_SECONDS", NAP_SECONDS))
        stack.enter_context(patch.object(resilient_ops, "_trim_heap", lambda: None))
        yield
