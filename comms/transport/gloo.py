"""Between machines on CPU tensors: torch's gloo, a group of its own for each set of ranks and each lane."""

from datetime import timedelta

from gradwire.comms.compat import Store, make_gloo
from gradwire.comms.transport.torch_group import Alarm, TorchTransport


def connect(store: Store, rank: int, size: int, timeout: timedelta, alarm: Alarm | None = None,
            interface: str | None = None) -> TorchTransport:
    """Connects `size` ranks over TCP; returns when all of them have come.

    Gloo listens on the interface given, else on the one that GLOO_SOCKET_IFNAME names, else on the one that the hostname
    resolves to.

    Args:
        store: A store with a prefix of its own for this group.
        rank: This rank's index in the group.
        size: Number of ranks.
        timeout: For the connection and for every collective.
        alarm: See `TorchTransport`.
        interface: Name of a network interface of this host, `eth0`.

    Raises:
        RuntimeError: A rank did not come.
    """
    return TorchTransport(make_gloo(store, rank, size, timeout, interface), rank, size, alarm)
