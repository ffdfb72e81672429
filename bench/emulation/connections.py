"""What one TCP connection reaches, where that is less than the link: clouds and a core's TCP stack both limit a flow.

A ring of all ranks crosses from node to node on one connection, parallel rings on several; a limit on each connection
tells them apart, as a limit on the link cannot.
"""

from gradwire.comms.bootstrap.kernel import outside_connections, pace


def limit_streams(bytes_per_second: float) -> int:
    """Limits what each of this process's TCP connections to another node sends; those inside the node stay as they are.

    Args:
        bytes_per_second: Of payload and headers, for each connection and direction; this side sends no faster.

    Returns:
        Connections limited.
    """
    limited = 0
    for _, _, connection in outside_connections():
        pace(connection, bytes_per_second)
        limited += 1
    return limited
