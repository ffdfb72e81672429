"""Checks of the steps of `--script`: late ranks, data loaders, checkpoints, too many all-reduces, unused parameters."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from statistics import median_low

from gradwire.bench.doctor.facts import BUCKET_NBYTES, Diagnosis, JobFacts, ScriptRun
from gradwire.comms.observe.diagnosis import Margin, behind_median, excesses
from gradwire.topology.wording import duration, nbytes

LOADER, SAVING, COLLECTIVE = "the data loader", "saving a checkpoint", "collectives"
BACKWARD, FORWARD = "the backward pass", "the forward pass"
"""Names of activities in gradwire/comms/watch/activity.py, which is not imported because it needs torch."""

EXCHANGE = "exchange"
"""Part of a step in which a collective is in flight, as long as on the latest rank."""

FIRST_BUCKET_NBYTES = 1 << 20
"""Bytes of DDP's first bucket. Source: torch/nn/parallel/distributed.py, dist._DEFAULT_FIRST_BUCKET_BYTES."""
MANY = 1.5
"""Multiple of the all-reduces that the gradients need, above which a script makes too many. One more, for a logged
loss, is no fault."""

LOADER_SHARE, SAVING_SHARE = 0.15, 0.1
LEAST_SECONDS = 5e-3
"""Least seconds of a step that are reported: activities are sampled every 5 ms."""
LATE = Margin(LEAST_SECONDS, 0.15)
"""Margin of the wait for a rank above which it is named."""
GPU_STEP_SECONDS = 1.0
"""Least step on GPUs for which late ranks are reported: torch polls NCCL's collectives ten times a second."""


def step_split(facts: JobFacts) -> dict[str, float]:
    """Returns the parts of a step of the user's script in seconds, on the median rank; empty if no script was run.

    The median rank is that by the time with a collective in flight. Its parts are the activities of its main thread,
    and two parts of the time with a collective in flight, which overlap with the activities: `exchange`, as long as on
    the rank with the least such time (the others wait for it), and `waiting for late ranks`, the rest.

    Args:
        facts: Measurements of the job.

    Returns:
        Part -> seconds, the largest first, without parts of less than 5 ms.
    """
    runs = _split_runs(facts)
    if not runs:
        return {}
    under = sorted(range(len(runs)), key=lambda rank: runs[rank].under_way_seconds or 0.0)
    usual, last = runs[under[len(runs) // 2]], runs[under[0]]
    found = dict(usual.activity)
    if usual.under_way_seconds is not None and last.under_way_seconds is not None:
        found |= {
            EXCHANGE: last.under_way_seconds,
            "waiting for late ranks": usual.under_way_seconds - last.under_way_seconds,
        }
    return {kind: value for kind, value in sorted(found.items(), key=lambda item: -item[1]) if value >= LEAST_SECONDS}


def _split_runs(facts: JobFacts) -> list[ScriptRun]:
    runs = [run for run in facts.script_runs if run.step_seconds is not None and run.activity]
    return runs if len(runs) == len(facts.script_runs) else []


def waited_seconds(facts: JobFacts, ranks: Collection[int]) -> float | None:
    """Returns the seconds of a step for which the median rank waits for the latest of some ranks; None if unknown.

    Args:
        facts: Measurements of the job.
        ranks: Ranks that may be late.
    """
    under = [run.under_way_seconds for run in _split_runs(facts)]
    times = [each for each in under if each is not None]
    if len(times) < 2 or len(times) < len(under) or facts.step_seconds is None:
        return None
    if facts.has_gpus and facts.step_seconds < GPU_STEP_SECONDS:
        return None
    behind = behind_median(times)
    return max(behind[rank] for rank in ranks)


def late_rank(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports the rank with the least time in collectives: the others arrive earlier, and wait for it.

    The median rank must have 5 ms and 15 % of a step more of that time (`LATE`).
    """
    runs = _split_runs(facts)
    waits = waited_seconds(facts, range(len(runs)))
    if waits is None or waits < LATE.of(facts.step_seconds or 0.0):
        return
    # Find what the late rank does for longer than the others.
    times = [run.under_way_seconds or 0.0 for run in runs]
    late = min(range(len(times)), key=times.__getitem__)
    excess = excesses({rank: run.activity for rank, run in enumerate(runs)}, late)
    kind = max(excess, key=excess.__getitem__)
    busy = excess[kind] > 0.3 * waits
    line = runs[late].lines.get(kind)
    name = next((n for n, ranks in zip(facts.names, facts.nodes, strict=True) if late in {e.rank for e in ranks}), "?")
    yield Diagnosis(
        key="late_rank",
        title=f"The others wait for rank {late} on {name}, {duration(waits)} of every step of your script",
        confidence=0.9,
        cost_seconds=waits,
        evidence=(
            (
                f"rank {late} has an exchange under way for {duration(times[late])} of a step, the usual rank for "
                f"{duration(sorted(times)[len(times) // 2])}"
            ),
            *(
                (
                    f"in that time it is {duration(excess[kind])} longer than the others in {kind}"
                    + (f", most often at {line}" if line else ""),
                )
                if busy
                else ()
            ),
        ),
        fix=_late_fix(kind if busy else "", name),
        nodes=(name,),
    )


def _late_fix(kind: str, name: str) -> tuple[str, ...]:
    if kind == LOADER:
        return (
            f"the data of {name} comes slowly: DataLoader(num_workers=...), its disk, its share of the file system",
        )
    if kind == SAVING:
        return ("only one rank saves, while all others wait: torch.distributed.checkpoint.async_save",)
    return (
        "does it compute more than the others: longer sequences, a larger last batch, an own branch `if rank == 0`?",
        f"does its node compute slower: top, nvidia-smi on {name}; GRADWIRE_WATCH=1 names who is late over a whole run",
    )


@dataclass(frozen=True, slots=True)
class Waste:
    """Activity that should take little of a step.

    Attributes:
        kind: Name of the activity.
        share: Share of a step from which it is a finding.
        key: Key of the finding.
        title: Beginning of the finding's title.
        fix: Lines of the finding's fix.
    """

    kind: str
    share: float
    key: str
    title: str
    fix: tuple[str, ...]


WASTES = (
    Waste(
        LOADER,
        LOADER_SHARE,
        "slow_loader",
        "Steps wait for the data loader",
        (
            (
                "DataLoader(num_workers=N, persistent_workers=True, prefetch_factor=4), N up to the node's cores by "
                "its ranks"
            ),
            "decoded or tokenized data on a local disk instead of a network file system",
        ),
    ),
    Waste(
        SAVING,
        SAVING_SHARE,
        "checkpoints",
        "Steps wait for checkpoints",
        (
            "save less often, or beside training: torch.distributed.checkpoint.async_save(state, checkpoint_id=...)",
            "onto a local disk first",
        ),
    ),
)


def many_exchanges(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports scripts with more than 1.5 times as many all-reduces in a step as DDP's buckets of the gradients need.

    Their time beyond one exchange of the gradients must be 5 ms or more. Causes are accumulation, small buckets,
    logging.
    """
    runs = _split_runs(facts)
    if not runs or len(facts.nodes) < 2:
        return
    count = median_low(sum(run.all_reduces.values()) for run in runs)
    sent_nbytes = facts.gradient_nbytes + _unused_nbytes(runs)
    needed = 1 + max(0, -(-(sent_nbytes - FIRST_BUCKET_NBYTES) // BUCKET_NBYTES))
    under_way = min(run.under_way_seconds or 0.0 for run in runs)
    cost = under_way - facts.exchange_seconds(facts.good_rate())
    if count <= MANY * needed or cost < LEAST_SECONDS:
        return
    lines = sorted(runs[0].all_reduces.items(), key=lambda item: -item[1])
    yield Diagnosis(
        key="many_exchanges",
        title=f"A step makes {count:.0f} all-reduces; its gradients need {needed}",
        confidence=0.8,
        cost_seconds=cost,
        evidence=(
            (
                f"all exchanges of a step take {duration(under_way)}; one of the gradients takes "
                f"{duration(facts.exchange_seconds(facts.good_rate()))} at the best rate seen"
            ),
            *(f"{line}: {number:.3g} all-reduces a step" for line, number in lines[:3]),
        ),
        fix=_fewer_exchanges(lines, count - needed, repeated=cost > 0.5 * facts.exchange_seconds(facts.good_rate())),
    )


def _fewer_exchanges(lines: list[tuple[str, float]], extra: float, *, repeated: bool) -> tuple[str, ...]:
    """Returns the advice against too many all-reduces, the likeliest cause first.

    Args:
        lines: Lines of the script with their all-reduces a step, the most frequent first.
        extra: All-reduces of a step beyond those that the gradients need.
        repeated: True if they take half as long again as one exchange of the gradients, or longer.
    """
    passes = "several backward passes a step: with model.no_sync(): for all but the last one"
    buckets = "small buckets: leave bucket_cap_mb at 25, or raise it; find_unused_parameters=False saves one more"
    logging = "logging: add up on each rank, and all-reduce every some steps"
    if len(lines) > 1 and lines[0][1] <= extra:
        return logging, passes, buckets
    return (passes, buckets, logging) if repeated else (buckets, passes, logging)


def _unused_nbytes(runs: list[ScriptRun]) -> int:
    """Returns the bytes of parameters without a gradient on any rank. DDP fills in those that one rank has."""
    return min((run.unused_nbytes for run in runs), default=0)


def unused_parameters(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports trainable parameters that no step uses: DDP exchanges zeros for them."""
    runs = _split_runs(facts)
    unused = _unused_nbytes(runs)
    if not unused or len(facts.nodes) < 2:
        return
    cost = facts.exchange_seconds(facts.good_rate()) * unused / max(facts.gradient_nbytes, 1)
    yield Diagnosis(
        key="unused_parameters",
        title=f"{nbytes(unused)} of trainable parameters got no gradient in any step, and are exchanged as zeros",
        confidence=0.9,
        cost_seconds=cost,
        evidence=(
            (
                f"the optimizers have {nbytes(facts.gradient_nbytes + unused)} of trainable parameters; those with a "
                f"gradient are {nbytes(facts.gradient_nbytes)}"
            ),
        ),
        fix=(
            "before DDP wraps the model: remove what no forward pass uses, or requires_grad_(False)",
            "then find_unused_parameters=False, which saves a walk through the graph and an all-reduce a step",
        ),
    )


def wasted_steps(facts: JobFacts) -> Iterator[Diagnosis]:
    """Reports that the median rank's main thread waits for data 15 % of a step, or saves checkpoints 10 % of it."""
    runs = _split_runs(facts)
    if not runs or facts.step_seconds is None:
        return
    for each in WASTES:
        usual = median_low(run.activity.get(each.kind, 0.0) for run in runs)
        if usual < each.share * facts.step_seconds or usual < LEAST_SECONDS:
            continue
        line = next((run.lines[each.kind] for run in runs if each.kind in run.lines), None)
        yield Diagnosis(
            key=each.key,
            title=f"{each.title}: {duration(usual)} of {duration(facts.step_seconds)}",
            confidence=0.9,
            cost_seconds=usual,
            evidence=(
                f"the usual rank's main thread is in {each.kind} for so long"
                + (f", most often at {line}" if line is not None else ""),
            ),
            fix=each.fix,
        )


CHECKS = (late_rank, many_exchanges, unused_parameters, wasted_steps)
