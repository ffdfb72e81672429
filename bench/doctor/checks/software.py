"""Versions that differ between the ranks, ranks that are not there, backends that fail."""

from collections import Counter

from gradwire.bench.doctor.checks.words import listed, verb
from gradwire.bench.doctor.facts import Diagnosis, JobFacts

GRAVE = ("torch", "nccl", "gradwire")
"""Both ends of a connection must speak alike: other versions may hang or refuse."""


def versions(facts: JobFacts) -> list[Diagnosis]:
    """One node runs other software than the others."""
    found = []
    for library in ("torch", "nccl", "gradwire", "cuda", "driver", "python"):
        by_node = {
            name: ranks[0].versions[library]
            for name, ranks in zip(facts.names, facts.nodes, strict=True)
            if library in ranks[0].versions
        }
        votes = Counter(by_node.values())
        if len(votes) < 2:
            continue
        usual = votes.most_common(1)[0][0]
        odd = [name for name, version in by_node.items() if version != usual]
        grave = library in GRAVE
        found.append(
            Diagnosis(
                key="versions",
                title=f"{listed(odd)} {verb(odd, 'run')} {library} {by_node[odd[0]]}, the others {usual}",
                sure=0.95 if grave else 0.6,
                evidence=tuple(
                    f"{version}: {count} of {len(by_node)} nodes" for version, count in votes.most_common(4)
                ),
                remedy=(
                    f"on {listed(odd)}: install {library} {usual}, or start all nodes from one image or environment",
                    *(("a job of mixed versions may hang, refuse to connect, or compute other bits",) if grave else ()),
                ),
                nodes=tuple(odd),
            )
        )
    return found


def missing(facts: JobFacts) -> list[Diagnosis]:
    """Ranks that never came."""
    if not facts.missing_ranks:
        return []
    ranks = listed(facts.missing_ranks)
    return [
        Diagnosis(
            key="missing_ranks",
            title=f"Rank {ranks} did not come" if len(facts.missing_ranks) == 1 else f"Ranks {ranks} did not come",
            sure=0.99,
            evidence=("all other ranks reached the launcher's store and waited 30 s",),
            remedy=(
                "was the command started on every node, with the same MASTER_ADDR and MASTER_PORT?",
                "a firewall: nc -zv $MASTER_ADDR $MASTER_PORT   # from the node that is missing",
            ),
            stops=True,
        )
    ]


def failing_backends(facts: JobFacts) -> list[Diagnosis]:
    """An all-reduce that failed, where no other check says why."""
    lost = any(pair.packets_pass is False for pair in facts.pairs)
    return [
        Diagnosis(
            key="backend_fails",
            title=f"The backend {each.backend} cannot run an all-reduce here",
            sure=0.95,
            evidence=(f"rank {each.rank}: {each.error}",),
            remedy=("what the error says; then run gradwire doctor again",),
            stops=each.backend in ("gloo", "nccl"),
        )
        for each in facts.backends
        if each.error and "shared memory" not in each.error and not lost
    ]


CHECKS = (versions, missing, failing_backends)
