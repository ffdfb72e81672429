import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from gradwire.topology.graph import Gpu, Machine, Nic, Port
from gradwire.topology.presets import dgx_a100
from gradwire.topology.readers.files import read_file
from gradwire.topology.show import draw, json_form
from gradwire.topology.show.command import main

if TYPE_CHECKING:
    from topology.conftest import SysTree


@pytest.fixture
def described(tmp_path: Path) -> str:
    file = tmp_path / "machine.json"
    file.write_text(json_form.write(dgx_a100()))
    return str(file)


def test_the_tree_shows_every_device(described: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--from", described]) == 0
    shown = capsys.readouterr().out
    for name in (*(f"GPU{i} " for i in range(8)), *(f"mlx5_{i} " for i in range(10)), "NUMA 7", "NVLink x12, 240 GB/s"):
        assert name in shown


def test_matrix_and_json_and_files(described: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--from", described, "--matrix"]) == 0
    assert draw.matrix(dgx_a100()) in capsys.readouterr().out
    assert main(["--from", described, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_gpu"] == 8
    picture, file = tmp_path / "a.svg", tmp_path / "a.xml"
    assert main(["--from", described, "--svg", str(picture), "--nccl-xml", str(file)]) == 0
    assert capsys.readouterr().out == ""
    ElementTree.fromstring(picture.read_text())
    assert len(read_file(file).gpus) == 8


@pytest.mark.parametrize(
    ("words", "status"),
    [(["topo"], 0), (["topo", "--json"], 0), (["gdr-check", "--example"], 0), (["gdr-check", "--root", "."], 2)],
)
def test_a_reader_that_leaves_early_is_no_error(words: list[str], status: int, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", *words], stdout=writer, stderr=subprocess.PIPE, check=False, cwd=tmp_path
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (status, b"")


def test_a_bus_id_is_no_emoji(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`:cd:` and `:ab:` are pictures in rich's markup."""
    gpus = tuple(Gpu(key=bus, bus=bus) for bus in ("0000:cd:00.0", "0000:ab:00.0"))
    (tmp_path / "a.json").write_text(json_form.write(Machine(gpus=gpus)))
    assert main(["--from", str(tmp_path / "a.json")]) == 0
    shown = capsys.readouterr().out
    assert all(gpu.key in shown for gpu in gpus)


def test_the_matrix_counts_gpus_and_cards_as_nvidia_smi_does() -> None:
    gpus = tuple(Gpu(key=f"g{index}", index=index) for index in (10, 2, 0))
    nics = tuple(Nic(key=name, ports=(Port(name=name),)) for name in ("mlx5_10", "mlx5_2", "mlx5_0"))
    rows = draw.matrix(Machine(gpus=gpus, nics=nics)).splitlines()
    assert rows[0].split("\t")[1:7] == ["GPU0", "GPU2", "GPU10", "NIC0", "NIC1", "NIC2"]
    assert [row.split()[1] for row in rows if row.startswith("  NIC")] == ["mlx5_0", "mlx5_2", "mlx5_10"]


def test_this_machine_and_a_captured_one(systree: "SysTree", capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "NUMA" in capsys.readouterr().out
    systree.host({0: "0-15"})
    assert main(["--root", str(systree.root)]) == 0
    assert "testhost" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--from", "/nonexistent"], ["--root", "/nonexistent"], ["--svg", "/nonexistent/a.svg"]]
)
def test_what_cannot_be_used_is_one_line_and_status_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("gradwire topo: ")


def test_the_picture_names_every_device_once_and_draws_a_curve_per_pair(preset: Machine) -> None:
    from gradwire.topology.labels import Labels
    from gradwire.topology.show.svg import FAR, GDR, svg

    text = svg(preset)
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    labels = Labels(preset)
    assert all(words.count(labels.gpu(gpu)) == 1 for gpu in preset.gpus)
    assert all(words.count(nic.ports[0].name) == 1 for nic in preset.nics)
    pairs = sum(labels.distances.qualifies_for_gdr(gpu, nic) for gpu in preset.gpus for nic in preset.nics)
    curves = [element.get("stroke") for element in root.iter("{http://www.w3.org/2000/svg}path")]
    assert curves.count(GDR) == pairs
    assert curves.count(FAR) == sum(
        not any(labels.distances.qualifies_for_gdr(gpu, nic) for nic in preset.nics) for gpu in preset.gpus
    )


def test_nothing_in_the_picture_overlaps_or_leaves_it(preset: Machine) -> None:
    from gradwire.topology.labels import Labels
    from gradwire.topology.show.svg_layout import layout

    plan = layout(Labels(preset))
    boxes = list(plan.boxes.values())
    for i, a in enumerate(boxes):
        assert a.x >= 0
        assert a.x + a.width <= plan.width
        for b in boxes[i + 1 :]:
            apart = a.x + a.width <= b.x or b.x + b.width <= a.x or a.bottom <= b.y or b.bottom <= a.y
            assert apart, (a, b)
