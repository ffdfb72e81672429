"""Limit of the rate of single TCP connections, as clouds and the TCP stack on one core impose it.

A ring of all ranks has one connection between two nodes, and parallel rings have several. With a limit on each
connection their speeds differ; with a limit on the link they do not.
"""

from gradwire.comms.bootstrap.kernel import outside_connections, pace


def limit_streams(bytes_per_second: float) -> int:
    """Limits the rate at which this process sends on each of its TCP connections to other nodes.

    Args:
        bytes_per_second: Rate of payload and headers on each connection.

    Returns:
        Number of the connections that were limited.
    """
    limited = 0
    for _, _, connection in outside_connections():
        pace(connection, bytes_per_second)
        limited += 1
    return limited
