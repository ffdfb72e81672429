"""Reports what was sent: calls, bytes and seconds of every phase on every level, and the plan with its reason."""

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from gradwire.comms.run.phase_stats import PhaseTotals
from gradwire.topology.cluster import LEVEL_NAMES
from gradwire.topology.wording import duration

COMPUTES_LATE, SLOW_LINK = "computes late", "slow link"
"""Causes of a wait: the gradients of a rank arrive late, or they arrive in time and are sent slowly."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """Describes a rank or a link that the other ranks wait for.

    Attributes:
        cause: `computes late` or `slow link`.
        ranks: Ranks that are waited for: a single one, all late ones of a node, or those whose link is slow.
        node: Hostname of the slowest of them, or all their hostnames if they are on several nodes.
        seconds: Delay in seconds of each step. For a late rank, how much later its gradients arrive than those of the
            median rank; for a slow link, how much longer a step's transfers take than before, or than on the links of
            the other ranks.
        step_seconds: Seconds that a step takes.
        since_step: First step in which the delay was seen.
        bucket: Index of the bucket at which the delay begins: it is later than the bucket before it by more than any
            other. None for a slow link, or if it is not known.
        parameters: Names of the parameters in that bucket; the delay arises between the gradients before it and the
            last of these.
        phase: Phase on a slow link that takes too long, as `all_reduce inter_node`; None for a late rank.
        once: True if the delay was seen in the step `since_step` only.
    """

    cause: str
    ranks: tuple[int, ...]
    node: str
    seconds: float
    step_seconds: float
    since_step: int
    bucket: int | None = None
    parameters: tuple[str, ...] = ()
    phase: str | None = None
    once: bool = False

    def __str__(self) -> str:
        who = f"rank {', '.join(map(str, self.ranks))} on node {self.node}"
        took = f"a step takes {duration(self.step_seconds)}"
        if self.cause == SLOW_LINK:
            return (
                f"{who}: slow link: {self.phase} takes {duration(self.seconds)} longer than it should, added up over "
                f"the buckets of a step, since step {self.since_step} ({took}); gradients come in time"
            )
        where = "" if self.bucket is None else f" {bucket_words(self.bucket, self.parameters)}"
        if self.once:
            return f"{who} came {duration(self.seconds)} late in step {self.since_step}, to{where} ({took})"
        return (
            f"{who} computes late: {duration(self.seconds)} behind the others since step {self.since_step}, from"
            f"{where} on ({took})"
        )


def wrapped(text: str) -> str:
    """Wraps a text to the width of the terminal, or to 40 columns in a narrower one; words are not cut.

    If the output is a file or a pipe, returns the text as it is.

    Args:
        text: Text of one or several lines; those that begin with a space are not wrapped.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        return text
    width = max(40, shutil.get_terminal_size().columns)
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        if len(line) > width and not line.startswith(" ")
        else line
        for line in text.splitlines()
    )


def without_repeated_sentences(paragraphs: Sequence[str]) -> list[str]:
    """Returns the paragraphs, in their order, without sentences that an earlier one has behind its first sentence.

    Args:
        paragraphs: Paragraphs. The first sentence of each always stays, and removes no later sentence that equals it.
    """
    seen: set[str] = set()
    shortened = []
    for paragraph in paragraphs:
        first, *others = _SENTENCES.split(paragraph)
        shortened.append(" ".join([first, *(each for each in others if each not in seen)]))
        seen.update(others)
    return shortened


_SENTENCES = re.compile(r"(?<=[.)]) (?=[A-Z(])")
"""Matches the space between two sentences."""


def bucket_words(index: int, parameters: tuple[str, ...]) -> str:
    """Describes a bucket in messages by its index and up to two of its parameters: "bucket 3 (`fc.weight` and 4 more)".

    Args:
        index: Index of the bucket in the step.
        parameters: Names of its parameters; empty if they are not known.
    """
    named = ", ".join(f"`{name}`" for name in parameters[:2])
    more = f" and {len(parameters) - 2} more" if len(parameters) > 2 else ""
    return f"bucket {index}" + (f" ({named}{more})" if named else "")


@dataclass(frozen=True, slots=True)
class Report:
    """Holds the result of `HookState.report()`: what one rank has sent, and by which plans; `print` it.

    Attributes:
        cluster: Description of nodes and ranks in one line.
        plans: Description of each plan in use, with the reason for it.
        rows: Calls, bytes and seconds of each phase on each level.
        buckets: Number of all-reduces so far.
        steps: Number of backward passes so far; 0 if there is no hook.
        links: Lines about the links: first the rates that plans are predicted with, then the NIC that each local rank
            should use, if it is known, and what may prevent that.
        stragglers: Ranks and links that the other ranks wait for, as found by the last exchange of arrival times (the
            same on all ranks), and the last single long wait.
        stall: Text of the last stall warning, on the rank that logged it and those that waited; None if there was none.
        stalls: Number of stall warnings so far.
        rank: Rank in its group that the report is of.
        summary: Plans in use and the reason for them in two lines, without what differs from bucket to bucket.
        one_node: True if all ranks are on one node, so that no plan sends anything between nodes.
        alone: True if there is only one rank.
        ranks: Number of ranks in the group.
        node_ranks: Number of ranks on this rank's node.
    """

    cluster: str
    plans: tuple[str, ...]
    rows: tuple[PhaseTotals, ...]
    buckets: int
    steps: int = 0
    links: tuple[str, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    stall: str | None = None
    stalls: int = 0
    rank: int = 0
    summary: tuple[str, ...] = ()
    one_node: bool = False
    alone: bool = False
    ranks: int = 1
    node_ranks: int = 1

    def to_dict(self) -> dict[str, object]:
        """Returns all attributes by name as values that JSON can hold: dicts, lists, numbers, strings and None."""
        attributes: dict[str, object] = _plain(asdict(self))  # type: ignore[assignment]
        return attributes

    def to_prometheus(self) -> str:
        """Returns the numbers in Prometheus' text format, version 0.0.4, every name with the prefix `gradwire_`.

        Source: https://prometheus.io/docs/instrumenting/exposition_formats/
        """
        lines: list[str] = []

        def add(name: str, kind: str, meaning: str, samples: list[tuple[str, float]]) -> None:
            lines.extend((f"# HELP gradwire_{name} {meaning}", f"# TYPE gradwire_{name} {kind}"))
            lines.extend(f'gradwire_{name}{{rank="{self.rank}"{labels}}} {value:.17g}' for labels, value in samples)

        plan = [(f',plan="{_label(self.summary[0].removeprefix("plan: "))}"', 1.0)] if self.summary else []
        add("plan_info", "gauge", "Always 1: the plans and the compressor in use, in words.", plan)
        add("steps_total", "counter", "Backward passes: one over their rate is the step time.", [("", self.steps)])
        add("all_reduces_total", "counter", "All-reduces run.", [("", self.buckets)])
        for name, meaning in (
            ("calls", "Collectives that this rank took part in."),
            ("logical_nbytes", "Bytes of gradient that this rank contributed."),
            ("wire_nbytes", "Bytes that this rank sent."),
            ("seconds", "Seconds from issuing a phase to its result, summed over chunks."),
        ):
            samples = [
                (f',phase="{row.phase}",collective="{row.op}",level="{row.level}"', float(getattr(row, name)))
                for row in self.rows
            ]
            add(f"phase_{name.replace('nbytes', 'bytes')}_total", "counter", meaning, samples)
        late = [
            (f',late_rank="{rank}",node="{_label(each.node)}",cause="{each.cause}"', each.seconds)
            for each in self.stragglers
            if not each.once
            for rank in each.ranks
        ]
        add("straggler_seconds", "gauge", "How late a rank is, or how much longer its link takes, a step.", late)
        add("stalls_total", "counter", "Stall warnings that this rank has seen.", [("", self.stalls)])
        return "\n".join(lines) + "\n"

    def full(self) -> str:
        """Returns the whole report in 80 columns: plans, links, findings, and a table of all phases."""
        head = [self._head(), *self.links, *without_repeated_sentences(self.plans), *self._findings()]
        table = self._table() if self.rows or not self.alone else [ALONE]
        return "\n".join([*(in_columns(line) for text in head for line in text.splitlines()), *table])

    def _table(self) -> list[str]:
        """Returns the lines of the table of phases."""
        columns = f"{'phase':>5}  {'collective':<15} {'level':<13} {'calls':>6} {'logical MB':>10}"
        return [
            f"{columns} {'sent MB':>10} {'seconds':>9}",
            *(
                f"{row.phase:>5}  {row.op:<15} {row.level:<13} {row.calls:>6} {row.logical_nbytes / 1e6:>10.3f} "
                f"{row.wire_nbytes / 1e6:>10.3f} {row.seconds:>9.3f}"
                for row in self.rows
            ),
        ]

    def __str__(self) -> str:
        """Returns the report in about five lines, and one for each straggler and stall; `full()` has the rest."""
        lines = [self._head(), *self._links(), *self.summary, self._sent()]
        return "\n".join([*map(_in_one_line, lines), *self._wrapped_findings()])

    def beside_others(self) -> str:
        """Returns the lines about links, plan, stragglers and stall; those about steps and bytes are the caller's."""
        return "\n".join([*map(_in_one_line, [*self._links(), *self.summary[:1]]), *self._wrapped_findings()])

    def _links(self) -> list[str]:
        """Returns the line with the link rates, without its remarks if it is too long; an empty list without rates."""
        return [each if len(each) <= COLUMNS else each.partition("; ")[0] for each in self.links[:1]]

    def _wrapped_findings(self) -> list[str]:
        """Returns the lines of `_findings`, wrapped at 80 columns."""
        return [in_columns(line) for text in self._findings() for line in text.splitlines()]

    def _head(self) -> str:
        """Returns the first line: ranks, all-reduces and steps."""
        return f"{self.cluster}; {self.buckets} all-reduces in {self.steps} steps"

    def _findings(self) -> list[str]:
        """Returns a text for each straggler, and one for the last stall."""
        return [
            *(f"waited for: {each}" for each in self.stragglers),
            *([f"last stall: {self.stall}"] if self.stall else []),
        ]

    def _sent(self) -> str:
        """Returns the line with the bytes that this rank sends in a step to other nodes, or inside the only node."""
        if self.alone and not self.rows:
            return ALONE
        outside = [row for row in self.rows if not self.one_node and not row.level.startswith(INSIDE)]
        steps = max(self.steps, 1)
        sent = sum(row.wire_nbytes for row in outside or self.rows) / steps
        if not outside:
            return f"sent inside the node: {sent / 1e6:.3g} MB a step and rank; report().full() has every phase"
        # A ring over all ranks sends 2 (n - 1) / n of the gradient from each node to the next one.
        gradient = sum(row.logical_nbytes for row in self.rows if row.phase == 0) / steps
        ring = 2 * (self.ranks - 1) / self.ranks * gradient / self.node_ranks
        return (
            f"sent to other nodes: {sent / 1e6:.3g} MB a step and rank (gloo's ring {ring / 1e6:.3g}); report().full()"
        )


COLUMNS = 80
"""Width of the printed report in characters."""
ALONE = "one rank exchanges nothing: torchrun --nproc-per-node N starts N of them"
"""Text in place of the bytes sent, if there is only one rank."""
INSIDE = LEVEL_NAMES[0]
"""Name of the level inside the nodes."""


def _in_one_line(text: str) -> str:
    """Cuts a text to one line of 80 columns: after as many whole sentences as fit, or after a word of the first one."""
    if len(text) > COLUMNS and 0 < (end := text.rfind(". ", 0, COLUMNS)):
        return text[: end + 1]
    return textwrap.shorten(text, COLUMNS, placeholder=" ...")


def in_columns(line: str) -> str:
    """Wraps a line of text at 80 columns (`COLUMNS`), and indents all lines but the first.

    Args:
        line: Line without line breaks; its own indent is kept.
    """
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(line, COLUMNS, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)


def _label(text: str) -> str:
    """Returns a text escaped as the value of a Prometheus label: backslashes, quotes and line ends."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _plain(value: object) -> object:
    """Returns a value with tuples as lists and keys as strings, as JSON has them."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
