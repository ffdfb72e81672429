"""Serves the store of a study's ranks in a process of its own, as torchrun's agent does.

Feeds docs/develop/startup.md and docs/results/elastic.md, by the studies that use it.

A process that serves a TCPStore runs a C++ thread for it. Of ranks that were forked from such a process, one in thirty
hung while it connected (torch 2.13, glibc 2.36): a lock that the thread held at the fork is never released in the
child.
"""

import multiprocessing
import os
import resource
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from gradwire.bench.emulation.signals import die_with_parent
from gradwire.comms.bootstrap.compat import TCPStore


def _serve(port: Connection, parent: int) -> None:
    die_with_parent(parent)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send((store.port, _busy_seconds()))
    while port.poll(None):
        if port.recv() is None:
            return
        port.send(_busy_seconds())


def _busy_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@contextmanager
def serve_store() -> Iterator[tuple[int, Callable[[], float]]]:
    """Serves a TCPStore in a process of its own for the length of a `with` block.

    Yields:
        (port of the store, function that returns the processor seconds its process has used so far).
    """
    here, there = multiprocessing.Pipe()
    parent = os.getpid()
    server = os.fork()  # no Process: at its own end, a rank forked later would end those of this process
    if not server:
        try:
            _serve(there, parent)
        except BaseException:  # noqa: BLE001 - whoever forked sees that nobody answers, and here is why
            traceback.print_exc()
        finally:
            os._exit(0)
    there.close()  # so that nobody waits for one that has ended
    port, before = here.recv()

    def busy_seconds() -> float:
        here.send("used")
        busy: float = here.recv() - before
        return busy

    try:
        yield port, busy_seconds
    finally:
        here.send(None)
        os.waitpid(server, 0)
