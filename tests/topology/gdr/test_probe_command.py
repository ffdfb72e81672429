"""`gradwire gdr-check --prove` from the drivers' calls to table and exit code, on a healthy machine with stand-ins."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.cli import gdr_check
from gradwire.topology.gdr import sources
from gradwire.topology.gdr.example import ExampleMachine
from gradwire.topology.gdr.inputs import collect
from gradwire.topology.gdr.inputs.child import run_child
from gradwire.topology.gdr.inputs.facts import RawFacts

GdrCheck = Callable[..., tuple[int, str]]

OF_THE_PROBE_ALONE = re.compile(r"((ibv_reg_mr|ibv_reg_dmabuf_mr|cuMemAlloc_v2)=\d+ ?)*")
"""Errors of calls that only the child makes which registers memory: the libraries answer as on a healthy machine."""


@pytest.fixture(scope="module")
def healthy() -> dict[str, RawFacts]:
    """What a healthy machine's libraries have answered, by name: each child is an interpreter that starts."""
    return {}


@pytest.fixture
def check(
    standins: Callable[..., dict[str, str]],
    complaints: Callable[[], list[str]],
    healthy: dict[str, RawFacts],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> GdrCheck:
    """Returns a function from what the drivers do to the exit code and the text, its lines joined."""
    machine = ExampleMachine(tmp_path / "tree")
    machine.write_tree()
    monkeypatch.setattr(sources, "LIVE_ROOT", machine.root)

    ask_library = collect._ask_library

    def ask(name: str) -> RawFacts:
        if name != "probe" and name in healthy:
            return healthy[name]
        found = ask_library(name)
        if name != "probe":
            healthy[name] = found
        return found

    def run(plan: str, *, old: tuple[str, ...] = (), missing: tuple[str, ...] = ()) -> tuple[int, str]:
        if "peer memory" in missing:
            machine.remove("sys/module/nvidia_peermem", "sys/kernel/mm/memory_peers")
        for name, value in standins(plan, old=old).items():
            monkeypatch.setenv(name, value)
        if not old and not missing and OF_THE_PROBE_ALONE.fullmatch(plan):
            monkeypatch.setattr(collect, "_ask_library", ask)
        status = gdr_check.main(["--prove"])
        assert complaints() == []
        return status, " ".join(capsys.readouterr().out.replace("│", " ").split())

    return run


@pytest.mark.parametrize(
    ("plan", "status", "words"),
    [
        ("", 0, "U1: 0000:03:00.0 with mlx5_0: peer memory ok, dma-buf ok"),
        ("ibv_reg_mr=14", 0, "peer memory EFAULT (Bad address), dma-buf ok"),
        ("ibv_reg_dmabuf_mr=95", 0, "peer memory ok, dma-buf EOPNOTSUPP (Operation not supported)"),
        (
            "ibv_reg_mr=14 ibv_reg_dmabuf_mr=95",
            2,
            "0 of 1 GPUs have a pair that will use GPUDirect RDMA ... fix (not applied): EFAULT: no peer memory",
        ),
        ("ibv_reg_mr=12 ibv_reg_dmabuf_mr=12", 2, "ENOMEM (Cannot allocate memory)"),
        (
            "ibv_reg_mr=14 attribute_124=0",
            2,
            "no dma-buf: cuMemGetHandleForAddressRange: CUDA_ERROR_NOT_SUPPORTED (801)",
        ),
        (
            "ibv_open_device=13",
            3,
            "IN USE UNKNOWN U1: 0000:03:00.0 with 0000:04:00.0: ibv_open_device: Permission denied",
        ),
        ("cuMemAlloc_v2=2", 3, "no GPU memory to try with: cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)"),
        ("devices=0", 2, "first cause: R3 libibverbs sees none of 1 devices"),
        ("cuInit=100", 3, "not tried: cuInit: CUDA_ERROR_NO_DEVICE (100)"),
        ("ibv_reg_mr=crash", 3, "IN USE UNKNOWN U1: crashed (SIGSEGV)"),
        ("ibv_get_device_list=crash", 2, "first cause: R3 libibverbs: crashed (SIGSEGV)"),
        ("active_mtu=3", 1, "1024"),
    ],
)
def test_what_the_drivers_do_is_what_the_table_says(check: GdrCheck, plan: str, status: int, words: str) -> None:
    found, text = check(plan)
    assert all(each in text for each in words.split(" ... "))
    assert found == status, text


def test_a_probe_that_hangs_is_unknown(check: GdrCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only it is given so little time: what asks the other libraries may be slow to start on a busy machine."""
    monkeypatch.setattr(
        collect,
        "run_child",
        lambda command, seconds: run_child(command, 2.0 if command[-1] == "probe" else seconds),
    )
    status, text = check("ibv_reg_mr=hang")
    assert status == 3 and "IN USE UNKNOWN U1: no answer within 2 s" in text


def test_an_old_driver_serves_through_peer_memory_and_not_without(check: GdrCheck) -> None:
    status, text = check("attribute_124=0 cuDriverGetVersion=11040", old=("cuda", "verbs"))
    assert "peer memory ok, no dma-buf: this libibverbs has no ibv_reg_dmabuf_mr" in text
    assert status == 1 and "libibverbs lacks ibv_reg_mr_iova2" in text, "relaxed ordering is what it costs"
    plan = "attribute_124=0 cuDriverGetVersion=11040 ibv_reg_mr=14"
    status, text = check(plan, old=("cuda", "verbs"), missing=("peer memory",))
    assert status == 2 and "first cause: G4" in text
