"""What a machine consists of: processors, PCIe switches, GPUs, network cards, and the links between them.

Everything is frozen and plain. Devices know the thing above them by its key (`parent`), so a machine is a forest whose
roots are its CPUs. A field that is None is unknown: it was not in the source, and nobody guessed it.
"""

from dataclasses import dataclass
from typing import Literal

LinkKind = Literal["nvlink", "xgmi", "c2c", "pci_peer"]
DefectKind = Literal["asymmetric_cell", "short_row", "self_link", "dangling_link"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """How fast a PCIe function is attached to the bridge above it."""

    gigatransfers_per_second: float | None = None
    """Highest transfer rate of one lane that both ends have: 2.5, 5, 8, 16, 32 or 64."""
    current_gigatransfers_per_second: float | None = None
    """The rate at the moment where it is lower: an idle GPU lowers it."""
    lanes: int | None = None
    """Width of the link."""
    virtual: bool = False
    """True where the figures belong to an emulated bridge and say nothing about the hardware."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """One NUMA node: the processor cores and the memory next to them."""

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
    """What switches, GPUs and NICs have in common."""

    key: str
    """Unique name in the machine: the bus id, where there is one."""
    parent: str | None = None
    """Key of the switch or CPU above; None where unknown."""
    bridges_known: bool = True
    """False where the source may lack PCIe switches between it and its `parent`."""
    vendor: int | None = None
    device: int | None = None
    subsystem_vendor: int | None = None
    subsystem_device: int | None = None
    pcie: PcieLink | None = None
    """Its link to the bridge above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PciSwitch(PciDevice):
    """A PCIe switch; its key is the bus id of its upstream port."""

    virtual: bool = False
    """True for a bridge that a hypervisor or a hand-written file invented."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One network port, under the name a collective library uses for it."""

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
    bond: str | None = None
    """Bonded interface the port is a member of."""
    standby: bool = False
    """True where that bond holds the port in reserve, so that other members carry what is sent."""
    above: str | None = None
    """Interface that has the port's address: the uppermost bond, team or bridge it is in, or a hypervisor's."""
    virtual: bool = False
    """True where a virtual driver reports the rate, which then means nothing."""
    gdr: bool | None = None
    """Whether the network library says that it can register GPU memory."""
    guid: str | None = None

    @property
    def carries(self) -> bool:
        """Whether something can be sent through it, as far as is known."""
        return self.active is not False and not self.standby


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(PciDevice):
    """What GPUs and NICs have in common."""

    bus: str | None = None
    name: str | None = None
    """Model, where the source tells it."""
    class_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic(Endpoint):
    """One network card; the functions of a multi-port card are one Nic with several ports.

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
    """One GPU as the driver counts it (on AMD MI200 that is half a card).

    Its key is the bus id, or `GPU0` where the source gives none.
    """

    index: int | None = None
    """Number the driver gives it."""
    part: int | None = None
    """Which part it is of a card that shows itself as several GPUs on one bus id; None for a whole card."""
    compute_capability: int | None = None
    """`sm` of NCCL's file: 80 for A100, 90 for H100; AMD writes a number of its own."""
    architecture: str | None = None
    """AMD's name of the instruction set: `gfx942`."""
    rank: int | None = None
    gdr: bool | None = None
    """Whether the driver says that the GPU supports GPUDirect RDMA."""
    peers: bool | None = None
    """Whether it reaches the memory of the node's other GPUs itself; None if the source does not say."""
    memory_nbytes: int | None = None
    memory_bytes_per_second: float | None = None
    """Peak bandwidth of its memory, as the driver's figures have it; None where it tells none."""
    uuid: str | None = None
    """As the driver writes it: `GPU-8932f937-d72c-...`."""
    slices: tuple[str, ...] = ()
    """UUIDs of its MIG slices: `MIG-41b36412-...`."""
    nvlink_domain: str | None = None
    """NVLink domain of several hosts that it has joined, `4a5e.../32766` (cluster and clique): GPUs of one domain reach
    each other over NVLink, whatever host they are in. None: it has joined none, or the source does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvSwitch:
    """One NVLink switch chip."""

    key: str
    """Bus id, or `hidden` where a virtual machine cannot see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLink:
    """A connection outside the PCIe tree, the same in both directions."""

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
    """A path type that the source states without showing the tree behind it."""

    a: str
    b: str
    name: str
    """As printed: `PIX`, `NODE`, `NV12`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """Something the source got wrong and that was therefore left out."""

    kind: DefectKind
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything known about one host."""

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
    """Whether the source would have shown NVLink or xGMI, so that none in `links` means that there is none."""
    given_paths: tuple[GivenPath, ...] = ()
    unclassified: tuple[str, ...] = ()
    """PCI functions that the source lists without saying what they are."""
    defects: tuple[Defect, ...] = ()
    notes: tuple[str, ...] = ()
    """What is missing or doubtful, one sentence each."""
    sources: tuple[str, ...] = ()
    """Where the facts came from: `sysfs`, `nvml`, a file."""
    virtual: bool | None = None
    """Whether the host is a virtual machine."""

    @property
    def nvlink_domain(self) -> str | None:
        """The NVLink domain of several hosts that all GPUs have joined; None where there is none, or several."""
        domains = {gpu.nvlink_domain for gpu in self.gpus}
        return domains.pop() if len(domains) == 1 else None
