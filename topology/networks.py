"""The cards that connect machines, by their PCI ids: which network each has, and what NCCL needs to use it.

A card of `CARDS` without a network of its own has InfiniBand or RoCE, by the link layer of its ports; one that is not
in the table, too, if it has an RDMA device. A further card is a further row.
"""

from collections.abc import Collection
from dataclasses import dataclass

from gradwire.topology.graph import Nic, Port
from gradwire.topology.pci_ids import (
    AMAZON,
    BROADCOM,
    CHELSIO,
    CORNELIS,
    CRAY,
    GOOGLE,
    HPE,
    INTEL,
    MELLANOX,
    PENSANDO,
)

INFINIBAND_CLASS = 0x0207
"""PCI class and sub-class of InfiniBand. Source: PCI Code and ID Assignment Specification 1.11."""

THUNDERBOLT_DRIVER = "thunderbolt-net"
"""Driver of the network interface of Thunderbolt and USB4. Source: Linux drivers/net/thunderbolt/main.c."""

THUNDERBOLT_BITS_PER_SECOND = 10e9
"""What TCP reaches over one cable of Thunderbolt or USB4, whose driver says the rate of the cable, 20 or 40 Gbit/s a
direction, or none (Linux up to 6.18). Source: geerlingguy/ai-benchmarks issue 21 and rccl issue 2118 (10 Gb/s between
Framework Desktops); blog.hellas.ai, thunderbolt-ibverbs (9 Gb/s, 2026): all of Strix Halo, none of other controllers.
"""


@dataclass(frozen=True, slots=True)
class Plugin:
    """Describes the plug-in by which NCCL uses a network that its own code does not reach.

    Attributes:
        name: What is to be installed, in words.
        net: Value of NCCL_NET that asks for it, or the part of it before the version.
        providers: Providers of libfabric that it may use, the right one first; empty if it uses no libfabric.
        without: What NCCL uses without it, in words.
        settings: How the names of its own variables begin, without which it does not work; empty if it needs none.
    """

    name: str
    net: str
    providers: tuple[str, ...] = ()
    without: str = "sockets"
    settings: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFamily:
    """Describes network cards that are alike for NCCL.

    Attributes:
        title: Name in sentences.
        vendor: PCI vendor id.
        devices: PCI device ids; None for all network functions of the vendor.
        driver: Driver of those functions that can do RDMA; None if all can.
        network: Kind of network, a key of `fabric.NETWORK_SECONDS`; None if the ports' link layer decides.
        module: Kernel module that makes an RDMA device of the function; empty if none does.
        plugin: How NCCL uses the card; None if its own verbs do, without a plug-in.
        pins: Whether the driver asks the GPU's driver itself for the memory of a GPU, so that neither nvidia_peermem
            nor verbs with dma-buf are needed.
    """

    title: str
    vendor: int
    devices: Collection[int] | None = None
    driver: str | None = None
    network: str | None = None
    module: str = ""
    plugin: Plugin | None = None
    pins: bool = False


_E810 = frozenset((0x1591, 0x1592, 0x1593, 0x1599, 0x159A, 0x159B, 0x579C, 0x579D, 0x579E, 0x579F))
_EFA = Plugin("aws-ofi-nccl", "AWS Libfabric", ("efa",))
_CXI = Plugin("aws-ofi-nccl, built for HPE's libfabric", "AWS Libfabric", ("cxi",))
_OPX = Plugin(
    "aws-ofi-nccl over libfabric's opx, or psm2-nccl", "AWS Libfabric", ("opx", "psm2"),
    "the card's verbs, which pass through the kernel and do not reach GPU memory",
)  # fmt: skip
TCPX = Plugin("GPUDirect-TCPX with its daemon (a3-highgpu)", "GPUDirectTCPX", settings="NCCL_GPUDIRECTTCPX_")
TCPXO = Plugin("GPUDirect-TCPXO with its daemon (a3-megagpu)", "FasTrak", settings="NCCL_FASTRAK_")

CARDS = (
    CardFamily(title="ConnectX", vendor=MELLANOX, module="mlx5_ib"),
    CardFamily(title="Broadcom NetXtreme-E", vendor=BROADCOM, driver="bnxt_en", module="bnxt_re"),
    CardFamily(title="Intel E810", vendor=INTEL, devices=_E810, module="irdma"),
    CardFamily(title="Chelsio", vendor=CHELSIO, module="iw_cxgb4"),
    CardFamily(title="Pollara", vendor=PENSANDO, module="ionic_rdma"),
    CardFamily(title="EFA", vendor=AMAZON, devices=range(0xEFA0, 0xEFA4), network="efa", module="efa", plugin=_EFA,
               pins=True),
    CardFamily(title="Slingshot", vendor=CRAY, network="slingshot", module="cxi_ss1", plugin=_CXI, pins=True),
    CardFamily(title="Slingshot", vendor=HPE, devices=(0x0371,), network="slingshot", module="cxi_ss1", plugin=_CXI,
               pins=True),
    CardFamily(title="Omni-Path", vendor=INTEL, devices=(0x24F0, 0x24F1), network="omnipath", module="hfi1",
               plugin=_OPX, pins=True),
    CardFamily(title="Omni-Path", vendor=CORNELIS, devices=(0x0001,), network="omnipath", module="hfi2", plugin=_OPX,
               pins=True),
    CardFamily(title="gVNIC", vendor=GOOGLE, devices=(0x0042,), network="tcp", plugin=TCPX),
)  # fmt: skip
"""The known cards, a row for each kind; the first that fits counts.

Source: Linux ice_devids.h (E810, E825), efa_main.c (generations 1 to 4), hfi1 and hfi2 (Omni-Path), gve.h (gVNIC); HPE
shs-cxi-driver (Cassini 1 and 2; cass_nvidia_gpu.c asks NVIDIA's driver); aws-ofi-nccl README; Cornelis psm2-nccl
README; Google Cloud, GPU networking (GPUDirect-TCPX and TCPXO)."""


def interface_bits_per_second(driver: str | None, stated: float | None) -> float | None:
    """Returns the rate of a network interface that plans may rely on: what its driver states, but for Thunderbolt's.

    Args:
        driver: Name of its driver; None if the source does not say it.
        stated: Rate that the driver states, in bits per second; None if it states none.
    """
    if driver != THUNDERBOLT_DRIVER:
        return stated
    return min(stated or THUNDERBOLT_BITS_PER_SECOND, THUNDERBOLT_BITS_PER_SECOND)


def family_of(vendor: int | None, device: int | None, driver: str | None = None) -> CardFamily | None:
    """Returns the row of `CARDS` of a PCI function; None if there is none, or if it may be another card.

    Args:
        vendor: PCI vendor id.
        device: PCI device id; None if the source does not say it.
        driver: Name of its driver; None if it has none, or the source does not say it.
    """
    return next(
        (
            card
            for card in CARDS
            if card.vendor == vendor
            and (card.devices is None or device in card.devices)
            and card.driver in (None, driver)
        ),
        None,
    )


def rdma_ports(nic: Nic) -> list[Port]:
    """Returns the ports of a NIC that NCCL uses with RDMA in hardware: InfiniBand, RoCE, EFA, Slingshot, Omni-Path.

    A Slingshot card is known by its PCI ids: few sources show more than its Ethernet interface.
    """
    family = family_of(nic.vendor, nic.device)
    named = family is not None and family.network not in (None, "tcp")
    return [port for port in nic.ports if not port.virtual and (named or port.name not in port.interfaces)]


def network_of(nic: Nic) -> str:
    """Returns the kind of network of a NIC: that of its card, else by class or link layer; `tcp` without RDMA.

    Args:
        nic: NIC of a machine.

    Returns:
        A key of `fabric.NETWORK_SECONDS`.
    """
    family = family_of(nic.vendor, nic.device)
    if family is not None and family.network is not None:
        return family.network
    if (nic.class_code or 0) >> 8 == INFINIBAND_CLASS:
        return "infiniband"
    rdma = rdma_ports(nic)
    if not rdma:
        return "tcp"
    return "infiniband" if any(port.link_layer == "InfiniBand" for port in rdma) else "roce"
