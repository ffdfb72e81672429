import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.bench.emulation.command import build_parser, main, ranks_of_nodes

EMULATE = [sys.executable, "-m", "gradwire", "emulate"]


def shape(*words: str) -> list[int]:
    return ranks_of_nodes(build_parser().parse_args(words))


def test_shapes() -> None:
    assert shape("--nodes", "2", "--ranks-per-node", "4") == [4, 4]
    assert shape("--nodes", "3") == [1, 1, 1]
    assert shape("--uneven", "3,1") == shape("--nodes", "2", "--uneven", "3, 1") == [3, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "0", "--", "true"], "`--nodes`: found 0"),
        (["--", "true"], "`--nodes` is missing"),
        (["--nodes", "2", "--ranks-per-node", "0", "--", "true"], "`--ranks-per-node`: found 0"),
        (["--nodes", "3", "--uneven", "3,1", "--", "true"], "`--uneven`: found '3,1', which is 2 nodes"),
        (["--uneven", "3,0", "--", "true"], "`--uneven`: found '3,0'"),
        (["--uneven", "3,x", "--", "true"], "`--uneven`: found '3,x'"),
        (["--nodes", "1", "--nic", "fast", "--", "true"], "`--nic`: found 'fast'"),
        (["--nodes", "1", "--grace", "-1", "--", "true"], "`--grace`: found -1"),
        (["--nodes", "1", "--json", "/no/such/folder/x.json", "--", "true"], "`--json`: cannot write"),
        (["--nodes", "1"], "`COMMAND`: found nothing after `--`"),
        (["--nodes", "1", "--"], "`COMMAND`: found nothing after `--`"),
    ],
)
def test_parameters_that_make_no_sense_end_with_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_machine_that_cannot_emulate_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gradwire.bench.emulation.command.available", lambda: "the command `ip` is missing")
    assert main(["--nodes", "1", "--", "true"]) == 2
    assert "cannot emulate a cluster here: the command `ip` is missing" in capsys.readouterr().err


@pytest.mark.netns
def test_statuses_output_and_bytes_come_out(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    words = ["--nodes", "2", "--ranks-per-node", "2", "--nic", "100mbit", "--prefix", "--json", str(file)]
    script = "echo hello from $(hostname); exit $((RANK * 2))"
    done = subprocess.run(
        [*EMULATE, *words, "--", "sh", "-c", script], text=True, capture_output=True, timeout=60, check=False
    )
    hosts = [0, 0, 1, 1]
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] hello from node{hosts[rank]}" for rank in range(4)]
    assert "bytes on the links (100mbit" in done.stderr and "node1" in done.stderr
    record = json.loads(file.read_text())
    assert record["returncodes"] == [0, 2, 4, 6]
    assert done.returncode == record["exit_status"] in (2, 4, 6)  # of whoever failed first
    assert [nic["hostname"] for nic in record["nic_bytes"]] == ["node0", "node1"]


@pytest.mark.netns
def test_output_is_raw_by_default() -> None:
    words = ["--nodes", "1", "--", "sh", "-c", "printf out; printf err >&2"]
    done = subprocess.run([*EMULATE, *words], text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stdout == "out"
    assert done.stderr.startswith("err")


@pytest.mark.netns
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("path", [[], ["--delay", "40ms"]], ids=["bridge", "relay"])
def test_no_signal_leaves_anything_behind(
    number: signal.Signals,
    path: list[str],
    namespaces_below: Callable[[int], set[str]],
    wait_until_gone: Callable[[set[str]], set[str]],
    tmp_path: Path,
) -> None:
    # A child that has left its rank's session is the hardest to find again.
    script = "setsid sleep 600 & echo ready; sleep 600"
    words = ["--nodes", "2", "--ranks-per-node", "1", "--prefix", *path, "--", "sh", "-c", script]
    with subprocess.Popen(
        [*EMULATE, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert {process.stdout.readline() for _ in range(2)} == {"[rank 0] ready\n", "[rank 1] ready\n"}
        namespaces = namespaces_below(process.pid)
        # Two nodes and the bridge.
        assert len(namespaces) == 3
        process.send_signal(number)
        status = process.wait(timeout=30)
        # The bytes until then are shown, if the signal leaves the time.
        assert (", stopped)" in process.stderr.read()) == (number != signal.SIGKILL)
    assert status == (128 + number if number == signal.SIGTERM else -number)
    assert not wait_until_gone(namespaces)


@pytest.mark.netns
def test_a_bare_python_is_gradwires_own(tmp_path: Path) -> None:
    """PATH's python has neither torch nor gradwire; a path stays what it is."""
    (tmp_path / "python").write_text("#!/bin/sh\necho of PATH\n")
    (tmp_path / "python").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin"}
    for word, said in (("python", sys.executable), (str(tmp_path / "python"), "of PATH")):
        command = [*EMULATE, "--nodes", "1", "--", word, "-c", "import sys; print(sys.executable)"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.strip() == said
