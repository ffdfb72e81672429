"""Output of `gradwire predict`: a table and sentences for people, JSON for programs, a picture of step time."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gradwire.bench.plot.style import BASELINE, PEERS, load_pyplot, save, strip
from gradwire.bench.prediction import exact_candidates
from gradwire.comms.plan.advise import SAY_OPTIMIZER, WORTHWHILE, Advice, Candidate, Workload
from gradwire.comms.plan.overlap import least_compute_seconds
from gradwire.compressors.registry import options_of
from gradwire.topology.cluster import Cluster
from gradwire.topology.wording import ms, page, rate

Object = dict[str, object]

RARELY_OR_ALONE = "one node alone, or gradwire.Outer, which exchanges every few steps"
"""Recommended first if one node alone is faster than every plan that sends gradients at each step."""
TORCH_HOOK = "torch's own fp16 hook, without gradwire"
"""Recommended first if it is faster than every setting of gradwire that could be recommended."""
WRITE_TORCH_HOOK = "model.register_comm_hook(None, default_hooks.fp16_compress_hook)"
"""`default_hooks` is torch.distributed.algorithms.ddp_comm_hooks.default_hooks."""

TCP_IS_BOUND = (
    "NCCL over TCP is taken to reach the whole rate of the cards, which is an upper bound: 11 to 60 of 100 Gbit/s were "
    "reported. Measure yours with nccl-tests, and give it as --nic."
)
"""Said where cards have no RDMA. Source: NVIDIA/nccl issues 209 (10.7 to 41 Gbit/s where iperf3 had 92), 450 (4 to 6
GB/s) and 1447 (about 60 Gbit/s), by releases, channels and sockets: no one factor fits them."""

BESIDES = {None: "recommended", RARELY_OR_ALONE: "with gradients at every step", TORCH_HOOK: "with gradwire"}
"""What is recommended first -> how the settings of the hook are introduced."""


@dataclass(frozen=True, slots=True)
class Gains:
    """Speed-ups of training on several nodes over one node: samples a second, at the same batch on each rank.

    The one node trains with its best exact plan. 4 nodes with 3.2 process 3.2 times as many samples a second as it
    does.

    Attributes:
        nodes: Number of nodes.
        flat: Speed-up with one all-reduce over all ranks, as in plain DDP.
        exact: Speed-up with the best exact plan.
        recommended: Speed-up with the recommended plan and compressor; with torch's fp16 hook if that is recommended
            instead, see `Answer.first`.
        plain: Words for the setting of `flat` in the printed sentence.
        one: Words for the one node in the printed sentence.
    """

    nodes: int
    flat: float
    exact: float
    recommended: float
    plain: str = "plain DDP"
    one: str = "one"

    @classmethod
    def over_one_node(cls, nodes: int, advice: Advice, alone: Advice, torch_hook: Candidate | None) -> "Gains":
        """Computes speed-ups in samples a second, at the same batch on each rank, from predicted step times.

        Each is the number of nodes, times the step time of one node, divided by the step time of all.

        Args:
            nodes: Number of nodes.
            advice: Predictions for all of them.
            alone: Predictions for one of them; its step time is that of its best exact plan.
            torch_hook: Prediction for torch's fp16 hook on all nodes; None leaves this hook out of the choice of what
                is recommended.
        """
        one = min(candidate.step_seconds for candidate in exact_candidates(alone))
        best = _recommended(advice, torch_hook, known=True)
        return cls(
            nodes=nodes,
            flat=nodes * one / advice.candidate("flat").step_seconds,
            exact=nodes * one / min(candidate.step_seconds for candidate in exact_candidates(advice)),
            recommended=nodes * one / best.step_seconds,
        )

    @property
    def one_is_faster(self) -> bool:
        """Whether no plan makes the nodes train faster than one of them alone: all speed-ups are at most 1."""
        return max(self.exact, self.flat, self.recommended) <= 1

    def as_json(self) -> dict[str, float]:
        """Returns the speed-ups as a dictionary for JSON, with the keys `flat`, `exact` and `recommended`."""
        return {"flat": self.flat, "exact": self.exact, "recommended": self.recommended}

    def __str__(self) -> str:
        """Returns the speed-ups in one sentence."""
        said = f"{self.nodes} nodes train {self.flat:.2f} times as much as {self.one} with {self.plain}"
        said += f", {self.exact:.2f} times with the best exact plan" if self.exact > 1.01 * self.flat else ""
        lossy = self.recommended > 1.01 * max(self.exact, self.flat)
        best = "the best compressor" if self.one_is_faster else "what is recommended"
        said += f", {self.recommended:.2f} times with {best}" if lossy else ""
        return said + (": one node alone is faster" if self.one_is_faster else "") + "."


@dataclass(frozen=True, slots=True)
class Answer:
    """Predictions for one cluster and workload.

    Attributes:
        cluster: Cluster that the predictions are for.
        workload: Gradients and computation of one step.
        advice: Predictions and recommendation.
        planning_seconds: Time that predicting took.
        gains: Throughput relative to one node; None for a single node, or if the computing time is unknown.
        torch_hook: Prediction for torch's fp16 hook; None if gradients are not float32, which it would not shorten.
        assumed_compute: Device that the computing time was assumed for, in words; empty if the time was given.
        assumed_memory: Card whose memory prices the compressors, in words; empty if the GPUs' own rate is known.
        kernels: Whether compressors have kernels for these processors; else torch's operators are what is priced.
        over_tcp: Whether NCCL is taken to send through TCP, so that the rate of the cards is an upper bound.
    """

    cluster: Cluster
    workload: Workload
    advice: Advice
    planning_seconds: float
    gains: Gains | None
    torch_hook: Candidate | None = None
    assumed_compute: str = ""
    assumed_memory: str = ""
    kernels: bool = True
    over_tcp: bool = False

    @property
    def first(self) -> str | None:
        """What the answer recommends in place of gradwire's hook; None if it recommends the hook.

        - `RARELY_OR_ALONE`: if there are several nodes, the computing time is known, and no plan makes them train
          faster than one of them alone.
        - `TORCH_HOOK`: otherwise, if a step with the setting that `advice` recommends takes more than 5 % longer than
          with torch's fp16 hook; without a known computing time only if that setting compresses.
        """
        if self.gains is not None and self.gains.one_is_faster:
            return RARELY_OR_ALONE
        best = _recommended(self.advice, self.torch_hook, known=self.workload.backward_seconds > 0)
        return TORCH_HOOK if best is self.torch_hook else None


def as_json(answer: Answer) -> Object:
    """Returns the answer as dictionaries that JSON can hold: its inputs, all predictions and the recommendation.

    Args:
        answer: The predictions.
    """
    cluster, workload, advice, gains = answer.cluster, answer.workload, answer.advice, answer.gains
    return {
        "cluster": cluster.describe(),
        "ranks": cluster.size,
        "links": {
            level.name: {
                "alpha_seconds": level.link.alpha_seconds,
                "nics": level.link.nics,
                "bytes_per_second": level.link.bytes_per_second,
            }
            for level in cluster.levels
        },
        "gradient_nbytes": workload.gradient_nbytes,
        "forward_seconds": workload.rest_seconds,
        "backward_seconds": workload.backward_seconds,
        "compute_assumed": answer.assumed_compute or None,
        "memory_assumed": answer.assumed_memory or None,
        "kernels": answer.kernels,
        "nic_rate_is_upper_bound": answer.over_tcp,
        "accumulate": workload.accumulate,
        "torch_fp16_hook": None if answer.torch_hook is None else _candidate(answer.torch_hook),
        "plans": {candidate.name: _candidate(candidate) for candidate in advice.candidates},
        "recommend": {
            "plan": advice.recommend.plan,
            "compressor": advice.recommend.compressor,
            "why": advice.recommend.why,
            "write": advice.recommend.write,
            "dense_steps": dense_steps(advice.recommend.compressor),
            "first": answer.first,
        },
        "against_one_node": None if gains is None else gains.as_json(),
        "planning_seconds": answer.planning_seconds,
    }


def break_even(nodes: int, advice: Advice, torch_hook: Candidate | None) -> str:
    """Returns a sentence with the computing time of a step above which several nodes beat one; empty for one node.

    It is printed if the computing time is unknown. Source: the model in `comms/plan/overlap.py`.

    Args:
        nodes: Number of nodes.
        advice: Predictions for all nodes together.
        torch_hook: Prediction for torch's fp16 hook; None: it is not recommended.
    """
    if nodes < 2:
        return ""
    flat = least_compute_seconds(nodes, advice.candidate("flat").seconds)
    best = least_compute_seconds(nodes, _recommended(advice, torch_hook, known=False).seconds)
    said = f"{nodes} nodes beat one if a step on one node takes more than {ms(flat)} ms with plain DDP"
    return said + (f", {ms(best)} ms with what is recommended" if best < 0.99 * flat else "") + "."


def dense_steps(compressor: str) -> int:
    """Returns the number of first steps in which a compressor, with default options, sends exact gradients.

    Args:
        compressor: Name of a registered compressor; 0 is returned for one without the option `warmup_steps`.
    """
    steps = options_of(compressor).get("warmup_steps", 0)
    assert isinstance(steps, int)
    return steps


def _candidate(one: Candidate) -> Object:
    return {
        "plan": one.plan.name, "compressor": one.compressor, "chunks": one.plan.chunks, "seconds": one.seconds,
        "step_seconds": one.step_seconds, "exposed_seconds": one.exposed_seconds, "hidden": one.hidden,
        "bytes_by_level": one.plan.bytes_by_level, "limit": one.limit, "warning": one.warning,
        "available": one.available,
    }  # fmt: skip


def as_table(console: Console, answer: Answer, *, everything: bool = False, assumed: str = "") -> None:
    """Prints the advice: the gain of the nodes, the recommendation, then the rows that matter for it.

    Args:
        console: Console to print to, without highlighting.
        answer: Predictions and recommendation.
        everything: True prints every row, also those of other libraries.
        assumed: Name of the preset that was assumed because the user set no machine; empty if one was set.
    """
    cluster, workload, advice, gains = answer.cluster, answer.workload, answer.advice, answer.gains
    # First the gain over one node, and what to use instead if there is none.
    chosen, known = advice.recommend, workload.backward_seconds > 0
    gain = str(gains) if gains is not None else break_even(len(cluster.nodes), advice, answer.torch_hook)
    if gain:
        console.print(f"{gain} Predicted, not measured.\n", style="bold")
    first, hook = answer.first, answer.torch_hook
    if first is not None:
        console.print(f"recommended: {first}", style="bold")
    if first == RARELY_OR_ALONE:
        console.print("write: outer = gradwire.Outer(model, optimizer)", markup=False)
        console.print(f"Where it ends, and its settings: {page('how-to/slow_links.md')}\n", soft_wrap=True)
    elif first is not None and hook is not None:
        console.print(f"write: {WRITE_TORCH_HOOK}", markup=False, soft_wrap=True)
        console.print(f"A step takes {ms(hook.step_seconds)} ms with it. It sums in fp16, without error feedback.\n")
    # The recommendation, how to write it, and why.
    choice = f"plan {chosen.plan}, compressor {chosen.compressor}"
    console.print(f"{BESIDES[first]}: {choice}", style="" if first else "bold")
    console.print(f"write: {advice.recommend.write}", markup=False)
    if dense := dense_steps(chosen.compressor):
        exact = ms(_best_exact(advice).step_seconds)
        console.print(
            f"Its first {dense} steps travel exactly (warmup_steps) and take {exact} ms: a short trial measures those."
        )
    console.print(f"{chosen.why}\n")
    # The inputs of the prediction, with everything that was assumed.
    console.print(
        f"{describe_cluster(cluster)}"
        + (f" (assumed: {assumed}; --preset or --topology says which)" if assumed else "")
        + f"; {workload.gradient_nbytes / 1e6:.1f} MB of gradients"
        + (f", forward {ms(workload.rest_seconds)} ms, backward {ms(workload.backward_seconds)} ms" if known else "")
        + (f", {workload.accumulate} micro-batches a step" if workload.accumulate > 1 else ""),
    )
    if answer.assumed_compute:
        console.print(
            f"Computing is assumed: {answer.assumed_compute}. Measure yours, a loss.backward() without DDP, and give "
            "it as --backward-ms.",
            markup=False,
        )
    if answer.assumed_memory:
        console.print(
            f"The GPUs' memory, which prices compressors, is assumed: {answer.assumed_memory}. `gradwire topo --json` "
            "reads theirs on the machine itself, for --topology.",
            markup=False,
        )
    if not answer.kernels:
        console.print(
            "Compressors have no kernels for AMD's GPUs: priced are torch's operators, which take far longer."
        )
    if answer.over_tcp:
        console.print(TCP_IS_BOUND, markup=False)
    # The table, fastest step first after the recommended one, and its legend and notes.
    over = "NVLink" if cluster.levels[-1].link.nvlink else "NIC"
    adds = ["adds ms"] if known else []
    table = table_of("", "plan", "compressor", "step ms", "comm ms", f"{over} MB", *adds, "limit")
    shown = advice.candidates if everything else candidates_that_matter(advice, answer.torch_hook)
    best = _recommended(advice, hook, known=known)
    for candidate in sorted(shown, key=lambda candidate: (candidate is not best, candidate.step_seconds)):
        table.add_row(*_row(candidate, best, known))
    console.print(table)
    legend = [
        "*: recommended",
        "flat: one all-reduce over all ranks, as plain DDP",
        *(["step: forward, backward, and what communication adds"] if known else []),
        "comm: one all-reduce of all gradients",
        f"{over}: sent by a {'rack' if cluster.depth > 2 else 'node'}",
    ]
    legend += ["adds: what of it does not hide behind backward"] if known else []
    legend += ["torch fp16 hook: torch's fp16_compress_hook"] if answer.torch_hook in shown else []
    legend += ["!: see the note"] if any(candidate.warning for candidate in shown) else []
    legend += ["-: for comparison: plan auto takes another"] if everything else []
    console.print("; ".join(legend))
    noted = [candidate for candidate in shown if candidate.warning]
    notes = list(dict.fromkeys(candidate.warning for candidate in noted))
    for note in notes:
        console.print(f"note: {note.removesuffix(SAY_OPTIMIZER)}")
    if any(note.endswith(SAY_OPTIMIZER) for note in notes):
        console.print("note: these are for any optimizer; --optimizer NAME judges for yours")
    if len(shown) < len(advice.candidates):
        console.print(f"--all shows {len(advice.candidates) - len(shown)} more rows")


def table_of(*headings: str) -> Table:
    """Returns a table for rich with the given columns and no rows; numbers of ms and MB are right-aligned.

    Args:
        headings: Heading of each column, which is right-aligned if its heading ends in "ms" or "MB", else left-aligned.
    """
    table = Table(box=SIMPLE_HEAD, padding=0)
    for heading in headings:
        table.add_column(heading, justify="right" if heading.endswith(("ms", "MB")) else "left", overflow="fold")
    return table


def describe_cluster(cluster: Cluster) -> str:
    """Describes a cluster: its nodes, ranks, and the rate of a node (or rack) towards the others."""
    nic, unit = cluster.levels[-1].link, "rack" if cluster.depth > 2 else "node"
    by_unit = [rate(each) for each in cluster.levels[-1].unit_rates]
    shown = f"{', '.join(by_unit)} of data by {unit}" if by_unit else f"{rate(nic.bytes_per_second)} of data a {unit}"
    over = "over NVLink, no card" if nic.nvlink else f"through {nic.nics} NIC{'s' * (nic.nics > 1)}"
    return f"{cluster.describe()}, {shown} {over}"


def candidates_that_matter(advice: Advice, torch_hook: Candidate | None) -> tuple[Candidate, ...]:
    """Picks the rows of the short table: plain DDP, torch's fp16 hook, the best exact plan and the recommendation.

    A candidate that is two of these occurs once. They are not sorted by time.

    Args:
        advice: Predictions for every plan and compressor, and the recommendation.
        torch_hook: Prediction for torch's fp16 hook; None leaves it out.
    """
    kept = [
        candidate for candidate in advice.candidates if _is_recommended(candidate, advice) or candidate.name == "flat"
    ]
    kept += [torch_hook] if torch_hook is not None else []
    best = _best_exact(advice)
    return tuple(kept) if best in kept else (*kept, best)


def _best_exact(advice: Advice) -> Candidate:
    return min(exact_candidates(advice), key=lambda candidate: candidate.step_seconds)


def _recommended(advice: Advice, torch_hook: Candidate | None, *, known: bool) -> Candidate:
    """Returns the candidate that is marked as recommended: gradwire's own, or torch's fp16 hook.

    The hook is, if a step with gradwire's own takes more than 5 % (`WORTHWHILE`) longer; but not if the computing time
    is unknown and gradwire's own is exact, because communication may then be hidden.

    Args:
        advice: Predictions for gradwire.
        torch_hook: Prediction for torch's fp16 hook, or None.
        known: Whether the computing time is known.
    """
    own = next(candidate for candidate in advice.candidates if _is_recommended(candidate, advice))
    judged = torch_hook if known or own.compressor != "none" else None
    return own if judged is None or judged.step_seconds * (1 + WORTHWHILE) >= own.step_seconds else judged


def _is_recommended(candidate: Candidate, advice: Advice) -> bool:
    verdict = advice.recommend
    return (
        candidate in advice.candidates
        and candidate.available
        and (candidate.plan.name, candidate.compressor) == (verdict.plan, verdict.compressor)
    )


def _row(candidate: Candidate, best: Candidate, known: bool) -> list[str]:
    hook = candidate.name == "torch fp16 hook"
    mark = (
        "*" if candidate is best
        else "!" if candidate.warning else " " if candidate.available or hook else "-"
    )  # fmt: skip
    return [
        mark,
        "flat (as DDP)" if candidate.name == "flat" else candidate.name if hook else candidate.plan.name,
        candidate.compressor,
        f"{candidate.step_seconds * 1e3:.2f}",
        f"{candidate.seconds * 1e3:.2f}",
        f"{list(candidate.plan.bytes_by_level.values())[-1] / 1e6:.1f}",
        *([f"{candidate.exposed_seconds * 1e3:.2f}"] if known else []),
        candidate.limit.removesuffix(" of messages"),
    ]


LINES = (
    "flat",
    "hierarchical",
    "tree",
    "hierarchical+bf16",
    "hierarchical+int8",
    "hierarchical+int4",
    "hierarchical+onebit",
    "hierarchical+powersgd",
    "hierarchical+dgc",
)
"""Candidates drawn beside the recommended one; the curves of leader and halving_doubling coincide with others."""


def node_counts(most: int) -> list[int]:
    """Returns the node counts to draw: powers of two up to the larger of `most` and 16, and `most` itself."""
    highest = max(most, 16)
    counts = {1 << power for power in range(highest.bit_length()) if 1 << power <= highest}
    return sorted(counts | {most})


def draw(file: Path, advice_for: Callable[[int], Advice], nodes: int) -> None:
    """Draws predicted step times over the node counts of `node_counts`, and writes the picture.

    Args:
        file: File to write; its ending decides the format.
        advice_for: Number of nodes -> predictions for them; called once for each count.
        nodes: Number of nodes that was asked for; marked in the picture.

    Raises:
        RuntimeError: matplotlib is not installed.
        ValueError: matplotlib knows no such kind of picture.
    """
    pyplot = load_pyplot()
    counts = node_counts(nodes)
    advices = [advice_for(count) for count in counts]
    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    known = {candidate.name: candidate for candidate in advices[0].candidates}
    chosen = advices[counts.index(nodes)].recommend
    recommended = chosen.plan if chosen.compressor == "none" else f"{chosen.plan}+{chosen.compressor}"
    for name in dict.fromkeys((*LINES, recommended)):
        if name not in known:
            continue
        seconds = [advice.candidate(name).step_seconds * 1e3 for advice in advices]
        warned = " (not recommended)" if known[name].warning else ""
        note = " (recommended)" if name == recommended and not warned else warned
        label = "flat (as plain DDP)" if name == "flat" else f"{name}{note}"
        style = {"color": BASELINE, "linewidth": 2} if name == "flat" else {"linestyle": ":" if warned else "-"}
        axes.plot(counts, seconds, marker=".", label=label, **style)
    axes.axvline(nodes, color=PEERS, linewidth=0.8)
    axes.annotate(f"{nodes} asked for", (nodes, 1), xycoords=("data", "axes fraction"), ha="right", va="top",
                  rotation=90, fontsize=8, color="#555555")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(xlabel="nodes", ylabel="step, ms", title="Predicted time of a training step")
    axes.grid(axis="y", color="#eeeeee")
    strip(axes)
    figure.legend(fontsize="small", frameon=False, loc="outside right upper")  # beside the curves, never on one
    save(figure, file, ["Predicted by gradwire predict, not measured."])
