"""The ranks of a job meet: each tells what its host found and what its log shows, and all know it afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gradwire.topology.gdr.host import Host
from gradwire.topology.gdr.inputs.nccl_log import NcclLog, merged_logs
from gradwire.topology.gdr.prove import prove_with_nccl
from gradwire.topology.gdr.render import report_json
from gradwire.topology.gdr.runner import exit_code, nothing_to_check, run_checks

T = TypeVar("T")


class Gather(Protocol):
    """Hands a rank's word to all the others, and returns everybody's in the order of the ranks."""

    def __call__(self, own: T, /) -> list[T]:
        """Waits for all ranks."""


@dataclass(frozen=True, slots=True)
class Job:
    """This rank's place, and how it reaches the others."""

    rank: int
    host: tuple[str, ...]
    """The same for all ranks of one host, its name first."""
    gather: Gather


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank says."""

    host: tuple[str, ...]
    result: Mapping[str, object]
    log: NcclLog | None


def prove_together(host: Host, job: Job) -> None:
    """All-reduces among all ranks and gives the host what this rank saw of it, in place.

    Where one host has nothing to try it with, none does: the others would only wait for it.
    """
    places = job.gather((job.host, nothing_to_check(host)))
    if any(nothing for _, nothing in places):
        host.proof_error = "no all-reduce: " + next(f"{name[0]} has {nothing}" for name, nothing in places if nothing)
        return
    proof = prove_with_nccl(one_host=len({name for name, _ in places}) == 1, rank=job.rank)
    host.log, host.proof_error = proof.log, proof.error
    host.bandwidths = {**host.bandwidths, **proof.gigabits_per_second}


def meet(host: Host, job: Job) -> None:
    """Gives the host, in place, the channels of every rank's log and, unless none has any, the results of all hosts."""
    report = run_checks(host)
    told = job.gather(Told(job.host, report_json(host, report, exit_code(host, report)), host.log))
    host.log = merged_logs([one.log for one in told if one.log is not None])
    results = {one.host: one.result for one in reversed(told)}  # the lowest rank of a host speaks for it
    if any(not result.get("nothing") for result in results.values()):
        host.peers = tuple({"name": name[0], **results[name]} for name in dict.fromkeys(one.host for one in told))
