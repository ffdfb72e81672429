"""Watch over how the ranks of a user's script meet, for the commands with `--script`; it tells a script that cannot.

Such a command starts each rank itself, on nodes of its own or as a launcher has placed it, and ends it after some
steps. A script whose ranks agree on another place to meet would wait there until the time is up, without a word.
"""

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn
from urllib.parse import parse_qsl, urlsplit

from gradwire.comms.environment import job_is_on_one_host, launcher_variables, world_size

MARK = "gradwire --script: "
"""Beginning of the line with the reason, by which the command finds it in a rank's output."""
INSTEAD = "write `init_process_group()` without init_method, rank and world_size: it takes what each rank is given"
KEPT = f"leave out the line of the script that sets it, and {INSTEAD}"


@dataclass(frozen=True, slots=True)
class GivenJob:
    """Job of a rank as its environment described it at the start; the script may change the environment later.

    Attributes:
        ranks: Number of ranks.
        on_one_node: True if all of them are on this node.
        address: Address of rank 0; None without a launcher.
        pid: Process ID of the rank.
    """

    ranks: int
    on_one_node: bool
    address: str | None
    pid: int

    @classmethod
    def read(cls) -> "GivenJob":
        """Returns the job that this process is a rank of; a job of one rank if no launcher has started it."""
        ranks = world_size()
        return cls(ranks, ranks == 1 or job_is_on_one_host(), launcher_variables().get("MASTER_ADDR"), os.getpid())

    def why_not_met(self, url: str, size: int = -1) -> str | None:
        """Returns why the ranks cannot meet as this process calls `init_process_group`, and what to write.

        Args:
            url: `init_method` of the call; env:// if it has none.
            size: `world_size` of the call; -1 if it has none.

        Returns:
            One sentence; None if nothing speaks against it.
        """
        found = urlsplit(url)
        if os.getpid() != self.pid:
            return (
                "`init_process_group` is called in a process that the script has started itself, as by "
                "torch.multiprocessing.spawn, beside the ranks that are started already: call the training function "
                f"once, without spawn and with rank int(os.environ['RANK']), and there {INSTEAD}"
            )
        if found.scheme == "file":
            return (
                f"`init_method` is {url}; this run ends in the middle of the script and leaves that file behind, in "
                f"which the next run's ranks would find those of this one: {INSTEAD}"
            )
        if size < 0:
            size = int(dict(parse_qsl(found.query)).get("world_size", world_size()))
        if size != self.ranks:
            return f"`world_size` is {size}, and this job has {_ranks(self.ranks)}: {INSTEAD}"
        # The address at which the script's ranks wait for each other, if it is not that of the launcher.
        tcp = found.scheme == "tcp"
        host = found.hostname if tcp else launcher_variables().get("MASTER_ADDR")
        if host in (None, self.address) or not (tcp or found.scheme == "env"):
            return None
        where, what = (f"`init_method` is {url}", INSTEAD) if tcp else (f"`MASTER_ADDR` is {host}", KEPT)
        if not self.on_one_node and _is_loopback(host):
            return f"{where}; each node has a {host} of its own, where no other node's ranks are: {what}"
        why = _why_unreachable(host)
        return f"{where}; this node cannot reach {host} ({why}): {what}" if why else None

    def why_apart(self) -> str | None:
        """Returns why an optimizer step here is not one of the whole job, and what to write; None if it is one."""
        import torch.distributed as dist

        size = dist.get_world_size() if dist.is_initialized() else 0
        if self.ranks == 1 or size == self.ranks:
            return None
        found = f"with a process group of {_ranks(size)}" if size else "without `init_process_group()`"
        return (
            f"the script makes optimizer steps {found}, and this job has {_ranks(self.ranks)}, of which each trains "
            f"alone: wrap the model in DistributedDataParallel, and before that {INSTEAD}"
        )

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Returns a context manager in which `init_process_group` checks first whether the ranks can meet.

        If they cannot, it prints why and ends the process. Processes started by multiprocessing do the same.
        """
        # Imported here, because the doctor also imports this module in a Python without torch.
        from torch.distributed import distributed_c10d

        from gradwire.comms.bootstrap.compat import wrap_method

        restore = [
            wrap_method(distributed_c10d, "rendezvous", self._rendezvous),
            wrap_method(BaseProcess, "start", self._start),
        ]
        try:
            yield
        finally:
            for each in restore:
                each()

    def _rendezvous(self, method: Callable[..., Any], url: str, rank: int, world_size: int, **named: Any) -> Any:
        if (why := self.why_not_met(url, world_size)) is not None:
            self.refuse(why)
        return method(url, rank, world_size, **named)

    def _start(self, method: Callable[..., Any], process: Any) -> None:
        if process._target is not None:
            # A process that is not forked has no method replaced: it replaces them before its function runs.
            process._target = partial(_run_watched, self, process._target)
        method(process)

    def refuse(self, why: str) -> NoReturn:
        """Prints why the script cannot run here, and ends this process and the rank that has started it.

        Args:
            why: Sentence that `why_not_met` or `why_apart` has returned.
        """
        say(why)
        if os.getpid() != self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)  # it may wait for what this process cannot give
        os._exit(1)


def say(why: str) -> None:
    """Prints a sentence in a line by which `refusal_of` finds it."""
    os.write(1, f"\n{MARK}{why}\n".encode())


def refusal_of(lines: Iterable[str]) -> str | None:
    """Returns the first sentence that `say` has printed among lines of output; None if there is none."""
    return next((line.removeprefix(MARK) for line in lines if line.startswith(MARK)), None)


def _run_watched(job: GivenJob, target: Callable[..., object], *arguments: object, **named: object) -> object:
    with job.watched():
        return target(*arguments, **named)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _why_unreachable(host: str) -> str | None:
    """Returns why this node has no route to a host, or no address for its name; None if it has. Sends nothing."""
    try:
        # Sorted by what can be reached: RFC 6724, section 6, rule 1. Connecting a UDP socket only looks up the route.
        family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
    except OSError as error:
        return error.strerror or str(error)
    return None
