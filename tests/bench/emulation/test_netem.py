"""The kernel's own queues in place of the relay: what they are told, and, where the kernel has netem, what they do."""

import os
import stat
import sys
from pathlib import Path

import pytest

from gradwire.bench.emulation import cluster as clusters
from gradwire.bench.emulation import netem
from gradwire.bench.emulation.cluster import INTERFACE, EmulatedCluster, check_carrier
from gradwire.bench.emulation.namespaces import available
from gradwire.bench.emulation.paths import PathOptions, Paths
from support.packets import NUMBERED, PING, python

pytestmark = pytest.mark.netns

FAKE_TC = """#!/bin/sh
echo "$*" >> {log}
case "$*" in *-j*) cat {counters};; esac
"""


def kernel_has_netem() -> bool:
    return available() is None and netem.has_netem()


needs_netem = pytest.mark.skipif(not kernel_has_netem(), reason="this kernel has no netem")


def paths(count: int = 2, **said: str) -> Paths:
    found = PathOptions(**said).read(count, has_rates=True)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_the_kernels_queues_are_taken_where_it_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ocean = paths(delay="40ms")
    for has, carrier in ((True, "netem"), (False, "relay")):
        monkeypatch.setattr(clusters, "has_netem", lambda has=has: has)
        assert check_carrier("auto", ocean) == carrier
        assert check_carrier("relay", ocean) == "relay"
        assert check_carrier("auto", None) == "auto"
    seeded = PathOptions(delay="40ms", seed=1).read(2, has_rates=True)
    monkeypatch.setattr(clusters, "has_netem", lambda: True)
    assert check_carrier("auto", seeded) == "relay"
    for wrong, on, words in (
        ("pigeon", ocean, "`--carrier`: found 'pigeon', wanted one of auto, netem, relay"),
        ("netem", None, "without a delay"),
        ("netem", seeded, "with a seed"),
    ):
        with pytest.raises(ValueError, match=words):
            check_carrier(wrong, on, "--carrier")
    monkeypatch.setattr(clusters, "has_netem", lambda: False)
    with pytest.raises(ValueError, match="which this kernel does not have; wanted relay"):
        check_carrier("netem", ocean)


def test_what_the_kernel_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a `tc` that writes down what it is told: no kernel is asked."""
    log, counters, fake = tmp_path / "log", tmp_path / "counters", tmp_path / "tc"
    fake.write_text(FAKE_TC.format(log=log, counters=counters))
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(clusters, "has_netem", lambda: True)
    available()  # asks the real one, once
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    options = PathOptions(regions="eu,eu,us", between=["eu/us:delay=40ms,loss=0.1%,jitter=5ms"], queue="100ms")
    with EmulatedCluster([1, 1, 1], nic="100mbit,100mbit,50mbit", path=options) as cluster:
        assert cluster.carrier == "netem" and cluster.relays == ()
        told = log.read_text().splitlines()
        far = [line for line in told if "netem" in line and "dev port2" in line]
        assert len(far) == 2 and all("delay 40000us 5000us loss 0.100000% rate" in line for line in far)
        assert sum("netem" in line and "delay 0us" in line for line in told) == 2
        # 100 ms of 50 Mbit/s, for what comes and for what goes.
        assert sum("bfifo limit 625000" in line for line in told) == 4
        assert sum("bfifo limit 1250000" in line for line in told) == 8
        log.write_text("")
        cluster.limit(2, INTERFACE, 0, 10_000_000)
        told = log.read_text().splitlines()
        assert sum("class change" in line and "10000000bit" in line for line in told) == 6
        assert sum("change" in line and "bfifo limit 125000" in line for line in told) == 4
        counters.write_text(
            """[{"kind":"htb","handle":"1:","root":true,"packets":0,"drops":0,"bytes":0,"qlen":0},"""
            + ",".join(
                f'{{"kind":"bfifo","parent":"1:{2 + node}","packets":90,"drops":3,"bytes":9000,"qlen":7}},'
                f'{{"kind":"bfifo","parent":"{0x1000 + node:x}:1","packets":80,"drops":2,"bytes":8000,"qlen":0}}'
                for node in range(3)
            )
            + "]"
        )
        counts = cluster.path_counts()[0][2]
        assert (counts.offered, counts.offered_nbytes, counts.delivered) == (100, 9000, 90)


@needs_netem
def test_a_round_trip_is_both_delays() -> None:
    with EmulatedCluster([1, 1], nic="100mbit", path=PathOptions(delay="40ms,20ms"), carrier="netem") as cluster:
        result = cluster.run(python(PING), timeout_seconds=120)
    result.check()
    trips = [float(line) for line in result.output[0].split()]
    assert len(trips) == 20 and 0.06 <= min(trips) < 0.12


@needs_netem
@pytest.mark.parametrize("reorder", [False, True])
def test_lost_packets_are_counted_and_change_places_only_where_asked_for(reorder: bool) -> None:
    options = PathOptions(delay="40ms", jitter="10ms", loss="2%", reorder=reorder)
    with EmulatedCluster([1, 1], nic="100mbit", path=options, carrier="netem") as cluster:
        result = cluster.run(python(NUMBERED, 4000), timeout_seconds=120)
        counts = cluster.path_counts()[0][1]
    result.check()
    numbers = [int(word) for word in result.output[1].split()]
    assert counts.offered >= 4000
    assert abs(counts.lost - 0.02 * counts.offered) < 6 * (0.02 * 0.98 * counts.offered) ** 0.5
    assert counts.offered == counts.delivered + counts.lost + counts.dropped
    assert 0 < len(numbers) == len(set(numbers)) <= counts.delivered  # the first may come before who counts them
    assert (numbers == sorted(numbers)) is not reorder


@needs_netem
def test_rates_hold_and_a_full_queue_drops() -> None:
    options = PathOptions(delay="1ms", queue="50ms")
    with EmulatedCluster([1, 1], nic="100mbit", path=options, carrier="netem") as cluster:
        cluster.limit(0, INTERFACE, 0, 1_000_000)
        script = NUMBERED.replace("bytes(200)", "bytes(1400)").replace("% 20 ", "% 200 ")
        result = cluster.run(python(script, 200), timeout_seconds=120)
        counts = cluster.path_counts()[0][1]
    result.check()
    # 200 packets of 1,446 bytes at once, where 50 ms of 1 Mbit/s hold four.
    assert counts.dropped > 100 and counts.lost == 0
    assert len(result.output[1].split()) < 100


@needs_netem
def test_three_nodes_over_ipv6_reach_each_other() -> None:
    script = """
import os, socket, threading, time
rank, server = int(os.environ["RANK"]), socket.create_server(("::", 5000), family=socket.AF_INET6, backlog=16)
def serve():
    while True:
        link, _ = server.accept()
        link.sendall(b"hello")
        link.close()
threading.Thread(target=serve, daemon=True).start()
for other in range(3):
    for _ in range(600):
        try:
            assert socket.create_connection((f"fd77::{other + 1}", 5000), 20).recv(5) == b"hello"
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    else:
        raise SystemExit(f"nobody at {other}")
time.sleep(3)
"""
    with EmulatedCluster([1] * 3, path=PathOptions(delay="5ms"), carrier="netem", network="fd77::/64") as cluster:
        cluster.run([sys.executable, "-I", "-S", "-c", script], timeout_seconds=120).check()
        counts = cluster.path_counts()
        assert all(counts[a][b].delivered > 0 for a in range(3) for b in range(3) if a != b)
