"""Advice on plan and compressor: predicts a training step for every combination, and recommends one.

A step is a backward pass that produces buckets at an even pace and a network that takes them one after another; the
optimizer can begin when both are done. What communication adds to the backward pass is called exposed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from gradwire.comms.plan.codec_price import CODEC_FACTS, OPTIMIZER_NAMES
from gradwire.comms.plan.cost import EXACT, CodecPrice
from gradwire.comms.plan.plan import BUCKET_NBYTES, HALVING_DOUBLING, NVLS_TREE, TREE, Plan
from gradwire.comms.plan.planner import (
    HIERARCHY_HOST_SECONDS,
    MINIMUM_GAIN,
    NCCL_MINIMUM_GAIN,
    NCCL_NAMES,
    candidate_plans,
)
from gradwire.compressors.optim.fit import ADAPTIVE, ORTHOGONALISING, known_to_end_behind
from gradwire.compressors.registry import options_of
from gradwire.topology.cluster import Cluster
from gradwire.topology.wording import ms

PLANS = ("flat", "hierarchical", "leader")
"""Plans that gradwire can run."""

REFERENCES = (TREE, NVLS_TREE, HALVING_DOUBLING)
"""Plans that other libraries run, predicted for comparison. NCCL may choose `tree` for the flat plan and, if an
NVSwitch sums, `nvls_tree`."""

LEAST_DISTORTION_FIRST = tuple(CODEC_FACTS)
"""Compressors in ascending order of distortion; an unknown one comes last."""

SGD_ONLY = {
    "onebit": "its momentum takes the place of SGD's",
    "dgc": "its momentum correction takes the place of SGD's",
}
"""Compressors that require an optimizer, and why."""

LONG_RUNS_ONLY = {"dgc": "needs a very long run: in the runs that were tried it did not end where an exact one ends"}
"""Compressor -> why it is never recommended by itself: docs/how-to/choose_a_compressor.md has it last, and
docs/results/convergence.md the trainings."""

ANY_OPTIMIZER = "any"
"""Value of `optimizer` if it is not known: only compressors that suit both SGD and AdamW are recommended."""
SAY_OPTIMIZER = "; say which optimizer is yours"
"""End of a warning that does not hold for every optimizer, if the optimizer is not known."""
TRIED_OPTIMIZERS = ("sgd", "adamw")
"""Optimizers with trainings in docs/results/convergence.md; a recommendation for any optimizer suits both."""
UNLIKE_OPTIMIZERS = ("muon",)
"""Optimizers that end at a higher loss with compressors that suit `TRIED_OPTIMIZERS`: docs/results/optimizers.md."""

WORTHWHILE = 0.05
"""Compression is recommended if it shortens the step by more than this share; within it, least distortion wins."""

MOST_OF_IT = 0.75
"""Share of the best compressor's saving that is enough if the duration of the backward pass is not known."""

WAIT_SHARE = 0.17
"""Part of a compressed bucket's time that it waits if another one is in flight: on CPUs the nodes do not send the
messages of both in the same order, and one node's link is idle meanwhile. 2 emulated nodes, three buckets, links of 40
and 100 Mbit/s, docs/results/predictions.md."""

HIDDEN = 0.02
"""Share of the backward pass; communication that adds less counts as hidden."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step: gradients to exchange, and computation.

    Attributes:
        gradient_nbytes: Bytes of all gradients.
        backward_seconds: Seconds of a backward pass without communication; 0 if unknown.
        bucket_nbytes: Bytes of a bucket.
        bucket_sizes: Bytes of each bucket in the order of the backward pass, if the parameters' shapes are known.
        optimizer: `sgd`, `adam`, ...: some compressors require one.
        accumulate: Micro-batches of a step. All but the last send nothing (`no_sync`), and nothing hides behind them.
        micro_seconds: Seconds of each of those; 0 takes those of a backward pass.
        rest_seconds: Seconds of forward pass, data loading and optimizer in a step.

    Raises:
        ValueError: `accumulate` is less than 1.
    """

    gradient_nbytes: int
    backward_seconds: float = 0.0
    bucket_nbytes: int = BUCKET_NBYTES
    optimizer: str = "sgd"
    accumulate: int = 1
    micro_seconds: float = 0.0
    rest_seconds: float = 0.0
    bucket_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError(f"`accumulate` is {self.accumulate}; wanted a number of micro-batches of at least 1")

    def halved(self) -> "Workload":
        """Returns the same step with half of the bytes an element: float32 gradients that travel in 16 bits."""
        sizes = tuple(nbytes // 2 for nbytes in self.bucket_sizes)
        gradient, bucket = self.gradient_nbytes // 2, max(1, self.bucket_nbytes // 2)
        return replace(self, gradient_nbytes=gradient, bucket_nbytes=bucket, bucket_sizes=sizes)

    @property
    def silent_seconds(self) -> float:
        """Seconds of the micro-batches that send nothing."""
        return (self.accumulate - 1) * (self.micro_seconds or self.backward_seconds)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan with one compressor.

    Attributes:
        name: `hierarchical`, `hierarchical+int8`, ...
        plan: Plan for the whole gradient in one bucket.
        compressor: `none` or a compressor's name.
        seconds: Predicted time of an all-reduce of the whole gradient.
        step_seconds: Predicted seconds of a step: its micro-batches that send nothing, its last backward pass until all
            gradients are averaged, and forward pass, data loading and optimizer as far as the workload gives them.
        exposed_seconds: Seconds that communication adds to the backward pass.
        hidden: Whether communication adds next to nothing to the backward pass but the all-reduce of the last bucket,
            which nothing can hide; False if the duration of the backward pass is not known.
        limit: Resource that limits the all-reduce of the whole gradient, in words.
        warning: Why it is not recommended whatever its speed; empty if nothing speaks against it.
        available: Whether it may be recommended: without a compressor, if the option `plan` has the name; with one, if
            the plan is `hierarchical`. (Compressors also run with `flat` and `leader`, which are not recommended.)
    """

    name: str
    plan: Plan
    compressor: str
    seconds: float
    step_seconds: float
    exposed_seconds: float
    hidden: bool
    limit: str
    warning: str
    available: bool


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommended plan and compressor, with the reason.

    Attributes:
        plan: Name of the plan.
        compressor: Name of the compressor; `none` for exact sums.
        why: Reason, in sentences.
    """

    plan: str
    compressor: str
    why: str

    @property
    def write(self) -> str:
        """What to write in a script: a line of code, or words that say that plain DDP needs none."""
        if self.compressor in SGD_ONLY:
            momentum = "compressor_options=gradwire.take_momentum(optimizer)"
            return f'state = gradwire.HookState(model, compressor="{self.compressor}", {momentum})'
        if self.compressor != "none":
            return f'state = gradwire.HookState(model, compressor="{self.compressor}")'
        if self.plan == "flat":
            return "nothing: plain DDP is as fast"
        return "state = gradwire.HookState(model)"


@dataclass(frozen=True, slots=True)
class Advice:
    """All candidates, and the recommendation.

    Attributes:
        candidates: Every plan with every compressor that was considered.
        recommend: The plan and the compressor to use, with the reason.
    """

    candidates: tuple[Candidate, ...]
    recommend: Recommendation

    def candidate(self, name: str) -> Candidate:
        """Returns one candidate.

        Args:
            name: Name of a plan, such as `flat`; followed by `+` and a compressor, as in `hierarchical+int8`.

        Raises:
            StopIteration: There is no such candidate.
        """
        return next(candidate for candidate in self.candidates if candidate.name == name)


def advise(cluster: Cluster, workload: Workload, prices: Sequence[CodecPrice], *, library: str = "gloo") -> Advice:
    """Predicts every plan with every compressor and recommends one.

    Args:
        cluster: Placement of the ranks, and link rates.
        workload: The training step.
        prices: Costs of the compressors to consider; `none` is always considered.
        library: Library that runs a flat plan: `nccl` takes the faster of ring and tree, `gloo` a ring.
    """
    considered = (EXACT, *(price for price in prices if price.name != EXACT.name))
    candidates = [
        _candidate(cluster, workload, name, price, considered, library)
        for name in (*PLANS, *REFERENCES)
        for price in considered
        if name in PLANS or price.name in ("none", "fp16", "bf16")
        if name != NVLS_TREE or _has_nvls_tree(cluster)
    ]
    return Advice(tuple(candidates), _recommend(candidates, workload, cluster))


def _has_nvls_tree(cluster: Cluster) -> bool:
    return cluster.fabric is not None and cluster.fabric.nvls and len(cluster.nodes) > 1 and cluster.widest(0) > 1


def step_seconds(bucket_plans: Sequence[Plan], arrivals: Sequence[float], wait_share: float = 0.0) -> float:
    """Returns the seconds from the start of the backward pass to the end of the last bucket's all-reduce.

    Args:
        bucket_plans: Plans of the buckets, in order.
        arrivals: Seconds at which the backward pass has computed each bucket.
        wait_share: Part of its own time that a bucket waits on top if another one is in flight when it is computed.
    """
    free = 0.0
    for plan, arrival in zip(bucket_plans, arrivals, strict=True):
        busy = plan.busy_seconds * (1 + wait_share * (free > arrival))
        free = max(free, arrival + plan.seconds - plan.busy_seconds) + busy
    return free


def buckets_of(workload: Workload) -> list[int]:
    """Returns the sizes of the buckets in bytes: those that are given, else full ones and the remainder."""
    full, rest = divmod(workload.gradient_nbytes, workload.bucket_nbytes)
    return [*workload.bucket_sizes] or [workload.bucket_nbytes] * full + ([rest] if rest else [])


def _candidate(
    cluster: Cluster, workload: Workload, name: str, price: CodecPrice, prices: Sequence[CodecPrice], library: str
) -> Candidate:
    def cheapest(nbytes: int) -> Plan:
        return min(_priced(cluster, nbytes, name, price, library), key=lambda plan: plan.seconds)

    sizes = buckets_of(workload)
    by_size = {nbytes: cheapest(nbytes) for nbytes in set(sizes)}
    arrivals = [workload.backward_seconds * nbytes / workload.gradient_nbytes for nbytes in accumulate(sizes)]
    wait_share = WAIT_SHARE if library == "gloo" and price.name != "none" else 0.0
    last = step_seconds([by_size[nbytes] for nbytes in sizes], arrivals, wait_share)
    whole, exposed = cheapest(workload.gradient_nbytes), max(0.0, last - workload.backward_seconds)
    return Candidate(
        name if price.name == "none" else f"{name}+{price.name}",
        whole,
        price.name,
        whole.seconds,
        workload.silent_seconds + workload.rest_seconds + workload.backward_seconds + exposed,
        exposed,
        _is_hidden(exposed, workload, by_size[sizes[-1]] if sizes else whole),
        limit_in_words(whole.limit, cluster) if whole.phases else NOTHING_TO_SEND,
        warning_of(price.name, workload.optimizer, library=library),
        name in PLANS if price.name == "none" else name == "hierarchical",
    )


def _priced(cluster: Cluster, nbytes: int, name: str, price: CodecPrice, library: str) -> Iterator[Plan]:
    yield from candidate_plans(cluster, nbytes, name, 0, price)
    if name == "flat" and library == "nccl" and cluster.fabric is None:
        for plan in candidate_plans(cluster, nbytes, TREE, 1, price):
            yield replace(plan, name="flat")


def _is_hidden(exposed: float, workload: Workload, last: Plan) -> bool:
    """Returns whether communication adds next to nothing to the backward pass, except for the last bucket.

    Args:
        exposed: Seconds that communication adds to the backward pass.
        workload: The training step.
        last: Plan of the last bucket, which can never be hidden.

    Returns:
        Whether it is hidden; False if the duration of the backward pass is not known.
    """
    return workload.backward_seconds > 0 and exposed <= last.seconds + HIDDEN * workload.backward_seconds


NOTHING_TO_SEND = "nothing to send"


def limit_in_words(limit: str, cluster: Cluster) -> str:
    """Returns the resource that limits a plan as users call it.

    Args:
        limit: `Plan.limit`: name of a level, `latency` or `processor`.
        cluster: Cluster of the plan.
    """
    names = {
        "latency": "latency of messages",
        "processor": "processor",
        cluster.levels[0].name: "node's links",
        "inter_node": "network card",
    }
    return names.get(limit, f"{limit} links")


def warning_of(compressor: str, optimizer: str, *, library: str = "gloo") -> str:
    """Returns why a compressor is not recommended for the gradients of every step; empty if it may be.

    Args:
        compressor: Name of the compressor, as in `compressor=`.
        optimizer: `sgd`, `adam`, ...; or `ANY_OPTIMIZER`.
        library: Library that runs a flat plan: `nccl` if gradients are on GPUs, else `gloo`. Not used.
    """
    if compressor not in CODEC_FACTS:
        return f"no training with {compressor} was measured here: compare the final loss before you rely on it"
    asked = TRIED_OPTIMIZERS if optimizer == ANY_OPTIMIZER else (optimizer,)
    reason = next(filter(None, (_warning(compressor, each) for each in asked)), "")
    if reason and optimizer == ANY_OPTIMIZER:
        return f"{reason}{SAY_OPTIMIZER}"
    return f"{reason}; the optimizer is {optimizer}" if reason and compressor in SGD_ONLY else reason


def _warning(compressor: str, optimizer: str) -> str:
    if compressor in SGD_ONLY and optimizer.lower() != "sgd":
        return f"{compressor} requires SGD with momentum ({SGD_ONLY[compressor]})"
    cost = known_to_end_behind(compressor, options_of(compressor), optimizer) or LONG_RUNS_ONLY.get(compressor, "")
    if cost:
        return f"{compressor} {cost}"
    trained = CODEC_FACTS[compressor].trained
    untrained = [OPTIMIZER_NAMES[each] for each in _tried_like(optimizer) if each not in trained]
    return f"no training with {compressor} was measured under {' or '.join(untrained)}" if untrained else ""


def _tried_like(optimizer: str) -> tuple[str, ...]:
    """Returns the tested optimizers that behave like this one; all of `TRIED_OPTIMIZERS` if it is unknown."""
    kind = optimizer.lower()
    if any(part in kind for part in ORTHOGONALISING):
        return ("muon",)
    if any(part in kind for part in ADAPTIVE):
        return ("adamw",)
    return ("sgd",) if kind == "sgd" else TRIED_OPTIMIZERS


def condition_of(compressor: str, optimizer: str) -> str:
    """Returns a condition of a recommendation as a sentence; empty if there is none.

    Args:
        compressor: Name of the recommended compressor.
        optimizer: `sgd`, `adam`, ...; or `ANY_OPTIMIZER`.
    """
    if compressor in SGD_ONLY:
        return "It takes over SGD's momentum: compressor_options=gradwire.take_momentum(optimizer)."
    behind = [each.title() for each in UNLIKE_OPTIMIZERS if optimizer == ANY_OPTIMIZER and _warning(compressor, each)]
    return f"Under {behind[0]} it ends at a higher loss: say which optimizer is yours." if behind else ""


def _enough_gain(cluster: Cluster, exact: Candidate, flat: Candidate) -> bool:
    """Returns whether an exact plan gains enough for the planner to take it in place of the flat one.

    Args:
        cluster: Placement of the ranks; on GPUs a hierarchy must gain more.
        exact: The exact plan.
        flat: The flat plan.
    """
    saved = flat.seconds - exact.seconds
    if cluster.fabric is None:
        return saved >= flat.seconds * MINIMUM_GAIN
    return saved > max(flat.seconds * NCCL_MINIMUM_GAIN, exact.plan.chunks * HIERARCHY_HOST_SECONDS)


def _recommend(candidates: Sequence[Candidate], workload: Workload, cluster: Cluster) -> Recommendation:
    able = [candidate for candidate in candidates if candidate.available and not candidate.warning]
    flat = next(candidate for candidate in able if candidate.name == "flat")
    # As the planner chooses: by the all-reduce, so that a hidden one loads the network least.
    exact = min(
        (candidate for candidate in able if candidate.compressor == "none"), key=lambda candidate: candidate.seconds
    )
    if not _enough_gain(cluster, exact, flat):
        exact = flat
    best = min(able, key=lambda candidate: candidate.step_seconds)
    enough = best.step_seconds * (1 + WORTHWHILE)
    if not workload.backward_seconds:
        enough = max(enough, exact.step_seconds - MOST_OF_IT * (exact.step_seconds - best.step_seconds))
    close = [candidate for candidate in able if candidate.step_seconds <= enough]
    mildest = min(close, key=lambda candidate: (distortion_of(candidate.compressor), candidate.step_seconds))
    if mildest.compressor == "none" or mildest.step_seconds > exact.step_seconds * (1 - WORTHWHILE):
        return Recommendation(exact.plan.name, "none", _why_exact(exact, flat, mildest, workload, cluster))
    return Recommendation(mildest.plan.name, mildest.compressor, _why_lossy(mildest, exact, workload))


def distortion_of(compressor: str) -> int:
    """Returns the distortion of a compressor, as its index in `LEAST_DISTORTION_FIRST`."""
    return (
        LEAST_DISTORTION_FIRST.index(compressor)
        if compressor in LEAST_DISTORTION_FIRST
        else len(LEAST_DISTORTION_FIRST)
    )


def _why_exact(exact: Candidate, flat: Candidate, rival: Candidate, workload: Workload, cluster: Cluster) -> str:
    if not exact.plan.phases:
        return "Do not compress: there is one rank, so nothing is sent."
    text = f"Do not compress: {_spent(exact, workload)}"
    if rival.compressor != "none":
        saved = exact.step_seconds - rival.step_seconds
        text += f" {rival.compressor} would save {ms(max(saved, 0.0))} ms, less than {WORTHWHILE:.0%} of the step."
    elif exact.hidden:
        text += " A compressor can save nothing more."
    else:
        text += f" No compressor is predicted to shorten that by more than {WORTHWHILE:.0%}."
    if exact is flat:
        algorithm = exact.plan.phases[0].algorithm
        taken = algorithm == TREE or cluster.fabric is not None
        how = f": with {NCCL_NAMES[algorithm]}, which it takes here" if taken else ""
        gain = MINIMUM_GAIN if cluster.fabric is None else NCCL_MINIMUM_GAIN
        return f"{text} The flat plan{how}: no hierarchy is predicted to be more than {gain:.0%} faster."
    gain = flat.seconds / exact.seconds
    return f"{text} {exact.plan.name} is {gain:.2f}x faster than flat ({ms(flat.seconds)} ms)."


def _why_lossy(chosen: Candidate, exact: Candidate, workload: Workload) -> str:
    known = workload.backward_seconds > 0
    what = (
        ("whole step" if workload.rest_seconds else "step")
        if known
        else "communication (how long backward takes was not given)"
    )
    among = (
        f"within {WORTHWHILE:.0%} of the fastest" if known else f"that save {MOST_OF_IT:.0%} of what the fastest saves"
    )
    return (
        f"{chosen.compressor} shortens the {what} from {ms(exact.step_seconds)} to "
        f"{ms(chosen.step_seconds)} ms, {exact.step_seconds / chosen.step_seconds:.2f}x, because the exact "
        f"all-reduce is limited by {exact.limit}; of the compressors {among} it changes the gradient least. "
        "It is lossy: check the accuracy of the trained model against a run without it. "
        f"{condition_of(chosen.compressor, workload.optimizer)}"
    ).rstrip()


def _spent(candidate: Candidate, workload: Workload) -> str:
    if not workload.backward_seconds:
        return f"the exact all-reduce takes {ms(candidate.seconds)} ms (how long backward takes was not given)."
    if candidate.hidden:
        return f"communication ({ms(candidate.seconds)} ms) hides behind backward ({ms(workload.backward_seconds)} ms)."
    return f"the exact step takes {ms(candidate.step_seconds)} ms."
