"""Everything the checks may look at, derived once: GPUs, NICs, pairs, settings, versions."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property

from gradwire.topology.gdr.inputs.environment import EffectiveSetting, merge, parse_nccl_conf
from gradwire.topology.gdr.inputs.facts import GpuFacts, HostFacts
from gradwire.topology.gdr.inputs.files import Files
from gradwire.topology.gdr.inputs.nccl_log import NcclLog
from gradwire.topology.gdr.inputs.topology_file import STANDARD_PATH, TAGS, FilePosition, file_path_type, read_positions
from gradwire.topology.gdr.nccl import LEVELS, Version, default_level, parse_level, parse_version
from gradwire.topology.gdr.process_context import ProcessContext, read_process_context
from gradwire.topology.gdr.rdma import RdmaDevice, RdmaPort, family_of_function, rdma_capable, read_rdma_devices
from gradwire.topology.networks import CardFamily, Plugin
from gradwire.topology.paths import local_nics, path_of_printed
from gradwire.topology.pci_ids import NVIDIA
from gradwire.topology.readers.pci import PciFunction, PciTree, path_type

Pair = tuple[str, str]
"""(bus id of the GPU, bus id of the NIC)."""


@dataclass(frozen=True, slots=True)
class RdmaNic:
    """Describes a NIC that could do RDMA: a PCI function and the RDMA devices on it."""

    function: PciFunction
    devices: tuple[RdmaDevice, ...]

    @property
    def bus_id(self) -> str:
        """Returns the bus id of the PCI function."""
        return self.function.bus_id

    @property
    def name(self) -> str:
        """Returns the name of the first RDMA device (`mlx5_0`), or the bus id if there is none."""
        return self.devices[0].name if self.devices else self.bus_id

    @property
    def family(self) -> CardFamily | None:
        """Returns the row of the table of known cards; None if the card is not in it."""
        return family_of_function(self.function)

    @property
    def plugin(self) -> Plugin | None:
        """Returns the plug-in by which NCCL uses the NIC; None if its own verbs do."""
        return None if self.family is None else self.family.plugin

    @property
    def ports(self) -> tuple[RdmaPort, ...]:
        """Returns the NIC's own ports; those of its scalable functions if it shows no others."""
        own = [device for device in self.devices if not device.scalable] or self.devices
        return tuple(port for device in own for port in device.ports)

    @property
    def down(self) -> bool:
        """Returns whether NCCL ignores the NIC because it has ports and all are known not to be ACTIVE.

        Source: NCCL v2.30 src/transport/net_ib/init.cc (a port that is not ACTIVE is no device).
        """
        return bool(self.ports) and all(port.state not in (None, "ACTIVE") for port in self.ports)

    @property
    def gigabits(self) -> float | None:
        """Returns the sum of the rates of the ports that are not down, in Gbit/s.

        None if one of these rates is unknown, or if all ports are down.
        """
        rates = [port.gigabits for port in self.ports if port.state != "DOWN"]
        return sum(rate for rate in rates if rate is not None) if rates and None not in rates else None


@dataclass
class Host:
    """Holds everything the checks may look at on one machine, derived lazily from what was read.

    The source is the live machine, a folder, a capture, or lspci's text alone.
    """

    files: Files
    tree: PciTree
    facts: HostFacts = field(default_factory=HostFacts)
    environment: Mapping[str, str] | None = None
    """Filtered variables; None is unknown, {} is none set."""
    log: NcclLog | None = None
    proof_error: str = ""
    """Why an all-reduce that was asked for left no log or no rate."""
    nvlinks: Mapping[int, int] | None = None
    """GPU index -> active NVLinks, from `nvidia-smi nvlink --status`."""
    peers: tuple[Mapping[str, object], ...] = ()
    """Results of other hosts of the job."""
    bandwidths: Mapping[str, float] = field(default_factory=dict)
    """Measured Gb/s: `host`, `gdr` (perftest), `default`, `LOC` (the same all-reduce with two levels)."""

    @cached_property
    def process(self) -> ProcessContext:
        """Returns the privileges and the container of this process, which decide what it can see."""
        return read_process_context(self.files, "KUBERNETES_SERVICE_HOST" in (self.environment or {}))

    @cached_property
    def gpus(self) -> tuple[PciFunction, ...]:
        """Returns the NVIDIA GPUs on the bus; only those that the driver shows if this is, or may be, a container.

        If the driver shows none, all of the bus.
        """
        gpus = tuple(function for function in self.tree.of_class(0x03) if function.vendor == NVIDIA)
        given = {gpu.bus_id for gpu in self.facts.gpus or ()}
        return tuple(gpu for gpu in gpus if gpu.bus_id in given or not given or self.process.container == "")

    @cached_property
    def gpu_names(self) -> dict[str, str]:
        """Returns bus id -> `GPU0`: the position in bus order, by which `gradwire topo` and the driver count too."""
        return {bus_id: f"GPU{position}" for position, bus_id in enumerate(sorted(gpu.bus_id for gpu in self.gpus))}

    @cached_property
    def rdma_devices(self) -> tuple[RdmaDevice, ...] | None:
        """Returns all RDMA devices; None if sysfs cannot be read."""
        return read_rdma_devices(self.files, self.tree)

    @cached_property
    def capable(self) -> tuple[RdmaNic, ...]:
        """Returns every PCI function that could do RDMA; those without an RDMA device only if this host could use them.

        That is, neither those handed to virtual machines (vfio-pci) nor virtual functions without a driver.
        """
        found: dict[str, list[RdmaDevice]] = {}
        for device in self.rdma_devices or ():
            if device.bus_id in self.tree.functions and not device.software:
                found.setdefault(str(device.bus_id), []).append(device)
        for bus_id, function in self.tree.functions.items():
            idle = function.is_virtual and not function.driver
            if rdma_capable(function) and function.driver != "vfio-pci" and not idle:
                found.setdefault(bus_id, [])
        for devices in found.values():
            devices.sort(key=lambda device: device.scalable)  # the card goes by its own device
        return tuple(RdmaNic(self.tree.functions[bus_id], tuple(found[bus_id])) for bus_id in sorted(found))

    @cached_property
    def nics(self) -> tuple[RdmaNic, ...]:
        """Returns the NICs of the GPU-NIC pairs: those with an RDMA device, or all capable ones if none has."""
        return tuple(nic for nic in self.capable if nic.devices) or self.capable

    def gpu_facts(self, bus_id: str) -> GpuFacts:
        """Returns the facts that NVML and libcuda gave about one GPU; all unknown if they gave none."""
        return next((gpu for gpu in self.facts.gpus or () if gpu.bus_id == bus_id), GpuFacts())

    @cached_property
    def distances(self) -> dict[Pair, str | None]:
        """Path type of every pair, from topology file or PCI tree: NCCL's own table is rewritten when GDR is off."""
        return {(gpu.bus_id, nic): path for gpu in self.gpus for nic, path in self._distances_of(gpu.bus_id).items()}

    def _distances_of(self, gpu: str) -> dict[str, str | None]:
        """Returns NIC -> path type from one GPU, None where unknown.

        As in NCCL, a chip-to-chip link (P2C) counts only towards the GPU's local NICs.
        """
        paths = {
            nic.bus_id: file_path_type(self.file_positions, gpu, nic.bus_id) or path_type(self.tree, gpu, nic.bus_id)
            for nic in self.nics
        }
        if not self.gpu_facts(gpu).c2c:
            return paths
        local = local_nics(
            {nic: path_of_printed(path or "") for nic, path in paths.items()},
            {nic.bus_id: nic.gigabits for nic in self.nics},
        )
        return {nic: "P2C" if path == "PHB" and nic in local else path for nic, path in paths.items()}

    @cached_property
    def file_positions(self) -> dict[str, FilePosition]:
        """Returns the devices' positions in the topology file that NCCL reads; empty if there is none."""
        named = self.setting("NCCL_TOPO_FILE")
        return read_positions(self.files.find((named or STANDARD_PATH).lstrip("/"), TAGS) or ())

    @cached_property
    def best_pairs(self) -> tuple[Pair, ...]:
        """Returns each GPU's pairs with its nearest NICs that are up; if all NICs are down, with the nearest of all."""
        down = {nic.bus_id for nic in self.nics if nic.down}
        up = {nic.bus_id for nic in self.nics} - down or down
        return tuple(pair for gpu in self.gpus for pair in self._nearest(gpu.bus_id, up))

    def _nearest(self, gpu: str, nics: AbstractSet[str]) -> list[Pair]:
        """Returns the pairs of a GPU with the nearest of the given NICs (bus ids); an unknown path is the farthest."""
        ranks = {
            pair: LEVELS.index(path) if path else len(LEVELS)
            for pair, path in self.distances.items()
            if pair[0] == gpu and pair[1] in nics
        }
        return [pair for pair, rank in ranks.items() if rank == min(ranks.values())]

    @property
    def to_bring_up(self) -> str:
        """Returns the beginning of a fix that asks to bring up a nearer NIC first; empty if no nearer NIC is down."""
        closer = any(self.nearer_and_down(gpu.bus_id) for gpu in self.gpus)
        return "bring up the port of the nearer card (R4); else " if closer else ""

    def nearer_and_down(self, gpu: str) -> tuple[RdmaNic, ...]:
        """Returns the NICs nearest to a GPU if they are down and nearer than every NIC that is up; else empty.

        Args:
            gpu: Bus id of the GPU.
        """
        nearest = {pair for pair in self.best_pairs if pair[0] == gpu}
        without = {nic for _, nic in self._nearest(gpu, {nic.bus_id for nic in self.nics})}
        closer = without if not {(gpu, nic) for nic in without} & nearest else set()
        return tuple(nic for nic in self.nics if nic.bus_id in closer)

    @cached_property
    def settings(self) -> dict[str, EffectiveSetting] | None:
        """Returns NCCL's settings in force: the environment's, then those of the configuration files.

        None if the environment is unknown.
        """
        if self.environment is None:
            return None
        files: dict[str, Mapping[str, str]] = {}
        named = self.environment.get("NCCL_CONF_FILE", "").lstrip("/")
        for path in filter(None, (named, "etc/nccl.conf")):
            lines = self.files.find(path, r"^\s*NCCL_[A-Z0-9_]+=.*$")
            files[f"/{path}"] = parse_nccl_conf("\n".join(lines or ()))
        own = {"~/.nccl.conf": parse_nccl_conf(self.facts.user_conf or "")}
        return merge(self.environment, files if named else own | files)

    def setting(self, name: str) -> str | None:
        """Returns the value of one variable in force, from wherever it was set; None if unset or unknown."""
        found = (self.settings or {}).get(name)
        return None if found is None else found.value

    @cached_property
    def nccl_version(self) -> Version | None:
        """Returns NCCL's version, the log's before that of the installed library; None if unknown."""
        return (self.log and self.log.version) or parse_version(self.facts.nccl_version)

    @property
    def gdr_level(self) -> str:
        """Returns the farthest path type on which NCCL uses GPUDirect RDMA: the variable's level, else the default.

        Source: NCCL user guide, NCCL_NET_GDR_C2C, which 2.26 brought, overrides the level for cards at P2C.
        """
        level = parse_level(self.setting("NCCL_NET_GDR_LEVEL") or "", self.nccl_version)
        over_c2c = self.setting("NCCL_NET_GDR_C2C")
        if over_c2c is not None and level in (None, "PIX", "PXB", "P2C") and (self.nccl_version or (2, 26)) >= (2, 26):
            return "P2C" if over_c2c == "1" else level if level in ("PIX", "PXB") else "PXB"
        return level or default_level(self.nccl_version)
