"""The two notations for a set of processor cores: `0-23,48-71` and NCCL's `ffffff00,0000ffff`."""

import re

MAX_CORES = 65_536
"""Cores beyond this are a typing error; Linux supports 8192."""


def cores_of_mask(mask: str) -> str | None:
    """Returns the list of ranges that a hexadecimal mask stands for, or None where the mask is malformed or empty.

    Args:
        mask: Groups of eight hexadecimal digits, the highest cores first, separated by commas.
    """
    digits = mask.replace(",", "")
    if not re.fullmatch(r"[0-9a-fA-F]{1,16384}", digits):
        return None
    bits = int(digits, 16)
    return ranges([core for core in range(bits.bit_length()) if bits >> core & 1]) or None


def members(cores: str) -> list[int]:
    """Returns the cores of a list of ranges; malformed parts are left out.

    Args:
        cores: List of ranges, such as `0-23,48-71`.
    """
    found: set[int] = set()
    for part in cores.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if match is not None:
            first, last = int(match[1]), int(match[2] or match[1])
            found.update(range(first, min(last, MAX_CORES) + 1))
    return sorted(found)


def ranges(cores: list[int]) -> str:
    """Returns ascending cores as a list of ranges.

    Args:
        cores: Core numbers, ascending, each once.
    """
    parts: list[tuple[int, int]] = []
    for core in cores:
        if parts and core == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], core)
        else:
            parts.append((core, core))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
