"""The driver libraries asked through the real loader: stand-ins in C that check every call, and break on demand."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.topology.gdr.inputs import collect
from gradwire.topology.gdr.inputs.collect import ask_libraries, merged
from gradwire.topology.gdr.inputs.environment import child_environment

GPU = "0000:03:00.0"
Ask = Callable[..., dict[str, object]]


@pytest.fixture
def asked(
    standins: Callable[..., dict[str, str]], complaints: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> Ask:
    """Returns a function from a plan to everything that the libraries answer; a wrong call to them fails the test.

    `by="probe"` asks none but the child that registers memory: each child is an interpreter that starts.
    """

    def answers(plan: str = "", *, old: tuple[str, ...] = (), by: str = "") -> dict[str, object]:
        for name, value in standins(plan, old=old).items():
            monkeypatch.setenv(name, value)
        if by == "probe":
            monkeypatch.setattr(collect, "_LIBRARIES", ())
        found = ask_libraries(prove=True)
        assert complaints() == []
        return found

    return answers


def attempts(answers: dict[str, object]) -> list[dict[str, object]]:
    found = answers["registrations"]
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("", {"peermem_errno": 0, "dmabuf_errno": 0}),
        ("ibv_reg_mr=14", {"peermem_errno": 14, "dmabuf_errno": 0}),
        ("ibv_reg_dmabuf_mr=95", {"peermem_errno": 0, "dmabuf_errno": 95}),
        ("ibv_reg_mr=14 ibv_reg_dmabuf_mr=95", {"peermem_errno": 14, "dmabuf_errno": 95}),
        ("ibv_reg_mr=12 ibv_reg_dmabuf_mr=12", {"peermem_errno": 12, "dmabuf_errno": 12}),
        (
            "attribute_124=0 ibv_reg_mr=14",
            {"peermem_errno": 14, "note": "no dma-buf: cuMemGetHandleForAddressRange: CUDA_ERROR_NOT_SUPPORTED (801)"},
        ),
        ("ibv_open_device=13", {"note": "ibv_open_device: Permission denied"}),
        ("ibv_alloc_pd=12", {"note": "ibv_alloc_pd: Cannot allocate memory"}),
        ("cuMemAlloc_v2=2", {"note": "no GPU memory to try with: cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)"}),
        ("cuCtxSetCurrent=999", {"note": "no GPU memory to try with: cuCtxSetCurrent: error 999"}),
    ],
)
def test_every_outcome_of_a_registration(asked: Ask, plan: str, expected: dict[str, object]) -> None:
    assert attempts(asked(plan, by="probe")) == [{"gpu": GPU, "device": "mlx5_0"} | expected]


def test_every_device_is_tried(asked: Ask) -> None:
    assert [attempt["device"] for attempt in attempts(asked("devices=2", by="probe"))] == ["mlx5_0", "mlx5_1"]


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("devices=0", "1 GPUs, 0 RDMA devices to try"),
        ("ibv_get_device_list=38", "1 GPUs, 0 RDMA devices to try"),
        ("gpus=0", "0 GPUs, 1 RDMA devices to try"),
        ("cuInit=802", "not tried: cuInit: CUDA_ERROR_SYSTEM_NOT_READY (802)"),
        ("cuInit=100", "not tried: cuInit: CUDA_ERROR_NO_DEVICE (100)"),
        ("cuDeviceGetCount=999", "not tried: cuDeviceGetCount: error 999"),
    ],
)
def test_a_probe_with_nothing_to_try(asked: Ask, plan: str, expected: str) -> None:
    found = asked(plan, by="probe")
    assert "registrations" not in found and found["probe_error"] == expected


def test_what_the_libraries_say_about_themselves(asked: Ask) -> None:
    found = asked()
    assert found["cuda_version"] == 12080 and found["driver_version"] == "580.65.06"
    assert found["gpus"] == [
        {
            "bus_id": GPU, "name": "NVIDIA H100 80GB HBM3", "bar1_nbytes": 128 << 30, "memory_nbytes": 80 << 30,
            "mig": False,
            "nvlinks": 18, "nvlinks_active": 18, "fabric_state": 3, "fabric_status": 0, "confidential": False,
            "gdr_supported": True, "dmabuf_supported": True,
        }
    ]  # fmt: skip
    assert found["verbs_devices"] == ["mlx5_0"] and found["active_mtu"] == {"mlx5_0/1": 4096}
    assert found["verbs_dmabuf"] is found["verbs_relaxed_ordering"] is True
    assert found["nccl_version"] == "22703" and found["nccl_plugin"] is False
    assert not [name for name in found if name.endswith("_error")]


def test_old_libraries_lack_calls_and_say_so(asked: Ask) -> None:
    found = asked("cuDriverGetVersion=11040 attribute_124=0", old=("cuda", "verbs", "nvml"))
    assert found["verbs_dmabuf"] is found["verbs_relaxed_ordering"] is False and found["cuda_version"] == 11040
    note = "no dma-buf: this libibverbs has no ibv_reg_dmabuf_mr"
    assert attempts(found) == [{"gpu": GPU, "device": "mlx5_0", "peermem_errno": 0, "note": note}]


def test_a_new_libibverbs_over_an_old_driver(asked: Ask) -> None:
    note = "no dma-buf: this driver has no cuMemGetHandleForAddressRange"
    expected = {"gpu": GPU, "device": "mlx5_0", "peermem_errno": 0, "note": note}
    assert attempts(asked(old=("cuda",), by="probe")) == [expected]


@pytest.mark.parametrize(
    ("plan", "broken", "healthy"),
    [
        ("cuInit=crash", {"cuda_error", "probe_error"}, {"driver_version", "verbs_devices", "nccl_version"}),
        (
            "ibv_get_device_list=crash",
            {"verbs_error", "probe_error"},
            {"driver_version", "cuda_version", "nccl_version"},
        ),
        ("ibv_reg_mr=crash", {"probe_error"}, {"driver_version", "cuda_version", "verbs_devices", "nccl_version"}),
        ("ncclGetVersion=crash", {"nccl_error"}, {"driver_version", "cuda_version", "verbs_devices", "registrations"}),
    ],
)
def test_a_library_that_crashes_spoils_its_own_answers(
    asked: Ask, plan: str, broken: set[str], healthy: set[str]
) -> None:
    found = asked(plan)
    assert {name: found[name] for name in found if name.endswith("_error")} == dict.fromkeys(
        broken, "crashed (SIGSEGV)"
    )
    assert healthy <= set(found)


def test_missing_libraries_are_stated(tmp_path: Path) -> None:
    for name in ("cuda", "verbs", "nvml", "probe"):
        command = [sys.executable, "-m", "gradwire.topology.gdr.inputs.native", name]
        done = subprocess.run(
            command,
            env=child_environment({"LD_LIBRARY_PATH": str(tmp_path)}),
            capture_output=True,
            timeout=60,
            check=True,
        )
        found = json.loads(done.stdout)
        assert found.get(f"{name}_error") or found.get("gpus") or found.get("verbs_devices") is not None


def test_two_answers_about_one_gpu_become_one() -> None:
    both = merged(({"gpus": [{"bus_id": "a", "x": 1}], "p": 1}, {"gpus": [{"bus_id": "a", "y": 2}], "q": 2}))
    assert both == {"gpus": [{"bus_id": "a", "x": 1, "y": 2}], "p": 1, "q": 2}
