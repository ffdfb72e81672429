"""Well-known machines in a few lines each: to predict plans for a machine one does not have, and to test with.

Source: NVIDIA DGX A100 and DGX H100 user guides (block diagrams); the A100's PCIe layout as `nvidia-smi topo -m` shows
it there: two GPUs and two NICs below each stack of switches, all at PXB.
"""

from dataclasses import replace

from gradwire.topology.bandwidth import nvlink_bytes_per_second
from gradwire.topology.graph import Cpu, DeviceLink, Gpu, Machine, Nic, NvSwitch, PcieLink, PciSwitch, Port

GEN3, GEN4, GEN5 = (PcieLink(gigatransfers_per_second=rate, lanes=16) for rate in (8.0, 16.0, 32.0))


def dgx_a100() -> Machine:
    """Returns a DGX A100: 8 A100, 6 NVSwitches, 8 compute NICs of 200 Gb/s and 2 for storage."""
    switches, gpus, nics = [], [], []
    for group, numa in enumerate((3, 1, 7, 5)):
        top = f"0000:{0x10 + 0x20 * group:02x}:00.0"
        switches.append(_switch(top, f"numa{numa}"))
        for place in range(4):
            below = f"{top[:5]}{0x11 + 0x20 * group + place:02x}:00.0"
            switches.append(_switch(below, top))
            if place < 2:
                gpus.append(_gpu(2 * group + place, f"{below[:8]}08.0", below, "NVIDIA A100-SXM4-80GB", 80, GEN4))
            else:
                nics.append(_nic(f"mlx5_{2 * group + place - 2}", f"{below[:8]}09.0", below, 200e9, GEN4))
    storage = [_nic(f"mlx5_{8 + i}", f"0000:{bus}:00.0", f"numa{numa}", 200e9, GEN4) for i, (bus, numa) in
               enumerate((("a1", 0), ("b1", 4)))]  # fmt: skip
    cpus = [_cpu(numa, numa // 4, "AuthenticAMD", 49, 16) for numa in range(8)]
    return _sxm(Machine(cpus=tuple(cpus), switches=tuple(switches), nics=(*nics, *storage)), gpus, (2,) * 6)


def p4d() -> Machine:
    """Returns an AWS p4d.24xlarge: 8 A100 of 40 GB, NVSwitches, 4 EFA cards of 100 Gb/s, one for two GPUs, PCIe 3.

    Source: aws-ofi-nccl topology/p4d-24xl-topo.xml.
    """
    switches, gpus, nics = [], [], []
    for group, bus in enumerate((0x10, 0x20, 0x90, 0xA0)):
        switch = f"0000:{bus:02x}:00.0"
        switches.append(_switch(switch, f"numa{group // 2}"))
        for place, slot in enumerate(("1c", "1d")):
            gpus.append(_gpu(2 * group + place, f"0000:{bus:02x}:{slot}.0", switch, "NVIDIA A100-SXM4-40GB", 80, GEN3))
        nics.append(_nic(f"rdmap{bus}s27", f"0000:{bus:02x}:1b.0", switch, 100e9, GEN3, efa=True))
    cpus = tuple(_cpu(numa, numa, "GenuineIntel", 85, 24) for numa in range(2))
    machine = Machine(cpus=cpus, switches=tuple(switches), nics=tuple(nics))
    return replace(_sxm(machine, gpus, (2,) * 6), hostname="p4d")


def dgx_h100() -> Machine:
    """Returns a DGX H100: 8 H100, 4 NVSwitches, a 400 Gb/s NIC next to each GPU and 2 for storage."""
    switches, gpus, nics = [], [], []
    for index, bus in enumerate((0x15, 0x38, 0x48, 0x59, 0x97, 0xB7, 0xC7, 0xD7)):
        switch = f"0000:{bus:02x}:00.0"
        switches.append(_switch(switch, f"numa{index // 4}"))
        gpus.append(_gpu(index, f"0000:{bus + 3:02x}:00.0", switch, "NVIDIA H100 80GB HBM3", 90, GEN5))
        nics.append(_nic(f"mlx5_{index}", f"0000:{bus + 4:02x}:00.0", switch, 400e9, GEN5))
    storage = [_nic(f"mlx5_{8 + numa}", f"0000:{bus}:00.0", f"numa{numa}", 400e9, GEN5) for numa, bus in
               enumerate(("2a", "aa"))]  # fmt: skip
    cpus = [_cpu(numa, numa, "GenuineIntel", 0x8F, 56) for numa in range(2)]
    return _sxm(Machine(cpus=tuple(cpus), switches=tuple(switches), nics=(*nics, *storage)), gpus, (5, 4, 4, 5))


def pcie_box(gpus: int = 4) -> Machine:
    """Returns a server with A10 cards on the CPUs' own lanes, no NVLink, and one 100 Gb/s NIC.

    Args:
        gpus: Number of cards, divided between two sockets.
    """
    cards = [
        _gpu(i, f"0000:{0x11 + 0x10 * i:02x}:00.0", f"numa{2 * i // gpus}", "NVIDIA A10", 86, GEN4) for i in range(gpus)
    ]
    cpus = (_cpu(0, 0, "GenuineIntel", 0x6A, 32), _cpu(1, 1, "GenuineIntel", 0x6A, 32))
    nic = _nic("mlx5_0", "0000:e1:00.0", "numa0", 100e9, GEN4)
    return Machine(
        hostname="pcie_box", cpus=cpus, gpus=tuple(cards), nics=(nic,), links_known=True, sources=("preset",)
    )


def cpu_only() -> Machine:
    """Returns a server with two processors, without GPUs and with one Ethernet card."""
    cpus = tuple(_cpu(numa, numa, "AuthenticAMD", 0x11, 32) for numa in range(2))
    port = Port(name="eth0", interfaces=("eth0",), link_layer="Ethernet", bits_per_second=25e9, active=True)
    nic = Nic(key="0000:01:00.0", bus="0000:01:00.0", parent="numa0", vendor=0x14E4, ports=(port,), pcie=GEN4)
    return Machine(hostname="cpu_only", cpus=cpus, nics=(nic,), sources=("preset",))


def _sxm(machine: Machine, gpus: list[Gpu], bundles: tuple[int, ...]) -> Machine:
    """Returns the machine with GPUs that are joined by one NVSwitch per entry of `bundles` (links to that switch)."""
    nvswitches = tuple(NvSwitch(key=f"0000:{0xF0 + i:02x}:00.0") for i in range(len(bundles)))
    links = tuple(
        DeviceLink(
            a=gpu.key, b=switch.key, kind="nvlink", count=count, bytes_per_second=nvlink_bytes_per_second(gpu, count)
        )
        for gpu in gpus
        for switch, count in zip(nvswitches, bundles, strict=True)
    )
    name = "dgx_a100" if gpus[0].compute_capability == 80 else "dgx_h100"
    return replace(
        machine,
        hostname=name,
        gpus=tuple(gpus),
        nvswitches=nvswitches,
        links=links,
        links_known=True,
        sources=("preset",),
        virtual=False,
    )


def _cpu(numa: int, socket: int, vendor: str, model: int, cores: int) -> Cpu:
    span = f"{numa * cores}-{(numa + 1) * cores - 1}"
    return Cpu(
        key=f"numa{numa}", numa=numa, socket=socket, architecture="x86_64", vendor=vendor, model=model, cores=span
    )


def _switch(key: str, parent: str) -> PciSwitch:
    return PciSwitch(key=key, parent=parent, vendor=0x1000)


def _gpu(index: int, bus: str, parent: str, name: str, capability: int, pcie: PcieLink) -> Gpu:
    return Gpu(
        key=bus, bus=bus, parent=parent, index=index, name=name, vendor=0x10DE, class_code=0x030200,
        compute_capability=capability, gdr=True, pcie=pcie,
    )  # fmt: skip


def _nic(name: str, bus: str, parent: str, bits_per_second: float, pcie: PcieLink, *, efa: bool = False) -> Nic:
    link_layer, vendor, class_code, driver = (
        ("EFA", 0x1D0F, 0x020000, "efa") if efa else ("InfiniBand", 0x15B3, 0x020700, "mlx5_core")
    )
    port = Port(name=name, link_layer=link_layer, bits_per_second=bits_per_second, active=True, gdr=True)
    return Nic(
        key=bus, bus=bus, parent=parent, vendor=vendor, class_code=class_code, driver=driver, pcie=pcie, ports=(port,)
    )
