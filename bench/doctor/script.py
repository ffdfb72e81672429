"""Run of the user's script for a few steps, to measure the bytes of its gradients and its step time.

The script runs unchanged, as a child process of each rank with the same rank and size; after `STEPS` optimizer steps
the child ends (see `gradwire.bench.steps`).
"""

import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from gradwire.bench.doctor.facts import ScriptRun
from gradwire.bench.meeting import GivenJob, refusal_of, say
from gradwire.topology.gdr.inputs.environment import child_environment

STEPS = 12
WARM_UP_STEPS = 3
LIMIT_SECONDS = 60.0
"""Time limit for the script to reach its last step, with imports and loading of data; steps made by then count."""

STANDS_SECONDS = 45.0
"""Seconds after which the line of the main thread is recorded if the script has not ended."""

_RECORD = "%d %s %d\n"
"""Line of the record for each step: bytes of gradients, moment, bytes of trainable parameters without a gradient."""
SPLIT, STANDS = ".split", ".stands"
"""Suffixes of two files beside the record: the parts of a step's time (`StepSplit`), and the line of the main thread
after `STANDS_SECONDS`."""


def run_script(words: Sequence[str], variables: Mapping[str, str] | None) -> ScriptRun:
    """Runs a script in a child process until it has made `STEPS` steps, or `LIMIT_SECONDS` have passed.

    Args:
        words: Script and its arguments.
        variables: Environment variables to add to this process's own; None for none.

    Returns:
        The measurements; if the script failed, with the error and its exit status.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-doctor-") as folder:
        record = Path(folder, "steps")
        command = [sys.executable, "-m", "gradwire.bench.doctor.script", str(record), *words]
        with Path(folder, "output").open("w+b") as output:
            child = subprocess.Popen(
                command, env=child_environment(variables or {}), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            late, began = False, time.monotonic()
            try:
                child.wait(LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                late = True
                child.kill()
                child.wait()
            seconds = time.monotonic() - began
            output.seek(0)
            said = output.read().decode("utf-8", "replace").strip().splitlines()
        return replace(read_record(record, child.returncode, late, said), seconds=seconds)


def read_record(record: Path, status: int, late: bool, said: list[str]) -> ScriptRun:
    """Returns the measurements in a script's record of steps.

    Args:
        record: File with a line for each step, as `_RECORD` has it.
        status: Exit status of the script, negative for a signal.
        late: Whether the doctor ended it because its time was up.
        said: Lines of its output, of which an error quotes the last.
    """
    # Compute the times between steps, without the warm-up steps if there are enough others.
    lines = record.read_text().splitlines() if record.exists() else []
    rows = [line.split() for line in lines]
    warm = len(rows) > WARM_UP_STEPS + 1
    moments = [float(row[1]) for row in rows][WARM_UP_STEPS if warm else 0 :]
    steps = [after - before for before, after in itertools.pairwise(moments)]
    # A script that ended early or with an error gets a sentence that says so.
    error = None
    last = f"it said last: {said[-1]}" if said else "it printed nothing"
    if not steps:
        error = (
            f"the script made fewer than two optimizer steps within {LIMIT_SECONDS:g} s; {last}"
            if late
            else f"the script ended with status {status} after {len(rows)} optimizer steps; {last}"
        )
    elif status and not late:
        error = f"the script failed with status {status} after {len(rows)} optimizer steps; {last}"
    # A script whose ranks do not meet has said why, and what to write.
    error = refusal_of(said) or error
    # The split of the steps' time and the line at which the script stood are in files of their own.
    stands = Path(f"{record}{STANDS}")
    beside = Path(f"{record}{SPLIT}")
    split = json.loads(beside.read_text()) if warm and beside.exists() else {}  # of the same steps
    return ScriptRun(
        activity=split.get("activity", {}),
        lines=split.get("lines", {}),
        all_reduces=split.get("all_reduces", {}),
        under_way_seconds=split.get("under_way_seconds"),
        gradient_nbytes=max((int(row[0]) for row in rows), default=0),
        unused_nbytes=min((int(row[2]) for row in rows[1:]), default=0),  # all optimizers have stepped by then
        step_seconds=median(steps) if steps else None,
        error=error,
        status=0 if late else status if status >= 0 else 128 - status,
        stands=stands.read_text() if late and stands.exists() else None,
    )


def main(argv: list[str]) -> None:
    """Runs a script in this process and records its steps; the process ends after `STEPS` optimizer steps.

    Args:
        argv: File for the record, the script, and the script's arguments.
    """
    # Imported here, because the doctor also imports this module in a Python without torch.
    from gradwire.bench.doctor.split import StepSplit
    from gradwire.bench.steps import run_until
    from gradwire.comms.bootstrap.threads import BackgroundThread
    from gradwire.comms.observe.stack import line_of_thread

    record, *words = argv
    job = GivenJob.read()

    def after_step(steps: int, nbytes: int, unused_nbytes: int) -> None:
        with Path(record).open("a") as file:
            file.write(_RECORD % (nbytes, time.perf_counter(), unused_nbytes))
        if steps == 1 and (why := job.why_apart()) is not None:
            say(why)  # its ranks may meet without torch, as Horovod's do: what they measure is still theirs
        if steps == WARM_UP_STEPS:
            split.begin()
        elif steps > WARM_UP_STEPS:
            split.write(steps - WARM_UP_STEPS, last=steps >= STEPS)

    def say_where() -> None:
        if ended.wait(STANDS_SECONDS):
            return
        Path(f"{record}{STANDS}").write_text(line_of_thread(main_thread) or "")

    # A thread records the line of the main thread, in case the script hangs.
    main_thread = threading.get_ident()
    ended = threading.Event()
    BackgroundThread(
        "doctor's look at the script",
        say_where,
        without="it is not said where the script stands",
        on_failure=lambda error: None,  # the doctor finds no file, and says nothing of it
        end=ended.set,
    ).start()
    # Run the script; `run_until` ends the process after the last step.
    split = StepSplit(Path(f"{record}{SPLIT}"))
    try:
        run_until(STEPS, words, after_step)
    finally:
        ended.set()
        split.close()


if __name__ == "__main__":
    main(sys.argv[1:])
