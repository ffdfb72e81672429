import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradwire.bench.emulation.cluster import EmulatedCluster

pytestmark = pytest.mark.netns

NBYTES = 2_000_000

SEND = f"""
import os, socket, time
if os.environ["RANK"] == "0":
    started = time.perf_counter()
    for _ in range(600):
        try:
            link = socket.create_connection(("node1", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    link.sendall(bytes({NBYTES}))
    link.shutdown(socket.SHUT_WR)
    assert link.recv(1) == b"k"
    print(time.perf_counter() - started)
else:
    server = socket.create_server(("", 5000))
    link, _ = server.accept()
    received = 0
    while chunk := link.recv(1 << 16):
        received += len(chunk)
    print(received)
    link.sendall(b"k")
"""

ALL_REDUCE = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.full((1 << 20,), 1.0 + dist.get_rank())
dist.all_reduce(tensor)
assert tensor.eq(3.0).all()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def pair() -> Iterator[EmulatedCluster]:
    with EmulatedCluster([1, 1], nic="20mbit") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def uneven() -> Iterator[EmulatedCluster]:
    with EmulatedCluster([3, 1]) as cluster:
        yield cluster


def test_bytes_counted_are_bytes_sent_and_the_rate_holds(pair: EmulatedCluster) -> None:
    result = pair.run([sys.executable, "-c", SEND], timeout_seconds=60)
    result.check()
    assert int(result.output[1]) == NBYTES
    sender, receiver = result.nic_bytes
    # Headers are 66 of 1514 bytes a packet, fewer with segmentation offload; acknowledgements come back.
    assert NBYTES < sender.tx < 1.06 * NBYTES + 10_000
    assert NBYTES < receiver.rx < 1.06 * NBYTES + 10_000
    assert sender.rx < 0.1 * NBYTES and receiver.tx < 0.1 * NBYTES
    # 0.8 s at 20 Mbit, of which the first 64 KiB are free; no link lets a byte through faster than it is rated. The
    # sender's clock runs from before the first byte until the receiver has all: a busy machine can only make it longer.
    assert float(result.output[0]) > 0.9 * (NBYTES - 2 * 65536) * 8 / 20e6


BY_CARD = f"""
import os, socket, threading, time
def send(network):
    for _ in range(600):
        try:
            link = socket.create_connection((f"10.{{network}}.0.2", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    link.sendall(bytes({NBYTES} if network == 78 else {NBYTES} // 4))
    link.shutdown(socket.SHUT_WR)
    assert link.recv(1) == b"k"
def take(server):
    link, _ = server.accept()
    while link.recv(1 << 16):
        pass
    link.sendall(b"k")
if os.environ["RANK"] == "0":
    threads = [threading.Thread(target=send, args=(network,)) for network in (77, 78)]
else:
    servers = [socket.create_server((f"10.{{network}}.0.2", 5000)) for network in (77, 78)]
    threads = [threading.Thread(target=take, args=(server,)) for server in servers]
for each in threads:
    each.start()
for each in threads:
    each.join()
print(*sorted(name for _, name in socket.if_nameindex() if name != "lo"), os.environ.get("GLOO_SOCKET_IFNAME"))
"""


def test_a_node_has_two_nics_each_with_its_bytes_and_its_rate() -> None:
    with EmulatedCluster([1, 1], nic="5mbit+20mbit") as cluster:
        assert cluster.nic_rates == (25_000_000,) * 2 and cluster.nic_bits_per_second == 25_000_000
        result = cluster.run([sys.executable, "-c", BY_CARD], timeout_seconds=60)
    result.check()
    assert set(result.output) == {"eth0 eth1 None\n"}
    slow, fast = result.nic_bytes[0].nics
    assert (slow.interface, fast.interface) == ("eth0", "eth1")
    assert NBYTES // 4 < slow.tx < 1.06 * NBYTES // 4 + 10_000 and NBYTES < fast.tx < 1.06 * NBYTES + 10_000
    assert result.nic_bytes[0].tx == slow.tx + fast.tx


def test_a_script_written_for_torchrun_runs_unchanged() -> None:
    with EmulatedCluster([1, 1]) as cluster:
        result = cluster.run([sys.executable, "-c", ALL_REDUCE], timeout_seconds=120)
    result.check()
    # 2 (N - 1) / N = 1 time the 4 MiB, headers and the store's few messages; on busy cores TCP repeats some packets.
    busiest = max(max(nic.tx, nic.rx) for nic in result.nic_bytes)
    assert 4 * 2**20 < busiest < 1.15 * 4 * 2**20 + 100_000


def test_nodes_have_their_own_names_memory_and_processes(uneven: EmulatedCluster) -> None:
    script = "echo $(hostname) $(stat -c %d /dev/shm) $(readlink /proc/self/ns/pid) $(ls /sys/class/net) $(ls /dev/shm)"
    result = uneven.run(["sh", "-c", f"touch /dev/shm/$(hostname); {script}"], timeout_seconds=60)
    result.check()
    rows = [line.split() for line in result.output]
    assert [row[0] for row in rows] == ["node0", "node0", "node0", "node1"]
    own = {str(Path("/dev/shm").stat().st_dev)}
    memory = [row[1] for row in rows]
    assert memory[0] == memory[1] == memory[2] != memory[3] and not own & set(memory)
    assert rows[0][2] == rows[2][2] != rows[3][2]
    # Loopback and the link, and in /dev/shm what the own node put there.
    assert all(row[3:] == ["eth0", "lo", row[0]] for row in rows)
    assert not Path("/dev/shm/node0").exists()
    assert socket.gethostname() not in ("node0", "node1")


def test_nodes_know_each_others_names(uneven: EmulatedCluster) -> None:
    result = uneven.run(["sh", "-c", "getent ahostsv4 node0 node1 | cut -d' ' -f1 | uniq"], timeout_seconds=60)
    result.check()
    assert set(result.output) == {"10.77.0.1\n10.77.0.2\n"}


@pytest.mark.parametrize(("order", "nodes"), [("contiguous", "0001"), ("round-robin", "0100")])
def test_ranks_are_placed_as_asked(uneven: EmulatedCluster, order: str, nodes: str) -> None:
    script = "echo $RANK $(hostname) $GROUP_RANK $LOCAL_WORLD_SIZE $OMP_NUM_THREADS $GLOO_SOCKET_IFNAME"
    options = {"environment": {"OMP_NUM_THREADS": "3"}} if order == "round-robin" else {}
    result = uneven.run(["sh", "-c", script], order=order, timeout_seconds=60, **options)  # type: ignore[arg-type]
    result.check()
    for rank, node in enumerate(nodes):
        size = uneven.nodes[int(node)]
        threads = "3" if options else os.environ.get("OMP_NUM_THREADS", "1")  # the rule under test
        assert result.output[rank] == f"{rank} node{node} {node} {size} {threads} eth0\n"


def test_a_rank_reads_its_own_nodes_counters(pair: EmulatedCluster) -> None:
    script = "ping -c1 -q node0 >/dev/null 2>&1; cat /sys/class/net/eth0/statistics/tx_bytes"
    first = pair.run(["sh", "-c", script], timeout_seconds=60)
    pair.run([sys.executable, "-c", SEND], timeout_seconds=60).check()
    second = pair.run(["sh", "-c", script], timeout_seconds=60)
    assert int(second.output[0]) - int(first.output[0]) > NBYTES


def test_a_killed_rank_is_named_and_the_cluster_stays_usable(pair: EmulatedCluster) -> None:
    script = "if [ $RANK = 1 ]; then kill -9 $$; fi; sleep 600"
    result = pair.run(["sh", "-c", script], timeout_seconds=60, grace_seconds=0.2)
    assert result.first_failure == 1 and result.exit_status == 137
    assert result.returncodes[1] == -9 and result.returncodes[0] != 0
    pair.run(["true"], timeout_seconds=60).check()


def test_closing_ends_what_ranks_left_behind(
    namespaces_below: Callable[[int], set[str]], wait_until_gone: Callable[[set[str]], set[str]]
) -> None:
    others = namespaces_below(os.getpid())
    with EmulatedCluster([1]) as cluster:
        cluster.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 &"], timeout_seconds=60).check()
        mine = namespaces_below(os.getpid()) - others
        assert len(mine) == 2
    assert not wait_until_gone(mine)
    cluster.close()


def test_the_machines_own_network_is_left_alone() -> None:
    before = sorted(Path("/sys/class/net").iterdir())
    with EmulatedCluster([1, 1]):
        assert sorted(Path("/sys/class/net").iterdir()) == before


def test_parameters_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="`nic`"):
        EmulatedCluster([1], nic="fast")
    with pytest.raises(ValueError, match="`mtu`: found 100"):
        EmulatedCluster([1], mtu=100)
    with pytest.raises(ValueError, match="`nodes`"):
        EmulatedCluster([])
    with pytest.raises(ValueError, match="`nodes`: found 201"):
        EmulatedCluster([1] * 201)
