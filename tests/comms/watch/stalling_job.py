"""One rank of a small training in which one rank is late, stands still, or disagrees.

torchrun --nproc-per-node 4 stalling_job.py --kind ddp --fault late --rank 2
"""

import argparse
import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from gradwire.bench.studies.watch import job
from gradwire.bench.studies.watch.job import DELAY_SECONDS, FAULT_STEP, KINDS, STEP_SECONDS, TIMEOUT, WIDTH, training
from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.environment import watch_options

FAULTS = ("late", "loader", "hang")
"""Besides those of `job`."""
HANG_SECONDS = 100.0
"""How long a rank stands still at most, a few steps before the end: until the watch has said so, and drawn it."""
SAID = "stalling/said"
"""Key of the default store: the watch has said where a rank stands still, or is late; then the step to end with."""


class SlowSamples(Dataset[torch.Tensor]):
    """Samples that take a while to come, as from a network file system."""

    def __len__(self) -> int:
        """As many as nobody asks for."""
        return 1 << 30

    def __getitem__(self, place: int) -> torch.Tensor:
        """One sample."""
        time.sleep(DELAY_SECONDS)
        return torch.ones(WIDTH)


class NotesExplanation(logging.StreamHandler[TextIO]):
    """Prints what the watch logs, and notes that it has said in which collective a rank is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.explained = False

    def emit(self, record: logging.LogRecord) -> None:
        """Takes in what the watch logs."""
        super().emit(record)
        self.explained |= "is waited for, longest in" in record.getMessage()


class TellsStall(logging.StreamHandler[TextIO]):
    """Prints what the watch logs, and tells the rank that stands still that the watch has named the line where it does.

    Args:
        store: Of the default group.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def emit(self, record: logging.LogRecord) -> None:
        """Takes in what the watch logs."""
        super().emit(record)
        if f" in {stand_still.__name__}" in record.getMessage():
            self._store.set(SAID, "1")


def stand_still() -> None:
    """Waits until the watch has said that this rank is here, and its timeline, where it draws one, shows all ranks."""
    store, trace, size = dist.distributed_c10d._get_default_store(), watch_options().trace, dist.get_world_size()
    until = time.monotonic() + HANG_SECONDS
    while time.monotonic() < until:
        time.sleep(STEP_SECONDS)
        if store.check([SAID]) and (trace is None or len(ranks_drawn(Path(trace))) == size):
            return


def ranks_drawn(trace: Path) -> set[int]:
    """The ranks with a collective in a timeline; none where there is no file yet."""
    events = json.loads(trace.read_text())["traceEvents"] if trace.exists() else []
    return {each["pid"] for each in events if each["ph"] == "X"}


def train(kind: str, fault: str, rank: int, steps: int) -> None:
    """Trains for some steps, with a fault of `FAULTS` on one rank."""
    train_step = training(kind)
    faulty = dist.get_rank() == rank
    slow = iter(DataLoader(SlowSamples(), batch_size=1))
    store, notes = dist.distributed_c10d._get_default_store(), NotesExplanation()
    if fault == "loader" and dist.get_rank() == 0:
        logging.getLogger("gradwire").addHandler(notes)
    for step in range(steps):
        # All ranks end with the same step: no rank has left this one before rank 0 has come to it.
        if notes.explained and not store.check([SAID]):
            store.set(SAID, str(step + 1))
        if fault == "loader" and store.check([SAID]) and int(store.get(SAID)) <= step:
            break
        if fault == "loader" and faulty and step >= FAULT_STEP:
            next(slow)
        time.sleep(STEP_SECONDS + (DELAY_SECONDS if fault == "late" and faulty and step >= FAULT_STEP else 0.0))
        if fault == "hang" and step == steps - FAULT_STEP:
            if faulty:
                stand_still()
            elif dist.get_rank() == 0:
                logging.getLogger("gradwire").addHandler(TellsStall(dist.distributed_c10d._get_default_store()))
                os.kill(os.getpid(), signal.SIGUSR2)  # as somebody would who wonders
        train_step()


def main() -> None:
    """Runs this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, default="ddp")
    parser.add_argument("--fault", choices=(*FAULTS, *job.FAULTS), required=True)
    parser.add_argument("--rank", type=int, required=True, help="the rank that has the fault")
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    if arguments.fault in job.FAULTS:
        job.train(arguments.fault, arguments.rank, arguments.steps)
    else:
        train(arguments.kind, arguments.fault, arguments.rank, arguments.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
