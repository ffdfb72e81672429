"""What `gradwire predict` shows: a table and a sentence for people, JSON for programs, a picture of step time."""

from collections.abc import Callable
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gradwire.comms.plan.advise import Advice, Offer, Workload
from gradwire.topology.cluster import Cluster

Object = dict[str, object]


def as_json(cluster: Cluster, workload: Workload, advice: Advice, planning_seconds: float) -> Object:
    """The advice as plain dictionaries.

    Args:
        cluster: Where.
        workload: What is moved in a step.
        advice: What was found.
        planning_seconds: How long finding it took.
    """
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
        "backward_seconds": workload.backward_seconds,
        "accumulate": workload.accumulate,
        "plans": {offer.name: _offer(offer) for offer in advice.offers},
        "recommend": {
            "plan": advice.recommend.plan,
            "compressor": advice.recommend.compressor,
            "why": advice.recommend.why,
        },
        "planning_seconds": planning_seconds,
    }


def _offer(offer: Offer) -> Object:
    return {
        "plan": offer.plan.name, "compressor": offer.compressor, "chunks": offer.plan.chunks, "seconds": offer.seconds,
        "step_seconds": offer.step_seconds, "exposed_seconds": offer.exposed_seconds, "hidden": offer.hidden,
        "bytes_by_level": offer.plan.bytes_by_level, "limit": offer.limit, "caution": offer.caution,
        "available": offer.available,
    }  # fmt: skip


def as_table(
    console: Console,
    cluster: Cluster,
    workload: Workload,
    advice: Advice,
    planning_seconds: float,
    *,
    everything: bool = False,
) -> None:
    """Prints the advice: the recommendation, then the rows that bear on it.

    Args:
        console: Where to.
        cluster: Where the ranks are.
        workload: What is moved in a step.
        advice: What was found.
        planning_seconds: How long finding it took.
        everything: Every row, with what other libraries run.
    """
    chosen, known = advice.recommend, workload.backward_seconds > 0
    console.print(f"recommended: plan {chosen.plan}, compressor {chosen.compressor}", style="bold", highlight=False)
    console.print(f"{chosen.why}\n", highlight=False)
    console.print(
        f"{describe_cluster(cluster)}; {workload.gradient_nbytes / 1e6:.1f} MB of gradients"
        + (f", backward {workload.backward_seconds * 1e3:g} ms" if known else "")
        + (f", {workload.accumulate} micro-batches a step" if workload.accumulate > 1 else ""),
        highlight=False,
    )
    table = Table(box=SIMPLE_HEAD, padding=0)
    for heading in ("", "plan", "compressor", "step ms", "comm ms", "NIC MB", *(["hidden"] if known else []), "limit"):
        table.add_column(heading, justify="right" if heading.endswith(("ms", "MB")) else "left", overflow="fold")
    shown = advice.offers if everything else offers_that_matter(advice)
    for offer in sorted(shown, key=lambda offer: (not _is_recommended(offer, advice), offer.step_seconds)):
        table.add_row(*_row(offer, advice, known))
    console.print(table)
    legend = [
        "*: recommended",
        "flat: one all-reduce over all ranks, as plain DDP",
        "comm: one all-reduce of all gradients",
        "NIC: sent by a node",
    ]
    legend += ["hidden: adds nothing to backward but its last bucket"] if known else []
    legend += ["!: see the note"] if any(offer.caution for offer in shown) else []
    legend += ["-: for comparison: plan auto takes another"] if everything else []
    console.print("; ".join(legend), highlight=False)
    for offer in advice.offers:
        if offer.caution and offer.plan.name == "flat":
            console.print(f"note: {offer.caution}", highlight=False)
    console.print(describe_effort(planning_seconds, len(advice.offers) - len(shown)), highlight=False)


def describe_cluster(cluster: Cluster) -> str:
    """Its nodes and ranks, and what a node has towards the others."""
    nic = cluster.levels[-1].link
    cards = f"{nic.nics} card{'s' if nic.nics > 1 else ''}"
    return f"{cluster.describe()}, {nic.bytes_per_second * 8 / 1e9:g} Gbit/s a node through {cards}"


def describe_effort(planning_seconds: float, left_out: int) -> str:
    """How long planning took, and how many rows are not shown."""
    return f"planned in {planning_seconds * 1e3:.0f} ms" + (f"; --all shows {left_out} more rows" if left_out else "")


def offers_that_matter(advice: Advice) -> tuple[Offer, ...]:
    """What plain DDP does, the best exact plan, and the best plan of each compressor; the recommended one always."""
    kept = {id(offer): offer for offer in advice.offers if _is_recommended(offer, advice) or offer.name == "flat"}
    best: dict[str, Offer] = {}
    for offer in advice.offers:
        rival = best.get(offer.compressor)
        if offer.available and (rival is None or offer.step_seconds < rival.step_seconds):
            best[offer.compressor] = offer
    kept |= {id(offer): offer for offer in best.values()}
    return tuple(kept.values())


def _is_recommended(offer: Offer, advice: Advice) -> bool:
    verdict = advice.recommend
    return offer.available and (offer.plan.name, offer.compressor) == (verdict.plan, verdict.compressor)


def _row(offer: Offer, advice: Advice, known: bool) -> list[str]:
    mark = "*" if _is_recommended(offer, advice) else "!" if offer.caution else " " if offer.available else "-"
    return [
        mark,
        "flat (as DDP)" if offer.name == "flat" else offer.plan.name,
        offer.compressor,
        f"{offer.step_seconds * 1e3:.2f}",
        f"{offer.seconds * 1e3:.2f}",
        f"{offer.plan.bytes_by_level.get('inter_node', 0.0) / 1e6:.1f}",
        *(["yes" if offer.hidden else "no"] if known else []),
        offer.limit.removesuffix(" of messages"),
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
"""What is drawn; leader and halving_doubling lie on other lines."""


def node_counts(most: int) -> list[int]:
    """Powers of two from 1 to `most`, and at least to 16, and `most` itself."""
    highest = max(most, 16)
    counts = {1 << power for power in range(highest.bit_length()) if 1 << power <= highest}
    return sorted(counts | {most})


def draw(file: Path, advice_for: Callable[[int], Advice], nodes: int) -> None:
    """Writes the picture; its kind goes by the file's ending.

    Args:
        file: Where to.
        advice_for: Number of nodes -> what is predicted for them.
        nodes: The number that was asked for, marked in the picture.

    Raises:
        RuntimeError: matplotlib is not installed.
        ValueError: matplotlib knows no such kind of picture.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError("`plot` needs matplotlib: install gradwire[plot]") from None
    counts = node_counts(nodes)
    advices = [advice_for(count) for count in counts]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    known = {offer.name for offer in advices[0].offers}
    for name in LINES:
        if name in known:
            axes.plot(counts, [advice.offer(name).step_seconds * 1e3 for advice in advices], marker=".", label=name)
    axes.axvline(nodes, color="grey", linewidth=0.8)
    axes.set(xscale="log", xlabel="nodes", ylabel="step: backward and what communication adds (ms)")
    axes.set_xscale("log", base=2)
    axes.legend(fontsize="small")
    figure.savefig(file)
