"""Rates, times and names as the findings write them."""

from collections.abc import Sequence


def rate(bytes_per_second: float) -> str:
    """`200 Mbit/s`, `23 Gbit/s`: as network people write it."""
    bits = 8 * bytes_per_second
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= 0.995 * size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.0f} bit/s"


def nbytes(count: float) -> str:
    """`64 MB`, `1.5 GB`: powers of ten."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def seconds(value: float) -> str:
    """`1.3 s`, `45 ms`, `20 us`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return "0 s" if value <= 0 else f"{value * 1e9:.0f} ns"


def listed(names: Sequence[object]) -> str:
    """`a, b and c`; shortened after six."""
    words = [str(name) for name in names]
    if len(words) > 6:
        return f"{', '.join(words[:5])} and {len(words) - 5} more"
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def verb(names: Sequence[object], word: str) -> str:
    """`runs` after one name, `run` after several."""
    return word + "s" if len(names) == 1 else word
