"""What the facts of a job say is wrong: pure functions, one file for each kind of cause."""

from collections.abc import Callable, Iterable

from gradwire.bench.doctor.checks import cards, machine, network, placement, settings, software, steps, transfers
from gradwire.bench.doctor.facts import Diagnosis, JobFacts

CHECKS: tuple[Callable[[JobFacts], Iterable[Diagnosis]], ...] = (
    *steps.CHECKS,
    *transfers.CHECKS,
    *network.CHECKS,
    *cards.CHECKS,
    *placement.CHECKS,
    *machine.CHECKS,
    *settings.CHECKS,
    *software.CHECKS,
)


EXPLAINS: dict[str, tuple[str, ...]] = {
    "unreachable": ("no_connection", "slow_exchange"),
    "mtu": ("slow_exchange", "packet_loss"),
    "packet_loss": (
        "slow_link",
        "slow_path",
        "single_connection",
        "half_duplex",
        "tcp_buffers",
        "slow_exchange",
    ),
    "flapping": ("slow_link", "slow_path", "single_connection", "half_duplex", "packet_loss", "slow_exchange"),
    "tcp_buffers": ("slow_link", "slow_path", "single_connection", "half_duplex", "slow_exchange"),
    "half_duplex": ("far_apart", "single_connection", "slow_path", "slow_exchange"),
    "far_apart": ("half_duplex", "single_connection", "slow_path", "slow_exchange"),
    "slow_link": ("half_duplex", "single_connection", "far_apart", "slow_exchange"),
    "wrong_interface": ("slow_link", "slow_exchange", "idle_card"),
    "rank_order": ("slow_exchange",),
    "crowded_cores": ("slow_exchange",),
    "slow_node": ("slow_exchange",),
    "variable": ("slow_exchange",),
}
"""Cause -> what it alone makes look wrong as well: that is not said beside it, where it is of no other node."""

EVERYWHERE = ("unreachable", "mtu")
"""A way that carries nothing keeps a whole group of ranks from connecting, whoever of them complains."""


def diagnose(facts: JobFacts) -> list[Diagnosis]:
    """What is wrong, the dearest first: what stops a job, then cost times sureness.

    Args:
        facts: Of the job; with `CHECKS` nothing else is looked at.
    """
    found = [diagnosis for check in CHECKS for diagnosis in check(facts)]
    found = [each for each in found if not any(_explains(cause, each, facts) for cause in found)]
    return sorted(found, key=lambda each: (not each.stops, -each.cost_seconds * each.sure, -each.sure, each.key))


def _explains(cause: Diagnosis, symptom: Diagnosis, facts: JobFacts) -> bool:
    """Whether a symptom is the cause's, and costs no more than it: a dearer one is worth a line of its own."""
    if symptom.key not in EXPLAINS.get(cause.key, ()):
        return False
    if cause.key in EXPLAINS.get(symptom.key, ()) and symptom.cost_seconds > cause.cost_seconds:
        return False
    if cause.stops and cause.key in EVERYWHERE:
        return True
    return not symptom.nodes or not cause.nodes or len(facts.names) == 2 or bool(set(cause.nodes) & set(symptom.nodes))
