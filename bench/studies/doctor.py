"""Ten faults planted on an emulated cluster, one at a time, and a healthy one again and again: what does doctor say?

Feeds docs/results/diagnosis.md.

    python -m gradwire.bench.studies.doctor                      # all faults, and 20 healthy runs; needs root
    python -m gradwire.bench.studies.doctor --only slow_link lost_duplex --healthy 0

A fault counts as named when the first finding has its key and, where it sits on one node, names that node alone.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gradwire.bench.doctor import command as doctor
from gradwire.bench.emulation.cluster import INTERFACE, EmulatedCluster
from gradwire.bench.emulation.fork import ForkedRank
from gradwire.bench.emulation.seats import Order
from gradwire.bench.emulation.signals import clean_end
from gradwire.bench.machine import machine_line
from gradwire.bench.terminal import right_columns

NODES = (2, 2, 2)
NIC = "200mbit"
SLOW_BITS_PER_SECOND = 50_000_000
PATIENCE_SECONDS = 240.0

Plant = Callable[[EmulatedCluster], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class PlantedFault:
    """Something that is made wrong on purpose."""

    name: str
    key: str
    """Of the finding that should come first."""
    node: str | None = None
    """Where it sits, if on one node alone."""
    plant: Plant = nullcontext
    order: Order = "contiguous"
    environment: Mapping[str, str] = field(default_factory=dict)
    before: str = ""
    """Shell words that every rank runs before the doctor; GROUP_RANK is its node."""


def inside(cluster: EmulatedCluster, node: int, *words: str) -> None:
    """Runs a command on a node.

    Raises:
        RuntimeError: It failed, with what it said.
    """
    done = subprocess.run([*cluster.enter(node), *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the fault cannot be planted: {' '.join(words)}: {done.stderr.strip()}")


def shrink_shared_memory(cluster: EmulatedCluster, node: int) -> None:
    """Leaves a node 1 MB of /dev/shm."""
    # Told the device, too, mount repeats none of the options that are shown for the folder: in a user namespace the
    # user's number is among them, which has no meaning there.
    inside(cluster, node, "mount", "-o", "remount,size=1m", "tmpfs", "/dev/shm")


@contextmanager
def slow_link(cluster: EmulatedCluster) -> Iterator[None]:
    """One node's link has a quarter of the others' rate."""
    cluster.limit(2, INTERFACE, 0, SLOW_BITS_PER_SECOND)
    yield


@contextmanager
def second_network(cluster: EmulatedCluster) -> Iterator[None]:
    """A second network with a quarter of the rate, which a variable names."""
    cluster.add_network("eth1")
    for node in range(len(cluster.nodes)):
        cluster.limit(node, "eth1", 1, SLOW_BITS_PER_SECOND)
    yield


@contextmanager
def tiny_shared_memory(cluster: EmulatedCluster) -> Iterator[None]:
    """A /dev/shm of 1 MB."""
    shrink_shared_memory(cluster, 1)
    yield


THROTTLE = """
import os, signal, time
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
def sockets():
    return len(open("/proc/net/udp").readlines()) + len(open("/proc/net/udp6").readlines()) > 2
def ranks():
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            try:
                parent = int(open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent != 0:
                yield int(name)
def send(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
while not sockets():
    time.sleep(0.05)
waiting = 1.0
while True:
    waiting += 0.1 * (int(open("/proc/loadavg").read().split()[3].split("/")[0]) - waiting)
    share = min(1.0, os.cpu_count() / max(waiting, 1.0))
    runs = max(0.002, 0.25 * share * 0.060)
    found = list(ranks())
    send(found, signal.SIGSTOP)
    time.sleep(0.060 - runs)
    send(found, signal.SIGCONT)
    time.sleep(runs)
"""
"""From the doctor's first UDP socket on, its processes run a quarter of the time that others get here; on a machine
whose cores many share that is less than a quarter, and would not be felt otherwise. It comes first itself, or it would
let them run for as long as it waits for a core. Those that came from outside, with no parent here, go on: nsenter stops
with its child.
"""


@contextmanager
def throttled(cluster: EmulatedCluster) -> Iterator[None]:
    """A node whose processors run a quarter of the time, as one that is too hot or taken away, without saying so."""
    with subprocess.Popen([*cluster.enter(2), sys.executable, "-I", "-S", "-c", THROTTLE]) as throttle:
        try:
            yield
        finally:
            throttle.kill()


@contextmanager
def half_duplex(cluster: EmulatedCluster) -> Iterator[None]:
    """What a node sends and what it receives pass one queue of the link's rate."""
    rate = cluster.nic_bits_per_second
    assert rate is not None
    burst = 65536
    script = f"""
    set -e
    ip link add wire0 type ifb
    ip link set wire0 up
    tc qdisc add dev wire0 root tbf rate {rate}bit burst {burst} limit {rate // 8 // 5}
    tc qdisc del dev {INTERFACE} root
    tc qdisc add dev {INTERFACE} clsact
    tc filter add dev {INTERFACE} ingress protocol all u32 match u32 0 0 action mirred egress redirect dev wire0
    tc filter add dev {INTERFACE} egress protocol all u32 match u32 0 0 action mirred egress redirect dev wire0
    """
    inside(cluster, 1, "sh", "-c", 'PATH="$PATH:/usr/sbin:/sbin"\n' + script)
    yield


@contextmanager
def other_mtu(cluster: EmulatedCluster) -> Iterator[None]:
    """One node's card sends smaller packets than the others'."""
    inside(cluster, 1, "sh", "-c", f'PATH="$PATH:/usr/sbin:/sbin"; ip link set {INTERFACE} mtu 900')
    yield


@contextmanager
def narrow_way(cluster: EmulatedCluster) -> Iterator[None]:
    """The switch carries smaller packets than the cards send, and says nothing."""
    cluster.shrink_switch(1300)
    yield


@contextmanager
def lossy_link(cluster: EmulatedCluster) -> Iterator[None]:
    """A node loses one in fifty of the packets that come, and TCP is reno, which takes it for congestion."""
    for node in range(len(cluster.nodes)):
        inside(cluster, node, "sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control")
    drop = f"iptables -A INPUT -i {INTERFACE} -m statistic --mode random --probability 0.02 -j DROP"
    inside(cluster, 1, "sh", "-c", 'PATH="$PATH:/usr/sbin:/sbin"; ' + drop)
    yield


@contextmanager
def small_windows(cluster: EmulatedCluster) -> Iterator[None]:
    """A node's kernel buffers one page for each connection."""
    inside(cluster, 1, "sh", "-c", "echo '4096 4096 4096' > /proc/sys/net/ipv4/tcp_rmem")
    yield


@contextmanager
def blocked_pair(cluster: EmulatedCluster) -> Iterator[None]:
    """A firewall between two nodes drops what one sends to the other."""
    drop = f"iptables -A INPUT -s {cluster.address(2)} -p tcp -j DROP"
    inside(cluster, 1, "sh", "-c", 'PATH="$PATH:/usr/sbin:/sbin"; ' + drop)
    yield


OLD_VERSION = "0.0.9"


@contextmanager
def other_version(folder: Path) -> Iterator[None]:
    """A folder in which another gradwire says that it is installed."""
    own = folder / f"gradwire-{OLD_VERSION}.dist-info"
    own.mkdir(exist_ok=True)
    (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gradwire\nVersion: {OLD_VERSION}\n")
    yield


def faults(folder: Path) -> tuple[PlantedFault, ...]:
    """The faults.

    Args:
        folder: For files that a fault needs, while it is there.
    """
    return (
        PlantedFault(name="slow link", key="slow_link", node="node2", plant=slow_link),
        PlantedFault(
            name="wrong interface",
            key="wrong_interface",
            plant=second_network,
            environment={"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1"},
        ),
        PlantedFault(name="round-robin ranks", key="rank_order", order="round-robin"),
        PlantedFault(name="tiny /dev/shm", key="shared_memory", node="node1", plant=tiny_shared_memory),
        PlantedFault(name="throttled node", key="slow_node", node="node2", plant=throttled),
        PlantedFault(name="lost duplex", key="half_duplex", node="node1", plant=half_duplex),
        PlantedFault(name="MTU of one node", key="mtu", node="node1", plant=other_mtu),
        PlantedFault(name="too many threads", key="crowded_cores", environment={"OMP_NUM_THREADS": "16"}),
        PlantedFault(
            name="mixed versions",
            key="versions",
            node="node1",
            plant=lambda _: other_version(folder),
            before=f"[ $GROUP_RANK != 1 ] || export PYTHONPATH={folder};",
        ),
        PlantedFault(name="bad variable", key="variable", environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
        PlantedFault(name="ranks on one core", key="crowded_cores", before="taskset -pc 0 $$ > /dev/null;"),
        PlantedFault(name="small packets on the way", key="mtu", plant=narrow_way),
        PlantedFault(name="lossy link", key="packet_loss", node="node1", plant=lossy_link),
        PlantedFault(name="small windows", key="tcp_buffers", node="node1", plant=small_windows),
        PlantedFault(name="blocked pair", key="unreachable", plant=blocked_pair),
        PlantedFault(name="late rank", key="", before="[ $RANK != 3 ] || sleep 35;"),
    )


EXTRA = (
    "ranks on one core",
    "small packets on the way",
    "lossy link",
    "small windows",
    "blocked pair",
    "late rank",
)
"""Beside the ten; nothing is wrong with a rank that comes half a minute late."""


@dataclass(frozen=True, kw_only=True)
class DoctorRun:
    """What the doctor said of one cluster."""

    name: str
    findings: tuple[dict[str, Any], ...]
    seconds: float
    expected: PlantedFault | None = None
    load: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    """As measured; for whoever wonders why."""

    @property
    def right(self) -> bool:
        """The fault first; on a healthy cluster nothing."""
        if self.expected is None or not self.expected.key:
            return not self.findings
        if not self.findings or self.findings[0]["key"] != self.expected.key:
            return False
        return self.expected.node is None or self.findings[0]["nodes"] == [self.expected.node]


def examine(fault: PlantedFault | None) -> DoctorRun:
    """Runs `gradwire doctor` on a cluster of its own.

    Args:
        fault: What is wrong with it; None for nothing.

    Raises:
        RuntimeError: The doctor itself failed.
    """
    wrong = fault or PlantedFault(name="healthy", key="")
    with tempfile.TemporaryDirectory(prefix="gradwire-doctor-") as folder, EmulatedCluster(NODES, NIC) as cluster:
        result = Path(folder, "doctor.json")
        command = [sys.executable, "-P", "-m", "gradwire", "doctor", "--json", str(result)]
        with wrong.plant(cluster):
            began = time.monotonic()
            ran = cluster.run(
                ["sh", "-c", wrong.before + ' "$@"', "sh", *command],
                order=wrong.order,
                environment=wrong.environment,
                timeout_seconds=PATIENCE_SECONDS,
            )
            seconds = time.monotonic() - began
        if not result.exists():
            raise RuntimeError(f"the doctor wrote nothing on `{wrong.name}`:\n" + "\n".join(ran.output)[-3000:])
        said = json.loads(result.read_text())
    return DoctorRun(
        name=wrong.name,
        findings=tuple(said["findings"]),
        seconds=seconds,
        expected=fault,
        load=os.getloadavg()[0],
        facts=said["facts"],
    )


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    """One forked rank of the doctor; what it found is in its file, and no failure.

    Args:
        place: Of the rank; the doctor finds the same in the environment, where every node has one rank.
        arguments: Of `gradwire doctor`.
    """
    assert place.nodes == (1,) * len(place.nodes)
    doctor.main(arguments)
    return 0


def table(runs: Sequence[DoctorRun]) -> Table:
    """A row for each run."""
    title = f"`gradwire doctor` on {len(NODES)} nodes of {NODES[0]} ranks, {NIC}"
    names = "planted", "named first", "also named", "right"
    shown = Table(*names, *right_columns("seconds", "load"), title=title)
    for run in runs:
        first = run.findings[0]["title"] if run.findings else "nothing"
        others = ", ".join(each["key"] for each in run.findings[1:])
        shown.add_row(run.name, first, others, "yes" if run.right else "NO", f"{run.seconds:.0f}", f"{run.load:.1f}")
    return shown


def main(argv: list[str]) -> int:
    """Runs the faults and the healthy clusters; 1 where more than one of the ten is missed, or a healthy one is blamed.

    Args:
        argv: See the module's docstring.
    """
    parser = argparse.ArgumentParser(prog="python -m gradwire.bench.studies.doctor")
    parser.add_argument("--healthy", type=int, default=20, metavar="N", help="runs on a healthy cluster (default 20)")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="faults by their names' beginnings")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    runs: list[DoctorRun] = []
    console = Console(width=150)
    with clean_end(), tempfile.TemporaryDirectory(prefix="gradwire-doctor-") as folder:
        chosen = [
            fault
            for fault in faults(Path(folder))
            if options.only is None or any(fault.name.startswith(name) for name in options.only)
        ]
        for fault in (*chosen, *[None] * options.healthy):
            runs.append(examine(fault))
            last = runs[-1]
            print(
                f"{last.name}: {[each['key'] for each in last.findings]} {last.right} {last.seconds:.0f} s", flush=True
            )
    console.print(table(runs))
    ten = [run for run in runs if run.expected is not None and run.name not in EXTRA]
    blamed = sum(not run.right for run in runs if run.expected is None)
    missed = sum(not run.right for run in ten)
    console.print(
        f"{len(ten) - missed} of {len(ten)} faults named first; {blamed} of {options.healthy} healthy clusters blamed; "
        f"{machine_line()}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps([vars(run) | {"expected": None} for run in runs], indent=1) + "\n")
    return int(missed > 1 or blamed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
