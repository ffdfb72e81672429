"""Checks of results: exact ones are compared bit by bit, lossy ones with the error bound of their compressor.

The errors of compressors are shown in a table of their own. Inputs resemble gradients: the sum of a part that all ranks
share and of noise that differs from rank to rank. One step is taken with empty residuals, so that the bounds below
hold; s is the true sum, x_r the inputs, e the error of the result.

| compressor | bound                                                | why                                          |
|------------|------------------------------------------------------|----------------------------------------------|
| fp16       | abs(e_i) <= 2^-10 sum_r abs(x_ri) + (n+1) 2^-24      | each input and the sum are rounded once      |
| bf16       | abs(e_i) <= 2^-7 sum_r abs(x_ri)                     | the same with 8 bits of precision            |
| int8, int4 | abs(e_i) <= (sum_r range(x_r) + 2 range) / (2^b - 1) | one step of a block's range, twice           |
| any other  | norm(e) <= 2 sum_r norm(x_r)                         | a compressor is a contraction, applied twice |

Source: IEEE 754-2019, section 4.3 (rounding); Karimireddy et al., Error Feedback Fixes SignSGD (ICML 2019),
assumption A (contraction).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.bench.nccl_tests.backends.backend import Backend
from gradwire.bench.nccl_tests.backends.gradwire_backend import GradwireBackend
from gradwire.bench.nccl_tests.collectives import CollectiveSpec, Counts
from gradwire.bench.nccl_tests.dtypes import ELEMENT_TYPES, OPERATIONS, ElementType
from gradwire.bench.nccl_tests.ranks import gather
from gradwire.bench.nccl_tests.verify import ExactInputs, count_wrong
from gradwire.compressors.base import Codec, Compressor


@dataclass(frozen=True, slots=True)
class Case:
    """Parameters that a series of rows shares.

    Attributes:
        element: Type of the elements.
        operation: Name of the reduction; `none` if the collective does not reduce.
        root: Rank of the root; -1 if the collective has none.
    """

    element: ElementType
    operation: str
    root: int


class ResultCheck(Protocol):
    """Protocol of a check of a collective's results."""

    def wrong(
        self, backend: Backend, collective: CollectiveSpec, case: Case, counts: Counts, in_place: bool, seed: int
    ) -> int:
        """Runs a collective once on inputs that it makes, and returns the number of this rank's wrong elements.

        All ranks call it together.

        Args:
            backend: Library that runs the collective.
            collective: Collective to run.
            case: Element type, operation and root.
            counts: Numbers of elements.
            in_place: Whether input and output share memory.
            seed: Seed of the inputs, the same on all ranks.
        """


class Buffers:
    """Memory for one operation on this rank, out of place and in place.

    Args:
        counts: Numbers of elements of the largest operation.
        element: Type of the elements.
        rank: This rank.
        device: Device of the memory.
    """

    def __init__(self, counts: Counts, element: ElementType, rank: int, device: torch.device) -> None:
        self._rank = rank
        numel = max(counts.source, counts.output)
        # Zeros: sums of any number of iterations stay finite, and every page exists before the clock starts.
        # Written, not torch.zeros: pages that were never written are all one page, which no cache ever misses.
        self.source, self.output = (torch.empty(numel, dtype=element.torch, device=device) for _ in range(2))
        self.source.view(torch.uint8).zero_()
        self.output.view(torch.uint8).zero_()

    def views(self, counts: Counts, in_place: bool) -> tuple[Tensor, Tensor]:
        """Returns the tensors (output, source) of one operation, as views of the memory.

        Args:
            counts: Numbers of elements of the operation.
            in_place: Whether the two share memory.
        """
        if not in_place:
            return self.output[: counts.output], self.source[: counts.source]
        first, second = self._rank * counts.output_offset, self._rank * counts.source_offset
        return self.output[first : first + counts.output], self.output[second : second + counts.source]


class ExactCheck:
    """Check of exact results: every element must be the one that the inputs give.

    Args:
        ranks: Number of ranks.
        device: Device of the tensors.
    """

    def __init__(self, ranks: int, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device

    def wrong(
        self, backend: Backend, collective: CollectiveSpec, case: Case, counts: Counts, in_place: bool, seed: int
    ) -> int:
        """Runs the operation once on known inputs; returns the number of elements that differ from the exact result."""
        inputs = ExactInputs(self._ranks, case.element, case.operation, seed)
        buffers = Buffers(counts, case.element, backend.rank, self._device)
        output, source = buffers.views(counts, in_place)
        source.copy_(inputs.of(backend.rank, 0, counts.source).to(self._device))
        collective.prepare(backend, output, source, case.operation, max(case.root, 0))().wait()
        expected = collective.expected(inputs, counts, backend.rank, max(case.root, 0))
        return 0 if expected is None else count_wrong(output, expected, inputs)


def cases(collective: CollectiveSpec, options: argparse.Namespace, ranks: int) -> list[Case]:
    """Returns every combination of element type, operation and root that the options ask for.

    Args:
        collective: Collective that is timed.
        options: Options of the command line.
        ranks: Number of ranks.

    Raises:
        ValueError: `-r` is not below the number of ranks.
    """
    if options.root is not None and options.root >= ranks:
        raise ValueError(f"`-r`: found {options.root}, wanted a rank below {ranks}, or all")
    elements = list(ELEMENT_TYPES) if options.datatype == "all" else [options.datatype]
    operations = ["none"]
    if collective.reduces:
        operations = list(OPERATIONS) if options.op == "all" else [options.op]
    roots = [-1]
    if collective.rooted:
        roots = list(range(ranks)) if options.root is None else [options.root]
    return [
        Case(ELEMENT_TYPES[element], operation, root)
        for element in elements
        for operation in operations
        for root in roots
    ]


_SHARED, _OWN = 1.0, 0.5
"""Standard deviations of the two parts of a gradient: the one that ranks share, and each rank's noise."""

_TIMED_CODINGS = 3
"""Number of times that a tensor is encoded and decoded; the median time counts."""


@dataclass(frozen=True, slots=True)
class CodingLoss:
    """Error and bytes of a compressed all-reduce of one size.

    Attributes:
        nbytes: Size of the tensor in bytes.
        bound: Error bound that was checked, as a formula.
        relative_error: norm(result - sum) / norm(sum).
        cosine: Cosine of the angle between the result and the exact sum.
        logical_nbytes: Bytes that the rank which sends most would send between nodes without a compressor.
        wire_nbytes: Bytes that the rank which sends most did send between nodes.
        encode_seconds: Seconds to encode a rank's shard; None if the compressor is not a codec.
        decode_seconds: Seconds to decode it; None if the compressor is not a codec.
    """

    nbytes: int
    bound: str
    relative_error: float
    cosine: float
    logical_nbytes: float
    wire_nbytes: float
    encode_seconds: float | None
    decode_seconds: float | None


def gradients(ranks: int, numel: int, seed: int) -> list[Tensor]:
    """Returns the inputs of all ranks, which resemble gradients: 1-D float32 tensors on the CPU.

    Args:
        ranks: Number of ranks.
        numel: Elements of each input.
        seed: Seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + 17)
    shared = torch.randn(numel, generator=generator) * _SHARED
    return [shared + torch.randn(numel, generator=generator) * _OWN for _ in range(ranks)]


def bound_of(name: str) -> str:
    """Returns the error bound of a compressor as a formula; the general one for a name without a bound of its own.

    Args:
        name: Name of the compressor.
    """
    return {
        "none": "equal to a float32 sum within 2^-22 sum_r |x_r|",
        "fp16": "|e_i| <= 2^-10 sum_r |x_ri|",
        "bf16": "|e_i| <= 2^-7 sum_r |x_ri|",
        "int8": "|e_i| <= (sum_r range(x_r) + 2 range) / 255",
        "int4": "|e_i| <= (sum_r range(x_r) + 2 range) / 15",
    }.get(name, "norm(e) <= 2 sum_r norm(x_r)")


def count_outside(name: str, result: Tensor, inputs: list[Tensor]) -> int:
    """Returns the number of elements outside a compressor's bound; all if the bound is one of the norm, and not kept.

    Args:
        name: Name of the compressor.
        result: Sum that the compressed all-reduce gave, 1-D float32 on the CPU.
        inputs: Inputs of all ranks, of the same shape.
    """
    total = torch.stack(inputs).double().sum(0)
    error = (result.double() - total).abs()
    magnitude = torch.stack(inputs).double().abs().sum(0)
    if name in ("none", "fp16", "bf16"):
        share = {"none": 2.0**-22, "fp16": 2.0**-10, "bf16": 2.0**-7}[name]
        limit = magnitude * share + (len(inputs) + 1) * 2.0**-24
    elif name in ("int8", "int4"):
        ranges = sum(float(each.max() - each.min()) for each in inputs)
        limit = torch.full_like(
            error, (ranges + 2 * float(total.max() - total.min())) / (255 if name == "int8" else 15)
        )
    else:
        within = float(error.norm()) <= 2 * sum(float(each.norm()) for each in inputs)
        return 0 if within else error.numel()
    return int((~(error <= limit)).sum().item())


class LossyCheck:
    """Check of compressed all-reduces by their compressor's bound; it also collects their errors and bytes.

    Args:
        ranks: Number of ranks.
        device: Device of the tensors.
        control: gloo group of all ranks, for exchanging measurements.
    """

    def __init__(self, ranks: int, device: torch.device, control: dist.ProcessGroup) -> None:
        self._ranks = ranks
        self._device = device
        self._control = control
        self.losses: list[CodingLoss] = []
        """Errors and bytes of the all-reduces that were out of place, in the order of the rows."""

    def wrong(
        self, backend: Backend, collective: CollectiveSpec, case: Case, counts: Counts, in_place: bool, seed: int
    ) -> int:
        """Runs a compressed all-reduce once; returns the number of elements outside the bound of the compressor.

        It begins without a residual. If it is out of place, its error, bytes and times are added to `losses`, for which
        the ranks exchange numbers. Without elements nothing is run, and 0 is returned. Collective.
        """
        numel = counts.source
        if not numel:
            return 0
        lossy = cast(GradwireBackend, backend)
        inputs = gradients(self._ranks, numel, seed)
        source = inputs[backend.rank].clone().to(self._device)
        output = source if in_place else torch.empty_like(source)
        before = lossy.sent_nbytes()
        lossy.forget()
        collective.prepare(backend, output, source, case.operation, 0)().wait()
        result = output.cpu() * (self._ranks if case.operation == "avg" else 1)
        if not in_place:
            sent = [now - then for now, then in zip(lossy.sent_nbytes(), before, strict=True)]
            self._keep(lossy.compressor, result, inputs, lossy.shard_numel(numel), sent)
        return count_outside(lossy.compressor.name, result, inputs)

    def _keep(
        self, compressor: Compressor, result: Tensor, inputs: list[Tensor], shard: int, sent: list[float]
    ) -> None:
        total = torch.stack(inputs).double().sum(0)
        norms = float(result.double().norm() * total.norm())
        logical, wire = (max(gather(value, self._control)) for value in sent)
        codec: Codec | None = getattr(compressor, "codec", None)
        encode, decode = coding_seconds(codec, inputs[0][:shard].to(self._device)) if codec else (None, None)
        self.losses.append(
            CodingLoss(
                nbytes=result.numel() * 4,
                bound=bound_of(compressor.name),
                relative_error=float((result.double() - total).norm() / total.norm()),
                cosine=float(result.double() @ total) / norms if norms else 0.0,
                logical_nbytes=logical,
                wire_nbytes=wire,
                encode_seconds=encode,
                decode_seconds=decode,
            )
        )


def coding_seconds(codec: Codec, flat: Tensor) -> tuple[float, float]:
    """Returns the median seconds to encode and to decode a tensor.

    Args:
        codec: Codec to time.
        flat: Tensor to encode, 1-D float32 on any device; it is not changed.
    """
    payload = torch.empty(codec.wire_nbytes(flat.numel()), dtype=torch.uint8, device=flat.device)
    target = torch.empty_like(flat)
    encode, decode = [], []
    for _ in range(_TIMED_CODINGS):
        encode.append(_seconds(lambda: codec.encode(flat, payload), flat))
        decode.append(_seconds(lambda: codec.decode(payload, target), flat))
    return statistics.median(encode), statistics.median(decode)


def _seconds(call: Callable[[], None], flat: Tensor) -> float:
    began = time.perf_counter()
    call()
    if flat.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began
