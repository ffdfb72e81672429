"""Grids and arguments with which the kernels of csrc/cuda are launched, for each family of block codecs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gradwire.compressors.kernels.block import BlockFormat
from gradwire.compressors.kernels.cuda.launch import RUN, THREADS, Argument


@dataclass(frozen=True, slots=True)
class Stage:
    """Describes one kernel: its grid, and its arguments beside addresses, strides and numbers of elements.

    The elements of each piece are cut into units, of which the last may be short. At most `lanes` threads for each unit
    are started; if there are fewer, the kernel's loop does the rest.
    """

    kernel: str
    """Name of the `__global__` function."""
    unit: int
    """Number of elements in a unit."""
    lanes: int = 32
    """Number of threads that work on one unit: 32 (a warp), 1, or those of a CTA."""
    first: tuple[Argument, ...] = ()
    """Arguments that are passed before all others."""
    last: tuple[Argument, ...] = ()
    """Arguments that are passed after all others."""
    counted: bool = False
    """True if the kernel takes the number of units as an argument, after the numbers of elements."""
    resident: int = 0
    """CTAs of this kernel that a multiprocessor runs at a time, if it is started in whole waves (`even_grid`); 0 starts
    as many CTAs as there is work for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Describes the kernels of one codec, one for each operation."""

    file: str
    """File in csrc/cuda, without its suffix."""
    encode_pieces: Stage
    decode_pieces: Stage | None
    """None if the payloads of all pieces, side by side, are one payload: then decode_reduce decodes them."""
    decode_reduce: Stage
    reduce_encode: Stage | None
    """None if the operation is carried out by decode_reduce and then encode_pieces."""
    threads: int = THREADS
    """Threads of a CTA."""
    cta_each: bool = False
    """True if a CTA is started for each unit, however many there are; else a loop limits the number of CTAs."""
    word: int = 1
    """Bytes of a payload's smallest unit: rows begin at multiples of it, and strides are counted in it."""


_ONEBIT_RESIDENT = 3
"""kEncoding of csrc/cuda/onebit.cu: CTAs of the encoding kernel that run on a multiprocessor at a time; on compute
capability 12.0 and later it is 2, where a grid for 3 takes as many turns."""


def onebit() -> Family:
    """Returns the kernels of `OneBitCodec`, as `Family` describes them; a warp handles 1,024 elements."""
    return Family(
        file="onebit",
        encode_pieces=Stage("onebit_encode", 1024, counted=True, resident=_ONEBIT_RESIDENT),
        decode_pieces=Stage("onebit_decode_pieces", 1024, counted=True),
        decode_reduce=Stage("onebit_decode_reduce", 1024),
        reduce_encode=Stage("onebit_reduce_encode", 1024),
    )


def quantize(bits: float, random: float, key: float) -> Family:
    """Returns the kernels of `QuantizeCodec`; a warp handles 512 elements, or 32 * `RUN` if it only decodes.

    Args:
        bits: Bits of an element, 4 or 8.
        random: 1 for random rounding, 0 for rounding to nearest.
        key: Key of the random rounding, 32 bits; 0 without it.
    """
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
    """Returns the kernels of `WaterfillCodec` with `bits` bits an element; a CTA handles a group of 16,384 elements."""
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
    """Returns the kernels of `CastCodec`; a thread handles `RUN` elements.

    The kernel of reduce_encode takes no factor. So with a `scale` other than 1 the family has none, and the owner's
    stage is two launches: decode_reduce, then encode_pieces.

    Args:
        half: 1 for payloads of float16, 0 for bfloat16.
        scale: Factor of the elements before they are rounded.
    """
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
"""`BlockFormat.family` -> function that returns its kernels, called with `BlockFormat.parameters`."""


@lru_cache(maxsize=1024)
def family_of(codec: BlockFormat) -> Family:
    """Returns the kernels of a codec.

    Raises:
        ValueError: csrc/cuda has no kernels for its family.
    """
    if codec.family not in FAMILIES:
        raise ValueError(f"`family` is {codec.family!r}, which has no kernels in csrc/cuda: {', '.join(FAMILIES)} have")
    return FAMILIES[codec.family](*codec.parameters)
