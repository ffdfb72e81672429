"""`gradwire compare --script`: figures from the ranks' lines, the advice, bad options, a script that ends too early."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.bench.compare import script as compare
from gradwire.bench.compare import script_rank
from gradwire.bench.compare.options import parse
from gradwire.bench.compare.report import ConfigurationResult
from gradwire.bench.compare.script import (
    PLAIN,
    WARM_UP_STEPS,
    ConfigurationRun,
    _Runs,
    configurations_of,
    main,
    options_behind_script,
    what_to_write,
)
from gradwire.bench.emulation.launch import JobOutcome, RankLine, python_module
from gradwire.bench.emulation.namespaces import available
from gradwire.bench.emulation.signals import EndedBySignal
from gradwire.bench.terminal import PlainLines

TRAIN = """
import sys, torch, torch.distributed as dist
if "alone" not in sys.argv:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(300, 100)
if "alone" not in sys.argv:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(5, 300)).pow(2).mean().backward()
    optimizer.step()
"""


def test_the_error_is_that_of_the_rank_that_came_least_far() -> None:
    run = ConfigurationRun(PLAIN)
    for rank, made in enumerate((2, 1, 3)):
        run.records[rank] = records([], hook="")[:made]
        run.other[rank] = ["Traceback", f"RuntimeError: from rank {rank}"]
    run.other[1] += ["", "it ends"]
    reason = str(run.result(3, counted=False).reason)
    assert reason.endswith("rank 1 printed last:\n  Traceback\n  RuntimeError: from rank 1\n  it ends")
    run.failures = {0: (9.0, 7), 2: (8.0, -9)}
    assert "rank 2 failed with status -9, and printed last:\n  Traceback\n" in str(run.result(3, counted=False).reason)


def records(seconds: list[float], loss: float = 1.0, hook: str = "", carried: int = 10) -> list[dict[str, Any]]:
    """A rank's lines: the warm-up takes a second a step, then the given seconds."""
    found, moment = [], 0.0
    for number, length in enumerate([*[1.0] * WARM_UP_STEPS, *seconds], 1):
        moment += length
        found.append(
            {
                script_rank.STEP: number,
                "moment": moment,
                "gradient_nbytes": 8,
                "carried": [carried * number, 0],
                "loss": loss,
                "hooks": [hook],
            }
        )
    return found


def run_of(name: str, *ranks: list[dict[str, Any]], said: str = "") -> ConfigurationRun:
    run = ConfigurationRun(name)
    for rank, own in enumerate(ranks):
        for each in own:
            assert run.line(rank, json.dumps(each))
        for line in said.splitlines():
            assert not run.line(rank, line)
    return run


def test_a_step_lasts_as_long_as_on_the_slowest_rank_and_the_warm_up_does_not_count() -> None:
    run = run_of("x", records([2.0, 4.0, 6.0], loss=1.0), records([3.0, 3.0, 3.0], loss=2.0, carried=20))
    found = run.result(2, counted=True)
    assert (found.seconds, found.speed_up_range) == (4.0, (3.0, 6.0))
    assert (found.nic_nbytes, found.loss) == (20.0, 1.5)
    assert run.result(2, counted=False).nic_nbytes is None
    assert run.gradient_nbytes == 8


def test_a_run_that_ends_early_gives_the_last_error_and_no_figures() -> None:
    run = run_of("x", records([1.0] * 9), records([]), said="warming up\nKeyError: 'data'\nbye")
    found = run.result(2, counted=True)
    assert found.seconds is None and "5 steps" in str(found.reason) and "KeyError: 'data'" in str(found.reason)
    assert run_of("x", records([1.0] * 9)).result(2, counted=True).seconds is None  # a rank reported nothing


def test_a_hook_of_the_scripts_own_is_named() -> None:
    assert run_of(PLAIN, records([1.0], hook="comm_hook")).unexpected_hook() == "comm_hook"
    assert run_of(PLAIN, records([1.0])).unexpected_hook() is None
    assert run_of("torch fp16 hook", records([1.0], hook="fp16_compress_hook")).unexpected_hook() is None
    assert run_of("gradwire int8", records([1.0], hook="automatic_hook")).unexpected_hook() is None
    assert run_of("gradwire int8", records([1.0])).unexpected_hook() == ""  # FSDP2: no model takes one


def test_options_of_compare_behind_the_script_are_named() -> None:
    given = ["--nodes", "2", "--script", "train.py", "--nic=1gbit", "--rounds", "3", "--lr", "0.1", "nodes"]
    assert options_behind_script(parse(given)) == ["--nic=1gbit", "--rounds"]
    assert not options_behind_script(parse(["--nic", "1gbit", "--script", "train.py"]))


def test_speed_ups_are_over_plain_ddp_and_what_does_not_run_comes_last() -> None:
    runs = _Runs({PLAIN: "", "gradwire int8": "int8", "gradwire exact": "none"}, 9, PlainLines(shown=False))
    steps = {"gradwire int8": [1.0, 1.0], "gradwire exact": [], PLAIN: [2.0, 3.0]}
    runs.found = [run_of(name, records(steps[name]), said="no") for name in (PLAIN, "gradwire exact", "gradwire int8")]
    plain, int8, exact = runs.results(1, counted=True)
    assert (plain.speed_up, plain.speed_up_range) == (1.0, None)
    assert (int8.speed_up, int8.speed_up_range) == (2.5, (2.0, 3.0))
    assert exact.name == "gradwire exact" and exact.seconds is None
    runs.found[0].records.clear()
    with pytest.raises(RuntimeError, match="does not run under plain DDP"):
        runs.results(1, counted=True)


def results(**seconds: float) -> list[ConfigurationResult]:
    names = {"plain": PLAIN, "fp16": "torch fp16 hook", "exact": "gradwire exact", "int8": "gradwire int8"}
    return [
        ConfigurationResult(names[name], each, speed_up_range=None if name == "plain" else (10.0 / each,) * 2)
        for name, each in seconds.items()
    ]


def test_the_advice_is_the_mildest_of_the_configurations_that_save_most() -> None:
    configurations = configurations_of(None)
    assert "Take gradwire exact, 2.00x" in what_to_write(
        results(plain=10.0, fp16=6.0, exact=5.0, int8=4.5), configurations
    )
    assert "GRADWIRE_HOOK=int8" in what_to_write(results(plain=10.0, fp16=7.0, exact=9.5, int8=4.5), configurations)
    said = what_to_write(results(plain=10.0, fp16=5.0, exact=9.5, int8=4.5), configurations)
    assert "fp16_compress_hook" in said and "lossy" in said
    assert "nothing can be said yet" in what_to_write(results(plain=10.0), configurations)
    assert "change nothing" in what_to_write(results(plain=10.0, fp16=11.0, exact=10.0), configurations)


def test_configurations_are_chosen_by_words_and_plain_ddp_always_runs() -> None:
    assert list(configurations_of(None)) == [PLAIN, "torch fp16 hook", "gradwire exact", "gradwire int8"]
    assert configurations_of("int4") == {PLAIN: "", "gradwire int4": "int4"}
    with pytest.raises(ValueError, match="`--only` has 'nothing'"):
        configurations_of("nothing")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--script"], "`--script`"),
        (["--script", "no_such_file.py"], "no_such_file.py"),
        (["--model", "cnn", "--script", "t.py"], "`--model`"),
        (["--rounds", "0", "--script", "t.py"], "--rounds"),
        (["--only", "nothing", "--script", "t.py"], "`--only`"),
    ],
)
def test_a_bad_option_is_named(
    words: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.py").touch()
    monkeypatch.setattr(compare, "launcher_variables", dict)
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def on_replaced_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Replaces names of the command's module, such as `run_emulated`; returns the words that compare a script then."""

    def replace(nodes: int = 1, **names: object) -> list[str]:
        script = tmp_path / "train.py"
        script.touch()
        for name, replacement in {"launcher_variables": dict, "available": lambda: None, **names}.items():
            monkeypatch.setattr(compare, name, replacement)
        return ["--nodes", str(nodes), "--ranks-per-node", "1", "--script", str(script)]

    return replace


def test_a_stop_shows_what_was_measured(
    capsys: pytest.CaptureFixture[str], on_replaced_nodes: Callable[..., list[str]]
) -> None:
    def stopped(options: argparse.Namespace, nodes: list[int], runs: _Runs) -> None:
        for name in (PLAIN, "torch fp16 hook"):
            runs.begin(name)
            runs.found[-1] = run_of(name, records([2.0, 2.0]))
        raise EndedBySignal(130)

    with pytest.raises(EndedBySignal):
        main(on_replaced_nodes(run_emulated=stopped))
    caught = capsys.readouterr()
    assert "stopped in torch fp16 hook" in caught.err
    assert "torch fp16 hook" in caught.out and "2.000" in caught.out


def test_a_setting_in_which_the_user_stopped_is_not_said_to_fail(
    capsys: pytest.CaptureFixture[str], on_replaced_nodes: Callable[..., list[str]]
) -> None:
    def stopped(options: argparse.Namespace, nodes: list[int], runs: _Runs) -> None:
        runs.begin(PLAIN)
        runs.found[-1] = run_of(PLAIN, records([2.0] * 20), records([2.0] * 20))
        runs.begin("gradwire int8")
        raise EndedBySignal(130)

    with pytest.raises(EndedBySignal):
        main(on_replaced_nodes(nodes=2, run_emulated=stopped))
    caught = capsys.readouterr()
    assert "stopped in gradwire int8" in caught.err
    assert "2.000" in caught.out and "does not run" not in caught.out and "ended after" not in caught.out


def test_a_script_that_ends_before_the_last_timed_step_is_named_with_its_status(
    capsys: pytest.CaptureFixture[str], on_replaced_nodes: Callable[..., list[str]]
) -> None:
    def run(options: argparse.Namespace, nodes: list[int], runs: _Runs) -> None:
        for name in (PLAIN, "gradwire int8"):
            runs.begin(name)
            runs.found[-1] = run_of(name, records([2.0] * 3))
        runs.found[-1].failures[0] = 0.0, 5

    assert main(on_replaced_nodes(run_emulated=run)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "plain DDP ended after 3 of 20 timed steps gradwire int8" in shown
    assert "gradwire int8 ended after 3 of 20 timed steps; rank 0 failed with status 5" in shown


def test_no_advice_is_given_where_the_scripts_own_hook_ran(
    capsys: pytest.CaptureFixture[str], on_replaced_nodes: Callable[..., list[str]]
) -> None:
    def run(options: argparse.Namespace, nodes: list[int], runs: _Runs) -> None:
        for name, seconds in ((PLAIN, 2.0), ("gradwire int8", 1.0)):
            runs.begin(name)
            runs.found[-1] = run_of(name, records([seconds] * 4, hook="comm_hook"))

    assert main(on_replaced_nodes(run_emulated=run)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "gradwire int8: the script registers a hook itself, comm_hook, which ran in its place" in shown
    assert "leave its registration out, and compare again" in shown and "Take gradwire" not in shown


def test_a_configuration_that_no_model_takes_is_not_compared(
    capsys: pytest.CaptureFixture[str], on_replaced_nodes: Callable[..., list[str]]
) -> None:
    def run(options: argparse.Namespace, nodes: list[int], runs: _Runs) -> None:
        for name, seconds in ((PLAIN, 2.0), ("gradwire int8", 1.0)):
            runs.begin(name)
            runs.found[-1] = run_of(name, records([seconds] * 4))

    assert main(on_replaced_nodes(run_emulated=run)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "gradwire int8: it did not run: the script trains no DistributedDataParallel" in shown
    assert "pages on FSDP2" in shown and "Take gradwire" not in shown


def test_a_configuration_that_failed_is_not_said_to_have_no_model(
    capsys: pytest.CaptureFixture[str], on_replaced_nodes: Callable[..., list[str]]
) -> None:
    def run(options: argparse.Namespace, nodes: list[int], runs: _Runs) -> None:
        for name, seconds in ((PLAIN, [2.0] * 4), ("gradwire int8", None)):
            runs.begin(name)
            runs.found[-1] = run_of(name, *([] if seconds is None else [records(seconds)]), said="")
        runs.found[-1].line(0, "KeyError: 'data'")

    assert main(on_replaced_nodes(run_emulated=run)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "KeyError: 'data'" in shown and "No other configuration was measured" in shown
    assert "trains no DistributedDataParallel" not in shown


class FailingCluster:
    """Stands for emulated nodes on which rank 1 of a script fails."""

    interfaces = ("eth0",)
    runs = 0

    def __init__(self, nodes: list[int], nic: str) -> None:
        self.nodes = nodes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def run(self, command: list[str], *, on_line: RankLine, **options: object) -> JobOutcome:
        FailingCluster.runs += 1
        on_line(0, "waiting for rank 1")
        on_line(1, "FileNotFoundError: train.csv")
        return JobOutcome(returncodes=(-15, 3), output=("", ""), seconds=1.0, first_failure=1, timed_out=False)


def test_a_script_that_fails_runs_once_and_its_error_is_shown(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    on_replaced_nodes: Callable[..., list[str]],
) -> None:
    monkeypatch.setattr(FailingCluster, "runs", 0)
    assert main(on_replaced_nodes(2, EmulatedCluster=FailingCluster)) == 1
    said = capsys.readouterr().err
    assert "the script does not run under plain DDP: it made 0 steps on all ranks, 7 are needed; rank 1 failed" in said
    assert "with status 3, and printed last:\n  FileNotFoundError: train.csv\n" in said
    assert FailingCluster.runs == 1


FAILS = """
import os, pathlib, torch.distributed as dist
with pathlib.Path("begun").open("a") as file:
    file.write(os.environ["RANK"])
if os.environ["RANK"] == "1":
    raise FileNotFoundError("train.csv")
dist.init_process_group("gloo")  # waits for rank 1
"""


@pytest.mark.slow
def test_a_script_that_fails_on_one_rank_ends_the_others_and_the_comparison(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gradwire", "compare"]
    done = subprocess.run(
        python_module(*launcher, "--script", "train.py"),
        cwd=tmp_path,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    assert "rank 1 failed with status 1, and printed last:" in done.stderr
    assert "  FileNotFoundError: train.csv" in done.stderr
    assert sorted((tmp_path / "begun").read_text()) == ["0", "1"]


def test_a_rank_reports_each_step_with_its_loss(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = tmp_path / "train.py"
    train.write_text(TRAIN)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    monkeypatch.setattr(DistributedDataParallel, "__init__", DistributedDataParallel.__init__)

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit):
        script_rank.main(["3", "torch fp16 hook", "", str(train), "99", "alone"])
    run = ConfigurationRun("x")
    for line in capfd.readouterr().out.splitlines():
        run.line(0, line)
    own = run.records[0]
    assert [each[script_rank.STEP] for each in own] == [1, 2, 3]
    assert own[0]["loss"] > own[2]["loss"] > 0.0
    assert own[0]["gradient_nbytes"] == 4 * (300 * 100 + 100)


def test_an_unchanged_script_is_compared_on_emulated_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if (reason := available()) is not None:
        pytest.skip(reason)
    train, found = tmp_path / "train.py", tmp_path / "found.json"
    train.write_text(TRAIN)
    words = ["--ranks-per-node", "1", "--nic", "100mbit", "--rounds", "4", "--only", "fp16 hook,exact"]
    assert main([*words, "--json", str(found), "--script", str(train), "99"]) == 0
    shown = capsys.readouterr().out
    assert "train.py, 0.1 MB of gradients; 2x1 ranks behind 100mbit" in " ".join(shown.split())
    results = {each["name"]: each for each in json.loads(found.read_text())["results"]}
    assert set(results) == {PLAIN, "torch fp16 hook", "gradwire exact"}
    assert all(each["seconds"] > 0 for each in results.values())
    assert results["torch fp16 hook"]["nic_nbytes"] < 0.75 * results[PLAIN]["nic_nbytes"]
    assert results["gradwire exact"]["loss"] == pytest.approx(results[PLAIN]["loss"])
    assert "itself" not in shown  # every configuration has found the hook that it should have


def test_an_unchanged_script_is_compared_in_a_job_of_torchrun(tmp_path: Path) -> None:
    train, found = tmp_path / "train.py", tmp_path / "found.json"
    train.write_text(TRAIN)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gradwire", "compare"]
    words = ["--rounds", "4", "--only", "exact", "--json", str(found), "--script", str(train), "99"]
    done = subprocess.run(python_module(*launcher, *words), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "1x2 ranks started by torchrun" in " ".join(done.stdout.split())
    assert done.stdout.count("plain DDP ") == 1  # rank 0 alone prints
    results = {each["name"]: each for each in json.loads(found.read_text())["results"]}
    assert set(results) == {PLAIN, "gradwire exact"} and results[PLAIN]["nic_nbytes"] is None
