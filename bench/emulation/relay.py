"""Networks with delay and loss by a compiled switch in a separate process, which replaces the kernel's bridge.

Many kernels lack their own tool for this, netem. The relay opens a packet socket on the switch's end of every node's
cable, and carries each frame to its target after the delay of the path (csrc/cpu/relay). It also emulates the rates and
queues of the links. A frame is one packet, because the nodes' NICs are set to do segmentation and checksums themselves.

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
"""Time limit for the relay, a Python without torch, to start on a busy machine."""

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
    """Numbers of packets from one node to another one.

    Attributes:
        offered: Packets that the sender put on its link.
        offered_nbytes: Bytes of those packets, with Ethernet headers.
        lost: Packets that were lost on the path, by the loss that the user has set.
        dropped: Packets dropped at a full queue, or by a receiver whose network was down.
        delivered: Packets that reached the receiver's NIC.
    """

    offered: int
    offered_nbytes: int
    lost: int
    dropped: int
    delivered: int


def send_real_packets(holder: Holder, interface: str) -> None:
    """Turns off a NIC's offloading of segmentation and checksums, so that each frame on the cable is one packet.

    Args:
        holder: Namespaces of the node.
        interface: Name of its NIC.

    Raises:
        RuntimeError: The kernel refuses.
    """
    holder.run_python(_REAL_PACKETS.format(interface=interface))


class Relay:
    """Process that relays the packets of one network; it runs until `close`, or until the thread that made it ends."""

    def __init__(
        self,
        switch: Holder,
        interfaces: Sequence[str],
        rates: Sequence[int | None],
        paths: Paths,
        mtu: int,
        name: str = "the relay",
    ) -> None:
        """Starts the relay.

        Args:
            switch: Namespaces that contain the switch's ends of the cables.
            interfaces: Name of the switch's end of each node's cable.
            rates: Rate of each node's link in bits per second, in each direction; None for no limit.
            paths: Delay, loss and queues between the nodes.
            mtu: Largest packet in bytes.
            name: Name of the relay in error messages.

        Raises:
            RuntimeError: The relay could not start; the message has its output.
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
        # Start the process inside the switch's namespaces. setpriv comes last in the command, because the kernel
        # forgets the signal to send at the parent's end when a process gains rights.
        script = Path(__file__).with_name("relay_process.py")
        words = [*switch.enter_network(), "setpriv", "--pdeathsig", "KILL"]
        self._process = start_piped([*words, sys.executable, "-I", "-S", str(script), compiled.origin])
        # Send it the network to relay, and wait until it says that it does.
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
        """Process ID of the relay."""
        return self._process.pid

    def failure(self) -> str | None:
        """Returns words on how the relay ended; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        assert self._process.stderr is not None
        if not self._process.stderr.closed:
            self._said += self._process.stderr.read().strip()
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"{self.name}, which carries the emulated packets, ended with {how}{': ' * bool(self._said)}{self._said}"

    def limit(self, node: int, bits_per_second: int | None) -> None:
        """Sets the rate of one node's link in both directions.

        Args:
            node: Number of the node.
            bits_per_second: Rate in each direction; None for no limit.

        Raises:
            RuntimeError: The relay has ended.
        """
        self._ask({"limit": [node, float(bits_per_second or 0)]})

    def counts(self) -> tuple[tuple[PathCounts, ...], ...]:
        """Returns the packets since the start that were offered, lost, dropped and delivered, by sender, then receiver.

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
        """Returns the number of packets that the relay lost by mistake, because they came faster than it reads.

        Raises:
            RuntimeError: The relay has ended.
        """
        return cast(int, self._ask({"counts": True})["overrun"])

    def _ask(self, question: dict[str, object]) -> dict[str, object]:
        """Sends a request to the relay as a line of JSON, waits for its answer, and returns it.

        Raises:
            RuntimeError: The relay has ended, or does not answer within `_START_SECONDS`.
        """
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
        """Ends the relay, and kills it if it takes more than ten seconds; does nothing if it has ended already."""
        end_piped(self._process)
