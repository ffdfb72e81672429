"""Runs PyTorch's own distributed suite for NCCL over the GPU stand-in: what passes says how faithful it is.

    .venv/gpu-standin/bin/python tests/gpu_standin/torch_suite.py --outcomes FILE
    ... --seconds 600      # a piece; the same again goes on where it stopped
    ... --only test_all_reduce_sum_cuda test_ddp_hook_parity_allreduce
    ... --ranks 8 --only test_barrier_group_cuda    # what 4 ranks are too few for

The suite is that of tests/conformance.py; it comes with torch. Its ranks are forked; a test that launches a kernel,
or calls a function, that the stand-in does not have fails with that name.
"""

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("GPU_STANDIN_UNKNOWN", "error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from conformance import Outcome, run_tests

from support.forked import free_port

DEVICES = 8
PATTERNS = (r"0x[0-9a-f]+", r"\d+")
"""What differs between two messages of one reason."""


def reason(outcome: Outcome) -> str:
    """A message without what differs from test to test."""
    text = outcome.message
    for pattern in PATTERNS:
        text = re.sub(pattern, "N", text)
    return text[:160]


def report(outcomes: dict[str, Outcome]) -> list[str]:
    """How many passed, and the others by reason, most frequent first."""
    counts = Counter(outcome.verdict for outcome in outcomes.values())
    lines = [f"{counts['pass']} passed, {counts['skip']} skipped, {counts['fail']} failed"]
    for verdict in ("fail", "skip"):
        groups = Counter(reason(outcome) for outcome in outcomes.values() if outcome.verdict == verdict)
        for text, number in groups.most_common():
            name = next(n for n, o in outcomes.items() if o.verdict == verdict and reason(o) == text)
            lines.append(f"{number:4} {verdict}: {text}   (e.g. {name})")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="TEST", help="names of tests; all by default")
    parser.add_argument("--outcomes", type=Path, required=True, help="JSON; tests that are in it are not run again")
    parser.add_argument("--ranks", type=int, default=4, help="how many, at most as there are devices")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no test after so long")
    options = parser.parse_args()
    kept = json.loads(options.outcomes.read_text()) if options.outcomes.exists() else {}
    outcomes = {name: Outcome(**values) for name, values in kept.items()}
    deadline = time.monotonic() + options.seconds
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # PyTorch's own runner sets both
    # A process that has asked CUDA how many devices there are may not fork ranks: the suite asks while it is imported.
    torch._C._cuda_getDeviceCount = lambda: DEVICES
    for name, outcome in run_tests(
        "nccl", ["one"] * options.ranks, options.only, set(outcomes), deadline, chosen_as="nccl"
    ):
        outcomes[name] = outcome
        options.outcomes.write_text(json.dumps({n: asdict(o) for n, o in outcomes.items()}, indent=1))
    print(*report(outcomes), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
