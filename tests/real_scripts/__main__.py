"""Training scripts that this project did not write: plain DDP, GRADWIRE_HOOK=none, GRADWIRE_HOOK=int8.

    make real-scripts                                    # all; clones what it needs into build/real_scripts/sources
    make real-scripts ARGS="nanoGPT --sources FOLDER"    # some; FOLDER has clones, or bare mirrors, as OWNER+NAME

Each script is taken out of its repository at a known commit, gets a tiny data set that is made up, and is run by two
ranks, each a node of its own. With GRADWIRE_HOOK=none every loss and all weights after every step are those of plain
DDP, to the bit; with int8 the nodes send at most 0.3 times as many bytes. Scripts that save are killed and resumed in
each mode, and the same holds for what comes after. Where there are no two GPUs, the few pieces of a script that ask for
one are changed in the copy; scripts.py lists them, and nothing else is changed.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from real_scripts.job import JobError
from real_scripts.scripts import SCRIPTS, Script
from real_scripts.sources import SourceError
from real_scripts.trial import Failure, judge, run_modes

ROOT = Path(__file__).resolve().parents[2]


def attempt(script: Script, sources: Path, scratch: Path) -> tuple[str, bool]:
    """Tries a script; what is said of it, and whether that is no failure."""
    if missing := script.lacks():
        return f"not run: this environment lacks {', '.join(missing)}", True
    folder = scratch / "".join(letter if letter.isalnum() else "-" for letter in script.name)
    try:
        prepared = script.prepare(sources, folder / "script", on_cpu=torch.cuda.device_count() < 2)
        return f"passed: {judge(script, run_modes(script, prepared, folder))}", True
    except (SourceError, JobError, Failure) as error:
        return f"FAILED: {error}", False


def main() -> int:
    """Returns 0 where no script failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of scripts, or parts of names; default: all")
    parser.add_argument("--sources", type=Path, help="folder with a clone of each repository, as OWNER+NAME")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build" / "real_scripts", help="for everything else")
    options = parser.parse_args()
    scratch = options.scratch.absolute()
    sources = (options.sources or scratch / "sources").absolute()
    chosen = [one for one in SCRIPTS if not options.names or any(name in one.name for name in options.names)]
    if not chosen:
        parser.error(f"no script is named {' or '.join(options.names)}; there are {', '.join(s.name for s in SCRIPTS)}")
    good = True
    for script in chosen:
        started = time.monotonic()
        said, passed = attempt(script, sources, scratch)
        good &= passed
        print(f"{script.name}: {said} [{time.monotonic() - started:.0f} s]", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
