"""What every rank of the mpirun tests runs: several jobs, one after the other, on the ranks that mpirun has started.

mpirun -n 4 python mpi_jobs.py FOLDER JOB...

Ranks that import torch take longer to start than all of these jobs. FOLDER gets what each rank writes in each of them,
as JOB.RANK.out and JOB.RANK.err, and the status, as JOB.RANK.status. Nothing can follow `abort`.
"""

import io
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from mpi4py import MPI

import gradwire.__main__

LAWS = {"laws": "mpi_rank.py", "abort": "mpi_abort_rank.py"}
"""Files beside this one, whose `main` is the job."""

PEERS = ("all_gather", "reduce_scatter", "broadcast", "reduce", "alltoall", "sendrecv")
LINES = {
    "bench": ["bench all_reduce --backend gradwire,mpi -b 1K -e 16K -f 4 -n 3 -d int32 -o max"],
    "peer": [f"bench {name} --backend mpi -b 1K -e 64K -f 64 -n 2" for name in PEERS],
    "refused": ["bench all_reduce -g 2"],
    "compare": ["compare --model linear --megabytes 1 --rounds 1 --only MPI --json {folder}/compare.json"],
}
"""Lines of `gradwire` that a job consists of."""


def status_of_line(words: list[str]) -> int:
    try:
        return gradwire.__main__.main(words)
    except SystemExit as leaving:
        print(leaving.code if isinstance(leaving.code, str) else "", file=sys.stderr)
        return leaving.code if isinstance(leaving.code, int) else 1


def run(job: str, folder: Path) -> int:
    if job in LAWS:
        runpy.run_path(str(Path(__file__).with_name(LAWS[job])))["main"]()
        return 0
    return max(status_of_line(line.format(folder=folder).split()) for line in LINES[job])


def main(folder: Path, jobs: list[str]) -> None:
    for job in jobs:
        out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
        with redirect_stdout(out), redirect_stderr(err):
            status = run(job, folder)
        place = f"{job}.{MPI.COMM_WORLD.rank}"
        (folder / f"{place}.out").write_bytes(out.buffer.getvalue())
        (folder / f"{place}.err").write_bytes(err.buffer.getvalue())
        (folder / f"{place}.status").write_text(str(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
