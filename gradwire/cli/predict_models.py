"""`gradwire predict --models`: named public models by link in one table: a step under plain DDP and what beats it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gradwire.bench.compare.public_models import PublicModel
from gradwire.bench.prediction import exact_candidates
from gradwire.comms.plan.advise import Advice, Candidate

LINKS = (("1 GbE", "1gbit", 1), ("2.5 GbE", "2.5gbit", 1), ("10 GbE", "10gbit", 1), ("25 GbE", "25gbit", 1),
         ("2 x 10 GbE", "10gbit", 2))  # fmt: skip
"""(title, rate of one NIC, number of NICs)."""
NODES = (2, 4)
OUTER_EVERY = 5
"""Steps between two exchanges of `gradwire.Outer`, which sends with waterfill2: docs/how-to/slow_links.md."""
OUTER_COMPRESSOR = "waterfill2"
COLUMNS = ("plain DDP", "torch fp16", "exact", "int8", "waterfill4", "Outer")


class Ask(Protocol):
    """Protocol of functions that predict the step times of one model on one cluster."""

    def __call__(self, model: PublicModel, nodes: int, rate: str, nics: int, *, halved: bool = False) -> Advice:
        """Predicts the step times of a model under every plan and compressor, and returns them with a recommendation.

        Args:
            model: Public model.
            nodes: Number of nodes; one has no network.
            rate: Rate of a NIC, such as `10gbit`.
            nics: Number of NICs of a node.
            halved: True sends all gradients in 16 bits.
        """


@dataclass(frozen=True, slots=True)
class ModelRow:
    """Holds the predictions for one model on one cluster.

    Attributes:
        model: Public model.
        nodes: Number of nodes.
        link: Link of a node in words.
        alone_seconds: Duration of a step on one node.
        seconds: Column, of `COLUMNS` -> duration of a step on all nodes.
    """

    model: PublicModel
    nodes: int
    link: str
    alone_seconds: float
    seconds: dict[str, float]

    def gain(self, column: str) -> float:
        """Returns the throughput of all nodes relative to one, for a column of the table."""
        return self.nodes * self.alone_seconds / self.seconds[column]


def rows(models: Sequence[PublicModel], ask: Ask) -> Iterator[ModelRow]:
    """Yields predicted step times for all of `NODES`, for each of them all models, for each model all of `LINKS`.

    Each row has the seconds of a step on one node with its best exact plan and, in `seconds`, on all nodes:

    - `plain DDP`, `torch fp16`: one all-reduce over all ranks by the fastest of NCCL's algorithms, of the gradients or
    of half as many bytes.
    - `exact`: the best exact plan.
    - `int8`, `waterfill4`: the hierarchical plan with that compressor.
    - `Outer`: exact sums inside the node at every step, and every `OUTER_EVERY` steps an exchange between nodes,
    compressed by `OUTER_COMPRESSOR` (waterfill2), which takes no time while it is shorter than these steps.

    Args:
        models: Models of the table, in its order.
        ask: Function that predicts one model on one cluster.
    """
    for nodes in NODES:
        for model in models:
            alone = _best(ask(model, 1, *LINKS[0][1:]))
            for title, rate, nics in LINKS:
                advice = ask(model, nodes, rate, nics)
                half = ask(model, nodes, rate, nics, halved=True)
                exchange = advice.candidate(f"hierarchical+{OUTER_COMPRESSOR}").seconds
                yield ModelRow(
                    model,
                    nodes,
                    title,
                    alone.step_seconds,
                    {
                        "plain DDP": _flat(advice).step_seconds,
                        "torch fp16": _flat(half).step_seconds,
                        "exact": _best(advice).step_seconds,
                        "int8": advice.candidate("hierarchical+int8").step_seconds,
                        "waterfill4": advice.candidate("hierarchical+waterfill4").step_seconds,
                        "Outer": max(alone.step_seconds, exchange / OUTER_EVERY),
                    },
                )


def _flat(advice: Advice) -> Candidate:
    """Returns the exact all-reduce over all ranks by that algorithm of NCCL with which a step is shortest."""
    known = [candidate for candidate in advice.candidates if candidate.plan.name in ("flat", "tree", "nvls_tree")]
    return min(
        (candidate for candidate in known if candidate.compressor == "none"),
        key=lambda candidate: candidate.step_seconds,
    )


def _best(advice: Advice) -> Candidate:
    return min(exact_candidates(advice), key=lambda candidate: candidate.step_seconds)


def as_table(console: Console, predictions: Sequence[ModelRow], machine: str) -> None:
    """Prints a table for each number of nodes in `NODES`, and a legend.

    Args:
        console: Console to print to, without highlighting.
        predictions: All rows, as `rows` yields them.
        machine: Description of a node, in words.
    """
    for nodes in NODES:
        table = Table(title=f"{nodes} nodes: {machine}; milliseconds a step", box=SIMPLE_HEAD, padding=0)
        for heading in ("model", "link", "alone", *COLUMNS):
            table.add_column(heading, justify="left" if heading in ("model", "link") else "right", overflow="fold")
        before = ""
        for row in predictions:
            if row.nodes == nodes:
                cells = [_cell(row, column) for column in COLUMNS]
                name = "" if row.model.title == before else row.model.title
                table.add_row(name, row.link, f"{1e3 * row.alone_seconds:.0f}", *cells)
                before = row.model.title
        console.print(table)
    console.print(legend(predictions))


def as_markdown(predictions: Sequence[ModelRow], machine: str) -> str:
    """Returns a table in Markdown for each number of nodes in `NODES`, and the legend.

    Args:
        predictions: All rows, as `rows` yields them.
        machine: Description of a node, in words.
    """
    lines = []
    for nodes in NODES:
        lines += [f"{nodes} nodes of {machine}:", "", f"| model | link | {' | '.join(COLUMNS)} |"]
        lines.append("|---|---|" + "---:|" * len(COLUMNS))
        lines += [
            f"| {row.model.title} | {row.link} | {' | '.join(_cell(row, column) for column in COLUMNS)} |"
            for row in predictions
            if row.nodes == nodes
        ]
        lines.append("")
    return "\n".join([*lines, legend(predictions)])


def _cell(row: ModelRow, column: str) -> str:
    """Returns the text of a cell: milliseconds of a step on all nodes, and `!` if these train no faster than one node.

    Args:
        row: Predictions for one model on one cluster.
        column: Heading of the cell's column, of `COLUMNS`.
    """
    return f"{1e3 * row.seconds[column]:.0f}{'!' if row.gain(column) <= 1 else ''}"


def as_objects(predictions: Sequence[ModelRow]) -> list[dict[str, object]]:
    """Returns the rows as dictionaries for JSON, one for each row, in the same order.

    Args:
        predictions: All rows, as `rows` yields them.
    """
    return [
        {
            "model": row.model.name,
            "parameters": row.model.numel,
            "nodes": row.nodes,
            "link": row.link,
            "alone_seconds": row.alone_seconds,
            "seconds": row.seconds,
        }
        for row in predictions
    ]


def legend(predictions: Sequence[ModelRow]) -> str:
    """Returns a paragraph that explains the columns and lists the assumed computing time of each model.

    Args:
        predictions: All rows, as `rows` yields them.
    """
    models = {row.model.name: row.model for row in predictions}.values()
    assumed = "; ".join(
        f"{model.title} ({model.numel / 1e6:,.0f} M trained) {1e3 * model.step_seconds:.0f} ms for {model.batch}"
        for model in models
    )
    return (
        "Predicted, not measured. !: one node alone trains more. alone: a step on one node. plain DDP and torch's fp16 "
        "hook: by the fastest of NCCL's algorithms. exact, int8, waterfill4: gradwire's plans, compressed between "
        f"nodes only. Outer: exchanges every {OUTER_EVERY} steps in {OUTER_COMPRESSOR}, hidden behind them. "
        f"Assumed computation of a GPU: {assumed}."
    )
