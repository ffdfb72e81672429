"""The scripts in examples/ run as they stand, on ranks of this machine, as the commands in their headers say.

The ranks are forked by one process that has imported torch, with the variables that torchrun sets; for a command with
a variable in front, which torch reads when it is imported, by a process of its own.
"""

import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.forked import ForkServer, fork_server

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
    "elastic.py": Example("--steps 6", "3 of 4 ranks have done 6 steps: the same weights, bit for bit"),
    "fsdp.py": Example("--steps 3", "the same weights as with whole models, up to rounding"),
    "fsdp_compressed.py": Example("--steps 3", "FSDP, int8: loss"),
    "outer.py": Example("--steps 12", "the same model on all 2 workers, bit for bit"),
    "own_codec.py": Example("--steps 4", "float8: loss"),
    "read_report.py": Example("--steps 4", "a node sent    0.154 MB a step to the other node"),
    "tune.py": Example("--steps 12", "transfers in step 3: 2; in the last step:"),
    "unchanged.py": Example("--steps 4", "after 4 steps"),
    "unlike_speeds.py": Example("--steps 14", "the same weights on both ranks, bit for bit"),
    "with_accelerate.py": Example("--steps 4", BIT_FOR_BIT, "accelerate"),
    "with_lightning.py": Example("", BIT_FOR_BIT, "lightning"),
    "with_ray.py": Example("--steps 4", "a checkpoint with the states of all ranks", "ray"),
    "with_transformers.py": Example("--steps 4", BIT_FOR_BIT, "transformers"),
}


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
def test_it_runs(name: str, ranks_of_scripts: ForkServer, tmp_path: Path) -> None:
    example, wanted = RUNS[name], command(name)
    if example.needs is not None and importlib.util.find_spec(example.needs) is None:
        pytest.skip(f"{example.needs} is not installed")
    if not wanted.ranks:
        output = run_alone(name, tmp_path)
    elif wanted.variables:
        with fork_server(**wanted.variables) as server:
            output = run_forked(name, wanted, tmp_path, server)
    else:
        output = run_forked(name, wanted, tmp_path, ranks_of_scripts)
    assert example.last_words in output
    if wanted.variables:
        assert "gradwire averages the gradients" in output


def run_alone(name: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *RUNS[name].arguments.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout + done.stderr


def run_forked(name: str, wanted: Command, folder: Path, server: ForkServer) -> str:
    arguments = RUNS[name].arguments.split()
    # By TORCHELASTIC_RUN_ID Lightning knows torchrun.
    done = server.run(EXAMPLES / name, arguments, wanted.ranks, folder, TORCHELASTIC_RUN_ID="examples")
    assert done.statuses == [0] * wanted.ranks, "\n".join([*done.outputs, *done.errors])[-6000:]
    return done.outputs[0] + done.errors[0]
