"""Training scripts that this project did not write: plain DDP, GRADWIRE_HOOK=none, GRADWIRE_HOOK=int8.

    make real-scripts                                    # all; clones what it needs into build/real_scripts/sources
    make real-scripts ARGS="nanoGPT --sources FOLDER"    # some; FOLDER has clones, or bare mirrors, as OWNER+NAME

Each script is taken out of its repository at a known commit, gets a tiny data set that is made up, and is run by two
ranks, each a node of its own. With GRADWIRE_HOOK=none every loss and all weights after every step are those of plain
DDP, to the bit; with int8 the nodes send at most 0.3 times as many bytes. Scripts that save are killed and resumed in
each mode, and the same holds for what comes after. Changed in the copy are the few pieces that ask for a GPU, where
there are no two, and settings where a script has no options for them; scripts.py lists them, and nothing else is
changed. A table at the end has a row a script; what this environment cannot run is listed with the reason.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

import torch

from real_scripts.job import SECONDS, JobError
from real_scripts.scripts import SCRIPTS, Script
from real_scripts.sources import SourceError
from real_scripts.trial import Failure, Verdict, judge, run_modes

ROOT = Path(__file__).resolve().parents[2]


COLUMNS = ("script", "plain DDP", "none", "int8", "saved, killed, resumed")


def attempt(script: Script, sources: Path, scratch: Path, seconds: float) -> tuple[Verdict | None, str]:
    """Tries a script, each run for so many seconds at most; its row, or None and why there is none."""
    if missing := script.lacks():
        return None, f"not run, because {missing}"
    folder = scratch / "".join(letter if letter.isalnum() else "-" for letter in script.name)
    try:
        prepared = script.prepare(sources, folder / "script", on_cpu=torch.cuda.device_count() < 2)
        return judge(script, run_modes(script, prepared, folder, seconds)), "passed"
    except (SourceError, JobError, Failure) as error:
        return None, f"FAILED: {error}"


def table(outcomes: Mapping[str, tuple[Verdict | None, str]]) -> str:
    """One row a script, and below what those without one have said."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for name, (verdict, said) in outcomes.items():
        cells = astuple(verdict) if verdict else (said.partition(":")[0].partition(",")[0], "", "", "")
        rows.append((name, *cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{name}: {said}" for name, (verdict, said) in outcomes.items() if verdict is None]
    return "\n".join(lines)


def main() -> int:
    """Returns 0 where no script failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of scripts, or parts of names; default: all")
    parser.add_argument("--sources", type=Path, help="folder with a clone of each repository, as OWNER+NAME")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build" / "real_scripts", help="for everything else")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"that one run may take (default {SECONDS:g})")
    options = parser.parse_args()
    scratch = options.scratch.absolute()
    sources = (options.sources or scratch / "sources").absolute()
    chosen = [one for one in SCRIPTS if not options.names or any(name in one.name for name in options.names)]
    if not chosen:
        parser.error(f"no script is named {' or '.join(options.names)}; there are {', '.join(s.name for s in SCRIPTS)}")
    outcomes = {}
    for script in chosen:
        started = time.monotonic()
        outcomes[script.name] = attempt(script, sources, scratch, options.seconds)
        print(f"{script.name}: {outcomes[script.name][1]} [{time.monotonic() - started:.0f} s]", flush=True)
    print(table(outcomes))
    return 1 if any(said.startswith("FAILED") for _, said in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
