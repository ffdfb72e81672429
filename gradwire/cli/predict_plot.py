"""The picture of `gradwire predict --plot`: step time over node count, one line for each plan and compressor."""

from collections.abc import Callable
from pathlib import Path

from gradwire.comms.plan.advise import Advice

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
