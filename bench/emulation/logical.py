"""The same ranks without an emulated network: nodes in name only, on this machine's own loopback."""

import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradwire.bench.emulation.launch import Outcome, RankLine, Ranks
from gradwire.bench.emulation.seats import Order, seat_ranks, torchrun_environment


def free_port() -> int:
    """Returns a TCP port of the loopback that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run_logical(
    nodes: Sequence[int],
    command: Sequence[str],
    *,
    order: Order = "contiguous",
    timeout_seconds: float | None = None,
    grace_seconds: float = 30.0,
    environment: Mapping[str, str] | None = None,
    on_line: RankLine | None = None,
) -> Outcome:
    """Runs a command as every rank on this machine, with torchrun's variables and a node's name for gradwire.

    Args:
        nodes: Ranks of each node; gradwire is told by GRADWIRE_HOSTNAME which ranks share one.
        command: Program and arguments.
        order: How the ranks are dealt over the nodes.
        timeout_seconds: Longest time for the whole; None for no limit.
        grace_seconds: How long the other ranks may go on after one has failed.
        environment: Variables to set besides; they win.
        on_line: Called with (rank, line) for every line printed.
    """
    seats = seat_ranks(nodes, order)
    port = free_port()
    argvs = []
    for seat in seats:
        variables = torchrun_environment(
            seat, seats, master_address="127.0.0.1", master_port=port, run_id=f"logical-{port}"
        )
        variables |= {"GRADWIRE_HOSTNAME": f"node{seat.node}", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        variables |= environment or {}
        words = [f"{name}={value}" for name, value in variables.items()]
        # The kernel ends the ranks if this process is killed.
        argvs.append(["setpriv", "--pdeathsig", "KILL", "env", *words, *command])
    with Ranks(argvs, on_line=on_line) as ranks:
        return ranks.wait(timeout_seconds, grace_seconds)


def python_module(name: str, *arguments: str) -> list[str]:
    """Returns the command line that runs a module under this interpreter.

    Args:
        name: Of the module.
        arguments: What follows it.
    """
    return [str(Path(sys.executable)), "-m", name, *arguments]
