"""Verdicts, skips, causes and exit codes of whole runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.topology.gdr.example import GPU, GPU_PORT, NIC, NIC_PORT, ExampleMachine
from gradwire.topology.gdr.model import CheckOutcome, Finding, GdrCheck, Verdict
from gradwire.topology.gdr.runner import GdrReport, exit_code, nothing_to_check, run_checks, usable_gpus
from gradwire.topology.gdr.sources import HostInputs, opened_host
from gradwire.topology.readers.pci_config import ConfigSpace

Machine = ExampleMachine


@pytest.fixture
def machine(tmp_path: Path) -> ExampleMachine:
    return ExampleMachine(tmp_path)


def outcome(report: GdrReport, name: str) -> Finding:
    return next(result.finding for result in report.results if result.check.name == name)


def run(machine: ExampleMachine) -> tuple[GdrReport, int]:
    host = machine.host()
    report = run_checks(host)
    return report, exit_code(host, report)


def test_a_healthy_machine_passes_all_three(machine: ExampleMachine) -> None:
    host = machine.host()
    report = run_checks(host)
    assert exit_code(host, report) == 0 and report.cause is None
    assert {answer.outcome for answer in report.verdicts.values()} == {CheckOutcome.PASS}
    assert usable_gpus(host, report) == (1, 0, 1)


def test_the_first_cause_is_named_and_what_depends_on_it_is_skipped(machine: ExampleMachine) -> None:
    machine.remove("proc/driver", "sys/class/infiniband")
    machine.functions[GPU] = replace(machine.functions[GPU], driver=None)
    machine.functions[NIC] = replace(machine.functions[NIC], rdma_devices=())
    report, status = run(machine)
    assert status == 2 and report.cause is not None and report.cause.check.name == "G1"
    assert outcome(report, "M1").outcome is CheckOutcome.SKIPPED
    assert outcome(report, "M1").text.startswith("skipped because G1 failed")
    assert outcome(report, "M4").text.startswith("skipped because G1 failed"), "the root, not the link in between"
    assert outcome(report, "R2").text.startswith("skipped because R1 failed")
    assert outcome(report, "V1").outcome is CheckOutcome.PASS, "what does not depend on it still runs"


def test_verdicts_are_not_mixed(machine: ExampleMachine) -> None:
    """Possible and configured although a log shows staging; in use although nothing is known of the configuration."""
    machine.log = ["NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0"]
    report, status = run(machine)
    assert [report.verdicts[v].outcome for v in Verdict] == [CheckOutcome.PASS, CheckOutcome.PASS, CheckOutcome.FAIL]
    assert status == 2
    assert report.verdicts[Verdict.IN_USE].text.startswith("U3")


def test_a_gpu_whose_registration_failed_will_not_use_gdr(machine: ExampleMachine) -> None:
    machine.facts["registrations"] = [{"gpu": GPU, "device": "mlx5_0", "peermem_errno": 14, "dmabuf_errno": 95}]
    host = machine.host()
    assert usable_gpus(host, run_checks(host)) == (0, 0, 1)


def test_not_root_is_unknown_and_never_pass(machine: ExampleMachine) -> None:
    machine.write("proc/self/status", "Uid:\t1000\t1000\t0\t0\nCapEff:\t0\nCpus_allowed_list:\t0-63\n")
    for bus_id, function in machine.functions.items():
        machine.functions[bus_id] = replace(function, config=ConfigSpace(header_only=True))
    report, status = run(machine)
    assert outcome(report, "P5").outcome is CheckOutcome.UNKNOWN
    assert report.verdicts[Verdict.POSSIBLE].outcome is CheckOutcome.UNKNOWN and status == 3
    assert "P5" in report.verdicts[Verdict.POSSIBLE].text


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda m: m.write("sys/class/net/ens1/mtu", "1500") or m.facts.pop("active_mtu"), 1),
        (lambda m: setattr(m, "environment", None), 3),
        (lambda m: (m.__setattr__("environment", None), m.write("proc/cmdline", "numa=off")), 3),
        (lambda m: setattr(m, "log", []), 0),
        (lambda m: (m.__setattr__("log", []), m.facts.pop("registrations")), 3),
        (lambda m: (m.__setattr__("log", None), m.facts.pop("registrations")), 0),
        (lambda m: m.environment.update(NCCL_NET_GDR_LEVEL="LOC"), 2),
    ],
)
def test_exit_codes(machine: ExampleMachine, change: Callable[[ExampleMachine], object], status: int) -> None:
    change(machine)
    assert run(machine)[1] == status


def test_proof_that_was_asked_for_and_is_missing_is_unknown(machine: ExampleMachine) -> None:
    machine.log = None
    del machine.facts["registrations"]
    host = machine.host()
    report = run_checks(host)
    assert (exit_code(host, report), exit_code(host, report, asked_for_proof=True)) == (0, 3)


def test_acs_is_judged_on_the_way_between_the_two(machine: ExampleMachine) -> None:
    """A far NIC behind a redirecting port neither harms the near pair nor passes itself off as good."""
    config = machine.functions[NIC_PORT].config
    assert config is not None
    port = replace(machine.functions[NIC_PORT], bus_id="0000:02:02.0", config=replace(config, acs_control=0x1D))
    far = replace(machine.functions[NIC], bus_id="0000:05:00.0", parents=(port.bus_id, *(port.parents or ())))
    machine.functions |= {port.bus_id: port, far.bus_id: replace(far, rdma_devices=("mlx5_1",))}
    machine.write("sys/class/infiniband/mlx5_1/hca_type", "MT4129")
    machine.link("sys/class/infiniband/mlx5_1/device", f"sys/bus/pci/devices/{far.bus_id}")
    report, _ = run(machine)
    pairs = outcome(report, "P5").pairs
    assert pairs[GPU, NIC].outcome is CheckOutcome.PASS and pairs[GPU, far.bus_id].outcome is CheckOutcome.FAIL
    assert report.pairs[GPU, NIC][Verdict.POSSIBLE].outcome is CheckOutcome.PASS
    assert report.pairs[GPU, far.bus_id][Verdict.POSSIBLE].outcome is CheckOutcome.FAIL


def test_default_level_and_variable_decide_about_a_pair_through_the_host_bridge(machine: ExampleMachine) -> None:
    for bus_id, port in ((GPU, GPU_PORT), (NIC, NIC_PORT)):
        machine.functions[port] = replace(machine.functions[port], parents=())
        machine.functions[bus_id] = replace(machine.functions[bus_id], parents=(port,))
    report, status = run(machine)
    assert status == 2 and "PHB is beyond P2C, the default" in report.verdicts[Verdict.CONFIGURED].text
    assert report.verdicts[Verdict.POSSIBLE].outcome is CheckOutcome.WARN
    machine.environment = {"NCCL_NET_GDR_LEVEL": "PHB"}
    assert run(machine)[0].verdicts[Verdict.CONFIGURED].outcome is CheckOutcome.PASS
    machine.environment = {}
    machine.facts["gpus"][0]["c2c"] = True  # type: ignore[index]
    assert run(machine)[0].verdicts[Verdict.CONFIGURED].outcome is CheckOutcome.PASS, "Grace: P2C is within the default"
    machine.facts["nccl_version"] = "2.26.2"
    assert run(machine)[0].verdicts[Verdict.CONFIGURED].outcome is CheckOutcome.FAIL, "2.26 leaves C2C off"


def test_hidden_settings_are_found(machine: ExampleMachine) -> None:
    machine.write("etc/nccl.conf", "# site\nNCCL_IB_DISABLE=1\n")
    report, status = run(machine)
    assert status == 2 and outcome(report, "V1").text == "NCCL_IB_DISABLE=1 (/etc/nccl.conf)"
    machine.environment = {"NCCL_IB_DISABLE": "0"}
    assert outcome(run(machine)[0], "V1").outcome is CheckOutcome.PASS, "the process wins over the file"


def test_dmabuf_serves_without_peer_memory_and_the_other_way_round(machine: ExampleMachine) -> None:
    machine.remove("sys/module/nvidia_peermem", "sys/kernel/mm/memory_peers")
    report, status = run(machine)
    assert (
        status == 0 and "dma-buf" in outcome(report, "M1").text and outcome(report, "M2").outcome is CheckOutcome.INFO
    )
    machine.facts["kernel"] = "4.18.0"
    report, status = run(machine)
    assert status == 2 and "breaks at kernel" in outcome(report, "M1").text
    machine.write("sys/module/nvidia_peermem/version", "1")
    report, status = run(machine)
    assert status == 0 and outcome(report, "M3").outcome is CheckOutcome.INFO


def test_the_container_that_was_not_given_its_rdma(machine: ExampleMachine) -> None:
    machine.remove("dev/infiniband")
    machine.environment = {"KUBERNETES_SERVICE_HOST": "set"}
    report, status = run(machine)
    assert status == 2 and report.cause is not None and report.cause.check.name == "R2"
    assert "kubernetes was not given it" in report.cause.finding.text


def test_nothing_to_check(machine: ExampleMachine) -> None:
    del machine.functions[GPU]
    machine.log = None
    host = machine.host()
    report = run_checks(host)
    assert nothing_to_check(host) and not report.results and exit_code(host, report) == 3
    machine.log = ["NCCL INFO Using network Socket"]
    assert run(machine)[1] == 2, "a log is judged all the same"


def test_a_check_that_fails_itself_is_unknown(machine: ExampleMachine) -> None:
    def broken(host: object) -> Finding:
        raise ZeroDivisionError("oops")

    checks = [GdrCheck("X1", "broken", broken, Verdict.POSSIBLE)]
    report = run_checks(machine.host(), checks)
    assert (
        report.results[0].finding.outcome is CheckOutcome.UNKNOWN
        and "ZeroDivisionError" in report.results[0].finding.text
    )


def test_rdma_devices_without_a_home_are_unknown_and_the_second_port_of_a_bond_is_no_fault(
    machine: ExampleMachine,
) -> None:
    machine.functions[NIC] = replace(machine.functions[NIC], rdma_devices=())
    machine.remove("sys/class/infiniband/mlx5_0/device")
    assert outcome(run(machine)[0], "R1").outcome is CheckOutcome.UNKNOWN
    machine.remove("sys/class/infiniband")
    twin = replace(machine.functions[NIC], bus_id="0000:04:00.1", net_devices=())
    machine.functions |= {twin.bus_id: twin, NIC: replace(machine.functions[NIC], rdma_devices=("mlx5_bond_0",))}
    machine.write("sys/class/infiniband/mlx5_bond_0/hca_type", "MT41692")
    assert outcome(run(machine)[0], "R1").outcome is CheckOutcome.PASS


def test_in_a_container_only_the_gpus_it_was_given_count(machine: ExampleMachine) -> None:
    twin = replace(machine.functions[GPU], bus_id="0000:03:00.1")
    machine.functions[twin.bus_id] = twin
    assert len(machine.host().gpus) == 2, "on the host a GPU that NVML lacks is a finding"
    machine.write(".dockerenv", "")
    assert [gpu.bus_id for gpu in machine.host().gpus] == [GPU]


@pytest.mark.parametrize(
    ("counts", "status", "words"),
    [
        ((18, 18), 0, "18 NVLinks active on each of 2"),
        ((18, 17), 1, "GPU 1 has 17 of 18"),
        ((0, 0), 1, "GPU 0 has none active"),
    ],
)
def test_a_status_of_nvlinks_is_judged_where_there_is_nothing_else(
    counts: tuple[int, ...], status: int, words: str, tmp_path: Path
) -> None:
    text = "".join(f"GPU {i}: H100\n" + "\t Link 0: 26.562 GB/s\n" * count for i, count in enumerate(counts))
    (tmp_path / "status").write_text(text)
    (tmp_path / "root/sys/class").mkdir(parents=True)
    for root in (tmp_path / "root", tmp_path):  # a host without a PCI bus, and one that cannot be seen at all
        with opened_host(HostInputs(root=root, nvlink=tmp_path / "status")) as host:
            report = run_checks(host)
            assert words in outcome(report, "G7").text
            assert report.nothing == "" or exit_code(host, report) == status
