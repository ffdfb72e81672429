import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Machine
from gradwire.topology.labels import Labels
from gradwire.topology.paths import Distances, PathType
from gradwire.topology.readers import smi
from gradwire.topology.show import draw
from gradwire.topology.show.json_form import to_object
from gradwire.topology.show.svg import svg

SMALL = """\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tPIX\t0-15\t0
GPU1\tNV4\t X \tNODE\t16-31\t1
mlx5_0\tPIX\tNODE\t X
"""


P2P = " \tGPU0\tGPU1\n GPU0\tX\tCNS\n GPU1\tCNS\tX\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n"
GRACE = """\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tSYS\tSYS\t0-71\t0,2-5\t\t2
GPU1\tNV18\t X \tSYS\tSYS\t72-143\t1,10-13\t\t10
NIC0\tSYS\tSYS\t X \tSYS
NIC1\tSYS\tSYS\tSYS\t X
"""


@pytest.mark.parametrize(
    "prompt", ["nvidia-smi topo -m", "(base) root@epyc:~# nvidia-smi topo -mp", "$ sudo nvidia-smi topo --matrix"]
)
def test_a_header_may_stand_behind_its_command(prompt: str) -> None:
    text = (
        f"{prompt}            GPU0    GPU1    CPU Affinity\nGPU0     X      PHB     0-23\nGPU1    PHB      X      0-7\n"
    )
    machine = smi.read(text)
    assert [gpu.key for gpu in machine.gpus] == ["GPU0", "GPU1"]
    assert smi.looks_like_smi(text) and not smi.looks_like_smi(f"{prompt}\n")


def test_every_fixture_has_the_right_answer(fixtures: Path) -> None:
    expected = json.loads((fixtures / "expected_smi_topo.json").read_text())
    assert len(expected) == 8
    for name, answer in expected.items():
        found = to_object(smi.read((fixtures / "smi_topo" / name).read_text()))
        assert {key: found[key] for key in answer} == answer, name


def test_the_printed_matrix_is_read_back(preset: Machine) -> None:
    back = smi.read(draw.matrix(preset))
    before, after = Distances(preset), Distances(back)
    assert (len(back.gpus), len(back.nics)) == (len(preset.gpus), len(preset.nics))
    for a, x in zip(preset.gpus, back.gpus, strict=True):
        assert [before.gpu_gpu(a, b) for b in preset.gpus] == [after.gpu_gpu(x, y) for y in back.gpus]
        assert [before.gpu_nic(a, nic) for nic in preset.nics] == [after.gpu_nic(x, nic) for nic in back.nics]
    assert [nic.ports[0].name for nic in back.nics] == [nic.ports[0].name for nic in preset.nics]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text,
        lambda text: text.replace("\t", "    "),
        lambda text: text.replace("GPU0", "\x1b[4mGPU0\x1b[0m"),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "$ nvidia-smi topo -m\n" + text + "\nLegend:\n  X = Self\n",
        lambda text: text.replace("GPU0\tGPU1\tmlx5_0", "GPU0GPU1mlx5_0"),
        lambda text: P2P + text,
        lambda text: "\n".join(text.splitlines()[:3]),
        lambda text: text + text,
    ],
)
def test_the_same_machine_in_other_clothes(change: Callable[[str], str]) -> None:
    machine = smi.read(change(SMALL))
    distances = Distances(machine)
    assert [distances.gpu_nic(gpu, machine.nics[0]) for gpu in machine.gpus] == [PathType.PIX, PathType.PHB]
    assert [cpu.cores for cpu in machine.cpus] == ["0-15", "16-31"]
    assert machine.defects == ()


def test_cells_run_together_are_told_apart() -> None:
    machine = smi.read(SMALL.replace("NV4\tPIX", "NV4PIX"))
    assert Distances(machine).gpu_nic(machine.gpus[0], machine.nics[0]) is PathType.PIX


def test_contradicting_cells_are_unknown_and_named() -> None:
    machine = smi.read(SMALL.replace("mlx5_0\tPIX", "mlx5_0\tSYS"))
    assert [defect.where for defect in machine.defects] == ["GPU0-mlx5_0: PIX/SYS"]
    assert Distances(machine).gpu_nic(machine.gpus[0], machine.nics[0]) is None


@pytest.mark.parametrize("separator", ["\t", "   "])
def test_sys_says_nothing_about_a_coherent_gpu(separator: str) -> None:
    """nvidia-smi compares the memory node of the GPU itself, so a card of the same Grace is SYS as any other."""
    text = GRACE.replace("\t\t", "\t") if separator != "\t" else GRACE
    machine = smi.read(text.replace("\t", separator))
    assert [gpu.parent for gpu in machine.gpus] == ["numa0", "numa1"]
    assert [cpu.cores for cpu in machine.cpus] == ["0-71", "72-143"]
    assert {(link.a, link.b) for link in machine.links if link.kind == "c2c"} == {("GPU0", "numa0"), ("GPU1", "numa1")}
    distances = Distances(machine)
    assert {distances.gpu_nic(gpu, nic) for gpu in machine.gpus for nic in machine.nics} == {None}
    assert distances.nic_nic(*machine.nics) is PathType.SYS
    assert any("coherent" in note and "P2C" in note for note in machine.notes)
    plain = smi.read(re.sub(r"\t\t\d+", "\t\tN/A", GRACE))
    assert Distances(plain).gpu_nic(plain.gpus[0], plain.nics[0]) is PathType.SYS
    assert not any("coherent" in note for note in plain.notes)


def test_a_card_of_a_coherent_gpus_own_cpu_is_p2c() -> None:
    machine = smi.read(GRACE.replace("NV18\tSYS", "NV18\tNODE", 1).replace("NIC0\tSYS", "NIC0\tNODE"))
    assert Distances(machine).nearest_nics(machine.gpus[0]) == (PathType.P2C, (machine.nics[0],))


@pytest.mark.parametrize("cell", ["SYS", "SOC", "ZZZ"])
def test_a_word_of_another_release_cuts_no_row(cell: str) -> None:
    """What stands behind a word, known or not, is read: the NVLinks of a DGX-1 among others."""
    names = [f"GPU{i}" for i in range(4)]
    rows = [
        "\t".join([a, *("X" if a == b else "NV2" if abs(i - j) == 2 else cell for j, b in enumerate(names)), "0-7"])
        for i, a in enumerate(names)
    ]
    machine = smi.read("\n".join(["\t" + "\t".join([*names, "CPU Affinity"]), *rows, "", "Legend:", "  NV# = NVLink"]))
    assert {(link.a, link.b, link.count) for link in machine.links} == {("GPU0", "GPU2", 2), ("GPU1", "GPU3", 2)}
    assert machine.defects == ()
    expected = None if cell == "ZZZ" else PathType.SYS
    assert Distances(machine).gpu_gpu(machine.gpus[0], machine.gpus[1]) is expected
    assert machine.links_known is (expected is not None), "an NVLink may stand where nothing can be read"
    assert any("ZZZ" in note for note in machine.notes) is (expected is None)
    assert to_object(machine)["gpus"][0]["nvlinks"] == (2 if expected else None)  # type: ignore[index]


def test_peer_access_is_no_distance() -> None:
    with pytest.raises(TopologyError, match=r"topo -p2p.*topo -m"):
        smi.read(P2P)


def test_matrices_of_two_hosts_are_named() -> None:
    other = SMALL.replace("PIX", "SYS").replace("NODE", "SYS")
    assert any("another matrix that differs" in note for note in smi.read(SMALL + other).notes)
    assert not any("further" in note for note in smi.read(SMALL + SMALL).notes)


def test_a_row_that_was_cut_is_named_and_its_mirror_image_used() -> None:
    machine = smi.read(SMALL.replace("GPU0\t X \tNV4\tPIX\t0-15\t0", "GPU0\t X \tNV"))
    assert [(defect.kind, defect.where) for defect in machine.defects] == [("short_row", "GPU0")]
    assert Distances(machine).gpu_nic(machine.gpus[0], machine.nics[0]) is PathType.PIX


def test_no_nvlink_in_the_text_is_not_no_nvlink(fixtures: Path) -> None:
    notes = smi.read((fixtures / "smi_topo/dgx1-8gpu-4hca-mp.txt").read_text()).notes
    assert any("NVLink is unknown" in note for note in notes)
    notes = smi.read((fixtures / "smi_topo/gtx1080ti-x2-phb.txt").read_text()).notes
    assert not any("NVLink is unknown" in note for note in notes)


def test_a_switch_is_inferred_only_where_direct_links_cannot_be(fixtures: Path) -> None:
    direct = smi.read((fixtures / "smi_topo/perlmutter-a100x4-nonic-shown.txt").read_text())
    switched = smi.read((fixtures / "smi_topo/b200-8gpu-nonic-container.txt").read_text())
    assert direct.nvswitches == ()
    assert len(direct.links) == 6
    assert [switch.key for switch in switched.nvswitches] == ["hidden"]


def test_a_nic_below_the_same_cpu_as_a_gpu_is_placed_there() -> None:
    machine = smi.read(SMALL)
    assert machine.nics[0].parent == "numa0"
    assert smi.read(SMALL.replace("PIX", "SYS").replace("NODE", "SYS")).nics[0].parent is None


@pytest.mark.parametrize("near", ["PIX", "PSB", "PXB", "PHB"])
def test_the_nearest_gpu_says_where_a_nic_hangs(near: str) -> None:
    """Not the first one below the same CPU: NODE spans several NUMA nodes on some machines."""
    text = SMALL.replace("PIX", "FIRST").replace("NODE", near).replace("FIRST", "NODE")
    assert smi.read(text).nics[0].parent == "numa1"
    assert smi.read(SMALL.replace("PIX", "NODE")).nics[0].parent is None, "two that are as near, on different nodes"


def test_affinities_that_are_missing_or_ranges_are_unknown() -> None:
    machine = smi.read(SMALL.replace("\t0-15\t0\n", "\t\t0-1\n"))
    assert machine.gpus[0].parent is None


@pytest.mark.parametrize("text", ["", "hello", "GPU 0: NVIDIA A100", "GPU0 GPU0\nGPU0 X X", "a1 b2\na1 X PIX"])
def test_text_without_a_matrix_is_refused(text: str) -> None:
    with pytest.raises(TopologyError, match="no matrix"):
        smi.read(text)


def test_a_matrix_too_wide_for_a_machine_is_refused() -> None:
    with pytest.raises(TopologyError, match="no matrix"):
        smi.read("\t".join(f"GPU{i}" for i in range(100_000)))


def eight(cell: Callable[[int, int], str]) -> str:
    """A matrix of eight GPUs and two cards, with affinities."""
    names = [f"GPU{i}" for i in range(8)] + ["NIC0", "NIC1"]
    lines = ["\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity"])]
    for i, a in enumerate(names):
        cells = ["X" if i == j else cell(i, j) if max(i, j) < 8 else "SYS" for j in range(10)]
        lines.append("\t".join([a, *cells, *(["0-31", "0"] if i < 8 else [])]))
    return "\n".join(lines) + "\n\nLegend:\n  NV# = NVLink\n\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"


def test_a_legend_belongs_to_the_matrix_above_it() -> None:
    first = eight(lambda i, j: "NV12")
    second = first.replace("mlx5_", "rdmap").replace("0-31", "32-63")
    machine = smi.read(first + "\n" + second)
    assert [nic.ports[0].name for nic in machine.nics] == ["mlx5_0", "mlx5_1"]
    joined = first.replace("mlx5_0\n  NIC1", "mlx5_0   NIC1")
    assert [nic.ports[0].name for nic in smi.read(joined).nics] == ["mlx5_0", "mlx5_1"]


@pytest.mark.parametrize("width", [6, 8, 10])
@pytest.mark.parametrize("rows_too", [False, True])
def test_what_a_narrow_terminal_broke_is_one_matrix(width: int, rows_too: bool) -> None:
    whole = eight(lambda i, j: "NV12")
    broken = []
    for line in whole.splitlines():
        cells = line.replace("CPU Affinity", "CPU-Affinity").replace("NUMA Affinity", "NUMA-Affinity").split("\t")
        rows = len(cells) > width + 1 and (rows_too or not cells[0])
        pieces = [cells[: width + 1], cells[width + 1 :]] if rows else [cells]
        broken += ["   ".join(piece).replace("-Affinity", " Affinity") for piece in pieces]
    machine, same = smi.read("\n".join(broken)), smi.read(whole)
    assert (len(machine.gpus), len(machine.nics), machine.links) == (8, 2, same.links)
    assert machine.defects == () and [nic.ports[0].name for nic in machine.nics] == ["mlx5_0", "mlx5_1"]
    if width != 10 or not rows_too:  # with rows broken there, which number is the NUMA node's is not told
        assert [gpu.parent for gpu in machine.gpus] == ["numa0"] * 8


def test_a_gpu_that_is_off_nvlink_is_named() -> None:
    machine = smi.read(eight(lambda i, j: "SYS" if 3 in (i, j) else "NV12"))
    (note,) = Labels(machine).link_notes()
    assert note.startswith("GPU3 has no NVLink where 7 others have ")
    assert Labels(smi.read(eight(lambda i, j: "NV12"))).link_notes() == []
    assert Labels(smi.read(eight(lambda i, j: "SYS"))).link_notes() == []
    assert "7 of 8 GPUs" in svg(machine)


def test_cells_of_amd_are_whole_words() -> None:
    machine = smi.read(eight(lambda i, j: "XGMI"))
    assert machine.defects == ()
    assert Distances(machine).gpu_gpu(machine.gpus[0], machine.gpus[5]) is PathType.NVL


ROCM = """============================ ROCm System Management Interface ============================
================================ Weight between two GPUs =================================
       GPU0         GPU1         GPU2
GPU0   0            15           40
GPU1   15           0            40
GPU2   40           40           0

=============================== Link Type between two GPUs ===============================
       GPU0         GPU1         GPU2
GPU0   0            XGMI         PCIE
GPU1   XGMI         0            PCIE
GPU2   PCIE         PCIE         0

======================================= Numa Nodes =======================================
GPU[0]\t\t: (Topology) Numa Node: 0
GPU[0]\t\t: (Topology) Numa Affinity: 0
GPU[1]\t\t: (Topology) Numa Node: 0
GPU[2]\t\t: (Topology) Numa Node: 1
================================== End of ROCm SMI Log ===================================
"""


def test_the_topology_of_rocm_smi() -> None:
    machine = smi.read(ROCM)
    assert [gpu.parent for gpu in machine.gpus] == ["numa0", "numa0", "numa1"]
    assert [(link.a, link.b, link.kind) for link in machine.links] == [("GPU0", "GPU1", "xgmi")]
    distances = Distances(machine)
    assert distances.gpu_gpu(machine.gpus[0], machine.gpus[1]) is PathType.NVL
    assert machine.defects == () and machine.sources == ("rocm-smi --showtopo",)
    (note,) = Labels(machine).link_notes()
    assert note.startswith("GPU2 has no xGMI link where 2 others have 1: ")


WITHOUT_COLUMN = GRACE.replace("\tGPU NUMA ID", "").replace("\t\t2\n", "\n").replace("\t\t10\n", "\n")


@pytest.mark.parametrize(("text", "doubted"), [
    (WITHOUT_COLUMN, True),
    (WITHOUT_COLUMN.replace("SYS", "NODE"), True),
    (WITHOUT_COLUMN.replace("NV18", "NV4"), False),
    (WITHOUT_COLUMN.replace("NV18\tSYS\tSYS\t0-71", "NV18\tPIX\tSYS\t0-71"), False),
    (GRACE, False),
])  # fmt: skip
def test_a_matrix_that_may_be_of_grace_says_that_sys_may_mean_nothing(text: str, doubted: bool) -> None:
    notes = " ".join(smi.read(text).notes)
    assert ("If these are Grace superchips" in notes) is doubted
    assert ("over C2C" in notes) is doubted


@pytest.mark.parametrize(("columns", "left_out"), [(3, "GPU3, NIC0"), (4, "NIC0"), (5, None)])
def test_devices_that_were_cut_off_at_the_right_are_named(columns: int, left_out: str | None) -> None:
    """By `cut`, or by a terminal from which the visible part was copied."""
    names = ["GPU0", "GPU1", "GPU2", "GPU3", "NIC0"]
    rows = [[" X " if a == b else "NV4" if "NIC0" not in (a, b) else "PXB" for b in names] for a in names]
    lines = [["", *names], *([name, *row] for name, row in zip(names, rows, strict=True))]
    machine = smi.read("\n".join("\t".join(line[: columns + 1]) for line in lines))
    assert len(machine.gpus) + len(machine.nics) == columns
    cut = [note for note in machine.notes if "cut off at the right" in note]
    assert [note.partition(": ")[0] for note in cut] == ([left_out] if left_out else [])


IDLE_CARDS = """\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tPIX\tNODE\t0-31\t0\t\tN/A
GPU1\tNV18\t X \tNODE\tNODE\t0-31\t0\t\tN/A
"""


def test_a_gpu_that_is_far_from_all_cards_gets_an_idle_one() -> None:
    found = to_object(smi.read(IDLE_CARDS))
    assert [gpu["nic"] for gpu in found["gpus"]] == [["NIC0"], ["NIC1"]]  # type: ignore[attr-defined]


def test_sets_of_cores_are_told_apart_where_no_numa_node_is_named() -> None:
    text = "\tGPU0\tGPU1\tGPU2\tCPU Affinity\nGPU0\t X \tPHB\tSYS\t0-15\nGPU1\tPHB\t X \tSYS\t0-15\n"
    machine = smi.read(text + "GPU2\tSYS\tSYS\t X \t16-31\n")
    assert to_object(machine)["n_numa"] == 2
    assert [gpu.parent for gpu in machine.gpus] == ["cores 0-15", "cores 0-15", "cores 16-31"]
    assert all(cpu.numa is None for cpu in machine.cpus)
    assert to_object(smi.read(SMALL))["n_numa"] == 2


def test_gdr_is_unknown_where_the_distance_is() -> None:
    """JSON of a GB200's matrix: SYS says nothing of a coherent GPU."""
    found = to_object(smi.read(GRACE))
    for gpu in found["gpus"]:  # type: ignore[attr-defined]
        assert (gpu["nearest_path"], gpu["within_default_level"]) == (None, None)
    assert [each["gdr_default"] for each in found["per_gpu"].values()] == [None, None]  # type: ignore[attr-defined]


def test_a_gpu_with_fewer_links_is_named_in_json_as_well() -> None:
    rows = [["X" if a == b else "NV1" if 3 in (a, b) else "NV2" for b in range(4)] for a in range(4)]
    lines = ["\t".join(["", *(f"GPU{b}" for b in range(4))])]
    lines += ["\t".join([f"GPU{a}", *row]) for a, row in enumerate(rows)]
    machine = smi.read("\n".join(lines))
    (note,) = Labels(machine).link_notes()
    assert note.startswith("GPU3 has 3 NVLinks where 3 others have 5")
    assert note in to_object(machine)["notes"]  # type: ignore[operator]


AMD_SMI = """ACCESS TABLE:
             0000:03:00.0 0000:0c:00.0 0000:22:00.0
0000:03:00.0 ENABLED      ENABLED      ENABLED
0000:0c:00.0 ENABLED      ENABLED      ENABLED
0000:22:00.0 ENABLED      ENABLED      ENABLED

LINK TYPE TABLE:
             0000:03:00.0 0000:0c:00.0 0000:22:00.0
0000:03:00.0 SELF         XGMI         PCIE
0000:0c:00.0 XGMI         SELF         PCIE
0000:22:00.0 PCIE         PCIE         SELF

NUMA BW TABLE:
             0000:03:00.0 0000:0c:00.0 0000:22:00.0
0000:03:00.0 N/A          50000-50000  N/A
"""


def test_the_topology_of_amd_smi() -> None:
    machine = smi.read(AMD_SMI)
    distances = Distances(machine)
    assert [(gpu.bus, gpu.index) for gpu in machine.gpus] == [("0000:03:00.0", 0), ("0000:0c:00.0", 1),
                                                              ("0000:22:00.0", 2)]  # fmt: skip
    assert distances.gpu_gpu(*machine.gpus[:2]) is PathType.NVL and distances.gpu_gpu(*machine.gpus[1:]) is None
    assert [(link.a, link.b, link.kind) for link in machine.links] == [("0000:03:00.0", "0000:0c:00.0", "xgmi")]
    with pytest.raises(TopologyError, match="no line of bus ids"):
        smi.read("LINK TYPE TABLE:\n\nnothing\n")
