"""The text of the CUDA kernels: each file of csrc/cuda with what it includes, as one piece for NVRTC."""

import functools
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "csrc"
"""In a checkout beside this folder, in an installed package beside it as well."""

KERNELS: dict[str, tuple[str, ...]] = {
    "cast": tuple(
        f"cast_{stage}_{format}" for stage in ("encode", "decode_reduce", "serve") for format in ("f16", "bf16")
    ),
    "onebit": ("onebit_encode", "onebit_decode_pieces", "onebit_decode_reduce", "onebit_serve"),
    "quantize": tuple(
        f"quantize_{stage}_{bits}" for stage in ("encode", "decode_pieces", "decode_reduce", "serve") for bits in (8, 4)
    ),
    "dgc_step": ("dgc_sample", "dgc_advance"),
    "dgc_select": ("dgc_radix", "dgc_count", "dgc_write", "dgc_scatter_add"),
    "powersgd": ("powersgd_orthogonalize", "powersgd_restore"),
    "pack": tuple(
        f"{way}_{tensor}_{bucket}"
        for way in ("pack", "unpack")
        for tensor in ("f32", "f16", "bf16")
        for bucket in ("f32", "f16", "bf16")
    ),
}
"""File of csrc/cuda, without its suffix -> the kernels it defines."""

_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)


def _inline(file: Path, seen: set[Path]) -> str:
    """Returns the file's text with its own includes in place, each once; what is left out is `#pragma once`."""
    if file in seen:
        return ""
    seen.add(file)

    def replace(match: re.Match[str]) -> str:
        beside = file.parent / match[1]
        return _inline(beside if beside.exists() else FOLDER / match[1], seen)

    return _INCLUDE.sub(replace, file.read_text().replace("#pragma once\n", ""))


@functools.cache
def kernel_source(name: str) -> str:
    """Returns one file of csrc/cuda as a single text, so that a cache keyed by the text sees every change.

    Args:
        name: A key of `KERNELS`.

    Raises:
        FileNotFoundError: The kernels were not installed with the package.
    """
    try:
        return _inline(FOLDER / "cuda" / f"{name}.cu", set())
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the CUDA kernel source {error.filename} is missing: this installation of gradwire is "
            "incomplete; install it again"
        ) from error
