"""What is tried with each script: plain DDP, GRADWIRE_HOOK=none and int8; each killed, and resumed where it can be."""

import math
from dataclasses import dataclass
from pathlib import Path

from real_scripts import job
from real_scripts.job import Record
from real_scripts.scripts import Script

COMPRESSED = "int8"
MODES = ("", "none", COMPRESSED)
"""Values of GRADWIRE_HOOK; empty: unset, plain DDP."""

LARGEST_SHARE = 0.30
"""Of the bytes that the exact hook sends between nodes, what int8 may: a quarter, and a scale for each group."""


LEFT_ALONE = "no DistributedDataParallel has been made"
"""What gradwire logs where there is nothing to hook."""

NOT_LOADED = "gradwire's state was not loaded"
"""What it logs where an optimizer goes on from a checkpoint that does not hold what the compressor held back."""


class Failure(Exception):
    """What a script showed that must not be."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a script showed, a cell of the table each.

    Attributes:
        plain: How many optimizer steps were looked at.
        exact: What GRADWIRE_HOOK=none did.
        compressed: What GRADWIRE_HOOK=int8 did.
        resumed: What came after the script was killed and had gone on from what it had saved.
    """

    plain: str
    exact: str
    compressed: str
    resumed: str


Runs = dict[str, list[list[Record]]]
"""Of each mode: the ranks' records of the first run and, where a script saves, of the resumed one."""


def run_modes(script: Script, folder: Path, scratch: Path, seconds: float) -> Runs:
    """Runs a script in every mode; each run may take so many seconds."""
    found = {}
    for mode in MODES:
        place = script.copy(folder, scratch / f"run-{mode or 'plain'}")
        variables = {"GRADWIRE_HOOK": mode, **script.variables}
        record = scratch / f"record-{mode or 'plain'}"
        runs = [job.run(script.command, place, record, variables, script.killed_after, script.starts_ranks, seconds)]
        if script.resume is not None:
            record = record.with_name(record.name + "-resumed")
            runs.append(job.run((*script.command, *script.resume), place, record, variables, seconds=seconds))
        found[mode] = runs
    return found


def judge(script: Script, found: Runs) -> Verdict:
    """Compares the runs, and says what they have in common and what not.

    Raises:
        Failure: They differ where they must not, or do not where they must.
    """
    plain, exact, compressed = (found[mode] for mode in MODES)
    _check_exact(plain, exact, "none")
    for mode, runs in found.items():
        for records in runs:
            if not script.sharded and len({_weights(record) for record in records}) > 1:
                raise Failure(f"GRADWIRE_HOOK={mode}: the ranks' weights differ")
    steps = "+".join(str(len(records[0].steps)) for records in plain)
    said = "warned of what it lost" if script.hooked else "as plain"
    ended = f"killed after {script.killed_after}, " if script.killed_after else "saved at its end, "
    resumed = ended + ("saves nothing" if script.resume is None else f"resumed: none as plain, int8 {said}")
    if script.resume is None and not script.killed_after:
        resumed = "saves nothing"
    if script.hooked:
        return Verdict(f"{steps} steps", "equal bits", _check_compressed(script, found), resumed)
    _check_exact(plain, compressed, COMPRESSED)
    for records in compressed:
        if LEFT_ALONE not in records[0].printed:
            raise Failure(f"GRADWIRE_HOOK={COMPRESSED} changed nothing, and nothing was said of it")
    return Verdict(f"{steps} steps", "equal bits", "left alone, and said so", resumed)


def _check_exact(plain: list[list[Record]], other: list[list[Record]], mode: str) -> None:
    for number, (records, others) in enumerate(zip(plain, other, strict=True)):
        for rank, (mine, yours) in enumerate(zip(records, others, strict=True)):
            where = f"rank {rank}, {'resumed' if number else 'first'} run: GRADWIRE_HOOK={mode} and plain DDP"
            if not mine.steps or not mine.losses:
                raise Failure(f"{where}: no step was seen")
            if not all(math.isfinite(float.fromhex(loss)) for loss in mine.losses):
                raise Failure(f"{where}: a loss of plain DDP is not a number, so nothing can be told from its bits")
            _check_same(mine.losses, yours.losses, f"losses, {where}")
            _check_same(_weights(mine), _weights(yours), f"weights, {where}")


def _check_compressed(script: Script, found: Runs) -> str:
    """Compares int8 with the exact hook; says what share of its bytes was sent between nodes."""
    plain, exact, compressed = (found[mode] for mode in MODES)
    sent, less = exact[0][0].steps[-1].nbytes, compressed[0][0].steps[-1].nbytes
    if not sent or not less:
        raise Failure(f"there was no hook: {sent} and {less} bytes between nodes")
    if script.compresses and not less < LARGEST_SHARE * sent:
        raise Failure(f"int8 sent {less:,} bytes between nodes, the exact hook {sent:,}")
    if script.compresses == (_weights(compressed[0][0]) == _weights(plain[0][0])):
        raise Failure(f"int8 and plain DDP have {'the same' if script.compresses else 'different'} weights")
    if script.resume is not None and NOT_LOADED not in compressed[1][0].printed:
        raise Failure("what int8 held back was lost when the script was resumed, and nothing was said of it")
    return f"{less / sent:.2f} of the bytes" if script.compresses else "nothing worth it"


def _weights(record: Record) -> tuple[str, ...]:
    return tuple(step.weights for step in record.steps)


def _check_same(one: tuple[str, ...], other: tuple[str, ...], what: str) -> None:
    if len(one) != len(other):
        raise Failure(f"{what}: {len(one)} against {len(other)}")
    for index, (mine, yours) in enumerate(zip(one, other, strict=True)):
        if mine != yours:
            raise Failure(f"{what} differ at {index + 1} of {len(one)}: {mine}, {yours}")
