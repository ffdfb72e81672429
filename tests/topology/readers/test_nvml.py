import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gradwire.topology.bandwidth import GPU_MEMORY, memory_bytes_per_second
from gradwire.topology.graph import DeviceLink, Gpu, Machine
from gradwire.topology.levels import HOST_BYTES_PER_SECOND, levels_of
from gradwire.topology.readers import nvml


class NVMLError(Exception):
    """What pynvml raises."""


def library(
    capability: tuple[int, int] = (9, 0), links: int = 18, switch: bool = True, **replaced: object
) -> SimpleNamespace:
    """Two GPUs as pynvml would show them, joined through one switch or directly."""
    buses = ["00000000:3B:00.0", "00000000:4C:00.0"]

    def remote(handle: int, link: int) -> SimpleNamespace:
        return SimpleNamespace(busId=b"00000000:85:00.0" if switch else buses[1 - handle].encode())

    functions: dict[str, object] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=buses[handle]),
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetCudaComputeCapability": lambda handle: capability,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 << 30),
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: 2619 if kind == 2 else 1980,
        "nvmlDeviceGetMemoryBusWidth": lambda handle: 5120,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 16,
        "nvmlDeviceGetNvLinkState": lambda handle, link: int(link < links),
        "nvmlDeviceGetNvLinkRemotePciInfo": remote,
        "nvmlDeviceGetNvLinkRemoteDeviceType": lambda handle, link: 2 if switch else 0,
        "nvmlDeviceGetFieldValues": lambda handle, fields: [SimpleNamespace(nvmlReturn=3, value=None)],
        "nvmlDeviceGetP2PStatus": lambda handle, other, kind: 0,
        "NVMLError": NVMLError,
    }
    return SimpleNamespace(**(functions | replaced))


def failing(*arguments: object) -> object:
    raise NVMLError("Not Supported")


def test_gpus_and_their_links_to_a_switch() -> None:
    reading = nvml.read(library())
    gpu = reading.gpus[0]
    assert reading.reason is None
    assert (gpu.key, gpu.index, gpu.compute_capability, gpu.memory_nbytes) == ("0000:3b:00.0", 0, 90, 80 << 30)
    assert gpu.memory_bytes_per_second == pytest.approx(3.352e12, rel=0.001)
    assert [switch.key for switch in reading.nvswitches] == ["0000:85:00.0"]
    assert [link.count for link in reading.links] == [18, 18]
    assert [link.bytes_per_second for link in reading.links] == pytest.approx([370.8e9] * 2)


def test_gpus_have_uuids_and_their_slices_too() -> None:
    slices = {0: ["MIG-0a", None, "MIG-0b"], 1: []}
    uuids = {0: "GPU-8932f937", 1: b"GPU-9932f937"}
    fake = library(
        nvmlDeviceGetUUID=lambda handle: uuids.get(handle, handle),
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: len(slices[handle]),
        nvmlDeviceGetMigDeviceHandleByIndex=lambda handle, index: slices[handle][index] or failing(),
    )
    assert [(gpu.uuid, gpu.slices) for gpu in nvml.read(fake).gpus] == [
        ("GPU-8932f937", ("MIG-0a", "MIG-0b")), ("GPU-9932f937", ()),
    ]  # fmt: skip


def test_direct_links_count_once() -> None:
    reading = nvml.read(library((8, 0), links=4, switch=False))
    assert reading.links == (
        DeviceLink(a="0000:4c:00.0", b="0000:3b:00.0", kind="nvlink", count=4, bytes_per_second=80e9),
    ) or reading.links == (
        DeviceLink(a="0000:3b:00.0", b="0000:4c:00.0", kind="nvlink", count=4, bytes_per_second=80e9),
    )


def test_a_hidden_far_end_is_a_switch() -> None:
    hidden = SimpleNamespace(busId="fffffff:ffff:ff")
    reading = nvml.read(library(nvmlDeviceGetNvLinkRemotePciInfo=lambda handle, link: hidden))
    assert [switch.key for switch in reading.nvswitches] == ["hidden"]


def test_without_a_driver_there_is_a_reason() -> None:
    reading = nvml.read(library(nvmlInit=failing))
    assert reading.gpus == ()
    assert reading.reason == "NVML does not start: Not Supported"


def test_the_installed_library_never_raises_here() -> None:
    reading = nvml.read()
    assert bool(reading.gpus) != bool(reading.reason)


def test_a_driver_without_gpus_says_so() -> None:
    assert nvml.read(library(nvmlDeviceGetCount=lambda: 0)).reason == "the NVIDIA driver reports no GPU"


CARDS: dict[str, tuple[int | str, tuple[int, int] | None, int]] = {
    "T4": (75, (5001, 256), 320),
    "L4": (89, (6251, 192), 300),
    "A10": (86, (6251, 384), 600),
    "A100 80 GB": (80, (1593, 5120), 2039),
    "RTX 3090": (86, (9751, 384), 936),
    "RTX 4090": (89, (10501, 384), 1008),
    "RTX 5090": (120, (14001, 512), 1792),
    "RTX PRO 6000": (120, (14001, 512), 1792),
    "H100 SXM": (90, (2619, 5120), 3350),
    "H200": (90, (3201, 6144), 4800),
    "B200": (100, (3996, 8192), 8000),
    "GB10": (121, None, 273),
    "Thor": (110, None, 273),
    "MI300X": ("gfx942", None, 5300),
    "MI355X": ("gfx950", None, 8000),
}
"""Capability or architecture; memory clock in MHz and bus width in bits, where NVML tells them; GB/s on paper."""


@pytest.mark.parametrize("card", CARDS)
def test_memory_bandwidth_is_the_data_sheets_within_a_third(card: str) -> None:
    kind, told, wanted = CARDS[card]
    if isinstance(kind, str):  # AMD's reader gives no bandwidth
        gpu = Gpu(key="g", architecture=kind)
    else:
        fake = library(
            capability=(kind // 10, kind % 10),
            nvmlDeviceGetMaxClockInfo=(lambda handle, which: told[0]) if told else failing,
            nvmlDeviceGetMemoryBusWidth=(lambda handle: told[1]) if told else failing,
        )
        [gpu, _] = nvml.read(fake).gpus
        assert (gpu.memory_bytes_per_second is None) == (told is None)
        gpu = replace(gpu, name=None)  # the library's own is that of one card
    assert memory_bytes_per_second(gpu) / 1e9 == pytest.approx(wanted, rel=0.3)


def test_an_unknown_card_counts_as_the_slowest_of_all() -> None:
    assert memory_bytes_per_second(Gpu(key="g")) == min(GPU_MEMORY.values())[0] * 1e9


@pytest.mark.parametrize(
    "name",
    [
        "nvmlDeviceGetPciInfo", "nvmlDeviceGetName", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetMemoryBusWidth",
        "nvmlDeviceGetNvLinkRemotePciInfo", "nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlShutdown",
        "nvmlDeviceGetFieldValues", "nvmlDeviceGetP2PStatus",
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["fails", "is missing"])
def test_any_single_question_may_go_unanswered(name: str, how: str) -> None:
    fake = library()
    setattr(fake, name, failing)
    if how == "is missing":
        delattr(fake, name)
    reading = nvml.read(fake)
    assert len(reading.gpus) == 2


@pytest.mark.parametrize(("status", "peers"), [(0, True), (2, False), (None, None)])
def test_peer_access_is_asked_before_a_rate_is_assumed(status: int | None, peers: bool | None) -> None:
    """Without it two GPUs exchange through the host's memory, however fast their PCIe links are."""

    def ask(handle: int, other: int, kind: int) -> int:
        assert (handle != other, kind) == (True, 0)
        return failing() if status is None else status  # type: ignore[return-value]

    reading = nvml.read(library((12, 0), links=0, nvmlDeviceGetP2PStatus=ask))
    assert [gpu.peers for gpu in reading.gpus] == [peers] * 2
    inside, _ = levels_of(Machine(gpus=reading.gpus, links_known=True))
    assert inside.bytes_per_second == (HOST_BYTES_PER_SECOND if peers is False else 48e9)


class FabricInfo(ctypes.Structure):
    """As pynvml has it."""

    _fields_ = (
        ("clusterUuid", ctypes.c_uint8 * 16), ("status", ctypes.c_uint), ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
    )  # fmt: skip


@pytest.mark.parametrize("suffix", ["V", ""])
@pytest.mark.parametrize(
    ("uuid", "state", "status", "domain"),
    [
        (7, 3, 0, "07" + 15 * "00" + "/32766"),
        (0, 3, 0, None),  # a host whose own NVSwitches are all there is
        (7, 2, 0, None),  # still registering
        (7, 3, 9, None),
    ],
)
def test_the_nvlink_domain_of_several_hosts(
    suffix: str, uuid: int, state: int, status: int, domain: str | None
) -> None:
    def ask(handle: int, pointer: object) -> None:
        info = pointer._obj  # type: ignore[attr-defined]
        info.clusterUuid[0], info.state, info.status, info.cliqueId = uuid, state, status, 32766

    fake = library()
    setattr(fake, f"c_nvmlGpuFabricInfo{suffix}_t", FabricInfo)
    setattr(fake, f"nvmlDeviceGetGpuFabricInfo{suffix}", ask)
    assert [gpu.nvlink_domain for gpu in nvml.read(fake).gpus] == [domain] * 2
    assert [gpu.nvlink_domain for gpu in nvml.read(library()).gpus] == [None] * 2
