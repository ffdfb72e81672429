"""Tables that are computed: from the results of trainings and faults, one a line, and from what `predict` says now."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gradwire.bench.studies.tables.page import put_between

PRINTED_BEGIN, PRINTED_END = "<!-- printed -->", "<!-- /printed -->"


def of_optimizers(page: str, data: Path) -> str:
    """Fills the tables of docs/results/optimizers.md from the results of the queue of trainings."""
    from gradwire.bench.studies.convergence import queue

    return queue.with_tables(page, data / "optimizers.jsonl")


def of_injected_faults(page: str, data: Path) -> str:
    """Fills the table of docs/results/diagnosis.md from the results of injected faults."""
    from gradwire.bench.studies.watch import injected

    return injected.with_table(page, injected.Outcomes(data / "watch.jsonl").all)


def of_gpu_plans(page: str, data: Path) -> str:
    """Fills the tables of docs/results/gpu_plans.md with current predictions of the cost model."""
    from gradwire.bench.studies.gpu import plans

    return plans.with_tables(page)


def of_public_models(page: str, data: Path) -> str:
    """Fills the tables of docs/results/models_by_link.md with the output of `gradwire predict --models`."""
    command = [sys.executable, "-m", "gradwire", "predict", "--preset", "pcie_box", "--models", "--markdown"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"`gradwire predict --models` ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return put_between(page, done.stdout.strip(), PRINTED_BEGIN, PRINTED_END)


MADE: dict[str, Callable[[str, Path], str]] = {
    "optimizers": of_optimizers,
    "diagnosis": of_injected_faults,
    "gpu_plans": of_gpu_plans,
    "models_by_link": of_public_models,
}
"""Name of a page -> function of (its text, folder of the data) that fills the tables which no CSV file holds."""
