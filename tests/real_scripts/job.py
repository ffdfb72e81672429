"""Runs a script as the two ranks of a job, each a node of its own, and reads what the observer has noted."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradwire.bench.emulation.launch import held_port

RANKS = 2
SECONDS = 600.0
"""For one run, on a machine with some other work to do."""

OBSERVER = Path(__file__).with_name("observer.py")


class JobError(Exception):
    """A run that ended otherwise than it should; the message ends with what it printed."""


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer's step: the weights that it left, and the bytes sent between nodes so far (None: no hook)."""

    weights: str
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class Record:
    """What one rank did: its losses as C99 hexadecimal floats, its steps in order, and what it printed."""

    losses: tuple[str, ...]
    steps: tuple[Step, ...]
    printed: str


def install_observer(folder: Path) -> None:
    """Makes `folder`, on PYTHONPATH, bring the observer to every process that imports torch."""
    information = folder / "real_scripts_observer-0.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    shutil.copy(OBSERVER, folder / "real_scripts_observer.py")
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: real-scripts-observer\nVersion: 0\n")
    # Sorted before gradwire or behind it, both work: neither reads what the other changes.
    (information / "entry_points.txt").write_text(
        "[torch.backends]\nreal_scripts_observer = real_scripts_observer:install\n"
    )


def environment_of(record: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """What every process sees: the observer, and nothing of gradwire's but what `variables` hold."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GRADWIRE_")}
    return {
        **inherited,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(record / "observer"),
        "REAL_SCRIPTS_RECORD": str(record),
        **variables,
    }


def torchrun_environment(rank: int, port: int) -> dict[str, str]:
    """What torchrun gives to a rank, and a host name of its own."""
    return {
        "WORLD_SIZE": str(RANKS),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "real-scripts",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "GRADWIRE_HOSTNAME": f"node{rank}",
    }


def run(
    command: Sequence[str],
    folder: Path,
    record: Path,
    variables: Mapping[str, str],
    killed: int = 0,
    starts_ranks: bool = False,
    seconds: float = SECONDS,
) -> list[Record]:
    """Runs a command as all ranks, and returns what each did.

    Args:
        command: Behind the interpreter: `train.py --device=cpu`.
        folder: Where it runs.
        record: For the observer's files; replaced.
        variables: Added to the environment.
        killed: The ranks kill themselves after this optimizer step; 0: they end by themselves.
        starts_ranks: The command starts the ranks itself; else each rank is one process of it.
        seconds: For all of it.

    Raises:
        JobError: A rank fails, ends too early, or takes too long.
    """
    shutil.rmtree(record, ignore_errors=True)
    record.mkdir(parents=True)
    install_observer(record / "observer")
    shared = environment_of(record, {"REAL_SCRIPTS_KILL_AFTER": str(killed), **variables})
    with held_port() as port:
        own = [{}] if starts_ranks else [torchrun_environment(rank, port) for rank in range(RANKS)]
        ended = _run_all(command, folder, record, [shared | each for each in own], seconds)
    wanted = -9 if killed else 0
    if ended != [wanted] * len(own):
        how = (
            f"ended with {ended}, wanted {wanted}"
            if ended
            else f"took more than {seconds:g} s: `--seconds` gives it more"
        )
        said = "\n".join((record / f"{number}.txt").read_text()[-3000:] for number in range(len(own)))
        raise JobError(f"`{' '.join(command)}` {how}:\n{said}")
    return [read(record, rank) for rank in range(RANKS)]


def _run_all(
    command: Sequence[str], folder: Path, record: Path, environments: Sequence[Mapping[str, str]], seconds: float
) -> list[int]:
    """One process an environment; how each ended, or nothing where one took too long."""
    processes = []
    for number, environment in enumerate(environments):
        with (record / f"{number}.txt").open("w") as printed:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                )
            )
    deadline = time.monotonic() + seconds
    try:
        return [process.wait(max(deadline - time.monotonic(), 0.1)) for process in processes]
    except subprocess.TimeoutExpired:
        return []
    finally:
        for process in processes:
            process.kill()
            process.wait()


def read(record: Path, rank: int) -> Record:
    """What the observer has noted of a rank."""
    path = record / f"{rank}.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    printed = record / f"{rank}.txt"
    if not printed.exists():  # the one process that has started the ranks prints for all
        printed = record / "0.txt"
    return Record(
        losses=tuple(entry["loss"] for entry in entries if "loss" in entry),
        steps=tuple(Step(entry["weights"], entry["nbytes"]) for entry in entries if "step" in entry),
        printed=printed.read_text(),
    )
