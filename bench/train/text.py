"""Real text that every machine with Python has: the source of its standard library, as bytes."""

import sysconfig
from pathlib import Path

import numpy as np
import torch

BLOCK_NBYTES = 1 << 16
VALIDATION_EVERY = 20
"""Every 20th block is kept for validation, so that it comes from all over the library."""


def library_files(folder: Path | None = None) -> list[Path]:
    """Lists the library's Python files in an order that does not depend on the file system.

    Args:
        folder: Folder to search; None takes this interpreter's standard library. Folders that not every machine has
            there are left out: packages installed below it, and Python's own tests.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    own = (file for file in files if not {"site-packages", "dist-packages", "test", "tests"} & set(file.parts))
    return [root / file for file in sorted(own, key=Path.as_posix)]


def library_text(folder: Path | None = None) -> torch.Tensor:
    """Returns the text of all files, one after the other: uint8, 1-d.

    Args:
        folder: Folder to search; None takes this interpreter's standard library.

    Raises:
        ValueError: There is less than one block of text for training and one for validation.
    """
    text = b"".join(file.read_bytes() for file in library_files(folder))
    if len(text) < VALIDATION_EVERY * BLOCK_NBYTES:
        raise ValueError(
            f"`folder`: found {len(text)} bytes of Python source in {folder or sysconfig.get_path('stdlib')}, wanted "
            f"at least {VALIDATION_EVERY * BLOCK_NBYTES}; use an interpreter with its whole standard library"
        )
    return torch.from_numpy(np.frombuffer(bytearray(text), dtype=np.uint8))


def split_text(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits a text into (training, validation), the same way each time: every 20th block is for validation.

    Args:
        text: Bytes of the text, uint8, 1-d; a block has 64 KiB.
    """
    blocks = [text[start : start + BLOCK_NBYTES] for start in range(0, text.numel(), BLOCK_NBYTES)]
    training = [block for number, block in enumerate(blocks, start=1) if number % VALIDATION_EVERY != 0]
    return torch.cat(training), torch.cat(blocks[VALIDATION_EVERY - 1 :: VALIDATION_EVERY])


def batch_at(
    text: torch.Tensor, step: int, rank: int, *, batch: int, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws the batch of a step and a rank; the same arguments give the same batch.

    Args:
        text: Bytes of the text, uint8, 1-d.
        step: Number of the step, from 0.
        rank: Number of the rank, from 0; ranks draw different batches.
        batch: Number of sequences.
        context: Bytes in a sequence.

    Returns:
        (inputs, targets): int64, shape (batch, context); a target is the byte that follows.
    """
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(text.numel() - context, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
