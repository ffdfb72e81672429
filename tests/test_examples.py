"""The scripts in examples/ run as they stand, on ranks of this machine, as the commands in their headers say.

The ranks are forked by one process that has imported torch, with the variables that torchrun sets. A command with a
variable in front, which torch reads when it is imported, is given to torchrun itself.
"""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MOST_LINES = 100
"""Of an example: it is read before it is run."""


@dataclass(frozen=True)
class Example:
    """How an example is run here, and what rank 0 prints when all went well."""

    arguments: str
    last_words: str
    needs: str | None = None
    """The package that it shows gradwire with."""


BIT_FOR_BIT = "the resumed run ends with the same weights, bit for bit"
RUNS = {
    "backend.py": Example("--steps 4", "the same weights, bit for bit, on all 2 ranks"),
    "compressed_resume.py": Example("--steps 6", BIT_FOR_BIT),
    "ddp_hook.py": Example("--steps 4", "all-reduces in 4 steps"),
    "fsdp.py": Example("--steps 3", "the same weights as with whole models, up to rounding"),
    "own_codec.py": Example("--steps 4", "float8: loss"),
    "read_report.py": Example("--steps 4", "a node sent    0.154 MB a step to the other node"),
    "tune.py": Example("--steps 12", "transfers in step 3: 2; in the last step:"),
    "unchanged.py": Example("--steps 4", "after 4 steps"),
    "with_accelerate.py": Example("--steps 4", BIT_FOR_BIT, "accelerate"),
    "with_lightning.py": Example("", BIT_FOR_BIT, "lightning"),
    "with_ray.py": Example("--steps 4", "a checkpoint with the states of all ranks", "ray"),
    "with_transformers.py": Example("--steps 4", BIT_FOR_BIT, "transformers"),
}

SERVER = """
import json, os, runpy, sys, time, traceback

import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor

import gradwire.comms.backend.process_group
import gradwire.comms.hook


def rank_main(task, rank):
    os.environ.update(task["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(task["folder"])
    with open(f"output{rank}", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.argv = [task["script"], *task["arguments"]]
    sys.path[0] = os.path.dirname(task["script"])
    sys.stdout.reconfigure(line_buffering=True)
    status = 1
    try:
        runpy.run_path(task["script"], run_name="__main__")
        status = 0
    except SystemExit as leaving:
        status = 0 if leaving.code is None else 1
        print(leaving.code)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


for line in sys.stdin:
    task = json.loads(line)
    ranks = []
    for rank in range(task["ranks"]):
        pid = os.fork()
        if not pid:
            rank_main(task, rank)
        ranks.append(pid)
    statuses, deadline = {}, time.monotonic() + task["seconds"]
    while len(statuses) < len(ranks):
        for pid in set(ranks) - statuses.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, 9)
        time.sleep(0.01)
    print(json.dumps([statuses[pid] for pid in ranks]), flush=True)
"""
"""Reads tasks, forks their ranks, and answers with the exit codes."""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", SERVER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def header(name: str) -> str:
    text = (EXAMPLES / name).read_text()
    return text[3 : text.index('"""', 3)]


@dataclass(frozen=True)
class Command:
    """The first command of a header: `VARIABLE=value torchrun --standalone --nproc-per-node 2 examples/...`."""

    variables: dict[str, str]
    ranks: int
    """0 where it is not torchrun that starts them."""


def command(name: str) -> Command:
    launcher = r"(?:torchrun --standalone --nproc-per-node (?P<ranks>[24])|python)"
    found = re.search(
        rf"^ *(?P<variables>(?:\w+=\S+ )*){launcher} examples/{re.escape(name)}", header(name), re.MULTILINE
    )
    assert found is not None, f"the header of {name} has no command"
    variables = dict(word.split("=", 1) for word in found["variables"].split())
    return Command(variables, int(found["ranks"] or 0))


def test_every_example_is_run() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == RUNS.keys()


@pytest.mark.parametrize("name", RUNS)
def test_it_is_short_and_says_what_it_shows(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < MOST_LINES
    assert header(name).splitlines()[0].endswith(".")
    assert command(name)


@pytest.mark.parametrize("name", RUNS)
def test_it_runs(name: str, server: subprocess.Popen[str], tmp_path: Path) -> None:
    example, wanted = RUNS[name], command(name)
    if example.needs is not None and importlib.util.find_spec(example.needs) is None:
        pytest.skip(f"{example.needs} is not installed")
    if wanted.variables or not wanted.ranks:
        output = run_alone(name, wanted, tmp_path)
    else:
        output = run_forked(name, wanted, tmp_path, server)
    assert example.last_words in output
    if wanted.variables:
        assert "gradwire averages the gradients" in output


def run_alone(name: str, wanted: Command, folder: Path) -> str:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(wanted.ranks)]
    done = subprocess.run(
        [sys.executable, *(torchrun if wanted.ranks else []), str(EXAMPLES / name), *RUNS[name].arguments.split()],
        cwd=folder,
        env=os.environ | wanted.variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout + done.stderr


def run_forked(name: str, wanted: Command, folder: Path, server: subprocess.Popen[str]) -> str:
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(wanted.ranks),
        "LOCAL_WORLD_SIZE": str(wanted.ranks),
        "TORCHELASTIC_RUN_ID": "examples",  # by which Lightning knows torchrun
        "OMP_NUM_THREADS": "1",
    }
    task = {
        "script": str(EXAMPLES / name),
        "arguments": RUNS[name].arguments.split(),
        "folder": str(folder),
        "ranks": wanted.ranks,
        "environment": environment,
        "seconds": 120,
    }
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(task) + "\n")
    server.stdin.flush()
    statuses = json.loads(server.stdout.readline())
    outputs = [(folder / f"output{rank}").read_text() for rank in range(wanted.ranks)]
    assert statuses == [0] * wanted.ranks, "\n".join(outputs)[-6000:]
    return outputs[0]
