"""Measures steps of docs/results/models_by_link.md on the emulator, beside those that `predict --models` predicts.

    python -m gradwire.bench.studies.models_check --json rows.json               # int8; 1, 10 and 25 GbE
    python -m gradwire.bench.studies.models_check --model gpt2 --link "10 GbE"   # one row
    python -m gradwire.bench.studies.models_check --column exact --column int8   # two columns, steps taken in turns

Each row replays the model (see gradwire.bench.compare.replay): the real shapes, 1/F of each gradient over links of 1/F
of the rate, the computation that the table assumes as timed waits, all of it T times as long. So the measured step over
T stands beside the predicted one. What no emulator has is missing or small there: GPUs, PCIe, NCCL, codecs on a GPU.
"""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gradwire.bench.compare.public_models import PUBLIC_MODELS, PublicModel
from gradwire.bench.machine import machine_line
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.studies.tables.page import markdown
from gradwire.bench.terminal import add_json_option, complain, write_json

NODES, RANKS_PER_NODE = 2, 4
"""Nodes, and ranks on each, of the emulated cluster: those of the table's columns for two nodes."""
RATES = {"1 GbE": "1gbit", "2.5 GbE": "2.5gbit", "10 GbE": "10gbit", "25 GbE": "25gbit"}
"""Links of the table with one NIC a node; two NICs of one node are not emulated."""
LINKS = ("1 GbE", "10 GbE", "25 GbE")
"""Links of the rows that are measured by default: those that README shows."""
CONFIGURATIONS = {"exact": "gradwire hierarchical", "int8": "gradwire int8", "waterfill4": "gradwire waterfill4"}
"""Column of the table -> configuration of `gradwire compare` that measures it."""
MOST_PLAIN_SECONDS = 12.0
"""Longest predicted step of plain DDP; slower rows are skipped, because `compare` always runs plain DDP too."""
TIMEOUT_SECONDS = 590
"""Timeout of one run of `gradwire compare`."""


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """One cell of the table, predicted and measured.

    Attributes:
        model: Title of the model, as in the table.
        link: Name of the link, as in the table; a key of `RATES`.
        column: Name of the column; a key of `CONFIGURATIONS`.
        predicted_seconds: Predicted duration of a step, as in the table.
        measured_seconds: Duration of a step on the emulator divided by `slow_motion`; median of the rounds.
        factor: Divisor of the gradients' bytes and of the links' rates on the emulator.
        slow_motion: Factor by which everything on the emulator took longer.
    """

    model: str
    link: str
    column: str
    predicted_seconds: float
    measured_seconds: float
    factor: int
    slow_motion: int


def case_of(model: PublicModel) -> dict[str, object]:
    """Returns the model in the form that `gradwire compare --replay FILE.json` reads."""
    return {
        "name": model.title,
        "source": f"assumed by gradwire predict --models, for {model.batch}",
        "step_seconds": model.step_seconds,
        "parameters": [[name, list(shape)] for name, shape in model.shapes],
    }


def predictions() -> dict[tuple[str, str], dict[str, float]]:
    """Runs `gradwire predict --models` and returns its steps on `NODES` nodes.

    Returns:
        (name of the model, link) -> column -> predicted seconds of a step.
    """
    command = [sys.executable, "-m", "gradwire", "predict", "--preset", "pcie_box", "--models", "--json"]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {(row["model"], row["link"]): row["seconds"] for row in rows if row["nodes"] == NODES}


def measure(
    model: PublicModel, link: str, columns: Sequence[str], rounds: int, slow_motion: int | None
) -> tuple[dict[str, float], int, int]:
    """Measures a step of each column on the emulator, with the configurations taking turns.

    Args:
        model: Model to replay.
        link: Key of `RATES`.
        columns: Keys of `CONFIGURATIONS`.
        rounds: Number of timed steps of each column.
        slow_motion: Factor by which everything takes longer; None leaves the choice to `gradwire compare`.

    Returns:
        (column -> seconds of a step divided by the slow motion, divisor of bytes and rates, slow motion).

    Raises:
        RuntimeError: `gradwire compare` failed; the message has the end of its output.
        subprocess.TimeoutExpired: It took longer than `TIMEOUT_SECONDS`.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-models-") as folder:
        case, found = Path(folder, "case.json"), Path(folder, "found.json")
        case.write_text(json.dumps(case_of(model)))
        words = ["--replay", str(case), "--nodes", str(NODES), "--ranks-per-node", str(RANKS_PER_NODE)]
        only = ",".join(CONFIGURATIONS[column] for column in columns)
        words += ["--nic", RATES[link], "--only", only, "--rounds", str(rounds), "--json", str(found)]
        words += ["--slow-motion", str(slow_motion)] if slow_motion else []
        command = [sys.executable, "-m", "gradwire", "compare", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        if done.returncode:
            raise RuntimeError(
                f"`gradwire compare` of {model.title} on {link}: {done.stdout[-500:]}{done.stderr[-500:]}"
            )
        record = json.loads(found.read_text())
    found_seconds = {row["name"]: row["seconds"] for row in record["results"]}
    scale = record["scale"]
    seconds = {column: found_seconds[CONFIGURATIONS[column]] / scale["slow_motion"] for column in columns}
    return seconds, scale["factor"], scale["slow_motion"]


def as_markdown(rows: list[CheckedRow]) -> str:
    """Returns the measured cells as a table in Markdown."""
    cells = [["model", "link", "F, T", "column", "predicted ms", "emulated ms", "ratio"]]
    for row in rows:
        ratio = f"{row.measured_seconds / row.predicted_seconds:.2f}"
        seconds = f"{1e3 * row.predicted_seconds:.0f}", f"{1e3 * row.measured_seconds:.0f}"
        cells.append([row.model, row.link, f"{row.factor}, {row.slow_motion}", row.column, *seconds, ratio])
    return markdown(cells)


def main(argv: list[str]) -> int:
    """Measures the rows that the options in `argv` select and prints the table; returns 1 if a measurement failed."""
    parser = StudyParser("models_check", __doc__)
    parser.add_argument(
        "--model", action="append", choices=sorted(PUBLIC_MODELS), help="rows (default: all); repeatable"
    )
    parser.add_argument("--link", action="append", choices=RATES, help="rows (default: README's); repeatable")
    parser.add_argument("--column", action="append", choices=CONFIGURATIONS, help="columns (default: int8); repeatable")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each cell (default 3)")
    parser.add_argument("--slow-motion", type=int, metavar="T", help="more where many ranks share few, busy cores")
    add_json_option(parser)
    options = parser.parse_args(argv)
    columns, predicted = options.column or ["int8"], predictions()
    rows: list[CheckedRow] = []
    for name in options.model or PUBLIC_MODELS:
        for link in options.link or LINKS:
            model = PUBLIC_MODELS[name]
            if (plain := _plain_seconds(model, link)) > MOST_PLAIN_SECONDS:
                print(f"{model.title}, {link}: left out, a step of plain DDP takes {plain:.0f} s", file=sys.stderr)
                continue
            try:
                measured, factor, slow_motion = measure(model, link, columns, options.rounds, options.slow_motion)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                complain("models_check", error)
                return 1
            for column, seconds in measured.items():
                foretold = predicted[name, link][column]
                rows.append(CheckedRow(model.title, link, column, foretold, seconds, factor, slow_motion))
                print(rows[-1], file=sys.stderr, flush=True)
    print(as_markdown(rows), machine_line(), sep="\n\n")
    write_json(options.json, {"kind": "models_check", "machine": machine_line(), "rows": [asdict(row) for row in rows]})
    return 0


def _plain_seconds(model: PublicModel, link: str) -> float:
    """Returns a lower bound, in seconds, of a step of plain DDP over a ring, without slow motion."""
    ranks = NODES * RANKS_PER_NODE
    nbytes = 4 * sum(math.prod(shape) for _, shape in model.shapes)
    rate = float(RATES[link].removesuffix("gbit")) * 1e9 / 8
    return max(model.step_seconds, 2 * (ranks - 1) / ranks * nbytes / rate)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
