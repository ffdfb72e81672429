"""The relay between emulated nodes, held to what it promises: packets are counted, no test needs an idle machine."""

import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire.bench.emulation.cluster import INTERFACE, EmulatedCluster, RunResult
from gradwire.bench.emulation.paths import PathOptions
from support.packets import NUMBERED, PING, python

pytestmark = pytest.mark.netns

PACKETS = 4000

STREAMS = """
import os, socket, struct, sys, threading, time
streams, seconds, data = int(sys.argv[1]), float(sys.argv[2]), bytes(1 << 16)

def send(link):
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    link.settimeout(0.05)
    windows, started, looked = [], time.monotonic(), 0
    while (now := time.monotonic()) < started + seconds:
        if now > looked + 0.05:
            looked = now
            if now > started + seconds / 3:  # past the slow start
                facts = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
                windows.append(struct.unpack_from("I", facts, 80)[0])
        try:
            link.send(data)
        except TimeoutError:
            pass
    print(sum(windows) / len(windows))
    link.close()

def drain(link):
    try:
        while link.recv(1 << 18):
            pass
    except ConnectionResetError:
        pass

if os.environ["RANK"] == "1":
    server = socket.create_server(("", 5000))
    todo = [(drain, server.accept()[0]) for _ in range(streams)]
else:
    def connect():
        for _ in range(600):
            try:
                return socket.create_connection(("10.77.0.2", 5000))
            except ConnectionRefusedError:
                time.sleep(0.05)
        raise SystemExit("nobody listens")
    todo = [(send, connect()) for _ in range(streams)]
threads = [threading.Thread(target=what, args=(link,)) for what, link in todo]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""

ALL_REDUCE = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.arange(1 << 19, dtype=torch.float32) * (1 + dist.get_rank())
dist.all_reduce(tensor)
assert tensor.equal(torch.arange(1 << 19, dtype=torch.float32) * 3)
dist.barrier()
dist.destroy_process_group()
"""


def nic_packets(cluster: EmulatedCluster, node: int) -> tuple[int, int]:
    """(sent, received) by a node's NIC, as the kernel counts them."""
    for line in Path(f"/proc/{cluster.process(node)}/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[9]), int(counters.split()[1])
    raise AssertionError("no NIC")


@pytest.fixture(scope="module")
def ocean() -> Iterator[EmulatedCluster]:
    with EmulatedCluster(
        [1, 1], nic="100mbit", path=PathOptions(delay="40ms", loss="1%", jitter="10ms"), carrier="relay"
    ) as cluster:
        yield cluster


def test_a_round_trip_is_both_delays() -> None:
    with EmulatedCluster([1, 1], nic="100mbit", path=PathOptions(delay="40ms,20ms"), carrier="relay") as cluster:
        result = cluster.run(python(PING), timeout_seconds=60)
    result.check()
    trips = [float(line) for line in result.output[0].split()]
    # Never early. Late as a busy machine is: the best of 20 comes within as much again.
    assert len(trips) == 20 and 0.06 <= min(trips) < 0.12


def test_lost_packets_are_as_many_as_asked_for_and_every_one_is_counted(ocean: EmulatedCluster) -> None:
    before, nics_before = ocean.path_counts(), [nic_packets(ocean, node) for node in (0, 1)]
    result = ocean.run(python(NUMBERED, PACKETS), timeout_seconds=60)
    result.check()
    numbers = [int(word) for word in result.output[1].split()]
    time.sleep(0.3)  # what is still under way is counted at its end
    after, nics_after = ocean.path_counts(), [nic_packets(ocean, node) for node in (0, 1)]
    for source, target in ((0, 1), (1, 0)):
        then, now = before[source][target], after[source][target]
        offered, delivered = now.offered - then.offered, now.delivered - then.delivered
        assert offered == delivered + (now.lost - then.lost) + (now.dropped - then.dropped)
        assert offered == nics_after[source][0] - nics_before[source][0]
        assert delivered == nics_after[target][1] - nics_before[target][1]
    offered, lost = (getattr(after[0][1], name) - getattr(before[0][1], name) for name in ("offered", "lost"))
    # Six standard deviations of 1 % of them.
    assert offered >= PACKETS and abs(lost - 0.01 * offered) < 6 * (0.01 * 0.99 * offered) ** 0.5
    assert 0 < len(numbers) <= PACKETS - lost + 10
    assert ocean.relays[0].overrun() == 0
    # No two have changed places, and none came twice, whatever the jitter.
    assert numbers == sorted(set(numbers))


def test_packets_overtake_each_other_where_that_is_asked_for() -> None:
    options = PathOptions(delay="20ms", jitter="10ms", reorder=True)
    with EmulatedCluster([1, 1], path=options, carrier="relay") as cluster:
        result = cluster.run(python(NUMBERED, 500), timeout_seconds=60)
    result.check()
    numbers = [int(word) for word in result.output[1].split()]
    assert sorted(numbers) == list(range(500)) != numbers


def test_streams_send_real_packets_and_their_windows_obey_mathis() -> None:
    loss = 0.01
    with EmulatedCluster([1, 1], nic="100mbit", path=PathOptions(delay="10ms", loss="1%"), carrier="relay") as cluster:
        result = cluster.run(python(STREAMS, 6, 6), timeout_seconds=90)
        counts = cluster.path_counts()[0][1]
    result.check()
    assert counts.offered_nbytes <= counts.offered * 1514  # with segmentation offload a frame has up to 64 KB
    windows = [float(line) for line in result.output[0].split()]
    # Mathis, Semke, Mahdavi, Ott: The macroscopic behavior of the TCP congestion avoidance algorithm (1997), equation 3
    # and table 1: a window of C / sqrt(p) segments on average, C = 1.22 with an acknowledgement for each. Below some
    # hundred segments cubic is as aggressive as Reno (RFC 9438, section 4.3). A window knows no clock.
    expected = 1.22 / loss**0.5
    assert expected / 2 < sum(windows) / len(windows) < expected * 2


def test_gloo_sums_the_same_bits_over_it(ocean: EmulatedCluster) -> None:
    ocean.run([sys.executable, "-c", ALL_REDUCE], timeout_seconds=120).check()


def test_rates_hold_and_may_change_while_it_runs() -> None:
    with EmulatedCluster([1, 1], nic="100mbit", path=PathOptions(delay="1ms"), carrier="relay") as cluster:
        cluster.limit(0, INTERFACE, 0, 4_000_000)
        script = NUMBERED.replace("bytes(200)", "bytes(1400)").replace("time.sleep(1)", "time.sleep(4)")
        started = time.monotonic()
        result = cluster.run(python(script, 60), timeout_seconds=60)
        result.check()
        assert len(result.output[1].split()) == 60 or cluster.path_counts()[0][1].dropped > 0
        # 60 packets of 1,446 bytes are 0.17 s at 4 Mbit/s; a queue of 0.2 s drops none of them.
        assert time.monotonic() - started > 0.17


def test_three_regions_reach_each_other_and_a_relay_serves_every_network() -> None:
    options = PathOptions(regions="eu,us,as", between=["eu/us:delay=20ms", "eu/as:delay=30ms", "us/as:delay=1ms"])
    everybody = """
import os, socket, threading
rank, server = int(os.environ["RANK"]), socket.create_server(("", 5000), backlog=16)
def serve():
    while True:
        link, _ = server.accept()
        link.sendall(b"hello")
        link.close()
threading.Thread(target=serve, daemon=True).start()
import time
for network in (77, 78):
    for other in range(3):
        for _ in range(600):
            try:
                assert socket.create_connection((f"10.{network}.0.{other + 1}", 5000), 20).recv(5) == b"hello"
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        else:
            raise SystemExit(f"nobody at {network} {other}")
time.sleep(2)
"""
    with EmulatedCluster([1, 1, 1], path=options, carrier="relay") as cluster:
        cluster.add_network("eth1")
        cluster.run(python(everybody), timeout_seconds=90).check()
        for network in (0, 1):
            counts = cluster.path_counts(network)
            assert all(counts[a][b].delivered > 0 for a in range(3) for b in range(3) if a != b)


def test_a_relay_that_dies_ends_the_job_in_words() -> None:
    with EmulatedCluster([1, 1], path=PathOptions(delay="1ms"), carrier="relay") as cluster:
        killer = threading.Timer(1.0, lambda: os.kill(cluster.relays[0].pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(RuntimeError, match=r"the relay of network 0, .* ended with signal 9; the job was ended"):
            cluster.run(["sleep", "600"], timeout_seconds=60)
        with pytest.raises(RuntimeError, match="the relay of network 0"):
            cluster.run(["true"], timeout_seconds=60)
        with pytest.raises(RuntimeError, match="the relay of network 0"):
            cluster.path_counts()


def test_what_the_relay_refuses_is_said_in_words() -> None:
    """A NIC that segments again sends frames that are no packets: losing one of them would lose forty."""
    big = "import socket; socket.create_connection(('10.77.0.1', 5000), 5).sendall(bytes(1 << 20))"
    script = f"""
import os, socket, time
if os.environ["RANK"] == "0":
    link = socket.create_server(("", 5000)).accept()[0]
    while link.recv(1 << 16): pass
else:
    time.sleep(0.5)
    {big}
    time.sleep(60)
"""
    with EmulatedCluster([1, 1], path=PathOptions(delay="1ms"), carrier="relay") as cluster:
        offload_on = f"""
import array, fcntl, socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
    for command in (0x17, 0x1F):
        value = array.array("B", struct.pack("II", command, 1))
        fcntl.ioctl(door, 0x8946, struct.pack("16sP", {INTERFACE!r}.encode(), value.buffer_info()[0]))
"""
        done: list[RunResult] = [cluster.run(python(offload_on), timeout_seconds=60)]
        assert done
        with pytest.raises(RuntimeError, match="offload on again; the job was ended"):
            cluster.run(python(script), timeout_seconds=60)


def test_no_relay_is_left() -> None:
    with EmulatedCluster([1, 1], path=PathOptions(delay="1ms"), carrier="relay") as cluster:
        pid = cluster.relays[0].pid
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


def test_counts_need_a_path() -> None:
    with EmulatedCluster([1]) as cluster, pytest.raises(RuntimeError, match="only a cluster with a `path` counts"):
        cluster.path_counts()


def test_headers_are_what_the_scripts_take_them_for() -> None:
    """`STREAMS` reads tcpi_snd_cwnd at byte 80 of TCP_INFO; a new connection's window is ten segments (RFC 6928)."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as link:
        assert struct.unpack_from("I", link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 80)[0] == 10


@pytest.mark.parametrize(
    ("network", "path"),
    [("10.77.0.0/16", None), ("fd77::/64", None), ("fd77::/64", PathOptions(delay="1ms"))],
    ids=["IPv4", "IPv6", "IPv6 over the relay"],
)
def test_tcp_reacts_to_loss_as_asked_at_both_ends(network: str, path: PathOptions | None) -> None:
    script = """
import os, socket, sys, time
server = sys.argv[1]
if os.environ["RANK"] == "0":
    for _ in range(600):
        try:
            link = socket.create_connection((server, 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
else:
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    link = socket.create_server((server, 5000), family=family).accept()[0]
print(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())
"""
    for name in ("reno", "cubic"):
        with EmulatedCluster([1, 1], congestion=name, network=network, path=path) as cluster:
            result = cluster.run(python(script, cluster.address(1)), timeout_seconds=60)
        result.check()
        assert [output.strip() for output in result.output] == [name, name]
