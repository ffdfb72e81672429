"""Checks of the software: versions that differ between nodes, ranks that did not join, backends that fail."""

from collections import Counter
from collections.abc import Iterator

from gradwire.bench.doctor.facts import Diagnosis, JobFacts
from gradwire.topology.wording import listed, ranks_in_words, verb

GRAVE = ("torch", "nccl", "gradwire")
"""Libraries whose versions must be equal on both ends of a connection: unlike ones may hang, refuse each other, or add
up other bits, so that they are a fault although they cost no time."""


def versions(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports nodes with a rank that has another version of a library than most ranks."""
    for library in ("torch", "nccl", "gradwire", "cuda", "driver", "python"):
        by_rank = [
            (name, each.versions[library])
            for name, ranks in zip(facts.names, facts.nodes, strict=True)
            for each in ranks
            if library in each.versions
        ]
        votes = Counter(version for _, version in by_rank)
        if len(votes) < 2:
            continue
        usual = votes.most_common(1)[0][0]
        odd = list(dict.fromkeys(name for name, version in by_rank if version != usual))
        theirs = next(version for _, version in by_rank if version != usual)
        grave = library in GRAVE
        yield Diagnosis(
            key="versions",
            title=f"{listed(odd)} {verb(odd, 'run')} {library} {theirs}, the others {usual}",
            confidence=0.95 if grave else 0.6,
            evidence=tuple(f"{version}: {count} of {len(by_rank)} ranks" for version, count in votes.most_common(4)),
            fix=(
                f"on {listed(odd)}: install {library} {usual}, or start all nodes from one image or environment",
                *(("a job of mixed versions may hang, refuse to connect, or compute other bits",) if grave else ()),
            ),
            nodes=tuple(odd),
            wrong=grave,
        )


def missing(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports ranks that did not join: those that reported their start, and those that did not."""
    slow = [rank for rank in facts.missing_ranks if rank in facts.started_ranks]
    absent = [rank for rank in facts.missing_ranks if rank not in facts.started_ranks]
    waited = f"all other ranks reached the launcher's store and waited {facts.waited_seconds:.0f} s"
    # Ranks that have started still import torch: their file system is slow.
    if slow:
        hosts = tuple(dict.fromkeys(facts.started_ranks[rank] for rank in slow))
        yield Diagnosis(
            key="missing_ranks",
            title=f"{ranks_in_words(slow).capitalize()} started on {listed(hosts)}, and did not finish importing torch",
            confidence=0.95,
            evidence=(f"it said so before it began to import torch; {waited}",),
            fix=(
                f"on {hosts[0]}: time python -c 'import torch'   # twice: a cold network file system is slow once",
                "copy the Python environment to a local disk, or start from a container image",
            ),
            nodes=hosts,
            stops=True,
        )
    # The others were not started, or cannot reach the first node; torchrun's agents have ruled the latter out.
    if absent:
        agents = (
            ("torchrun's agents have met before they start ranks, so no firewall keeps that node from the first one",)
            if facts.launcher == "torchrun"
            else ()
        )
        firewall = (
            "with the same MASTER_ADDR and MASTER_PORT? and not behind a firewall: "
            "nc -zv $MASTER_ADDR $MASTER_PORT   # from the node that is missing"
        )
        yield Diagnosis(
            key="missing_ranks",
            title=f"{ranks_in_words(absent).capitalize()} did not come",
            confidence=0.99,
            evidence=(f"{waited}; nothing was heard of it", *agents),
            fix=(
                "what does the launcher's output on that node say? was the command started there?",
                "does its process run: ps aux | grep 'gradwire doctor'; where does it stand: py-spy dump --pid PID",
                *(() if agents else (firewall,)),
            ),
            stops=True,
        )


def failing_backends(facts: JobFacts) -> list[Diagnosis]:
    """Reports backends whose all-reduce failed for a reason that no other check reports.

    Lack of shared memory is reported by `machine.shared_memory`, lost packets by `network.packet_sizes`.
    """
    lost = any(pair.packets_pass is False for pair in facts.pairs)
    return [
        Diagnosis(
            key="backend_fails",
            title=f"The backend {each.backend} cannot run an all-reduce here",
            confidence=0.95,
            evidence=(f"rank {each.rank}: {each.error}",),
            fix=("what the error says; then run gradwire doctor again",),
            stops=each.backend in ("gloo", "nccl"),
            wrong=each.backend != "mpi",  # which a job may not use
        )
        for each in facts.backends
        if each.error and "shared memory" not in each.error and not lost
    ]


CHECKS = (versions, missing, failing_backends)
