"""A job of the mpirun tests (mpi_jobs.py): waits over MPI end when a rank gives up, and no rank waits for its peers."""

from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.comms.bootstrap import mpi_launch
from gradwire.comms.bootstrap.compat import store_of
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config

TIMEOUT = timedelta(minutes=10)  # far longer than the test: what ends a wait is not its time-out


def main() -> None:
    place = mpi_launch.init_mpi_process_group("gloo", TIMEOUT)
    world = dist.group.WORLD
    assert world is not None
    config = Config(transport="mpi", hostname=f"node{place.rank}", timeout=TIMEOUT)
    communicator = Communicator(
        store_of(world), place.rank, place.world_size, torch.device("cpu"), config, name="test", group=world
    )
    communicator.all_reduce(torch.ones(1000)).wait()
    if place.rank == 3:
        communicator.abort("rank 3 has had enough")
    else:
        try:
            communicator.all_reduce(torch.ones(1000)).wait()
        except RuntimeError as error:
            assert "rank 3 has had enough" in str(error), error
        else:
            raise AssertionError("the sum ended without rank 3")
    communicator.close()
    print(f"rank {place.rank} has ended its wait", flush=True)
    dist.barrier()
