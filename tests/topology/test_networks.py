"""Cards with a network of their own: which one, and what gdr-check says of a machine with it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.topology.assign import nics_of_gpus
from gradwire.topology.fabric import NETWORK_SECONDS, fabric_of
from gradwire.topology.gdr.example import NIC, ExampleMachine
from gradwire.topology.gdr.stages import CHECKS
from gradwire.topology.graph import Nic, Port
from gradwire.topology.networks import CARDS, family_of, network_of, rdma_ports
from gradwire.topology.pci_ids import AMAZON, BROADCOM, CORNELIS, CRAY, GOOGLE, HPE, INTEL
from gradwire.topology.presets import gh200

INFINIBAND, ETHERNET = 0x020700, 0x020000
SEEN = {
    "Cassini 1": (CRAY, 0x0501, ETHERNET, Port(name="cxi0", interfaces=("hsn0",), link_layer="Ethernet"), "slingshot"),
    "Cassini 2": (HPE, 0x0371, ETHERNET, Port(name="cxi0"), "slingshot"),
    "Cassini of InfiniBand's class": (HPE, 0x0371, INFINIBAND, Port(name="cxi0"), "slingshot"),
    "Cassini in a file of hwloc": (CRAY, 0x0501, ETHERNET, Port(name="hsn0", interfaces=("hsn0",)), "slingshot"),
    "EFA": (AMAZON, 0xEFA2, ETHERNET, Port(name="rdmap16s27"), "efa"),
    "ENA": (AMAZON, 0xEC20, ETHERNET, Port(name="ens32", interfaces=("ens32",)), "tcp"),
    "Omni-Path 100": (INTEL, 0x24F0, 0x020800, Port(name="hfi1_0", link_layer="InfiniBand"), "omnipath"),
    "CN5000": (CORNELIS, 0x0001, 0x020700, Port(name="hfi2_0", link_layer="InfiniBand"), "omnipath"),
    "E810": (INTEL, 0x1592, ETHERNET, Port(name="irdma0", interfaces=("ens1",), link_layer="Ethernet"), "roce"),
    "Thor": (BROADCOM, 0x1750, ETHERNET, Port(name="bnxt_re0", interfaces=("ens1",), link_layer="Ethernet"), "roce"),
    "Thor without bnxt_re": (BROADCOM, 0x1750, ETHERNET, Port(name="ens1", interfaces=("ens1",)), "tcp"),
    "gVNIC": (GOOGLE, 0x0042, ETHERNET, Port(name="eth1", interfaces=("eth1",)), "tcp"),
}  # fmt: skip
"""Card -> vendor and device, class, port as a reader gives it, kind of network."""


@pytest.mark.parametrize("card", SEEN)
def test_a_card_has_its_own_network(card: str) -> None:
    vendor, device, code, port, wanted = SEEN[card]
    nic = Nic(key="n", vendor=vendor, device=device, class_code=code, ports=(port,))
    assert network_of(nic) == wanted in NETWORK_SECONDS
    assert rdma_ports(nic) == ([] if wanted == "tcp" else [port])
    if wanted not in ("tcp", "roce"):  # a list of PCI functions shows no port at all
        assert network_of(replace(nic, ports=())) == wanted


def test_every_row_is_found_by_its_ids() -> None:
    for card in CARDS:
        assert family_of(card.vendor, next(iter(card.devices or (1,))), card.driver) is card
        assert card.plugin is None or card.plugin.net


def test_gpus_take_slingshot_before_a_faster_ethernet_card() -> None:
    node = gh200()
    ethernet = Nic(key="e", parent="numa0", ports=(Port(name="e0", interfaces=("e0",), bits_per_second=400e9),))
    chosen = nics_of_gpus(replace(node, nics=(ethernet, *node.nics)))
    assert {nic.key for nic in chosen.values() if nic is not None} == {nic.key for nic in node.nics}
    fabric = fabric_of(node)
    assert fabric is not None
    assert (fabric.network, fabric.network_seconds) == ("slingshot", 0.0)


Found = dict[str, tuple[str, str]]


def found_of(tmp_path: Path, function: dict[str, object], names: Sequence[str], **environment: str) -> Found:
    """Check -> (outcome, words) of a machine without nvidia_peermem, whose card is this one."""
    machine = ExampleMachine(tmp_path)
    machine.remove("sys/module/nvidia_peermem", "sys/kernel/mm/memory_peers")
    machine.facts.update(verbs_dmabuf=False, nccl_plugin=function.pop("plugin", True))
    machine.functions[NIC] = replace(machine.functions[NIC], **function)  # type: ignore[arg-type]
    machine.environment = environment
    host = machine.host()
    checks = {check.name: check.find(host) for check in CHECKS if check.name in names}
    return {name: (str(each.outcome), f"{each.text} {each.fix}") for name, each in checks.items()}


CASSINI = {"vendor": CRAY, "device": 0x0501, "driver": "cxi_ss1"}
EFA = {"vendor": AMAZON, "device": 0xEFA1, "driver": "efa"}
OMNI_PATH = {"vendor": INTEL, "device": 0x24F0, "driver": "hfi1"}
THOR = {"vendor": BROADCOM, "device": 0x1750, "driver": "bnxt_en"}


@pytest.mark.parametrize(("card", "module"), [(CASSINI, "cxi_ss1"), (EFA, "efa"), (OMNI_PATH, "hfi1")])
def test_a_driver_that_asks_the_gpus_own_needs_no_peer_memory(
    tmp_path: Path, card: dict[str, object], module: str
) -> None:
    found = found_of(tmp_path, dict(card), ("M1", "M2", "M3", "M4", "P8"))
    assert {name: outcome for name, (outcome, _) in found.items()} == {
        "M1": "pass", "M2": "info", "M3": "info", "M4": "info", "P8": "info",
    }  # fmt: skip
    assert f"{module} asks the GPU's driver" in found["M1"][1]


def test_a_card_with_verbs_needs_one(tmp_path: Path) -> None:
    found = found_of(tmp_path, dict(THOR), ("M1", "M2", "M7"))
    assert {name: outcome for name, (outcome, _) in found.items()} == {"M1": "fail", "M2": "fail", "M7": "pass"}


@pytest.mark.parametrize(("card", "words"), [
    (CASSINI, ("NCCL would use sockets", "install aws-ofi-nccl, built for HPE's libfabric")),
    (EFA, ("NCCL would use sockets", "install aws-ofi-nccl")),
    (OMNI_PATH, ("verbs, which pass through the kernel", "opx, or psm2-nccl")),
])  # fmt: skip
def test_what_the_plugin_is_and_what_nccl_does_without_it(
    tmp_path: Path, card: dict[str, object], words: Sequence[str]
) -> None:
    outcome, text = found_of(tmp_path, card | {"plugin": False}, ("M7",))["M7"]
    assert outcome == "fail"
    assert all(each in text for each in words), text


@pytest.mark.parametrize(("card", "name", "variables", "outcome", "words"), [
    (CASSINI, "V1", {"NCCL_IB_DISABLE": "1"}, "pass", ""),  # concerns verbs alone
    (THOR, "V1", {"NCCL_IB_DISABLE": "1"}, "fail", "NCCL_IB_DISABLE=1"),
    (CASSINI, "V1", {"NCCL_NET": "IB"}, "fail", "Slingshot is no network of NCCL's own"),
    (CASSINI, "V1", {"NCCL_NET": "Socket"}, "fail", "the RDMA network (AWS Libfabric)"),
    (CASSINI, "V1", {"NCCL_NET": "AWS Libfabric"}, "pass", ""),
    (CASSINI, "V1", {"NCCL_NET_PLUGIN": "none"}, "fail", "Slingshot needs the plugin"),
    (CASSINI, "V9", {"FI_PROVIDER": "tcp"}, "warn", "Slingshot NICs are not used unset it, or FI_PROVIDER=cxi"),
    (CASSINI, "V9", {"FI_PROVIDER": "cxi"}, "pass", ""),
    (CASSINI, "V9", {"FI_PROVIDER": "shm,cxi"}, "pass", ""),
    (CASSINI, "V9", {"FI_PROVIDER": "^tcp"}, "pass", ""),
    (CASSINI, "V9", {"FI_PROVIDER": "^cxi"}, "warn", "not used"),
    (OMNI_PATH, "V9", {"FI_PROVIDER": "psm2"}, "pass", ""),
    (OMNI_PATH, "V9", {"FI_PROVIDER": "verbs"}, "warn", "FI_PROVIDER=opx"),
    (THOR, "V9", {"NCCL_NET": "GPUDirectTCPX_v7"}, "fail", "without its NCCL_GPUDIRECTTCPX_ profile"),
    (THOR, "V9", {"NCCL_NET": "GPUDirectTCPX_v7", "NCCL_GPUDIRECTTCPX_CTRL_DEV": "eth0"}, "pass", ""),
])  # fmt: skip
def test_settings_are_judged_by_the_card(
    tmp_path: Path, card: dict[str, object], name: str, variables: dict[str, str], outcome: str, words: str
) -> None:
    found = found_of(tmp_path, dict(card), (name,), **variables)[name]
    assert found[0] == outcome and words in found[1], found


def test_gvnic_is_no_rdma_card_and_its_plugins_are_named(tmp_path: Path) -> None:
    machine = ExampleMachine(tmp_path)
    machine.remove("sys/class/infiniband")
    gvnic = {"vendor": GOOGLE, "device": 0x0042, "driver": "gvnic", "rdma_devices": ()}
    machine.functions[NIC] = replace(machine.functions[NIC], **gvnic)  # type: ignore[arg-type]
    found = next(check for check in CHECKS if check.name == "R1").find(machine.host())
    assert found.outcome == "fail"
    assert "gVNIC has no RDMA" in found.text and "a3-highgpu" in found.fix and "a3-megagpu" in found.fix
    assert "use nodes with" not in found.fix


def test_slingshot_that_shows_itself_in_verbs_as_well_is_one_card(tmp_path: Path) -> None:
    machine = ExampleMachine(tmp_path)
    machine.functions[NIC] = replace(machine.functions[NIC], **CASSINI)  # type: ignore[arg-type]
    machine.link("sys/class/cxi/cxi0/device", f"sys/bus/pci/devices/{NIC}")
    [nic] = machine.host().nics
    assert [(device.name, device.verbs) for device in nic.devices] == [("cxi0", False)]
