"""What every command prints: 80 columns are enough, `--json` is JSON, and a pipe gets no progress."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

import gradwire.__main__ as gradwire_main
from gradwire.bench.compare.report import ConfigurationResult, table
from gradwire.bench.nccl_tests.checks import CodingLoss
from gradwire.bench.nccl_tests.command import loss_table
from gradwire.bench.pipe import OUTPUT_LOST
from gradwire.bench.terminal import STDOUT, write_json
from gradwire.topology.presets import dgx_h100
from gradwire.topology.show import json_form

PREDICT = ["predict", "--preset", "dgx_a100", "--nodes", "1024", "--gradient-mb", "113.2", "--backward-ms", "45"]
COMMANDS = {
    "help": ["--help"],
    "topo": ["topo"],
    "topo of a large machine": ["topo", "--from", "machine.json"],
    "gdr-check": ["gdr-check"],
    "gdr-check of an example": ["gdr-check", "--example", "--all-pairs"],
    "predict": PREDICT,
    "predict --all": [*PREDICT, "--all"],
    "bench kernels": ["bench", "kernels", "--numel", "1024", "--repeats", "1"],
}
"""What needs no cluster and less than a second or two. The rows of `bench` and the matrix of `topo` are not here: their
form is that of nccl-tests and nvidia-smi, whose parsers read them."""


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a command in this process, 80 columns wide and with no terminal; returns what it printed."""
    (tmp_path / "machine.json").write_text(json_form.write(dgx_h100()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: str) -> str:
        assert gradwire_main.main([*words]) in (0, 3)  # 3: gdr-check has nothing to check here
        shown = capsys.readouterr()
        assert shown.err == "", "a pipe gets no progress"
        return shown.out

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_80_columns_are_enough(name: str, run: Callable[..., str]) -> None:
    shown = run(*COMMANDS[name])
    assert shown.strip()
    assert not [line for line in shown.splitlines() if len(line.rstrip()) > 80]
    assert "\x1b" not in shown and "\r" not in shown


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("help", "predict --all")])
def test_json_alone_is_on_stdout(name: str, run: Callable[..., str]) -> None:
    assert isinstance(json.loads(run(*COMMANDS[name], "--json")), dict)


@pytest.mark.parametrize("words", [*([name] for name in gradwire_main.COMMANDS), ["bench", "kernels"]])
def test_every_command_has_json(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        sys.exit(gradwire_main.main([*words, "--help"]))
    shown = capsys.readouterr().out
    assert "--json" in shown
    assert not [line for line in shown.splitlines() if len(line) > 80]


def printed_lines(what: object) -> list[str]:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(what)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_what_is_not_finite_is_no_number_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    """As the gradient error of a codec of one's own may be: jq, browsers and databases refuse a NaN."""
    result = ConfigurationResult("mine", 0.1, error=float("nan"), speed_up=0.5, speed_up_range=(0.4, float("inf")))
    write_json(STDOUT, {"results": [asdict(result)]})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["results"][0]["error"] is None and found["results"][0]["speed_up_range"] == [0.4, None]


def test_the_tables_of_long_measurements_do_not_wrap() -> None:
    rows = [ConfigurationResult("torch quantization per channel", 1234.567, 12345.67e6, 1.2e-3, 123.45)]
    rows += [
        ConfigurationResult("gradwire hierarchical", 0.1, None, None, 1.0),
        ConfigurationResult("mpi", reason="no " * 99),
    ]
    found = printed_lines(table(rows))
    assert sum(line.startswith(" torch quantization per channel") for line in found) == 1
    assert len([line for line in found if line.strip()]) == 2 + 2, found  # heading, line, two that ran
    loss = CodingLoss(2**30, "|e_i| <= 1", 1e-3, 0.999, 2.0**30, 2.0**28, 12345e-6, 12345e-6)
    assert len([line for line in printed_lines(loss_table("int8", [loss])) if line.strip()]) == 4


SCRIPT = """
import time
from gradwire.bench.terminal import StatusLine, progress_bar, working
with working("waiting"):
    time.sleep(0.3)
status = StatusLine()
status.show("measuring " + "x" * 200)
status.clear()
with progress_bar() as bar:
    bar.update(bar.add_task("bars", total=2), completed=1)
    bar.refresh()
print("result")
"""


def read_terminal(ours: int) -> bytes:
    """All that was written to the other end of a terminal, which is closed; one read gives what is there already."""
    said = b""
    with suppress(OSError):  # EIO: its end
        while piece := os.read(ours, 1 << 16):
            said += piece
    return said


def test_progress_is_for_terminals_on_stderr() -> None:
    quiet = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True, timeout=60)
    assert (quiet.stdout, quiet.stderr) == (b"result\n", b"")
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=theirs, check=True, timeout=60,
        env={**os.environ, "COLUMNS": "60", "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    said = read_terminal(ours).decode()
    os.close(ours)
    assert done.stdout == b"result\n"
    assert "waiting" in said and "bars" in said
    measuring = said[said.index("measuring") :].split("\r")[0]
    assert len(measuring) <= 60, "a line that wraps is not written over"


BENCH = ["bench", "all_reduce", "-b", "8", "-e", "64", "-f", "2", "-n", "1", "-g", "2"]


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["topo"], 0),
        (["topo", "--json"], 0),
        (["gdr-check", "--example"], 0),
        (["gdr-check", "--root", "."], 2),
        (["doctor"], 0),
        (["doctor", "--json"], 0),
        (["bench", "kernels", "--numel", "1024", "--repeats", "1"], 0),
        (BENCH, 0),
        ([*BENCH, "--json"], 0),
    ],
)
def test_a_reader_that_leaves_early_is_no_error(words: list[str], status: int, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", *words], stdout=writer, stderr=subprocess.PIPE, check=False, cwd=tmp_path
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (status, b"")


@pytest.mark.parametrize(
    ("redirection", "why"), [(">/dev/full", "cannot write to standard output"), (">&-", "standard output is closed")]
)
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["topo", "--help"],
        ["gdr-check", "--example", "--json"],
        ["doctor"],
        ["doctor", "--json"],
        PREDICT,
        BENCH,
    ],
    ids=" ".join,
)
def test_output_that_cannot_be_written_is_one_line_and_a_status_of_its_own(
    words: list[str], redirection: str, why: str
) -> None:
    shell = f'unset PYTHONUNBUFFERED; exec "$@" {redirection}'  # argparse hides that an unbuffered write failed
    done = subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, "-m", "gradwire", *words],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == OUTPUT_LOST
    said = done.stderr.splitlines()
    assert sum(line.startswith(f"gradwire: {why}") for line in said) == 1
    assert len(said) == 1 or words == BENCH  # there the other rank loses its peer


@pytest.mark.netns
@pytest.mark.parametrize(("redirection", "status"), [(">/dev/full", OUTPUT_LOST), ("| true", 0)])
def test_ranks_of_which_nothing_can_be_printed_run_on(redirection: str, status: int, tmp_path: Path) -> None:
    """More lines than a pipe holds: a rank whose lines nobody takes would stand still."""
    rank = ["sh", "-c", "seq 50000; touch ended"]
    words = [sys.executable, "-m", "gradwire", "emulate", "--nodes", "1", "--prefix", "--", *rank]
    shell = ["bash", "-c", f'"$@" {redirection}; exit ${{PIPESTATUS[0]}}', "bash"]
    done = subprocess.run([*shell, *words], stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False)
    assert done.returncode == status and "Traceback" not in done.stderr
    assert (tmp_path / "ended").exists()


def test_closed_errors_do_not_go_to_standard_output() -> None:
    words = [sys.executable, "-m", "gradwire", "topo", "--from", "no such file"]
    done = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *words], stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (2, b"")


def test_an_encoding_without_a_character_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(json_form.write(dgx_h100()))
    shown = subprocess.run(
        [sys.executable, "-m", "gradwire", "topo", "--from", "machine.json"], capture_output=True, check=True,
        cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    ).stdout  # fmt: skip
    assert shown.isascii() and b"NVLink" in shown
