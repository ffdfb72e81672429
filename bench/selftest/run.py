"""Run of the parts of the self-test, each in its own processes, and collection of their results."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from gradwire.bench.emulation.launch import JobOutcome, python_module, run_logical
from gradwire.bench.emulation.placement import Placement
from gradwire.bench.selftest.checks import FAIL, SKIPPED, SelftestResult
from gradwire.bench.selftest.coverage import Touched
from gradwire.bench.selftest.kernel_checks import KernelBandwidth
from gradwire.bench.selftest.rank import (
    BANDWIDTH,
    BEGUN,
    COLLECTIVES,
    COVERAGE,
    ENDED,
    FACTS,
    KERNELS,
    LOSSES,
    NOTE,
    PLANNED,
    RECORD,
    TRAININGS,
    PartSettings,
)

LEAST_SECONDS = 5.0
"""Time left of `--seconds` below which no further part begins: importing torch alone takes some seconds."""
GRACE_SECONDS = 5.0
"""Seconds for which the other ranks may go on after one has failed, to report their errors."""
LAST_LINES = 12
"""Number of the last lines of a failed process's output that the report quotes."""
MOST_RANKS = 8
NAME_OF_PROCESS = "the processes"
"""Name of the check that fails if a part's processes end outside any of its checks."""

SHARED_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
"""Variables of NCCL for ranks that share a GPU. Each rank also gets its own NCCL_HOSTID, because NCCL refuses two ranks
of one host on one GPU. Source: NCCL documentation, Environment Variables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Part of the self-test: the checks that its processes run, and how many processes there are.

    Attributes:
        settings: Settings of all ranks.
        nodes: Number of ranks of each node; the nodes are on this machine, and gradwire is told that they are several.
        shares_gpu: Whether several ranks share a GPU.
    """

    settings: PartSettings
    nodes: tuple[int, ...] = (1,)
    shares_gpu: bool = False

    def environment(self, placement: Placement) -> dict[str, str]:
        """Returns the environment variables of a rank besides those of its placement: mostly none.

        If ranks share a GPU, these are the variables of `SHARED_GPU`, and an NCCL_HOSTID of the rank's own.
        """
        return {**SHARED_GPU, "NCCL_HOSTID": f"rank{placement.rank}"} if self.shares_gpu else {}


@dataclass(slots=True)
class SelftestFindings:
    """Results of all parts."""

    facts: dict[str, object] = field(default_factory=dict)
    """Description of the machine, as `machine_facts` returns it."""
    checks: list[SelftestResult] = field(default_factory=list)
    bandwidths: list[KernelBandwidth] = field(default_factory=list)
    coverage: dict[str, Touched] = field(default_factory=dict)
    """Kind of code -> its coverage by all parts."""
    losses: dict[str, list[float]] = field(default_factory=dict)
    """Name of a training -> loss of each step."""
    notes: list[str] = field(default_factory=list)
    """Things that were not run, each with the reason."""


class PartCollector:
    """Reader of the lines that the ranks of one part print.

    Args:
        part: Name of the part.
        size: Number of its ranks.
        say: Callback with the name of the check that begins, for progress.
    """

    def __init__(self, part: str, size: int, say: Callable[[str], None]) -> None:
        self._part = part
        self._size = size
        self._say = say
        self._planned: list[str] = []
        self._begun: list[str | None] = [None] * size
        self._ended: dict[str, dict[int, SelftestResult]] = {}
        self.records: list[tuple[str, object]] = []
        """Records of rank 0 that are not about a check: (kind, value)."""

    def line(self, rank: int, text: str) -> None:
        """Handles one line that a rank printed; lines that are not records are ignored.

        Args:
            rank: Rank that printed it.
            text: The line.
        """
        record = record_of(text)
        if record is None:
            return
        kind, value = record
        if kind == PLANNED:
            self._planned = list(value)  # type: ignore[call-overload]
        elif kind == BEGUN:
            self._begun[rank] = str(value)
            if rank == 0:
                self._say(f"{self._part}: {value}")
        elif kind == ENDED:
            result = SelftestResult(**value)  # type: ignore[arg-type]
            self._begun[rank] = None
            self._ended.setdefault(result.name, {})[rank] = result
        elif rank == 0:
            self.records.append((kind, value))

    def results(self, outcome: JobOutcome) -> list[SelftestResult]:
        """Returns one result for each planned check, from the results of all ranks.

        If the processes failed, the check at which they did is a failure, and those after it are skipped.

        Args:
            outcome: Exit statuses and output of the processes.
        """
        found = [
            self._joined(self._ended[name]) for name in self._planned if len(self._ended.get(name, {})) == self._size
        ]
        if outcome.exit_status == 0:
            return found
        missing = [name for name in self._planned if len(self._ended.get(name, {})) < self._size]
        at = next((name for name in missing if name in self._begun or name in self._ended), None)
        last = found[-1] if found else None
        if at is not None:
            ended = {rank: each for rank, each in self._ended.get(at, {}).items() if each.outcome == FAIL}
            why = SelftestResult(part=self._part, name=at, outcome=FAIL, reason=self._why(outcome))
            found.append(self._joined(ended) if ended else why)
        elif missing and last is not None and last.outcome == FAIL:  # all ranks have ended after the same error
            at = last.name
        else:  # before the first check, or after the last one
            at = NAME_OF_PROCESS
            found.append(SelftestResult(part=self._part, name=at, outcome=FAIL, reason=self._why(outcome)))
        reason = f"not reached: `{at}` failed before it"
        return found + [
            SelftestResult(part=self._part, name=name, outcome=SKIPPED, reason=reason) for name in missing if name != at
        ]

    def _joined(self, results: dict[int, SelftestResult]) -> SelftestResult:
        """Combines the ranks' results of a check: that of the first rank that failed, else of the first rank.

        The difference and the time are the largest of all ranks.

        Args:
            results: Rank -> its result.
        """
        first = next((rank for rank in sorted(results) if results[rank].outcome == FAIL), min(results))
        one = results[first]
        differences = [each.worst_difference for each in results.values() if each.worst_difference is not None]
        reason = f"rank {first}: {one.reason}" if one.outcome == FAIL and self._size > 1 else one.reason
        return replace(
            one,
            reason=reason,
            worst_difference=max(differences, default=None),
            seconds=max(each.seconds for each in results.values()),
        )

    def _why(self, outcome: JobOutcome) -> str:
        if outcome.first_failure is None:
            return f"the time was up after {outcome.seconds:.0f} s"
        rank, status = outcome.first_failure, outcome.returncodes[outcome.first_failure]
        how = f"signal {-status}" if status < 0 else f"status {status}"
        lines = [line for line in outcome.output[rank].splitlines() if line.strip() and record_of(line) is None]
        return "\n".join([f"rank {rank} ended with {how}", *lines[-LAST_LINES:]])


def record_of(text: str) -> tuple[str, object] | None:
    """Returns the (kind, value) of the record in a line that a rank printed; None if it is no record."""
    if not text.startswith(f'{{"{RECORD}"'):
        return None
    try:
        line = json.loads(text)
    except ValueError:  # cut short, by a process that was killed
        return None
    return str(line[RECORD]), line["value"]


def parts_of(device: str, gpus: int, ranks: int, numel: int, bandwidth_numel: int) -> list[Part]:
    """Returns the parts of the self-test, in the order in which they are run.

    Args:
        device: `cpu` or `cuda`.
        gpus: Number of GPUs that torch sees.
        ranks: Number of ranks of the parts that have several.
        numel: Elements of the largest input of a kernel.
        bandwidth_numel: Elements of the gradient whose bandwidth is measured.
    """
    nodes = (ranks // 2, ranks // 2) if ranks >= 4 and ranks % 2 == 0 else (1,) * ranks
    library, shares = ("NCCL", ranks > gpus) if device == "cuda" else ("gloo", False)
    many = f"{ranks} ranks" + (f" on {gpus} GPU{'s' if gpus > 1 else ''}" if shares else "")
    parts = [Part(settings=PartSettings(part="kernels on the CPU", kind=KERNELS, device="cpu", numel=numel))]
    if device == "cuda":
        on_gpu = PartSettings(
            part="kernels on the GPU", kind=KERNELS, device=device, numel=numel, bandwidth_numel=bandwidth_numel
        )
        one = PartSettings(part="NCCL, 1 rank", kind=COLLECTIVES, device=device)
        parts += [Part(settings=on_gpu), Part(settings=one)]
    for part, kind in ((f"{library}, {many}", COLLECTIVES), (f"trainings, {many}", TRAININGS)):
        settings = PartSettings(part=part, kind=kind, device=device)
        parts.append(Part(settings=settings, nodes=nodes, shares_gpu=shares))
    return parts


def run_parts(parts: Sequence[Part], seconds: float, say: Callable[[str], None]) -> SelftestFindings:
    """Runs one part after the other, after a process that reads the facts of the machine; returns all results.

    Args:
        parts: Parts to run, in this order.
        seconds: Time limit of all together: the part that exceeds it is stopped, and later ones are skipped.
        say: Callback with a line of progress.

    Raises:
        RuntimeError: A process cannot be started.
    """
    deadline = time.monotonic() + seconds
    findings = SelftestFindings()
    facts = PartSettings(part=FACTS, kind=FACTS, device="cpu")
    for part in (Part(settings=facts), *parts):
        left = deadline - time.monotonic()
        name = part.settings.part
        if left < LEAST_SECONDS:
            reason = f"the {seconds:g} s of `--seconds` were over before it began"
            findings.checks.append(SelftestResult(part=name, name=NAME_OF_PROCESS, outcome=SKIPPED, reason=reason))
            continue
        say(f"{name}: starting")
        collector = PartCollector(name, sum(part.nodes), say)
        try:
            outcome = run_logical(
                part.nodes,
                python_module("gradwire.bench.selftest.rank", json.dumps(asdict(part.settings))),
                timeout_seconds=left,
                grace_seconds=GRACE_SECONDS,
                environment=part.environment,
                on_line=collector.line,
            )
        except OSError as error:
            raise RuntimeError(f"cannot start a process: {error}") from error
        findings.checks += collector.results(outcome)
        for kind, value in collector.records:
            _take(findings, kind, value)
    return findings


def _take(findings: SelftestFindings, kind: str, value: object) -> None:
    """Adds a record that is not about a check to the findings; coverage of one kind is merged over the parts."""
    assert isinstance(value, (dict, str)), "what rank.py says"
    if isinstance(value, str):
        assert kind == NOTE, kind
        findings.notes.append(value)
    elif kind == FACTS:
        findings.facts = value
    elif kind == BANDWIDTH:
        findings.bandwidths.append(KernelBandwidth(**value))
    elif kind == LOSSES:
        findings.losses = value
    elif kind == COVERAGE:
        touched = Touched(kind=value["kind"], all=tuple(value["all"]), touched=tuple(value["touched"]))
        known = findings.coverage.get(touched.kind)
        if known is not None:
            touched = replace(touched, touched=tuple(sorted({*known.touched, *touched.touched})))
        findings.coverage[touched.kind] = touched
