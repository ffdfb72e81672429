"""Mutated inputs: every parser returns a result or refuses by name, whatever it is fed.

A few hundred examples run by default; `python tests/topology/gdr/inputs/test_fuzz.py 100000` spreads that many over
all parsers.
"""

import gzip
import io
import json
import sys
import tarfile
import tempfile
import time
from functools import cache
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradwire.topology.gdr.capture import CaptureError, opened_capture, write_capture
from gradwire.topology.gdr.compare import differences
from gradwire.topology.gdr.example import NIC, ExampleMachine
from gradwire.topology.gdr.host import Host
from gradwire.topology.gdr.inputs.environment import parse_environment, parse_nccl_conf
from gradwire.topology.gdr.inputs.facts import facts_from_json
from gradwire.topology.gdr.inputs.files import Files
from gradwire.topology.gdr.inputs.nccl_log import parse_nccl_log
from gradwire.topology.gdr.inputs.texts import parse_nvlink_status, parse_perftest
from gradwire.topology.gdr.runner import exit_code, run_checks
from gradwire.topology.readers.lspci import read_tree as read_lspci_tree
from gradwire.topology.readers.pci import PciTree, path_type
from gradwire.topology.readers.pci_config import decode_bytes
from gradwire.topology.readers.pci_sysfs import read_tree

LSPCI = """0000:00:01.0 PCI bridge [0604]: Broadcom / LSI PEX890xx [1000:c030] (prog-if 00 [Normal decode])
\tNUMA node: 0
\tBus: primary=00, secondary=01, subordinate=03, sec-latency=0
\tCapabilities: [68] Express (v2) Downstream RdmaPort (Slot+), MSI 00
\t\tDevCtl:\tCorrErr+ RlxdOrd+ ExtTag+
\t\t\tMaxPayload 256 bytes, MaxReadReq 4096 bytes
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM not supported
\t\tLnkSta:\tSpeed 32GT/s (ok), Width x16 (ok)
\tCapabilities: [170 v1] Access Control Services
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd- EgressCtrl- DirectTrans-
01:00.0 3D controller: NVIDIA Corporation Device 2330 (rev a1)
\tRegion 2: Memory at 210000000000 (64-bit, prefetchable) [size=128G]
\tIOMMU group: 17
"""
LOG = """n:1:2 [0] NCCL INFO NCCL version 2.27.3+cuda12.9
n:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
n:1:2 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'
n:1:2 [0] NCCL INFO GPU Direct RDMA Disabled for GPU ca000 / HCA 0 (distance 8 > 6)
n:1:2 [0] NCCL INFO NET/0 :GPU/0-3000 (3/24.0/PHB) CPU/0-0 (2/24.0/PHB)
n:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA(PCI)/Shared
"""
CONFIG = (
    bytes(6)
    + b"\x10"
    + bytes(45)
    + b"\x60"
    + bytes(43)
    + b"\x10\x00\x02\x00"
    + bytes(156)
    + b"\x0d\x00\x01\x00"
    + bytes(60)
)

TOTAL = int(sys.argv[1]) if __name__ == "__main__" else 0
FAST = settings(max_examples=TOTAL * 18 // 100 or 100, deadline=None, database=None)
"""Five parsers of text: 18 % of the examples each."""
SLOW = settings(FAST, max_examples=TOTAL // 20 or 25, suppress_health_check=[HealthCheck.too_slow])
"""Two that write whole machines to disk: 5 % each."""

edits = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.sampled_from("~-+x"), st.binary(min_size=1, max_size=8)), max_size=12
)


def mutated(seed: bytes, changes: list[tuple[int, str, bytes]]) -> bytes:
    """Overwrites, cuts out, inserts or doubles pieces of a good input."""
    data = bytearray(seed)
    for place, kind, piece in changes:
        at = place % (len(data) + 1)
        if kind == "~":
            data[at : at + len(piece)] = piece
        elif kind == "-":
            del data[at : at + len(piece) ** 2]
        elif kind == "+":
            data[at:at] = piece
        else:
            data[at:at] = data[: len(piece) * 16]
    return bytes(data)


@cache
def good_capture() -> bytes:
    """The archive of the example machine, unpacked to plain tar, so that mutations reach the headers."""
    with tempfile.TemporaryDirectory() as folder:
        host = ExampleMachine(Path(folder) / "host").host()
        run_checks(host)
        write_capture(Path(folder) / "capture", host)
        return gzip.decompress((Path(folder) / "capture").read_bytes())


@cache
def good_json() -> str:
    with tempfile.TemporaryDirectory() as folder:
        return json.dumps(ExampleMachine(Path(folder)).facts)


def test_everything_good_is_taken() -> None:
    """The seeds themselves parse, so the mutations start from within."""
    assert len(read_lspci_tree(LSPCI.splitlines(keepends=True)).functions) == 2
    assert parse_nccl_log(LOG.splitlines()).gdr_channels
    assert decode_bytes(CONFIG).acs_redirect == ()
    assert facts_from_json(json.loads(good_json())).gpus


@FAST
@given(edits)
def test_lspci(changes: list[tuple[int, str, bytes]]) -> None:
    text = mutated(LSPCI.encode(), changes).decode("utf-8", "replace")
    tree = read_lspci_tree(text.splitlines(keepends=True))
    for one in tree.functions:
        for other in tree.functions:
            path_type(tree, one, other)
            tree.bridges_between(one, other)


@FAST
@given(edits)
def test_nccl_log(changes: list[tuple[int, str, bytes]]) -> None:
    log = parse_nccl_log(mutated(LOG.encode(), changes).decode("utf-8", "replace").splitlines())
    assert log.network_channels >= 0


@FAST
@given(edits)
def test_config_space(changes: list[tuple[int, str, bytes]]) -> None:
    decode_bytes(mutated(CONFIG, changes))


@FAST
@given(edits)
def test_small_texts(changes: list[tuple[int, str, bytes]]) -> None:
    seed = b"GPU 0: X\n\tLink 0: 25 GB/s\n 65536 5000 394.1 390.5 0.74\nNCCL_NET=IB\n"
    text = mutated(seed, changes).decode("utf-8", "replace")
    parse_nvlink_status(text)
    parse_perftest(text)
    parse_environment(text)
    parse_nccl_conf(text)


@FAST
@given(edits)
def test_facts(changes: list[tuple[int, str, bytes]]) -> None:
    text = mutated(good_json().encode(), changes).decode("utf-8", "replace")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return
    facts_from_json(data)
    differences([data, {}] if isinstance(data, dict) else [{}])


@SLOW
@given(edits, st.booleans())
def test_capture(changes: list[tuple[int, str, bytes]], packed: bool) -> None:
    data = gzip.compress(good_capture(), 1) if packed else good_capture()
    data = mutated(data, changes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.tar.gz"
        path.write_bytes(data if packed else gzip.compress(data, 1))
        try:
            with opened_capture(path) as capture:
                files = Files(capture.root, capture.denied)
                host = Host(files, read_tree(capture.root), capture.facts, capture.environment)
                assert exit_code(host, run_checks(host)) in (0, 1, 2, 3)
        except CaptureError as error:
            assert str(error)


ATTRIBUTES = (
    "class",
    "vendor",
    "numa_node",
    "current_link_width",
    "max_link_speed",
    "resource",
    "config",
    "local_cpulist",
)


@SLOW
@given(st.sampled_from(ATTRIBUTES), st.binary(max_size=300), st.sampled_from(("link", "folder", "noise")))
def test_device_folder(name: str, noise: bytes, kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        machine = ExampleMachine(Path(folder))
        machine.write_tree()
        path = (
            str((machine.root / "sys/bus/pci/devices" / NIC).resolve().relative_to(machine.root.resolve())) + f"/{name}"
        )
        machine.remove(path)
        if kind == "noise":
            machine.write(path, noise)
        elif kind == "link":
            machine.link(path, "sys/bus/pci/devices")
        else:
            (machine.root / path).mkdir(parents=True)
        tree = read_tree(machine.root)
        assert NIC in tree.functions
        host = Host(Files(machine.root), tree)
        assert all("the check itself failed" not in result.finding.text for result in run_checks(host).results)


CHECKS = (test_lspci, test_nccl_log, test_config_space, test_small_texts, test_facts, test_capture, test_device_folder)


def test_empty_tree_and_archive_of_nothing() -> None:
    assert path_type(PciTree(), "a", "b") is None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        with tarfile.open(path, "w:gz") as archive:
            archive.addfile(tarfile.TarInfo("empty"), io.BytesIO())
        try:
            with opened_capture(path):
                raise AssertionError("an archive without an index was taken")
        except CaptureError as error:
            assert "--capture" in str(error)


if __name__ == "__main__":
    for check in CHECKS:
        start = time.perf_counter()
        check()
        print(f"{check.__name__}: {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{5 * FAST.max_examples + 2 * SLOW.max_examples} mutated inputs")
