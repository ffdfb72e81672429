"""The ranks of a job exchange what their hosts found and what their logs show, so that every rank knows all of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gradwire.topology.gdr.host import Host
from gradwire.topology.gdr.inputs.nccl_log import NcclLog, merged_logs
from gradwire.topology.gdr.prove import prove_with_nccl
from gradwire.topology.gdr.render import report_json
from gradwire.topology.gdr.runner import exit_code, nothing_to_check, run_checks

T = TypeVar("T")


class Gather(Protocol):
    """Defines the exchange between ranks: an all-gather of one dataclass instance of each rank."""

    def __call__(self, own: T, /) -> list[T]:
        """Sends `own` to all ranks, waits for theirs, and returns the instances in the order of the ranks."""


@dataclass(frozen=True, slots=True)
class JobRank:
    """Describes one rank of the job, and how it exchanges objects with the others."""

    rank: int
    host: tuple[str, ...]
    """Identity of the host, equal on all of its ranks; the host's name comes first."""
    gather: Gather
    """Collective call: every rank has to make it."""


@dataclass(frozen=True, slots=True)
class ProofPlace:
    """Describes the host on which a rank would all-reduce for `--prove`, as all ranks exchange it."""

    host: tuple[str, ...]
    nothing: str
    """Reason why the host has no GPUs and NICs to try it with; empty if it has."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """Holds what one rank sends to the others: the JSON report of its host, and its NCCL log."""

    host: tuple[str, ...]
    result: Mapping[str, object]
    log: NcclLog | None


def prove_together(host: Host, job: JobRank, command: Sequence[str]) -> None:
    """All-reduces among all ranks, and stores this rank's log and rates in `host`.

    If one host has no GPU and NIC to try it with, no rank all-reduces: the others would only wait for it. All ranks
    have to call this.

    Args:
        host: Machine of this rank; `log`, `proof_error` and `bandwidths` are changed in place.
        job: Number of this rank, and its exchange with the others.
        command: Command line of the all-reduce, see `prove_with_nccl`.
    """
    places = job.gather(ProofPlace(job.host, nothing_to_check(host)))
    if any(place.nothing for place in places):
        lacking = next(place for place in places if place.nothing)
        host.proof_error = f"no all-reduce: {lacking.host[0]} has {lacking.nothing}"
        return
    proof = prove_with_nccl(command, one_host=len({place.host for place in places}) == 1, rank=job.rank)
    host.log, host.proof_error = proof.log, proof.error
    host.bandwidths = {**host.bandwidths, **proof.gigabits_per_second}


def exchange_results(host: Host, job: JobRank) -> None:
    """Runs the checks and exchanges results, so that `host` knows every rank's channels and all hosts' results.

    All ranks have to call this.

    Args:
        host: Machine of this rank. `log` is replaced by the merged logs of all ranks; `peers` is set to the results of
            all hosts, unless none has anything to check.
        job: Number of this rank, and its exchange with the others.
    """
    report = run_checks(host)
    gathered = job.gather(RankResult(job.host, report_json(host, report, exit_code(host, report)), host.log))
    host.log = merged_logs([one.log for one in gathered if one.log is not None])
    results = {one.host: one.result for one in reversed(gathered)}  # the lowest rank of a host stands for it
    if any(not result.get("nothing") for result in results.values()):
        host.peers = tuple({"name": name[0], **results[name]} for name in dict.fromkeys(one.host for one in gathered))
