"""Predicts the step time of a running job under every plan and compressor, and recommends one of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from gradwire.comms.plan.advise import WORTHWHILE, Advice, Candidate, Recommendation, Workload, advise, warning_of
from gradwire.comms.plan.codec_price import codec_price, measured_price, square_layout
from gradwire.comms.plan.cost import CodecPrice
from gradwire.comms.plan.payloads import gpu_memory_rate
from gradwire.comms.plan.plan import RATES_OPTION
from gradwire.comms.plan.planner import presumed
from gradwire.comms.report import wrapped
from gradwire.comms.step.stepwatch import Observed
from gradwire.compressors import registry
from gradwire.compressors.kernels.dispatch import has_kernels
from gradwire.topology.cluster import Cluster
from gradwire.topology.wording import ms

SAMPLE_NBYTES = 16 << 20
"""Bytes of the gradient that codecs are timed on: more than the caches of a rank hold, as with a model's gradients."""


@dataclass(frozen=True, slots=True)
class Running:
    """Names the plan and the compressor that a job runs now.

    Attributes:
        plan: Name of the plan, as in `HookState(plan=...)`.
        compressor: Name of the compressor; `none` if nothing is compressed.
    """

    plan: str
    compressor: str


@dataclass(frozen=True, slots=True)
class JobAdvice:
    """Holds the result of `HookState.advise()`: what each plan and compressor would do for the job; `print` it.

    Attributes:
        advice: Predicted times of every plan and compressor, and the recommendation.
        observed: Median times of the last steps, as they run now.
        headroom_seconds: Seconds of an observed step without the time that it waits for communication: the shortest
            step that any plan or compressor could reach.
        accumulate: Number of observed steps that the predicted step replaces: it has `accumulate` times as many
            micro-batches as an observed one, and sends gradients once. 1 predicts steps as they are.
        assumed: Links whose rates are neither given nor measured, in words: `print` then gives no recommendation. Empty
            if the rate of the outermost links is known.
        kept: True if the recommended plan and compressor are those that the observed steps ran.
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
            f"measured: a whole step takes {ms(seen.step_seconds)} ms, {ms(seen.exposed_seconds)} ms of it waiting "
            f"for communication; without any it would take {ms(self.headroom_seconds)} ms\n"
        )
        if self.assumed:
            return f"{step}no recommendation: how fast the links {self.assumed} are is not known ({RATES_OPTION})"
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
        """Returns a line that warns if step times vary by more than the recommendation would save; else an empty text.

        Also empty if the recommendation is what runs, if `accumulate` is not 1, and if the variation is not known.
        """
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
    """Predicts the step time of every plan and compressor from the observed steps of a job, and recommends one pair.

    If `accumulate` is 1 and the recommended pair is predicted to be slower than the running one, it recommends the
    running one.

    Args:
        cluster: Placement of the ranks, with the rates of their links as measured, given or assumed.
        sizes: Bytes of each bucket of a step, in the order of the backward pass.
        observed: Median times of the job's last steps.
        optimizer: Name of the job's optimizer (`sgd`, `adam`, ...; `any` if unknown): some compressors require one.
        library: Communication library that a flat plan runs on: `nccl` on GPUs, `gloo` on CPUs.
        running: Plan and compressor of the observed steps.
        accumulate: Number of observed steps that one predicted step replaces: it computes as much as they do, and sends
            gradients once. 1 predicts steps as they are.

    Raises:
        ValueError: `accumulate` is less than one.
    """
    # The job as the cost model takes it: one step of `accumulate` observed ones.
    workload = Workload(
        sum(sizes),
        observed.backward_seconds,
        max([*sizes, 1]),
        optimizer,
        accumulate,
        micro_seconds=observed.headroom_seconds,
        rest_seconds=max(0.0, observed.headroom_seconds - observed.backward_seconds),
        bucket_sizes=tuple(sizes),
    )
    # Predict every plan and compressor, and do not recommend one that is slower than what runs.
    own = prices(len(cluster.nodes), library, gpu_memory_rate(cluster), has_kernels("cuda"))
    advice = advise(cluster, workload, own, library=library)
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
    """Returns the advice to change nothing if the recommendation is predicted to be slower than what runs.

    Otherwise returns `advice`. What runs takes its observed or its predicted time, whichever is shorter. A
    recommendation may be slower than the fastest candidate by `WORTHWHILE`, a share of the step: so if it is slower
    than what runs, even the fastest candidate would save less than that.

    Args:
        advice: Advice that does not take into account what runs.
        running: Plan and compressor of the observed steps.
        observed: Median times of the job's last steps.
        optimizer: Name of the job's optimizer, for the warning about its compressor.
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
    """Returns whether a candidate has this plan and compressor."""
    return candidate.plan.name == plan and candidate.compressor == compressor


def _slowest_is_known(cluster: Cluster) -> bool:
    """Returns whether the rate of the outermost links is given or measured: it decides what a job gains most from."""
    return not cluster.levels[cluster.outermost].link.presumed


@lru_cache(maxsize=8)
def prices(nodes: int, library: str, memory_bytes_per_second: float, kernels: bool = True) -> tuple[CodecPrice, ...]:
    """Returns the cost of each registered compressor: timed once on a CPU, computed from the memory rate of a GPU.

    Timing takes a moment; the last eight results are kept for the same arguments.

    Args:
        nodes: Number of ranks that exchange a shard, one on each node.
        library: Name of the communication library; `nccl` for gradients on GPUs, any other for CPUs.
        memory_bytes_per_second: Memory rate of the GPU, by which codecs are computed; not used on CPUs.
        kernels: Whether compressors have kernels for the GPU; not used on CPUs.
    """
    layout = square_layout(SAMPLE_NBYTES, side=256)
    if library == "nccl":
        names, rate = registry.names(), memory_bytes_per_second
        return tuple(codec_price(name, layout, nodes, rate, kernels=kernels) for name in names)
    return tuple(measured_price(name, layout, nodes) for name in registry.names())
