"""Checks of transfers: lost packets, TCP windows, unreachable nodes, other programs' traffic, and slow all-reduces."""

import math
from collections.abc import Iterator, Sequence

from gradwire.bench.doctor.checks.network import CONFIRMED, FAR_SECONDS, FOREIGN_SHARE, SLOW, has_headroom, in_all
from gradwire.bench.doctor.facts import BackendTime, Diagnosis, JobFacts, PairRates
from gradwire.topology.wording import duration, listed, nbytes, rate

LOST_SHARE, LOST_SEGMENTS = 1e-3, 4
"""Share, and least number, of lost segments of a flow paced below half of the link's rate from which loss is a finding.
A wired network loses less than 1e-6; at 1e-3 cubic and reno fall behind from some Gbit/s on. Source: Mathis et al.,
"The macroscopic behavior of the TCP congestion avoidance algorithm", CCR 1997: rate = segment / round trip * 1.22 /
sqrt(loss)."""

SEGMENT_NBYTES, MATHIS = 1448, 1.22
MOST_OF_MATHIS, UNHURT = 4.0, 0.9
"""A long-distance connection that fills the link, and exceeds this multiple of the formula's rate, is not limited
by loss: the start of its flow overran the queue of its NIC once, and what was dropped there counts as lost. Cubic is no
faster than the formula at such loss (RFC 9438, section 5.1); bbr is, and then loss costs nothing."""

HELD_SHARE = 0.3
"""Share of a connection's busy time that a window or buffer must limit it for to be a finding."""

SLOW_EXCHANGE = 1.5
"""Multiple of the time that the measured links need, from which an all-reduce is slow."""
LEAST_EXTRA_SECONDS = 5e-3
"""Least seconds above that time: the operating system's scheduler may delay an all-reduce by less."""

WORK_OF_A_SUM = 8.0
"""Divisor of the loopback rate that gives the rate of an all-reduce limited by processors: it copies, sums, and ranks
share cores. On links without a limit healthy ones took up to 7.9 times what links need (2-core EPYC VM, 2026-11-28)."""

MOST_TCP_NBYTES = 1 << 30
USUAL_TCP_NBYTES = 6 << 20
"""Linux's default maximum of a receive buffer, in bytes. Source: tcp(7), tcp_rmem."""
DEFAULT_TCP_NBYTES = 128 << 10
"""Linux's initial receive buffer in bytes; a maximum below it was set by hand. Source: tcp(7), tcp_rmem."""


def packet_loss(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports in one finding pairs of nodes that lose packets although the link is not full.

    Of a flow paced below half of the link's rate 0.1 % of the segments, and 4 of them, must be lost in one direction.
    Pairs that were measured fewer than 3 times do not count.
    """
    # Only pairs that were measured several times count.
    confirmed = (pair for pair in facts.pairs if pair.times >= CONFIRMED)
    lossy = [pair for pair in confirmed if max(_lost_shares(pair, facts.good_rate())) > 0]
    if not lossy:
        return
    # Name the node that is in all of these pairs if there is one, and describe the worst direction.
    good = facts.good_rate()
    names = facts.names
    blamed = in_all(lossy, facts.pairs) or {node for pair in lossy for node in (pair.a, pair.b)}
    worst = max(lossy, key=lambda pair: max(_lost_shares(pair, good)))
    shares = _lost_shares(worst, good)
    a, b = (worst.a, worst.b) if shares[0] >= shares[1] else (worst.b, worst.a)
    way = 0 if shares[0] >= shares[1] else 1
    who = listed([names[node] for node in sorted(blamed)])
    common = len(lossy) > 1 and len(blamed) == 1
    slow = min(min(pair.one) for pair in lossy)
    yield Diagnosis(
        key="packet_loss",
        title=f"{100 * max(shares):.2g} % of the packets from {names[a]} to {names[b]} are lost",
        confidence=0.9,
        cost_seconds=max(0.0, facts.exchange_seconds(slow) - facts.exchange_seconds(good)),
        evidence=(
            (
                f"{worst.lost[way]} of {worst.sent[way]} segments had to be sent again, in flows that left the "
                f"link more than half empty (TCP_INFO, tried {worst.times} times); one connection reached "
                f"{rate(slow)}"
            ),
            *(
                (f"{who} is in all {len(lossy)} pairs that lose packets{_on_the_way(lossy, min(blamed), good)}",)
                if common
                else ()
            ),
        ),
        fix=(
            (
                f"on {who}: ethtool -S NIC | grep -iE 'err|drop|crc|discard'   # what counts up: cable, "
                "transceiver, or a full ring (then ethtool -G NIC rx 4096)"
            ),
            "the switch's counters of that port; a cable or transceiver that is changed tells it from the NIC",
            (
                "until then: sysctl -w net.ipv4.tcp_congestion_control=bbr, where the kernel has it, loses less "
                "speed to loss that is no congestion (Cardwell et al., BBR, ACM Queue 2016)"
            ),
        ),
        nodes=tuple(names[node] for node in sorted(blamed)),
    )


def counted_loss(facts: JobFacts) -> float:
    """Returns the largest share of lost segments in one direction of any pair, whether or not it is a finding."""
    return max((lost / sent for pair in facts.pairs for lost, sent in zip(pair.lost, pair.sent, strict=True) if sent),
               default=0.0)  # fmt: skip


def _on_the_way(lossy: Sequence[PairRates], node: int, good: float) -> str:
    """Returns words on the direction if a node's pairs lose packets in one direction only; else nothing."""
    out, back = zip(*(_lost_shares(pair, good)[:: 1 if pair.a == node else -1] for pair in lossy), strict=True)
    if any(out) and any(back):
        return ""
    return ", each time of what it sends" if any(out) else ", each time of what it receives"


def _lost_shares(pair: PairRates, good: float) -> tuple[float, float]:
    """Returns the share of lost segments of each direction; 0 if it is below the thresholds of a finding.

    Args:
        pair: Pair of nodes.
        good: Rate of a healthy link, in bytes per second.
    """
    first, second = (
        lost / sent
        if sent
        and lost >= LOST_SEGMENTS
        and lost / sent >= LOST_SHARE
        and not _has_overrun(pair, lost / sent, one, good)
        else 0.0
        for lost, sent, one in zip(pair.lost, pair.sent, pair.one, strict=True)
    )
    return first, second


def _has_overrun(pair: PairRates, share: float, one: float, good: float) -> bool:
    """Returns whether a pair lost packets only when its flow started: with steady loss it could not be so fast."""
    round_trip = 2 * pair.latency_seconds
    most = MOST_OF_MATHIS * MATHIS * SEGMENT_NBYTES / (round_trip * math.sqrt(share)) if round_trip else math.inf
    return pair.latency_seconds > FAR_SECONDS and one >= UNHURT * good and one > most


def tcp_buffers(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports in one finding receive windows and send buffers that are too small for rate times round trip."""
    # Keep the confirmed pairs whose connection a window or buffer limits.
    good = facts.good_rate()
    held = [pair for pair in facts.pairs if pair.times >= CONFIRMED and _held(facts, pair, good)]
    if not held:
        return
    # Describe the slowest pair, and propose a maximum of four times the rate times the round trip.
    names = facts.names
    worst = min(held, key=lambda pair: min(pair.one))
    receives = (worst.window_share or 0.0) >= (worst.buffer_share or 0.0)
    trip = 2 * worst.latency_seconds
    blamed = in_all(held, facts.pairs)
    limits = [_limits(facts, node) for node in (worst.a, worst.b)]
    wanted = min(MOST_TCP_NBYTES, max(USUAL_TCP_NBYTES, 1 << int(4 * good * trip).bit_length()))
    share = max(worst.window_share or 0.0, worst.buffer_share or 0.0)
    what = "receive window" if receives else "send buffer"
    yield Diagnosis(
        key="tcp_buffers",
        title=f"TCP's {what} is too small for the way between {names[worst.a]} and {names[worst.b]}",
        confidence=0.9,
        cost_seconds=facts.exchange_seconds(min(worst.one)) - facts.exchange_seconds(good),
        evidence=(
            (
                f"{rate(good)} over a round trip of {duration(trip)} is {nbytes(good * trip)} under way; one "
                f"connection has {nbytes(min(worst.one) * trip)} and reaches {rate(min(worst.one))}, and its "
                f"{what} limited it for {share:.0%} of its time (TCP_INFO)"
            ),
            *(
                f"{names[node]}: net.ipv4.tcp_rmem allows {nbytes(read)}, tcp_wmem {nbytes(write)}"
                for node, (read, write) in zip((worst.a, worst.b), limits, strict=True)
                if read and write
            ),
            *(
                (f"{listed([names[node] for node in blamed])} is in all {len(held)} pairs with such a limit",)
                if len(blamed) == 1 and len(held) > 1
                else ()
            ),
        ),
        fix=(
            (
                f'as root, on both: sysctl -w net.ipv4.tcp_rmem="4096 131072 {wanted}" '
                f'net.ipv4.tcp_wmem="4096 65536 {wanted}"   # four times what is under way; tcp(7)'
            ),
            (
                "a program that sets SO_RCVBUF or SO_SNDBUF itself is held by net.core.rmem_max and wmem_max "
                "instead: NCCL does so where NCCL_SOCKET_RCVBUF is set"
            ),
            "or several connections: export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4",
        ),
        nodes=tuple(names[node] for node in (sorted(blamed) or (worst.a, worst.b))),
    )


def _held(facts: JobFacts, pair: PairRates, good: float) -> bool:
    # A receiver whose core is full reads slowly, so its window fills as well: that is no setting's fault.
    if min(pair.one) >= SLOW * good or not has_headroom(facts, (pair.a, pair.b), good):
        return False
    if pair.packets_pass is False or max(pair.window_share or 0.0, pair.buffer_share or 0.0) < HELD_SHARE:
        return False
    # Half of the buffer is window, the other half the kernel's own records. Source: tcp(7), tcp_adv_win_scale.
    own = [limit for node in (pair.a, pair.b) for limit in _limits(facts, node) if limit]
    return not own or min(own) < DEFAULT_TCP_NBYTES or min(own) / 2 < 2 * good * pair.latency_seconds


def _limits(facts: JobFacts, node: int) -> tuple[int | None, int | None]:
    first = facts.nodes[node][0]
    return first.tcp_window_nbytes, first.tcp_send_nbytes


def unreachable(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports in one finding pairs of nodes that could not connect; names the node that is in all of them, if any."""
    if not facts.unreached:
        return
    names = facts.names
    failed = facts.unreached
    shared = set.intersection(*({each.a, each.b} for each in failed)) if len(failed) > 1 else set()
    first = failed[0]
    who = listed([names[node] for node in sorted(shared)])
    title = (
        f"{who} cannot be reached by {len(failed)} of the other nodes"
        if len(shared) == 1
        else f"{names[first.a]} cannot reach {names[first.b]}"
    )
    yield Diagnosis(
        key="unreachable",
        title=title,
        confidence=0.9,
        evidence=tuple(f"{names[each.a]} to {names[each.b]}: {each.error}" for each in failed[:3]),
        fix=(
            f"on {names[first.a]}: ip route get ADDRESS_OF_{names[first.b]}   # does it leave by the right NIC?",
            (
                "a firewall: gloo and NCCL listen on any port; open them all between the nodes (iptables -L -n, "
                "nft list ruleset, a cloud's security group)"
            ),
        ),
        nodes=tuple(names[node] for node in sorted(shared)) or (names[first.a], names[first.b]),
        stops=True,
    )


def foreign_traffic(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports NICs that carry 5 % of a healthy link's rate or more while no rank of the job sends anything."""
    busy = [node for node in range(len(facts.nodes)) if facts.foreign_share(node) >= FOREIGN_SHARE]
    if not busy or not facts.pairs:
        return
    good = facts.good_rate()
    names = facts.names
    # TCP shares a full link among its flows: of a link that one foreign flow fills, half is left.
    share = min(0.5, max(facts.foreign_share(node) for node in busy))
    slower = facts.exchange_seconds(good * (1 - share)) - facts.exchange_seconds(good)
    took = facts.all_reduce_seconds
    yield Diagnosis(
        key="foreign_traffic",
        title=f"Other programs use the network of {listed([names[node] for node in busy])}",
        confidence=0.95,
        cost_seconds=slower if took is None else max(slower, took - facts.exchange_seconds(good)),
        evidence=tuple(
            f"{names[each.node]}: {each.interface} sent {rate(each.sent)} and received {rate(each.received)} while no "
            f"rank of this job sent anything (/sys/class/net/{each.interface}/statistics)"
            for each in facts.foreign
            if each.node in busy
        ),
        fix=(
            f"on {listed([names[node] for node in busy])}: ss -tinp; iftop   # which program has those connections?",
            "another job, a backup or a file system on this network: another node, another NIC, or another time",
        ),
        nodes=tuple(names[node] for node in busy),
    )


def slow_exchange(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports that the fastest backend's all-reduce takes far longer than the measured links and processors need.

    It must take 1.5 times as long and 5 ms more.
    """
    timed = [each for each in facts.backends if _best(each) is not None]
    if not timed or len(facts.nodes) < 2 or not facts.pairs:
        return
    fastest = min(timed, key=lambda each: (_best(each) or 0.0) / each.nbytes)
    bound = exchange_bound(facts, fastest.nbytes)
    took = _best(fastest)
    if bound is None or took is None or took < SLOW_EXCHANGE * bound or took - bound < LEAST_EXTRA_SECONDS:
        return
    size = facts.gradient_nbytes / fastest.nbytes
    yield Diagnosis(
        key="slow_exchange",
        title=f"An all-reduce takes {took / bound:.1f} times as long as the links need for it",
        confidence=0.7,
        cost_seconds=(took - bound) * size,
        evidence=(
            (
                f"{fastest.backend}, the fastest: {duration(took)} for {nbytes(fastest.nbytes)}, in the best of its "
                f"rounds; the links as measured, both directions at once, need {duration(bound)}"
            ),
            *(
                f"{each.backend}: {duration(_best(each) or 0.0)} for {nbytes(each.nbytes)}"
                for each in timed
                if each is not fastest
            ),
        ),
        fix=(
            "during a step: top -H   # cores at 100 %: the processors are the limit, so fewer ranks or more cores",
            "mpstat -P ALL 1   # one core full of %soft: the NIC's interrupts; spread them (irqbalance)",
            "another job on the same links: run the doctor again when it has ended",
            f"gradwire bench all_reduce -b 64K -e 64M --backend {fastest.backend}   # from which size on?",
        ),
    )


def _best(backend: BackendTime) -> float | None:
    return backend.best_seconds if backend.best_seconds is not None else backend.seconds


def exchange_bound(facts: JobFacts, count_nbytes: int) -> float | None:
    """Returns the least seconds of an all-reduce over the slowest measured link or processor.

    None if a node has no measured pair.

    Args:
        facts: Measurements of the job.
        count_nbytes: Bytes of the tensor of each rank.
    """
    nodes = range(len(facts.nodes))
    both = [
        max((sum(pair.both) / 2 for pair in facts.pairs if node in (pair.a, pair.b)), default=0.0) for node in nodes
    ]
    if min(both) <= 0:
        return None
    rates = [min(both), *(rate / WORK_OF_A_SUM for rate in facts.own_bytes_per_second.values())]
    hops = 2 * (len(facts.nodes) - 1)
    latency = max(pair.latency_seconds for pair in facts.pairs)
    return facts.exchange_seconds(min(rates)) * count_nbytes / facts.gradient_nbytes + hops * latency


CHECKS = (packet_loss, tcp_buffers, unreachable, foreign_traffic, slow_exchange)
