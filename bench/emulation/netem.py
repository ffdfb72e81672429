"""Networks with delay and loss by the queues of the kernel, if it has netem; otherwise the relay carries packets.

A packet from s to t passes the queues of two interfaces. What s sends leaves at the rate of s's link (htb), with a
queue for each target (bfifo). On the switch's end of t's cable it finds a netem for packets from s, which loses it or
delays it, and behind that a queue in front of the rate of t's link. Told a rate of its own, which here is beyond any
link's, netem keeps the order of packets; without one, jitter lets them overtake.

Unlike the relay, which has one queue for a link, packets from unlike senders share a link in turns; and what is no IP,
such as ARP, is neither delayed nor lost.

Source: tc-netem(8), tc-htb(8), tc-u32(8), tc-bfifo(8); Linux net/sched/sch_netem.c, netem_enqueue, for the order.
"""

import functools
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from gradwire.bench.emulation.namespaces import Holder, new_namespaces, run_shell
from gradwire.bench.emulation.paths import Paths
from gradwire.bench.emulation.relay import PathCounts

_PROBE = """
ip link add probe0 type veth peer name probe1
tc qdisc add dev probe0 root handle 1: htb
tc class add dev probe0 parent 1: classid 1:1 htb rate 1mbit
tc filter add dev probe0 parent 1: protocol ip u32 match ip src 10.0.0.1/32 flowid 1:1
tc qdisc add dev probe0 parent 1:1 handle 2: netem delay 1ms limit 10
tc qdisc add dev probe0 parent 2:1 bfifo limit 10000
"""

_UNLIMITED = 10**12
"""Bits per second of a link without a limit."""
_MOST_QUEUED_NBYTES = 1 << 30
_LEAST_FRAME_NBYTES = 64
_ROOT = 1
_FIRST = 2
"""Minor number of the first node's class in tc; 1 is the class above all of them."""
_INNER = 0x1000
"""Number that, added to that of a node, is the major number of its netem or queue in tc."""


_NONE = PathCounts(offered=0, offered_nbytes=0, lost=0, dropped=0, delivered=0)


@functools.cache
def has_netem() -> bool:
    """Returns whether the kernel has all queues that `Netem` needs."""
    return run_shell("set -e\n" + _PROBE, prefix=new_namespaces()).returncode == 0


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a node's cable, which sends: the node's NIC, or the port of the switch.

    Attributes:
        holder: Namespaces that contain the end.
        interface: Name of the end.
        node: Number of the node.
        is_switch: Whether it is the switch's end.
    """

    holder: Holder
    interface: str
    node: int
    is_switch: bool


class Netem:
    """Queues of one network in the kernel. They need no process, and vanish with the interfaces."""

    def __init__(
        self,
        switch: Holder,
        nodes: Sequence[Holder],
        interface: str,
        ports: Sequence[str],
        addresses: Sequence[str],
        rates: Sequence[int | None],
        paths: Paths,
        mtu: int,
    ) -> None:
        """Sets the queues up on all ends of the cables.

        Args:
            switch: Namespaces that contain the switch's ends of the cables.
            nodes: Namespaces of each node.
            interface: Name of the NIC on the nodes.
            ports: Name of the switch's end of each node's cable.
            addresses: Address of each node.
            rates: Rate of each node's link in bits per second, in each direction; None for no limit.
            paths: Delay, loss and queues between the nodes; their seed is not used.
            mtu: Largest packet in bytes.

        Raises:
            RuntimeError: The kernel refuses.
        """
        self._paths, self._mtu, self._addresses = paths, mtu, tuple(addresses)
        self._ends = [
            (_End(holder, interface, node, False), _End(switch, port, node, True))
            for node, (holder, port) in enumerate(zip(nodes, ports, strict=True))
        ]
        self._fastest = max(rate or _UNLIMITED for rate in rates)
        for ends, rate in zip(self._ends, rates, strict=True):
            for end in ends:
                end.holder.run("\n".join(self._queues(end, rate)))

    def _others(self, end: _End) -> list[int]:
        return [other for other in range(len(self._addresses)) if other != end.node]

    def _classes(self, end: _End, rate: int | None, verb: str) -> list[str]:
        """Returns the tc lines that set an end's rate, and the least share of it for the packets of each other node.

        Args:
            end: End of a cable.
            rate: Rate of the link in bits per second; None for no limit.
            verb: `add` or `change`.
        """
        bits, others = rate or _UNLIMITED, self._others(end)
        # As much as the link carries in 1 ms, and two packets: a class may send as much at once.
        burst = max(2 * self._mtu, min(bits // 8000, 1 << 20))
        limits = f"ceil {bits}bit burst {burst} cburst {burst} quantum {self._mtu}"
        shared = f"tc class {verb} dev {end.interface} parent 1: classid 1:{_ROOT:x} htb rate {bits}bit {limits}"
        own = max(8000, bits // max(1, len(others)))
        return [shared] + [
            f"tc class {verb} dev {end.interface} parent 1:{_ROOT:x} classid 1:{_FIRST + other:x} htb rate {own}bit "
            f"{limits}"
            for other in others
        ]

    def _queue_nbytes(self, node: int, rate: int | None) -> int:
        if rate is None:
            return _MOST_QUEUED_NBYTES
        return max(2 * self._mtu, min(round(self._paths.queue_seconds[node] * rate / 8), _MOST_QUEUED_NBYTES))

    def _queues(self, end: _End, rate: int | None) -> list[str]:
        """Returns all tc lines that set up the queues of an end, in their order."""
        lines = [f"tc qdisc add dev {end.interface} root handle 1: htb", *self._classes(end, rate, "add")]
        queued = self._queue_nbytes(end.node, rate)
        version = "ip6" if ":" in self._addresses[0] else "ip"
        protocol, bits = ("ipv6", 128) if version == "ip6" else ("ip", 32)
        for other in self._others(end):
            minor, major = _FIRST + other, _INNER + other
            way = "src" if end.is_switch else "dst"
            lines.append(
                f"tc filter add dev {end.interface} parent 1: protocol {protocol} prio 1 u32 match {version} {way} "
                f"{self._addresses[other]}/{bits} flowid 1:{minor:x}"
            )
            parent = f"1:{minor:x}"
            if end.is_switch:
                lines.append(f"tc qdisc add dev {end.interface} parent {parent} {self._netem(other, end.node)}")
                parent = f"{major:x}:1"
            lines.append(f"tc qdisc add dev {end.interface} parent {parent} bfifo limit {queued}")
        return lines

    def _netem(self, source: int, target: int) -> str:
        """Returns tc's words for a netem with the delay, jitter and loss of the path between two nodes."""
        path = self._paths.paths[source][target]
        # A place for each packet that can be under way, however small: queues for links are limited, this is not.
        under_way = (path.delay_seconds + path.jitter_seconds) * self._fastest / 8 / _LEAST_FRAME_NBYTES
        words = [f"handle {_INNER + source:x}: netem limit {max(1000, min(round(under_way), 10**7))}"]
        words.append(f"delay {round(path.delay_seconds * 1e6)}us")
        if path.jitter_seconds:
            words.append(f"{round(path.jitter_seconds * 1e6)}us")
        if path.loss:
            words.append(f"loss {100 * path.loss:.6f}%")
        if not self._paths.reorder:
            words.append(f"rate {_UNLIMITED}bit")
        return " ".join(words)

    def limit(self, node: int, bits_per_second: int | None) -> None:
        """Sets the rate of one node's link in both directions.

        Args:
            node: Number of the node.
            bits_per_second: Rate in each direction; None for no limit.

        Raises:
            RuntimeError: The kernel refuses.
        """
        queued = self._queue_nbytes(node, bits_per_second)
        for end in self._ends[node]:
            lines = self._classes(end, bits_per_second, "change")
            for other in self._others(end):
                parent = f"{_INNER + other:x}:1" if end.is_switch else f"1:{_FIRST + other:x}"
                lines.append(f"tc qdisc change dev {end.interface} parent {parent} bfifo limit {queued}")
            end.holder.run("\n".join(lines))

    def counts(self) -> tuple[tuple[PathCounts, ...], ...]:
        """Returns the packets since the start that were offered, lost, dropped and delivered, by sender, then receiver.

        `offered_nbytes` has only the bytes of packets that the sender's queue did not drop.

        Raises:
            RuntimeError: The kernel's counters cannot be read.
        """
        sent, came = ([self._read(ends[side]) for ends in self._ends] for side in (0, 1))
        nodes = range(len(self._ends))
        return tuple(
            tuple(
                _NONE if source == target else self._pair(sent[source], came[target], source, target)
                for target in nodes
            )
            for source in nodes
        )

    def _read(self, end: _End) -> dict[str, dict[str, int]]:
        """Reads the counters of an end's queues: name of the class or queue above each -> its counters."""
        words = [*end.holder.enter_network(), "tc", "-s", "-j", "qdisc", "show", "dev", end.interface]
        done = subprocess.run(words, text=True, capture_output=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the kernel does not count packets of {end.interface}: {done.stderr.strip()}")
        found = cast(list[dict[str, int]], json.loads(done.stdout))
        return {str(each.get("parent", "")): each for each in found}

    @staticmethod
    def _pair(sent: dict[str, dict[str, int]], came: dict[str, dict[str, int]], source: int, target: int) -> PathCounts:
        first = sent[f"1:{_FIRST + target:x}"]
        path, last = came[f"1:{_FIRST + source:x}"], came[f"{_INNER + source:x}:1"]
        # netem counts what its inner queue dropped as dropped by itself, too.
        dropped = first["drops"] + last["drops"]
        return PathCounts(
            offered=first["packets"] + first["drops"] + first["qlen"],
            offered_nbytes=first["bytes"],
            lost=path["drops"] - last["drops"],
            dropped=dropped,
            delivered=path["packets"],
        )
