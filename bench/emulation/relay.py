"""Networks with delay and loss: a compiled switch in a process of its own, in place of the kernel's bridge.

The kernel's tool for this, netem, is missing from many kernels, and delays what leaves an interface wherever it goes.
The relay opens a packet socket on the switch's end of every node's cable, and carries each frame to its target as late
as the path says (csrc/cpu/relay). Rates and queues of the links are its own, too: a frame is one packet, because the
nodes' NICs are told to leave neither segmentation nor checksums to the cable.

Source: packet(7); ethtool ioctls: Linux include/uapi/linux/ethtool.h.
"""

import json
import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, cast

from gradwire.bench.emulation.namespaces import Holder, end_piped, start_piped
from gradwire.bench.emulation.paths import Paths

_START_SECONDS = 60.0
"""Seconds for a Python without torch to start on a machine that does much else."""

_REAL_PACKETS = """
import array, fcntl, socket, struct
SIOCETHTOOL = 0x8946
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
    for command in (0x17, 0x1F, 0x2C):  # ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGRO
        value = array.array("B", struct.pack("II", command, 0))
        fcntl.ioctl(door, SIOCETHTOOL, struct.pack("16sP", {interface!r}.encode(), value.buffer_info()[0]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathCounts:
    """What became of the packets from one node to another one.

    Attributes:
        offered: That the sender put on its link.
        offered_nbytes: In them, with Ethernet headers.
        lost: On the path, as asked for.
        dropped: At a full queue, or by a receiver whose network was down.
        delivered: To the receiver's NIC.
    """

    offered: int
    offered_nbytes: int
    lost: int
    dropped: int
    delivered: int


def send_real_packets(holder: Holder, interface: str) -> None:
    """Has a node's NIC leave neither segmentation nor checksums to the cable, so that a frame is one packet.

    Args:
        holder: Of the node.
        interface: Its NIC.

    Raises:
        RuntimeError: The kernel refuses.
    """
    holder.run_python(_REAL_PACKETS.format(interface=interface))


class Relay:
    """The relay of one network; it runs from here to `close`, and no longer than this thread."""

    def __init__(
        self,
        switch: Holder,
        interfaces: Sequence[str],
        rates: Sequence[int | None],
        paths: Paths,
        mtu: int,
        name: str = "the relay",
    ) -> None:
        """Starts it.

        Args:
            switch: In whose network namespace the cables end.
            interfaces: The cable's end of each node.
            rates: Of each node's link in bits per second, each direction; None for no limit.
            paths: Between the nodes.
            mtu: Largest packet in bytes.
            name: What error messages call it.

        Raises:
            RuntimeError: It could not start, with what it said.
        """
        self.name = name
        self._said = ""
        self._nodes = len(interfaces)
        compiled = find_spec("gradwire._native")  # the process loads it by its path, without gradwire around it
        if compiled is None or compiled.origin is None:
            raise RuntimeError(
                "delays and losses need gradwire's compiled part, which the wheel py3-none-any does not have; install "
                "the wheel of this machine, or, in a checkout with a C++ compiler, `pip install .`"
            )
        script = Path(__file__).with_name("relay_process.py")
        # setpriv last: the kernel forgets the signal where a process gains rights.
        words = [*switch.enter_network(), "setpriv", "--pdeathsig", "KILL"]
        self._process = start_piped([*words, sys.executable, "-I", "-S", str(script), compiled.origin])
        flat = [path for row in paths.paths for path in row]
        asked = {
            "interfaces": list(interfaces),
            "mtu": mtu,
            "rates": [float(rate or 0) for rate in rates],
            "queues": list(paths.queue_seconds),
            "delays": [path.delay_seconds for path in flat],
            "jitters": [path.jitter_seconds for path in flat],
            "losses": [path.loss for path in flat],
            "reorder": paths.reorder,
            "seed": paths.seed,
        }
        try:
            self._ask(asked)
        except RuntimeError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def failure(self) -> str | None:
        """Returns in words how it ended; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        assert self._process.stderr is not None
        if not self._process.stderr.closed:
            self._said += self._process.stderr.read().strip()
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"{self.name}, which carries the emulated packets, ended with {how}{': ' * bool(self._said)}{self._said}"

    def limit(self, node: int, bits_per_second: int | None) -> None:
        """Sets the rate of one node's link, each direction.

        Raises:
            RuntimeError: The relay has ended.
        """
        self._ask({"limit": [node, float(bits_per_second or 0)]})

    def counts(self) -> tuple[tuple[PathCounts, ...], ...]:
        """What became of the packets since the start, by sending node, then receiving node.

        Raises:
            RuntimeError: The relay has ended.
        """
        rows = [
            PathCounts(offered=offered, offered_nbytes=nbytes, lost=lost, dropped=dropped, delivered=delivered)
            for offered, nbytes, lost, dropped, delivered in cast(
                list[list[int]], self._ask({"counts": True})["counts"]
            )
        ]
        return tuple(tuple(rows[node * self._nodes : (node + 1) * self._nodes]) for node in range(self._nodes))

    def overrun(self) -> int:
        """Packets that came faster than the relay could read them, and are missing without being asked for.

        Raises:
            RuntimeError: The relay has ended.
        """
        return cast(int, self._ask({"counts": True})["overrun"])

    def cpu_seconds(self) -> float:
        """Processor time that it has used."""
        # Source: proc_pid_stat(5), fields 14 and 15, in ticks of 1/100 s on every Linux machine (USER_HZ).
        columns = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(columns[11]) + int(columns[12])) / 100

    def _ask(self, question: dict[str, object]) -> dict[str, object]:
        """Sends a line and reads the answer."""
        asking, answering = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        try:
            asking.write(json.dumps(question) + "\n")
            asking.flush()
            waiting = select.select([answering], [], [], _START_SECONDS)[0]
        except BrokenPipeError:
            waiting = [answering]
        if not waiting:
            raise RuntimeError(f"{self.name} does not answer within {_START_SECONDS:.0f} s")
        line = answering.readline()
        if not line:
            self._process.wait()
            raise RuntimeError(self.failure())
        return cast(dict[str, object], json.loads(line))

    def close(self) -> None:
        """Ends it; harmless when done twice, and when it has ended by itself."""
        end_piped(self._process)
