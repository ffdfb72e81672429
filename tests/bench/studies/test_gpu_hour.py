"""The first hour on a GPU: its steps end in order, a failure that decides ends it, and its JSON says why."""

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradwire.bench.selftest import command
from gradwire.bench.studies.gpu import hour
from gradwire.bench.studies.gpu import step as gpu_step
from gradwire.bench.studies.gpu.hour import RESULT, HourStep, steps_of
from gradwire.bench.studies.gpu.step import residual_network
from gradwire.bench.train import train


def python(name: str, script: str, **more: Any) -> HourStep:
    return HourStep(name, (sys.executable, "-c", script, RESULT), f"{name} is right", **more)


def run(steps: list[HourStep], tmp_path: Path) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "hour.json"
    status = hour.main(["--json", str(file)], steps)
    found: dict[str, Any] = json.loads(file.read_text())
    return status, found


GOOD = "import json, sys; json.dump({'figure': 3}, open(sys.argv[1], 'w')); print('all good')"
BAD = "print('element 7 differs'); raise SystemExit(1)"


def test_the_hour_runs_to_its_end_and_keeps_what_each_step_found(tmp_path: Path) -> None:
    steps = [
        python("kernels", GOOD, decisive=True),
        python("memory", BAD, decisive=True, gpus=99),
        python("speed", BAD),
        python("two machines", GOOD, seconds=0.0),
    ]
    status, found = run(steps, tmp_path)
    assert status == 1
    assert found["decision"] == "go on: nothing that decides has failed; not decided: memory; failed: speed"
    first, second, third, last = found["steps"]
    assert first["outcome"] == "pass" and first["result"] == {"figure": 3} and first["output"] == ["all good"]
    assert (second["outcome"], second["reason"]) == ("skipped", "needs 99 GPUs")
    assert (third["outcome"], third["reason"]) == ("fail", "exit status 1")
    assert last["outcome"] == "skipped" and "two machines" in last["reason"]


def test_a_failure_that_decides_ends_the_hour(tmp_path: Path) -> None:
    status, found = run([python("kernels", BAD, decisive=True), python("speed", GOOD)], tmp_path)
    assert status == 1
    assert found["decision"].startswith("stop: `kernels` failed, so it is not known that kernels is right")
    assert [entry["name"] for entry in found["steps"]] == ["kernels"]
    assert found["steps"][0]["output"] == ["element 7 differs"]


def test_a_step_that_hangs_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    started = tmp_path / "started"
    script = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(started)!r}, 'w').write(str(child.pid)); child.wait()"
    )
    status, found = run([python("hang", script, seconds=5.0)], tmp_path)
    assert (status, found["steps"][0]["reason"]) == (1, "not through after 5 s")
    state = Path(f"/proc/{started.read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    _, found = run([HourStep("memcheck", ("no-such-sanitizer",), "no kernel leaves its tensors")], tmp_path)
    assert found["steps"][0]["reason"] == "no-such-sanitizer is not on PATH"


@pytest.mark.parametrize("share", hour.SHARES)
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_every_command_names_what_there_is(gpus: int, share: float) -> None:
    """Files and modules of the steps exist, and what decides comes before what is only measured."""
    steps = steps_of(gpus, share=share)
    decisive = [step.decisive for step in steps]
    assert decisive == sorted(decisive, reverse=True)
    for step in steps:
        for word in step.words:
            if word.startswith("tests/"):
                assert (hour.CHECKOUT / word).exists(), word
            if word.startswith("gradwire."):
                assert (hour.CHECKOUT / word.removeprefix("gradwire.").replace(".", "/")).with_suffix(".py").exists()


@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("share", hour.SHARES)
def test_smaller_inputs_are_those_of_the_same_programs(gpus: int, share: float) -> None:
    whole, part = steps_of(gpus), steps_of(gpus, share=share)
    assert [(step.name, step.decides, step.gpus, step.words[:4]) for step in whole] == [
        (step.name, step.decides, step.gpus, step.words[:4]) for step in part
    ]
    assert all(len(step.words) == len(other.words) for step, other in zip(whole, part, strict=True))
    assert part[-1].seconds == 0.0  # two machines


def test_on_a_slow_device_kernels_grow_in_size_alone() -> None:
    """Repeats that grew as well took 120 times as long where 16 were foreseen, and the step was ended by its limit."""
    for seconds, wanted in ((hour.SLOW_SECONDS, {"2"}), (900.0, {"15"})):
        steps = [step for share in hour.SHARES for step in steps_of(2, share=share, seconds=seconds)]
        words = [list(step.words) for step in steps if step.name.startswith("kernels")]
        assert {each[each.index("--repeats") + 1] for each in words} == wanted
        assert len({each[each.index("--numel") + 1] for each in words}) > 3


@pytest.mark.slow
def test_int8_trains_between_two_nodes_on_one_machine(tmp_path: Path) -> None:
    """On a made-up device: ranks of one node alone never send payloads. The command that the hour runs, on CPUs."""
    [step] = [step for step in steps_of(2, share=0.0) if step.name == "trainings, two nodes"]
    words = (*({"cuda": "cpu"}.get(word, word) for word in step.words), "--batch", "1", "--context", "16")
    status, found = run([HourStep(step.name, words, step.decides, seconds=240.0)], tmp_path)
    [entry] = found["steps"]
    assert status == 0, entry["output"]
    plain, exact, small = entry["result"]
    assert [each["hook"] for each in entry["result"]] == ["plain", "gradwire", "gradwire:int8"]
    assert "2 nodes x 1 rank" in exact["report"] and "plan: hierarchical" in exact["report"]
    assert "int8 over all ranks" in small["report"]
    assert small["final_loss"] != plain["final_loss"] == pytest.approx(small["final_loss"], rel=0.05)


def test_nodes_are_a_letter_for_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--nodes", "aabb"]) == 2
    assert "`--nodes`: found 'aabb', wanted a letter for each of 1 ranks" in capsys.readouterr().err


TUNING = """
import sys
for size in (8, 64):
    for rank in range(2):
        print(f"box:{10 + rank}:{20 + rank} [{rank}] NCCL INFO AllReduce: {size} Bytes -> Algo RING proto LL")
print("box:10:20 [0] NCCL WARN no such device")
print("a row of the table")
"""


def test_what_nccl_reports_is_in_the_json_once_and_pushes_no_result_out(tmp_path: Path) -> None:
    """Every rank reports each call; the output of a step ends with its last 60 lines."""
    _, found = run([python("sums", TUNING), python("again", f"{TUNING}\nprint('[0] NCCL INFO last')")], tmp_path)
    sums, again = found["steps"]
    assert sums["nccl"] == [f"AllReduce: {size} Bytes -> Algo RING proto LL" for size in (8, 64)]
    assert again["nccl"] == ["last"]
    assert sums["output"] == again["output"] == ["box:10:20 [0] NCCL WARN no such device", "a row of the table"]


def test_a_command_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    _, found = run([python("speed", GOOD)], tmp_path)
    assert shlex.split(found["steps"][0]["command"]) == [sys.executable, "-c", GOOD, RESULT]


def test_tables_are_not_cut(tmp_path: Path) -> None:
    _, found = run([python("wide", "import shutil; print(shutil.get_terminal_size().columns)")], tmp_path)
    assert found["steps"][0]["output"] == ["120"]


class Device:
    """Runs steps in a time of its own: `start` seconds, and `full` more for the full inputs."""

    def __init__(self, start: float, full: float, **at: Mapping[str, object]) -> None:
        self.start, self.full, self.at = start, full, at
        self.ran: list[float] = []

    def __call__(self, step: HourStep) -> dict[str, object]:
        self.ran.append(step.share)
        taken = {"outcome": "pass", "seconds": self.start + self.full * step.share}
        return {**taken, **self.at.get(f"share_{step.share:g}", {})}


def versions() -> list[HourStep]:
    return [HourStep("kernels", ("bench", str(share)), "speed", share=share) for share in hour.SHARES]


@pytest.mark.parametrize(
    ("start", "full", "ran"),
    [
        (10.0, 20.0, [0.0, 1 / 256, 1 / 16, 1.0]),  # all of it ends soon
        (30.0, 2000.0, [0.0, 1 / 256, 1 / 16]),  # 155 s for a sixteenth: the whole would take 2030 s
        (30.0, 100_000.0, [0.0, 1 / 256]),
        (80.0, 0.0, [0.0]),  # the programs alone take long to start
    ],
)
def test_inputs_grow_as_long_as_the_next_are_foreseen_to_end(start: float, full: float, ran: list[float]) -> None:
    device = Device(start, full)
    entry = hour.grow(versions(), device)
    assert device.ran == ran and entry["outcome"] == "pass" and entry["share"] == ran[-1]
    said = entry.get("larger", "")
    assert ("s foreseen" in str(said)) == (ran[-1] != 1.0)
    assert [each["share"] for each in entry.get("smaller", [])] == ran[:-1]


def test_a_larger_input_that_does_not_end_is_no_verdict_but_one_that_fails_is() -> None:
    late = {"outcome": "fail", "reason": f"{hour.NOT_THROUGH} 960 s"}
    entry = hour.grow(versions(), Device(10.0, 20.0, **{"share_0.0625": late}))
    assert (entry["outcome"], entry["share"]) == ("pass", 1 / 256) and "not through" in str(entry["larger"])
    wrong = {"outcome": "fail", "reason": "exit status 1"}
    device = Device(10.0, 20.0, **{"share_0.0625": wrong})
    entry = hour.grow(versions(), device)
    assert (entry["outcome"], entry["reason"], entry["share"]) == ("fail", "exit status 1", 1 / 16)
    assert device.ran == [0.0, 1 / 256, 1 / 16]


def test_a_step_without_a_size_runs_once() -> None:
    device = Device(500.0, 0.0)
    same = [HourStep("NCCL", ("pytest",), "order", share=share) for share in hour.SHARES]
    assert hour.grow(same, device)["share"] == 1.0 and device.ran == [1.0]


def test_a_step_that_was_not_run_had_no_inputs() -> None:
    entry = hour.grow(versions(), Device(0.0, 0.0, share_0={"outcome": "skipped", "reason": "not on PATH"}))
    assert "share" not in entry and hour.in_words(entry) == "skipped in 0.0 s: not on PATH"


@pytest.mark.parametrize(("entry", "words"), [
    ({"outcome": "pass", "seconds": 320.2, "share": 1.0}, "pass in 320.2 s"),
    ({"outcome": "skipped", "reason": "needs 2 GPUs"}, "skipped: needs 2 GPUs"),
    ({"outcome": "fail", "seconds": 3.0, "share": 1 / 16, "reason": "exit status 1"},
     "fail in 3.0 s, with 1/16 of the inputs: exit status 1"),
    ({"outcome": "pass", "seconds": 104.4, "share": 0.0, "larger": "left out: 418 s foreseen"},
     "pass in 104.4 s, with the least of the inputs; larger inputs: left out: 418 s foreseen"),
])  # fmt: skip
def test_each_step_is_told_in_a_line(entry: dict[str, object], words: str) -> None:
    assert hour.in_words(entry) == words


@pytest.mark.parametrize(("rate", "shares"), [(5e9, hour.SHARES), (120e9, (1.0,))])
def test_a_device_slower_than_any_gpu_is_noticed_before_the_first_step(
    rate: float, shares: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JSON says how fast the device is, and how large the inputs of each step were."""
    asked: list[float] = []

    def steps(gpus: int, *, share: float, seconds: float) -> list[HourStep]:
        asked.append(share)
        return [HourStep("kernels", (sys.executable, "-c", f"print({share})"), "speed", seconds=seconds, share=share)]

    monkeypatch.setattr(hour, "copy_bytes_per_second", lambda device: rate)
    monkeypatch.setattr(hour, "steps_of", steps)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    file = tmp_path / "hour.json"
    assert hour.main(["--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert tuple(asked) == shares and found["copy_bytes_per_second"] == rate
    [entry] = found["steps"]
    assert entry["share"] in shares and entry["output"] == [str(entry["share"])]


def test_what_the_hour_lacks_is_said_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An installed wheel has no studies, and a checkout may have no pytest."""
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "pytest" else name)
    assert command.main(["--hour", "--json", str(tmp_path / "hour.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gradwire selftest: `--hour`") and "no pytest here" in said
    assert "`pip install -e . pytest hypothesis`" in said and not list(tmp_path.iterdir())
    monkeypatch.setattr(command, "__file__", str(tmp_path / "gradwire" / "bench" / "selftest" / "command.py"))
    assert command.main(["--hour"]) == 2
    assert "there is no checkout and no pytest here" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hour.json"
    assert command.main(["--hour"]) == 2
    assert "gradwire selftest --hour: `--json`" in capfd.readouterr().err
    assert hour.main(["--json", str(file)]) == 2
    assert "torch sees no CUDA device" in capfd.readouterr().err and not file.exists()


def test_the_network_has_the_published_parameters() -> None:
    with torch.device("meta"):
        network = residual_network()
    assert sum(weight.numel() for weight in network.parameters()) == 25_557_032
    assert network(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


def test_steps_are_taken_in_a_world_of_one_rank() -> None:
    def small() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4))

    cost = gpu_step.measure(torch.device("cpu"), small, image=8, batch=2, rounds=1)
    assert cost.bare_seconds > 0
    assert cost.hook_seconds > 0
    assert cost.blocking == ()
    assert not torch.distributed.is_initialized()
