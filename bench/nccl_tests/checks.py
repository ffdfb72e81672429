"""How a result is judged: bit by bit, or by the bound of its compressor.

What a compressor loses is checked against a bound; its figures stand beside the table, never in it. Inputs are drawn
as gradients are: a part that all ranks share and noise of each rank's own. One step is taken with empty residuals, so
that the bounds below hold; s is the true sum, x_r the inputs, e the error of the result.

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
    """What is the same in a series of rows; `root` is -1 and `operation` `none` where the collective has none."""

    element: ElementType
    operation: str
    root: int


class ResultCheck(Protocol):
    """How a result is judged."""

    def wrong(
        self, backend: Backend, collective: CollectiveSpec, case: Case, counts: Counts, in_place: bool, seed: int
    ) -> int:
        """Runs the operation once on inputs of its own and counts this rank's wrong elements."""


class Buffers:
    """Memory for one operation on this rank, out of place and in place.

    Args:
        counts: Of the largest operation.
        element: Of the elements.
        rank: This rank.
        device: Where.
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
        """(output, source) of one operation."""
        if not in_place:
            return self.output[: counts.output], self.source[: counts.source]
        first, second = self._rank * counts.output_offset, self._rank * counts.source_offset
        return self.output[first : first + counts.output], self.output[second : second + counts.source]


class ExactCheck:
    """Compares bit by bit with what the inputs must give."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device

    def wrong(
        self, backend: Backend, collective: CollectiveSpec, case: Case, counts: Counts, in_place: bool, seed: int
    ) -> int:
        """See `ResultCheck.wrong`."""
        inputs = ExactInputs(self._ranks, case.element, case.operation, seed)
        buffers = Buffers(counts, case.element, backend.rank, self._device)
        output, source = buffers.views(counts, in_place)
        source.copy_(inputs.of(backend.rank, 0, counts.source).to(self._device))
        collective.prepare(backend, output, source, case.operation, max(case.root, 0))().wait()
        expected = collective.expected(inputs, counts, backend.rank, max(case.root, 0))
        return 0 if expected is None else count_wrong(output, expected, inputs)


def cases(collective: CollectiveSpec, options: argparse.Namespace, ranks: int) -> list[Case]:
    """Every combination of element type, operation and root that the options ask for.

    Raises:
        ValueError: `-r` is no rank.
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
"""Standard deviations of the two parts of a gradient."""

_TIMED_CODINGS = 3


@dataclass(frozen=True, slots=True)
class CodingLoss:
    """What one size lost and saved.

    Attributes:
        nbytes: Size of the tensor.
        bound: The bound that was checked, in words.
        relative_error: norm(result - sum) / norm(sum).
        cosine: Between result and sum.
        logical_nbytes: Bytes that this phase would send without a compressor, of the rank that sends most.
        wire_nbytes: Bytes that it sends.
        encode_seconds: To encode a rank's shard; None where the compressor has no codec of its own.
        decode_seconds: To decode it.
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
    """Every rank's input: 1-D float32."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + 17)
    shared = torch.randn(numel, generator=generator) * _SHARED
    return [shared + torch.randn(numel, generator=generator) * _OWN for _ in range(ranks)]


def bound_of(name: str) -> str:
    """The bound of a compressor in words."""
    return {
        "none": "equal to a float32 sum within 2^-22 sum_r |x_r|",
        "fp16": "|e_i| <= 2^-10 sum_r |x_ri|",
        "bf16": "|e_i| <= 2^-7 sum_r |x_ri|",
        "int8": "|e_i| <= (sum_r range(x_r) + 2 range) / 255",
        "int4": "|e_i| <= (sum_r range(x_r) + 2 range) / 15",
    }.get(name, "norm(e) <= 2 sum_r norm(x_r)")


def count_outside(name: str, result: Tensor, inputs: list[Tensor]) -> int:
    """Elements outside the bound; all of them where a norm is.

    Args:
        name: Of the compressor.
        result: 1-D float32, on the CPU.
        inputs: Of all ranks.
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
    """Judges a lossy all_reduce by its compressor's bound, and keeps what it lost.

    Args:
        ranks: How many.
        device: Of the tensors.
        control: Group of all ranks.
    """

    def __init__(self, ranks: int, device: torch.device, control: dist.ProcessGroup) -> None:
        self._ranks = ranks
        self._device = device
        self._control = control
        self.losses: list[CodingLoss] = []
        """The losses of the out-of-place halves, in the order of the rows."""

    def wrong(
        self, backend: Backend, collective: CollectiveSpec, case: Case, counts: Counts, in_place: bool, seed: int
    ) -> int:
        """See `ResultCheck.wrong`."""
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
    """Median seconds to encode and to decode `flat` (1-D float32), which is left alone."""
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
