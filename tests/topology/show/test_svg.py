"""The picture: everything is in it, nothing covers anything, and it fits a page."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gradwire.topology.bandwidth import pcie_bytes_per_second
from gradwire.topology.graph import DeviceLink, Gpu, Machine, Nic, PcieLink
from gradwire.topology.labels import Labels, gigabits, gigabytes, nic_name
from gradwire.topology.presets import cpu_only, dgx_a100, dgx_h100, p4d, pcie_box
from gradwire.topology.readers import smi
from gradwire.topology.show.svg import FAR, GDR, svg
from gradwire.topology.show.svg_layout import NARROWEST, brackets, layout

SVG = "{http://www.w3.org/2000/svg}"
PAGE_WIDTH = 1200
"""Pixels that still leave letters of 11 pixels readable on a page 800 wide."""


def seventeen_nics() -> Machine:
    """What nvidia-smi prints of 8 GPUs with four cards for two of them, and one card elsewhere."""
    names = [f"GPU{i}" for i in range(8)] + [f"mlx5_{i}" for i in range(16)] + ["mlx5_bond_0"]

    def group(name: str) -> int:
        number = int(name[3:]) // 2 if name.startswith("GPU") else 9 if "bond" in name else int(name[5:]) // 4
        return number

    def cell(a: str, b: str) -> str:
        if a == b:
            return "X"
        return "NV12" if a[0] == b[0] == "G" else "PXB" if group(a) == group(b) else "NODE" if 9 not in (
            group(a), group(b)) else "SYS"  # fmt: skip

    rows = ["\t".join([a, *(cell(a, b) for b in names), "0-103", "0"]) for a in names]
    return smi.read("\n".join(["\t".join(["", *names, "CPU Affinity", "NUMA Affinity"]), *rows]))


def hybrid_cube_mesh() -> Machine:
    """The eight V100 of a DGX-1: two NVLinks between some pairs, one between others, none between the rest."""
    box = pcie_box(8)
    two = ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))
    one = ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7))
    links = tuple(
        DeviceLink(a=box.gpus[a].key, b=box.gpus[b].key, kind="nvlink", count=count, bytes_per_second=count * 20e9)
        for count, pairs in ((2, two), (1, one))
        for a, b in pairs
    )
    return replace(box, links=links, hostname="dgx-1", product="DGX-1 with a rather long name of its own")


def sixteen_gpus() -> Machine:
    """Two boards of eight GPUs and six NVSwitches, with the longest bus ids and the fastest cards there are."""
    whole = dgx_h100()
    link = PcieLink(gigatransfers_per_second=64.0, lanes=16, current_gigatransfers_per_second=2.5)

    def moved(device: Gpu | Nic, number: int) -> dict[str, object]:
        key = f"{0x1000 + number:04x}:{device.key[5:]}"
        return {"key": key, "bus": key, "pcie": link}

    more = [replace(gpu, index=8 + i, **moved(gpu, i)) for i, gpu in enumerate(whole.gpus)]  # type: ignore[arg-type]
    fast = replace(whole.nics[0].ports[0], name="rocep216s0f1", bits_per_second=1.6e12)
    nics = [replace(nic, ports=(fast,), **moved(nic, i)) for i, nic in enumerate(whole.nics[:8])]  # type: ignore[arg-type]
    links = [replace(one, a=more[[gpu.key for gpu in whole.gpus].index(one.a)].key) for one in whole.links]
    return replace(whole, gpus=(*whole.gpus, *more), nics=(*whole.nics, *nics), links=(*whole.links, *links))


def no_place() -> Machine:
    return replace(pcie_box(2), cpus=(), gpus=tuple(replace(gpu, parent=None) for gpu in pcie_box(2).gpus))


MACHINES = (
    dgx_a100, dgx_h100, p4d, pcie_box, cpu_only, seventeen_nics, hybrid_cube_mesh, sixteen_gpus, no_place, Machine,
)  # fmt: skip


@pytest.fixture(params=MACHINES, ids=lambda make: make.__name__)
def machine(request: pytest.FixtureRequest) -> Machine:
    make: Callable[[], Machine] = request.param
    return make()


def words_of(text: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(text).iter(f"{SVG}text")]


def places(text: str) -> Iterator[tuple[str, float, float, float, float]]:
    """(words, left, top, right, bottom) of every text that is not rotated, by the usual width of a letter."""
    root = ElementTree.fromstring(text)
    rotated = {id(element) for group in root.iter(f"{SVG}g") for element in group.iter(f"{SVG}text")}
    for element in root.iter(f"{SVG}text"):
        if id(element) not in rotated:
            words, size = element.text or "", float(element.get("font-size", 0))
            assert size >= 11, words
            width = len(words) * size * (0.65 if element.get("font-weight") else 0.55)
            x, y = float(element.get("x", 0)), float(element.get("y", 0))
            left = {"start": x, "middle": x - width / 2, "end": x - width}[element.get("text-anchor", "start")]
            yield words, left, y - 0.72 * size, left + width, y + 0.15 * size


def test_no_text_covers_another_or_leaves_the_picture_and_the_picture_fits_a_page(machine: Machine) -> None:
    text = svg(machine)
    size = re.search(r'width="(\d+)" height="(\d+)"', text)
    assert size is not None
    width, height = int(size[1]), int(size[2])
    assert NARROWEST <= width <= PAGE_WIDTH
    found = list(places(text))
    for words, left, top, right, bottom in found:
        assert left >= 0 and top >= 0 and right <= width and bottom <= height, words
    for one, other in combinations(found, 2):
        apart = one[3] <= other[1] or other[3] <= one[1] or one[4] <= other[2] or other[4] <= one[2]
        assert apart, (one, other)


def test_the_picture_names_every_device_and_what_joins_it(machine: Machine) -> None:
    text = svg(machine)
    words, labels = words_of(text), Labels(machine)
    assert all(labels.gpu(gpu) in words for gpu in machine.gpus)
    assert all(nic.ports[0].name in words for nic in machine.nics)
    assert words.count("NVSwitch") == len(machine.nvswitches)
    assert not any(re.search(r"bit…|bit/s .*…", word) for word in words), "a rate is never cut"
    pairs = {
        (gpu.key, nic.key)
        for gpu in machine.gpus
        for nic in machine.nics
        if labels.distances.qualifies_for_gdr(gpu, nic)
    }
    found = brackets(labels)
    assert {(gpu, nic) for one in found if one.good for gpu in one.gpus for nic in one.nics} == pairs
    assert {gpu for one in found if not one.good for gpu in one.gpus} == {
        gpu.key
        for gpu in machine.gpus
        if not any(gpu.key == a for a, _ in pairs) and labels.distances.nearest_nics(gpu)[1]
    }
    strokes = [element.get("stroke") for element in ElementTree.fromstring(text).iter(f"{SVG}path")]
    assert strokes.count(GDR) == sum(one.good for one in found)
    assert strokes.count(FAR) == sum(not one.good for one in found)


def test_nothing_in_the_picture_overlaps_or_leaves_it(machine: Machine) -> None:
    plan = layout(Labels(machine))
    boxes = [*plan.boxes.values(), *plan.nvswitches]
    for i, a in enumerate(boxes):
        assert a.x >= 0
        assert a.x + a.width <= plan.width
        for b in boxes[i + 1 :]:
            apart = a.x + a.width <= b.x or b.x + b.width <= a.x or a.bottom <= b.y or b.bottom <= a.y
            assert apart, (a, b)


def test_every_pair_of_a_hybrid_mesh_is_told_apart() -> None:
    words = words_of(svg(hybrid_cube_mesh()))
    assert (words.count("NV2"), words.count("NV1")) == (16, 16)
    assert words.count("NVB") == 56 - 32
    assert not {"NV2", "NV1"} & set(words_of(svg(dgx_h100()))), "where all are alike a table says nothing"


def test_the_pages_picture_is_the_one_that_is_drawn() -> None:
    page = Path(__file__).parents[3] / "docs/pictures/topology-dgx-h100.svg"
    if not page.exists():
        pytest.skip("docs/pictures is no part of a source distribution")
    assert page.read_text(encoding="utf-8") == svg(dgx_h100())


def test_a_machine_is_called_by_its_name_its_model_or_its_file() -> None:
    box = replace(pcie_box(), hostname=None, sources=("NCCL XML (rack7.xml)",))
    assert words_of(svg(box))[0] == "rack7.xml"
    assert words_of(svg(replace(box, product="DGXH100")))[0] == "DGXH100"
    assert words_of(svg(replace(box, product="DGXH100", hostname="node7")))[0] == "node7 · DGXH100"
    assert words_of(svg(replace(box, sources=("sysfs",))))[0] == "unnamed machine"


@pytest.mark.parametrize(
    ("rate", "words"),
    [(1.6e12, "1.6 T"), (450e9, "450 G"), (370.8e9, "371 G"), (999.6e9, "1 T"), (25e9, "25 G"), (375e6, "375 M"),
     (1e9, "1 G"), (1.8e12, "1.8 T"), (800e9, "800 G"), (12.5e9, "12.5 G")],
)  # fmt: skip
def test_rates_are_written_as_people_write_them(rate: float, words: str) -> None:
    assert (gigabits(rate), gigabytes(rate)) == (f"{words}bit/s", f"{words}B/s")


def shared_by_far_gpus(pairs: int) -> Machine:
    """GPUs of which each shares its card with one that is far down the page: no two brackets fit one lane."""
    names = [f"GPU{i}" for i in range(2 * pairs)] + [f"mlx5_{i}" for i in range(pairs)]

    def cell(a: str, b: str) -> str:
        numbers = [int(re.sub(r"\D", "", name.removeprefix("mlx5_"))) % pairs for name in (a, b)]
        return "X" if a == b else "PXB" if a[0] != b[0] and numbers[0] == numbers[1] else "SYS"

    rows = ["\t".join([a, *(cell(a, b) for b in names), "0-103", "0"]) for a in names]
    return smi.read("\n".join(["\t".join(["", *names, "CPU Affinity", "NUMA Affinity"]), *rows]))


@pytest.mark.parametrize("pairs", [8, 16, 40])
def test_many_brackets_move_together_and_the_page_stays_as_wide(pairs: int) -> None:
    machine = shared_by_far_gpus(pairs)
    plan = layout(Labels(machine))
    assert max(bracket.lane for bracket in plan.brackets) == pairs - 1
    assert plan.width <= PAGE_WIDTH
    drawn = ElementTree.fromstring(svg(machine))
    assert float(drawn.attrib["width"]) <= max(PAGE_WIDTH, 2 * 24 + 70 + 42 * len(machine.gpus))


@pytest.mark.parametrize(("names", "shown"), [
    (["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"], "mlx5_0-3"),
    (["mlx5_0", "mlx5_2", "mlx5_3"], "mlx5_0+mlx5_2+mlx5_3"),
    (["mlx5_0", "mlx5_1"], "mlx5_0+mlx5_1"),
    (["ens1f0np0", "ens1f1np1", "ens1f2np2"], "ens1f0np0+ens1f1np1+ens1f2np2"),
])  # fmt: skip
def test_ports_of_one_function_keep_their_rate_in_the_picture(names: list[str], shown: str) -> None:
    box = pcie_box(2)
    port = replace(box.nics[0].ports[0], link_layer="InfiniBand", bits_per_second=100e9, active=True)
    card = replace(box.nics[0], bus="0001:c1:00.0", ports=tuple(replace(port, name=name) for name in names))
    machine = replace(box, nics=(card,))
    texts = [element.text or "" for element in ElementTree.fromstring(svg(machine)).iter(f"{SVG}text")]
    assert nic_name(card) == shown
    assert any(f"{100 * len(names)} Gbit/s" in text for text in texts), texts


def test_a_link_inside_a_switch_chip_has_no_rate_that_leads_the_eye() -> None:
    """The parts of one PEX show a link of 2.5 GT/s x1 between them, which no data meets."""
    machine = dgx_a100()
    inner = PcieLink(gigatransfers_per_second=2.5, lanes=1)
    below = {switch.key for switch in machine.switches if switch.parent in {each.key for each in machine.switches}}
    for vendor, shown in ((0x1000, False), (None, True)):
        switches = tuple(
            replace(switch, vendor=vendor, pcie=inner) if switch.key in below else replace(switch, vendor=vendor)
            for switch in machine.switches
        )
        drawn = svg(replace(machine, switches=switches))
        assert (f">{gigabytes(pcie_bytes_per_second(inner))}<" in drawn) is shown
