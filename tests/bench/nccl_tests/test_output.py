"""Standard output: the rules that public parsers of nccl-tests rely on, applied to real runs."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.bench.nccl_tests.output import number_text, plain_number

Run = Callable[..., subprocess.CompletedProcess[str]]
AMAZON_TYPES = ("float", "double", "int", "half")
AMAZON_OPERATIONS = ("sum", "prod", "max", "min", "none")


def superbench_rows(text: str) -> list[dict[str, float]]:
    """Rows as SuperBench finds them: from the last `out-of-place` on, columns counted from the end of the header."""
    lines = text.splitlines()
    start = max(number for number, line in enumerate(lines) if "out-of-place" in line)
    end = max(number for number, line in enumerate(lines) if "Out of bounds values" in line)
    columns: list[str] = []
    rows = []
    for line in lines[start + 1 : end]:
        if "time" in line and "busbw" in line:
            columns = line[1:].split()
        words = line.split()
        if columns and words and re.match(r"\d+", words[0]):
            assert len(words) == len(columns) == 13
            place = {name: columns.index(name) - len(columns) for name in ("time", "algbw", "busbw")}
            rows.append(
                {"size": float(words[columns.index("size")])}
                | {name: float(words[position]) for name, position in place.items()}
            )
    return rows


def check_rules(text: str) -> None:
    """Every rule, one by one."""
    lines = text.splitlines()
    data = [line for line in lines if re.match(r"\s*\d", line)]
    assert data
    for line in data:
        words = line.split()
        assert len(words) == 13
        assert words[2] in AMAZON_TYPES and words[3] in AMAZON_OPERATIONS
        assert all(re.fullmatch(r"-?\d+(\.\d+)?|N/A", word) for word in words[:2] + words[4:])
    assert all(line.startswith("#") for line in lines if line not in data)
    headings = [line for line in lines if "time" in line and "busbw" in line]
    assert len(headings) == 1 and len(headings[0][1:].split()) == 13
    assert sum("out-of-place" in line for line in lines) == 1
    mentions = [line for line in lines if "bandwidth" in line]
    assert len(mentions) == 1
    strict = re.search(r"# Avg bus bandwidth\s+: (\S+)\s*$", mentions[0])
    assert strict is not None
    assert float(strict[1]) == float(mentions[0].split()[-1]) == float(mentions[0].split()[5])
    assert re.search(r"^# Out of bounds values\s*: 0 OK$", text, re.MULTILINE)
    assert "FAILED" not in text
    begins, ends = (
        re.search(rf"^# Collective test {word}: (\w+)$", text, re.MULTILINE) for word in ("starting", "concluded")
    )
    assert begins is not None and ends is not None and begins[1] == ends[1]
    assert any(re.match(r"#\s+Rank\s+0 .*\bdevice\s+0 ", line) for line in lines)
    rows = superbench_rows(text)
    assert len(rows) == len(data)
    mean = sum((float(line.split()[7]) + float(line.split()[11])) / 2 for line in data) / len(data)
    assert float(strict[1]) == pytest.approx(mean, abs=0.01)


@pytest.mark.parametrize(
    "words",
    [
        ["all_reduce", "--backend", "shm", "-b", "8", "-e", "64K", "-f", "8"],
        ["alltoall", "--backend", "gloo", "-b", "0", "-e", "3K", "-i", "1K"],
        ["barrier", "--backend", "shm"],
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_every_parser_rule_holds(run_bench: Run, words: list[str]) -> None:
    done = run_bench(*words, "-g", "2", "-n", "5")
    assert done.returncode == 0, done.stderr
    check_rules(done.stdout)
    assert "# ranks: 2 (1 node x 2 local ranks)" in done.stdout


def test_one_full_block_for_each_backend_and_algorithm(run_bench: Run) -> None:
    done = run_bench(
        "all_reduce",
        "--backend",
        "gradwire,shm",
        "--algorithm",
        "flat,hierarchical",
        "-b",
        "1K",
        "-e",
        "1K",
        "-g",
        "2",
        "-n",
        "3",
    )
    assert done.returncode == 0, done.stderr
    blocks = done.stdout.split("# gradwire bench ")[1:]
    assert len(blocks) == 3
    for block in blocks:
        check_rules("# " + block)
    assert "# algorithm: hierarchical" in blocks[1] and "# plan: " in blocks[1]


def test_json_has_the_shape_of_nccl_tests_and_no_environment(run_bench: Run, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    for _ in range(2):
        done = run_bench(
            "reduce",
            "--backend",
            "shm",
            "-b",
            "1K",
            "-e",
            "4K",
            "-f",
            "2",
            "-g",
            "2",
            "-n",
            "6",
            "-I",
            "1",
            "-K",
            "2",
            "-J",
            str(file),
            "--csv",
            str(tmp_path / "run.csv"),
            SECRET="do-not-print",
        )
        assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.csv", "run.csv.0", "run.json", "run.json.0"]
    text = file.read_text()
    assert "do-not-print" not in text and "env" not in json.loads(text)
    record = json.loads(text)
    assert record["version"] == 3 and record["config"]["step_factor"] == 2
    assert len(record["results"]) == 3 and record["out_of_bounds"] == {"count": 0, "okay": True}
    first = record["results"][0]
    assert {"size", "count", "type", "redop", "root", "out_of_place", "in_place"} <= first.keys()
    each = first["out_of_place_per_iter"]
    assert each["skipped_iterations"] == 2 and len(each["times_us"]) == 4
    assert each["min_us"] <= each["p50_us"] <= each["p99_us"] <= each["max_us"]
    lines = (tmp_path / "run.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 3 and lines[0].startswith("collective,backend")


def test_the_least_wanted_rate_decides_the_exit_status(run_bench: Run) -> None:
    words = ["all_reduce", "--backend", "shm", "-b", "1K", "-e", "1K", "-g", "2", "-n", "3"]
    failed = run_bench(*words, NCCL_TESTS_MIN_BW="1000000")
    assert failed.returncode == 1
    assert re.search(r"Avg bus bandwidth\s+: \S+ FAILED", failed.stdout)
    for text in ("0.0000001", ""):  # empty is 0, as for nccl-tests
        passed = run_bench(*words, NCCL_TESTS_MIN_BW=text)
        assert passed.returncode == 0
        assert re.search(r"Avg bus bandwidth\s+: \S+ OK", passed.stdout)
    for text in ("fast", "nan"):
        refused = run_bench(*words, NCCL_TESTS_MIN_BW=text)
        assert refused.returncode == 2 and f"`NCCL_TESTS_MIN_BW` is '{text}'" in refused.stderr


@pytest.mark.parametrize(("name", "value"), [("NCCL_TESTS_SPLIT", "%2"), ("NCCL_TESTS_SPLIT_MASK", "0x7")])
def test_ranks_that_are_to_be_split_are_not_measured_together(run_bench: Run, name: str, value: str) -> None:
    words = ["all_reduce", "--backend", "shm", "-b", "1K", "-e", "1K", "-g", "2", "-n", "3"]
    done = run_bench(*words, **{name: value})
    assert done.returncode == 2 and f"`{name}` is {value!r}" in done.stderr and not done.stdout


def test_one_rank_is_warned_about() -> None:
    # The one run that starts as a user starts it, with an interpreter of its own.
    words = [sys.executable, "-m", "gradwire", "bench", "all_reduce", "-b", "1K", "-e", "1K", "-n", "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert "one rank" in done.stderr and "mpirun" in done.stderr
    check_rules(done.stdout)


@pytest.mark.parametrize(
    ("value", "text"), [(12.344, "12.34"), (12345.67, "12345.7"), (123456.7, "123457"), (1e9, "1000000000")]
)
def test_numbers_lose_decimals_before_they_lose_their_column(value: float, text: str) -> None:
    assert number_text(value, 7).strip() == text.strip()


@pytest.mark.parametrize("value", [0.0, 1e-9, 3.14159e-7, 1.5, 123456789.0, 1e15])
def test_plain_numbers_have_no_exponent(value: float) -> None:
    assert re.fullmatch(r"\d+(\.\d+)?", plain_number(value))
    assert float(plain_number(value)) == pytest.approx(value, rel=1e-4, abs=1e-12)
