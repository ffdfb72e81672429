"""The collectives that are timed, each as a record of functions: its sizes, how to run it, and its expected result.

Source: nccl-tests, doc/PERFORMANCE.md (bus bandwidth) and the GetCollByteCount functions of src/*.cu (counts).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.bench.nccl_tests.backends.backend import Backend, Issue, copy_first
from gradwire.bench.nccl_tests.verify import ExactInputs

CHUNK_NBYTES = 16
"""Unit in bytes to which a rank's part of all_gather, reduce_scatter and alltoall is rounded down, as in nccl-tests."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of elements of one operation on one rank.

    Attributes:
        source: Elements of the input.
        output: Elements of the output.
        shown: Number in the column `count`.
        source_offset: Elements from one rank's input to the next rank's in the buffer of an in-place operation.
        output_offset: Elements from one rank's output to the next rank's in that buffer.
    """

    source: int
    output: int
    shown: int
    source_offset: int = 0
    output_offset: int = 0


Prepare = Callable[[Backend, Tensor, Tensor, str, int], Issue]
"""Function (backend, output, source, operation, root) that prepares a collective; in place, output and source share
memory.

torch and gradwire reduce and broadcast in place only. For them, out of place means a copy first, which is timed too.
"""


@dataclass(frozen=True, slots=True)
class CollectiveSpec:
    """Description of one collective: its sizes, how to run it, and its expected result.

    Attributes:
        name: Name on the command line and in the output.
        counts: Function (elements asked for, ranks, bytes of an element) -> numbers of elements of the operation.
        bus_factor: Function from the number of ranks to the ratio busbw / algbw.
        prepare: Function that prepares an operation and returns the function that issues it.
        expected: Function (inputs, counts, rank, root) -> the output that this rank must have; None if it has none to
            check.
        reduces: Whether it reduces, and so has an operation.
        rooted: Whether it has a root.
    """

    name: str
    counts: Callable[[int, int, int], Counts]
    bus_factor: Callable[[int], float]
    prepare: Prepare
    expected: Callable[[ExactInputs, Counts, int, int], Tensor | None]
    reduces: bool = False
    rooted: bool = False


def _whole(count: int, ranks: int, nbytes: int) -> Counts:
    return Counts(count, count, count)


def _part(count: int, ranks: int, nbytes: int) -> int:
    elements = max(1, CHUNK_NBYTES // nbytes)
    return count // ranks // elements * elements


def _gathered(count: int, ranks: int, nbytes: int) -> Counts:
    part = _part(count, ranks, nbytes)
    return Counts(part, part * ranks, part, source_offset=part)


def _scattered(count: int, ranks: int, nbytes: int) -> Counts:
    part = _part(count, ranks, nbytes)
    return Counts(part * ranks, part, part, output_offset=part)


def _exchanged(count: int, ranks: int, nbytes: int) -> Counts:
    part = _part(count, ranks, nbytes)
    return Counts(part * ranks, part * ranks, part)


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _one(ranks: int) -> float:
    return 1.0 if ranks > 1 else 0.0


def _shares_memory(output: Tensor, source: Tensor) -> bool:
    return output.numel() > 0 and output.data_ptr() == source.data_ptr()


def _broadcast(backend: Backend, output: Tensor, source: Tensor, operation: str, root: int) -> Issue:
    issue = backend.broadcast(output, root)
    return _in_output(output, source, issue) if backend.rank == root else issue


def _in_output(output: Tensor, source: Tensor, issue: Issue) -> Issue:
    return issue if _shares_memory(output, source) else copy_first(output, source, issue)


def _from_aside(output: Tensor, source: Tensor, prepare: Callable[[Tensor, Tensor], Issue]) -> Issue:
    """Prepares an exchange; in place, each iteration first copies the input to other memory.

    No library exchanges the parts of all ranks inside one buffer.

    Args:
        output: Tensor to fill.
        source: Tensor to send.
        prepare: Function (output, source) that prepares the exchange out of place.
    """
    if not _shares_memory(output, source):
        return prepare(output, source)
    aside = torch.empty_like(source)
    return copy_first(aside, source, prepare(output, aside))


COLLECTIVES = {
    each.name: each
    for each in (
        CollectiveSpec(
            "all_reduce",
            _whole,
            lambda ranks: 2 * _share(ranks),
            lambda backend, output, source, op, root: _in_output(output, source, backend.all_reduce(output, op)),
            lambda inputs, counts, rank, root: inputs.reduced(0, counts.output),
            reduces=True,
        ),
        CollectiveSpec(
            "all_gather",
            _gathered,
            _share,
            lambda backend, output, source, op, root: backend.all_gather(output, source),
            lambda inputs, counts, rank, root: inputs.joined(
                [(each, 0) for each in range(inputs.ranks)], counts.source
            ),
        ),
        CollectiveSpec(
            "reduce_scatter",
            _scattered,
            _share,
            lambda backend, output, source, op, root: backend.reduce_scatter(output, source, op),
            lambda inputs, counts, rank, root: inputs.reduced(rank * counts.output, counts.output),
            reduces=True,
        ),
        CollectiveSpec(
            "broadcast",
            _whole,
            _one,
            _broadcast,
            lambda inputs, counts, rank, root: inputs.of(root, 0, counts.output),
            rooted=True,
        ),
        CollectiveSpec(
            "reduce",
            _whole,
            _one,
            lambda backend, output, source, op, root: _in_output(output, source, backend.reduce(output, root, op)),
            lambda inputs, counts, rank, root: inputs.reduced(0, counts.output) if rank == root else None,
            reduces=True,
            rooted=True,
        ),
        CollectiveSpec(
            "alltoall",
            _exchanged,
            _share,
            lambda backend, output, source, op, root: _from_aside(output, source, backend.all_to_all),
            lambda inputs, counts, rank, root: inputs.joined(
                [(each, rank * counts.shown) for each in range(inputs.ranks)], counts.shown
            ),
        ),
        CollectiveSpec(
            "sendrecv",
            _whole,
            _one,
            lambda backend, output, source, op, root: _from_aside(output, source, backend.send_receive),
            lambda inputs, counts, rank, root: inputs.of((rank - 1) % inputs.ranks, 0, counts.output),
        ),
        CollectiveSpec(
            "barrier",
            lambda count, ranks, nbytes: Counts(0, 0, 0),
            _one,
            lambda backend, output, source, op, root: backend.barrier(),
            lambda inputs, counts, rank, root: None,
        ),
    )
}
"""Name -> description of each collective that the bench can time."""
