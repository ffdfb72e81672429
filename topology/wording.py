"""Wording of rates, sizes, durations and lists, the same in every message, report and command.

Numbers have three digits and no exponent. Rates of links are in bits per second and powers of ten, as links are sold.
"""

from collections.abc import Iterable, Sequence
from importlib.metadata import distributions
from pathlib import Path

MOST_LISTED = 6
"""Most names that `listed` writes; of more it writes one less, and the number of the others."""

MOST_RANKS = 8
"""Most ranks that `ranks_in_words` writes."""


def page(name: str) -> str:
    """Returns where the reader of a message finds a page of the documentation.

    That is its file in a checkout, else its address, if the installed wheel names the repository, else its place in the
    repository, in words.

    Args:
        name: File of the page in docs/, as `how-to/slow_links.md`.
    """
    if (file := Path(__file__).parents[2] / "docs" / name).exists():
        return str(file)
    urls = [url for each in distributions(name="gradwire") for url in each.metadata.get_all("Project-URL") or ()]
    index = next((url.partition(", ")[2] for url in urls if url.startswith("Documentation, ")), None)
    return f"docs/{name} in gradwire's repository" if index is None else index.replace("index.md", name)


def rate(bytes_per_second: float) -> str:
    """Returns a rate in bits: `200 Mbit/s`, `23 Gbit/s`.

    Args:
        bytes_per_second: The rate in bytes.
    """
    bits = 8 * bytes_per_second
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= 0.9995 * size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.0f} bit/s"


def rates_in_words(bytes_per_second: Iterable[float]) -> str:
    """Returns the slowest and the fastest of some rates: `8 to 10 Gbit/s`, or one rate if they are equal.

    Args:
        bytes_per_second: Rates in bytes; at least one.
    """
    known = sorted(bytes_per_second)
    slowest, fastest = rate(known[0]), rate(known[-1])
    number, unit = slowest.split(" ")
    if slowest == fastest:
        return fastest
    return f"{number if fastest.endswith(f' {unit}') else slowest} to {fastest}"


def nbytes(count: float) -> str:
    """Returns a size in powers of ten: `64 MB`, `1.5 GB`.

    Args:
        count: Number of bytes.
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    """Returns a time in the unit that suits it: `1.3 s`, `45 ms`, `20 us`.

    Args:
        seconds: Time in seconds; zero and less give `0 s`.
    """
    if seconds >= 999.5:
        return f"{seconds:.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return "0 s" if seconds <= 0 else f"{seconds * 1e9:.0f} ns"


def ms(seconds: float) -> str:
    """Returns a time as a number of milliseconds, for columns and sentences that name the unit: `46.4`, `2031`.

    Args:
        seconds: Time in seconds.
    """
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def listed(names: Iterable[object]) -> str:
    """Joins names for a sentence: `a, b and c`; of more than six the first five and the number of the others.

    Args:
        names: Names, or objects with a text form, in the order of the sentence; none give an empty text.
    """
    words = [str(name) for name in names]
    if len(words) > MOST_LISTED:
        words = [*words[: MOST_LISTED - 1], f"{len(words) - MOST_LISTED + 1} more"]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Joins rank numbers for a sentence: `rank 3`, `ranks 0, 1, 2`; after the first eight `and 4 more`.

    Args:
        ranks: Rank numbers in the order of the sentence.
    """
    shown = ", ".join(map(str, ranks[:MOST_RANKS]))
    more = f" and {len(ranks) - MOST_RANKS} more" if len(ranks) > MOST_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"


def verb(names: Sequence[object], word: str) -> str:
    """Inflects a verb for its subject: `runs` after one name, `run` after several.

    Args:
        names: Names that are the subject.
        word: Plural form of the verb, without `s`.
    """
    return word + "s" if len(names) == 1 else word
