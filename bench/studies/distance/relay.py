"""Checks the relay of emulated networks: its rates, its processor time, and TCP's throughput under loss.

    python -m gradwire.bench.studies.distance.relay

The throughput of one TCP stream over a path that loses a share p of its packets is known:
MSS / RTT x C / sqrt(p), C = 1.22 where every segment is acknowledged and 0.87 where every other one is.

Source: Mathis, Semke, Mahdavi, Ott: The macroscopic behavior of the TCP congestion avoidance algorithm (1997),
equation 3 and table 1.
"""

import json
import socket
import sys
import threading
import time
from collections.abc import Sequence

from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.paths import PathOptions
from gradwire.bench.studies.shared.parser import StudyParser

PORT = 5000
SEGMENT_NBYTES = 1448
"""Payload of a segment at MTU 1500 with TCP's time stamps."""
MATHIS_CONSTANT = 1.22


def _send(link: socket.socket, seconds: float, congestion: str) -> None:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    link.settimeout(0.2)
    end, data = time.monotonic() + seconds, bytes(1 << 16)
    while time.monotonic() < end:
        try:
            link.send(data)
        except TimeoutError:
            continue
    link.settimeout(None)
    link.shutdown(socket.SHUT_WR)


def _receive(link: socket.socket, seconds: float, received: list[int], number: int) -> None:
    """Counts the bytes received in the last three quarters of the time, without TCP's slow start.

    Args:
        link: Connection to read until its end.
        seconds: Duration of the measurement.
        received: Bytes of each stream; entry `number` is changed in place.
        number: Index of this stream.
    """
    started = time.monotonic()
    while data := link.recv(1 << 18):
        if started + seconds / 4 < time.monotonic() < started + seconds:
            received[number] += len(data)


def rank_main(words: Sequence[str]) -> None:
    """Runs a node's part: node 0 sends and node 1 receives, or both do both; prints Mbit/s of each stream as JSON.

    Args:
        words: Node, seconds, number of streams, TCP's congestion control, `both` or `one`.
    """
    rank, seconds, streams, congestion, both = (
        int(words[0]),
        float(words[1]),
        int(words[2]),
        words[3],
        words[4] == "both",
    )
    if rank == 1:
        with socket.create_server(("", PORT)) as server:
            links = [server.accept()[0] for _ in range(streams)]
    else:
        links = [_connect() for _ in range(streams)]
    received, threads = [0] * streams, []
    for number, link in enumerate(links):
        if rank == 0 or both:
            threads.append(threading.Thread(target=_send, args=(link, seconds, congestion)))
        if rank == 1 or both:
            threads.append(threading.Thread(target=_receive, args=(link, seconds, received, number)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps([8 * nbytes / (0.75 * seconds) / 1e6 for nbytes in received]))


def _connect() -> socket.socket:
    for _ in range(600):
        try:
            return socket.create_connection(("10.77.0.2", PORT))
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise SystemExit("nobody listens")


def measure(
    nic: str, path: PathOptions, *, seconds: float, streams: int, both: bool
) -> tuple[list[list[float]], float]:
    """Measures TCP streams over an emulated path.

    Args:
        nic: Rate of each node's link.
        path: Delay and loss between the two nodes.
        seconds: Duration of the measurement.
        streams: Number of streams.
        both: True sends in both directions.

    Returns:
        (Mbit/s of each stream, by receiving node; processor time of the relay over the wall time).
    """
    module = "gradwire.bench.studies.distance.relay"
    with EmulatedCluster([1, 1], nic, path=path, carrier="relay") as cluster:
        before, started = cluster.relays[0].cpu_seconds(), time.monotonic()
        arguments = [str(seconds), str(streams), "cubic", "both" if both else "one"]
        script = f"exec {sys.executable} -m {module} --rank $RANK {' '.join(arguments)}"
        result = cluster.run(["sh", "-c", script], timeout_seconds=seconds + 120)
        share = (cluster.relays[0].cpu_seconds() - before) / (time.monotonic() - started)
        result.check()
        if missed := cluster.relays[0].overrun():
            print(f"the relay missed {missed} packets: the machine is too busy")
    return [json.loads(output.splitlines()[-1]) for output in result.output], share


def main(argv: Sequence[str]) -> None:
    """Measures and prints."""
    parser = StudyParser("distance.relay", __doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args(argv)
    rates, share = measure("200mbit", PathOptions(delay="1ms"), seconds=options.seconds, streams=1, both=True)
    print(
        f"200 Mbit/s both ways, 2 ms: {rates[1][0]:.0f} and {rates[0][0]:.0f} Mbit/s, the relay took {share:.2f} cores"
    )
    for trip_ms, loss, streams in ((80, 0.001, 1), (80, 0.001, 8), (80, 0.01, 8), (20, 0.01, 8)):
        path = PathOptions(delay=f"{trip_ms / 2}ms", loss=f"{loss:.4%}")
        rates, share = measure("100mbit", path, seconds=options.seconds, streams=streams, both=False)
        # Data alone is lost here as well as acknowledgements, which cumulate: only the data's loss counts.
        expected = MATHIS_CONSTANT * 8 * SEGMENT_NBYTES / (trip_ms / 1e3) / loss**0.5 / 1e6
        found = sum(rates[1]) / streams
        print(
            f"100 Mbit/s, {trip_ms} ms, {loss:.1%}: {streams} cubic, {found:.2f} Mbit/s each, Mathis {expected:.2f}, "
            f"ratio {found / expected:.2f}, the relay took {share:.2f} cores"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2:])
    else:
        main(sys.argv[1:])
