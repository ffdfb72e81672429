"""How the kernels of csrc/cuda are launched for each family of block codecs: the binding of a codec to CUDA."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gradwire.compressors.kernels.block import BlockFormat
from gradwire.compressors.kernels.cuda.launch import RUN, THREADS, Argument


@dataclass(frozen=True, slots=True)
class Stage:
    """One kernel: its grid, and its arguments beside addresses, strides and numbers of elements.

    The elements are cut into units, the short last one of each piece too; that many times `lanes` threads are started,
    or fewer, whose loops then do the rest.
    """

    kernel: str
    """Name of the `__global__` function."""
    unit: int
    """Elements of a unit."""
    lanes: int = 32
    """Threads that work on a unit: a warp, a thread or a CTA."""
    first: tuple[Argument, ...] = ()
    """Arguments in front of all others."""
    last: tuple[Argument, ...] = ()
    """Arguments behind all others."""
    counted: bool = False
    """Whether the number of units follows the numbers of elements."""
    resident: int = 0
    """CTAs that a multiprocessor keeps of a kernel that is started in whole waves; 0: as many CTAs as there is work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The kernels of one codec."""

    file: str
    """File in csrc/cuda, without its suffix."""
    encode_pieces: Stage
    decode_pieces: Stage | None
    """None where payloads lie side by side, as one payload: then decode_reduce does it, and no kernel takes pieces."""
    decode_reduce: Stage
    reduce_encode: Stage | None
    """None where decode_reduce and encode_pieces have to do it."""
    threads: int = THREADS
    """Threads of a CTA."""
    cta_each: bool = False
    """Whether each unit has a CTA of its own, however many there are."""
    word: int = 1
    """Bytes of what payloads are made of: rows begin at multiples of it, and strides are counted in it."""


_ONEBIT_RESIDENT = 3
"""kResident of csrc/cuda/onebit.cu: CTAs of the encoding kernel that a multiprocessor keeps."""


def onebit() -> Family:
    """1,024 elements a warp."""
    return Family(
        file="onebit",
        encode_pieces=Stage("onebit_encode", 1024, counted=True, resident=_ONEBIT_RESIDENT),
        decode_pieces=Stage("onebit_decode_pieces", 1024, counted=True),
        decode_reduce=Stage("onebit_decode_reduce", 1024),
        reduce_encode=Stage("onebit_reduce_encode", 1024),
    )


def quantize(bits: float, random: float, key: float) -> Family:
    """512 elements a warp, and `RUN` a thread where nothing but codes is read."""
    rounding = np.int32(random), np.uint32(key)
    return Family(
        file="quantize",
        encode_pieces=Stage(f"quantize_encode_{bits}", 512, last=rounding, counted=True),
        decode_pieces=Stage(f"quantize_decode_pieces_{bits}", 32 * RUN, counted=True),
        decode_reduce=Stage(f"quantize_decode_reduce_{bits}", RUN, lanes=1),
        reduce_encode=Stage(f"quantize_reduce_encode_{bits}", 512, last=rounding),
    )


_GROUP, _GROUP_THREADS = 16384, 512
"""kFillGroup of csrc/common/waterfill_formula.h, and kThreads of csrc/cuda/waterfill.cu: one for each block of 32."""


def waterfill(bits: float) -> Family:
    """A group a CTA."""
    first = (np.int32(bits),)
    return Family(
        file="waterfill",
        encode_pieces=Stage("waterfill_encode", _GROUP, first=first),
        decode_pieces=Stage("waterfill_decode_pieces", _GROUP, first=first),
        decode_reduce=Stage("waterfill_decode_reduce", _GROUP, first=first),
        reduce_encode=Stage("waterfill_reduce_encode", _GROUP, first=first),
        threads=_GROUP_THREADS,
        cta_each=True,
    )


def cast(half: float, scale: float) -> Family:
    """`RUN` elements a thread. The owner's stage has no factor: with one it is two launches."""
    name = "f16" if half else "bf16"
    return Family(
        file="cast",
        encode_pieces=Stage(f"cast_encode_{name}", RUN, 1, (np.float32(scale),)),
        decode_pieces=None,
        decode_reduce=Stage(f"cast_decode_reduce_{name}", RUN, 1),
        reduce_encode=Stage(f"cast_reduce_encode_{name}", RUN, 1) if scale == 1.0 else None,
        word=2,
    )


FAMILIES: dict[str, Callable[..., Family]] = {
    "cast": cast,
    "onebit": onebit,
    "quantize": quantize,
    "waterfill": waterfill,
}
"""`BlockFormat.family` -> what makes its kernels, called with the format's parameters."""


@lru_cache(maxsize=1024)
def family_of(codec: BlockFormat) -> Family:
    """Returns the kernels of a codec.

    Raises:
        ValueError: There are none.
    """
    if codec.family not in FAMILIES:
        raise ValueError(f"`family` is {codec.family!r}, which has no kernels in csrc/cuda: {', '.join(FAMILIES)} have")
    return FAMILIES[codec.family](*codec.parameters)
