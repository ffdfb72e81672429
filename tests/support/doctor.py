"""Healthy jobs, drawn; the tests break them one thing at a time."""

import random
from dataclasses import replace
from typing import Any

from gradwire.bench.doctor.facts import (
    BackendTime,
    CoreWork,
    GpuState,
    JobFacts,
    NetworkInterface,
    PairRates,
    RankFacts,
    from_record,
)

LOOPBACK = NetworkInterface(name="lo", kind="loopback", addresses=("127.0.0.1",), mtu=65536)
VERSIONS = {"python": "3.12.1", "torch": "2.14.0", "gradwire": "0.1.0", "nccl": "2.27.3"}


def healthy(seed: int, nodes: int | None = None, times: int = 1) -> JobFacts:
    """A job with nothing wrong: any size and speed, known or unknown NICs, noise of a tenth.

    Args:
        seed: Of what is drawn.
        nodes: How many; drawn where None.
        times: That every pair was tried.
    """
    draw = random.Random(seed)
    count = nodes or draw.choice([2, 2, 3, 4, 7])
    ranks_of = draw.choice([1, 2, 4, 8])
    gbit = draw.choice([0.2, 1, 10, 25])
    rate = gbit * 1e9 / 8 * 0.94
    nic = NetworkInterface(
        name="eth0",
        kind="nic",
        mtu=draw.choice([1500, 9000]),
        bits_per_second=draw.choice([None, gbit * 1e9]),
        duplex="full",
    )
    gpus = tuple(GpuState(index=index, name="H100", sm_mhz=1980, max_sm_mhz=1980) for index in range(ranks_of))
    has_gpus = draw.random() < 0.5
    latency = draw.uniform(15e-6, 200e-6)

    def noisy(value: float) -> float:
        return value * draw.uniform(0.9, 1.0)

    def both(value: float) -> tuple[float, float]:
        return noisy(value), noisy(value)

    ranks = [
        RankFacts(
            rank=node * ranks_of + local,
            host=(f"node{node}", "boot", str(node)),
            local_rank=local,
            device="cuda" if has_gpus else "cpu",
            versions=VERSIONS,
            cores=64,
            affinity=tuple(range(64)),
            threads=64 // ranks_of,
            shm_nbytes=64 << 30,
            shm_free_nbytes=60 << 30,
            interfaces=(LOOPBACK, replace(nic, addresses=(f"10.0.0.{node + 1}",))),
            gloo_interface="eth0",
            gloo_seen=True,
            nccl_interface="eth0",
            tcp_window_nbytes=32 << 20,
            tcp_send_nbytes=4 << 20,
            gpus=gpus if has_gpus else (),
        )
        for node in range(count)
        for local in range(ranks_of)
    ]
    pairs = [
        PairRates(
            a=a,
            b=b,
            latency_seconds=noisy(latency),
            one=both(rate),
            many=both(rate),
            both=both(rate),
            sent=(4000, 4000),
            lost=(draw.choice([0, 1]), 0),
            window_share=draw.uniform(0.0, 0.2),
            buffer_share=draw.uniform(0.0, 0.2),
            clock_seconds=draw.uniform(-0.05, 0.05),
            packet_nbytes=nic.mtu,
            packets_pass=draw.choice([True, None]),
            times=times,
        )
        for a in range(count)
        for b in range(a + 1, count)
    ]
    exchange = 2 * (count - 1) / count * (1 << 20) / rate + 2 * (count - 1) * latency
    return JobFacts(
        ranks=tuple(ranks),
        gradient_nbytes=draw.choice([10_000_000, 100_000_000, 3_000_000_000]),
        step_seconds=draw.choice([None, 0.4]),
        pairs=tuple(pairs),
        own_bytes_per_second={node: 3 * rate for node in range(count)},
        work=tuple(CoreWork(rank=each.rank, per_second=noisy(4000)) for each in ranks),
        backends=(BackendTime(backend="gloo", nbytes=1 << 20, seconds=draw.uniform(1.0, 1.3) * exchange),),
    )


def on_node(facts: JobFacts, node: int, **changes: object) -> JobFacts:
    """The job with other facts on all ranks of one node."""
    changed = {each.rank for each in facts.nodes[node]}
    return replace(
        facts,
        ranks=tuple(replace(each, **changes) if each.rank in changed else each for each in facts.ranks),  # type: ignore[arg-type]
    )


def everywhere(facts: JobFacts, **changes: object) -> JobFacts:
    """The job with other facts on all ranks."""
    return replace(facts, ranks=tuple(replace(each, **changes) for each in facts.ranks))  # type: ignore[arg-type]


def slowed(facts: JobFacts, node: int, share: float) -> JobFacts:
    """The job with one node's link slower, in all measurements, and looked at again."""

    def less(rates: tuple[float, float]) -> tuple[float, float]:
        return rates[0] * share, rates[1] * share

    return replace(
        facts,
        pairs=tuple(
            replace(pair, one=less(pair.one), many=less(pair.many), both=less(pair.both), times=3)
            if node in (pair.a, pair.b)
            else pair
            for pair in facts.pairs
        ),
    )


def interface(facts: JobFacts, node: int, **changes: object) -> JobFacts:
    """The job with another NIC in use on one node."""
    own = facts.nodes[node][0].interfaces
    return on_node(
        facts,
        node,
        interfaces=tuple(replace(each, **changes) if each.name == "eth0" else each for each in own),  # type: ignore[arg-type]
    )


def recorded(record: dict[str, Any]) -> JobFacts:
    """The facts of a job as `gradwire doctor --json` has written them.

    Args:
        record: The value of `facts`.
    """
    own = {int(node): rate for node, rate in record["own_bytes_per_second"].items()}
    return replace(from_record(JobFacts, record), own_bytes_per_second=own)
