"""NCCL's backends and CUDA graphs: exact where there is a GPU, refused with what to install where there is none."""

import subprocess
from collections.abc import Callable

import pytest
from gpu_standin.calls import is_standin

from gradwire.bench.nccl_tests import command

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["nccl", "nccl-raw"])
@pytest.mark.parametrize(
    "collective", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "alltoall", "sendrecv"]
)
def test_a_backend_of_nccl_is_exact(run_bench: Run, collective: str, backend: str) -> None:
    # One rank: one GPU is enough, and NCCL refuses a second rank on it.
    done = run_bench(collective, "--backend", backend, "-b", "1K", "-e", "1M", "-f", "32", "-n", "3")
    assert done.returncode == 0, done.stderr
    assert "# Out of bounds values : 0 OK" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(is_standin(), reason="the GPU stand-in has no CUDA graphs")
@pytest.mark.parametrize("backend", ["nccl", "nccl-raw"])
def test_a_graph_of_iterations_is_replayed(run_bench: Run, backend: str) -> None:
    done = run_bench("all_reduce", "--backend", backend, "-G", "2", "-b", "64K", "-e", "64K", "-n", "5")
    assert done.returncode == 0, done.stderr
    assert "graph: 2" in done.stdout and "# Out of bounds values : 0 OK" in done.stdout


def test_this_process_asks_for_no_gpu_before_it_forks_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where NVML is missing, torch asks CUDA, and ranks forked after that cannot use it."""
    asked = []

    def count() -> int:
        asked.append("here")
        return 1

    monkeypatch.setattr(command, "launcher_variables", dict)
    monkeypatch.setattr("torch.cuda.device_count", count)
    monkeypatch.setattr(command, "_start_ranks", lambda *arguments: len(asked))
    assert command.main(["all_reduce", "--backend", "nccl"]) == 0


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["--backend", "nccl"], ["`--backend` is nccl", "a CUDA build of torch"]),
        (["--backend", "nccl-raw"], ["`--backend` is nccl-raw", "a CUDA build of torch"]),
        (["--backend", "gloo,nccl"], ["`--backend` is nccl", "a CUDA build of torch"]),
        (["--backend", "nccl", "-G", "1"], ["`--backend` is nccl", "a CUDA build of torch"]),
        (["--backend", "gloo", "-G", "1"], ["`-G` is 1", "the tensors are on the CPU", "--device cuda"]),
        (["--device", "cuda"], ["`--device` is cuda", "a CUDA build of torch"]),
    ],
)
def test_without_a_gpu_the_error_names_the_flag_and_what_to_install(
    words: list[str], messages: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "launcher_variables", dict)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert command.main(["all_reduce", *words]) == 2
    said = capsys.readouterr().err
    assert all(message in said for message in messages), said
