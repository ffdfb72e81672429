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
    """What one rank saw of the all-reduces."""

    log: NcclLog | None = None
    """NCCL's log of the first run; None when it left none."""
    gigabits_per_second: Mapping[str, float] = field(default_factory=dict)
    """Bus bandwidth as configured (`default`) and with GPUDirect RDMA off (`LOC`)."""
    error: str = ""
    """Why something is missing."""


def prove_with_nccl(command: Sequence[str], *, one_host: bool, rank: int) -> Proof:
    """All-reduces twice among the ranks of torchrun: as configured, and with GPUDirect RDMA off.

    Args:
        command: The all-reduce: a program that takes `--label NAME` and prints {"gigabits_per_second": ...} or
            {"error": ...} as its last line.
        one_host: All ranks share a host; they are kept from NVLink and shared memory then, so that they use the NICs.
        rank: Named in messages.
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
    """The rate of one all-reduce, or why there is none."""
    ended = run_child(command, _SECONDS, environment)
    lines = ended.output.decode("utf-8", "replace").strip().splitlines()
    try:
        result = json.loads(lines[-1])
    except (IndexError, ValueError):
        return None, ended.explanation
    if not isinstance(result, dict) or not isinstance(result.get("gigabits_per_second"), float):
        return None, str(result.get("error", "the child printed no rate") if isinstance(result, dict) else result)[:300]
    return result["gigabits_per_second"], ""
