"""Compare: flags, figures from the ranks' lines, and one small run on an emulated cluster."""

import json
from pathlib import Path

import pytest
from rich.progress import Progress

from gradwire.bench.compare import command as compare
from gradwire.bench.compare.configurations import PLAIN, configuration_specs, select
from gradwire.bench.compare.models import MODELS, build
from gradwire.bench.compare.options import parse
from gradwire.bench.compare.replay import Scale
from gradwire.bench.compare.report import Collector, Measured, report
from gradwire.bench.emulation.signals import EndedBySignal
from gradwire.bench.terminal import PlainLines


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("nbytes", [5e4, 5e5, 2e6, 4e6, 8e6, 1.6e7])
def test_models_are_about_as_large_as_asked_and_alike_on_all_ranks(name: str, nbytes: float) -> None:
    model, loss = build(name, nbytes, rank=0)
    found = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert found == pytest.approx(nbytes, rel=0.1 if nbytes > 1e5 else 0.3)
    other, _ = build(name, nbytes, rank=1)
    assert all(bool((left == right).all()) for left, right in zip(model.parameters(), other.parameters(), strict=True))
    assert loss(model, 0).item() != loss(model, 1).item()


def test_every_plan_and_compressor_takes_part() -> None:
    names = [one.name for one in configuration_specs(with_mpi=False)]
    assert names[0] == PLAIN
    assert {
        "gradwire flat",
        "gradwire hierarchical",
        "gradwire leader",
        "gradwire auto",
        "torch fp16 hook",
        "gradwire onebit",
        "gradwire powersgd",
        "gradwire int8",
    } <= set(names)
    assert [one.name for one in select(configuration_specs(False), "hier,fp16 hook,hier")] == [
        PLAIN,
        "torch fp16 hook",
        "gradwire hierarchical",
    ]
    with pytest.raises(ValueError, match="`--only`"):
        select(configuration_specs(False), "no such thing")


@pytest.mark.parametrize(
    "words",
    [
        ["--nodes", "0"],
        ["--rounds", "0"],
        ["--megabytes", "-1"],
        ["--nic", "fast"],
        ["--replay", "resnet51"],
        ["--factor", "0"],
        ["--batch", "8"],
        ["--factor", "8"],
        ["--slow-motion", "8"],
        ["--plot", "x.pdf"],
        ["--only", "nothing"],
        ["--ranks-per-node", "0"],
        ["--uneven", "3,x"],
        ["--interface", "eth99"],
        ["--model", "rnn"],
        ["--what"],
        ["--stream", "slow"],
    ],
)
def test_a_bad_flag_is_an_error_that_names_it(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(words) == 2
    assert words[0] in capsys.readouterr().err


def test_ranks_of_a_launcher_complain_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "launcher_variables", lambda: {"RANK": "1", "WORLD_SIZE": "2"})
    assert compare.main(["--rounds", "0"]) == 2
    assert capsys.readouterr().err == ""


def test_a_replay_states_what_is_smaller_and_slower(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["--replay", "swin_t"])
    assert (options.nodes, options.ranks_per_node, options.nic) == (4, 8, "25gbit")
    report(options, [], Measured([], "somewhere", [8, 8], 7_000_000, Scale(16, 12), 2.5))
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "gradients and links 1/16, 12 times slower",
        "7.00 MB of gradients (really 113)",
        "RTX 3090",
        "plain DDP by its waits and its link alone: 2.500 s",
    ):
        assert words in said


def test_figures_come_out_of_the_ranks_lines() -> None:
    with Progress(disable=True) as progress:
        collector = Collector(progress, PlainLines())
        for record in (
            {"gradient_nbytes": 8},
            {"turn": 1, "turns": 9, "name": "x", "seconds": None},
            {"name": PLAIN, "seconds": [2.0, 4.0, 3.0], "nic_nbytes": [30, 10, 20], "error": 0.0},
            {"name": "ours", "seconds": [1.0, 1.5, 2.0], "nic_nbytes": [5, 5, 6], "error": 0.1},
            {"name": "broken", "reason": "it says so"},
        ):
            collector.line(0, json.dumps(record))
        collector.line(0, "a warning")
        collector.line(0, '{"level": "info"}')
        collector.line(0, "{a set}")
    plain, ours, broken = collector.results(counted=True)
    assert (plain.seconds, plain.speed_up, plain.nic_nbytes) == (3.0, 1.0, 20)
    assert (ours.speed_up, ours.error) == (2.0, 0.1)
    assert ours.speed_up_range == (1.5, 4.0 / 1.5) and plain.speed_up_range is None  # of the rounds, one by one
    assert collector.gradient_nbytes == 8
    assert broken.reason == "it says so" and broken.seconds is None
    assert collector.other == ["a warning", '{"level": "info"}', "{a set}"]


def test_a_difference_within_the_noise_of_the_steps_is_said_to_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {PLAIN: [1.0, 2.0, 1.0, 1.0, 3.0], "near": [0.9, 2.1, 0.8, 1.1, 2.9], "far": [0.5, 0.9, 0.5, 0.6, 1.4]}
    with Progress(disable=True) as progress:
        collector = Collector(progress, PlainLines())
        for name, each in seconds.items():
            collector.line(0, json.dumps({"name": name, "seconds": each, "nic_nbytes": [0] * 5, "error": None}))
    report(parse([]), [], Measured(collector.results(counted=False), "somewhere", [2, 2], 8, Scale()))
    (said,) = capsys.readouterr().out.partition("No faster and no slower than plain DDP")[2:]
    assert "near (0.93x to 1.18x)" in " ".join(said.split()) and "far (" not in said
    report(parse(["--rounds", "1"]), [], Measured(collector.results(counted=False), "somewhere", [2, 2], 8, Scale()))
    assert "far (" in capsys.readouterr().out  # one step tells nothing apart


def test_a_pipe_gets_lines_and_a_stop_says_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    turns: list[dict[str, object]] = [
        {"turn": 0, "turns": None, "name": "trying plain DDP, 1 of 2"},
        {"turn": 0, "turns": None, "name": "trying ours, 2 of 2"},
        {"turn": 1, "turns": 4, "name": "plain DDP", "seconds": None},
        {"turn": 3, "turns": 4, "name": "plain DDP", "seconds": 2.5},
    ]
    for stopped_after, words in (
        (0, "stopped: nothing was measured yet; no timed step was over"),
        (3, "stopped: step 1 of 4; no timed step was over"),
        (4, "stopped: step 3 of 4; plain DDP 2.5 s a step (of 1)"),
    ):
        with Progress(disable=True) as progress, pytest.raises(SystemExit):
            collector = Collector(progress, PlainLines(every_seconds=0.0 if stopped_after == 4 else 3600.0))
            with collector.stopped_in_words():
                for record in turns[:stopped_after]:
                    collector.line(0, json.dumps(record))
                raise EndedBySignal(143)
        *said, last = capsys.readouterr().err.splitlines()
        assert last == f"gradwire compare: {words}"
        assert len(said) == min(stopped_after, 4 if stopped_after == 4 else 2)
        assert all(line.startswith(str(each["name"])) for line, each in zip(said[:2], turns[:2], strict=False))


@pytest.mark.netns
def test_compare_on_an_emulated_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "compare.json", tmp_path / "compare.svg"
    status = compare.main(
        [
            "--megabytes",
            "2",
            "--model",
            "linear",
            "--rounds",
            "1",
            "--nic",
            "500mbit",
            "--only",
            "gradwire hier,int8",
            "--json",
            str(file),
            "--plot",
            str(picture),
        ]
    )
    assert status == 0, capsys.readouterr().err
    results = {one["name"]: one for one in json.loads(file.read_text())["results"]}
    assert results["gradwire hierarchical"]["error"] < 1e-6
    assert results["gradwire hierarchical"]["nic_nbytes"] < 0.8 * results[PLAIN]["nic_nbytes"]
    assert results["gradwire int8"]["nic_nbytes"] < 0.5 * results["gradwire hierarchical"]["nic_nbytes"]
    assert 1e-4 < results["gradwire int8"]["error"] < 0.1
    assert "plain DDP" in picture.read_text()
