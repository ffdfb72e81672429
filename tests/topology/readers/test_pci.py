"""The PCI tree: distances, ACS bits, virtual functions, and folders that are broken on purpose."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.topology.readers.pci import PciTree, path_type
from gradwire.topology.readers.pci_config import decode, decode_bytes
from gradwire.topology.readers.pci_sysfs import read_tree

Add = Callable[..., Path]

ROOT, UP, DOWN_A, DOWN_B, GPU, NIC = (f"0000:{bus}.0" for bus in ("00:01", "01:00", "02:00", "02:01", "03:00", "04:00"))
UNDER_A, UNDER_B = (ROOT, UP, DOWN_A), (ROOT, UP, DOWN_B)


@pytest.fixture
def add(tmp_path: Path) -> Add:
    """Adds one function below `tmp_path`: sysfs as the kernel lays it out."""

    def make(bus_id: str, above: tuple[str, ...] = (), bridge: str = "pci0000:00", **files: str | bytes) -> Path:
        folder = tmp_path.joinpath("sys/devices", bridge, *above, bus_id)
        folder.mkdir(parents=True)
        for name, content in {"class": "0x060400", "numa_node": "0", **files}.items():
            (folder / name).write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())
        link = tmp_path / "sys/bus/pci/devices" / bus_id
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path("../../../..") / folder.relative_to(tmp_path))
        return folder

    return make


def config_space(*, nbytes: int = 4096, acs: int | None = None, ats: int | None = None, control: int = 0x5936) -> bytes:
    """A configuration space with PCI Express at 0x60 and the extended capabilities asked for."""
    space = bytearray(nbytes)
    struct.pack_into("<HHHH", space, 0, 0x15B3, 0x1021, 0, 0x10)
    space[0x34] = 0x60
    if nbytes > 64:
        struct.pack_into("<BBH", space, 0x60, 0x10, 0, 2)
        struct.pack_into("<H", space, 0x68, control)
    words = [(0x0001, None), (0x000D, acs), (0x000F, ats)]
    present = [(capability, word) for capability, word in words if capability == 1 or word is not None]
    for index, (capability, word) in enumerate(present if nbytes > 256 else []):
        offset = 0x100 + 0x40 * index
        following = offset + 0x40 if index + 1 < len(present) else 0
        struct.pack_into("<I", space, offset, capability | 1 << 16 | following << 20)
        struct.pack_into("<H", space, offset + 6, word or 0)
    return bytes(space)


def two_under_one_switch(add: Add, **bridge_files: str | bytes) -> None:
    add(ROOT)
    add(UP, (ROOT,))
    add(DOWN_A, (ROOT, UP), **bridge_files)
    add(DOWN_B, (ROOT, UP), **bridge_files)
    add(GPU, UNDER_A, **{"class": "0x030200", "vendor": "0x10de"})
    add(NIC, UNDER_B, **{"class": "0x020700", "vendor": "0x15b3"})


def test_one_switch_is_pix_and_its_downstream_ports_lie_between(add: Add, tmp_path: Path) -> None:
    two_under_one_switch(add)
    tree = read_tree(tmp_path)
    assert not tree.problems
    assert path_type(tree, GPU, NIC) == path_type(tree, NIC, GPU) == "PIX"
    assert path_type(tree, GPU, GPU) == "LOC"
    assert tree.bridges_between(GPU, NIC) == (DOWN_A, DOWN_B)
    assert tree.functions[GPU].parents == UNDER_A[::-1]
    assert tree.functions[GPU].host_bridge == "pci0000:00"


@pytest.mark.parametrize(("subsystem", "expected"), [("0x0000", "PIX"), ("0x5555", "PXB")])
def test_two_switches_are_pxb_unless_one_broadcom_chip(add: Add, tmp_path: Path, subsystem: str, expected: str) -> None:
    chip = {"vendor": "0x1000", "device": "0xc030", "subsystem_vendor": "0x1000"}
    inner, port = "0000:05:00.0", "0000:06:00.0"
    add(ROOT)
    add(UP, (ROOT,), **chip, subsystem_device=subsystem)
    add(DOWN_A, (ROOT, UP))
    add(DOWN_B, (ROOT, UP))
    add(GPU, UNDER_A, **{"class": "0x030200"})
    add(inner, UNDER_B, **chip, subsystem_device="0x1000")
    add(port, (*UNDER_B, inner))
    add(NIC, (*UNDER_B, inner, port), **{"class": "0x020000"})
    tree = read_tree(tmp_path)
    assert path_type(tree, GPU, NIC) == expected


@pytest.mark.parametrize(
    ("gpu_node", "nic_node", "expected"),
    [("0", "0", "PHB"), ("0", "1", "SYS"), ("-1", "-1", "PHB"), ("-1", "0", "SYS"), ("0", "cheese", None)],
)
def test_without_a_switch_the_node_decides(
    add: Add, tmp_path: Path, gpu_node: str, nic_node: str, expected: str
) -> None:
    add(ROOT)
    add(GPU, (ROOT,), **{"class": "0x030200", "numa_node": gpu_node})
    add("0000:80:01.0", bridge="pci0000:80")
    add(NIC, ("0000:80:01.0",), "pci0000:80", **{"class": "0x020000", "numa_node": nic_node})
    tree = read_tree(tmp_path)
    assert path_type(tree, GPU, NIC) == expected
    assert tree.bridges_between(GPU, NIC) == (ROOT, "0000:80:01.0")


def test_a_virtual_function_stands_where_its_physical_function_does(add: Add, tmp_path: Path) -> None:
    two_under_one_switch(add)
    virtual = "0000:04:08.1"
    folder = add(virtual, UNDER_B, **{"class": "0x020700"})
    (folder / "physfn").symlink_to(f"../{NIC}")
    (folder.parent / NIC / "virtfn0").symlink_to(f"../{virtual}")
    tree = read_tree(tmp_path)
    assert tree.functions[virtual].is_virtual
    assert tree.functions[NIC].virtual_functions == (virtual,)
    assert path_type(tree, GPU, virtual) == "PIX"


def test_attributes(add: Add, tmp_path: Path) -> None:
    folder = add(
        GPU,
        **{"class": "0x030200", "vendor": "0x10de", "device": "0x2330", "config": config_space(acs=0)},
        current_link_speed="16.0 GT/s PCIe",
        max_link_speed="32.0 GT/s PCIe",
        current_link_width="8",
        max_link_width="16",
        resource="0x0000000010000000 0x0000000010ffffff 0x0\n0x0 0x0 0x0\n0x4000000000 0x5fffffffff 0x0",
    )
    (folder / "driver").symlink_to("../../../bus/pci/drivers/nvidia")
    (folder / "iommu_group").symlink_to("../../../kernel/iommu_groups/17")
    function = read_tree(tmp_path).functions[GPU]
    assert (function.vendor, function.device, function.driver, function.iommu_group) == (0x10DE, 0x2330, "nvidia", 17)
    assert (function.current_gigatransfers, function.max_gigatransfers) == (16.0, 32.0)
    assert (function.current_width, function.max_width) == (8, 16)
    assert function.bar_nbytes == (16 << 20, 0, 128 << 30)
    assert function.config is not None
    assert (function.config.max_payload_nbytes, function.config.max_read_request_nbytes) == (256, 4096)
    assert function.config.relaxed_ordering is True


@pytest.mark.parametrize(
    ("space", "redirect"),
    [
        (config_space(acs=0x0000), ()),
        (config_space(acs=0x0001), ()),  # source validation alone bends no path
        (config_space(acs=0x001D), ("ReqRedir", "CmpltRedir", "UpstreamFwd")),
        (config_space(), ()),
        (config_space(nbytes=64), None),
        (config_space(nbytes=256), None),
        (config_space(acs=0x1D)[: 0x100 + 0x44], None),
        (b"", None),
        (b"\xff" * 4096, None),
    ],
)
def test_acs_is_known_or_unknown(space: bytes, redirect: tuple[str, ...] | None) -> None:
    assert decode_bytes(space).acs_redirect == redirect


def test_ats() -> None:
    assert decode_bytes(config_space(ats=0x8000)).ats_enabled is True
    assert decode_bytes(config_space(ats=0)).ats_enabled is False
    assert decode_bytes(config_space()).ats_enabled is None


@settings(deadline=None)
@given(st.binary(max_size=4096), st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), max_size=20))
def test_any_bytes_decode(noise: bytes, edits: list[tuple[int, int]]) -> None:
    space = bytearray(config_space(acs=0x1D, ats=0x8000))
    for offset, value in edits:
        space[offset] = value
    decode_bytes(bytes(space))
    decode_bytes(noise)


def test_a_decode_reads_little() -> None:
    """Each double word of a live configuration space costs a bus transaction."""
    taken: list[int] = []
    space = config_space(acs=0x1D)

    def read(offset: int, nbytes: int) -> bytes:
        taken.append(nbytes)
        return space[offset : offset + nbytes]

    assert decode(read).acs_redirect
    assert sum(taken) <= 96


def test_broken_folders_are_named_and_the_rest_is_read(add: Add, tmp_path: Path) -> None:
    two_under_one_switch(add)
    devices = tmp_path / "sys/bus/pci/devices"
    (devices / "0000:0a:00.0").symlink_to("0000:0b:00.0")
    (devices / "0000:0b:00.0").symlink_to("0000:0a:00.0")
    (devices / "0000:0c:00.0").symlink_to("/nowhere")
    (devices / "0000:0d:00.0").symlink_to("/usr")
    (devices / "0000:0e:00.0").write_text("a file")
    (devices / "not a bus id").mkdir()
    tree = read_tree(tmp_path)
    assert set(tree.functions) == {ROOT, UP, DOWN_A, DOWN_B, GPU, NIC}
    assert len(tree.problems) == 6
    assert any("loop" in problem or "many levels" in problem for problem in tree.problems)
    assert any("out of the root folder" in problem for problem in tree.problems)


def test_strange_attributes_are_unknown(add: Add, tmp_path: Path) -> None:
    folder = add(
        GPU, **{"class": "0x030200", "vendor": b"\xff\xfe\x00", "numa_node": b"9" * 100_000, "config": b"short"}
    )
    (folder / "device").mkdir()
    (folder / "max_link_width").symlink_to("/etc/passwd")
    function = read_tree(tmp_path).functions[GPU]
    assert (function.vendor, function.numa_node, function.device, function.max_width) == (None, None, None, None)
    assert set(function.unreadable) == {"device", "max_link_width"}
    assert function.config is not None and function.config.acs_redirect is None


def test_devices_without_a_tree_have_unknown_distances(tmp_path: Path) -> None:
    for bus_id in (GPU, NIC):
        (tmp_path / "sys/bus/pci/devices" / bus_id).mkdir(parents=True)
    tree = read_tree(tmp_path)
    assert tree.functions[GPU].parents is None
    assert path_type(tree, GPU, NIC) is None and tree.bridges_between(GPU, NIC) is None


def test_nothing_there(tmp_path: Path) -> None:
    tree = read_tree(tmp_path)
    assert not tree.functions and tree.problems
    assert path_type(PciTree(), GPU, NIC) is None


def test_this_machine_is_read() -> None:
    tree = read_tree(Path("/"))
    for one in tree.functions:
        assert path_type(tree, one, one) == "LOC"
