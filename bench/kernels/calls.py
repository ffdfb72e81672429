"""Calls of every kernel on inputs that are made for it, with the tensors that it reads and writes.

`gradwire selftest` makes the same call with the kernels of a device and with the reference, and compares the tensors
that they wrote. It also compares the time of the call with that of a copy of as many bytes. Each kernel of
`compressors/kernels/` must be in `CALLS`: a test compares `CALLS` with the functions of the CUDA kernels and with the
entry points of their files.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from gradwire.compressors.base import Codec
from gradwire.compressors.codecs.base import BlockCodec
from gradwire.compressors.codecs.cast import CastCodec
from gradwire.compressors.codecs.onebit import OneBitCodec
from gradwire.compressors.codecs.quantize import QuantizeCodec
from gradwire.compressors.codecs.waterfill import WaterfillCodec
from gradwire.compressors.kernels import cuda, reference
from gradwire.compressors.kernels.dispatch import Kernels
from gradwire.compressors.kernels.reference import (
    DgcRule,
    DgcRun,
    DgcState,
    FactorRun,
    FactorRuns,
)

CPU = torch.device("cpu")
WORKERS = 4
"""Number of payloads that a sum adds."""
OWNERS = 3
"""Number of pieces into which a tensor is divided."""
RANK = 4
"""Rank of PowerSGD's factors."""
SCALE = 0.125
"""Factor of a mean over eight ranks, which causes no rounding."""
TOLERANCE = 1e-4
"""Allowed difference of sums whose order a library chooses, divided by the largest magnitude."""
FORMATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class KernelSet:
    """Kernels of a device, or the reference.

    Attributes:
        kernels: Module or object with the functions of `Kernels`.
        device: Device of their tensors.
    """

    kernels: Kernels
    device: torch.device


def reference_kernels() -> KernelSet:
    """Returns the reference kernels on the CPU, with which all others are compared."""
    return KernelSet(reference, CPU)


def cpu_kernels() -> KernelSet:
    """Returns the compiled kernels for the CPU.

    Raises:
        ImportError: gradwire's C++ modules have not been built.
    """
    from gradwire.compressors.kernels import native  # as dispatch.py: a tree that was never built has none

    return KernelSet(native, CPU)


def cuda_kernels(device: torch.device) -> KernelSet:
    """Returns the CUDA kernels for a device."""
    return KernelSet(cuda, device)


class KernelInputs:
    """Maker of the tensors of a call, with random values that depend on the arguments only.

    Args:
        device: Device of the tensors.
        numel: Elements of the gradient, at least 1.
        factor: Factor of all values; 1e-41 makes them subnormal.
        alike: True makes values and payloads on the CPU, so that all devices get the same bits. If not, they are
            made on `device`, which is faster for large tensors.
    """

    def __init__(self, device: torch.device, numel: int, factor: float = 1.0, *, alike: bool = True) -> None:
        self.device = device
        self.numel = numel
        self._factor = factor
        self._drawn_on = CPU if alike else device

    def values(self, seed: int, numel: int | None = None) -> Tensor:
        """Returns normally distributed values with some zeros of both signs, as a 1-D float32 tensor.

        Args:
            seed: Seed of the values.
            numel: Number of values; None for that of the gradient.
        """
        return self._values(seed, self.numel if numel is None else numel).to(self.device)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns a tensor of zeros for a kernel to write to."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def payloads(self, codec: Codec, numel: int, rows: int = WORKERS) -> Tensor:
        """Returns encoded random values: a uint8 tensor of shape (rows, bytes), one payload in each row.

        Args:
            codec: Codec that encodes the values.
            numel: Number of values in each payload.
            rows: Number of payloads.
        """
        made = torch.zeros(rows, codec.wire_nbytes(numel), dtype=torch.uint8, device=self._drawn_on)
        for seed, row in enumerate(made):
            codec.encode(self._values(100 + seed, numel), row)
        return made.to(self.device)

    def _values(self, seed: int, numel: int) -> Tensor:
        generator = torch.Generator(self._drawn_on).manual_seed(1000 * numel + seed)
        x = torch.randn(numel, generator=generator, device=self._drawn_on).mul_(self._factor)
        x[50::97], x[70::101] = 0.0, -0.0
        return x


@dataclass(frozen=True, slots=True)
class KernelCall:
    """Call of a kernel with all of its tensors.

    Attributes:
        run: Function that makes the call; on CUDA it returns when the kernels are queued on the current stream.
        reads: Tensors that the kernel must read.
        writes: Tensors that the kernel must write, which are compared with the reference's.
        tolerance: Allowed difference, divided by the largest magnitude; 0 requires the same bits.
    """

    run: Callable[[], object]
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    tolerance: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes that the call must read and write at least."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.reads, *self.writes))


CallMaker = Callable[[KernelSet, KernelInputs], KernelCall]


def _cut(numel: int) -> tuple[int, int]:
    """Returns how a tensor is divided among its owners: elements of a piece, a multiple of 64, and number of pieces.

    There are at most `OWNERS` pieces, and the last may be shorter.

    Args:
        numel: Number of elements of the tensor, at least 1.
    """
    width = -(-numel // (64 * OWNERS)) * 64
    return width, -(-numel // width)


@dataclass(frozen=True, slots=True)
class _Blockwise:
    """Calls of the kernels of one block codec.

    Attributes:
        codec: Codec whose payloads are written and read.
        suffix: Text at the end of the calls' names.
    """

    codec: BlockCodec
    suffix: str = ""

    def encode(self, of: KernelSet, given: KernelInputs) -> KernelCall:
        return self._encode(of, given, given.numel, 1)

    def encode_pieces(self, of: KernelSet, given: KernelInputs) -> KernelCall:
        return self._encode(of, given, *_cut(given.numel))

    def _encode(self, of: KernelSet, given: KernelInputs, width: int, pieces: int) -> KernelCall:
        x, residual, left = given.values(0), given.values(1), given.zeros(given.numel)
        payloads = given.zeros(pieces, self.codec.wire_nbytes(width), dtype=torch.uint8)
        return KernelCall(
            lambda: of.kernels.encode_pieces(self.codec, x, residual, left, payloads, width),
            (x, residual),
            (left, payloads),
        )

    def decode_pieces(self, of: KernelSet, given: KernelInputs) -> KernelCall:
        width, pieces = _cut(given.numel)
        payloads, target = given.payloads(self.codec, width, pieces), given.zeros(pieces * width)
        return KernelCall(lambda: of.kernels.decode_pieces(self.codec, payloads, target, width), (payloads,), (target,))

    def decode_reduce(self, of: KernelSet, given: KernelInputs) -> KernelCall:
        payloads, addend = given.payloads(self.codec, given.numel), given.values(9)
        target = given.zeros(given.numel)
        return KernelCall(
            lambda: of.kernels.decode_reduce(self.codec, payloads, addend, target), (payloads, addend), (target,)
        )

    def reduce_encode(self, of: KernelSet, given: KernelInputs) -> KernelCall:
        payloads, residual = given.payloads(self.codec, given.numel), given.values(9)
        left, reduced = given.zeros(given.numel), torch.zeros_like(payloads[0])
        return KernelCall(
            lambda: of.kernels.reduce_encode(self.codec, payloads, residual, left, reduced, given.numel),
            (payloads, residual),
            (left, reduced),
        )

    def calls(self, *names: str) -> dict[str, CallMaker]:
        """Returns name -> maker of the calls.

        Args:
            names: Names of the calls to return, such as `encode`; none for all.
        """
        every: tuple[CallMaker, ...] = (
            self.encode, self.encode_pieces, self.decode_pieces, self.decode_reduce, self.reduce_encode
        )  # fmt: skip
        known = ("encode", "encode_pieces", "decode_pieces", "decode_reduce", "reduce_encode")
        return {
            f"{self.codec.family}_{name}{self.suffix}": call
            for name, call in zip(known, every, strict=True)
            if name in (names or known)
        }


def _dgc(parameters: int, of: KernelSet, given: KernelInputs) -> KernelCall:
    """Returns a call of DGC's step, which selects a hundredth of the elements of each parameter.

    Args:
        parameters: Number of parameters into which the gradient is divided; 1 calls the kernel for one parameter.
        of: Kernels to call.
        given: Maker of the tensors.
    """
    runs = [
        DgcRun(start, numel, -(-numel // 100))
        for start, numel in zip(*_parts(given.numel, parameters), strict=True)
        if numel
    ]
    chosen = sum(run.count for run in runs)
    x, velocity, total = (given.values(seed) for seed in range(3))
    outs = given.zeros(given.numel), given.zeros(given.numel)
    state = DgcState(velocity, total, *outs)
    indices, values = given.zeros(chosen, dtype=torch.int32), given.zeros(chosen)
    rule, scales = DgcRule(0.9), torch.linspace(0.3, 1.0, len(runs)).to(given.device)
    if parameters == 1:
        run: Callable[[], object] = lambda: of.kernels.dgc_step(x, state, rule, indices, values)
    else:
        run = lambda: of.kernels.dgc_step_many(x, state, rule, scales, runs, indices, values)
    return KernelCall(run, (x, velocity, total), (*outs, indices, values))


def _parts(numel: int, count: int) -> tuple[list[int], list[int]]:
    """Divides elements into parts of increasing length; returns the first element and the length of each part.

    Args:
        numel: Number of elements.
        count: Number of parts.
    """
    whole = sum(range(1, count + 1))
    bounds = [numel * done // whole for done in accumulate(range(1, count + 1), initial=0)]
    return bounds[:-1], [stop - start for start, stop in pairwise(bounds)]


def _places(given: KernelInputs, count: int, seed: int) -> Tensor:
    """Returns `count` different indices into the gradient, ascending, as a 1-D int32 tensor."""
    stride = given.numel // count
    return torch.arange(count, device=given.device).mul_(stride).add_(seed % stride).to(torch.int32)


def _dgc_sum(dtype: torch.dtype, of: KernelSet, given: KernelInputs) -> KernelCall:
    count, rows = -(-given.numel // 100), []
    for seed in range(WORKERS):
        places = _places(given, count, seed).view(torch.uint8)
        rows.append(torch.cat([places, given.values(seed, count).to(dtype).view(torch.uint8)]))
    payloads, target = torch.stack(rows), given.zeros(given.numel)
    return KernelCall(lambda: of.kernels.dgc_sum(payloads, count, dtype, target), (payloads,), (target,))


def _scatter_add(of: KernelSet, given: KernelInputs) -> KernelCall:
    count = -(-given.numel // 4)
    places, values, target = _places(given, count, 1), given.values(0, count), given.values(1)
    return KernelCall(lambda: of.kernels.scatter_add(places, values, target), (places, values, target), (target,))


def _matrices(numel: int, count: int) -> FactorRuns:
    """Returns the layout of `count` square matrices, one after the other, as large as fit into `numel` elements."""
    runs = []
    for place in range(count):
        side = max(1, int((numel // count) ** 0.5))
        rank = min(RANK, side)
        runs.append(FactorRun(place * side * side, side, side, rank, place * rank * side, place * rank * side))
    return FactorRuns(tuple(runs))


def _factors(matrices: FactorRuns) -> int:
    return sum(run.rank * run.rows for run in matrices.runs)


def _project(many: bool, of: KernelSet, given: KernelInputs) -> KernelCall:
    matrices = _matrices(given.numel, 3 if many else 1)
    numel, one = sum(run.rows * run.columns for run in matrices.runs), matrices.runs[0]
    flat, residual, q = given.values(0, numel), given.values(1, numel), given.values(2, _factors(matrices))
    p = torch.zeros_like(q)
    if many:
        run: Callable[[], object] = lambda: of.kernels.powersgd_project_many(flat, residual, matrices, q, p)
    else:
        run = lambda: of.kernels.powersgd_project(one.matrix(flat), one.matrix(residual), one.q(q), one.p(p))
    return KernelCall(run, (flat, residual, q), (flat, p), TOLERANCE)


def _back_project(many: bool, of: KernelSet, given: KernelInputs) -> KernelCall:
    matrices = _matrices(given.numel, 3 if many else 1)
    numel, one = sum(run.rows * run.columns for run in matrices.runs), matrices.runs[0]
    flat, p = given.values(0, numel), given.values(2, _factors(matrices))
    q = torch.zeros_like(p)
    if many:
        run: Callable[[], object] = lambda: of.kernels.powersgd_back_project_many(flat, matrices, p, q)
    else:
        run = lambda: of.kernels.powersgd_back_project(one.matrix(flat), one.p(p), one.q(q))
    return KernelCall(run, (flat, p), (q,), TOLERANCE)


def _restore(many: bool, of: KernelSet, given: KernelInputs) -> KernelCall:
    matrices = _matrices(given.numel, 3 if many else 1)
    numel, one = sum(run.rows * run.columns for run in matrices.runs), matrices.runs[0]
    flat, left = given.values(0, numel), given.zeros(numel)
    p, own, total = (given.values(seed, _factors(matrices)) for seed in (1, 2, 3))
    if many:
        run: Callable[[], object] = lambda: of.kernels.powersgd_restore_many(flat, left, matrices, p, own, total)
    else:
        run = lambda: of.kernels.powersgd_restore(
            one.matrix(flat), one.matrix(left), one.p(p), one.q(own), one.q(total)
        )
    return KernelCall(run, (flat, p, own, total), (flat, left))


def _orthogonalize(of: KernelSet, given: KernelInputs) -> KernelCall:
    columns = max(RANK, int(given.numel**0.5))
    matrices = [given.values(seed, RANK * columns).view(RANK, columns) for seed in range(8)]
    keys = list(range(len(matrices)))
    return KernelCall(
        lambda: of.kernels.orthogonalize_many(matrices, keys), tuple(matrices), tuple(matrices), TOLERANCE
    )


CALLS: dict[str, CallMaker] = {
    **_Blockwise(CastCodec("float16"), " f16").calls(),
    **_Blockwise(CastCodec("bfloat16"), " bf16").calls(),
    **_Blockwise(CastCodec("bfloat16", SCALE), " bf16, scaled").calls("encode", "reduce_encode"),
    **_Blockwise(QuantizeCodec(8), " 8 bits").calls(),
    **_Blockwise(QuantizeCodec(4), " 4 bits").calls(),
    **_Blockwise(QuantizeCodec(8, 5), " 8 bits, random").calls("encode"),
    **_Blockwise(QuantizeCodec(4, 5), " 4 bits, random").calls("reduce_encode"),
    **_Blockwise(WaterfillCodec(5), " 5 bits").calls(),
    **_Blockwise(WaterfillCodec(2), " 2 bits").calls("encode", "decode_reduce"),
    **_Blockwise(OneBitCodec()).calls(),
    "dgc_step": partial(_dgc, 1),
    "dgc_step_many": partial(_dgc, 5),
    **{f"dgc_sum {name}": partial(_dgc_sum, dtype) for name, dtype in FORMATS.items()},
    "scatter_add": _scatter_add,
    "powersgd_project": partial(_project, False),
    "powersgd_project_many": partial(_project, True),
    "powersgd_back_project": partial(_back_project, False),
    "powersgd_back_project_many": partial(_back_project, True),
    "powersgd_restore": partial(_restore, False),
    "powersgd_restore_many": partial(_restore, True),
    "orthogonalize_many": _orthogonalize,
}
"""Name -> function that makes the call, for every kind of device."""
