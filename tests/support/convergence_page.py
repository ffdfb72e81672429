"""What docs/results/convergence.md says of compressors that end behind: recommendations are held to it."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "convergence.md"
NOISE_BITS = 0.02
"""How far plain DDP's own seeds lie apart on the text task. Source: the page, "How to read it"."""


def ended_behind() -> set[tuple[str, str]]:
    """(compressor, optimizer) that never reached plain DDP's quality, or are behind by more than its own seeds differ.

    With default options; rows of other options name them behind a comma.
    """
    page = PAGE.read_text()
    found = set()
    for part in page.partition("<!-- measured: begin -->")[2].partition("<!-- measured: end -->")[0].split("### ")[1:]:
        optimizer = "sgd" if "SGD" in part.splitlines()[0] else "adamw"
        for line in part.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if line.startswith("| gradwire ") and "," not in cells[0] and cells[5] == "never":
                found.add((cells[0].removeprefix("gradwire "), optimizer))
    newer = page.partition("## What they come to now")[2].partition("\n## ")[0]
    for name, bits in re.findall(r"^\| `(\w+)`, AdamW \|[^|]*\|[^|]*\|[^|]*\| ([+-]\d\.\d+) \|", newer, re.MULTILINE):
        if float(bits) > NOISE_BITS:
            found.add((name, "adamw"))
    return found
