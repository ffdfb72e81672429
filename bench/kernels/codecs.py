"""`gradwire bench codecs` compares number formats by their error on real gradients and the bits that they take.

The error is vNMSE: the squared norm of the difference over that of the gradient.

FILE is what `numpy.savez(FILE, name=gradient, ...)` writes: flat float32 gradients by name, of any model. Those of one
task, such as `text/20` and `text/600`, share a column by what stands before the slash.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from gradwire.bench.arguments import CommandParser, add_import_option, check_output, import_modules
from gradwire.bench.kernels.formats import Format, all_formats
from gradwire.bench.terminal import (
    STDOUT,
    CleanConsole,
    StatusLine,
    add_json_option,
    complain,
    right_columns,
    write_json,
)


@dataclass(frozen=True, slots=True)
class FormatErrors:
    """Errors of one format on all gradients, a row of the first table."""

    name: str
    bits: float
    """Bits of an element of the largest gradient, scales included."""
    errors: dict[str, float]
    """Task -> mean vNMSE of its gradients."""
    worst: float
    """The largest vNMSE of all gradients."""


def vnmse(x: Tensor, arrived: Tensor) -> float:
    """Returns the squared norm of the error divided by that of the gradient; 0 if the gradient is zero.

    Args:
        x: Gradient, a float tensor of any shape.
        arrived: Gradient after encoding and decoding, of the same shape.
    """
    whole = float(x.double().square().sum())
    return float((x.double() - arrived.double()).square().sum()) / whole if whole else 0.0


def errors_of(each: Format, gradients: Mapping[str, Tensor]) -> FormatErrors:
    """Returns the errors of a format on the gradients of each task.

    Args:
        each: Format to apply.
        gradients: Name -> gradient; the task is the part of the name before the slash.
    """
    found: dict[str, list[float]] = {}
    for name, gradient in gradients.items():
        found.setdefault(name.split("/")[0], []).append(vnmse(gradient, each.approximate(gradient)))
    return FormatErrors(
        each.name,
        each.bits(max(gradient.numel() for gradient in gradients.values())),
        {task: sum(values) / len(values) for task, values in found.items()},
        max(value for values in found.values() for value in values),
    )


def read_gradients(file: Path) -> dict[str, Tensor]:
    """Returns the gradients of a file by name, float32.

    Raises:
        ValueError: The file cannot be read, holds none, or one that is not flat, real and finite.
    """
    try:
        with np.load(file, allow_pickle=False) as arrays:
            found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"`--gradients` {file} cannot be read as an .npz file: {error}") from error
    if not found:
        raise ValueError(f"`--gradients` {file} holds no array; wanted flat float32 gradients by name")
    for name, gradient in found.items():
        if gradient.dim() != 1 or not gradient.numel() or not gradient.is_floating_point():
            raise ValueError(
                f"`--gradients` {file}: {name!r} is {tuple(gradient.shape)} {gradient.dtype}; wanted a flat real one"
            )
        if not bool(gradient.isfinite().all()):
            raise ValueError(f"`--gradients` {file}: {name!r} is not finite")
    return {name: gradient.float() for name, gradient in found.items()}


def _format_table(rows: list[FormatErrors]) -> Table:
    tasks = list(rows[0].errors)
    table = Table("format", *right_columns("bits", *(f"vNMSE {task}" for task in tasks), "worst"), box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(row.name, f"{row.bits:.3g}", *(f"{row.errors[task]:.2e}" for task in tasks), f"{row.worst:.2e}")
    return table


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="gradwire bench codecs", description=__doc__)
    parser.add_argument("--gradients", type=Path, required=True, metavar="FILE", help="an .npz of flat gradients")
    add_import_option(parser)
    add_json_option(parser)
    return parser


def main(argv: list[str]) -> int:
    """Runs `gradwire bench codecs`; returns 0, 2 for a bad option or file, or 1 if the JSON cannot be written.

    Args:
        argv: Words of the command line after `codecs`.
    """
    options = _parser().parse_args(argv)
    try:
        check_output("--json", options.json)
        import_modules(options.imports)
        gradients = read_gradients(options.gradients)
    except ValueError as error:
        complain("bench codecs", error)
        return 2
    status, formats, rows = StatusLine(), all_formats(), []
    for number, each in enumerate(formats):
        status.show(f"{number + 1}/{len(formats)}  {each.name}")
        rows.append(errors_of(each, gradients))
    status.clear()
    if options.json != STDOUT:
        console = CleanConsole(highlight=False)
        console.print(_format_table(rows))
        console.print("bits: of an element, scales included")
    try:
        write_json(
            options.json,
            {
                "formats": [
                    {"format": row.name, "bits": row.bits, "vnmse": row.errors, "worst": row.worst} for row in rows
                ],
            },
        )
    except RuntimeError as error:
        complain("bench codecs", error)
        return 1
    return 0
