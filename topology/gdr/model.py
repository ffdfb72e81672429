"""Types of a check and its result: outcomes, verdicts, findings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from gradwire.topology.gdr.host import Host, Pair


class CheckOutcome(StrEnum):
    """Lists the outcomes of a check; UNKNOWN is an outcome of its own and never becomes PASS."""

    PASS = "pass"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"
    SKIPPED = "skipped"


class Verdict(StrEnum):
    """Lists the three questions about every GPU-NIC pair: possible, configured, in use."""

    POSSIBLE = "possible"
    """Does the hardware path allow it?"""
    CONFIGURED = "configured"
    """Do drivers, libraries and settings let NCCL use it?"""
    IN_USE = "in use"
    """Did a log or a probe show it?"""


BADNESS = (
    CheckOutcome.SKIPPED,
    CheckOutcome.INFO,
    CheckOutcome.PASS,
    CheckOutcome.WARN,
    CheckOutcome.UNKNOWN,
    CheckOutcome.FAIL,
)
"""Outcomes from harmless to bad: not knowing is worse than a warning, for it may hide a failure."""


def worst(outcomes: list[CheckOutcome]) -> CheckOutcome:
    """Returns the worst outcome in the order of `BADNESS`; SKIPPED for an empty list."""
    return max(outcomes, key=BADNESS.index, default=CheckOutcome.SKIPPED)


@dataclass(frozen=True, slots=True)
class Finding:
    """Holds the result of a check for this host, and for single GPU-NIC pairs where they differ."""

    outcome: CheckOutcome
    text: str
    """One sentence that names the thing found."""
    fix: str = ""
    """Advice for a person; it is printed, never applied."""
    pairs: Mapping[Pair, "Finding"] = field(default_factory=lambda: MappingProxyType({}))
    """(GPU, NIC) -> the finding for that pair; empty for checks that do not look at pairs."""


@dataclass(frozen=True, slots=True)
class GdrCheck:
    """Describes one check of the checklist: its function, and what depends on it."""

    name: str
    """`G1`: stage letter and number."""
    title: str
    function: Callable[[Host], Finding]
    verdict: Verdict | None = None
    """The question it decides; None for advice."""
    needs: tuple[str, ...] = ()
    """Checks whose failure makes this one meaningless."""
    of_settings: bool = False
    """True if it judges variables: its outcome is UNKNOWN if the environment is not known."""

    def find(self, host: Host) -> Finding:
        """Runs the check on a host and returns its finding."""
        if self.of_settings and host.settings is None:
            return unknown("the environment is not known", "give --env FILE: the output of env, or /proc/PID/environ")
        return self.function(host)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Pairs a check with its finding."""

    check: GdrCheck
    finding: Finding


def passed(text: str) -> Finding:
    """Returns a PASS finding: all is as it should be."""
    return Finding(CheckOutcome.PASS, text)


def informed(text: str) -> Finding:
    """Returns an INFO finding: neither good nor bad."""
    return Finding(CheckOutcome.INFO, text)


def warned(text: str, fix: str = "") -> Finding:
    """Returns a WARN finding: something that costs speed or may surprise."""
    return Finding(CheckOutcome.WARN, text, fix)


def failed(text: str, fix: str = "") -> Finding:
    """Returns a FAIL finding: something that keeps GPUDirect RDMA from working."""
    return Finding(CheckOutcome.FAIL, text, fix)


def unknown(text: str, fix: str = "") -> Finding:
    """Returns an UNKNOWN finding; `fix` says what would make it known."""
    return Finding(CheckOutcome.UNKNOWN, text, fix)


def judge_pairs(host: Host, judge: Callable[[str, str], Finding], fix: str = "") -> Finding:
    """Judges every GPU-NIC pair; the host's outcome is the worst among each GPU's nearest NICs.

    Args:
        host: The machine as it was read.
        judge: Function of two bus ids (GPU, NIC) that returns the finding for that pair.
        fix: Advice that the finding carries unless its outcome is PASS or INFO.

    Returns:
        One finding with those of all pairs in it; UNKNOWN if the host has no pair.
    """
    pairs = {pair: judge(*pair) for pair in host.distances}
    if not pairs:
        return unknown("no GPU-NIC pair is known")
    outcome = worst([pairs[pair].outcome for pair in host.best_pairs])
    blamed = [pair for pair in host.best_pairs if pairs[pair].outcome == outcome]
    text = f"{pairs[blamed[0]].text} ({len(blamed)} of {len(host.best_pairs)} nearest pairs)"
    return Finding(outcome, text, "" if outcome in (CheckOutcome.PASS, CheckOutcome.INFO) else fix, pairs)
