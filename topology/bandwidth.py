"""Bytes per second of the links in a machine, one direction, as NCCL's own model has them.

Source: NCCL v2.30 src/graph/topo.h (NVLink, PCIe and inter-socket figures, in GB/s) unless a constant says otherwise.
They are what a collective can use, not the figures of a data sheet: PCIe 4.0 x16 is 31.5 GB/s on paper and 24 here.
"""

import re
from typing import Literal

from gradwire.topology.graph import Cpu, Gpu, Nic, PcieLink, Port
from gradwire.topology.pci_ids import AMD_GPU

GIGABYTE = 1e9

NVLINK_PER_LINK = {60: 18.0, 70: 20.0, 80: 20.0, 86: 12.0, 90: 20.6, 100: 40.1}
"""Compute capability -> GB/s of one NVLink; a capability in between takes the entry below it, except 86."""
UNKNOWN_NVLINKS = frozenset({107})
"""Compute capabilities in that table's range whose NVLink is another one, without a figure in NCCL 2.30: Rubin."""

XGMI_PER_LINK = {"gfx906": 24.0, "gfx908": 24.0, "gfx90a": 36.0, "910": 36.0, "gfx940": 48.0, "gfx942": 48.0,
                 "gfx950": 48.0}  # fmt: skip
"""AMD architecture -> GB/s of one xGMI link. Source: RCCL src/graph/topo.h (VEGA, MI200, GFX94X and GFX95X widths)."""

PCIE_PER_LANE = {2.5: 15, 5.0: 30, 8.0: 60, 16.0: 120, 32.0: 240, 64.0: 480}
"""GT/s -> 100 Mbit/s steps of one lane; GB/s = lanes * step / 80. Source: NCCL src/graph/topo.cc, kvDictPciGen."""

CARD_MEMORY = (
    ("T4", 320.0), ("V100S?", 900.0), ("A100.*40GB", 1555.0), ("A[18]00", 2039.0), ("A30", 933.0), ("A40", 696.0),
    ("A10G?", 600.0), ("RTX A6000", 768.0), ("RTX 3090", 936.0), ("Orin", 205.0), ("RTX 4090", 1008.0),
    ("RTX 6000 Ada", 960.0), ("L40S?", 864.0), ("L4", 300.0), ("H100 PCIe", 2039.0), ("H100 NVL", 3938.0),
    ("H[18]00", 3350.0), ("H200", 4800.0), ("H20", 4000.0), ("GH200 144G.*", 4900.0), ("GH200", 4000.0),
    ("G?B[23]00", 8000.0), ("GB10", 273.0), ("RTX 5090", 1792.0), ("RTX PRO 6000.*Server Edition", 1597.0),
    ("RTX PRO 6000", 1792.0), ("RTX PRO 5000", 1344.0), ("RTX PRO 4500", 896.0), ("RTX 5080", 960.0),
    ("MI2[15]0X?", 1638.0), ("MI30(0A|0X|8X)", 5300.0), ("MI325X", 6000.0), ("MI35[05]X", 8000.0), ("W7900", 864.0),
)  # fmt: skip
"""(pattern in a card's name, GB/s of its memory); the first that fits counts, before the generation. MI250X: the half
of a card that the driver shows as a GPU. Source: data sheets of NVIDIA and AMD."""

GPU_MEMORY = {75: (320.0, "T4"), 80: (2040.0, "A100 80GB"), 86: (600.0, "A10"), 89: (864.0, "L40S"),
              90: (3350.0, "H100 SXM"), 100: (8000.0, "B200"), 110: (273.0, "Thor"), 120: (1792.0, "RTX 5090"),
              121: (273.0, "GB10")}  # fmt: skip
"""Compute capability -> (GB/s of a card's memory where neither driver nor name tell it, the card with that memory).
One in between takes the entry below it. Source: NVIDIA's data sheets."""

AMD_MEMORY = {"gfx908": (1229.0, "MI100"), "910": (1638.0, "MI210"), "gfx90a": (1638.0, "MI210"),
              "gfx942": (5300.0, "MI300X"), "gfx950": (8000.0, "MI355X"), "gfx1100": (960.0, "RX 7900 XTX"),
              "gfx1151": (256.0, "Radeon 8060S"), "gfx1201": (640.0, "R9700")}  # fmt: skip
"""AMD architecture -> the same; an MI210 is half an MI250X, which the driver shows as a GPU. ROCm's memory clock counts
neither of the two doublings of HBM3 in one way. Source: AMD's data sheets."""

INTEL_SOCKETS = ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0), (0, 6.0))
"""(lowest model number, GB/s between two sockets), newest first."""
AMD_SOCKETS, ARM_SOCKETS, POWER9_SOCKETS = 16.0, 6.0, 32.0

AlphaKind = Literal["nvlink", "pcie", "network"]
ALPHA_SECONDS: dict[AlphaKind, float] = {"nvlink": 3.4e-6, "pcie": 5.7e-6, "network": 14.0e-6}
"""Seconds of one ring step with the Simple protocol. Source: NCCL v2.28 src/graph/tuning.cc, hwLatencies."""


def pcie_bytes_per_second(link: PcieLink | None) -> float | None:
    """Returns the rate of a PCIe link; None if its speed or width is unknown or belongs to an emulated bridge.

    Args:
        link: Rate and width of the link.
    """
    if link is None or link.virtual or link.gigatransfers_per_second is None or not link.lanes:
        return None
    step = PCIE_PER_LANE.get(link.gigatransfers_per_second)
    return None if step is None else link.lanes * step / 80 * GIGABYTE


def memory_bytes_per_second(gpu: Gpu) -> float:
    """Returns the peak bandwidth of a GPU's memory: the driver's figure, else a data sheet's of its card or generation.

    Args:
        gpu: The GPU; if its generation is unknown, the slowest card of its maker's table is assumed.
    """
    return memory_of(gpu)[0]


def memory_of(gpu: Gpu) -> tuple[float, str]:
    """Returns the peak bandwidth of a GPU's memory, and the known card whose figure it is; see the function above.

    Args:
        gpu: The GPU.

    Returns:
        (Bytes per second, name of another card that was assumed). The name is empty if the figure is the GPU's own.
    """
    if gpu.memory_bytes_per_second:
        return gpu.memory_bytes_per_second, ""
    named = [rate for card, rate in CARD_MEMORY if re.search(rf"\b{card}\b", gpu.name or "")]
    if named:
        return named[0] * GIGABYTE, ""
    if gpu.vendor == AMD_GPU or gpu.architecture:  # its capability is a number of another kind
        rate, card = AMD_MEMORY.get(gpu.architecture or "", min(AMD_MEMORY.values()))
    else:
        known = [entry for capability, entry in GPU_MEMORY.items() if capability <= (gpu.compute_capability or 0)]
        rate, card = known[-1] if known else min(GPU_MEMORY.values())
    return rate * GIGABYTE, "" if card in (gpu.name or "") else card


def nvlink_bytes_per_second(gpu: Gpu, count: int) -> float | None:
    """Returns the rate of a bundle of NVLinks of a GPU, or None for an unknown generation.

    Args:
        gpu: GPU whose compute capability decides the rate of a link.
        count: Number of links in the bundle.
    """
    capability = gpu.compute_capability
    if capability is None or capability < 60 or capability in UNKNOWN_NVLINKS:
        return None
    best = 86 if capability == 86 else max(known for known in NVLINK_PER_LINK if known <= capability and known != 86)
    return NVLINK_PER_LINK[best] * count * GIGABYTE


def xgmi_bytes_per_second(gpu: Gpu, count: int) -> float | None:
    """Returns the rate of a bundle of xGMI links of a GPU, or None for an unknown architecture.

    Args:
        gpu: GPU whose architecture decides the rate of a link.
        count: Number of links in the bundle.
    """
    per_link = XGMI_PER_LINK.get(gpu.architecture or "")
    return None if per_link is None else per_link * count * GIGABYTE


def socket_bytes_per_second(cpu: Cpu) -> float | None:
    """Returns the rate between this NUMA node and one on another socket, or None for an unknown processor.

    Args:
        cpu: NUMA node whose architecture, vendor and model decide the rate.
    """
    if cpu.architecture == "arm64":
        return ARM_SOCKETS * GIGABYTE
    if cpu.architecture == "ppc64":
        return POWER9_SOCKETS * GIGABYTE
    if cpu.vendor == "AuthenticAMD":
        return AMD_SOCKETS * GIGABYTE
    if cpu.vendor == "GenuineIntel" and cpu.model is not None:
        model = cpu.model
        return next(rate for lowest, rate in INTEL_SOCKETS if model >= lowest) * GIGABYTE
    return None


def port_bytes_per_second(port: Port) -> float | None:
    """Returns a port's line rate in bytes per second.

    Args:
        port: Network port.

    Returns:
        None if the rate is unknown or a virtual driver's, or if the port is down or in reserve.
    """
    if port.virtual or not port.carries or not port.bits_per_second:
        return None
    return port.bits_per_second / 8


def nic_bytes_per_second(nic: Nic) -> float | None:
    """Returns the rate at which a NIC can send: the sum of its ports, but no more than its PCIe link carries.

    Args:
        nic: NIC with its ports.

    Returns:
        Bytes per second; None if no port that is up reports its rate.
    """
    rates = [rate for rate in map(port_bytes_per_second, nic.ports) if rate is not None]
    if not rates:
        return None
    pcie = pcie_bytes_per_second(nic.pcie)
    return sum(rates) if pcie is None else min(sum(rates), pcie)
