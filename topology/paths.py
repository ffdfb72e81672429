"""Determines how far two devices of a machine are from each other, by the names that NCCL prints (PIX, PXB, PHB, ...).

The distance is read off the PCI tree, not off NCCL's printed table: NCCL rewrites a GPU-NIC path to go through the CPU
once it has decided against GPUDirect RDMA, so its table then shows PHB for hardware that is PIX.

Source: NCCL v2.30 src/include/graph.h (types), src/graph/paths.cc (how a path gets its type), src/graph/topo.cc
(flattening of Broadcom switches).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cached_property

from gradwire.topology.bandwidth import nic_bytes_per_second
from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Gpu, Machine, Nic, PciSwitch
from gradwire.topology.pci_ids import broadcom_generation


class PathType(Enum):
    """Lists NCCL's distances from near to far. Their numbers differ between releases, so only names are shown."""

    LOC = "the device itself"
    NVL = "NVLink or xGMI, directly or through a switch"
    NVB = "NVLink by way of another GPU"
    C2C = "chip-to-chip link between GPU and CPU"
    PIX = "at most one PCIe switch"
    PXB = "several PCIe switches, no host bridge"
    P2C = "GPU -C2C- CPU -PCIe- NIC"
    PXN = "NVLink to another GPU that is near the NIC"
    PHB = "through the host bridge of one CPU"
    SYS = "between NUMA nodes"


GDR_BY_DEFAULT = frozenset({PathType.LOC, PathType.PIX, PathType.PXB, PathType.P2C})
"""Paths on which NCCL uses GPUDirect RDMA unless configured otherwise (P2C from NCCL 2.27 on).

P2C is for a GPU's local NICs only. Source: NCCL v2.30 src/graph/paths.cc (ncclTopoComputePaths).
"""

_INSIDE_A_CPU = frozenset({PathType.PIX, PathType.PXB, PathType.PHB})
"""Paths through the PCI tree that do not leave the CPU."""

MAX_DEVICES = 512
"""More GPUs or more NICs than this are no machine; the limit keeps a hostile file from costing quadratic time."""

MAX_STACKED_SWITCHES = 64
"""Real machines stack three."""

_PRINTED = {"NODE": PathType.PHB, "PSB": PathType.PIX, "XGMI": PathType.NVL}
"""Other tools' names: nvidia-smi's NODE is NCCL's PHB, older versions print PSB for two ports of one switch."""


def path_of_printed(name: str) -> PathType | None:
    """Returns the path type that a cell of a printed matrix stands for, or None if it is unknown.

    Args:
        name: Text of the cell: `PIX`, `NODE`, `NV12`, `?`.
    """
    if name in PathType.__members__:
        return PathType[name]
    return PathType.NVL if name.startswith("NV") and name[2:].isdigit() else _PRINTED.get(name)


def local_nics(paths: Mapping[str, PathType | None], rates: Mapping[str, float | None]) -> frozenset[str]:
    """Returns the NICs that NCCL calls local to a GPU: of those on its own CPU the fastest, of these the nearest.

    A NIC whose rate is unknown counts as one of the fastest.

    Args:
        paths: NIC -> its path from the GPU through the PCI tree; None if unknown.
        rates: NIC -> its rate, in any unit; None if unknown.

    Source: NCCL v2.30 src/graph/topo.cc (ncclTopoGetLocal: bandwidth first, then path type).
    """
    order = tuple(PathType)
    near = {nic: order.index(path) for nic, path in paths.items() if path in _INSIDE_A_CPU and path is not None}
    best = max((rate for nic in near if (rate := rates.get(nic)) is not None), default=None)
    fastest = [nic for nic in near if rates.get(nic) in (None, best)]
    nearest = min((near[nic] for nic in fastest), default=None)
    return frozenset(nic for nic in fastest if near[nic] == nearest)


def _stacked_generation(switch: PciSwitch, level: int) -> int:
    """Returns the PCIe generation, 4 or 5, of a switch that is half of a stacked Broadcom switch; 0 for all others.

    Args:
        switch: The switch.
        level: 0 asks whether it is an upper half, 1 whether it is a lower one; see `broadcom_generation`.
    """
    return broadcom_generation(switch.vendor, switch.device, switch.subsystem_vendor, switch.subsystem_device, level)


class Distances:
    """Finds the paths between the devices of one machine; a look-up takes constant time after a linear preparation."""

    def __init__(self, machine: Machine) -> None:
        """Indexes the machine.

        Args:
            machine: Machine whose devices are looked up.

        Raises:
            TopologyError: The parents form a cycle, or there are more devices than a machine can have.
        """
        if max(len(machine.gpus), len(machine.nics)) > MAX_DEVICES:
            found = f"{len(machine.gpus)} GPUs and {len(machine.nics)} NICs"
            raise TopologyError(f"{found} are described; one machine has at most {MAX_DEVICES} of each")
        self.machine = machine
        self._cpus = {cpu.key: cpu for cpu in machine.cpus}
        self._switches = {switch.key: switch for switch in machine.switches}
        self._fused = self._stacked()
        self._tops = {key: self._top(key) for key in self._switches}
        self._given = {frozenset((path.a, path.b)): path_of_printed(path.name) for path in machine.given_paths}

    def _stacked(self) -> dict[str, str]:
        """Returns lower half -> upper half of every stacked Broadcom switch; NCCL treats the two as one."""
        fused = {}
        for key, switch in self._switches.items():
            upper = self._switches.get(switch.parent or "")
            generation = 0 if upper is None else _stacked_generation(upper, 0)
            if upper is not None and generation and _stacked_generation(switch, 1) == generation:
                fused[key] = upper.key
        return fused

    def _place(self, parent: str | None) -> str | None:
        """Returns the key of the switch or CPU above a device, with the two halves of a stacked switch as one."""
        return self._fused.get(parent or "", parent)

    def _top(self, key: str) -> tuple[str, str | None]:
        """Returns the uppermost switch above (or equal to) `key` and the CPU above that."""
        seen: set[str] = set()
        while True:
            if key in seen or len(seen) == MAX_STACKED_SWITCHES:
                raise TopologyError(
                    f"more than {MAX_STACKED_SWITCHES} PCI switches above {key}, or it lies below itself"
                )
            seen.add(key)
            parent = self._switches[key].parent
            if parent is None or parent not in self._switches:
                return key, parent
            key = parent

    def cpu_of(self, device: Gpu | Nic) -> str | None:
        """Returns the key of the CPU a device hangs off, or None where unknown.

        Args:
            device: A GPU or NIC of the machine.
        """
        return self._tops[device.parent][1] if device.parent in self._tops else device.parent

    def _tree_path(self, a: Gpu | Nic, b: Gpu | Nic) -> PathType | None:
        """Returns the type of the path through the PCI tree, or None if the tree is not known well enough."""
        if a.parent is None or b.parent is None:
            return None
        above_a, above_b = self._place(a.parent), self._place(b.parent)
        if above_a in self._switches and above_b in self._switches:
            if above_a == above_b:
                return PathType.PIX
            if self._tops[str(above_a)][0] == self._tops[str(above_b)][0]:
                return PathType.PXB
        cpu_a, cpu_b = self.cpu_of(a), self.cpu_of(b)
        if cpu_a is None or cpu_b is None:
            return None
        if cpu_a == cpu_b:
            return PathType.PHB if self._complete(a) and self._complete(b) else None
        known = all(key in self._cpus and self._cpus[key].numa is not None for key in (cpu_a, cpu_b))
        return PathType.SYS if known else None

    def _complete(self, device: Gpu | Nic) -> bool:
        """Returns whether all switches above a device are known."""
        top = self._switches[self._tops[device.parent][0]] if device.parent in self._tops else device
        return top.bridges_known

    def _path(self, a: Gpu | Nic, b: Gpu | Nic) -> PathType | None:
        """Returns the path type that the source states, else that of the path through the PCI tree; None if unknown."""
        pair = frozenset((a.key, b.key))
        return self._given[pair] if pair in self._given else self._tree_path(a, b)

    @cached_property
    def _peers(self) -> dict[str, frozenset[str]]:
        """Returns GPU -> the GPUs it reaches over NVLink or xGMI, directly or through a switch."""
        direct: dict[str, set[str]] = defaultdict(set)
        gpus = {gpu.key for gpu in self.machine.gpus}
        switched = set()
        for link in self.machine.links:
            if link.kind in ("nvlink", "xgmi"):
                if link.b in gpus:
                    direct[link.a].add(link.b)
                    direct[link.b].add(link.a)
                else:
                    switched.add(link.a)
        for gpu in switched:
            direct[gpu] |= switched - {gpu}
        return {gpu: frozenset(peers) for gpu, peers in direct.items()}

    @cached_property
    def _over_c2c(self) -> dict[str, frozenset[str]]:
        """Returns GPU with a chip-to-chip link to its CPU -> its local NICs, see `local_nics`.

        NCCL reaches over the link those of them that are at PHB, and not those below a switch that the GPU is below.
        """
        coherent = {link.a for link in self.machine.links if link.kind == "c2c"}
        rates = {nic.key: nic_bytes_per_second(nic) for nic in self.machine.nics} if coherent else {}
        gpus = (gpu for gpu in self.machine.gpus if gpu.key in coherent)
        return {
            gpu.key: local_nics({nic.key: self._path(gpu, nic) for nic in self.machine.nics}, rates) for gpu in gpus
        }

    def gpu_gpu(self, a: Gpu, b: Gpu) -> PathType | None:
        """Returns the best path between two GPUs, or None where it is unknown. What the source states goes first.

        Args:
            a: A GPU of the machine.
            b: Another one, or the same.
        """
        if a.key == b.key:
            return PathType.LOC
        pair = frozenset((a.key, b.key))
        if pair in self._given:
            return self._given[pair]
        mine, theirs = self._peers.get(a.key, frozenset()), self._peers.get(b.key, frozenset())
        if b.key in mine:
            return PathType.NVL
        return PathType.NVB if mine & theirs else self._tree_path(a, b)

    def gpu_nic(self, gpu: Gpu, nic: Nic) -> PathType | None:
        """Returns the hardware path between a GPU and a NIC, or None where it is unknown.

        Args:
            gpu: A GPU of the machine.
            nic: A NIC of the machine.
        """
        path = self._path(gpu, nic)
        return PathType.P2C if path is PathType.PHB and nic.key in self._over_c2c.get(gpu.key, ()) else path

    def nic_nic(self, a: Nic, b: Nic) -> PathType | None:
        """Returns the path between two NICs, or None where it is unknown.

        Args:
            a: A NIC of the machine.
            b: Another one, or the same.
        """
        return PathType.LOC if a.key == b.key else self._path(a, b)

    def nearest_nics(self, gpu: Gpu) -> tuple[PathType | None, tuple[Nic, ...]]:
        """Returns the shortest path from a GPU to any NIC and the NICs at that distance, in the machine's order.

        Args:
            gpu: A GPU of the machine.

        Returns:
            (path type, NICs); (None, ()) if no path to a NIC is known.
        """
        paths = [(self.gpu_nic(gpu, nic), nic) for nic in self.machine.nics]
        order: Sequence[PathType] = tuple(PathType)
        known = [path for path, _ in paths if path is not None]
        if not known:
            return None, ()
        best = min(known, key=order.index)
        return best, tuple(nic for path, nic in paths if path is best)

    def qualifies_for_gdr(self, gpu: Gpu, nic: Nic) -> bool:
        """Returns whether NCCL would use GPUDirect RDMA by default for a pair, as far as the description says.

        It would not if the path is too far or unknown, or if the GPU or all ports of the NIC are known to lack it.

        Args:
            gpu: A GPU of the machine.
            nic: A NIC of the machine.
        """
        able = not nic.ports or any(port.gdr is not False for port in nic.ports)
        return self.gpu_nic(gpu, nic) in GDR_BY_DEFAULT and gpu.gdr is not False and able
