"""Captures: what comes back is what went in, nothing private goes in, and hostile archives are refused by name."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.topology.gdr.capture import INDEX, CaptureError, opened_capture, write_capture
from gradwire.topology.gdr.example import GPU, NIC, ExampleMachine
from gradwire.topology.gdr.host import Host
from gradwire.topology.gdr.inputs.files import Files
from gradwire.topology.gdr.runner import run_checks
from gradwire.topology.readers.pci_sysfs import read_tree

ENTRY = json.dumps({"format": 1, "links": {}, "present": [], "unreadable": [], "environment": {}, "facts": {}}).encode()


def archive(path: Path, *members: tuple[tarfile.TarInfo, bytes], index: bytes = ENTRY) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member, data in ((plain(INDEX), index), *members):
            member.size = len(data) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(data))
    return path


def plain(name: str, kind: bytes = tarfile.REGTYPE, linkname: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, linkname
    return member


def outcomes(host: Host) -> list[tuple[str, str, str]]:
    return [(r.check.name, str(r.finding.outcome), r.finding.text) for r in run_checks(host).results]


def captured(path: Path) -> list[tuple[str, str, str]]:
    with opened_capture(path) as capture:
        files = Files(capture.root, capture.denied)
        return outcomes(Host(files, read_tree(capture.root), capture.facts, capture.environment))


def with_topology_file(machine: ExampleMachine) -> None:
    """Nested switches whose closing tags are alike: the order and number of tags has to survive."""
    switches = "".join(f'<pci busid="ffff:0{i}:00.0"><pci busid="{end}"/></pci>' for i, end in enumerate((GPU, NIC)))
    machine.write("t.xml", f'<system version="1"><cpu numaid="0" host_hash="0x1">{switches}</cpu></system>')
    machine.environment = {"NCCL_TOPO_FILE": "/t.xml"}


def hide_status(machine: ExampleMachine) -> None:
    machine.remove("proc/self/status")
    machine.link("proc/self/status", "proc/self/status")


@pytest.mark.parametrize(
    "change",
    [
        lambda machine: None,
        lambda machine: machine.remove("dev/infiniband", "sys/kernel/mm"),
        lambda machine: machine.remove("sys/class"),
        lambda machine: machine.environment.update(NCCL_SOCKET_IFNAME="ens", NCCL_NET_GDR_LEVEL="LOC"),
        lambda machine: setattr(machine, "environment", None),
        hide_status,
        with_topology_file,
    ],
)
def test_a_capture_tells_the_same_story(tmp_path: Path, change: Callable[[ExampleMachine], object]) -> None:
    machine = ExampleMachine(tmp_path / "host")
    machine.log = None
    change(machine)
    host = machine.host()
    before = outcomes(host)
    write_capture(tmp_path / "capture.tar.gz", host)
    assert captured(tmp_path / "capture.tar.gz") == before


def test_nothing_private_is_captured(tmp_path: Path) -> None:
    machine = ExampleMachine(tmp_path / "host")
    machine.environment = {"NCCL_COMM_ID": "secrethost:1", "NCCL_DEBUG_FILE": "/home/alice/x"}
    machine.write("proc/cmdline", "root=UUID=secret iommu=pt password=secret\n")
    machine.write("proc/cpuinfo", "serial: secret hypervisor\n")
    machine.write("sys/class/infiniband/mlx5_0/node_desc", "secrethost mlx5_0\n")
    machine.write("sys/class/infiniband/mlx5_0/ports/1/gids/3", "0000:0000:0000:0000:0000:ffff:0a0b:0c0d\n")
    host = machine.host()
    run_checks(host)
    write_capture(tmp_path / "capture.tar.gz", host)
    text = gzip.decompress((tmp_path / "capture.tar.gz").read_bytes())
    for private in (b"secret", b"alice", b"0a0b"):
        assert private not in text
    assert b"iommu=pt" in text


@pytest.mark.parametrize(
    ("member", "word"),
    [
        (plain("../outside"), "out of the archive"),
        (plain("/etc/outside"), "out of the archive"),
        (plain("a/../../outside"), "out of the archive"),
        (plain("link", tarfile.SYMTYPE, "/etc/passwd"), "link"),
        (plain("link", tarfile.LNKTYPE, INDEX), "link"),
        (plain("null", tarfile.CHRTYPE), "device"),
        (plain("pipe", tarfile.FIFOTYPE), "device"),
        (plain("folder", tarfile.DIRTYPE), "special file"),
        (plain(f"{INDEX}/below"), "collides"),
    ],
)
def test_hostile_members_are_refused(tmp_path: Path, member: tarfile.TarInfo, word: str) -> None:
    path = archive(tmp_path / "x.tar.gz", (member, b"x"))
    with pytest.raises(CaptureError, match=word), opened_capture(path):
        pass
    assert not (tmp_path.parent / "outside").exists()


def test_a_huge_member_and_a_bomb_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(CaptureError, match="bytes"),
        opened_capture(archive(tmp_path / "a", (plain("x"), bytes(5 << 20)))),
    ):
        pass
    many = [(plain(f"x{index}"), bytes(4 << 20)) for index in range(33)]
    with pytest.raises(CaptureError, match="MiB"), opened_capture(archive(tmp_path / "b", *many)):
        pass
    bomb = plain("x")
    bomb.pax_headers = {"comment": "0" * (130 << 20)}
    with pytest.raises(CaptureError), opened_capture(archive(tmp_path / "c", (bomb, b""))):
        pass


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"cheese",
        b"[]",
        b"[" * 100_000,
        b'{"format": 2}',
        b'{"format": 1, "links": {"../../x": "y"}}',
        b'{"format": 1, "links": {"x": "../../y"}}',
        b'{"format": 1, "links": {"x": "/etc"}}',
        b'{"format": 1, "present": ["../../x"]}',
    ],
)
def test_a_hostile_index_is_refused(tmp_path: Path, index: bytes) -> None:
    with pytest.raises(CaptureError), opened_capture(archive(tmp_path / "x.tar.gz", index=index)):
        pass


def test_strange_but_harmless_indices_are_read(tmp_path: Path) -> None:
    index = {
        "format": 1,
        "links": {"a": "b", "b": "a"},
        "present": [1, "gradwire-gdr.json/x", "c"],
        "environment": [1],
        "facts": 7,
    }
    with opened_capture(archive(tmp_path / "x.tar.gz", index=json.dumps(index).encode())) as capture:
        assert capture.environment is None
        assert Files(capture.root).state("a") == "unreadable"
        assert Files(capture.root).state("c") == "present"


@pytest.mark.parametrize(
    "data", [b"", b"not gzip", gzip.compress(b"not tar", mtime=0), gzip.compress(bytes(10240), mtime=0)]
)
def test_what_is_no_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(CaptureError), opened_capture(tmp_path / "x"):
        pass
