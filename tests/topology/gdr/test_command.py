"""The command as people call it: tables, JSON, exit codes, archives, and inputs that are broken on purpose."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.topology.gdr.command import main
from gradwire.topology.gdr.example import GPU, ExampleMachine
from gradwire.topology.gdr.stages import CHECKS


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    machine = ExampleMachine(tmp_path / "tree")
    machine.write_tree()
    return machine.root


@pytest.fixture
def env(tmp_path: Path) -> Path:
    path = tmp_path / "env"
    path.write_text("HOME=/root\nNCCL_DEBUG=INFO\n")
    return path


def test_a_tree_as_table_and_json(tree: Path, env: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--root", str(tree), "--env", str(env)])
    table = capsys.readouterr().out
    assert all(f" {check.name} " in table for check in CHECKS)
    assert "POSSIBLE" in table and "0 of 1 GPUs" in table and "unknown for 1" in table
    assert main(["--root", str(tree), "--env", str(env), "--json"]) == status == 3
    result = json.loads(capsys.readouterr().out)
    assert [check["id"] for check in result["checks"]] == [check.name for check in CHECKS]
    assert result["exit"] == 3 and result["pairs"][0]["path"] == "PIX"
    assert set(result["verdicts"]) == {"possible", "configured", "in use"}


def test_capture_and_from(tree: Path, env: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = tmp_path / "capture.tar.gz"
    first = main(["--root", str(tree), "--env", str(env), "--json", "--capture", str(archive)])
    before = json.loads(capsys.readouterr().out)
    assert main(["--from", str(archive), "--json"]) == first
    assert json.loads(capsys.readouterr().out) == before


def test_compare_names_the_odd_host(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--root", str(tree), "--json"])
    good = json.loads(capsys.readouterr().out)
    bad = json.loads(json.dumps(good))
    next(check for check in bad["checks"] if check["id"] == "M1")["outcome"] = "fail"
    names = ["node1", "node2", "node3"]
    for name, result in zip(names, (good, good, bad), strict=True):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    paths = [str(tmp_path / f"{name}.json") for name in names]
    assert main(["--compare", *paths]) == 2
    assert capsys.readouterr().out == "M1: node3 has fail, 2 hosts have pass\n"
    assert main(["--compare", *paths[:2]]) == 0
    assert main(["--compare", paths[0]]) == 3
    assert main(["--compare", *paths, "--json"]) == 2


def test_a_host_without_hardware_ends_with_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ExampleMachine(tmp_path)
    machine.functions = {}
    machine.remove("sys/bus")
    assert main(["--root", str(tmp_path)]) == 3
    assert "nothing to check" in capsys.readouterr().out


def test_this_machine_is_checked_without_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", "gdr-check", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == json.loads(done.stdout)["exit"] and not done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--root", "MISSING"],
        ["--from", "MISSING"],
        ["--from", "TEXT"],
        ["--from", "FOLDER"],
        ["--lspci", "TEXT"],
        ["--lspci", "FOLDER"],
        ["--nccl-log", "MISSING"],
        ["--nccl-log", "FOLDER"],
        ["--env", "MISSING"],
        ["--nvlink", "TEXT"],
        ["--perftest", "TEXT", "TEXT"],
        ["--compare", "TEXT"],
        ["--compare", "FOLDER"],
        ["--nccl-version", "cheese"],
        ["--root", "FOLDER", "--prove"],
        ["--root", "FOLDER", "--capture", "MISSING/x"],
        ["--root", "FOLDER", "--from", "TEXT"],
        ["--no-such-option"],
    ],
)
def test_bad_usage_is_an_error_of_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "TEXT").write_bytes(b"\xff\x00cheese")
    (tmp_path / "FOLDER").mkdir()
    places = [str(tmp_path / word) if word.split("/")[0].isupper() else word for word in words]
    assert main(places) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.strip() and words[0].strip("-").split("-")[0] in error


@pytest.mark.parametrize("name", ["proc/self/status", "sys/bus/pci/devices", "sys/class/infiniband", "proc/cmdline"])
@pytest.mark.parametrize("kind", ["loop", "fifo", "giant", "noise", "folder", "outside", "denied"])
def test_broken_trees_are_partly_answered(tree: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ExampleMachine(tree)
    machine.write_tree()
    machine.remove(name)
    place = tree / name
    if kind == "loop":
        machine.link(name, name)
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "giant":
        with place.open("wb") as file:
            file.truncate(1 << 40)
    elif kind == "noise":
        place.write_bytes(bytes(range(256)) * 50)
    elif kind == "folder":
        (place / "x" / "y").mkdir(parents=True)
    elif kind == "outside":
        place.symlink_to("/usr")
    else:
        place.write_text("")
        place.chmod(0)
    assert main(["--root", str(tree), "--json"]) in (1, 2, 3)
    assert len(json.loads(capsys.readouterr().out)["checks"]) in (0, len(CHECKS))


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "--nccl-log" in capsys.readouterr().out


def test_a_bus_id_is_no_emoji(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ExampleMachine(tmp_path)
    gpu = replace(machine.functions.pop(GPU), bus_id="0000:cd:00.0")
    machine.functions[gpu.bus_id] = gpu
    machine.write_tree()
    main(["--root", str(tmp_path)])
    assert "│ 0000:cd:00.0 │" in capsys.readouterr().out


def test_control_characters_of_a_foreign_capture_do_not_reach_the_terminal(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "proc/cmdline").write_text("iommu=\x1b[2J[bold]x")
    main(["--root", str(tree)])
    shown = capsys.readouterr().out
    assert "\x1b[2J" not in shown and "iommu=?[2J[bold]x" in shown
