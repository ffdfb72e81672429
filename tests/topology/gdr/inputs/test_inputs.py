"""Smaller inputs: environment, nccl.conf, facts, texts of other tools, RDMA devices, comparison."""

from pathlib import Path

import pytest

from gradwire.topology.gdr.compare import differences
from gradwire.topology.gdr.inputs.environment import merge, parse_environment, parse_nccl_conf, read_environment
from gradwire.topology.gdr.inputs.facts import GpuFacts, HostFacts, facts_from_json
from gradwire.topology.gdr.inputs.files import Files
from gradwire.topology.gdr.inputs.texts import parse_nvlink_status, parse_perftest
from gradwire.topology.gdr.nccl import name_matches
from gradwire.topology.gdr.process_context import read_process_context
from gradwire.topology.gdr.rdma import Gid, gigabits, pcie_gigabits, read_rdma_devices
from gradwire.topology.readers.affinity import members
from gradwire.topology.readers.pci import PciTree

SHARED = Path(__file__).resolve().parents[4].parent / "shared" / "fixtures"
real = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no {SHARED}")


def test_only_variables_of_the_network_pass() -> None:
    kept = read_environment(
        {"NCCL_DEBUG": "INFO", "PASSWORD": "x", "FI_PROVIDER": "efa", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    )
    assert kept == {"FI_PROVIDER": "efa", "NCCL_DEBUG": "INFO", "KUBERNETES_SERVICE_HOST": "set"}
    assert (
        parse_environment("A=1\0NCCL_NET=IB\0") == parse_environment("A=1\nNCCL_NET=IB\nbroken") == {"NCCL_NET": "IB"}
    )


def test_the_process_wins_over_files_and_the_first_file_over_the_second() -> None:
    first, second = parse_nccl_conf("# NCCL_X=0\nNCCL_A=1 \nNCCL_B=1"), {"NCCL_B": "2", "NCCL_C": "2"}
    settings = merge({"NCCL_A": "0"}, {"~/.nccl.conf": first, "/etc/nccl.conf": second})
    assert {name: (s.value, s.source) for name, s in settings.items()} == {
        "NCCL_A": ("0", "environment"),
        "NCCL_B": ("1", "~/.nccl.conf"),
        "NCCL_C": ("2", "/etc/nccl.conf"),
    }


def test_facts_survive_json_and_refuse_other_kinds() -> None:
    facts = facts_from_json(
        {"kernel": "6", "cuda_version": 12040, "gpus": [{"bus_id": "x", "mig": False}], "kernel_log": ["a"]}
    )
    assert facts.gpus == (GpuFacts(bus_id="x", mig=False),) and facts.kernel_log == ("a",)
    assert facts_from_json(facts.to_json() | {"gpus": [{"bus_id": "x", "mig": False}], "kernel_log": ["a"]}) == facts
    strange = {
        "kernel": 6,
        "cuda_version": "12",
        "gpus": {"a": 1},
        "kernel_log": "a",
        "verbs_dmabuf": 1,
        "active_mtu": [1],
    }
    assert facts_from_json(strange) == HostFacts() == facts_from_json([]) == facts_from_json({"gpus": None, 3: 4})
    assert facts_from_json({"gpus": [1, {"bus_id": 7}]}).gpus == (GpuFacts(),)


@real
def test_nvlink_status_of_real_machines() -> None:
    assert parse_nvlink_status((SHARED / "nvlink_status/azure-good_nvlink_status.txt").read_text()) == {7: 12}
    assert parse_nvlink_status((SHARED / "nvlink_status/azure-bad_nvlink_status.txt").read_text()) == {6: 0}
    assert parse_nvlink_status("GPU x\n") == {}


def test_perftest_tables() -> None:
    head = " #bytes     #iterations    BW peak[{0}]    BW average[{0}]   MsgRate[Mpps]\n"
    assert parse_perftest(head.format("Gb/sec") + " 65536  5000  394.1  390.5  0.74\n") == 390.5
    assert parse_perftest(head.format("MiB/sec") + " 65536  5000  1000.0  1000.0  0.74\n") == pytest.approx(8.388608)
    assert parse_perftest("cheese") is None


@real
def test_rdma_devices_of_a_real_h100(tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/infiniband"
    folder.parent.mkdir(parents=True)
    for source in (SHARED / "sys-class-infiniband-h100").rglob("*"):
        if source.is_file():
            place = folder / source.relative_to(SHARED / "sys-class-infiniband-h100")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(source.read_bytes())
    devices = read_rdma_devices(Files(tmp_path), PciTree())
    assert devices is not None and len(devices) == 9
    rates = {
        (device.name == "mlx5_bond_0", p.link_layer, p.gigabits, p.state) for device in devices for p in device.ports
    }
    assert rates == {(False, "InfiniBand", 400.0, "ACTIVE"), (True, "Ethernet", 200.0, "ACTIVE")}


@pytest.mark.parametrize(
    ("value", "name", "expected"),
    [
        ("mlx5_1", "mlx5_10", True),
        ("=mlx5_1", "mlx5_10", False),
        ("=mlx5_1:1", "mlx5_1", True),
        ("^mlx5_1", "mlx5_10", False),
        ("^=mlx5_1", "mlx5_10", True),
        ("", "mlx5_1", False),
    ],
)
def test_device_lists(value: str, name: str, expected: bool) -> None:
    assert name_matches(value, name) is expected


def test_small_parsers() -> None:
    assert members("0-2,7") == [0, 1, 2, 7] and members("x") == [] == members("")
    assert gigabits("400 Gb/sec (4X NDR)") == 400 and gigabits("fast") is None
    assert round(pcie_gigabits(16, 16)) == 252 and pcie_gigabits(2.5, 1) == 2
    scopes = [Gid(0, gid, "", "").scope for gid in ("fe80:0::1", "0000:0000", "2001:db8:0:0:0:0:0:1")]
    assert scopes == ["link-local", "empty", "ipv6"]


def test_comparison_without_majority_and_of_foreign_json() -> None:
    two = [
        {"name": "a", "checks": [{"id": "M1", "outcome": "pass"}]},
        {"name": "b", "checks": [{"id": "M1", "outcome": "fail"}]},
    ]
    assert differences(two) == ["M1: pass on a; fail on b"]
    assert differences([{"name": 1}, {"checks": 7}, {"checks": [1, {"id": None}]}])
    assert differences([]) == []


def test_place(tmp_path: Path) -> None:
    assert str(read_process_context(Files(tmp_path), False)) == "user unknown, container unknown, machine unknown"
    (tmp_path / "proc/1").mkdir(parents=True)
    (tmp_path / "proc/1/cgroup").write_text("12:cpu:/kubepods/burstable/podabc\n")
    assert read_process_context(Files(tmp_path), False).container == "kubernetes"
    for text, expected in (("0::/init.scope\n", ""), ("0::/\n", None), ("0::/system.slice/docker-1.scope\n", "docker")):
        (tmp_path / "proc/1/cgroup").write_text(text)
        assert read_process_context(Files(tmp_path), False).container == expected
