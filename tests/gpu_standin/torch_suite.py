"""Runs PyTorch's own distributed suite for NCCL over the GPU stand-in: what passes says how faithful it is.

    .venv/gpu-standin/bin/python tests/gpu_standin/torch_suite.py --outcomes FILE
    ... --seconds 600      # a piece; the same again goes on where it stopped
    ... --only test_all_reduce_sum_cuda test_ddp_hook_parity_allreduce
    ... --ranks 8 --only test_barrier_group_cuda    # what 4 ranks are too few for
    ... --file FOLDER/test_c10d_nccl.py             # of PyTorch's sources, beside the files that it imports

The suite is that of tests/conformance.py; it comes with torch. Its ranks are forked; a test that launches a kernel,
or calls a function, that the stand-in does not have fails with that name.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import unittest
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("GPU_STANDIN_UNKNOWN", "error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from conformance import TIMEOUT_SECONDS, Outcome, judge, run_tests

from gradwire.bench.emulation.launch import held_port

DEVICES = 8
PATIENCE = 2 * TIMEOUT_SECONDS
"""Seconds after which a test of a file is ended from outside: ranks that hang are given up after half of it."""
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


def tests_of(path: Path) -> Iterator[unittest.TestCase]:
    """The tests of one of PyTorch's files, their ranks forked."""
    fork = multiprocessing.get_context("fork")
    patch.object(torch.multiprocessing, "get_context", lambda method=None: fork).start()  # spawned ones import torch
    sys.path.insert(0, str(path.parent))
    waiting: list[unittest.TestCase | unittest.TestSuite] = [
        unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(path.stem))
    ]
    while waiting:
        each = waiting.pop()
        if isinstance(each, unittest.TestCase):
            yield each
        else:
            waiting.extend(each)


def run_file(path: Path, names: list[str], known: set[str], deadline: float) -> Iterator[tuple[str, Outcome]]:
    """Runs the tests of a file one after the other, each in a process of its own, which may use CUDA and fork ranks.

    Args:
        path: The file.
        names: Which tests, as CLASS.test; all where it is empty.
        known: Tests that are left out.
        deadline: By time.monotonic(); no test is started after it.
    """
    cases = {f"{type(case).__name__}.{case._testMethodName}": case for case in tests_of(path)}
    importlib.import_module("torch._dynamo")  # or every rank of every DDP test imports it
    for name in names or sorted(cases):
        if name in known or time.monotonic() > deadline:
            continue
        began = time.monotonic()
        receiving, sending = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=run_one, args=(cases[name], sending))
        process.start()
        sending.close()
        try:
            outcome: Outcome = receiving.recv() if receiving.poll(PATIENCE) else given_up(began)
        except EOFError:
            process.join()
            outcome = Outcome("fail", time.monotonic() - began, f"the process ended with {process.exitcode}")
        os.killpg(process.pid or 0, signal.SIGKILL)  # with the ranks that are left
        process.join()
        yield name, outcome


def given_up(began: float) -> Outcome:
    """Of a test that did not end."""
    return Outcome("fail", time.monotonic() - began, f"not done after {PATIENCE} s")


def run_one(case: unittest.TestCase, answer: Connection) -> None:
    """Runs a test, and sends its outcome; what it prints is thrown away."""
    os.setpgid(0, 0)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    result, began = unittest.TestResult(), time.monotonic()
    case.run(result)
    answer.send(judge(result, time.monotonic() - began))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="TEST", help="names of tests; all by default")
    parser.add_argument("--outcomes", type=Path, required=True, help="JSON; tests that are in it are not run again")
    parser.add_argument("--ranks", type=int, default=4, help="how many, at most as there are devices")
    parser.add_argument("--file", type=Path, help="one of test/distributed in PyTorch's sources, in place of the suite")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no test after so long")
    options = parser.parse_args()
    kept = json.loads(options.outcomes.read_text()) if options.outcomes.exists() else {}
    outcomes = {name: Outcome(**values) for name, values in kept.items()}
    deadline = time.monotonic() + options.seconds
    held = ExitStack()
    port = held.enter_context(held_port())  # until this process ends
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # PyTorch's own runner sets both
    if options.file is None:
        devices = DEVICES
        running = run_tests("nccl", ["one"] * options.ranks, options.only, set(outcomes), deadline, chosen_as="nccl")
    else:
        devices = options.ranks  # many of its classes take as many ranks as there are devices
        running = run_file(options.file, options.only, set(outcomes), deadline)
    os.environ |= {"GPU_STANDIN_DEVICES": str(devices), "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TIMEOUT_SECONDS)}
    # A process that has asked CUDA how many devices there are may not fork ranks: tests ask while they are imported.
    torch._C._cuda_getDeviceCount = lambda: devices
    for name, outcome in running:
        outcomes[name] = outcome
        options.outcomes.write_text(json.dumps({n: asdict(o) for n, o in outcomes.items()}, indent=1))
    print(*report(outcomes), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
