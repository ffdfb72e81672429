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
    """All-gathers one dataclass instance of each rank, in the order of the ranks."""

    def __call__(self, own: T, /) -> list[T]:
        """Waits for all ranks."""


@dataclass(frozen=True, slots=True)
class JobRank:
    """One rank of the job, and how it exchanges objects with the others."""

    rank: int
    host: tuple[str, ...]
    """The same for all ranks of one host, its name first."""
    gather: Gather


@dataclass(frozen=True, slots=True)
class ProofPlace:
    """Where a rank would all-reduce for `--prove`."""

    host: tuple[str, ...]
    nothing: str
    """What the host has in place of GPUs and NICs to try it with; empty if it can."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank reports to the others."""

    host: tuple[str, ...]
    result: Mapping[str, object]
    log: NcclLog | None


def prove_together(host: Host, job: JobRank, command: Sequence[str]) -> None:
    """All-reduces among all ranks and gives the host what this rank saw of it, in place.

    Where one host has nothing to try it with, none does: the others would only wait for it.

    Args:
        host: The machine.
        job: This rank and the others.
        command: The all-reduce, see `prove_with_nccl`.
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
    """Gives the host, in place, the channels of every rank's log and, unless none has any, the results of all hosts."""
    report = run_checks(host)
    gathered = job.gather(RankResult(job.host, report_json(host, report, exit_code(host, report)), host.log))
    host.log = merged_logs([one.log for one in gathered if one.log is not None])
    results = {one.host: one.result for one in reversed(gathered)}  # the lowest rank of a host stands for it
    if any(not result.get("nothing") for result in results.values()):
        host.peers = tuple({"name": name[0], **results[name]} for name in dict.fromkeys(one.host for one in gathered))
