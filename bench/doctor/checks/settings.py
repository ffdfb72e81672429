"""Checks of environment variables: harmful ones, by the table of topology/nccl_variables.py, and those that differ."""

from collections.abc import Iterator

from gradwire.bench.doctor.facts import Diagnosis, JobFacts
from gradwire.topology.nccl_variables import HARMFUL
from gradwire.topology.wording import listed

MAY_DIFFER = ("_SOCKET_IFNAME", "_IB_HCA", "_TOPO_FILE", "_DEBUG", "_HOSTID", "VISIBLE_DEVICES", "_CONF_FILE")
"""Endings of names that may differ between ranks: settings of a node, or without effect on what ranks choose."""

NO_GPUS = "no rank has a GPU here: it costs nothing until one has"


def harmful_variables(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports environment variables that are set to a value that `topology/nccl_variables.py` lists as harmful."""
    for rule in HARMFUL:
        ranks = [each for each in facts.ranks if rule.name in each.variables and rule.hurts(each.variables[rule.name])]
        if not ranks:
            continue
        idle = rule.gpus and not facts.has_gpus
        nothing = NO_GPUS if idle else ""
        if rule.name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL") and facts.no_gpu_has_peers:
            nothing = (
                "it costs nothing: the driver says that no GPU here reaches another one directly, with it or without"
            )
        exchange = facts.exchange_seconds(facts.good_rate()) if len(facts.nodes) > 1 else 0.0
        nodes = tuple(dict.fromkeys(each.hostname for each in ranks))
        who = "all ranks" if len(ranks) == len(facts.ranks) else f"{len(ranks)} of {len(facts.ranks)} ranks"
        yield Diagnosis(
            key="variable",
            title=f"{rule.name}={ranks[0].variables[rule.name]}: {rule.why}",
            confidence=rule.confidence,
            cost_seconds=0.0 if nothing else rule.exchange_share * exchange + rule.step_share * facts.compute_seconds,
            evidence=(
                f"set for {who} on {listed(nodes)} (what it does: {rule.source})",
                *rule.caution,
                nothing or "the cost is an estimate: a run without it would tell",
            ),
            fix=rule.advice,
            nodes=nodes,
        )


def differing_variables(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports variables of NCCL that differ between ranks, though these must make the same choices by them.

    Variables of a node's devices, and of debugging, may differ (`MAY_DIFFER`).
    """
    names = {name for each in facts.ranks for name in each.variables if name.startswith("NCCL_")}
    for name in sorted(names):
        if name.endswith(MAY_DIFFER) or "_DEBUG" in name:
            continue
        values = {each.variables.get(name, "not set") for each in facts.ranks}
        if len(values) < 2:
            continue
        yield Diagnosis(
            key="variables_differ",
            title=f"{name} is not the same on all ranks: {listed(sorted(values))}",
            confidence=0.7,
            evidence=("NCCL's ranks choose algorithms each for itself: other settings mean a hang or an error",),
            fix=("mpirun: -x NAME   Slurm: --export=ALL   ssh: set it in the job's script, not in a shell's profile",),
            nodes=tuple(dict.fromkeys(e.hostname for e in facts.ranks if name in e.variables)),
            stops=facts.has_gpus,
        )


CHECKS = (harmful_variables, differing_variables)
