"""What to advise a running job: every plan and compressor, priced for the steps that were observed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from gradwire.comms.plan.advise import WORTHWHILE, Advice, Candidate, Recommendation, Workload, advise, warning_of
from gradwire.comms.plan.codec_price import codec_price, measured_price, square_layout
from gradwire.comms.plan.cost import CodecPrice
from gradwire.comms.plan.payloads import gpu_memory
from gradwire.comms.plan.planner import presumed
from gradwire.comms.report import wrapped
from gradwire.comms.step.stepwatch import Observed
from gradwire.compressors import registry
from gradwire.topology.cluster import Cluster
from gradwire.topology.wording import ms

SAMPLE_NBYTES = 16 << 20
"""Gradient that the codecs are timed on: more than the caches of a rank hold, as a model's gradients are."""


@dataclass(frozen=True, slots=True)
class Running:
    """Plan and compressor that a job runs now.

    Attributes:
        plan: Its name.
        compressor: Its name; `none`.
    """

    plan: str
    compressor: str


@dataclass(frozen=True, slots=True)
class JobAdvice:
    """The result of `HookState.advise()`; `print` it, or read its fields.

    Attributes:
        advice: Every plan and compressor, and the recommendation.
        observed: What the steps are now.
        headroom_seconds: The step without communication: the best that anything could reach.
        accumulate: As many micro-batches a step were asked about as one of the observed steps has, times this.
        assumed: The links whose rates nobody knows, in words; `print` then gives no recommendation.
        kept: Whether what is recommended is what the observed steps ran.
    """

    advice: Advice
    observed: Observed
    headroom_seconds: float
    accumulate: int = 1
    assumed: str = ""
    kept: bool = False

    def __str__(self) -> str:
        return wrapped(self._text())

    def _text(self) -> str:
        seen, verdict = self.observed, self.advice.recommend
        step = (
            f"a whole step takes {ms(seen.step_seconds)} ms, {ms(seen.exposed_seconds)} ms of it waiting "
            f"for communication; without any it would take {ms(self.headroom_seconds)} ms\n"
        )
        if self.assumed:
            return (
                f"{step}no recommendation: how fast the links {self.assumed} are is not known "
                "(`nic_bytes_per_second` says it, `probe=True` measures it)"
            )
        if self.accumulate > 1:
            exact = min((each for each in self.advice.candidates if each.compressor == "none" and each.available),
                        key=lambda each: each.step_seconds)  # fmt: skip
            share = exact.step_seconds / self.accumulate
            step += (
                f"with {self.accumulate} times as many micro-batches a step: {ms(exact.step_seconds)} ms without "
                f"compression, {ms(share)} ms for what is a step now\n"
            )
        return (
            f"{step}recommended: plan {verdict.plan}, compressor {verdict.compressor}. {verdict.why}\n"
            f"write: {'nothing: it is what runs' if self.kept else verdict.write}\n"
            f"{self._doubt()}"
            "predicted from these steps and the rates of the links, not measured"
        )

    def _doubt(self) -> str:
        """A line where the steps are farther apart than what is recommended would make them shorter."""
        seen, verdict = self.observed, self.advice.recommend
        if self.kept or self.accumulate > 1 or seen.middle_half is None:
            return ""
        low, high = seen.middle_half
        then = [
            each.step_seconds
            for each in self.advice.candidates
            if _is_candidate(each, verdict.plan, verdict.compressor)
        ]
        saved = seen.step_seconds - min(then, default=0.0)
        if high - low <= saved:
            return ""
        return (
            f"not sure: the middle half of these {seen.steps} steps took {ms(low)} to {ms(high)} ms, farther apart "
            f"than the {ms(max(saved, 0.0))} ms that this saves: something else uses the machines or the links; ask "
            "again when it does not, or compare both in training\n"
        )


def advise_job(
    cluster: Cluster,
    sizes: Sequence[int],
    observed: Observed,
    optimizer: str,
    library: str,
    running: Running,
    accumulate: int = 1,
) -> JobAdvice:
    """Predicts every plan and compressor for a job as observed, and recommends one.

    Args:
        cluster: Where the ranks are, with the links as measured or assumed.
        sizes: Bytes of the buckets of a step.
        observed: The last steps.
        optimizer: As for `Workload`.
        library: As for `advise`.
        running: What the observed steps ran.
        accumulate: How many of the observed steps shall be one, as its micro-batches.

    Raises:
        ValueError: `accumulate` is less than one.
    """
    workload = Workload(
        sum(sizes),
        observed.backward_seconds,
        max([*sizes, 1]),
        optimizer,
        accumulate,
        micro_seconds=observed.headroom_seconds,
        rest_seconds=max(0.0, observed.headroom_seconds - observed.backward_seconds),
    )
    advice = advise(cluster, workload, prices(len(cluster.nodes), library, gpu_memory(cluster)), library=library)
    if accumulate == 1:
        advice = _never_slower(advice, running, observed, optimizer)
    return JobAdvice(
        advice,
        observed,
        observed.headroom_seconds,
        accumulate,
        "" if _slowest_is_known(cluster) else presumed(cluster),
        kept=running == Running(advice.recommend.plan, advice.recommend.compressor),
    )


def _never_slower(advice: Advice, running: Running, observed: Observed, optimizer: str) -> Advice:
    """Returns the advice, or one to change nothing if the recommendation is predicted to be slower than what runs.

    The recommended one may be slower than the best by `WORTHWHILE`, so then the best saves less than that as well.

    Args:
        advice: As for a job of which nothing runs yet.
        running: What runs.
        observed: Its steps.
        optimizer: Of the job.
    """
    verdict = advice.recommend
    if (verdict.plan, verdict.compressor) == (running.plan, running.compressor):
        return advice
    of_verdict, of_running = (
        [each.step_seconds for each in advice.candidates if each.available and _is_candidate(each, plan, compressor)]
        for plan, compressor in ((verdict.plan, verdict.compressor), (running.plan, running.compressor))
    )
    now = min([observed.step_seconds, *of_running])
    if not of_verdict or min(of_verdict) <= now:
        return advice
    warning = warning_of(running.compressor, optimizer)
    why = (
        f"Keep what runs: nothing is predicted to shorten its step ({ms(now)} ms) by more than {WORTHWHILE:.0%}."
        f"{f' But {warning}.' if warning else ''}"
    )
    return replace(advice, recommend=Recommendation(running.plan, running.compressor, why))


def _is_candidate(candidate: Candidate, plan: str, compressor: str) -> bool:
    return candidate.plan.name == plan and candidate.compressor == compressor


def _slowest_is_known(cluster: Cluster) -> bool:
    """Whether the links of the outermost level in use were given or measured: they decide what is worth while."""
    return not cluster.levels[cluster.outermost].link.presumed


@lru_cache(maxsize=8)
def prices(nodes: int, library: str, memory_bytes_per_second: float) -> tuple[CodecPrice, ...]:
    """Returns the cost of each compressor: timed once on a CPU, computed from the memory rate of a GPU.

    Args:
        nodes: Ranks that exchange a shard.
        library: `nccl` where gradients are on GPUs.
        memory_bytes_per_second: What codecs move on such a GPU; not used on CPUs.
    """
    layout = square_layout(SAMPLE_NBYTES, side=256)
    if library == "nccl":
        return tuple(codec_price(name, layout, nodes, memory_bytes_per_second) for name in registry.names())
    return tuple(measured_price(name, layout, nodes) for name in registry.names())
