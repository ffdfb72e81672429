"""`gradwire bench codecs`: what number formats leave of real gradients, against the bits they take.

The error is vNMSE: the squared norm of the difference over that of the gradient. The second table is what packing the
exponents of bfloat16 values would take, without any loss: how many exponents lie too far below the largest of their
block, on average and in the piece that has most, for which a payload of fixed size must have room. The third is what
`bf16_packed` sends of each gradient.

FILE is what `numpy.savez(FILE, name=gradient, ...)` writes: flat float32 gradients by name, of any model. Those of one
task, such as `text/20` and `text/600`, share a column by what stands before the slash.
"""

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from gradwire.bench.arguments import CommandParser, add_import_option, check_output, import_modules
from gradwire.bench.kernels.formats import Format, all_formats, exponent_entropy, packed_bits, packing
from gradwire.bench.terminal import (
    STDOUT,
    CleanConsole,
    StatusLine,
    add_json_option,
    complain,
    right_columns,
    write_json,
)

PACKINGS = ((32, 3, False), (128, 3, False), (32, 3, True), (64, 3, True), (128, 3, True), (64, 4, False))
"""(values of a block, bits of an exponent's code, whether zero has one)."""


@dataclass(frozen=True, slots=True)
class FormatErrors:
    """One row of the first table."""

    name: str
    bits: float
    """An element, of the largest gradient."""
    errors: dict[str, float]
    """Task -> mean vNMSE of its gradients."""
    worst: float
    """The largest vNMSE of all gradients."""


def vnmse(x: Tensor, arrived: Tensor) -> float:
    """Returns the squared norm of the difference over that of x; 0 where x is zero."""
    whole = float(x.double().square().sum())
    return float((x.double() - arrived.double()).square().sum()) / whole if whole else 0.0


def errors_of(each: Format, gradients: Mapping[str, Tensor]) -> FormatErrors:
    """Returns what a format leaves out of each task's gradients."""
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


def _packing_rows(gradients: Mapping[str, Tensor]) -> list[dict[str, object]]:
    return [
        {
            "gradient": name,
            "entropy_bits": exponent_entropy(gradient),
            **asdict(each),
        }
        for name, gradient in gradients.items()
        for each in (packing(gradient, block, bits, zero_code) for block, bits, zero_code in PACKINGS)
    ]


def _packing_table(rows: list[dict[str, object]]) -> Table:
    figures = right_columns("entropy", "block", "code", "zero", "bits", "of 16", "escapes", "worst")
    title = "bfloat16 with packed exponents, lossless"
    table = Table("gradient", *figures, title=title, title_justify="left", box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(
            str(row["gradient"]),
            f"{row['entropy_bits']:.2f}",
            str(row["block"]),
            str(row["code_bits"]),
            "yes" if row["zero_code"] else "",
            f"{row['bits']:.2f}",
            f"{16 / float(str(row['bits'])):.2f}x",
            f"{row['escapes']:.2%}",
            f"{row['worst']:.2%}",
        )
    return table


def _sent_table(bits: Mapping[str, float]) -> Table:
    figures = right_columns("bits", "of 16")
    table = Table("gradient", *figures, title="bf16_packed", title_justify="left", box=SIMPLE_HEAD)
    for name, each in bits.items():
        table.add_row(name, f"{each:.2f}", f"{16 / each:.2f}x")
    return table


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="gradwire bench codecs", description=__doc__)
    parser.add_argument("--gradients", type=Path, required=True, metavar="FILE", help="an .npz of flat gradients")
    add_import_option(parser)
    add_json_option(parser)
    return parser


def main(argv: list[str]) -> int:
    """Runs `gradwire bench codecs` and returns its exit status.

    Args:
        argv: Words after `codecs`.
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
    packed = _packing_rows(gradients)
    sent = {name: packed_bits(gradient) for name, gradient in gradients.items()}
    if options.json != STDOUT:
        console = CleanConsole(highlight=False)
        console.print(_format_table(rows))
        console.print(_packing_table(packed))
        console.print(_sent_table(sent))
        console.print(
            "bits: of an element, scales included; of 16: how many times fewer bytes than bfloat16;\n"
            "escapes: values whose exponent does not fit its code; worst: in the piece of 16,384 that has most"
        )
    try:
        write_json(
            options.json,
            {
                "formats": [
                    {"format": row.name, "bits": row.bits, "vnmse": row.errors, "worst": row.worst} for row in rows
                ],
                "lossless": packed,
                "bf16_packed": sent,
            },
        )
    except RuntimeError as error:
        complain("bench codecs", error)
        return 1
    return 0
