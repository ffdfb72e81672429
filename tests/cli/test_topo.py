"""`gradwire topo`: one machine as tree, matrix, picture and files; a whole job; without torch where one suffices."""

import errno
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.cli.topo import RankMachine, main, show_job
from gradwire.topology.assign import nics_of_gpus
from gradwire.topology.graph import Gpu, Machine
from gradwire.topology.labels import nic_name
from gradwire.topology.presets import dgx_a100
from gradwire.topology.show import draw, json_form


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


def test_a_picture_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, described: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "a.svg"
    picture.write_text("old")

    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert main(["--from", described, "--svg", str(picture)]) == 2
    assert picture.read_text() == "old"
    assert list(tmp_path.glob(".a.svg*")) == []


def test_matrix_and_json_and_files(described: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--from", described, "--matrix"]) == 0
    assert draw.matrix(dgx_a100()) in capsys.readouterr().out
    assert main(["--from", described, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_gpu"] == 8
    picture = tmp_path / "a.svg"
    assert main(["--from", described, "--svg", str(picture)]) == 0
    assert capsys.readouterr().out == ""
    ElementTree.fromstring(picture.read_text())


def test_a_bus_id_is_no_emoji(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`:cd:` and `:ab:` are pictures in rich's markup."""
    gpus = tuple(Gpu(key=bus, bus=bus) for bus in ("0000:cd:00.0", "0000:ab:00.0"))
    (tmp_path / "a.json").write_text(json_form.write(Machine(gpus=gpus)))
    assert main(["--from", str(tmp_path / "a.json")]) == 0
    shown = capsys.readouterr().out
    assert all(gpu.key in shown for gpu in gpus)


def test_a_job_whose_ranks_were_given_gpus_by_uuid(capsys: pytest.CaptureFixture[str]) -> None:
    machine = dgx_a100()
    reports = []
    for node in range(2):
        uuids = [f"GPU-{node}{index}" for index in range(8)]
        gpus = zip(machine.gpus, uuids, strict=True)
        told = json_form.write(replace(machine, gpus=tuple(replace(gpu, uuid=uuid) for gpu, uuid in gpus)))
        reports += [
            RankMachine((f"n{node}",), rank, told, {"CUDA_VISIBLE_DEVICES": uuids[7 - rank]}) for rank in range(8)
        ]
    assert show_job(reports) == 0
    shown = " ".join(capsys.readouterr().out.split())
    cards = [nics_of_gpus(machine)[gpu.key] for gpu in reversed(machine.gpus)]
    line = f"NIC by local rank: {', '.join(nic_name(nic) for nic in cards if nic)} "
    assert shown.count("nodes 0, 1 ·") == 1
    assert shown.count(line) == 2
    assert "rank 0:" not in shown and "all ranks are well placed" in shown
    show_job(reports[::-1])
    assert " ".join(capsys.readouterr().out.split()).count(line) == 2
    show_job([replace(report, machine=json_form.write(machine)) for report in reports])
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("are not known: nvidia-ml-py") == 16 and shown.count("NIC by local rank: ?, ?") == 2
    assert "all ranks are well placed" not in shown and "16 of them unknown" in shown


def test_this_machine_and_a_captured_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "NUMA" in capsys.readouterr().out
    for path, text in (("sys/devices/system/node/node0/cpulist", "0-15"), ("proc/sys/kernel/hostname", "testhost")):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(f"{text}\n")
    assert main(["--root", str(tmp_path)]) == 0
    assert "testhost" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--from", "/nonexistent"], ["--root", "/nonexistent"], ["--svg", "/nonexistent/a.svg"]]
)
def test_what_cannot_be_used_is_one_line_and_status_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("gradwire topo: ")


@pytest.mark.netns
def test_a_round_robin_job_is_told_what_it_costs() -> None:
    with EmulatedCluster(nodes=[2, 1]) as cluster:
        result = cluster.run([sys.executable, "-m", "gradwire", "topo"], order="round-robin", timeout_seconds=120)
    assert "3 ranks on 2 nodes" in result.output[0]
    assert "node 0 node0: ranks 0, 2" in result.output[0]
    assert "not consecutive" in result.output[0]
    assert result.returncodes[0] == 1


def test_one_machine_is_shown_without_torch() -> None:
    script = "import sys; from gradwire.cli.topo import main; main([]); print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "False"
