"""What docs/results/convergence.md and optimizers.md say of compressors: recommendations are held to their data."""

import csv
import json
import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "data"
DATA = RESULTS / "convergence"
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


def trained() -> set[tuple[str, str]]:
    """(compressor, optimizer) with a training on one of the two pages, on the CNN or the text task."""
    found = set()
    for task, optimizer in OPTIMIZERS.items():
        methods = [row["method"].split(",")[0] for row in _rows(f"{task}.csv")]
        found |= {(each.removeprefix("gradwire "), optimizer) for each in methods if each.startswith("gradwire ")}
    for row in _rows("newer.csv"):
        named = re.match(r"`(\w+)`.* (SGD|AdamW)\b", row["method"])
        assert named is not None, row
        found.add((named[1], named[2].lower()))
    for line in (RESULTS / "optimizers.jsonl").read_text().splitlines():
        entry = json.loads(line)["entry"]
        if entry["task"] == "text" and "accumulate" not in entry and "+" not in entry["compressor"]:
            found.add((entry["compressor"], entry["optimizer"]))
    return found


def _rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))
