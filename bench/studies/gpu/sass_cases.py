"""What sass_costs.py runs the kernels on, and the results that the reference wants of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.bench.studies.gpu.sass_machine import SassMemory
from gradwire.compressors.codecs.base import BlockCodec
from gradwire.compressors.codecs.onebit import OneBitCodec
from gradwire.compressors.codecs.quantize import QuantizeCodec
from gradwire.compressors.codecs.waterfill import WATERFILL_GROUP, WaterfillCodec
from gradwire.compressors.kernels import reference
from gradwire.compressors.kernels.cuda.families import Stage, family_of
from gradwire.compressors.kernels.cuda.launch import Argument

MEMORY_NBYTES = 8 << 20
NUMEL = 16384
"""Elements of every case."""

Arguments = Sequence[np.generic]


class Arena:
    """SassMemory for one case, and what must be in it afterwards."""

    def __init__(self) -> None:
        self.memory = SassMemory(MEMORY_NBYTES)
        self.wanted: list[tuple[str, int, NDArray[np.uint8]]] = []

    def put(self, tensor: Tensor) -> np.int64:
        """Places a tensor and returns its address."""
        return np.int64(self.memory.place(tensor.contiguous().view(-1).view(torch.uint8).numpy()))

    def expect(self, name: str, tensor: Tensor) -> np.int64:
        """Places zeros and returns their address; the kernel must write this tensor there."""
        address = self.put(torch.zeros_like(tensor))
        self.wanted.append((name, int(address), tensor.contiguous().view(-1).view(torch.uint8).numpy()))
        return address

    def check(self) -> None:
        """Raises ValueError if a result has other bits than the reference's."""
        for name, address, wanted in self.wanted:
            wrong = int((self.memory.taken(address, wanted.size) != wanted).sum())
            if wrong:
                raise ValueError(f"`{name}`: {wrong} of {wanted.size} bytes differ from the reference's")


@dataclass(frozen=True, slots=True)
class SassCase:
    """A kernel and what it works on."""

    name: str
    file: str
    kernel: str
    numel: int
    blocks: int
    threads: int
    arguments: Callable[[Arena], Arguments]


@dataclass(frozen=True, slots=True)
class CodecKernels:
    """The kernels of a block codec.

    Attributes:
        name: In the table.
        codec: Format of the payloads.
        ctas: By what a kernel does.
    """

    name: str
    codec: BlockCodec
    ctas: dict[str, int]

    def encode(self) -> SassCase:
        """A gradient and a residual into a payload and a new residual."""

        def make(arena: Arena) -> Arguments:
            x, residual, left = _randn(0), _randn(1), torch.empty(NUMEL)
            payload = torch.empty(self._nbytes, dtype=torch.uint8)
            reference.encode_pieces(self.codec, x, residual, left, payload[None], NUMEL)
            inputs = arena.put(x), arena.put(residual)
            outputs = arena.expect("new_residual", left), arena.expect("payload", payload)
            return *inputs, *outputs, np.int64(self._nbytes), np.int64(NUMEL), np.int64(NUMEL)

        return self._case("encode", family_of(self.codec).encode_pieces, make)

    def decode_reduce(self, workers: int) -> SassCase:
        """The sum of some payloads."""

        def make(arena: Arena) -> Arguments:
            rows, target = self._rows(workers), torch.empty(NUMEL)
            reference.decode_reduce(self.codec, rows, None, target)
            inputs = arena.put(rows), np.int64(rows.stride(0)), np.int64(workers), np.int64(0)
            return *inputs, arena.expect("target", target), np.int64(NUMEL)

        return self._case("decode_reduce", family_of(self.codec).decode_reduce, make, f", W = {workers}")

    def reduce_encode(self, workers: int) -> SassCase:
        """The payload of the sum of some payloads and a residual, and a new residual."""
        stage = family_of(self.codec).reduce_encode
        assert stage is not None, f"{self.name} has no such kernel"

        def make(arena: Arena) -> Arguments:
            rows, residual, left = self._rows(workers), _randn(1), torch.empty(NUMEL)
            reduced = torch.empty(self._nbytes, dtype=torch.uint8)
            reference.reduce_encode(self.codec, rows, residual, left, reduced, NUMEL)
            inputs = arena.put(rows), np.int64(rows.stride(0)), np.int64(workers), arena.put(residual)
            return *inputs, arena.expect("new_residual", left), arena.expect("reduced", reduced), np.int64(NUMEL)

        return self._case("reduce_encode", stage, make, f", W = {workers}")

    @property
    def _nbytes(self) -> int:
        return self.codec.wire_nbytes(NUMEL)

    def _case(self, does: str, stage: Stage, make: Callable[[Arena], Arguments], of: str = "") -> SassCase:
        def arguments(arena: Arena) -> Arguments:
            counts = (np.int64(NUMEL // stage.unit),) if stage.counted else ()
            return *map(_word, stage.first), *make(arena), *counts, *map(_word, stage.last)

        family = family_of(self.codec)
        name = f"{self.name} {does}{of}"
        return SassCase(name, family.file, stage.kernel, NUMEL, self.ctas[does], family.threads, arguments)

    def _rows(self, workers: int) -> Tensor:
        rows = torch.empty(workers, -(-self._nbytes // 16) * 16, dtype=torch.uint8)
        for worker, row in enumerate(rows):
            self.codec.torch_encode(_randn(10 + worker), row[: self._nbytes])
        return rows


def _word(argument: Argument) -> np.generic:
    return np.int64(argument) if isinstance(argument, int) else argument


def _randn(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def _alike(ctas: int) -> dict[str, int]:
    return dict.fromkeys(("encode", "decode_reduce", "reduce_encode"), ctas)


def waterfill() -> CodecKernels:
    """A group a CTA."""
    return CodecKernels("waterfill", WaterfillCodec(5), _alike(NUMEL // WATERFILL_GROUP))


def quantize(bits: int) -> CodecKernels:
    """A block a warp, as a launch of many CTAs has it; to the nearest."""
    ctas = {"encode": 4, "decode_reduce": 8, "reduce_encode": 4}
    return CodecKernels(f"quantize {bits} bits", QuantizeCodec(bits), ctas)


def onebit() -> CodecKernels:
    """A block a warp."""
    return CodecKernels("onebit", OneBitCodec(), _alike(2))


def dgc_sum(workers: int, share: float = 0.01) -> SassCase:
    """The sum of some payloads of `share` of the elements; a tile a CTA."""
    count = int(NUMEL * share)

    def make(arena: Arena) -> Arguments:
        rows, target = torch.empty(workers, 8 * count, dtype=torch.uint8), torch.empty(NUMEL)
        for worker, row in enumerate(rows):
            generator = torch.Generator().manual_seed(worker)
            places = torch.randperm(NUMEL, generator=generator)[:count].sort().values.to(torch.int32)
            row[: 4 * count] = places.view(torch.uint8)
            row[4 * count :] = torch.randn(count, generator=generator).view(torch.uint8)
        reference.dgc_sum(rows, count, torch.float32, target)
        inputs = arena.put(rows), np.int64(rows.stride(0)), np.int64(workers), np.int64(count), np.int32(0)
        return *inputs, arena.expect("target", target), np.int64(NUMEL)

    name = f"dgc_sum of {share:.0%}, W = {workers}"
    return SassCase(name, "dgc_select", "dgc_sum", NUMEL, NUMEL // 4096, 256, make)


def all_cases() -> Iterator[SassCase]:
    """Every case, in the order of the table."""
    for codec, workers in (
        (waterfill(), (1, 4, 16)),
        (quantize(8), (4, 8, 16)),
        (quantize(4), (4, 8, 16)),
        (onebit(), (4, 8, 16)),
    ):
        yield codec.encode()
        yield from map(codec.decode_reduce, workers)
        yield codec.reduce_encode(4)
    for count in (4, 16):
        yield dgc_sum(count)
