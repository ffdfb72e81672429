"""Checks of the measured links: rate, duplex, latency, one connection, MTU, and the interface in use."""

from collections.abc import Iterator
from statistics import median

from gradwire.bench.doctor.facts import (
    BUCKET_NBYTES,
    Diagnosis,
    JobFacts,
    NetworkInterface,
    PairRates,
    RankFacts,
)
from gradwire.topology.fabric import TCP_SHARE
from gradwire.topology.wording import duration, listed, rate, verb

SLOW = 0.7
"""Share of the expected rate below which a link is a finding. TCP alone reaches 94 %; under load the best of three
tries was never below 85 % (2-core EPYC VM, 2026-11-22)."""

DOUBTFUL = 0.8
"""Share of a healthy link's rate below which a pair is measured again."""

DOUBTFUL_LOSS = 5e-4
"""Share of lost packets above which a pair is measured again."""

ONE_OF_MANY = 0.55
"""Share of the rate of several connections below which one connection alone is a finding."""

HALF_DUPLEX = 0.62
"""Rate with both directions in use, over the rates of one direction, below which a link is half duplex: 0.5 is half, 1
is full. The best of three tries was 0.7 once on a full-duplex link, at a load of 28 (2-core EPYC VM, 2026-11-22)."""

CONFIRMED = 3
"""Number of measurements of a pair before it can be a finding: the first, and two while no other pair is measured."""

PLAIN = 0.75
"""Share of a threshold below which a confirmed pair is bad for certain, and not measured again."""

HEADROOM = 2.0
"""Multiple of a link's rate that this program must reach over the loopback; otherwise its own speed is measured."""

FAR_SECONDS = 2e-3
"""Latency in one direction above which two machines are not in one data centre; cloud zones are 0.5 to 1 ms apart."""

SLOW_ANSWER = 5.0
"""Multiple of the median latency above which a pair is far apart, if it is also `ANSWER_SECONDS` above the median."""
ANSWER_SECONDS = 3e-4

FOREIGN_SHARE = 0.05
"""Share of a healthy link above which other programs' traffic is a finding. Heartbeats and logs use far less."""

USUAL_MTU = 1500
HEADERS_NBYTES, FRAME_NBYTES = 52, 38
"""Bytes of IPv4 and TCP headers with time stamps in a packet, and of Ethernet's framing around it."""


def doubtful_pairs(facts: JobFacts) -> list[tuple[int, int]]:
    """Returns the pairs of nodes to measure again before a check may report them, the worst first.

    At most two pairs of a node are returned, and none that is bad for certain after `CONFIRMED` tries.

    Args:
        facts: Measurements with at least one try of each pair.
    """
    good = facts.good_rate()
    usual = median([pair.latency_seconds for pair in facts.pairs] or [0.0])
    far = min(FAR_SECONDS, max(3 * usual, usual + ANSWER_SECONDS))  # where most pairs are far apart, by itself
    found: list[tuple[float, tuple[int, int]]] = []
    for pair in facts.pairs:
        alone = min(pair.many)
        share = min(
            alone / good / DOUBTFUL,
            min(pair.one) / max(alone, 1.0) / (1.3 * ONE_OF_MANY),
            _both_share(pair) / (1.15 * HALF_DUPLEX),
            1.0 if pair.latency_seconds < far else 0.5,
            0.0 if pair.packets_pass is False else 1.0,
            0.5
            if any(lost > 1 and lost > DOUBTFUL_LOSS * sent for lost, sent in zip(pair.lost, pair.sent, strict=True))
            else 1.0,
        )
        if share < 1.0 and not (share < PLAIN and pair.times >= CONFIRMED):
            found.append((share, (pair.a, pair.b)))
    taken: list[tuple[int, int]] = []
    for _, (a, b) in sorted(found):
        if min(sum(a in each for each in taken), sum(b in each for each in taken)) < 2:
            taken.append((a, b))
    return taken


def rate_confidence(facts: JobFacts, nodes: tuple[int, ...], bytes_per_second: float) -> float:
    """Returns the probability that a measured rate is the link's, and not the speed of this program.

    It depends on the rate that the program reaches over the nodes' loopback.

    Args:
        facts: Measurements of the job.
        nodes: Numbers of the two nodes, or of one.
        bytes_per_second: Rate that was expected between them.
    """
    own = [facts.own_bytes_per_second[node] for node in nodes if node in facts.own_bytes_per_second]
    if not own:
        return 0.7
    return 0.95 if min(own) >= HEADROOM * bytes_per_second else 0.5 if min(own) >= bytes_per_second else 0.2


def slow_links(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports in one finding the nodes whose rate with their best partner is less than 70 % of what it should be.

    It should be what `--link` or the NIC says, or the median of the other nodes' rates if there are two others or more,
    whichever is larger; but no more than half of what the doctor itself reaches over the node's loopback. If no node is
    slow, pairs that are slow although both nodes are fast with others are reported instead.

    Args:
        facts: Measurements of the job.
    """
    names = facts.names
    nodes = [node for node in range(len(names)) if facts.reached(node) is not None]
    best = {node: min(facts.reached(node) or (0.0, 0.0)) for node in nodes}
    slow: dict[int, tuple[float, str]] = {}
    for node in nodes:
        others = [best[each] for each in nodes if each != node]
        usual = median(others) if len(others) > 1 else 0.0
        expected = facts.expected_rate(node) or 0.0
        # Beyond what this program moves inside the node a slow rate says nothing of the link.
        limit = facts.own_bytes_per_second.get(node, float("inf")) / HEADROOM
        wanted, why = max((min(usual, limit), "the other nodes reach"), (min(expected, limit), "the link should give"))
        if wanted and best[node] < SLOW * wanted:
            slow[node] = (wanted, why)
    if not slow:
        yield from _slow_paths(facts, best)
        return
    wanted, why = max(slow.values())
    worst = min(slow, key=best.__getitem__)
    reached = facts.reached(worst) or (0.0, 0.0)
    # A rate belongs to both ends of a pair: of two nodes, or of two with one partner, it is not known which is slow.
    ends = [names[node] for node in slow if best[node] == best[worst]]
    tied = len(ends) > 1 and len(ends) == len(slow)
    where = f"one of {', '.join(ends)}" if tied else names[worst]
    if tied:
        who, pronoun = f"The link of {where} is", "it"
    elif len(slow) == len(nodes):
        who, pronoun = "All links are", "they"
    else:
        who = (
            f"The link of {names[worst]} is"
            if len(slow) == 1
            else f"The links of {listed([names[e] for e in slow])} are"
        )
        pronoun = "it" if len(slow) == 1 else "they"
    on = listed(ends if tied else [names[node] for node in slow])
    nic = _used_nic(facts.nodes[worst][0])
    on_nic = facts.expected_rate(worst)
    evidence = [
        f"{names[worst]} sends {rate(reached[0])} and receives {rate(reached[1])} at best; {why} {rate(wanted)}"
        + ("; both ends share that rate: look at each" if tied else "")
        + (f" (tried {_times(facts, worst)} times)" if _times(facts, worst) > 1 else ""),
    ]
    if on_nic is not None and facts.link_bytes_per_second is None:
        evidence.append(f"the NIC says that its link runs at {rate(on_nic / TCP_SHARE)}")
    yield Diagnosis(
        key="slow_link",
        title=f"{who} {wanted / max(best[worst], 1.0):.1f} times slower than {pronoun} should be",
        confidence=max(rate_confidence(facts, (node,), wanted) for node in slow) if _times(facts, worst) > 1 else 0.5,
        cost_seconds=facts.exchange_seconds(best[worst]) - facts.exchange_seconds(wanted),
        evidence=tuple(evidence),
        fix=(
            f"on {on}: ethtool {nic} | grep -E 'Speed|Duplex'   # is it the NIC's full rate?",
            f"on {on}: ethtool -S {nic} | grep -iE 'err|drop|crc'   # a bad cable, a full switch",
            f"on {on}: tc qdisc show dev {nic}   # a limit that someone left there",
            "in a cloud: the instance type's network rate; another job or a backup on the same link",
        ),
        nodes=tuple(names[node] for node in slow),
        fixed_bytes_per_second=wanted,
    )


def _times(facts: JobFacts, node: int) -> int:
    """Returns how often the pair of a node was measured that was measured most; 1 if there is none."""
    return max((pair.times for pair in facts.pairs if node in (pair.a, pair.b)), default=1)


def _used_nic(first: RankFacts) -> str:
    """Returns the name of the interface that gloo uses on a node, by the facts of its first rank; `eth0` if unknown."""
    return first.gloo_interface or "eth0"


def _confirmed(facts: JobFacts) -> list[PairRates]:
    """Returns the pairs with a confirmed rate. Pairs whose full-size packets are lost have none."""
    return [pair for pair in facts.pairs if pair.times >= CONFIRMED and pair.packets_pass is not False]


def _slow_paths(facts: JobFacts, best: dict[int, float]) -> Iterator[Diagnosis]:
    """Reports in one finding pairs that are slow although both nodes are fast with other nodes.

    Args:
        facts: Measurements of the job.
        best: Node -> the smaller of the rates at which it sends to and receives from its best partner, in bytes per
            second.
    """
    found = [
        pair
        for pair in _confirmed(facts)
        if min(pair.many) < SLOW * (usual := min(best[pair.a], best[pair.b]))
        and has_headroom(facts, (pair.a, pair.b), usual)
    ]
    if not found:
        return
    names = facts.names
    worst = min(found, key=lambda pair: min(pair.many))
    wanted = min(best[worst.a], best[worst.b])
    shared = set.intersection(*({pair.a, pair.b} for pair in found)) if len(found) > 1 else set()
    common = names[min(shared)] if len(shared) == 1 else None
    partners = [names[pair.b if names[pair.a] == common else pair.a] for pair in found]
    yield Diagnosis(
        key="slow_path",
        title=f"The way between {names[worst.a]} and {names[worst.b]} is slow, though both are fast with others"
        if common is None
        else f"{common} is slow with {listed(partners)}, though it is fast with others",
        confidence=rate_confidence(facts, (worst.a, worst.b), wanted),
        cost_seconds=facts.exchange_seconds(min(worst.many)) - facts.exchange_seconds(wanted),
        evidence=(
            (
                f"{rate(min(worst.many))} between {names[worst.a]} and {names[worst.b]}, {rate(wanted)} with "
                f"others; {len(found)} of {len(facts.pairs)} pairs are so"
                + (f", and {common} is in all of them" if common is not None and len(found) > 1 else "")
            ),
        ),
        fix=(
            "put neighbours in the order of ranks behind one switch: a ring passes each slow way once",
            f"traceroute from {names[worst.a]} to {names[worst.b]}   # where the way differs from a fast pair's",
        ),
        nodes=(names[worst.a], names[worst.b]) if common is None else (common,),
    )


def narrow_slot(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports in one finding NICs in use whose PCIe link is slower than their port; nothing on a single node."""
    if len(facts.nodes) < 2:
        return
    # Find the nodes with such a NIC; the one with the slowest PCIe link is described.
    slow = []
    for node, ranks in enumerate(facts.nodes):
        nic = _used(ranks[0])
        if nic is not None and (nic.pcie_bits_per_second or float("inf")) < (nic.bits_per_second or 0.0):
            slow.append((node, nic))
    if not slow:
        return
    node, nic = min(slow, key=lambda each: (each[1].pcie_bits_per_second or 0.0, each[0]))
    port, lanes = (nic.bits_per_second or 1.0) / 8, (nic.pcie_bits_per_second or 1.0) / 8
    names = tuple(facts.names[each] for each, _ in slow)
    # A port whose lanes are split over two interfaces needs both of them; any other NIC needs a wider slot.
    fix = (
        (
            f"RDMA uses both: an address on {nic.name} and on {nic.other_half}, both of their devices in NCCL_IB_HCA",
            f"TCP: export NCCL_SOCKET_IFNAME={nic.name},{nic.other_half}; gloo takes one of them",
        )
        if nic.other_half is not None
        else (
            (
                f"on {names[0]}: lspci -vv -s $(basename $(readlink /sys/class/net/{nic.name}/device)) | grep -E "
                "'LnkCap|LnkSta'   # narrower than the NIC can: another slot, or the slot's bifurcation in the "
                "firmware"
            ),
        )
    )
    title = f"PCIe gives {nic.name} of {listed(names)} {rate(lanes)}, and its port has {rate(port)}"
    if nic.other_half is not None:
        where = f"{nic.name} of {facts.names[node]}"
        title = f"{where} is half of its port: {rate(lanes)} of {rate(port)}, the other half is {nic.other_half}"
    yield Diagnosis(
        key="narrow_slot",
        title=title,
        confidence=0.9,
        cost_seconds=facts.exchange_seconds(lanes * TCP_SHARE) - facts.exchange_seconds(port * TCP_SHARE),
        evidence=(
            (
                f"/sys/class/net/{nic.name}/device/current_link_speed and current_link_width, against the rate "
                "that the port states"
            ),
        ),
        fix=fix,
        nodes=names,
    )


def single_connection(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports that one connection is far slower than several together: clouds limit the rate of a flow.

    One must reach less than 55 % of the rate of several on at least half of the pairs that were measured 3 times or
    more, and the doctor itself must be twice as fast as that rate.
    """
    confirmed = _confirmed(facts)
    # A core that moves little more than several connections do is what limits one: that is no fault of the network.
    limited = [
        pair
        for pair in confirmed
        if min(pair.one) < ONE_OF_MANY * min(pair.many) and has_headroom(facts, (pair.a, pair.b), min(pair.many))
    ]
    if not limited or 2 * len(limited) < len(confirmed):
        return
    one, many = (median(min(getattr(pair, name)) for pair in limited) for name in ("one", "many"))
    yield Diagnosis(
        key="single_connection",
        title=f"One connection reaches {rate(one)}, several together {rate(many)}",
        confidence=rate_confidence(facts, (limited[0].a, limited[0].b), many),
        cost_seconds=facts.exchange_seconds(one) - facts.exchange_seconds(many),
        evidence=(
            (
                f"{len(limited)} of {len(facts.pairs)} pairs of nodes, each tried {limited[0].times} times; gloo "
                "and a flat ring put all gradients on one connection"
            ),
        ),
        fix=(
            "NCCL over sockets: export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4",
            *(
                ('gloo: use init_process_group("gradwire"), which opens a connection for each local rank',)
                if facts.gains_by_gradwire
                else ()
            ),
            "in a cloud: a placement group or compact placement raises the limit of one flow",
        ),
    )


def flapping(facts: JobFacts) -> list[Diagnosis]:
    """Reports NICs and virtual interfaces whose link changed its state more than once during the examination."""
    names = facts.names
    return [
        Diagnosis(
            key="flapping",
            title=f"The link of {nic.name} on {names[node]} goes away and comes back",
            confidence=0.95,
            cost_seconds=facts.exchange_seconds(facts.good_rate()),
            evidence=(f"/sys/class/net/{nic.name}/carrier_changes rose by {nic.link_changes} while the doctor looked",),
            fix=(
                f"on {names[node]}: dmesg | grep {nic.name}; ethtool {nic.name}   # what the driver says of the link",
                "exchange cable, transceiver and the switch's port, one after the other",
            ),
            nodes=(names[node],),
        )
        for node, ranks in enumerate(facts.nodes)
        for nic in ranks[0].interfaces
        if nic.kind in ("nic", "virtual") and nic.link_changes > 1
    ]


def lost_duplex(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports half-duplex links: by the driver, or because both directions at once have half the rate."""
    names = facts.names
    # A driver that says "half" is certain, and makes the measured rates below superfluous.
    found = [
        Diagnosis(
            key="half_duplex",
            title=f"The network card of {names[node]} runs half duplex",
            confidence=0.99,
            cost_seconds=facts.exchange_seconds(facts.good_rate()),
            evidence=(f"/sys/class/net/{nic.name}/duplex says half",),
            fix=(
                (
                    f"on {names[node]}: ethtool -s {nic.name} autoneg on   # and the same on the switch's port: "
                    "one side fixed and one automatic ends in half duplex"
                ),
            ),
            nodes=(names[node],),
        )
        for node, ranks in enumerate(facts.nodes)
        if (nic := ranks[0].interface(ranks[0].gloo_interface)) is not None and nic.duplex == "half"
    ]
    halved = [pair for pair in _confirmed(facts) if _halved(facts, pair)]
    yield from found
    if found or not halved:
        return
    # Name the node that is in all of the halved pairs if there is one, and describe the worst pair.
    blamed = in_all(halved, facts.pairs) or {node for pair in halved for node in (pair.a, pair.b)}
    worst = min(halved, key=_both_share)
    who = listed([names[node] for node in sorted(blamed)])
    yield Diagnosis(
        key="half_duplex",
        title=f"The link of {who} is slow when it sends and receives at once",
        confidence=0.9,
        cost_seconds=facts.exchange_seconds(sum(worst.both) / 2) - facts.exchange_seconds(sum(worst.many) / 2),
        evidence=(
            (
                f"{names[worst.a]} and {names[worst.b]}: {rate(min(worst.many))} one way, "
                f"{rate(sum(worst.both) / 2)} each way when both are used (tried {worst.times} times)"
            ),
        ),
        fix=(
            f"on {who}: ethtool {_used_nic(facts.nodes[worst.a][0])} | grep Duplex   # wanted: Full, on the switch too",
            "a virtual machine: a limit on sent plus received bytes of its network card looks the same",
        ),
        nodes=tuple(names[node] for node in sorted(blamed)),
    )


def _halved(facts: JobFacts, pair: PairRates) -> bool:
    """Returns whether a pair loses rate when both directions are used at once, and the network is what limits it."""
    return _both_share(pair) < HALF_DUPLEX and has_headroom(facts, (pair.a, pair.b), min(pair.many))


def has_headroom(facts: JobFacts, nodes: tuple[int, ...], bytes_per_second: float) -> bool:
    """Returns whether this program is so much faster than a rate that the network limits the rate, and not a core.

    Args:
        facts: Measurements of the job.
        nodes: Numbers of the nodes whose loopback rates are compared; one without a rate counts as fast enough.
        bytes_per_second: Rate between the nodes.
    """
    own = [facts.own_bytes_per_second.get(node, float("inf")) for node in nodes]
    return min(own) >= HEADROOM * bytes_per_second


def _both_share(pair: PairRates) -> float:
    """Returns the rates of both directions at once over those of one direction at a time: 1 is full duplex, 0.5 half.

    Args:
        pair: Rates between two nodes.
    """
    return sum(pair.both) / max(sum(pair.many), 1.0)


def in_all(bad: list[PairRates], pairs: tuple[PairRates, ...]) -> set[int]:
    """Returns the nodes that all bad pairs share and whose confirmed pairs are all bad.

    Args:
        bad: Bad pairs, at least one of `pairs`.
        pairs: All pairs of the job.
    """
    shared = set.intersection(*({pair.a, pair.b} for pair in bad))
    keys = {(pair.a, pair.b) for pair in bad}
    return {
        node
        for node in shared
        if all((pair.a, pair.b) in keys for pair in pairs if node in (pair.a, pair.b) and pair.times >= CONFIRMED)
    }


def far_apart(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports in one finding that nodes are far apart, by the latencies of pairs of nodes.

    A pair is far apart if its latency in one direction is more than 2 ms. With more than two pairs it is so, too, if
    its latency is more than 5 times the median over all pairs and more than 0.3 ms above it. Left out are pairs that
    were measured fewer than 3 times, and pairs of which a node's NIC carries other programs' traffic of 5 % of a
    healthy link's rate or more.

    Args:
        facts: Measurements of the job.

    Yields:
        One finding if a pair is far apart. It names the node that all such pairs share, if there are several and other
        pairs are near; else the pair with the highest latency.
    """
    names = facts.names
    usual = median([pair.latency_seconds for pair in facts.pairs] or [0.0])
    others = usual if len(facts.pairs) > 2 else FAR_SECONDS
    bad = [
        pair
        for pair in facts.pairs
        if pair.times >= CONFIRMED
        # Distance is the latency of an idle link: beside other traffic a packet waits in queues.
        and max(facts.foreign_share(pair.a), facts.foreign_share(pair.b)) < FOREIGN_SHARE
        and (
            pair.latency_seconds > FAR_SECONDS
            or (len(facts.pairs) > 2 and pair.latency_seconds > max(SLOW_ANSWER * usual, usual + ANSWER_SECONDS))
        )
    ]
    if not bad:
        return
    worst = max(bad, key=lambda pair: pair.latency_seconds)
    near = [pair.latency_seconds for pair in facts.pairs if pair not in bad]
    shared = set.intersection(*({pair.a, pair.b} for pair in bad)) if len(bad) > 1 else set()
    compared = (
        f"the usual one of the other pairs has {duration(median(near))}" if near else "all pairs are so far apart"
    )
    if len(facts.pairs) == 1:
        compared = "two machines of one data centre have less than 1 ms"
    # Each bucket passes every link of a ring twice, one message after the other.
    messages = 2 * (len(names) - 1) * max(1, -(-facts.gradient_nbytes // BUCKET_NBYTES))
    yield Diagnosis(
        key="far_apart",
        title=f"{names[min(shared)]} is far from the other nodes: {duration(worst.latency_seconds)} one way"
        if len(shared) == 1 and near
        else f"{names[worst.a]} and {names[worst.b]} are far apart: {duration(worst.latency_seconds)} one way",
        confidence=0.9,
        cost_seconds=messages * max(worst.latency_seconds - min(others, 1e-4), 0.0),
        evidence=(f"the shortest of many round trips, tried {worst.times} times; {compared}",),
        fix=(
            "in a cloud: put all nodes into one zone and one placement group",
            "on your own network: a firewall, VPN or overlay between them (traceroute shows it)",
            "larger buckets wait less often: DistributedDataParallel(..., bucket_cap_mb=100)",
        ),
        nodes=(names[min(shared)],) if len(shared) == 1 and near else (names[worst.a], names[worst.b]),
    )


def packet_sizes(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports full-size packets that are lost, MTUs that differ between nodes, and MTUs below Ethernet's."""
    names = facts.names
    lost = [pair for pair in facts.pairs if pair.packets_pass is False and pair.times >= CONFIRMED]
    mtus = {node: nic.mtu for node, ranks in enumerate(facts.nodes) if (nic := _used(ranks[0])) is not None}
    least = min(mtus, key=mtus.__getitem__, default=0)
    # Lost packets of full size stop a job, so they come before MTUs that only cost time.
    if lost:
        worst = lost[0]
        mtu = worst.packet_nbytes or USUAL_MTU
        name = _used_nic(facts.nodes[worst.a][0])
        yield Diagnosis(
            key="mtu",
            title=f"Packets of {mtu} bytes, as the NICs are set to send them, do not arrive",
            confidence=0.9,
            evidence=(
                (
                    f"{names[worst.a]} to {names[worst.b]}: small packets come back, whole ones of {mtu} bytes do "
                    f"not ({len(lost)} of {len(facts.pairs)} pairs)"
                ),
            ),
            fix=(
                f"on every node: ip link set {name} mtu {_below(mtu)}   # or raise the switches' MTU to {mtu}",
                f"ping -M do -s {mtu - 28} ADDRESS   # comes back once it is right",
            ),
            nodes=(names[worst.a], names[worst.b]),
            stops=True,
        )
    # Different MTUs: the nodes that differ from most others are named.
    elif len(set(mtus.values())) > 1:
        usual = max(set(mtus.values()), key=lambda mtu: (list(mtus.values()).count(mtu), mtu))
        odd = [node for node, mtu in mtus.items() if mtu != usual]
        good = facts.good_rate()
        yield Diagnosis(
            key="mtu",
            title=f"{listed([names[node] for node in odd])} {verb(odd, 'send')} packets of another size",
            confidence=0.9,
            cost_seconds=facts.exchange_seconds(good) * (_share(max(mtus.values())) / _share(min(mtus.values())) - 1),
            evidence=tuple(
                f"{names[node]}: MTU {mtu} on {_used_nic(facts.nodes[node][0])}" for node, mtu in list(mtus.items())[:6]
            ),
            fix=(
                f"on {names[odd[0]]}: ip link set {_used_nic(facts.nodes[odd[0]][0])} mtu {usual}   # as the others",
                "all switches on the way must carry the largest MTU, or large packets are lost without a word",
            ),
            nodes=tuple(names[node] for node in odd),
        )
    # Equal MTUs, but smaller than Ethernet's, as overlay networks have them.
    elif mtus and mtus[least] < 1400 and len(names) > 1:
        node, mtu = least, mtus[least]
        yield Diagnosis(
            key="mtu",
            title=f"The network's packets are small: {mtu} bytes",
            confidence=0.8,
            cost_seconds=facts.exchange_seconds(facts.good_rate()) * (_share(USUAL_MTU) / _share(mtu) - 1),
            evidence=(
                f"MTU {mtu} on {_used_nic(facts.nodes[node][0])} of {names[node]}; Ethernet has 1500, often 9000",
            ),
            fix=(
                f"ip link set {_used_nic(facts.nodes[node][0])} mtu 1500   # where all switches on the way carry it",
                "in Kubernetes: the MTU of the CNI plug-in (calico: veth_mtu, cilium: --mtu)",
            ),
            nodes=(names[node],),
        )


def _used(first: RankFacts) -> NetworkInterface | None:
    """Returns the interface that gloo uses on a node; None if it is unknown, the loopback or a bridge."""
    nic = first.interface(first.gloo_interface)
    return None if nic is None or nic.kind in ("loopback", "bridge") else nic


def _share(mtu: int) -> float:
    """Returns the payload's share of the bytes on the wire."""
    return (mtu - HEADERS_NBYTES) / (mtu + FRAME_NBYTES)


def _below(mtu: int) -> int:
    """Returns the MTU to try next if packets of this MTU are lost: Ethernet's 1500, or IPv6's least one, 1280."""
    return USUAL_MTU if mtu > USUAL_MTU else 1280


def wrong_interface(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports that gloo or NCCL uses a slower interface than the nodes have, or one that leads to no other node.

    Also a GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME that names no interface of a node, a gloo that does not connect, and
    a NIC over which nothing was measured and that its driver says to be twice as fast. An interface is slower if
    another one was measured to be more than 1.4 times as fast.
    """
    names = facts.names
    found = [*_unknown_interface(facts), *_nowhere(facts)]
    if found:
        yield from found
        return
    reached = {node: min(facts.reached(node) or (0.0, 0.0)) for node in range(len(names))}
    better = [
        each
        for each in facts.others
        if each.bytes_per_second > 1.4 * (now := min(reached[each.a], reached[each.b])) > 0
        and has_headroom(facts, (each.a, each.b), now)
    ]
    if better:
        best = max(better, key=lambda each: each.bytes_per_second)
        used = _used_nic(facts.nodes[best.a][0])
        now = min(reached[best.a], reached[best.b])
        yield Diagnosis(
            key="wrong_interface",
            title=f"The job uses {used}, and {best.interface} is {best.bytes_per_second / now:.1f} times faster",
            confidence=0.95,
            cost_seconds=facts.exchange_seconds(now) - facts.exchange_seconds(best.bytes_per_second),
            fixed_bytes_per_second=best.bytes_per_second,
            evidence=(
                (
                    f"{names[best.a]} to {names[best.b]}: {rate(now)} over {used}, {rate(best.bytes_per_second)} "
                    f"over {best.interface}"
                ),
                _why(facts.nodes[best.a][0]),
            ),
            fix=(
                f"on every node: export GLOO_SOCKET_IFNAME={best.interface} NCCL_SOCKET_IFNAME={best.interface}",
                "mpirun: -x GLOO_SOCKET_IFNAME -x NCCL_SOCKET_IFNAME; Slurm: sbatch --export=ALL",
            ),
            nodes=tuple(names),
        )
    else:
        yield from _slower_nic(facts)


def _why(first: RankFacts) -> str:
    """Returns a clause that says why gloo uses its interface: by GLOO_SOCKET_IFNAME, or by the host name."""
    if given := first.variables.get("GLOO_SOCKET_IFNAME"):
        return f"GLOO_SOCKET_IFNAME={given} says so"
    return f"GLOO_SOCKET_IFNAME is not set, so gloo takes the one that the name {first.hostname} leads to"


def _unknown_interface(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME that names no interface of a node."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        bad = []
        for node, ranks in enumerate(facts.nodes):
            value = ranks[0].variables.get(variable)
            if value is None or not ranks[0].interfaces or (variable[0] == "N" and not facts.has_gpus):
                continue
            if variable[0] == "N":
                missing = ranks[0].nccl_interface is None
            else:
                missing = any(ranks[0].interface(name) is None for name in value.split(","))
            if missing:
                bad.append((node, value))
        if bad:
            node, value = bad[0]
            there = [each.name for each in facts.nodes[node][0].interfaces if each.kind != "loopback"]
            yield Diagnosis(
                key="wrong_interface",
                title=f"{variable}={value} names no network interface of {facts.names[node]}",
                confidence=0.98,
                evidence=(f"{facts.names[node]} has {listed(there) or 'no interface'}",),
                fix=(f"export {variable}={there[0] if there else 'eth0'}   # or unset it",),
                nodes=tuple(facts.names[each] for each, _ in bad),
                stops=True,
            )


def _nowhere(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports that gloo did not connect, or would use the loopback or a container's bridge between several nodes."""
    names = facts.names
    many = len(names) > 1
    # Report nodes on which gloo would use an interface that leads nowhere, although they have a NIC.
    inside = []
    for node, ranks in enumerate(facts.nodes):
        used = ranks[0].interface(ranks[0].gloo_interface)
        nowhere = used is not None and used.kind in ("loopback", "bridge") and not ranks[0].gloo_seen
        error = next((each.gloo_error for each in ranks if each.gloo_error), None)
        nics = _leading_out(ranks[0])
        if nowhere and (error or not many) and nics and _chosen(ranks[0]):
            inside.append(node)
    if inside:
        first = facts.nodes[inside[0]][0]
        nic = _leading_out(first)[0]
        error = next((each.gloo_error for each in facts.ranks if each.gloo_error), None)
        where = listed([names[node] for node in inside])
        yield Diagnosis(
            key="wrong_interface",
            title=f"gloo would use {first.gloo_interface} on {where}, which no other machine can reach",
            confidence=0.9 if error else 0.6,
            evidence=tuple(text for text in (_why(first), error) if text),
            fix=(
                f"export GLOO_SOCKET_IFNAME={nic} NCCL_SOCKET_IFNAME={nic}",
                f"or in /etc/hosts: the address of {nic} beside {first.hostname}, in place of 127.0.1.1",
            ),
            nodes=tuple(names[node] for node in inside),
            stops=bool(error),
        )
        return
    # Otherwise report the first rank on which gloo failed to connect.
    errors = [(place, each) for place, ranks in enumerate(facts.nodes) for each in ranks if each.gloo_error]
    if errors:
        node, failed = errors[0]
        yield Diagnosis(
            key="no_connection",
            title="gloo cannot connect the ranks, although the launcher's store can",
            confidence=0.9,
            evidence=(f"rank {failed.rank} on {names[node]}: {failed.gloo_error}",),
            fix=(
                "a firewall between the nodes: gloo and NCCL listen on any port; open them all between the nodes",
                "interfaces that do not reach each other: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME alike",
            ),
            nodes=(names[node],),
            stops=True,
        )


def _chosen(first: RankFacts) -> bool:
    """Returns whether gloo's interface is worth a finding: a variable chose it, or gloo could not connect over it."""
    return "GLOO_SOCKET_IFNAME" in first.variables or first.gloo_error is not None


def _leading_out(first: RankFacts) -> list[str]:
    """Returns the names of a node's interfaces over which other machines may be reached, in their order.

    These are NICs and virtual interfaces (not bridges or the loopback) that are up and have an address.

    Args:
        first: Facts of the node's first rank.
    """
    return [each.name for each in first.interfaces if each.kind in ("nic", "virtual") and each.up and each.addresses]


def _slower_nic(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports a NIC that is faster than the one in use by the drivers, and over which nothing was measured."""
    for node, ranks in enumerate(facts.nodes):
        first = ranks[0]
        used = first.interface(first.gloo_interface)
        if used is None or used.bits_per_second is None or len(facts.nodes) < 2:
            continue
        measured = {each.interface for each in facts.others}
        faster = [
            each
            for each in first.interfaces
            if each.up
            and each.addresses
            and each.name not in measured
            and (each.bits_per_second or 0) >= 2 * used.bits_per_second
        ]
        if faster:
            best = max(faster, key=lambda each: each.bits_per_second or 0)
            yield Diagnosis(
                key="wrong_interface",
                title=f"{facts.names[node]} has a faster NIC than the one in use",
                confidence=0.6,
                cost_seconds=facts.exchange_seconds(used.bits_per_second / 8)
                - facts.exchange_seconds((best.bits_per_second or 1) / 8),
                evidence=(
                    (
                        f"{used.name} is used at {rate(used.bits_per_second / 8)}, {best.name} has "
                        f"{rate((best.bits_per_second or 0) / 8)}; whether it leads to the others was not measured"
                    ),
                ),
                fix=(f"export GLOO_SOCKET_IFNAME={best.name} NCCL_SOCKET_IFNAME={best.name}",),
                nodes=(facts.names[node],),
            )
            return


CHECKS = (wrong_interface, slow_links, narrow_slot, single_connection, flapping, lost_duplex, far_apart, packet_sizes)
