"""What is asked on the live host: every question ends, and NVML's answers become facts."""

import sys
import types
from pathlib import Path

import pytest

from gradwire.topology.gdr.inputs import collect
from gradwire.topology.gdr.inputs.facts import GpuFacts, facts_from_json
from gradwire.topology.readers.nvml import gdr_facts


def test_without_hardware_no_library_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "ask_libraries", lambda prove: pytest.fail("a library was asked"))
    facts = collect.collect(Path("/"), hardware=False, switches=False, prove=False)
    assert facts.kernel and facts.gpus is None


def test_with_hardware_every_question_ends() -> None:
    facts = collect.collect(Path("/"), hardware=True, switches=True, prove=True)
    assert facts.kernel and (facts.registrations or facts.probe_error)


def test_device_files_are_tried(tmp_path: Path) -> None:
    folder = tmp_path / "dev/infiniband"
    (folder / "uverbs1").mkdir(parents=True)
    (folder / "uverbs0").write_bytes(b"")
    (folder / "rdma_cm").write_bytes(b"")
    assert collect._try_device_files(tmp_path) == {"/dev/infiniband/uverbs0": 0, "/dev/infiniband/uverbs1": 21}
    assert collect._try_device_files(tmp_path / "none") == {}


def test_the_kernel_log_is_filtered(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_text("6,1,2,-;nvidia_peermem: loaded\n")
    assert collect._kernel_log(tmp_path / "kmsg") == ["nvidia_peermem: loaded"]
    (tmp_path / "other").write_text("6,1,2,-;password on the command line\n")
    assert collect._kernel_log(tmp_path / "other") == []
    assert collect._kernel_log(tmp_path / "none") is None


class NvmlError(Exception):
    """Stands in for pynvml.NVMLError."""


class FabricInfo:
    """Stands in for the ctypes structure; byref wants a real one, so this GPU refuses the question."""


def test_nvml_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = types.ModuleType("pynvml")

    def link(handle: object, index: int) -> int:
        if index >= 12:
            raise NvmlError("invalid")
        return int(index != 5)

    functions = {
        "NVMLError": NvmlError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetPciInfo": lambda handle: types.SimpleNamespace(busId=b"00000000:19:00.0"),
        "nvmlDeviceGetName": lambda handle: "NVIDIA A100-SXM4-80GB",
        "nvmlDeviceGetBAR1MemoryInfo": lambda handle: types.SimpleNamespace(bar1Total=1 << 37),
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(total=80 << 30),
        "nvmlDeviceGetNvLinkState": link,
        "nvmlDeviceGetMigMode": lambda handle: [0, 0],
        "nvmlSystemGetDriverVersion": lambda: b"535.54.03",
        "nvmlSystemGetConfComputeState": lambda: types.SimpleNamespace(ccFeature=0),
        "c_nvmlGpuFabricInfo_t": FabricInfo,
    }
    for name, value in functions.items():
        setattr(nvml, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    facts = facts_from_json({**gdr_facts(), "gpus": gdr_facts()["gpus"]})
    assert facts.driver_version == "535.54.03"
    assert facts.gpus == (
        GpuFacts(
            bus_id="0000:19:00.0",
            name="NVIDIA A100-SXM4-80GB",
            bar1_nbytes=1 << 37,
            memory_nbytes=80 << 30,
            nvlinks=12,
            nvlinks_active=11,
            mig=False,
            confidential=False,
        ),
    )


def test_nvml_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = types.ModuleType("pynvml")

    def refuse() -> None:
        raise NvmlError("Driver Not Loaded")

    nvml.NVMLError, nvml.nvmlInit = NvmlError, refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gdr_facts() == {"nvml_error": "Driver Not Loaded"}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gdr_facts() == {"nvml_error": "nvidia-ml-py is not installed"}
