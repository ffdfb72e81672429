"""Parts of a machine as plain frozen data: processors, PCIe switches, GPUs, network cards, and the links between them.

A device names the part above it by its key (`parent`), so a machine is a forest whose roots are its CPUs. A field that
is None is unknown: the source did not have it, and it was not guessed.
"""

from dataclasses import dataclass
from typing import Literal

LinkKind = Literal["nvlink", "xgmi", "c2c", "pci_peer"]
DefectKind = Literal["asymmetric_cell", "short_row", "self_link", "dangling_link"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """Describes the PCIe link between a function and the bridge above it."""

    gigatransfers_per_second: float | None = None
    """Highest transfer rate of one lane that both ends have: 2.5, 5, 8, 16, 32 or 64."""
    current_gigatransfers_per_second: float | None = None
    """Current rate of one lane, if it is lower than the highest (an idle GPU lowers it); else None."""
    lanes: int | None = None
    """Width of the link."""
    virtual: bool = False
    """True if the figures belong to an emulated bridge and say nothing about the hardware."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """Describes one NUMA node: the processor cores and the memory next to them."""

    key: str
    """Unique name in the machine, for example `numa0`."""
    numa: int | None = None
    """Number of the NUMA node; None where the kernel reports -1."""
    socket: int | None = None
    """Number of the processor package the node belongs to."""
    architecture: str | None = None
    """`x86_64`, `arm64` or `ppc64`."""
    vendor: str | None = None
    """As /proc/cpuinfo writes it: `GenuineIntel`, `AuthenticAMD`."""
    family: int | None = None
    model: int | None = None
    cores: str | None = None
    """Logical processors as a list of ranges: `0-23,48-71`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """Holds the fields that switches, GPUs and NICs have in common."""

    key: str
    """Unique name in the machine: the bus id, if there is one."""
    parent: str | None = None
    """Key of the switch or CPU above; None if unknown."""
    bridges_known: bool = True
    """False if the source may lack PCIe switches between the device and its `parent`."""
    vendor: int | None = None
    device: int | None = None
    subsystem_vendor: int | None = None
    subsystem_device: int | None = None
    pcie: PcieLink | None = None
    """Link to the bridge above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PciSwitch(PciDevice):
    """Describes a PCIe switch; its key is the bus id of its upstream port."""

    virtual: bool = False
    """True for a bridge that a hypervisor or a hand-written file invented."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """Describes one network port, under the name a collective library uses for it."""

    name: str
    """RDMA device (`mlx5_0`, `rdmap16s27`, `cxi0`) where there is one, else the network interface (`eth0`)."""
    number: int = 1
    """Port number on its RDMA device."""
    index: int | None = None
    """Position in a collective library's list of devices (`dev` in NCCL's file)."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces that share the port."""
    link_layer: str | None = None
    """`InfiniBand` or `Ethernet`."""
    bits_per_second: float | None = None
    """Reported line rate of one direction."""
    active: bool | None = None
    """True if the link is up."""
    bond: str | None = None
    """Bonded interface the port is a member of."""
    standby: bool = False
    """True if that bond keeps the port in reserve and sends through other members."""
    above: str | None = None
    """Interface that has the port's IP address: the uppermost bond, team or bridge it is in, or a hypervisor's. None:
    the port's own interface."""
    virtual: bool = False
    """True if a virtual driver reports the rate, which then means nothing."""
    gdr: bool | None = None
    """Whether the network library says that it can register GPU memory."""
    guid: str | None = None

    @property
    def carries(self) -> bool:
        """Returns whether the port can carry traffic: it is neither a bond's standby nor known to be down."""
        return self.active is not False and not self.standby


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(PciDevice):
    """Holds the further fields that GPUs and NICs have in common."""

    bus: str | None = None
    name: str | None = None
    """Model, if the source has it."""
    class_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic(Endpoint):
    """Describes one network card; the functions of a multi-port card are one Nic with several ports.

    Its key is the bus id of function 0, or `numa0/eth0` for a card that shows no PCI device.
    """

    driver: str | None = None
    ports: tuple[Port, ...] = ()
    functions: int = 1
    """Physical functions of the card."""
    virtual_functions: int = 0
    """SR-IOV functions that were folded into their physical function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu(Endpoint):
    """Describes one GPU as the driver counts it (on AMD MI200 that is half a card).

    Its key is the bus id; further parts of a card that appears as several GPUs on one bus id have `/1`, `/2` ... behind
    it. It is `GPU0`, `GPU1` ... if the source has no bus ids.
    """

    index: int | None = None
    """Number that the driver assigns."""
    part: int | None = None
    """Index of the part, if a card appears as several GPUs on one bus id; None for a whole card."""
    compute_capability: int | None = None
    """`sm` of NCCL's file: 80 for A100, 90 for H100; AMD writes a number of its own."""
    architecture: str | None = None
    """AMD's name of the instruction set: `gfx942`."""
    rank: int | None = None
    gdr: bool | None = None
    """Whether the driver says that the GPU supports GPUDirect RDMA."""
    peers: bool | None = None
    """Whether the GPU can access the memory of the node's other GPUs directly; None if the source does not say."""
    memory_nbytes: int | None = None
    memory_bytes_per_second: float | None = None
    """Peak bandwidth of the GPU's memory from the driver's figures; None if it reports none."""
    uuid: str | None = None
    """UUID in the driver's notation: `GPU-8932f937-d72c-...`."""
    slices: tuple[str, ...] = ()
    """UUIDs of its MIG slices: `MIG-41b36412-...`."""
    nvlink_domain: str | None = None
    """NVLink domain of several hosts that the GPU has joined, `4a5e.../32766` (cluster and clique): GPUs of one domain
    reach each other over NVLink, whatever host they are in. None: it has joined none, or the source does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvSwitch:
    """Describes one NVLink switch chip."""

    key: str
    """Bus id, or `hidden` where a virtual machine cannot see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLink:
    """Describes a connection outside the PCIe tree, the same in both directions."""

    a: str
    """Key of a GPU (or of a switch, for `pci_peer`)."""
    b: str
    """Key of a GPU, an NvSwitch or a CPU."""
    kind: LinkKind
    count: int = 1
    """Physical links bundled in it."""
    bytes_per_second: float | None = None
    """Sum of the bundle, one direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPath:
    """Holds a path type that the source states without showing the tree behind it.

    Attributes:
        a: Key of one device.
        b: Key of the other device.
        name: Path type as the source prints it: `PIX`, `NODE`, `NV12`.
    """

    a: str
    b: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """Describes an error in the source, whose cell, row or link was therefore left out."""

    kind: DefectKind
    where: str
    """Place of the error in the source, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Holds everything known about one host."""

    hostname: str | None = None
    product: str | None = None
    """Model of the host, as its firmware names it: `DGXH100`."""
    cpus: tuple[Cpu, ...] = ()
    switches: tuple[PciSwitch, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    nvswitches: tuple[NvSwitch, ...] = ()
    links: tuple[DeviceLink, ...] = ()
    links_known: bool = False
    """True if the source shows NVLink and xGMI, so that an empty `links` means that there is none."""
    given_paths: tuple[GivenPath, ...] = ()
    unclassified: tuple[str, ...] = ()
    """Bus ids of PCI functions that may be GPUs or NICs, but whose class or vendor the source does not say."""
    defects: tuple[Defect, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences about what is missing or doubtful."""
    sources: tuple[str, ...] = ()
    """Sources of the facts: `sysfs`, `nvml`, a file."""
    virtual: bool | None = None
    """Whether the host is a virtual machine."""

    @property
    def nvlink_domain(self) -> str | None:
        """Returns the NVLink domain of several hosts that all GPUs have joined; None if there is none, or several."""
        domains = {gpu.nvlink_domain for gpu in self.gpus}
        return domains.pop() if len(domains) == 1 else None
