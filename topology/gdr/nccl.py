"""NCCL's rules that depend on its version: path types and their numbers, default levels, mechanisms."""

import re

LEVELS = ("LOC", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
"""Values of NCCL_NET_GDR_LEVEL, nearest first. Source: NCCL src/graph/paths.cc (ncclTopoUserGdrLevel)."""
LEGACY_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")
"""Levels that the old integers 0 to 5 stand for. Source: NCCL user guide, NCCL_NET_GDR_LEVEL; src/transport/net.cc at
v2.5.7-1."""
DMABUF_SINCE = (2, 13)
MODULE_PATH_SINCE = (2, 23, 4)
"""Earlier releases look for peer memory only below /sys/kernel/mm/memory_peers."""
DYNAMIC_GID_SINCE = (2, 21)

Version = tuple[int, ...]

_NUMBERS = (  # first release, names by number. Source: src/graph/topo.h and src/include/graph.h, v2.6.4-1 to v2.30.7-1
    ((2, 27, 5), ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS", "NET", "DIS")),
    ((2, 27), ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "PXN", "P2C", "PHB", "SYS", "NET", "DIS")),
    ((2, 26), ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "PXN", "PHB", "SYS", "NET", "DIS")),
    ((2, 12), ("LOC", "NVL", "NVB", "PIX", "PXB", "PXN", "PHB", "SYS", "NET", "DIS")),
    ((2, 8), ("LOC", "NVL", "NVB", "PIX", "PXB", "PHB", "SYS", "NET")),
    ((2, 0), ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS", "NET")),
)
_NUMBERS_BEFORE_2_6 = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Source: src/include/topo.h at v2.4.8-1, src/include/graph.h at v2.5.7-1."""


def parse_version(text: str | None) -> Version | None:
    """Parses a version of NCCL: (2, 27, 3) from `2.27.3+cuda12.9` or from the code `22703`; None for other texts."""
    match = re.match(r"(\d{1,3})\.(\d{1,3})(?:\.(\d{1,3}))?", text or "")
    if match:
        return tuple(int(part) for part in match.groups() if part is not None)
    if text and re.fullmatch(r"2\d{4}", text):  # NCCL_VERSION_CODE since 2.9: major * 10000 + minor * 100 + patch
        return int(text[0]), int(text[1:3]), int(text[3:])
    return None


def named_distance(
    number: int, level: int, version: Version | None, level_name: str | None, *, exclusive: bool = False
) -> tuple[str, str]:
    """Translates a distance and the level it exceeds, which logs print as numbers, into names of path types.

    The numbers differ between releases of NCCL. Without a version the level tells which release's numbers these are,
    because it has another number in each of them.

    Args:
        number: Number of the distance, `7` in `distance 7 > 4`.
        level: Number of the level, `4` in that example.
        version: NCCL's version; None if the log does not name it.
        level_name: Level that a variable set; None if NCCL's default was in force.
        exclusive: Whether the level itself is too far already, `2` in `distance 2 >= 2`: NCCL before 2.6.

    Returns:
        (name of the distance, name of the level); names with `or` between them if releases differ, and the numbers as
        text if no release has them.
    """
    if exclusive:
        names = ("LOC", *_NUMBERS_BEFORE_2_6)  # the level is the first that is too far
        return _named(names, number + 1), _named(names, level)
    tables = [names for first, names in _NUMBERS if version is None or version >= first]
    if version is not None:
        return _named(tables[0], number), _named(tables[0], level)
    # NCCL prints its default level as PXB, and from 2.29 on as P2C.
    levels = (level_name,) if level_name else ("PXB", "P2C")
    found = [(_named(names, level), _named(names, number)) for names in tables if _named(names, level) in levels]
    # A GPU's distance to a card is no PXN (that of the GPU between counts instead), and is over no network.
    paths = dict.fromkeys(path for _, path in found if path not in ("P2C", "PXN", "NET", "DIS"))
    return (" or ".join(paths), found[0][0]) if paths else (str(number), str(level))


def _named(names: tuple[str, ...], number: int) -> str:
    """Returns the name with a number; the number as text if there is none."""
    return names[number] if 0 <= number < len(names) else str(number)


def parse_level(text: str, version: Version | None = None) -> str | None:
    """Returns the level that a value of NCCL_NET_GDR_LEVEL stands for; None if NCCL would not understand it.

    Args:
        text: Value of the variable.
        version: NCCL's version; None if unknown. Before 2.6 it reads numbers alone, with the meaning that they have
            kept but for 4, which was PHB.
    """
    word = text.strip().upper()
    if version is not None and version < (2, 6):
        return LEGACY_LEVELS[min(int(word), 3) if word != "5" else 5] if re.fullmatch(r"[0-5]", word) else None
    if word in LEVELS:
        return word
    return LEGACY_LEVELS[int(word)] if re.fullmatch(r"[0-5]", word) else None


def default_level(version: Version | None) -> str:
    """Returns the farthest path type on which a release of NCCL uses GPUDirect RDMA by default.

    P2C exists only on machines with a chip-to-chip link between CPU and GPU, so for all others this is PXB.

    Source: NCCL src/graph/paths.cc (ncclTopoCheckGdr), NCCL_NET_GDR_C2C default 0 in 2.26, 1 from 2.27.
    """
    return "P2C" if version is not None and version >= (2, 27) else "PXB"


def within(path: str, level: str) -> bool:
    """Returns whether a path type is at most as far as a level; both are names in `LEVELS`."""
    return LEVELS.index(path) <= LEVELS.index(level)


def name_matches(value: str, name: str) -> bool:
    """Returns whether a value of NCCL_IB_HCA admits a device, or one of NCCL_SOCKET_IFNAME an interface.

    Args:
        value: Value of the variable: names or prefixes, after `^` those to leave out, after `=` whole names.
        name: Name of the device or interface.

    Source: NCCL user guide, NCCL_IB_HCA and NCCL_SOCKET_IFNAME; src/misc/utils.cc (parseStringList, matchIfList).
    """
    exclude, rest = value.startswith("^"), value.lstrip("^")
    exact, rest = rest.startswith("="), rest.lstrip("=")
    words = [word.partition(":")[0] for word in rest.split(",") if word]
    listed = any(name == word if exact else name.startswith(word) for word in words)
    return listed != exclude


def without_level(standard: str) -> str:
    """Returns the fix for an NCCL_NET_GDR_LEVEL that turns off GPUDirect RDMA where it is on by default.

    Args:
        standard: Level that would be in force without the variable.

    Source: NCCL user guide, NCCL_NET_GDR_LEVEL; Troubleshooting, PCI Access Control Services.
    """
    return (
        f"timeout 300 env -u NCCL_NET_GDR_LEVEL ... for one run: the default is {standard}; keep the level where that "
        "run hangs or is slower, as behind PCIe access control (P5)"
    )
