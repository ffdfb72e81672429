"""What codes of bfloat16's exponents would take on dumped gradients, and what `bf16_packed` sends.

    python -m gradwire.bench.studies.gradients pairs.npz --steps 20,21,200,201,600,601
    python -m gradwire.bench.studies.exponents pairs.npz

Feeds docs/results/number_formats.md. Bits of an exponent: its entropy alone; given the largest exponent of its block
of 64, which takes 8/64 of a bit itself; and, where the file has the gradient of the step before too, given the
exponent that the same value had there, which a code with memory could know on both sides. No code of single values
that knows nothing else is shorter. `sent` is what bf16_packed takes beyond 8 bits for the sign and mantissa of each
value whose block is not all zero; the other blocks' values have none, so that `sent` may be compared with the
entropies. Then how many times fewer bytes than bf16 the payloads of a number of owners are: in a fixed size with room
for the worst run of values, and all as long as the longest one, with blocks dealt out in turn.
"""

import argparse
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from gradwire.bench.kernels.codecs import read_gradients
from gradwire.bench.kernels.formats import exponent_entropy, exponents_of, packed_bits
from gradwire.bench.terminal import CleanConsole, right_columns
from gradwire.compressors.kernels.reference import EXPONENTS_BLOCK

OWNERS = (2, 4, 16)


def conditional_entropy(exponents: Tensor, known: Tensor) -> float:
    """Bits of an exponent where another one, 0 to 255, is known; both (n)."""
    joint = torch.zeros(256, 256, dtype=torch.float64)
    joint.index_put_((known, exponents), torch.ones(1, dtype=torch.float64), accumulate=True)
    share = joint / joint.sum()
    given = share / share.sum(1, keepdim=True).clamp(min=1e-300)
    return float(-(share * torch.where(given > 0, given, 1.0).log2()).sum())


def largest_of_blocks(exponents: Tensor) -> Tensor:
    """For each exponent the largest of its block, the last one shorter."""
    padded = torch.nn.functional.pad(exponents, (0, -exponents.numel() % EXPONENTS_BLOCK))
    largest = padded.view(-1, EXPONENTS_BLOCK).amax(1)
    return largest.repeat_interleave(EXPONENTS_BLOCK)[: exponents.numel()]


def share_of_kept(x: Tensor) -> float:
    """Values whose signs and mantissas are sent, over all: of blocks that are not all +0 as bfloat16."""
    padded = torch.nn.functional.pad(x, (0, -x.numel() % EXPONENTS_BLOCK)).to(torch.bfloat16)
    kept = padded.view(torch.int16).view(-1, EXPONENTS_BLOCK).any(1)
    return float(kept.sum()) * EXPONENTS_BLOCK / x.numel()


def longest_bits(x: Tensor, owners: int, *, dealt: bool) -> float:
    """Bits of a value of x in the longest payload of `owners`, whose blocks are runs or dealt out in turn."""
    whole = torch.nn.functional.pad(x, (0, -x.numel() % (owners * EXPONENTS_BLOCK)))
    pieces = (
        whole.view(-1, owners, EXPONENTS_BLOCK).transpose(0, 1).reshape(owners, -1) if dealt else whole.view(owners, -1)
    )
    return max(packed_bits(piece) for piece in pieces)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    gradients = read_gradients(parser.parse_args().file)
    sizes = [f"{kind}, {owners}" for owners in OWNERS for kind in ("fixed", "dealt")]
    table = Table("gradient", *right_columns("alone", "given block", "given last step", "sent", *sizes))
    for name, x in gradients.items():
        exponents, (task, step) = exponents_of(x).long(), name.rsplit("/", 1)
        before = gradients.get(f"{task}/{int(step) - 1}")
        given_block = conditional_entropy(exponents, largest_of_blocks(exponents)) + 8 / EXPONENTS_BLOCK
        given_last = None if before is None else conditional_entropy(exponents, exponents_of(before).long())
        table.add_row(
            name,
            f"{exponent_entropy(x):.2f}",
            f"{given_block:.2f}",
            "" if given_last is None else f"{given_last:.2f}",
            f"{packed_bits(x) - 8 * share_of_kept(x):.2f}",
            *(f"{16 / longest_bits(x, owners, dealt=dealt):.2f}x" for owners in OWNERS for dealt in (False, True)),
        )
    CleanConsole(highlight=False, width=160).print(table)


if __name__ == "__main__":
    main()
