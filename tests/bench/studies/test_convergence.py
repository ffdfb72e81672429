"""The convergence tool: data, runs on four ranks, the file, time to quality, tables and pictures."""

import gzip
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.bench.studies.convergence import __main__ as convergence
from gradwire.bench.studies.convergence import alone, tasks
from gradwire.bench.studies.convergence.alone import train_alone
from gradwire.bench.studies.convergence.record import DENSE, Record, Speed, Timed, seconds_to, steps_to, target
from gradwire.bench.studies.convergence.show import draw, sharded_tables, tables, untrained
from gradwire.bench.studies.convergence.tasks import (
    FashionTask,
    SmallCnn,
    TextTask,
    data_folder,
    load_images,
    read_idx,
    share_of_peak,
)
from gradwire.bench.studies.convergence.training import EVALUATED, METHODS, PLAIN, TORCH_FP16, TrainingRun, method_of
from gradwire.bench.studies.tables.page import markdown, read
from gradwire.compressors import registry

JOB = Path(__file__).parent / "convergence_job.py"
ONEBIT = "gradwire onebit"
SHARDED = ("sgd/FSDP2 shards=int8 weights=int8",)


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, object]]:
    """Trainings of four ranks, by method; one job makes them all."""
    names = [*(f"sgd/{name}" for name in (PLAIN, DENSE, "gradwire int8")), *SHARDED]
    ended = subprocess.run([sys.executable, str(JOB), *names], check=False, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {run["method"]: run for run in json.loads(ended.stdout.splitlines()[-1])}


def test_runs_that_lose_nothing_end_alike_and_the_others_near_them(runs: dict[str, dict[str, object]]) -> None:
    plain, dense, *eight_bit = (
        runs[name.removeprefix("sgd/")]["curve"] for name in (PLAIN, DENSE, "gradwire int8", *SHARDED)
    )
    assert [step for step, _ in plain] == [round(20 * share) for share in EVALUATED]  # type: ignore[attr-defined]
    wanted = [quality for _, quality in plain]  # type: ignore[attr-defined]
    assert wanted[-1] < 0.5 * wanted[0]
    assert [quality for _, quality in dense] == pytest.approx(wanted, rel=1e-3)  # type: ignore[attr-defined]
    for curve in eight_bit:
        assert [quality for _, quality in curve] == pytest.approx(wanted, rel=0.05)  # type: ignore[attr-defined]


def test_one_process_ends_where_the_job_of_four_ranks_ends(runs: dict[str, dict[str, object]]) -> None:
    task = runpy.run_path(str(JOB))["Line"]("sgd")
    for compressor, name, ratio in ((None, PLAIN, 1.0), ("int8", "gradwire int8", 3.8)):
        ending = train_alone(task, compressor, {}, seed=1)
        (_, quality) = runs[name]["curve"][-1]  # type: ignore[index]
        assert ending.quality == pytest.approx(quality, rel=1e-3 if compressor is None else 0.02)
        assert ending.ratio == pytest.approx(ratio, rel=0.05)


def test_a_codec_of_ones_own_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "codecs_of_a_test.py").write_text(
        "import torch\n"
        "from gradwire import register_codec\n"
        "class Doubles:\n"
        "    def wire_nbytes(self, numel): return 8 * numel\n"
        "    def encode(self, flat, payload): payload.copy_(flat.double().view(torch.uint8))\n"
        "    def decode(self, payload, flat): flat.copy_(payload.view(torch.float64).float())\n"
        "register_codec('doubles', Doubles)\n"
    )
    (tmp_path / "broken_codecs.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    line = runpy.run_path(str(JOB))["Line"]
    monkeypatch.setitem(tasks.TASKS, "line", lambda: line("sgd"))
    asked = ["--task", "line", "--compressor", "doubles", "--options", '{"warmup_steps": 0}']
    assert alone.main(asked) == 2
    assert "`compressor` is 'doubles'" in capsys.readouterr().err
    assert alone.main([*asked, "--import", "codecs_of_a_test"]) == 0
    said = capsys.readouterr().out
    exact = train_alone(line("sgd"), None, {}, seed=0)
    assert f"squared error {exact.quality:.4f}, 0.5 times fewer bytes" in said
    assert method_of(line("sgd"), "doubles").compressor == "doubles"
    assert convergence.main(["quality", "--json", str(tmp_path / "runs.json"), "--import", "broken_codecs"]) == 1
    assert "`--import` broken_codecs: ZeroDivisionError" in capsys.readouterr().err


def a_run(method: str, seed: int, *qualities: float, dense_steps: int = 0) -> TrainingRun:
    return TrainingRun(
        "fashion", method, seed, dense_steps, tuple((100 * (at + 1), each) for at, each in enumerate(qualities))
    )


def a_record(file: Path) -> Record:
    record = Record(file)
    for seed in (0, 1):
        record.add_run(a_run(PLAIN, seed, 80.0, 90.0 + seed))
        record.add_run(a_run(ONEBIT, seed, 70.0, 91.0, dense_steps=50))
        record.add_run(a_run(TORCH_FP16, seed, 70.0, 75.0))
    for share, seconds in ((1.0, 2.0), (0.25, 5.0)):
        steps = tuple(
            Timed(name, seconds * factor, 1e6)
            for name, factor in ((PLAIN, 1.0), (TORCH_FP16, 0.7), (DENSE, 0.8), (ONEBIT, 0.1))
        )
        record.add_speed(Speed("fashion", share, f"{share:g}mbit", 1.0, "a machine", steps))
    return record


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), st.integers(0, 1000))
def test_a_quality_is_reached_where_the_curve_first_crosses_it(values: list[int], wanted: int) -> None:
    curve = [(10 * number, float(value)) for number, value in enumerate(values)]
    steps = steps_to(curve, wanted, True)
    assert steps == steps_to([(step, -value) for step, value in curve], -wanted, False)
    if steps is None:
        assert max(values) < wanted
        return
    assert all(value < wanted for step, value in curve if step < steps)
    at = int(steps // 10)
    if steps % 10:
        share = steps / 10 - at
        assert (1 - share) * values[at] + share * values[at + 1] == pytest.approx(wanted)
    else:
        assert values[at] >= wanted


def test_dense_steps_count_as_dense(tmp_path: Path) -> None:
    record, facts = a_record(tmp_path / "runs.json"), FashionTask().facts
    speed = record.speed_of("fashion", 1.0)
    assert speed is not None
    assert target(record, facts) == 90.5 - facts.tolerance
    # 70 to 91 between steps 100 and 200 passes 90 at 195.24; the first 50 of them cost 1.6 s each.
    assert seconds_to(record, facts, ONEBIT, speed) == pytest.approx(50 * 1.6 + 145.238 * 0.2, rel=1e-4)
    assert seconds_to(record, facts, TORCH_FP16, speed) is None


def test_a_record_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    record = a_record(file)
    again = Record(file)
    assert (again.runs, again.speeds) == (record.runs, record.speeds)
    assert again.has_run("fashion", PLAIN, 1) and not again.has_run("fashion", PLAIN, 2)
    assert again.rate_of_half("fashion") == ("1mbit", 1.0) and again.rate_of_half("text") is None


def test_tables_and_pictures_name_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = a_record(tmp_path / "runs.json")
    found = tables(record)
    rows = {row[0]: row for row in found["fashion"]}
    assert "never" in rows[TORCH_FP16] and "1.00x" in rows[PLAIN] and "90.00 to 91.00" in rows[PLAIN]
    assert found["links"][1][0] == "fashion" and set(untrained(record)) == {"fashion", "text"}
    data = tmp_path / "data"
    assert convergence.main(["show", "--json", str(tmp_path / "runs.json"), "--data", str(data)]) == 0
    printed = capsys.readouterr().out
    assert record.machine in printed and "fashion, not trained yet: " in printed
    for name, rows_of_it in found.items():
        assert read(data / f"{name}.csv") == rows_of_it and markdown(rows_of_it) in printed
    pictures = draw(record, tmp_path / "convergence")
    assert [picture.name for picture in pictures] == ["convergence-fashion.png"]
    assert pictures[0].read_bytes().startswith(b"\x89PNG")


def test_sharded_trainings_stand_beside_plain_ones_of_the_same_seed(tmp_path: Path) -> None:
    record = a_record(tmp_path / "runs.json")
    assert not sharded_tables(record)
    record.add_run(a_run("HSDP int4", 1, 70.0, 90.5))
    assert sharded_tables(record)["sharded_fashion"][-1] == [
        *("HSDP int4", "90.500", "-0.500", "90.500 to 90.500", "-0.500", "1")
    ]


def test_a_foreign_file_and_an_unknown_method_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    file.write_text("[]")
    assert convergence.main(["show", "--json", str(file)]) == 1
    assert "`--json`" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"`--method` is 'gradwire dgc'; text has plain DDP"):
        method_of(TextTask(), "gradwire dgc")


def test_every_compressor_is_trained_where_it_fits() -> None:
    trained = {optimizer: {method.compressor for method in methods} for optimizer, methods in METHODS.items()}
    assert trained["sgd"] - trained["adamw"] == {"onebit", "dgc"}
    assert trained["sgd"] >= {"fp16", "bf16", "int8", "int4", "onebit", "dgc", "powersgd"}


@given(st.integers(1, 500))
def test_the_learning_rate_rises_and_falls(steps: int) -> None:
    shares = [share_of_peak(step, steps) for step in range(steps)]
    assert 0.0 <= min(shares) <= max(shares) <= 1.0
    top = shares.index(max(shares))
    assert shares[: top + 1] == sorted(shares[: top + 1]) and shares[top:] == sorted(shares[top:], reverse=True)


def test_the_cnn_is_the_same_for_the_same_seed() -> None:
    one, other, third = (torch.cat([p.flatten() for p in SmallCnn(seed).parameters()]) for seed in (3, 3, 4))
    assert one.numel() == 105_866
    assert torch.equal(one, other) and not torch.equal(one, third)


def write_idx(file: Path, shape: tuple[int, ...], values: bytes) -> None:
    header = bytes([0, 0, 8, len(shape)]) + b"".join(length.to_bytes(4, "big") for length in shape)
    file.write_bytes(gzip.compress(header + values))


@pytest.mark.parametrize("ranks", [4, 8])
def test_ranks_share_an_epoch_and_the_held_out_images_out(ranks: int) -> None:
    task, numbers = FashionTask(ranks=ranks), torch.arange(60_000)
    vars(task)["_train"] = vars(task)["_test"] = numbers, numbers
    steps = task.facts.steps // task.epochs
    batches = [task.batch_of(step, rank, 1)[0] for step in range(steps, 2 * steps) for rank in range(ranks)]
    seen = torch.cat(batches).tolist()
    assert 60_000 - len(seen) < 32 * ranks
    assert len(set(seen)) == len(seen)

    def always_three(images: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.full_like(images, 3))

    scores = [task.score(always_three, rank) for rank in range(ranks)]  # type: ignore[arg-type]
    assert torch.stack(scores).sum(0).tolist() == [100.0, 60_000.0]


def test_images_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", (2, 28, 28), bytes(range(256)) * 6 + bytes(32))
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", (2,), bytes([7, 9]))
    images, labels = load_images("train", tmp_path)
    assert images.shape == (2, 1, 28, 28) and labels.tolist() == [7, 9]
    raw = (images * 0.353 + 0.286) * 255
    assert raw.flatten()[:256].round().tolist() == list(range(256))
    (tmp_path / "bad.gz").write_bytes(gzip.compress(b"text"))
    with pytest.raises(ValueError, match="no IDX file"):
        read_idx(tmp_path / "bad.gz")


def test_without_apt_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "INSTALLED", Path("/nowhere/fashion-mnist"))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(RuntimeError, match="`apt-get` is missing: put the four"):
        data_folder(tmp_path)
