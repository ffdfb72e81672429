"""`gradwire gdr-check` as people call it: tables, JSON, exit codes, archives, broken inputs; then across a job.

Hosts of a job without the hardware have nothing to check, and the host that differs from the others is named.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.cli import gdr_check
from gradwire.topology.gdr.compare import differences
from gradwire.topology.gdr.example import GPU, ExampleMachine
from gradwire.topology.gdr.job import JobRank, RankResult, T
from gradwire.topology.gdr.stages import CHECKS
from support.forked import ForkServer


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
    status = gdr_check.check(["--root", str(tree), "--env", str(env)])
    table = capsys.readouterr().out
    assert all(f" {check.name} " in table for check in CHECKS)
    assert "POSSIBLE" in table and "0 of 1 GPUs" in table and "unknown for 1" in table
    assert gdr_check.check(["--root", str(tree), "--env", str(env), "--json"]) == status == 3
    result = json.loads(capsys.readouterr().out)
    assert [check["id"] for check in result["checks"]] == [check.name for check in CHECKS]
    assert result["exit"] == 3 and result["pairs"][0]["path"] == "PIX"
    assert set(result["verdicts"]) == {"possible", "configured", "in use"}


def test_capture_and_from(tree: Path, env: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = tmp_path / "capture.tar.gz"
    first = gdr_check.check(["--root", str(tree), "--env", str(env), "--json", "--capture", str(archive)])
    before = json.loads(capsys.readouterr().out)
    assert gdr_check.check(["--from", str(archive), "--json"]) == first
    assert json.loads(capsys.readouterr().out) == before


def test_compare_names_the_odd_host(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gdr_check.check(["--root", str(tree), "--json"])
    good = json.loads(capsys.readouterr().out)
    bad = json.loads(json.dumps(good))
    next(check for check in bad["checks"] if check["id"] == "M1")["outcome"] = "fail"
    names = ["node1", "node2", "node3"]
    for name, result in zip(names, (good, good, bad), strict=True):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    paths = [str(tmp_path / f"{name}.json") for name in names]
    assert gdr_check.check(["--compare", *paths]) == 2
    assert capsys.readouterr().out == "M1: node3 has fail, 2 hosts have pass\n"
    assert gdr_check.check(["--compare", *paths[:2]]) == 0
    assert gdr_check.check(["--compare", paths[0]]) == 3
    assert gdr_check.check(["--compare", *paths, "--json"]) == 2


def test_a_host_without_hardware_ends_with_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ExampleMachine(tmp_path)
    machine.functions = {}
    machine.remove("sys/bus")
    assert gdr_check.check(["--root", str(tmp_path)]) == 3
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
    assert gdr_check.check(places) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.strip()
    assert any(word.strip("-").split("-")[0] in error for word in words if word.startswith("-"))


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
    assert gdr_check.check(["--root", str(tree), "--json"]) in (1, 2, 3)
    assert len(json.loads(capsys.readouterr().out)["checks"]) in (0, len(CHECKS))


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert gdr_check.check(["--help"]) == 0
    assert "--nccl-log" in capsys.readouterr().out


def test_a_bus_id_is_no_emoji(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ExampleMachine(tmp_path)
    gpu = replace(machine.functions.pop(GPU), bus_id="0000:cd:00.0")
    machine.functions[gpu.bus_id] = gpu
    machine.write_tree()
    gdr_check.check(["--root", str(tmp_path)])
    assert " 0000:cd:00.0 " in capsys.readouterr().out


def test_control_characters_of_a_foreign_capture_do_not_reach_the_terminal(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "proc/cmdline").write_text("iommu=\x1b[2J[bold]x")
    gdr_check.check(["--root", str(tree)])
    shown = capsys.readouterr().out
    assert "\x1b[2J" not in shown and "iommu=?[2J[bold]x" in shown


@pytest.mark.netns
def test_an_emulated_job_meets_and_rank_0_speaks() -> None:
    with EmulatedCluster(nodes=[1, 1]) as cluster:
        result = cluster.run([sys.executable, "-m", "gradwire", "gdr-check"], timeout_seconds=120)
    if result.returncodes[0] != 3:
        pytest.skip("this host has hardware to check")
    assert "nothing to check" in result.output[0]
    assert not any("nothing to check" in text for text in result.output[1:])


def meeting(*others: dict[str, object], rank: int = 0) -> JobRank:
    """A job whose other hosts say what this one says, but for some words of their results."""

    def gather(own: T) -> list[T]:
        assert isinstance(own, RankResult)
        strangers = [
            replace(own, host=(f"there{n}",), result={**own.result, **words}) for n, words in enumerate(others)
        ]
        return [own, *strangers]

    return JobRank(rank, ("here",), gather)


def test_hosts_that_agree_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert gdr_check.check(["--example"], meeting({})) == 0
    assert "2 hosts agree" in capsys.readouterr().out


def test_a_host_without_hardware_is_the_odd_one_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert gdr_check.check(["--example"], meeting({"nothing": "0 NVIDIA GPUs", "checks": []})) == 2
    assert "there0 has nothing to check: 0 NVIDIA GPUs" in " ".join(capsys.readouterr().out.split())


def test_only_rank_0_prints_and_all_end_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert gdr_check.check(["--example"], meeting({"nothing": "0 NVIDIA GPUs", "checks": []}, rank=1)) == 2
    assert capsys.readouterr().out == ""


def test_a_description_is_shown_once_a_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, shown in (("0", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert gdr_check.main(["--example"]) == 0
        assert bool(capsys.readouterr().out) is shown


DRIVER = """
import sys
from pathlib import Path
from gradwire.cli import gdr_check
from gradwire.topology.gdr import sources
sources.LIVE_ROOT = Path(sys.argv[1])
if sys.argv[2]:
    gdr_check.PROVE_COMMAND = (sys.executable, sys.argv[2])
sys.exit(gdr_check.main(["--prove", "--json"]))
"""
CHILD = """
import json, os
rank = int(os.environ["RANK"])
line = "n:1:2 [0] NCCL INFO Channel {0:02}/0 : {1}[0] -> {2}[0] [{3}] via NET/IB/0{4}"
with open(os.environ["NCCL_DEBUG_FILE"], "w") as log:
    for channel in range(4):
        print(line.format(channel, rank, 1 - rank, "send", "/GDRDMA"), file=log)
        print(line.format(channel, 1 - rank, rank, "receive", "" if rank else "/GDRDMA"), file=log)
print(json.dumps({"gigabits_per_second": 90.5}))
"""


def proved(ranks_of_scripts: ForkServer, folder: Path, child: str) -> tuple[dict[str, object], str]:
    """The report, and what was said on the way, of two ranks on the example machine."""
    machine = ExampleMachine(folder / "tree")
    machine.write_tree()
    (folder / "driver.py").write_text(DRIVER)
    (folder / "child.py").write_text(child)
    words = [str(machine.root), str(folder / "child.py") if child else ""]
    done = ranks_of_scripts.run(folder / "driver.py", words, 2, folder)
    assert done.outputs[0], done
    report = json.loads(done.outputs[0])
    assert isinstance(report, dict)
    assert done.outputs[1] == "" and done.statuses == [report["exit"]] * 2
    return report, "".join(done.errors)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_two_ranks_without_cuda_say_so_and_end(ranks_of_scripts: ForkServer, tmp_path: Path) -> None:
    report, said = proved(ranks_of_scripts, tmp_path, "")
    reason = "all-reduce (default): torch sees no CUDA device: the all-reduce was not run"
    assert [said.count(f"gradwire gdr-check: rank {rank}: {reason}") for rank in (0, 1)] == [1, 1]
    checks = report["checks"]
    assert isinstance(checks, list)
    assert [check["text"] for check in checks if check["id"] in ("U3", "U4")] == [reason] * 2
    assert report["exit"] in (2, 3) and report["channels"] is None, "2 where this machine lacks the verbs library"


def test_channels_of_two_ranks_are_counted_by_direction(ranks_of_scripts: ForkServer, tmp_path: Path) -> None:
    report, _ = proved(ranks_of_scripts, tmp_path, CHILD)
    good = {"send_gdr": 4, "send": 4, "receive": 4}
    assert report["channels"] == [{"rank": 0, "receive_gdr": 4, **good}, {"rank": 1, "receive_gdr": 0, **good}]
    checks = {check["id"]: check for check in report["checks"]}  # type: ignore[attr-defined]
    assert checks["U3"]["text"].startswith("12 of 16 channels use GDRDMA: rank 1 receive 0/4")
    assert checks["U3"]["outcome"] == "warn"
    assert checks["U4"]["text"] == "90.5 Gb/s as configured, 90.5 through the host"


def test_hosts_that_all_have_nothing_do_not_differ() -> None:
    assert differences([{"name": "a", "nothing": "no GPU"}, {"name": "b", "nothing": "no GPU"}]) == []


def test_one_machine_is_checked_without_torch(tmp_path: Path) -> None:
    script = "import sys; from gradwire.cli.gdr_check import main; main([]); print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert told.stdout.splitlines()[-1] == "False"
