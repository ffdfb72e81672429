"""Checks: functions from the measurements of a job to findings, in one module for each kind of cause.

A new check goes into such a module and its `CHECKS`; a new module into `CHECKS` here. The key of its finding has an
entry in `basis.BASES`, and one in each table below that its cost belongs to: what it explains or is explained by
(`EXPLAINS`; on any node: `EVERYWHERE`), and of what its cost is a part (`OF_THE_EXCHANGE`, `OF_THE_CARDS`,
`OF_THE_COMPUTATION`). A fact that is to be measured twice before it counts is asked for again by examine.py
(`suspect_nodes`, and `doubtful_pairs` of network.py). Its test plants
such a fault in a healthy job: an entry of `FAULTS` in tests/bench/doctor/test_checks.py. Checks do not import torch,
and write the key as a literal in `Diagnosis(key=...)`, by which the tests find them.

What it looks at is a field of a dataclass of facts.py, which comes from one of these:

- `RankFacts`: what a rank reads on its machine, in local.py;
- `JobFacts`: what ranks measure together, in examine.py; of one machine without a launcher, in alone.py;
- `ScriptRun`: what is seen of the user's script: script.py runs it and split.py samples its steps, in its processes;
  wanted.py merges the runs of all ranks into the facts.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from gradwire.bench.doctor.checks import machine, network, nics, placement, settings, software, steps, transfers
from gradwire.bench.doctor.facts import Diagnosis, JobFacts

CHECKS: tuple[Callable[[JobFacts], Iterable[Diagnosis]], ...] = (
    *steps.CHECKS,
    *transfers.CHECKS,
    *network.CHECKS,
    *nics.CHECKS,
    *placement.CHECKS,
    *machine.CHECKS,
    *settings.CHECKS,
    *software.CHECKS,
)


EXPLAINS: dict[str, tuple[str, ...]] = {
    "unreachable": ("no_connection", "slow_exchange"),
    "mtu": ("slow_exchange", "packet_loss"),
    "foreign_traffic": (
        "slow_link",
        "slow_path",
        "single_connection",
        "half_duplex",
        "packet_loss",
        "slow_exchange",
    ),
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
    "slow_path": ("half_duplex", "single_connection", "slow_exchange"),
    "single_connection": ("slow_exchange",),
    "wrong_interface": ("slow_link", "slow_exchange", "idle_nic"),
    "rank_order": ("slow_exchange",),
    "oversubscribed_cores": ("slow_exchange",),
    "slow_node": ("slow_exchange", "late_rank"),
    "unused_parameters": ("many_exchanges",),
    "variable": ("slow_exchange",),
}
"""Key of a cause -> keys of its symptoms on the same nodes. A cause explains its symptoms up to its own cost."""

EVERYWHERE = ("unreachable", "mtu")
"""Keys of causes that stop a whole process group, so that they explain symptoms on any node."""

OF_THE_EXCHANGE = (
    "slow_link",
    "slow_path",
    "narrow_slot",
    "single_connection",
    "half_duplex",
    "far_apart",
    "packet_loss",
    "tcp_buffers",
    "wrong_interface",
    "idle_nic",
    "foreign_traffic",
    "slow_exchange",
    "rank_order",
)
"""Keys of findings whose cost is a part of the all-reduce, and so at most the measured one."""

OF_THE_CARDS = (*(key for key in OF_THE_EXCHANGE if key not in ("foreign_traffic", "slow_exchange")), "mtu", "flapping")
"""Keys of findings whose cost is that of gradients over network cards."""

OF_THE_COMPUTATION = ("slow_node", "oversubscribed_cores", "slow_gpu", "shared_gpu")
"""Keys of findings whose cost is a share of what a step computes. Without a known step that is assumed to take as long
as the exchange, so these findings come after those whose cost was measured."""

REMARK_SHARE = 0.05
"""Share of a step, or of the all-reduce if no step is known, below which a finding is a remark. Two runs of one healthy
step differ by as much (2-core EPYC VM, 2026-11-28)."""


def diagnose(facts: JobFacts) -> list[Diagnosis]:
    """Runs all checks and ranks the findings.

    Returns:
        First what stops a job, then faults with a measured cost, then those with an assumed one, then remarks; within
        each by cost times confidence.

    Args:
        facts: Measurements of the job; the checks read nothing else.
    """
    # Collect the findings, with costs of at most what was measured. Between hosts of one NVLink domain only what stops
    # connections counts: gradients go over NVLink there, whatever the network cards give.
    carrying = facts.without_pairs_in_domains()
    found = [
        _at_most_measured(diagnosis, facts)
        for check in CHECKS
        for diagnosis in check(facts if check is network.packet_sizes else carrying)
    ]
    if facts.joined_by_nvlink:
        found = [each for each in found if each.stops or each.key not in OF_THE_CARDS]
    least = REMARK_SHARE * _whole_seconds(facts)
    # Take from each symptom what its causes cost; drop it if less than a remark is left.
    left: list[Diagnosis] = []
    # Invariant: a cause that a more expensive one explains explains nothing itself.
    causes = sorted(found, key=lambda each: (each.stops, each.cost_seconds), reverse=True)
    gone: list[Diagnosis] = []
    for each in causes:
        explaining = [cause for cause in causes if cause not in gone and _explains(cause, each, facts)]
        rest = (
            0.0
            if any(cause.stops for cause in explaining)
            else each.cost_seconds - sum(cause.cost_seconds for cause in explaining)
        )
        if explaining and rest <= least:
            gone.append(each)
        else:
            left.append(replace(each, cost_seconds=rest) if explaining else each)
    # Mark what costs nothing, or too little, as a remark: it does not change the exit status.
    left = [
        replace(each, remark=each.remark or (not each.cost_seconds or each.cost_seconds < least))
        if not each.stops and not each.wrong
        else each
        for each in left
    ]
    return sorted(left, key=lambda each: _report_order(each, facts))


def _report_order(each: Diagnosis, facts: JobFacts) -> tuple[bool, bool, bool, float, float, str]:
    """Returns the sort key of a finding: the smallest comes first in the report.

    First what stops a job, then faults with a measured cost, then those with an assumed one, then remarks; within each
    the largest cost times confidence first.

    Args:
        each: The finding.
        facts: Measurements of the job; costs of computation are assumed if they have no step time.
    """
    assumed = facts.step_seconds is None and each.key in OF_THE_COMPUTATION
    weight = each.cost_seconds * each.confidence
    return not each.stops, each.remark, assumed, -weight, -each.confidence, each.key


def _whole_seconds(facts: JobFacts) -> float:
    """Returns the seconds of a step, or of an all-reduce if no step is known; 0 on one node without a step."""
    if facts.step_seconds is not None:
        return facts.step_seconds
    if len(facts.nodes) < 2:
        return 0.0
    return facts.all_reduce_seconds or facts.exchange_seconds(facts.good_rate())


def _at_most_measured(each: Diagnosis, facts: JobFacts) -> Diagnosis:
    """Returns the finding with its cost limited to the measured all-reduce and the script's step."""
    most = facts.all_reduce_seconds if each.key in OF_THE_EXCHANGE else None
    if facts.script_runs and facts.step_seconds is not None:
        most = min(facts.step_seconds, float("inf") if most is None else most)
    return each if most is None or each.cost_seconds <= most else replace(each, cost_seconds=most)


def _explains(cause: Diagnosis, symptom: Diagnosis, facts: JobFacts) -> bool:
    """Returns whether one finding may cause another, by `EXPLAINS`.

    The two must have a node in common, unless the cause stops the whole process group (`EVERYWHERE`), one of them names
    no node, or the job has just two nodes. Of two that explain each other the more expensive is the cause.
    """
    if symptom.key not in EXPLAINS.get(cause.key, ()):
        return False
    if cause.key in EXPLAINS.get(symptom.key, ()) and symptom.cost_seconds > cause.cost_seconds:
        return False
    if cause.stops and cause.key in EVERYWHERE:
        return True
    return not symptom.nodes or not cause.nodes or len(facts.names) == 2 or bool(set(cause.nodes) & set(symptom.nodes))
