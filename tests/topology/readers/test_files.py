import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from gradwire.topology.assign import nics_of_gpus
from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Machine
from gradwire.topology.levels import levels_of
from gradwire.topology.presets import cpu_only, dgx_h100, pcie_box
from gradwire.topology.readers import files
from gradwire.topology.show import draw, json_form
from gradwire.topology.show.svg import svg

LSPCI = """00:01.0 PCI bridge: Intel Corporation Device 352a (rev 04)
\tNUMA node: 0
\tBus: primary=00, secondary=01, subordinate=04, sec-latency=0
\t\tLnkSta:\tSpeed 32GT/s (ok), Width x16 (ok)
01:00.0 PCI bridge [0604]: Broadcom / LSI PEX890xx PCIe Gen 5 Switch [1000:c030] (rev b0)
\tBus: primary=01, secondary=02, subordinate=04, sec-latency=0
02:00.0 PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch (rev b0)
\tBus: primary=02, secondary=03, subordinate=03, sec-latency=0
03:00.0 3D controller: NVIDIA Corporation Device 2330 (rev a1)
\tNUMA node: 0
03:00.1 Ethernet controller: Mellanox Technologies MT2910 Family [ConnectX-7]
"""
NCCL_XML = """<system version="1">
  <cpu host_hash="0xf00d" numaid="0" affinity="ffffffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:15:00.0" class="0x060400" vendor="0x1000" device="0xc030" link_width="16">
      <pci busid="0000:18:00.0" class="0x030200" vendor="0x10de" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="90" rank="0" gdr="1"><nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/></gpu>
      </pci>
      <pci busid="0000:19:00.0" class="0x020700" vendor="0x15b3" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="400000" port="1" guid="0x1" gdr="1"/></nic>
      </pci>
    </pci>
  </cpu>
</system>
"""
SEEDS = tuple(
    text.encode()
    for text in (
        NCCL_XML,
        draw.matrix(dgx_h100()),
        json_form.write(cpu_only()),
        LSPCI,
    )
)
WORDS = (
    b"<", b">", b'"', b"/>", b"</pci>", b"<pci ", b"<gpu>", b"&amp;", b"&#0;", b"]]>", b"<!DOCTYPE s [", b"<?xml ?>",
    b"\xff\xfe", b"\x00", b"\x1b[31m", b"\xc3\x28", b"\t", b"\n", b"99999999999999999999", b"-1", b"NaN", b"1e999",
    b"0x",
    b"0000:01:00.0", b"0000:11:00.0", b"fffffff:ffff:ff", b"NV99", b"GPU0", b"NIC0", b"PIX", b"null", b"[", b"{",
    b"true",
    b"secondary=00", b"subordinate=", b"NUMA node: 9", "\u202e\u0660".encode(), b'"parent": "0000:01:00.0"',
)  # fmt: skip
"""What hostile or damaged files are made of."""


def mutated(seed: bytes, chance: random.Random) -> bytes:
    """A seed after a few edits: cut, doubled, moved, overwritten, or with a foreign word in it."""
    data = bytearray(seed)
    for _ in range(chance.randint(1, 6)):
        start = chance.randrange(len(data) + 1)
        end = min(len(data), start + chance.choice((0, 1, 4, 30, 300)))
        match chance.randrange(6):
            case 0:
                del data[start:end]
            case 1:
                data[start:start] = data[start:end]
            case 2:
                data[start:end] = chance.choice(WORDS)
            case 3:
                data[start:end] = bytes(chance.randrange(256) for _ in range(end - start))
            case 4:
                del data[start : len(data) if chance.random() < 0.2 else end]
            case _:
                place = chance.randrange(len(data) + 1)
                data[place:place] = data[start:end]
    return bytes(data)


def survives(content: bytes) -> bool:
    """Reads and shows; everything but a TopologyError is a bug. Returns whether there was a machine."""
    try:
        machine = files.machine_of(files.decode(content))
    except TopologyError as error:
        assert str(error)
        return False
    show_everything(machine)
    return True


def show_everything(machine: Machine) -> None:
    assert json_form.read(json_form.write(machine)) == machine
    draw.tree(machine)
    levels_of(machine)
    nics_of_gpus(machine)
    for write, check in ((svg, ElementTree.fromstring), (draw.matrix, str)):
        try:
            text = write(machine)
        except TopologyError:
            continue
        check(text)


def test_mutated_inputs_give_an_answer_or_a_reason(request: pytest.FixtureRequest) -> None:
    count: int = request.config.getoption("--mutations")
    seeds = st.tuples(st.sampled_from(SEEDS), st.integers(0, 2**64))
    answers = 0

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(seeds)
    def check(drawn: tuple[bytes, int]) -> None:
        nonlocal answers
        answers += survives(mutated(drawn[0], random.Random(drawn[1])))

    check()
    assert answers > count / 20, "the mutations are so wild that the readers' answers were never tested"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_or_read(content: bytes) -> None:
    survives(content)


def test_the_seeds_themselves_are_read() -> None:
    assert all(survives(seed) for seed in SEEDS)


@pytest.mark.parametrize("encode", [
    lambda text: text.encode("utf-16"), lambda text: text.encode("utf-8-sig"),
    lambda text: b"\xfe\xff" + text.encode("utf-16-be"), lambda text: b"\x1b[0m" + text.encode(),
])  # fmt: skip
def test_encodings_of_redirected_output(encode: Callable[[str], bytes], tmp_path: Path) -> None:
    file = tmp_path / "topo.txt"
    file.write_bytes(encode(draw.matrix(pcie_box())))
    assert len(files.read_file(file).gpus) == 4


@pytest.mark.parametrize("before", [
    "[user@host ~]$ cat it\n", "root@host:~# nvidia-smi topo -m\n", "<details><summary>topology</summary>\n\n```\n",
    "{ host } >> \n", "\n\n",
])  # fmt: skip
@pytest.mark.parametrize("after", ["", "\n[user@host ~]$ \n", "\n```\n"])
def test_what_a_terminal_or_ticket_has_around_it_does_not_matter(before: str, after: str) -> None:
    for seed in SEEDS:
        text = seed.decode()
        found = files.machine_of(before + text + after)
        assert replace(found, notes=()) == replace(files.machine_of(text), notes=())


def test_a_second_document_in_a_file_is_named() -> None:
    text = NCCL_XML
    assert any("Another XML document" in note for note in files.machine_of(text + text).notes)
    with pytest.raises(TopologyError, match="line 7: not well-formed"):
        files.machine_of("$ a\n$ b\n$ c\n$ d\n$ e\n<system>\n<cpu></system>")


def test_each_kind_is_recognised_by_its_content(tmp_path: Path, fixtures: Path) -> None:
    kinds = {}
    for path in (*fixtures.glob("nccl_xml*/*.xml"), *fixtures.glob("smi_topo/*"), *fixtures.glob("lspci/*")):
        if "graph" not in path.name:
            kinds[path] = files.read_file(path).sources[0].split(" (")[0]
            show_everything(files.read_file(path))
    assert len(kinds) == 20
    assert set(kinds.values()) == {"NCCL XML", "nvidia-smi topo -m", "lspci"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the text is empty"), (b"\x7fELF\0\0", "NUL bytes"), (b"hello", "not recognised"), 
        (b"[1]", "without the key"),
        (b"{}", "without the key `graph`"), (b"{", "line 1: not JSON"), (b"[" * 100_000, "not JSON"),
    ],
)  # fmt: skip
def test_what_is_not_recognised_is_refused_with_the_files_name(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "input.txt"
    file.write_bytes(content)
    with pytest.raises(TopologyError, match=message) as caught:
        files.read_file(file)
    assert str(file) in str(caught.value)


def test_folders_pipes_and_missing_files_are_refused(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("", "not a regular file|directory"),
        ("pipe", "not a regular file"),
        ("none", "No such file"),
    ):
        with pytest.raises(TopologyError, match=message):
            files.read_file(tmp_path / name)


def test_a_file_too_large_for_a_description_is_not_even_opened(tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as file:
        file.truncate(files.MAX_NBYTES + 1)
    with pytest.raises(TopologyError, match="at most"):
        files.read_text(tmp_path / "big")


def test_the_tree_prints_hostile_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    machine = files.machine_of(draw.matrix(pcie_box()).replace("mlx5_0", "mlx5_0[red]"))
    Console(width=200).print(draw.tree(machine))
    assert "[red]" in capsys.readouterr().out or machine.nics[0].ports[0].name == "mlx5_0"


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("node1:77:99 [0] NCCL INFO Bootstrap : Using eth0", "gdr-check --nccl-log"),
        ("GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)\n\t Link 0: 25 GB/s\n", "nvidia-smi topo -m"),
        (
            "+-----------------------------------------------------------------------------+\n| NVIDIA-SMI 570.1 |",
            "topo -m",
        ),
        ("-[0000:00]-+-00.0  Intel Corporation Device\n           +-01.0-[01]----00.0  NVIDIA", "lspci -vvv"),
        ("[    0.000000] Linux version 6.1.0\n", "gdr-check"),
        ("CA 'mlx5_0'\n\tCA type: MT4129\n", "/sys/class/infiniband"),
        ("link mlx5_0/1 subnet_prefix fe80 lid 1 state ACTIVE physical_state LINK_UP\n", "/sys/class/infiniband"),
        ("hl-smi -Q name\nHL-SMI Version: hl-1.15\n", "Gaudi"),
        ("+--------------------------+\n| HL-SMI Version:   hl-1.18.0 |\n", "Gaudi"),
        ("[Tue Nov  4 02:00:00 2026] mlx5_core 0000:c1:00.0: firmware version: 28.39\n", "gdr-check"),
        ("GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)\nGPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-2)\n", "topo -m"),
        ("====== ROCm System Management Interface ======\nGPU  Temp (DieEdge)  AvgPwr\n", "rocm-smi --showtopo"),
        ("+-------+\n|               | GPU 0/0  | GPU 1/0 | CPU Affinity |\n", "Intel's GPUs"),
        ("Architecture:            x86_64\n", "lstopo"),
        ("available: 2 nodes (0-1)\nnode 0 cpus: 0 1\n", "lstopo"),
        ("Module                  Size  Used by\nnvidia_peermem  16384  0\n", "gdr-check"),
        ("2: eth0: <BROADCAST,MULTICAST,UP> mtu 1500 qdisc mq\n", "topo -m"),
        ("Settings for enp1s0f0:\n\tSpeed: 100000Mb/s\n", "topo -m"),
        ("==============NVSMI LOG==============\nAttached GPUs : 8\n", "topo -m"),
        ("ACCESS TABLE:\n             0000:0c:00.0 0000:22:00.0\n0000:0c:00.0 ENABLED ENABLED\n", "LINK TYPE TABLE"),
        ("2 HCAs found:\n\tmlx5_0\n\tmlx5_1\n\n", "/sys/class/infiniband"),
        ("    device          \t   node GUID\n    ------\n    mlx5_0\tb8cef60300f1\n", "/sys/class/infiniband"),
        ("-+-[0000:00]-+-00.0\n |           +-01.0-[01]----00.0\n", "lspci -vvv"),
        ("           NPU0       NPU1       CPU Affinity\nNPU0       X          HCCS       144-167\n", "Ascend"),
        ("[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]\nDevice: 0, NVIDIA A100\n", "topo -m"),
        ("GPU 0: NVIDIA GH200 480GB (UUID: GPU-1)\n\t C2C Link 0: 44.712 GB/s\n", "`nvidia-smi c2c -s`"),
        ("Infiniband device 'mlx5_0' port 1 status:\n\tdefault gid: fe80::1\n", "`ibstatus`"),
        ("mlx5_0 port 1 ==> ib0 (Up)\n", "`ibdev2netdev`"),
        ("DEV\tPORT\tINDEX\tGID\nmlx5_0\t1\t0\tfe80::1\n", "`show_gids`"),
        ("#       size         count      type   redop    root     time\n", "nccl-tests"),
        ("index, name, pci.bus_id\n0, NVIDIA H100, 00000000:18:00.0\n", "`nvidia-smi --query-gpu`"),
        ("# dmidecode 3.3\nGetting SMBIOS data from sysfs.\n", "`dmidecode`"),
        ("provider: efa\n    fabric: efa\n    domain: rdmap16s27-rdm\n", "`fi_info`"),
        ("#\n# Memory domain: mlx5_0\n#     Component: ib\n", "`ucx_info -d`"),
        ("MST modules:\n------------\n    MST PCI module loaded\n", "InfiniBand fabric"),
        ("CA: host1 HCA-1:\n      0xa088c20300abcdef      1    1[  ] ==( 4X )==>\n", "InfiniBand fabric"),
        ("NodeName=node1 Arch=x86_64 CoresPerSocket=32\n", "`scontrol`"),
        ("digraph topology {\n  a -> b;\n}\n", "Graphviz"),
        ("eth0             UP             02:42:ac:11:00:02 <BROADCAST,UP> \n", "`ip -br link`"),
        ("nvbandwidth Version: v0.8\n", "`nvbandwidth`"),
        ("# nThread 1 nGpus 8 minBytes 8 maxBytes 134217728\n", "nccl-tests"),
        ("         GPU 0/0  GPU 1/0  CPU Affinity\nGPU 0/0  S        XL16     0-23\n", "Intel's GPUs"),
        ("PATH=/usr/bin\nNCCL_DEBUG=INFO\n", "--env FILE"),
        ("<!DOCTYPE html>\n<html><body>GPU0 GPU1</body></html>", "raw"),
        ("Machine (1008GB total)\n  Package L#0\n    NUMANode L#0 (P#0 504GB)\n", "lstopo file.xml"),
        ('{"tool": "gradwire gdr-check", "format": 1}', "--compare"),
        ("The GPUs that have an affinity with CPU 0 are:\n0, 1\n", "topo -m"),
    ],
)
def test_what_another_tool_prints_is_named_with_what_to_give_instead(text: str, instead: str) -> None:
    with pytest.raises(TopologyError, match=r"this looks like ") as refused:
        files.machine_of(text)
    assert instead in str(refused.value)


@pytest.mark.parametrize("form", ["quoted", "pdsh", "srun", "mpirun", "compose", "nbsp", "pipes"])
def test_what_pasting_puts_around_a_matrix_is_taken_off(form: str) -> None:
    plain = draw.matrix(pcie_box())
    around = {
        "quoted": "> {}",
        "pdsh": "gpu-01: {}",
        "srun": "0: {}",
        "mpirun": "[1,0]<stdout>:{}",
        "compose": "node-1  | {}",
    }
    lines = [line for line in plain.splitlines() if line.strip()]
    if form in around:
        text = "\n".join(around[form].format(line) for line in lines)
    elif form == "nbsp":
        text = plain.expandtabs(8).replace(" ", "\u00a0")
    else:
        rows = [line.split("\t") for line in lines[: 1 + len(pcie_box().gpus) + len(pcie_box().nics)]]
        ruled = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
        text = "\n".join(f"| {' | '.join(row)} |" for row in ruled)
    found, wanted = files.machine_of(text), files.machine_of(plain)
    assert [each.key for each in found.gpus] == [each.key for each in wanted.gpus]
    assert {(each.a, each.b): each.name for each in found.given_paths} == {
        (each.a, each.b): each.name for each in wanted.given_paths
    }


def test_of_several_hosts_under_a_parallel_shell_the_first_is_shown_and_the_others_are_said() -> None:
    one, other = draw.matrix(pcie_box()), draw.matrix(dgx_h100())
    mixed = [f"a: {line}" for line in one.splitlines()] + [f"b: {line}" for line in other.splitlines()]
    for seed in range(4):
        order = list(mixed)
        if seed:  # as a parallel shell mixes them: each host's own lines stay in order
            lines = {"a": iter(mixed[: one.count(chr(10))]), "b": iter(mixed[one.count(chr(10)) :])}
            hosts = [line[0] for line in mixed]
            random.Random(seed).shuffle(hosts)
            order = [next(lines[host], "") for host in ["a", *hosts]]
        found = files.machine_of("\n".join(order))
        assert len(found.gpus) == len(files.machine_of(one).gpus)
        assert any("Lines of b: were left out" in note for note in found.notes)
