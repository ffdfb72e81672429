"""What docs/results/convergence.md says of compressors that end behind: recommendations are held to its data."""

import csv
import re
from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "docs" / "results" / "data" / "convergence"
NOISE_BITS = 0.02
"""How far plain DDP's own seeds lie apart on the text task. Source: the page, "How to read it"."""
OPTIMIZERS = {"fashion": "sgd", "text": "adamw"}


def ended_behind() -> set[tuple[str, str]]:
    """(compressor, optimizer) that never reached plain DDP's quality, or are behind by more than its own seeds differ.

    With default options; rows of other options name them behind a comma.
    """
    found = set()
    for task, optimizer in OPTIMIZERS.items():
        for row in _rows(f"{task}.csv"):
            if row["method"].startswith("gradwire ") and "," not in row["method"] and row["steps to reach"] == "never":
                found.add((row["method"].removeprefix("gradwire "), optimizer))
    for row in _rows("newer.csv"):
        named = re.fullmatch(r"`(\w+)`, AdamW", row["method"])
        if named and float(row["mean"]) > NOISE_BITS:
            found.add((named[1], "adamw"))
    return found


def _rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))
