"""Law: a quiet elastic job loses nobody on hosts as they are, and a lost rank is given up there as anywhere.

No default route; no names, Debian's 127.0.1.1 for a host's own, or a resolver that answers nobody; IPv6 alone; docker's
bridge with the same address on every host; few ports, most of them in use; a firewall that rejects.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.bench.emulation.cluster import INTERFACE, EmulatedCluster
from gradwire.bench.emulation.fork import ForkedRank, run_forked
from gradwire.bench.emulation.namespaces import find_tool

STEPS, STEP_SECONDS = 120, 0.06
"""Longer in all than the looks at the next rank, and than the silence after which one is given up."""

NODES = 2
FIRST_PORT, PORTS, PORTS_IN_USE = 41000, 120, 60

RESOLVER = """
ip link add hole0 type veth peer name hole1
ip address add 192.0.2.1/24 dev hole0
ip link set hole0 up
ip link set hole1 up
ip neighbour add 192.0.2.53 lladdr 02:00:00:00:00:01 dev hole0
mount --bind {file} /etc/resolv.conf
"""
"""What is sent to it arrives at nobody, and nobody says so."""

DOCKER = """
ip link add docker0 type bridge
ip address add 172.17.0.1/16 dev docker0
ip link set docker0 up
echo {first} {last} > /proc/sys/net/ipv4/ip_local_port_range
"""

SILENT_RESOLVER = "nameserver 192.0.2.53\noptions timeout:4 attempts:2\n"
"""Eight seconds for each name: more than the six after which a rank that says nothing is given up."""

HOLD_PORTS = """
import socket, time
held = [socket.create_server(("", port)) for port in range({first}, {last})]
print("held", flush=True)
time.sleep(1000)
"""

REJECT = "iptables -A INPUT -i {interface} -p tcp --syn -j REJECT --reject-with tcp-reset"


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    """Trains for a while without a fault; then rank 3 is killed, its node with it, and the others go on."""
    torch.set_num_threads(1)
    place.connect()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)))
    state = gradwire.HookState(model, elastic=True)
    model.register_comm_hook(state, gradwire.comm_hook)
    after = 0
    while after < 3:
        model(torch.randn(4, 8)).square().mean().backward()
        if state.steps == 5:
            print("trains", flush=True)
        if state.steps == STEPS:
            print("quiet", state.view.size, flush=True)
            if place.rank == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        after += state.view.size == 2
        time.sleep(STEP_SECONDS)
    print("left", state.view.size, flush=True)
    state.close()
    os._exit(0)  # torch's default group waits for the lost ranks


def on_all(cluster: EmulatedCluster, script: str) -> None:
    for node in range(NODES):
        subprocess.run([*cluster.enter(node), "sh", "-ec", script], check=True)


def as_they_are(cluster: EmulatedCluster, folder: Path, until: ExitStack) -> None:
    """Without a route and without names; nothing else."""


def silent_resolver(cluster: EmulatedCluster, folder: Path, until: ExitStack) -> None:
    (folder / "resolv.conf").write_text(SILENT_RESOLVER)
    on_all(cluster, RESOLVER.format(file=folder / "resolv.conf"))


def bridge_and_few_ports(cluster: EmulatedCluster, folder: Path, until: ExitStack) -> None:
    """The same address on every host, and a port of each that a program asks for may be taken."""
    on_all(cluster, DOCKER.format(first=FIRST_PORT, last=FIRST_PORT + PORTS))
    program = HOLD_PORTS.format(first=FIRST_PORT, last=FIRST_PORT + PORTS_IN_USE)
    for node in range(NODES):
        words = [*cluster.enter(node), sys.executable, "-I", "-S", "-c", program]
        holding = until.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        until.callback(holding.kill)
        assert holding.stdout is not None and holding.stdout.readline() == "held\n"


def rejecting_firewall(cluster: EmulatedCluster, folder: Path, until: ExitStack) -> None:
    """A second network that lets nobody in; `wall_up` closes the first one later."""
    if find_tool("iptables") is None:
        pytest.skip("the command `iptables` is missing: apt-get install iptables")
    cluster.add_network("eth1")
    on_all(cluster, REJECT.format(interface="eth1"))


def wall_up(cluster: EmulatedCluster) -> None:
    on_all(cluster, REJECT.format(interface=INTERFACE))


Change = Callable[[EmulatedCluster, Path, ExitStack], None]


@pytest.mark.netns
@pytest.mark.parametrize(
    ("names", "network", "change"),
    [
        ("own", "10.201.0.0/16", as_they_are),
        ("none", "fd77::/64", as_they_are),
        ("none", "10.202.0.0/16", silent_resolver),
        ("none", "10.203.0.0/16", bridge_and_few_ports),
        ("none", "10.204.0.0/16", rejecting_firewall),
    ],
    ids=["own name", "IPv6", "silent resolver", "bridge and few ports", "firewall"],
)
def test_nobody_is_given_up_but_who_is_lost(names: str, network: str, change: Change, tmp_path: Path) -> None:
    with EmulatedCluster([1] * NODES, names=names, network=network) as cluster, ExitStack() as until:  # type: ignore[arg-type]
        change(cluster, tmp_path, until)
        trains: list[int] = []

        def listen(node: int, line: str) -> None:
            trains.extend([node] * (line == "trains"))
            if len(trains) == 4 and change is rejecting_firewall and line == "trains":
                wall_up(cluster)

        run = run_forked(
            cluster, __file__, [], nodes=[2] * NODES, timeout_seconds=240, grace_seconds=100, on_line=listen
        )
    said = "\n".join(run.output)
    assert said.count("quiet 4") == 4, said
    assert said.count("left 2") == 2, said
