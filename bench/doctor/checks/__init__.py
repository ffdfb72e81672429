"""What the facts of a job say is wrong: pure functions, one file for each kind of cause."""

from collections.abc import Callable

from gradwire.bench.doctor.checks import machine, network, placement, settings, software
from gradwire.bench.doctor.facts import Diagnosis, JobFacts

CHECKS: tuple[Callable[[JobFacts], list[Diagnosis]], ...] = (
    *network.CHECKS,
    *placement.CHECKS,
    *machine.CHECKS,
    *settings.CHECKS,
    *software.CHECKS,
)


def diagnose(facts: JobFacts) -> list[Diagnosis]:
    """What is wrong, the dearest first: what stops a job, then cost times sureness.

    Args:
        facts: Of the job; with `CHECKS` nothing else is looked at.
    """
    found = [diagnosis for check in CHECKS for diagnosis in check(facts)]
    return sorted(found, key=lambda each: (not each.stops, -each.cost_seconds * each.sure, -each.sure, each.key))
