"""Emulation of a cluster on one machine: nodes are namespaces behind links of a given rate, joined by a bridge."""

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Literal, Self, cast, get_args

from gradwire.bench.emulation.launch import JobOutcome, RankLine, Ranks
from gradwire.bench.emulation.namespaces import Holder, available, is_unprivileged, run_shell
from gradwire.bench.emulation.netem import Netem, has_netem
from gradwire.bench.emulation.paths import PathOptions, Paths
from gradwire.bench.emulation.placement import Order, Placement, place_ranks, torchrun_environment
from gradwire.bench.emulation.rate import parse_nic_rates
from gradwire.bench.emulation.relay import PathCounts, Relay, send_real_packets
from gradwire.topology.printable import shortened

INTERFACE = "eth0"
"""Name of the first NIC of each node; a second one is eth1."""
FIRST_PORT = 29500
"""torchrun's default for MASTER_PORT."""

MOST_NODES = 200
MOST_RANKS = 1024
"""Upper limit of the ranks of a job on one machine; each is a process that imports torch."""
_MOST_QUEUED_NBYTES = 2**31
"""tc counts a queue in 32 bits; reached at 86 Gbit/s, which no software link carries."""

_NODE_SETUP = """
mount -t tmpfs -o mode=1777,size=50% tmpfs /dev/shm
mount --bind {folder}/hosts-{name} /etc/hosts
mkdir {folder}/{name}
mount -t sysfs sysfs {folder}/{name}
[ ! -d /sys/fs/cgroup ] || mount --rbind /sys/fs/cgroup {folder}/{name}/fs/cgroup
mount --no-mtab --move {folder}/{name} /sys
"""
# A sysfs shows the network interfaces of the namespace that mounted it, hence one for each node; the cgroup tree is
# carried over, because programs read their memory and CPU limits there. --no-mtab: /run is not this user's to write.

WITH_ONE_THREAD = 'exec env OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "$@"'
# torchrun's rule: one thread a rank unless the user says otherwise.


Names = Literal["all", "own", "none"]
"""Hostnames that each emulated node can resolve: those of all nodes, its own, or none; see `EmulatedCluster`."""

Carrier = Literal["auto", "netem", "relay"]
"""Carrier of the packets between nodes: see `check_carrier`."""

FIRST_NETWORK = "10.77.0.0/16"


def check_names(names: str) -> Names:
    """Checks which hostnames an emulated node is asked to resolve, and returns them; see `EmulatedCluster`.

    Args:
        names: `all` for those of all nodes, `own` for its own, or `none`.

    Raises:
        ValueError: It is none of the three.
    """
    for known in get_args(Names):
        if names == known:
            return cast(Names, known)
    raise ValueError(f"`names`: found {shortened(names, 40)!r}, wanted one of {', '.join(get_args(Names))}")


def check_carrier(carrier: str, paths: Paths | None, parameter: str = "carrier") -> Carrier:
    """Chooses what carries packets between the nodes: the kernel's netem, or the relay.

    Args:
        carrier: `auto`, `netem` or `relay`.
        paths: Delay, loss and queues between the nodes; None for a plain bridge.
        parameter: Name of the parameter for error messages, as the user wrote it.

    Returns:
        `netem` or `relay`; `auto` without paths.

    Raises:
        ValueError: `carrier` is none of the three, or cannot emulate the paths on this machine.
    """
    if carrier not in get_args(Carrier):
        raise ValueError(
            f"`{parameter}`: found {shortened(carrier, 40)!r}, wanted one of {', '.join(get_args(Carrier))}"
        )
    if paths is None:
        if carrier != "auto":
            raise ValueError(
                f"`{parameter}`: found {carrier!r} without a delay, jitter, loss or queue; wanted one of these"
            )
        return "auto"
    if carrier == "auto":
        # netem draws by numbers of its own, so a seed is the relay's.
        return "netem" if not paths.seed and has_netem() else "relay"
    if carrier == "netem" and paths.seed:
        raise ValueError(f"`{parameter}`: found 'netem' with a seed, which it does not take; wanted relay, or no seed")
    if carrier == "netem" and not has_netem():
        raise ValueError(f"`{parameter}`: found 'netem', which this kernel does not have; wanted relay or auto")
    return cast(Carrier, carrier)


def check_congestion(name: str | None, parameter: str = "congestion") -> str | None:
    """Checks that this kernel has a congestion control of TCP, and returns its name.

    Args:
        name: Name in net.ipv4.tcp_available_congestion_control; None is returned as it is.
        parameter: Name of the parameter for error messages, as the user wrote it.

    Raises:
        ValueError: This kernel has no congestion control of this name.
    """
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    if name is not None and name not in known:
        raise ValueError(
            f"`{parameter}`: found {shortened(name, 40)!r}, wanted one that this kernel has: {', '.join(known)}"
        )
    return name


def parse_network(text: str, parameter: str = "network") -> IPv4Network | IPv6Network:
    """Parses the network of the nodes' addresses.

    Args:
        text: Network with its prefix length, such as `10.77.0.0/16`.
        parameter: Name of the parameter for error messages, as the user wrote it.

    Raises:
        ValueError: The text is no network, or its prefix is not of 16 bits (IPv4) or 64 bits (IPv6).
    """
    try:
        found = ip_network(text)
    except ValueError:
        found = None
    if found is None or found.prefixlen != (16 if found.version == 4 else 64):
        raise ValueError(
            f"`{parameter}`: found {shortened(text, 60)!r}, wanted a network such as {FIRST_NETWORK} or fd77::/64"
        )
    return found


def _port(network: int, node: int) -> str:
    """Returns the name of the bridge's end of the cable (veth pair) to a node."""
    return f"port{node}" if network == 0 else f"port{node}net{network}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceBytes:
    """Traffic of one NIC while a command ran: bytes sent (tx) and received (rx), with Ethernet headers."""

    interface: str
    tx: int
    rx: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NicBytes:
    """Traffic of one node while a command ran: bytes of all of its NICs together, and of each."""

    node: int
    hostname: str
    tx: int
    rx: int
    nics: tuple[InterfaceBytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(JobOutcome):
    """Result of a command on the cluster: exit statuses and output of its ranks, and their traffic."""

    nic_bytes: tuple[NicBytes, ...]
    """Bytes that the NICs of each node carried."""


class EmulatedCluster:
    """Cluster of emulated nodes; they exist from its construction until `close`, or the end of a `with` block.

    The nodes have hostnames node0, node1, ..., and their own /dev/shm, processes and network; files are the machine's.
    They cannot reach the machine's own network. All ranks share the machine's processors. The kernel ends the nodes
    with the thread that made them, so that nothing outlives a killed program: make a cluster in a thread that lasts as
    long as the cluster is needed.
    """

    def __init__(
        self,
        nodes: Sequence[int],
        nic: str | None = None,
        mtu: int = 1500,
        *,
        names: Names = "all",
        network: str = FIRST_NETWORK,
        path: PathOptions | None = None,
        congestion: str | None = None,
        carrier: Carrier = "auto",
    ) -> None:
        """Makes the nodes and the network between them; `close`, or the end of a `with` block, removes both.

        Args:
            nodes: Ranks of each node, for example [2, 2] or [3, 1].
            nic: Rate of each node's link, each direction: `200mbit` for all, or one for each node, with commas:
                `200mbit,200mbit,50mbit`. `100mbit+100mbit` gives each node two NICs, eth0 and eth1, each in a network
                of its own. None leaves the links unlimited.
            mtu: Largest packet on the links, in bytes; 576 to 65535.
            names: Host names that each node can resolve: `all` those of all nodes, to their addresses; `own` only its
                own, to 127.0.1.1 as on Debian; `none` no name.
            network: Network of the nodes' addresses, with a prefix of 16 bits of IPv4, or 64 of IPv6 (no IPv4 then).
                No node has a route out of it.
            path: Delay, jitter, loss and queues between the nodes; None for a network without any, whose links hold
                200 ms.
            congestion: Congestion control of the nodes' TCP, a name of net.ipv4.tcp_available_congestion_control. None
                leaves the machine's own, which is `cubic` unless somebody changed it.
            carrier: Mechanism that delays and drops packets if there is a `path`: `netem` of the kernel, a `relay`
                process in place of the kernel's bridge, or `auto`: netem if the kernel has it and there is no seed.

        Raises:
            ValueError: if a parameter is out of range.
            RuntimeError: if this machine cannot emulate a cluster (see `available`), or refuses while it is set up.
        """
        # Check the arguments, and that this machine can emulate them.
        place_ranks(nodes)
        self.nodes = tuple(nodes)
        self.rates_by_nic = () if nic is None else parse_nic_rates(nic, len(nodes), "nic")
        """The NIC rates of each node, bits per second of each NIC's link, each direction; empty without a limit."""
        self.mtu = mtu
        self.names: Names = check_names(names)
        self._network = parse_network(network)
        self.paths = None if path is None else path.read(len(nodes), has_rates=bool(self.rates_by_nic))
        self.congestion = check_congestion(congestion)
        if len(nodes) > MOST_NODES:
            raise ValueError(f"`nodes`: found {len(nodes)} nodes, wanted at most {MOST_NODES} on one machine")
        if not 576 <= mtu <= 65535:
            raise ValueError(f"`mtu`: found {mtu}, wanted 576 to 65535 bytes")
        if (reason := available()) is not None:
            raise RuntimeError(f"cannot emulate a cluster here: {reason}")
        self.carrier = check_carrier(carrier, self.paths)
        """Carrier of the packets between nodes with a `path`, `netem` or `relay`; `auto` without one."""
        # Set up the namespaces and links; remove whatever was made if one of them fails.
        self._runs = 0
        self._stack = contextlib.ExitStack()
        try:
            self._bring_up()
        except BaseException:
            self.close()
            raise

    @property
    def nic_rates(self) -> tuple[int, ...]:
        """Bits per second of each node in each direction, over all of its NICs; empty without a limit."""
        return tuple(map(sum, self.rates_by_nic))

    @property
    def interfaces(self) -> tuple[str, ...]:
        """Names of the NICs that each node has."""
        return (
            tuple(f"eth{number}" for number in range(len(self.rates_by_nic[0]))) if self.rates_by_nic else (INTERFACE,)
        )

    @property
    def nic_bits_per_second(self) -> int | None:
        """Bits per second of the slowest node in each direction, over all of its NICs; None without a limit."""
        return min(self.nic_rates, default=None)

    @property
    def hostnames(self) -> tuple[str, ...]:
        """Hostnames of the nodes."""
        return tuple(f"node{node}" for node in range(len(self.nodes)))

    def address(self, node: int, network: int = 0) -> str:
        """Returns the address of a node in one of the cluster's networks.

        Args:
            node: Number of the node, from 0.
            network: Number of the network, 0 for the first; its addresses follow those of the network before it.
        """
        first = int(self._network.network_address) + network * self._network.num_addresses
        return str(ip_address(first + node + 1))

    @property
    def has_ipv6_alone(self) -> bool:
        """Whether the nodes have IPv6 addresses only, except on the loopback."""
        return self._network.version == 6

    def _bring_up(self) -> None:
        with tempfile.TemporaryDirectory(prefix="gradwire-emulate-") as folder:
            # The nodes keep the file itself; its name may go as soon as all have mounted it.
            for name in self.hostnames:
                Path(folder, f"hosts-{name}").write_text("\n".join(self._hosts(name)) + "\n")
            # A sysfs of its own shows the cables' ends.
            self._bridge = self._hold("bridge", "mount -t sysfs sysfs /sys")
            self._holders = [
                self._hold(name, _NODE_SETUP.format(folder=folder, name=name), self._bridge) for name in self.hostnames
            ]
            self._networks = 0
            self._relays: list[Relay] = []
            self._carriers: list[Relay | Netem] = []
            for interface in self.interfaces:
                self.add_network(interface)

    def _hosts(self, own: str) -> list[str]:
        """Returns the lines of a node's /etc/hosts, by the parameter `names`.

        Args:
            own: Hostname of the node.
        """
        if self.names == "none":
            return ["127.0.0.1 localhost"]
        if self.names == "own":
            return ["127.0.0.1 localhost", f"127.0.1.1 {own}"]
        names = [f"{self.address(node)} {name}" for node, name in enumerate(self.hostnames)]
        if not self.has_ipv6_alone:
            # torch looks its peers up by the address of a two-family socket, and warns of one without a name.
            names += [f"::ffff:{name}" for name in names]
        machine = Path("/etc/hosts").read_text() if Path("/etc/hosts").exists() else ""
        return ["127.0.0.1 localhost", *names, machine]

    def _hold(self, name: str, setup: str, beside: Holder | None = None) -> Holder:
        holder = Holder(name, setup, beside, ipv6=self.has_ipv6_alone)
        self._stack.callback(holder.close)
        return holder

    def add_network(self, interface: str) -> None:
        """Joins all nodes by another bridge with its own addresses, such as 10.78.0.1 on the first node of the second.

        The links have the rates of the nodes' NICs of the same number; beyond those, the rates of the first NICs.

        Args:
            interface: Name of the network's interface on the nodes; `INTERFACE` for the first network.
        """
        network, self._networks = self._networks, self._networks + 1
        nic = network if network < len(self.interfaces) else 0
        rates = tuple(node[nic] for node in self.rates_by_nic) or (None,) * len(self._holders)
        if self.carrier != "relay":
            self._bridge.run(f"ip link add bridge{network} mtu {self.mtu} type bridge\nip link set bridge{network} up")
            for node, holder in enumerate(self._holders):
                self._join(holder, node, network, interface)
                if self.paths is None:
                    self.limit(node, interface, network, rates[node])
                else:
                    send_real_packets(holder, interface)
            if self.paths is not None:
                addresses = [self.address(node, network) for node in range(len(self._holders))]
                ports = [_port(network, node) for node in range(len(self._holders))]
                self._carriers.append(
                    Netem(self._bridge, self._holders, interface, ports, addresses, rates, self.paths, self.mtu)
                )
            return
        assert self.paths is not None  # `check_carrier` wants them for a relay
        for node, holder in enumerate(self._holders):
            self._join(holder, node, network, interface)
            send_real_packets(holder, interface)
            for end, name in ((holder, interface), (self._bridge, _port(network, node))):
                self._keep_order(end, name, node)
        ports = [_port(network, node) for node in range(len(self._holders))]
        relay = Relay(self._bridge, ports, rates, self.paths, self.mtu, f"the relay of network {network}")
        self._stack.callback(relay.close)
        self._relays.append(relay)
        self._carriers.append(relay)

    def _join(self, holder: Holder, node: int, network: int, interface: str) -> None:
        """Makes the cable (veth pair) from a node to a bridge, with one end inside the node.

        Args:
            holder: Namespaces of the node.
            node: Number of the node.
            network: Number of the network, and so of the bridge.
            interface: Name of the end inside the node.
        """
        port = _port(network, node)
        # Behind a relay the port is nobody's: without an address of its own, which would speak up on IPv6.
        joined = "addrgenmode none" if self.carrier == "relay" else f"master bridge{network}"
        self._bridge.run(
            f"ip link add {port} mtu {self.mtu} type veth"
            f" peer name {interface} mtu {self.mtu} netns /proc/{holder.pid}/ns/net\n"
            f"ip link set {port} {joined} up"
        )
        address = f"{self.address(node, network)}/{self._network.prefixlen}"
        # Without duplicate address detection, which holds an address of IPv6 back for a second.
        quick = " nodad" if self.has_ipv6_alone else ""
        holder.run(f"ip address add {address} dev {interface}{quick}\nip link set {interface} up")
        if self.congestion is not None:
            # By the route: the sysctl of a namespace takes only what the machine allows everybody.
            # IPv6 keeps routes of unlike metric side by side: 256 is that of the one which came with the address.
            same = " metric 256" if self.has_ipv6_alone else ""
            route = ip_network(address, strict=False)
            holder.run(f"ip route replace {route} dev {interface}{same} congctl {self.congestion}")

    def _keep_order(self, end: Holder, interface: str, node: int) -> None:
        """Lets one core handle all packets that an interface receives, so that they stay in order.

        Otherwise packets wait on the core of their sender, and those of a sender that moves to another core can
        overtake earlier ones. In a user namespace the kernel does not allow this setting: a busy machine may then
        change the order of some packets.
        """
        if is_unprivileged():
            return
        cores = sorted(os.sched_getaffinity(0))
        core = cores[node % len(cores)]
        # Source: Linux Documentation/networking/scaling.rst, RPS; masks have a comma every 32 cores.
        words = [f"{1 << core % 32:x}", *["00000000"] * (core // 32)]
        file = f"/sys/class/net/{interface}/queues/rx-0/rps_cpus"
        done = run_shell(f"set -e\necho {','.join(words)} > {file}", prefix=end.enter())
        if done.returncode != 0:
            raise RuntimeError(f"cannot set up the emulated network: {done.stderr.strip()}")

    def limit(self, node: int, interface: str, network: int, bits_per_second: int | None) -> None:
        """Sets the rate of one node's link, each direction.

        Args:
            node: Number of the node.
            interface: Name of the link's interface on the node.
            network: Number of the network, 0 for the first.
            bits_per_second: Rate in each direction; None for no limit.

        Raises:
            RuntimeError: The relay of the network has ended.
        """
        if self.paths is not None:
            self._carriers[network].limit(node, bits_per_second)
            return
        for holder, name in ((self._holders[node], interface), (self._bridge, _port(network, node))):
            holder.run(f"tc qdisc del dev {name} root 2> /dev/null || true\n" + self._limit(name, bits_per_second))

    def path_counts(self, network: int = 0) -> tuple[tuple[PathCounts, ...], ...]:
        """Returns the packets since the start that were offered, lost, dropped and delivered, by sender, then receiver.

        Args:
            network: Number of the network, 0 for the first.

        Raises:
            RuntimeError: The cluster has no `path`, without which packets are not counted; or the relay has ended.
        """
        if self.paths is None:
            raise RuntimeError("only a cluster with a `path` counts packets: the kernel's bridge carries the others'")
        return self._carriers[network].counts()

    @property
    def relays(self) -> tuple[Relay, ...]:
        """Relay of each network; empty without a `path`, or if netem carries the packets."""
        return tuple(self._relays)

    def shrink_switch(self, mtu: int) -> None:
        """Lowers the MTU of the first network's bridge below that of the nodes, so that larger packets are lost.

        Args:
            mtu: Largest packet on the bridge's ports, in bytes.
        """
        for node in range(len(self.nodes)):
            self._bridge.run(f"ip link set {_port(0, node)} mtu {mtu}")

    def enter(self, node: int) -> list[str]:
        """Returns the words that, put before a command, run it inside a node as root.

        Args:
            node: Number of the node.
        """
        return self._holders[node].enter()

    def process(self, node: int) -> int:
        """Returns the process ID, on this machine, of a process in the node's namespaces.

        Args:
            node: Number of the node.
        """
        return self._holders[node].pid

    def _limit(self, interface: str, bits_per_second: int | None) -> str:
        """Returns the shell line that limits what an interface sends; the cable's other end limits the other direction.

        Args:
            interface: Name of the interface.
            bits_per_second: Rate; None removes the limit.
        """
        if bits_per_second is None:
            return ""
        bytes_per_second = bits_per_second // 8
        # 1 ms of traffic, at least one segmentation-offload packet (64 KiB) and two packets of the MTU: with less, tc
        # documents that the rate is missed. The queue holds 200 ms, so that TCP fills the link without losing packets.
        burst = min(max(65536, 2 * self.mtu, bytes_per_second // 1000), _MOST_QUEUED_NBYTES // 4)
        limit = min(max(4 * burst, bytes_per_second // 5), _MOST_QUEUED_NBYTES)
        return f"tc qdisc add dev {interface} root tbf rate {bits_per_second}bit burst {burst} limit {limit}"

    def run(
        self,
        command: Sequence[str],
        *,
        order: Order = "contiguous",
        timeout_seconds: float | None = None,
        grace_seconds: float = 30.0,
        environment: Mapping[str, str] | None = None,
        raw: bool = False,
        on_line: RankLine | None = None,
    ) -> RunResult:
        """Runs a command as every rank, with the environment variables of torchrun.

        Args:
            command: Program and arguments, in the current folder.
            order: Order in which ranks are assigned to nodes, see `Order`.
            timeout_seconds: Time limit of the whole run; None for no limit.
            grace_seconds: Seconds for which the other ranks may go on after one has failed.
            environment: Environment variables to set; they replace torchrun's.
            raw: Whether the ranks write to this process's stdout and stderr themselves; no output is collected then.
            on_line: Callback with (rank, line) for every line printed, unless `raw`.

        Returns:
            Statuses, output and traffic. A failed rank raises no exception here, but in `RunResult.check`.

        Raises:
            RuntimeError: The relay that carries the packets has ended; the ranks were ended, too.
        """
        self._check_relays("")
        placements = place_ranks(self.nodes, order)
        argvs = [self._command_line(placement, placements, command, environment or {}) for placement in placements]
        self._runs += 1
        # The traffic is the difference of the NICs' counters before and after the run.
        before = self._carried()
        with Ranks(argvs, raw=raw, on_line=on_line) as ranks:
            outcome = ranks.wait(timeout_seconds, grace_seconds, [relay.pid for relay in self._relays])
        self._check_relays("; the job was ended")
        after = self._carried()
        return RunResult(
            **asdict(outcome),
            nic_bytes=tuple(
                self._nic_bytes(node, then, now) for node, (then, now) in enumerate(zip(before, after, strict=True))
            ),
        )

    def nic_bytes(self) -> tuple[NicBytes, ...]:
        """Returns the bytes that each node's NICs have carried since the cluster was made."""
        none = [(0, 0)] * len(self.interfaces)
        return tuple(self._nic_bytes(node, none, now) for node, now in enumerate(self._carried()))

    def _carried(self) -> list[list[tuple[int, int]]]:
        """Returns the bytes (sent, received) of each NIC of each node until now."""
        return [[holder.nic_bytes(interface) for interface in self.interfaces] for holder in self._holders]

    def _nic_bytes(self, node: int, then: Sequence[tuple[int, int]], now: Sequence[tuple[int, int]]) -> NicBytes:
        nics = tuple(
            InterfaceBytes(interface=name, tx=last[0] - first[0], rx=last[1] - first[1])
            for name, first, last in zip(self.interfaces, then, now, strict=True)
        )
        tx, rx = sum(each.tx for each in nics), sum(each.rx for each in nics)
        return NicBytes(node=node, hostname=self.hostnames[node], tx=tx, rx=rx, nics=nics)

    def _check_relays(self, consequence: str) -> None:
        for relay in self._relays:
            if (failure := relay.failure()) is not None:
                raise RuntimeError(failure + consequence)

    def _command_line(
        self,
        placement: Placement,
        placements: Sequence[Placement],
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> list[str]:
        variables = torchrun_environment(
            placement,
            placements,
            master_address=self.address(placements[0].node),
            # The last command's port may still be in TIME_WAIT, or held by a process it left behind.
            master_port=FIRST_PORT + self._runs % 1000,
            run_id=f"emulate-{self._runs}",
        )
        # Each library picks its interface on its own; lo would be their second guess. Of several NICs gloo takes the
        # one of the node's name, as on machines; a name in its variable would say that the user wants that one alone.
        variables |= {"NCCL_SOCKET_IFNAME": ",".join(self.interfaces), "TP_SOCKET_IFNAME": INTERFACE}
        if len(self.interfaces) == 1 or self.names != "all":
            variables["GLOO_SOCKET_IFNAME"] = INTERFACE
        variables |= environment
        words = [*self._holders[placement.node].enter(), "env", "--default-signal=TERM", f"--chdir={Path.cwd()}"]
        words += [f"{name}={value}" for name, value in variables.items()]
        return [*words, "sh", "-c", WITH_ONE_THREAD, "sh", *command]

    def close(self) -> None:
        """Removes the nodes, and ends all processes on them; a second call does nothing."""
        self._stack.close()

    def __enter__(self) -> Self:
        """Returns the cluster itself, for `with`."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Closes the cluster."""
        self.close()
