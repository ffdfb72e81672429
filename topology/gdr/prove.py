"""Runs a small NCCL all-reduce in a child process, whose command the caller gives, and reads the log it leaves."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from gradwire.topology.gdr.inputs.child import run_child
from gradwire.topology.gdr.inputs.environment import child_environment
from gradwire.topology.gdr.inputs.nccl_log import NcclLog, read_nccl_log

_SECONDS = 180.0
_LOGGING = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,ENV"}
_NICS_ONLY = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
_RUNS: tuple[tuple[str, dict[str, str]], ...] = (("default", {}), ("LOC", {"NCCL_NET_GDR_LEVEL": "LOC"}))


@dataclass(frozen=True, slots=True)
class Proof:
    """Holds what one rank learned from the two all-reduces."""

    log: NcclLog | None = None
    """NCCL's log of the first run; None if it left none."""
    gigabits_per_second: Mapping[str, float] = field(default_factory=dict)
    """Bus bandwidth as configured (`default`) and with GPUDirect RDMA off (`LOC`)."""
    error: str = ""
    """Reason why a run has no rate; empty if both succeeded."""


def prove_with_nccl(command: Sequence[str], *, one_host: bool, rank: int) -> Proof:
    """Runs an all-reduce among the ranks of torchrun twice: as configured, and with GPUDirect RDMA off.

    All ranks call it. Each run takes three minutes at most. If the first one fails, there is no second one, because the
    other ranks have stopped as well. An error is printed to stderr, and is in the result.

    Args:
        command: Command line of the all-reduce: a program that takes `--label NAME` and prints
            {"gigabits_per_second": ...} or {"error": ...} as its last line.
        one_host: True if all ranks share a host: NVLink and shared memory are then turned off, so that the ranks use
            the NICs.
        rank: Rank of this process, for messages.
    """
    fixed = _LOGGING | (_NICS_ONLY if one_host else {})
    rates: dict[str, float] = {}
    log, error = None, ""
    with TemporaryDirectory(prefix="gradwire-gdr-") as folder:
        for label, level in _RUNS:
            path = Path(folder) / f"{label}.log"
            rate, error = _run(
                [*command, "--label", label], child_environment({**fixed, **level, "NCCL_DEBUG_FILE": str(path)})
            )
            if label == "default" and path.is_file():
                log = read_nccl_log(path)
            if rate is None:  # the other ranks stopped as well: a second run would only wait for them
                error = f"all-reduce ({label}): {error}"
                print(f"gradwire gdr-check: rank {rank}: {error}", file=sys.stderr)
                break
            rates[label] = rate
    return Proof(log, rates, error)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[float | None, str]:
    """Runs one all-reduce; returns (Gbit/s, "") or (None, why it has no rate)."""
    ended = run_child(command, _SECONDS, environment)
    lines = ended.output.decode("utf-8", "replace").strip().splitlines()
    try:
        result = json.loads(lines[-1])
    except (IndexError, ValueError):
        return None, ended.explanation
    if not isinstance(result, dict) or not isinstance(result.get("gigabits_per_second"), float):
        return None, str(result.get("error", "the child printed no rate") if isinstance(result, dict) else result)[:300]
    return result["gigabits_per_second"], ""
