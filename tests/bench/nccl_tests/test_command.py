"""`gradwire bench` as a whole: every type and operation is exact, and what cannot be is refused in words."""

import errno
import socket
import subprocess
from collections.abc import Callable, Sequence

import pytest

from gradwire.bench.nccl_tests import command
from gradwire.bench.nccl_tests.dtypes import ELEMENT_TYPES
from gradwire.bench.nccl_tests.start import Start

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("collective", "backend"),
    [
        ("all_reduce", "shm,gloo,gradwire"),
        ("reduce", "shm"),
        ("reduce_scatter", "gloo"),
        ("all_gather", "shm,gloo"),
        ("broadcast", "gloo"),
        ("alltoall", "gloo,gradwire"),
    ],
)
def test_all_types_and_operations_are_exact(run_bench: Run, collective: str, backend: str) -> None:
    done = run_bench(
        collective,
        "--backend",
        backend,
        "-d",
        "all",
        "-o",
        "all",
        "-b",
        "40000",
        "-e",
        "40000",
        "-n",
        "1",
        "-g",
        "3",
        "-r",
        "1",
    )
    assert done.returncode == 0, done.stderr
    blocks = backend.count(",") + 1
    assert done.stdout.count("# Out of bounds values : 0 OK") == blocks
    rows = [line.split() for line in done.stdout.splitlines() if line.lstrip()[:1].isdigit()]
    assert {"float", "double", "half", "bfloat16", "int8", "uint8", "int32", "int64"} <= {row[2] for row in rows}
    if collective in ("all_gather", "broadcast", "alltoall"):  # what only moves takes every type
        assert set(ELEMENT_TYPES) == {row[2] for row in rows}
    else:
        assert {"sum", "max", "min", "avg"} <= {row[3] for row in rows}
        assert "# skipped: " in done.stdout


def test_a_type_without_arithmetic_of_which_nothing_is_left_moves_too(run_bench: Run) -> None:
    done = run_bench("all_gather", "-d", "f8e4m3", "-b", "8", "-e", "8", "-n", "1", "-g", "2")
    assert done.returncode == 0, done.stderr


def test_every_root_and_several_tables(run_bench: Run) -> None:
    done = run_bench(
        "broadcast", "--backend", "shm", "-g", "3", "-r", "all", "-b", "1K", "-e", "1K", "-n", "1", "-N", "2"
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split()[4] for line in done.stdout.splitlines() if line.lstrip()[:1].isdigit()]
    assert rows == ["0", "1", "2"] * 2


def test_more_columns_only_on_request(run_bench: Run) -> None:
    done = run_bench(
        "all_reduce",
        "--backend",
        "shm",
        "-g",
        "2",
        "-b",
        "1K",
        "-e",
        "1K",
        "-n",
        "3",
        "-I",
        "1",
        "-S",
        "1",
        "-M",
        "1",
        "-m",
        "2",
    )
    assert done.returncode == 0, done.stderr
    row = next(line.split() for line in done.stdout.splitlines() if line.lstrip()[:1].isdigit())
    assert len(row) == 13 + 2 * 4 + 2
    assert "MiB resident" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["all_reduce", "-g", "2", "--backend", "nccl"], "no CUDA device"),
        (["all_reduce", "--backend", "nccl", "--device", "cpu"], "`--device` is cpu"),
        (["all_reduce", "-G", "2"], "`-G` is 2"),
        (["all_reduce", "-R", "1"], "`-R`: found 1, wanted 0"),
        (["all_reduce", "--compressor", "zip"], "`--compressor`: found 'zip'"),
        (["broadcast", "--compressor", "int8"], "no other collective is compressed"),
        (["all_reduce", "--backend", "gloo", "--algorithm", "flat"], "`--algorithm`"),
        (["all_reduce", "-m", "1000000"], "`-m`: the tensors of all ranks need at least 6.71e+04 GB"),
        (["everything"], "COLLECTIVE"),
    ],
)
def test_a_flag_that_cannot_be_is_refused_before_any_rank_starts(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "launcher_variables", dict)
    if "no CUDA" in message:
        monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert command.main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["all_reduce", "-d", "f8e4m3", "--backend", "gloo"], "does not reduce f8e4m3"),
        (["broadcast", "-r", "7", "-g", "2"], "`-r`: found 7"),
    ],
)
def test_what_the_ranks_cannot_do_is_refused_once(run_bench: Run, words: list[str], message: str) -> None:
    done = run_bench(*words)
    assert done.returncode == 2
    assert done.stderr.count(message) == 1
    assert "Traceback" not in done.stderr


def test_kernels_are_another_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def kernels(argv: list[str]) -> int:
        seen.extend(argv)
        return 3

    monkeypatch.setattr("gradwire.bench.kernels.command.main", kernels)
    assert command.main(["kernels", "--numel", "4096"]) == 3
    assert seen == ["--numel", "4096"]


def test_nobody_else_gets_the_port_of_the_store_before_the_ranks_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int | None] = []

    def fork_ranks(places: Sequence[Start], *_: object) -> int:
        assert [place.rank for place in places] == [0, 1] and len({place.port for place in places}) == 1
        with socket.socket() as other:
            found.append(other.connect_ex(("127.0.0.1", places[0].port)))
            with pytest.raises(OSError) as refused:
                other.bind(("127.0.0.1", places[0].port))
            found.append(refused.value.errno)
        with socket.socket() as store:
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("", places[0].port))
            store.listen()
        return 0

    monkeypatch.setattr(command, "fork_ranks", fork_ranks)
    assert command.main(["all_reduce", "--backend", "gloo", "-g", "2", "-b", "1K", "-e", "1K"]) == 0
    assert found == [errno.ECONNREFUSED, errno.EADDRINUSE]
