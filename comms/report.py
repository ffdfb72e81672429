"""What travelled: calls, bytes and seconds of every phase on every level, and the plan with its reason."""

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
"""Why a step waits: gradients of a rank come late, or come in time and travel slowly."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank or a link that the other ranks wait for.

    Attributes:
        cause: `computes late` or `slow link`.
        ranks: Which: one rank, all late ones of a node, or those whose link is slow.
        node: Hostname of the slowest, with all hosts where `ranks` are on several.
        seconds: How much later its gradients come than those of the median rank; of a link, how much longer a step's
            transfers take than they did, or than on the other ranks' links.
        step_seconds: How long a step takes.
        since_step: The first step that was seen to be so.
        bucket: Where the delay begins: the bucket whose arrival is late by most more than the one before it.
        parameters: What that bucket holds; the delay lies between the gradients before it and the last of these.
        phase: Of a slow link: `all_reduce inter_node`.
        once: Whether it is about that one step.
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
    """Text that is wrapped to the width of the terminal when printed; in a file or a pipe lines stay whole.

    Args:
        text: Of several lines; what continues one is indented.
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


def said_once(paragraphs: Sequence[str]) -> list[str]:
    """Returns paragraphs without sentences that an earlier paragraph has.

    Args:
        paragraphs: Each begins with what is its own.
    """
    seen: set[str] = set()
    found = []
    for paragraph in paragraphs:
        first, *others = _SENTENCES.split(paragraph)
        found.append(" ".join([first, *(each for each in others if each not in seen)]))
        seen.update(others)
    return found


_SENTENCES = re.compile(r"(?<=[.)]) (?=[A-Z(])")


def bucket_words(index: int, parameters: tuple[str, ...]) -> str:
    """A bucket as messages name it: by its place, and by up to two of its parameters."""
    named = ", ".join(f"`{name}`" for name in parameters[:2])
    more = f" and {len(parameters) - 2} more" if len(parameters) > 2 else ""
    return f"bucket {index}" + (f" ({named}{more})" if named else "")


@dataclass(frozen=True, slots=True)
class Report:
    """The result of `HookState.report()`; `print` it, or read its fields.

    Attributes:
        cluster: Nodes and ranks in one line.
        plans: Each plan in use, described with its reason.
        rows: One for each phase and level.
        buckets: All-reduces run.
        steps: Backward passes seen; 0 where there is no hook.
        links: The rates that the plans are predicted with; the NIC that each local rank should drive, where it is
            known, and what speaks against it.
        stragglers: What the other ranks wait for, as the last exchange of arrival times found it; the same on all
            ranks. Also the last single long wait.
        stall: What the last stall warning said, on the rank that gave it and those that waited; None before one.
        stalls: How many there were.
        rank: Whose report this is, in its group.
        summary: The plans and the reason in two lines, without what differs from bucket to bucket.
        one_node: Whether all ranks are on one node, so that no plan sends anything between nodes.
        alone: Whether there is one rank.
        ranks: Number of ranks in the group.
        node_ranks: Number of them on this rank's node.
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
        """All of it as dicts, lists, numbers, strings and None, as JSON holds them; keys are the attributes' names."""
        found: dict[str, object] = _plain(asdict(self))  # type: ignore[assignment]
        return found

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
        """All of it: every plan in words, the links, and calls, bytes and seconds of each phase, in 80 columns."""
        head = [self._head(), *self.links, *said_once(self.plans), *self._findings()]
        table = self._table() if self.rows or not self.alone else [ALONE]
        return "\n".join([*(in_columns(line) for text in head for line in text.splitlines()), *table])

    def _table(self) -> list[str]:
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
        """Five lines, and one for each finding: what is chosen, who is waited for, what hung. `full()` has the rest."""
        lines = [self._head(), *self._links(), *self.summary, self._sent()]
        return "\n".join([*map(_in_one_line, lines), *self._found()])

    def beside_others(self) -> str:
        """Links and plan, a line each, and what was found: where others count steps and bytes."""
        return "\n".join([*map(_in_one_line, [*self._links(), *self.summary[:1]]), *self._found()])

    def _links(self) -> list[str]:
        return [each if len(each) <= COLUMNS else each.partition("; ")[0] for each in self.links[:1]]

    def _found(self) -> list[str]:
        return [in_columns(line) for text in self._findings() for line in text.splitlines()]

    def _head(self) -> str:
        return f"{self.cluster}; {self.buckets} all-reduces in {self.steps} steps"

    def _findings(self) -> list[str]:
        return [
            *(f"waited for: {each}" for each in self.stragglers),
            *([f"last stall: {self.stall}"] if self.stall else []),
        ]

    def _sent(self) -> str:
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
"""The columns of a terminal; what is printed keeps to them."""
ALONE = "one rank exchanges nothing: torchrun --nproc-per-node N starts N of them"
INSIDE = LEVEL_NAMES[0]


def _in_one_line(text: str) -> str:
    """As many whole sentences as a line holds, or the words of the first one that it holds."""
    if len(text) > COLUMNS and 0 < (end := text.rfind(". ", 0, COLUMNS)):
        return text[: end + 1]
    return textwrap.shorten(text, COLUMNS, placeholder=" ...")


def in_columns(line: str) -> str:
    """Wraps a line of text at `COLUMNS`, and indents all lines but the first.

    Args:
        line: Indented or not.
    """
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(line, COLUMNS, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)


def _label(text: str) -> str:
    """A label's value with what the format wants escaped."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
