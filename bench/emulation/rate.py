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
    """Parses a link rate.

    Args:
        text: Number with its unit, for example `200mbit`, `2.5gbit`, in upper or lower case.
        parameter: Name of the parameter for error messages, as the user wrote it.

    Returns:
        The rate in bits per second.

    Raises:
        ValueError: The text is no rate, or one below `LEAST_BITS_PER_SECOND` or above `MOST_BITS_PER_SECOND`.
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
    """Formats a rate as `parse_rate` reads it, in the largest unit that keeps it a whole number.

    Args:
        bits_per_second: The rate; positive.
    """
    unit = max(
        (unit for unit, bits in BITS_PER_UNIT.items() if bits_per_second % bits == 0), key=BITS_PER_UNIT.__getitem__
    )
    return f"{bits_per_second // BITS_PER_UNIT[unit]}{unit}"


def parse_nic_rates(text: str, count: int, parameter: str) -> tuple[tuple[int, ...], ...]:
    """Parses the link rates of the nodes: one value for all, or one for each, separated by commas.

    Args:
        text: `200mbit`, or `200mbit,200mbit,50mbit`; `100mbit+100mbit` gives each node two NICs.
        count: Number of nodes.
        parameter: Name of the parameter for error messages, as the user wrote it.

    Returns:
        For each node, the rate of each NIC's link in bits per second.

    Raises:
        ValueError: A value is no rate, there are neither one nor `count` values, or nodes have different numbers of
            NICs or more than `MOST_NICS`.
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
    """Parses the link rates of the nodes as `parse_nic_rates` does, and adds those of each node's NICs.

    Args:
        text: Rates as `parse_nic_rates` takes them.
        count: Number of nodes.
        parameter: Name of the parameter for error messages, as the user wrote it.

    Returns:
        The rate of each node in bits per second, over all of its NICs.

    Raises:
        ValueError: See `parse_nic_rates`.
    """
    return tuple(map(sum, parse_nic_rates(text, count, parameter)))


def format_nic_rates(nics: Sequence[int]) -> str:
    """Formats the rates of a node's NICs, in bits per second, as `parse_nic_rates` reads them."""
    return "+".join(map(format_rate, nics))
