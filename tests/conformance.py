"""Runs PyTorch's own distributed test-suite on "gradwire" and on gloo, test by test, and compares.

    python tests/conformance.py                    # everything that runs without a GPU, ten minutes or so
    python tests/conformance.py --only test_reduce_sum test_all_gather
    python tests/conformance.py --logs FOLDER --seconds 200   # a piece; the same again goes on where it stopped

The suite (torch.testing._internal.distributed.distributed_test) comes with torch. It decides with the variable BACKEND,
while it is imported, which tests a backend must pass: it is imported as for gloo, and the name is changed afterwards,
so that "gradwire" is put to exactly the tests that gloo is put to. Ranks are forked from a process that has imported
torch once; each test gets ranks of its own.
"""

import argparse
import contextlib
import gc
import importlib
import io
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

if TYPE_CHECKING:
    from types import ModuleType

TIMEOUT_SECONDS = 120
"""For one test; the slowest takes about 20 s on 2 cores."""

LAYOUTS = {
    "gloo": ("gloo", "one,one,one,one"),
    "gradwire on 2x2": ("gradwire", "one,one,two,two"),
    "gradwire on one node": ("gradwire", "one,one,one,one"),
}
"""What is run: name -> (backend, node of each rank)."""

BY_DESIGN = {
    "test_monitored_barrier": "dist.monitored_barrier of torch before 2.15 refuses every backend not named gloo",
}
"""Differences from gloo that are meant: start of the test's name -> reason; see docs/develop/conformance.md."""

ASK_FOR_GLOO = ("test_accumulate_gradients_no_sync",)
"""Tests that look at BACKEND while they run, to know whether to use the CPU: start of the name."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One test: `pass`, `skip` or `fail`, and the last line of what it said."""

    verdict: str
    seconds: float
    message: str


def load_suite(backend: str, ranks: int, chosen_as: str = "gloo") -> "ModuleType":
    """PyTorch's suite, its tests chosen as for the backend `chosen_as`, to be run on `backend` by so many ranks."""
    settings = {
        "BACKEND": chosen_as,
        "WORLD_SIZE": str(ranks),
        "TEMP_DIR": tempfile.gettempdir(),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TIMEOUT_SECONDS),
    }
    with patch.dict("os.environ", settings):
        suite = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    importlib.import_module("torch._dynamo")  # or every rank of every DDP test imports it
    suite.BACKEND = backend  # type: ignore[attr-defined]
    return suite


def make_case(backend: str, nodes: list[str], chosen_as: str = "gloo") -> type[unittest.TestCase]:
    """The suite's test case, its ranks forked, each told which logical node it is on."""
    suite = load_suite(backend, len(nodes), chosen_as)

    class Conformance(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, *arguments: object, **named: object) -> None:
            with patch.dict("os.environ", {"GRADWIRE_HOSTNAME": nodes[rank]}):
                super()._run(rank, *arguments, **named)

        def run_test(self, test_name: str, *arguments: object) -> None:
            if chosen_as == "gloo" and test_name.startswith(ASK_FOR_GLOO):
                suite.BACKEND = "gloo"  # type: ignore[attr-defined]  # the group is there already
            super().run_test(test_name, *arguments)

    return Conformance


def run_tests(
    backend: str, nodes: list[str], names: list[str], known: set[str], deadline: float, chosen_as: str = "gloo"
) -> Iterator[tuple[str, Outcome]]:
    """Runs tests one after the other; what the ranks print is thrown away, what they raise is kept.

    Args:
        backend: What to run them on.
        nodes: The logical node of each rank.
        names: Which tests; all where it is empty.
        known: Tests that are left out.
        deadline: By time.monotonic(); no test is started after it.
        chosen_as: The backend by whose name the suite chooses its tests.
    """
    with patch.dict("os.environ", {"WORLD_SIZE": str(len(nodes)), "BACKEND": backend, "OMP_NUM_THREADS": "1"}):
        case = make_case(backend, nodes, chosen_as)
        importlib.import_module("gradwire.comms.backend.process_group")  # once, and not in each rank of each test
        gc.freeze()  # ranks that collect do not walk, and so copy, all that torch has imported
        for name in names or sorted(unittest.TestLoader().getTestCaseNames(case)):
            began = time.monotonic()
            if name in known or began > deadline:
                continue
            result = unittest.TestResult()
            with contextlib.redirect_stdout(io.StringIO()):
                case(name).run(result)
            for leftover in multiprocessing.active_children():
                leftover.kill()
                leftover.join()
            yield name, judge(result, time.monotonic() - began)


def judge(result: unittest.TestResult, seconds: float) -> Outcome:
    """The outcome of the one test in `result`."""
    if problems := result.errors + result.failures:
        lines = [line for line in problems[0][1].splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
        return Outcome("fail", seconds, (errors or lines)[-1][:300])
    if result.skipped:
        return Outcome("skip", seconds, result.skipped[0][1][:200])
    return Outcome("pass", seconds, "")


def run_layout(layout: str, names: list[str], outcomes_file: Path, seconds: float) -> dict[str, Outcome]:
    """Runs one layout in a process of its own, after what the file holds of an earlier run; ranks log beside it.

    Returns:
        The outcomes of all runs; after each test they are in the file as well.
    """
    backend, nodes = LAYOUTS[layout]
    known = json.loads(outcomes_file.read_text()) if outcomes_file.exists() else {}
    outcomes = {name: Outcome(**values) for name, values in known.items()}
    command = [
        sys.executable,
        __file__,
        "--worker",
        backend,
        nodes,
        "--seconds",
        str(seconds),
        "--known",
        *outcomes,
        "--only",
        *names,
    ]
    log = outcomes_file.with_suffix(".log")
    with log.open("a") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            name, values = json.loads(line)
            outcomes[name] = Outcome(**values)
            outcomes_file.write_text(
                json.dumps({each: asdict(outcome) for each, outcome in outcomes.items()}, indent=1)
            )
            if sys.stderr.isatty():
                print(f"\r{layout}: {len(outcomes)} tests, {name:<70}", end="", file=sys.stderr)
    if worker.returncode != 0:
        raise RuntimeError(f"the run of {layout} ended with status {worker.returncode}; see {log}")
    return outcomes


def reason(name: str) -> str | None:
    """Why a test's outcome is allowed to differ from gloo's; None where it is not."""
    return next((why for start, why in BY_DESIGN.items() if name.startswith(start)), None)


def compare(runs: dict[str, dict[str, Outcome]]) -> list[str]:
    """One line for each test whose verdict is worse than gloo's, with the reason where it is meant.

    A test that fails on gloo itself, or was not run on it, says nothing about gradwire, and is left out.
    """
    lines = []
    for layout, outcomes in runs.items():
        for name, outcome in outcomes.items():
            expected = runs["gloo"][name].verdict if name in runs["gloo"] else "fail"
            if expected != "fail" and outcome.verdict != expected:
                lines.append(
                    f"{'by design' if reason(name) else 'WRONG'}: {name} on {layout}: {outcome.verdict}, gloo: "
                    f"{expected}: {reason(name) or outcome.message}"
                )
    return lines


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison; 1 where a difference has no reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="TEST", help="names of tests; all by default")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS), help="what to run")
    parser.add_argument(
        "--logs",
        type=Path,
        help="a folder for what the ranks write and for the outcomes as JSON; "
        "tests whose outcome is there already are not run again",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no test of a layout after so long")
    parser.add_argument("--known", nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=2, metavar=("BACKEND", "NODES"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        backend, nodes = options.worker
        deadline = time.monotonic() + options.seconds
        for name, outcome in run_tests(backend, nodes.split(","), options.only, set(options.known), deadline):
            print(json.dumps((name, asdict(outcome))), flush=True)
        return 0
    logs = options.logs or Path(tempfile.mkdtemp(prefix="gradwire-conformance-"))
    logs.mkdir(parents=True, exist_ok=True)
    runs = {}
    for layout in options.layouts:
        runs[layout] = run_layout(layout, options.only, logs / f"{layout.replace(' ', '-')}.json", options.seconds)
        counts = [
            sum(outcome.verdict == verdict for outcome in runs[layout].values()) for verdict in ("pass", "skip", "fail")
        ]
        seconds = sum(outcome.seconds for outcome in runs[layout].values())
        print(f"\r{layout}: {counts[0]} passed, {counts[1]} skipped, {counts[2]} failed in {seconds:.0f} s", flush=True)
    differences = compare(runs) if "gloo" in runs else []
    print(*differences, sep="\n")
    print(f"logs and outcomes: {logs}")
    return int(any(line.startswith("WRONG") for line in differences))


if __name__ == "__main__":
    sys.exit(main())
