"""Link rates as tc(8) writes them: `200mbit` -> bits per second; `100mbit+100mbit` of two NICs."""

import re
from collections.abc import Sequence

from gradwire.topology.printable import shortened

BITS_PER_UNIT = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
"""Decimal units in bits, the ones of network cards. Source: tc(8), section PARAMETERS, RATES."""

LEAST_BITS_PER_SECOND = 100_000
"""Least rate: below it one bucket of a small model takes minutes and every time-out strikes first."""
MOST_BITS_PER_SECOND = 10**15
"""A petabit: a rack of GPUs behind NVLink has a fifth of it."""

MOST_NICS = 8
"""Most NICs of a node: as many as a DGX has for its GPUs."""


def parse_rate(text: str, parameter: str) -> int:
    """Reads a link rate.

    Args:
        text: A number with its unit, for example `200mbit`, `2.5gbit`; upper or lower case.
        parameter: The parameter's name as the user wrote it, for the error message.

    Returns:
        The rate in bits per second.

    Raises:
        ValueError: if the text is no rate, or one too small or too large to be of use.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
    if match is None or match[2] not in BITS_PER_UNIT:
        units = ", ".join(BITS_PER_UNIT)
        raise ValueError(
            f"`{parameter}`: found {text!r}, wanted a number with a unit in bits ({units}) such as 200mbit"
        )
    exact = float(match[1]) * BITS_PER_UNIT[match[2]]
    if exact > MOST_BITS_PER_SECOND:
        raise ValueError(
            f"`{parameter}`: found {shortened(text, 40)!r}, wanted at most {format_rate(MOST_BITS_PER_SECOND)}"
        )
    bits_per_second = round(exact)
    if bits_per_second < LEAST_BITS_PER_SECOND:
        raise ValueError(
            f"`{parameter}`: found {text!r}, wanted at least {format_rate(LEAST_BITS_PER_SECOND)}; give a faster link"
        )
    return bits_per_second


def format_rate(bits_per_second: int) -> str:
    """Writes a rate as `parse_rate` reads it, in the largest unit that keeps it a whole number.

    Args:
        bits_per_second: The rate; positive.
    """
    unit = max(
        (unit for unit, bits in BITS_PER_UNIT.items() if bits_per_second % bits == 0), key=BITS_PER_UNIT.__getitem__
    )
    return f"{bits_per_second // BITS_PER_UNIT[unit]}{unit}"


def parse_nic_rates(text: str, count: int, parameter: str) -> tuple[tuple[int, ...], ...]:
    """Reads the link rates of all of some nodes, or of each, with commas; of several NICs in a node with `+`.

    Args:
        text: `200mbit`, or `200mbit,200mbit,50mbit`; `100mbit+100mbit` has two NICs in each node.
        count: Number of nodes.
        parameter: As for `parse_rate`.

    Returns:
        Of each node, the rate of each NIC's link in bits per second.

    Raises:
        ValueError: if one of them is no rate, if there are neither one nor `count` nodes, or if nodes have unlike
            numbers of NICs, or more than `MOST_NICS`.
    """
    nodes = [tuple(parse_rate(each, parameter) for each in node.split("+")) for node in text.split(",")]
    if len(nodes) not in (1, count):
        raise ValueError(
            f"`{parameter}`: found {len(nodes)} rates in {text!r}, wanted one for all nodes or {count}, one for each"
        )
    numbers = sorted({len(node) for node in nodes})
    if len(numbers) > 1 or numbers[0] > MOST_NICS:
        raise ValueError(
            f"`{parameter}`: found {' and '.join(map(str, numbers))} NICs a node in {text!r}, wanted the same number "
            f"in each, at most {MOST_NICS}"
        )
    return tuple(nodes * count if len(nodes) == 1 else nodes)


def parse_rates(text: str, count: int, parameter: str) -> tuple[int, ...]:
    """Reads what all NICs of a node carry together; see `parse_nic_rates`.

    Args:
        text: As for `parse_nic_rates`.
        count: Number of nodes.
        parameter: As for `parse_rate`.

    Returns:
        The rate of each node in bits per second.

    Raises:
        ValueError: as for `parse_nic_rates`.
    """
    return tuple(map(sum, parse_nic_rates(text, count, parameter)))


def format_nic_rates(nics: Sequence[int]) -> str:
    """Writes the rates of a node's NICs as `parse_nic_rates` reads them."""
    return "+".join(map(format_rate, nics))
