"""One turn of one peer of `shm_peers` (docs/results/performance.md), as a script of its own.

It also runs in venvs that hold mpi4py and nothing of ours.

Usage: shm_peers_ranks.py PEER RANKS OUTPUT NBYTES...
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

BUDGET_NBYTES = 128 << 20
"""Bytes reduced per size: 2 calls of 64 MB would be too few for a median, so `CALLS` bounds their number."""
CALLS = (8, 300)
WARM_UP_CALLS = 4

AllReduce = Callable[[], object]


def median_seconds(nbytes: int, all_reduce: AllReduce, barrier: AllReduce) -> float:
    """Returns the median time from a barrier to this rank's return of one call, in seconds.

    Args:
        nbytes: Size of the tensor, which decides the number of calls.
        all_reduce: Function that all-reduces it once.
        barrier: Function that waits for all ranks.
    """
    times = []
    for _ in range(WARM_UP_CALLS):
        all_reduce()
    for _ in range(min(max(BUDGET_NBYTES // max(nbytes, 1), CALLS[0]), CALLS[1])):
        barrier()
        start = time.perf_counter()
        all_reduce()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def run_mpi(output: Path, sizes: list[int]) -> None:
    """Measures in-place all-reduces of float32 as one rank under mpiexec; rank 0 writes the slowest rank's seconds."""
    import numpy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    result = {}
    for nbytes in sizes:
        array = numpy.zeros(nbytes // 4, dtype=numpy.float32)
        result[nbytes] = median_seconds(nbytes, lambda: world.Allreduce(MPI.IN_PLACE, array), world.Barrier)  # noqa: B023 - called at once
    slowest = {nbytes: world.allreduce(seconds, op=MPI.MAX) for nbytes, seconds in result.items()}
    if world.Get_rank() == 0:
        output.write_text(json.dumps(slowest))


def run_torch(peer: str, rank: int, ranks: int, port: int, output: Path, sizes: list[int]) -> int:
    """Measures as one rank of gloo or gradwire; returns 0 as its exit status.

    Args:
        peer: `gloo` or `gradwire`.
        rank: Number of this rank.
        ranks: Number of ranks.
        port: Port of the ranks' store.
        output: JSON file that rank 0 writes: bytes -> seconds of the slowest rank.
        sizes: Sizes of the tensor in bytes.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, ranks, False, timedelta(seconds=60))
    all_reduce: Callable[[torch.Tensor], object]
    barrier: AllReduce
    if peer == "gloo":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        all_reduce, barrier = dist.all_reduce, dist.barrier
    else:
        from gradwire.comms.transport.shm import ShmGroup

        group = ShmGroup.create(store, rank, ranks, key="bench", timeout=timedelta(seconds=60))
        all_reduce, barrier = group.all_reduce, group.barrier
    result = {}
    for nbytes in sizes:
        tensor = torch.zeros(nbytes // 4)
        result[nbytes] = median_seconds(nbytes, lambda: all_reduce(tensor), barrier)  # noqa: B023 - called at once
    slowest = torch.tensor(list(result.values()), dtype=torch.float64)
    if peer == "gloo":
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    else:
        group.all_reduce(slowest, op="max")
    if rank == 0:
        output.write_text(json.dumps(dict(zip(sizes, slowest.tolist(), strict=True))))
    barrier()
    return 0


def launch_torch(peer: str, ranks: int, output: Path, sizes: list[int]) -> int:
    """Starts the ranks as plain processes around a store; returns 0 if all of them succeed."""
    from gradwire.bench.emulation.fork import fork_ranks
    from gradwire.bench.nccl_tests.start import Start
    from gradwire.bench.studies.shared.store import serve_store

    with serve_store() as (port, _):
        starts = [Start("fork", rank, ranks, "127.0.0.1", port) for rank in range(ranks)]
        return fork_ranks(starts, lambda start, _: run_torch(peer, start.rank, ranks, port, output, sizes), [])


def main() -> int:
    """Measures the peer that the command line names; returns the exit status."""
    peer, ranks, output, *sizes = sys.argv[1:]
    nbytes = [int(size) for size in sizes]
    if peer in ("gloo", "gradwire"):
        return launch_torch(peer, int(ranks), Path(output), nbytes)
    run_mpi(Path(output), nbytes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
