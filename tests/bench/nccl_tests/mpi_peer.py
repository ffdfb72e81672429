"""What every rank of a test runs: the bench's backend over MPI, one collective after the other in one job.

mpirun -n 4 python mpi_peer.py
"""

import sys

from gradwire.bench.nccl_tests import command

COLLECTIVES = ("all_gather", "reduce_scatter", "broadcast", "reduce", "alltoall", "sendrecv")


def main() -> int:
    return max(
        command.main([name, "--backend", "mpi", "-b", "1K", "-e", "64K", "-f", "64", "-n", "2"]) for name in COLLECTIVES
    )


if __name__ == "__main__":
    sys.exit(main())
