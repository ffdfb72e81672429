"""The all-reduce of --prove: a child of our own stands in for torch and NCCL, everything up to the table is real."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.cli import gdr_check
from gradwire.topology.gdr import sources
from gradwire.topology.gdr.example import ExampleMachine
from gradwire.topology.gdr.inputs.environment import child_environment
from gradwire.topology.gdr.inputs.nccl_log import parse_nccl_log
from gradwire.topology.gdr.job import JobRank, ProofPlace, RankResult, T, prove_together
from gradwire.topology.gdr.prove import prove_with_nccl

CHILD = """
import json, os, sys
label = sys.argv[sys.argv.index("--label") + 1]
seen = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
with open(os.environ["SEEN"], "a") as file:
    print(json.dumps({"label": label, **seen}), file=file)
log = os.environ["CHILD_LOG"]
if log:
    open(os.environ["NCCL_DEBUG_FILE"], "w").write(open(log).read())
print("a library talks on stdout")
print(json.dumps(json.loads(os.environ["CHILD_SAYS"])[label]))
"""
RATES = {"default": {"gigabits_per_second": 300.0}, "LOC": {"gigabits_per_second": 200.0}}
LOG = """gpu01:4100:4100 [0] NCCL INFO NCCL version 2.27.3+cuda12.9
gpu01:4100:4183 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
gpu01:4100:4183 [0] NCCL INFO Using network IB
gpu01:4100:4183 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'
gpu01:4100:4190 [0] NCCL INFO Channel 00/0 : {far}[0] -> {near}[0] [receive] via NET/IB/0{receive}
gpu01:4100:4190 [0] NCCL INFO Channel 01/0 : {far}[0] -> {near}[0] [receive] via NET/IB/0{receive}
gpu01:4100:4190 [0] NCCL INFO Channel 00/0 : {near}[0] -> {far}[0] [send] via NET/IB/0/GDRDMA
gpu01:4100:4190 [0] NCCL INFO Channel 01/0 : {near}[0] -> {far}[0] [send] via NET/IB/0/GDRDMA
"""

Act = Callable[..., Path]


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Act:
    """Returns a function that sets what the child will say and log; it returns the file of what the child was given."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(gdr_check, "PROVE_COMMAND", (sys.executable, str(script)))

    def act(says: dict[str, object] = RATES, log: str = "") -> Path:  # type: ignore[assignment]  # a plain constant
        (tmp_path / "log").write_text(log)
        monkeypatch.setenv("CHILD_LOG", str(tmp_path / "log") if log else "")
        monkeypatch.setenv("CHILD_SAYS", json.dumps(says))
        monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
        return tmp_path / "seen"

    return act


def test_log_and_rates_of_both_runs(child: Act) -> None:
    seen = child(log=LOG.format(near=0, far=1, receive="/GDRDMA"))
    proof = prove_with_nccl(gdr_check.PROVE_COMMAND, one_host=False, rank=0)
    assert proof.log is not None and proof.log.gdr_channels.total() == 4 and proof.error == ""
    assert proof.gigabits_per_second == {"default": 300.0, "LOC": 200.0}
    runs = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [run["label"] for run in runs] == ["default", "LOC"]
    assert [run.get("NCCL_NET_GDR_LEVEL") for run in runs] == [None, "LOC"]
    assert {run["NCCL_DEBUG"] for run in runs} == {"INFO"} and not any("NCCL_P2P_DISABLE" in run for run in runs)


def test_ranks_of_one_host_are_kept_to_the_nics(child: Act) -> None:
    seen = child()
    prove_with_nccl(gdr_check.PROVE_COMMAND, one_host=True, rank=0)
    assert all(json.loads(line)["NCCL_P2P_DISABLE"] == "1" for line in seen.read_text().splitlines())


def test_a_child_that_fails_is_reported_and_not_repeated(child: Act, capsys: pytest.CaptureFixture[str]) -> None:
    seen = child({"default": {"error": "torch sees no CUDA device: the all-reduce was not run"}})
    proof = prove_with_nccl(gdr_check.PROVE_COMMAND, one_host=False, rank=7)
    assert (proof.log, proof.gigabits_per_second) == (None, {})
    assert proof.error == "all-reduce (default): torch sees no CUDA device: the all-reduce was not run"
    assert capsys.readouterr().err == f"gradwire gdr-check: rank 7: {proof.error}\n"
    assert len(seen.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["/bin/false"], "exit code 1"),
        (["/bin/echo", "[1]"], "no usable answer"),
        (["/bin/echo", "{}"], "no usable answer"),
        (["/nowhere"], "/nowhere: No such file"),
        ([sys.executable, "-c", "print('[]')"], "[]"),
        ([sys.executable, "-c", "print('{}')"], "printed no rate"),
        ([sys.executable, "-c", "import os; os.abort()"], "crashed (SIGABRT)"),
        (
            [sys.executable, "-c", "import sys; sys.exit('NCCL error: unhandled system error')"],
            "unhandled system error",
        ),
    ],
)
def test_every_end_of_the_child_is_described(words: list[str], error: str) -> None:
    assert error in prove_with_nccl(words, one_host=True, rank=0).error


def test_where_one_host_has_nothing_to_try_none_does(child: Act, tmp_path: Path) -> None:
    seen = child()
    host = ExampleMachine(tmp_path / "tree").host()
    prove_together(
        host,
        JobRank(0, ("gpu01",), lambda own: [own, ProofPlace(("gpu02",), "0 NVIDIA GPUs")]),
        gdr_check.PROVE_COMMAND,
    )
    assert host.proof_error == "no all-reduce: gpu02 has 0 NVIDIA GPUs"
    assert not seen.exists(), "nobody waits for gpu02"


def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: list[str], *words: str) -> int:
    """Runs `gdr-check --prove` as rank 0 of a job in which other hosts found the same and left these logs."""
    machine = ExampleMachine(tmp_path / "tree")
    machine.write_tree()
    monkeypatch.setattr(sources, "LIVE_ROOT", machine.root)

    def gather(own: T) -> list[T]:
        return [own, *(stranger(own, index, text) for index, text in enumerate(others, 1))]

    return gdr_check.check(["--prove", *words], JobRank(0, ("gpu01",), gather))


def stranger(own: T, index: int, log: str) -> T:
    """The same answer from another host."""
    if isinstance(own, RankResult):
        return replace(own, host=(f"gpu0{index + 1}",), log=parse_nccl_log(log.splitlines()))
    return own


@pytest.fixture
def driver(standins: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts drivers under which the registration succeeds into the environment of this process."""
    for name, value in child_environment(standins()).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("driver")
def test_channels_of_every_rank_reach_the_table(
    child: Act, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child(log=LOG.format(near=0, far=1, receive="/GDRDMA"))
    status = checked(tmp_path, monkeypatch, [LOG.format(near=1, far=0, receive="")])
    shown = capsys.readouterr().out
    assert status == 1, shown
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert "0 2 of 2 2 of 2" in rows and "1 2 of 2 0 of 2" in rows
    assert "6 of 8 channels use GDRDMA: rank 1 receive 0/2" in " ".join(shown.split())
    assert "300.0 Gb/s as configured, 200.0 through the host" in " ".join(shown.split())
    assert "2 hosts agree" in shown


@pytest.mark.usefixtures("driver")
def test_channels_of_every_rank_reach_the_json(
    child: Act, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child(log=LOG.format(near=0, far=1, receive="/GDRDMA"))
    status = checked(tmp_path, monkeypatch, [LOG.format(near=1, far=0, receive="/GDRDMA")], "--json")
    result = json.loads(capsys.readouterr().out)
    assert status == result["exit"] == 0 and result["verdicts"]["in use"] == "pass"
    assert result["channels"] == [
        {"rank": rank, "send_gdr": 2, "send": 2, "receive_gdr": 2, "receive": 2} for rank in (0, 1)
    ]


@pytest.mark.usefixtures("driver")
def test_an_all_reduce_that_was_not_run_is_said_in_the_report(
    child: Act, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child({"default": {"error": "torch sees no CUDA device"}})
    assert checked(tmp_path, monkeypatch, [], "--json") == 0, "the registration is proof enough"
    checks = {check["id"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["U1"]["outcome"] == "pass"
    assert checks["U3"]["text"] == checks["U4"]["text"] == "all-reduce (default): torch sees no CUDA device"
