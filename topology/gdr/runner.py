"""Runs the checklist in order, skips what a failure makes meaningless, and draws the three verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.topology.gdr.host import Host, Pair
from gradwire.topology.gdr.model import CheckOutcome, CheckResult, Finding, GdrCheck, Verdict, unknown, worst
from gradwire.topology.gdr.stages import CHECKS
from gradwire.topology.printable import shortened

EXIT_PASS, EXIT_WARN, EXIT_FAIL, EXIT_UNKNOWN = range(4)


@dataclass(frozen=True, slots=True)
class GdrReport:
    """Holds the results of a run: of each check, each pair and the host."""

    results: tuple[CheckResult, ...]
    pairs: dict[Pair, dict[Verdict, Finding]]
    """(GPU, NIC) -> each verdict's outcome, with the name of the check that decided it in the text."""
    verdicts: dict[Verdict, Finding]
    """The host's verdicts: the worst among each GPU's nearest NICs."""
    nothing: str = ""
    """Reason why there was nothing to check; empty if there was something."""

    @property
    def cause(self) -> CheckResult | None:
        """Returns the first failed check in the checklist's order; None if none failed."""
        return next((result for result in self.results if result.finding.outcome is CheckOutcome.FAIL), None)


def nothing_to_check(host: Host) -> str:
    """Returns why the host has no GPU-NIC pair to check; empty if it may have one."""
    if not host.tree.functions:
        absent = host.files.state("sys/class") == "present" and host.files.state("sys/bus/pci") == "absent"
        return "this machine has no PCI bus" if absent else ""
    if host.gpus and (host.capable or host.rdma_devices):
        return ""
    return f"{len(host.gpus)} NVIDIA GPUs and {len(host.capable)} RDMA NICs on the PCI bus"


def run_checks(host: Host, checks: Sequence[GdrCheck] = CHECKS) -> GdrReport:
    """Runs the checks in order, skips those that a failure makes meaningless, and returns the report.

    Args:
        host: The machine as it was read.
        checks: Checks in their order; without GPUs and NICs only those run whose evidence (a log, a rate) is at hand.
    """
    nothing, given = nothing_to_check(host), _given(host)
    if nothing:
        checks = [check for check in checks if check.name in given]
    results: list[CheckResult] = []
    blamed: dict[str, CheckResult] = {}
    for check in checks:
        needs = () if check.name in given else check.needs  # evidence in hand needs no driver and no bus
        cause = next((blamed[name] for name in needs if name in blamed), None)
        result = CheckResult(check, _skipped(cause) if cause else _run(check, host))
        results.append(result)
        if cause or result.finding.outcome is CheckOutcome.FAIL:
            blamed[check.name] = cause or result
    pairs = {
        pair: {verdict: _judgement(results, verdict, pair) for verdict in Verdict} for pair in _pairs(host, nothing)
    }
    return GdrReport(tuple(results), pairs, {v: _host_judgement(host, results, pairs, v) for v in Verdict}, nothing)


def _given(host: Host) -> set[str]:
    """Returns the names of the checks that need no hardware because their evidence (a log, a rate) is at hand."""
    return {
        name
        for name, given in (
            ("G7", host.nvlinks is not None),
            ("U2", "gdr" in host.bandwidths),
            ("U3", host.log is not None),
            ("U4", "LOC" in host.bandwidths),
            ("U5", bool(host.peers)),
        )
        if given
    }


def _pairs(host: Host, nothing: str) -> list[Pair]:
    return [] if nothing else list(host.distances)


def _skipped(cause: CheckResult) -> Finding:
    return Finding(CheckOutcome.SKIPPED, f"skipped because {cause.check.name} failed: {cause.finding.text}")


def _run(check: GdrCheck, host: Host) -> Finding:
    try:
        return check.find(host)
    except Exception as error:  # noqa: BLE001 - one check must never take the others down
        return unknown(
            f"the check itself failed: {type(error).__name__}: {shortened(str(error), 200)}", "report this as a bug"
        )


def _judgement(results: Sequence[CheckResult], verdict: Verdict, pair: Pair | None) -> Finding:
    """Returns the worst outcome of a verdict's checks for one pair, with the text of the first check that has it.

    Args:
        results: Results of all checks.
        verdict: The question to judge. For `IN_USE`, unknown outcomes count only if there is no other.
        pair: (GPU, NIC); None judges the host as a whole.
    """
    rows = []
    for result in results:
        if result.check.verdict is verdict:
            found = result.finding.pairs.get(pair or ("", ""), result.finding)
            rows.append((found.outcome, f"{result.check.name}: {found.text}"))
    if verdict is Verdict.IN_USE:  # one piece of evidence is enough; the other may be missing
        rows = [row for row in rows if row[0] is not CheckOutcome.UNKNOWN] or rows
    outcome = worst([row[0] for row in rows])
    if outcome is CheckOutcome.INFO:
        outcome = CheckOutcome.PASS
    if outcome is CheckOutcome.PASS and verdict is not Verdict.IN_USE:
        return Finding(outcome, "nothing speaks against it")
    return Finding(outcome, next((text for each, text in rows if each is outcome), "no evidence was given"))


def _host_judgement(
    host: Host, results: Sequence[CheckResult], pairs: dict[Pair, dict[Verdict, Finding]], v: Verdict
) -> Finding:
    best = [pairs[pair][v] for pair in host.best_pairs if pair in pairs]
    if not best:
        return _judgement(results, v, None)
    outcome = worst([judgement.outcome for judgement in best])
    return next(judgement for judgement in best if judgement.outcome is outcome)


def usable_gpus(host: Host, report: GdrReport) -> tuple[int, int, int]:
    """Counts GPUs: (with a pair that will use GPUDirect RDMA, without one but with an unknown pair, all)."""
    good, unsure = set(), set()
    for (gpu, _), judgements in report.pairs.items():
        outcomes = {judgements[Verdict.POSSIBLE].outcome, judgements[Verdict.CONFIGURED].outcome}
        if judgements[Verdict.IN_USE].outcome is CheckOutcome.FAIL:  # tried, and it did not work
            continue
        if outcomes <= {CheckOutcome.PASS, CheckOutcome.WARN}:
            good.add(gpu)
        elif CheckOutcome.FAIL not in outcomes and CheckOutcome.SKIPPED not in outcomes:
            unsure.add(gpu)
    return len(good), len(unsure - good), len(host.gpus)


def exit_code(host: Host, report: GdrReport, asked_for_proof: bool = False) -> int:
    """Returns the exit code: 0 pass, 1 warn, 2 fail, 3 unknown, which ranks above a warning as it may hide a failure.

    Args:
        host: The machine as it was read.
        report: Results of the checks on this host.
        asked_for_proof: True if `--prove` was set: without a proof the result is then unknown.
    """
    outcomes = [result.finding.outcome for result in report.results]
    if CheckOutcome.FAIL in outcomes:
        return EXIT_FAIL
    decisive = [Verdict.POSSIBLE, Verdict.CONFIGURED] if not report.nothing else []
    decisive += [Verdict.IN_USE] if asked_for_proof or host.log is not None else []
    if not decisive or any(
        report.verdicts[v].outcome in (CheckOutcome.UNKNOWN, CheckOutcome.SKIPPED) for v in decisive
    ):
        known = {CheckOutcome.PASS, CheckOutcome.WARN} & set(outcomes)
        return EXIT_UNKNOWN if decisive or not known else int(CheckOutcome.WARN in outcomes)
    return EXIT_WARN if CheckOutcome.WARN in outcomes else EXIT_PASS
