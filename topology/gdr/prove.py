"""Runs a small NCCL all-reduce in a child process and reads the log it leaves; torch stays out of topology."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from gradwire.topology.gdr.environment import Launch, child_environment
from gradwire.topology.gdr.nccl_log import NcclLog, read_nccl_log

_SECONDS = 180.0
_LOGGING = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,ENV"}
_NICS_ONLY = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def prove_with_nccl(launch: Launch, bandwidths: Mapping[str, float]) -> tuple[NcclLog | None, dict[str, float]]:
    """All-reduces twice among the ranks of torchrun: as configured, and with GPUDirect RDMA off.

    Ranks that share one host are kept from talking through NVLink or shared memory, so that they use the NICs.

    Args:
        launch: This rank's place under torchrun.
        bandwidths: Measurements so far.

    Returns:
        The log of the first run (None when it left none) and the measurements with `default` and `LOC`.
    """
    measured = dict(bandwidths)
    fixed = _LOGGING | (_NICS_ONLY if launch.one_host else {})
    log = None
    with TemporaryDirectory(prefix="gradwire-gdr-") as folder:
        for label, level in (("default", {}), ("LOC", {"NCCL_NET_GDR_LEVEL": "LOC"})):
            path = Path(folder) / f"{label}.log"
            answer = _run(label, child_environment({**fixed, **level, "NCCL_DEBUG_FILE": str(path)}))
            rate = answer.get("gigabits_per_second")
            if isinstance(rate, float):
                measured[label] = rate
            else:
                print(f"gradwire gdr-check: all-reduce ({label}): {answer.get('error')}", file=sys.stderr)
            if label == "default" and path.is_file():
                log = read_nccl_log(path)
            if "error" in answer:
                break  # the other ranks stopped as well: a second run would only wait for them
    return log, measured


def _run(label: str, environment: dict[str, str]) -> dict[str, object]:
    command = [sys.executable, "-P", "-m", "gradwire.bench.gdr_prove", "--label", label]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"{type(error).__name__} after at most {_SECONDS:g} s"}
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return {"error": f"exit code {done.returncode}: {last[-1][:300] if last else 'no output'}"}
    return answer if isinstance(answer, dict) else {"error": "the child printed no result"}
