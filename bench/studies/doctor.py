"""Injects ten faults into an emulated cluster, one at a time, and counts those that `gradwire doctor` names.

Healthy clusters are examined too, of which it must name none.

Feeds docs/results/diagnosis.md.

    python -m gradwire.bench.studies.doctor                      # all faults, and 20 healthy runs; needs root
    python -m gradwire.bench.studies.doctor --only slow_link lost_duplex --healthy 0

A fault counts as named if the first finding has its key and, for a fault of a single node, names that node alone.
"""

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

from gradwire.bench.emulation.cluster import INTERFACE, EmulatedCluster
from gradwire.bench.emulation.namespaces import run_shell
from gradwire.bench.emulation.placement import Order
from gradwire.bench.emulation.rate import parse_rate
from gradwire.bench.emulation.signals import clean_end
from gradwire.bench.machine import machine_line
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.terminal import right_columns

NODES = (2, 2, 2)
NIC = "200mbit"
SLOW_BITS_PER_SECOND = 50_000_000
PATIENCE_SECONDS = 240.0

Injection = Callable[[EmulatedCluster], object]
"""Makes something of a cluster wrong; it ends with the cluster."""


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """One fault, and the finding that the doctor should report for it.

    Attributes:
        name: Name of the fault.
        key: Key of the finding that should come first; empty if nothing should be found.
        node: Node that the finding should name; None if the fault concerns several.
        inject: Function that makes the fault before the doctor runs.
        meanwhile: Context manager of the cluster that makes the fault only while the doctor runs.
        order: Order in which ranks are placed on nodes.
        environment: Variables that every rank gets.
        before: Words of a shell that every rank runs before the doctor; `$GROUP_RANK` is its node.
        extra: True if the fault is not one of the ten that are counted.
    """

    name: str
    key: str
    node: str | None = None
    inject: Injection = lambda _: None
    meanwhile: Callable[[EmulatedCluster], AbstractContextManager[object]] = nullcontext
    order: Order = "contiguous"
    environment: Mapping[str, str] = field(default_factory=dict)
    before: str = ""
    extra: bool = False


def inside(cluster: EmulatedCluster, node: int, script: str) -> None:
    """Runs lines of a shell on a node, to inject a fault.

    Raises:
        RuntimeError: A line failed; the message has its error output.
    """
    done = run_shell("set -e\n" + script, prefix=cluster.enter(node))
    if done.returncode != 0:
        raise RuntimeError(f"the fault cannot be injected: {script.strip()}: {done.stderr.strip()}")


def on_node(node: int, script: str) -> Injection:
    """Returns an injection that runs lines of a shell on one node."""
    return lambda cluster: inside(cluster, node, script)


TINY_SHARED_MEMORY = "mount -o remount,size=1m tmpfs /dev/shm"
# Told the device, too, mount repeats none of the options that are shown for the folder: in a user namespace the user's
# number is among them, which has no meaning there.

OTHER_MTU = f"ip link set {INTERFACE} mtu 900"

SMALL_WINDOWS = "echo '4096 4096 4096' > /proc/sys/net/ipv4/tcp_rmem"
"""Limits the kernel's receive buffer of each TCP connection to one page."""

HALF_DUPLEX = f"""
ip link add wire0 type ifb
ip link set wire0 up
tc qdisc add dev wire0 root tbf rate {NIC} burst 65536 limit {parse_rate(NIC, "nic") // 8 // 5}
tc qdisc del dev {INTERFACE} root
tc qdisc add dev {INTERFACE} clsact
tc filter add dev {INTERFACE} ingress protocol all u32 match u32 0 0 action mirred egress redirect dev wire0
tc filter add dev {INTERFACE} egress protocol all u32 match u32 0 0 action mirred egress redirect dev wire0
"""
"""Sends a node's outgoing and incoming packets through one queue of the link's rate, as a half-duplex link does."""


def second_network(cluster: EmulatedCluster) -> None:
    """Adds a second network, with a quarter of the rate, to all nodes; the fault's variables select it."""
    cluster.add_network("eth1")
    for node in range(len(cluster.nodes)):
        cluster.limit(node, "eth1", 1, SLOW_BITS_PER_SECOND)


def lossy_link(cluster: EmulatedCluster) -> None:
    """Makes node 1 lose one in fifty of the packets that it receives, and all nodes use TCP reno.

    Reno takes such loss for congestion and sends more slowly.
    """
    for node in range(len(cluster.nodes)):
        inside(cluster, node, "echo reno > /proc/sys/net/ipv4/tcp_congestion_control")
    inside(cluster, 1, f"iptables -A INPUT -i {INTERFACE} -m statistic --mode random --probability 0.02 -j DROP")


def blocked_pair(cluster: EmulatedCluster) -> None:
    """Makes node 1 drop the TCP packets that node 2 sends to it, as a firewall would."""
    inside(cluster, 1, f"iptables -A INPUT -s {cluster.address(2)} -p tcp -j DROP")


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
"""Python script that lets the doctor's processes of a node run a quarter of the time that others get, by SIGSTOP and
SIGCONT, from their first UDP socket on.

On a machine whose cores are shared the share is smaller still, or the fault would not be felt. The script has real-time
priority, or the processes would run for as long as it waits for a core. Processes without a parent in the node's
namespace are left alone: nsenter would stop together with its child.
"""


@contextmanager
def throttled(cluster: EmulatedCluster) -> Iterator[None]:
    """Throttles node 2 to a quarter of the time during a `with` block, as overheating or a busy hypervisor would."""
    with subprocess.Popen([*cluster.enter(2), sys.executable, "-I", "-S", "-c", THROTTLE]) as throttle:
        try:
            yield
        finally:
            throttle.kill()


OLD_VERSION = "0.0.9"


def install_other_version(folder: Path) -> None:
    """Writes the metadata of an installed gradwire of version `OLD_VERSION` into a folder, for PYTHONPATH."""
    own = folder / f"gradwire-{OLD_VERSION}.dist-info"
    own.mkdir()
    (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gradwire\nVersion: {OLD_VERSION}\n")


def faults(folder: Path) -> tuple[InjectedFault, ...]:
    """Returns all faults: the ten that are counted, then the extra ones.

    Args:
        folder: Folder for files that a fault needs, which are written here; must exist while the faults are used.
    """
    install_other_version(folder)
    # The ten faults that are counted.
    return (
        InjectedFault(
            name="slow link",
            key="slow_link",
            node="node2",
            inject=lambda cluster: cluster.limit(2, INTERFACE, 0, SLOW_BITS_PER_SECOND),
        ),
        InjectedFault(
            name="wrong interface",
            key="wrong_interface",
            inject=second_network,
            environment={"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1"},
        ),
        InjectedFault(name="round-robin ranks", key="rank_order", order="round-robin"),
        InjectedFault(name="tiny /dev/shm", key="shared_memory", node="node1", inject=on_node(1, TINY_SHARED_MEMORY)),
        InjectedFault(name="throttled node", key="slow_node", node="node2", meanwhile=throttled),
        InjectedFault(name="lost duplex", key="half_duplex", node="node1", inject=on_node(1, HALF_DUPLEX)),
        InjectedFault(name="MTU of one node", key="mtu", node="node1", inject=on_node(1, OTHER_MTU)),
        InjectedFault(name="too many threads", key="oversubscribed_cores", environment={"OMP_NUM_THREADS": "16"}),
        InjectedFault(
            name="mixed versions",
            key="versions",
            node="node1",
            before=f"[ $GROUP_RANK != 1 ] || export PYTHONPATH={folder};",
        ),
        InjectedFault(name="bad variable", key="variable", environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
        # Extra ones.
        InjectedFault(
            name="ranks on one core", key="oversubscribed_cores", before="taskset -pc 0 $$ > /dev/null;", extra=True
        ),
        InjectedFault(
            name="small packets on the way",  # the switch carries smaller ones than the NICs send, and says nothing
            key="mtu",
            inject=lambda cluster: cluster.shrink_switch(1300),
            extra=True,
        ),
        InjectedFault(name="lossy link", key="packet_loss", node="node1", inject=lossy_link, extra=True),
        InjectedFault(
            name="small windows", key="tcp_buffers", node="node1", inject=on_node(1, SMALL_WINDOWS), extra=True
        ),
        InjectedFault(name="blocked pair", key="unreachable", inject=blocked_pair, extra=True),
        # Nothing is wrong with a rank that comes half a minute late.
        InjectedFault(name="late rank", key="", before="[ $RANK != 3 ] || sleep 35;", extra=True),
    )


@dataclass(frozen=True, kw_only=True)
class DoctorRun:
    """One run of the doctor on one cluster.

    Attributes:
        name: Name of the fault, or `healthy`.
        findings: Findings of the doctor's JSON, in its order.
        seconds: Duration of the run.
        expected: Fault that was injected; None for a healthy cluster.
        load: Load of the machine at the end.
    """

    name: str
    findings: tuple[dict[str, Any], ...]
    seconds: float
    expected: InjectedFault | None = None
    load: float = 0.0

    @property
    def right(self) -> bool:
        """Whether the expected fault came first, on the right node; on a healthy cluster, whether nothing was found."""
        if self.expected is None or not self.expected.key:
            return not self.findings
        if not self.findings or self.findings[0]["key"] != self.expected.key:
            return False
        return self.expected.node is None or self.findings[0]["nodes"] == [self.expected.node]


def examine(fault: InjectedFault | None) -> DoctorRun:
    """Runs `gradwire doctor` on an emulated cluster of its own.

    Args:
        fault: Fault to inject; None examines a healthy cluster.

    Raises:
        RuntimeError: The doctor itself failed.
    """
    wrong = fault or InjectedFault(name="healthy", key="")
    with tempfile.TemporaryDirectory(prefix="gradwire-doctor-") as folder, EmulatedCluster(NODES, NIC) as cluster:
        result = Path(folder, "doctor.json")
        command = [sys.executable, "-P", "-m", "gradwire", "doctor", "--json", str(result)]
        wrong.inject(cluster)
        with wrong.meanwhile(cluster):
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
    )


def table(runs: Sequence[DoctorRun]) -> Table:
    """Returns a table for the terminal with a row for each run."""
    title = f"`gradwire doctor` on {len(NODES)} nodes of {NODES[0]} ranks, {NIC}"
    names = "injected", "named first", "also named", "right"
    shown = Table(*names, *right_columns("seconds", "load"), title=title)
    for run in runs:
        first = run.findings[0]["title"] if run.findings else "nothing"
        others = ", ".join(each["key"] for each in run.findings[1:])
        shown.add_row(run.name, first, others, "yes" if run.right else "NO", f"{run.seconds:.0f}", f"{run.load:.1f}")
    return shown


def main(argv: list[str]) -> int:
    """Examines clusters with faults and healthy ones, and prints a table.

    Args:
        argv: Options of the command line; see the module's docstring.

    Returns:
        The exit status: 1 if more than one of the ten faults was missed, or anything was found on a healthy cluster.
    """
    parser = StudyParser("doctor", __doc__)
    parser.add_argument("--healthy", type=int, default=20, metavar="N", help="runs on a healthy cluster (default 20)")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="faults by their names' beginnings")
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
    ten = [run for run in runs if run.expected is not None and not run.expected.extra]
    blamed = sum(not run.right for run in runs if run.expected is None)
    missed = sum(not run.right for run in ten)
    console.print(
        f"{len(ten) - missed} of {len(ten)} faults named first; {blamed} of {options.healthy} healthy clusters blamed; "
        f"{machine_line()}"
    )
    return int(missed > 1 or blamed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
