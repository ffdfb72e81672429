"""The words of the checker: outcomes, verdicts, findings, checks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire.topology.gdr.host import Host

Pair = tuple[str, str]
"""(bus id of the GPU, bus id of the NIC)."""


class Outcome(StrEnum):
    """What one check found; UNKNOWN is an outcome of its own and never becomes PASS."""

    PASS = "pass"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"
    SKIPPED = "skipped"


class Verdict(StrEnum):
    """The three questions that are answered apart for every pair."""

    POSSIBLE = "possible"
    """Does the hardware path allow it?"""
    CONFIGURED = "configured"
    """Do drivers, libraries and settings let NCCL use it?"""
    IN_USE = "in use"
    """Did a log or a probe show it?"""


BADNESS = (Outcome.SKIPPED, Outcome.INFO, Outcome.PASS, Outcome.WARN, Outcome.UNKNOWN, Outcome.FAIL)
"""Outcomes from harmless to bad: not knowing is worse than a warning, for it may hide a failure."""


def worst(outcomes: list[Outcome]) -> Outcome:
    """The worst of some outcomes; SKIPPED for none."""
    return max(outcomes, key=BADNESS.index, default=Outcome.SKIPPED)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found on this host, and for single pairs where they differ."""

    outcome: Outcome
    text: str
    """One sentence that names the thing found."""
    remedy: str = ""
    """What a person can do; printed, never applied."""
    pairs: Mapping[Pair, tuple[Outcome, str]] = field(default_factory=lambda: MappingProxyType({}))
    """Outcome and words for each pair, from checks that look at pairs."""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the checklist."""

    name: str
    """`G1`: stage letter and number."""
    title: str
    function: "Callable[[Host], Finding]"
    verdict: Verdict | None = None
    """The question it decides; None for advice."""
    needs: tuple[str, ...] = ()
    """Checks whose failure makes this one meaningless."""


@dataclass(frozen=True, slots=True)
class Result:
    """A check and what came of it."""

    check: Check
    finding: Finding


def passed(text: str) -> Finding:
    """A finding that is as it should be."""
    return Finding(Outcome.PASS, text)


def informed(text: str) -> Finding:
    """A finding that is neither good nor bad."""
    return Finding(Outcome.INFO, text)


def warned(text: str, remedy: str = "") -> Finding:
    """A finding that costs speed or may surprise."""
    return Finding(Outcome.WARN, text, remedy)


def failed(text: str, remedy: str = "") -> Finding:
    """A finding that keeps GPUDirect RDMA from working."""
    return Finding(Outcome.FAIL, text, remedy)


def unknown(text: str, remedy: str = "") -> Finding:
    """Something that cannot be known from here, with what would make it known."""
    return Finding(Outcome.UNKNOWN, text, remedy)
