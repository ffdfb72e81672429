"""Checks of nodes with several NICs: one that carries nothing, and NCCL's setting for NICs in different networks."""

from collections.abc import Iterator

from gradwire.bench.doctor.checks.network import has_headroom
from gradwire.bench.doctor.facts import Diagnosis, JobFacts, RankFacts
from gradwire.topology.gdr.nccl import name_matches
from gradwire.topology.wording import listed, rate

WORTH = 0.1
"""Least rate of an idle NIC that is reported, as a share of the rate of the NIC in use."""

ANOTHER = 1.4
"""Multiple of the rate in use. An unused NIC that is faster than that is a finding `wrong_interface` instead; if both
NICs together are slower than that, the finding is only a remark."""


def idle_nic(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports the fastest NIC that reaches other nodes and that neither gloo nor, on GPUs, NCCL uses.

    Its rate must be 10 % to 140 % of the rate in use; a faster one is a finding of `wrong_interface`.
    """
    names = facts.names
    # Find the unused NICs that would add something, and that this program is fast enough to judge.
    used = {node: min(facts.reached(node) or (0.0, 0.0)) for node in range(len(names))}
    idle = []
    for each in facts.others:
        now = min(used[each.a], used[each.b])
        first = facts.nodes[each.a][0]
        takes_it = _nccl_takes(first, each.interface) if facts.has_gpus else _gloo_takes(first, each.interface)
        both = now + each.bytes_per_second
        if (
            now
            and WORTH * now <= each.bytes_per_second <= ANOTHER * now
            and not takes_it
            and has_headroom(facts, (each.a, each.b), both)
        ):
            idle.append((each, now))
    if not idle:
        return
    # Report the fastest of them.
    best, now = max(idle, key=lambda found: found[0].bytes_per_second)
    first = facts.nodes[best.a][0]
    nic = first.gloo_interface or "eth0"
    together = now + best.bytes_per_second
    yield Diagnosis(
        key="idle_nic",
        title=f"{best.interface} stands idle: with it the nodes would have {together / now:.1f} times the rate",
        confidence=0.8,
        cost_seconds=facts.exchange_seconds(now) - facts.exchange_seconds(together),
        evidence=(
            (
                f"{names[best.a]} to {names[best.b]}: {rate(now)} over {nic}, {rate(best.bytes_per_second)} over "
                f"{best.interface}"
            ),
            _why(first, facts.has_gpus),
        ),
        fixed_bytes_per_second=together,
        # A slow second interface is usually for management: worth a word, and no fault.
        remark=together < ANOTHER * now,
        fix=_fix(first, nic, best.interface, facts.has_gpus),
        nodes=tuple(names),
    )


def _gloo_takes(first: RankFacts, interface: str) -> bool:
    """Returns whether the interface is one of those in GLOO_SOCKET_IFNAME."""
    return interface in first.variables.get("GLOO_SOCKET_IFNAME", "").split(",")


def _nccl_takes(first: RankFacts, interface: str) -> bool:
    """Returns whether NCCL uses the interface: without NCCL_SOCKET_IFNAME it uses all that reach other hosts."""
    given = first.variables.get("NCCL_SOCKET_IFNAME")
    return not given or name_matches(given, interface)


def _why(first: RankFacts, on_gpus: bool) -> str:
    if on_gpus:
        return f"NCCL_SOCKET_IFNAME={first.variables.get('NCCL_SOCKET_IFNAME')} leaves it out"
    if given := first.variables.get("GLOO_SOCKET_IFNAME"):
        return f"GLOO_SOCKET_IFNAME={given} leaves it out"
    return "gloo takes one interface, and nothing has joined the two"


def _fix(first: RankFacts, nic: str, other: str, on_gpus: bool) -> tuple[str, ...]:
    if on_gpus:
        return (
            f"export NCCL_SOCKET_IFNAME={nic},{other}   # or unset it: NCCL then takes all that lead out",
            "RDMA: export NCCL_IB_HCA=... with the devices of both NICs, or unset it",
        )
    return (
        f"bond them on every node: ip link add bond0 type bond; ip link set {nic} master bond0, and {other}",
        f"or MPTCP (Linux 5.6, mptcpd): ip mptcp endpoint add ADDRESS dev {other} subflow; mptcpize run torchrun ...",
        f"with gloo alone: export GLOO_SOCKET_IFNAME={nic},{other}   # in turns, as if they were alike",
    )


def cross_nic(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports NCCL_CROSS_NIC=1 on nodes whose NICs are in different networks and may not reach each other."""
    if not facts.has_gpus or len(facts.nodes) < 2:
        return
    told = [ranks[0] for ranks in facts.nodes if ranks[0].variables.get("NCCL_CROSS_NIC", "").strip() == "1"]
    apart = [each for each in told if len(_networks(each)) > 1]
    if not apart:
        return
    names = [each.hostname for each in apart]
    yield Diagnosis(
        key="variable",
        title="NCCL_CROSS_NIC=1 joins NICs of different networks, which may not reach each other",
        confidence=0.5,
        evidence=(
            f"{names[0]} has NICs in {listed(_networks(apart[0]))}",
            "NCCL user guide, NCCL_CROSS_NIC: 0 where each NIC has a network of its own, 1 where all share one",
        ),
        fix=("unset NCCL_CROSS_NIC   # NCCL's own 2 keeps to like NICs where that is possible",),
        nodes=tuple(names),
    )


def _networks(first: RankFacts) -> list[str]:
    """Returns the IPv4 networks of a node's NICs that are up, each once, as their first three numbers: `10.0.1`.

    Networks of 24 bits are assumed, and only a NIC's first address counts.

    Args:
        first: Facts of the node's first rank.
    """
    nics = [each for each in first.interfaces if each.kind == "nic" and each.up]
    four = [address for each in nics for address in each.addresses[:1] if "." in address]
    return sorted({address.rpartition(".")[0] for address in four})


CHECKS = (idle_nic, cross_nic)
