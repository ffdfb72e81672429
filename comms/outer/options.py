"""Sorts and checks the options of `Outer`.

Some options concern exchanges between workers, others the hook that averages gradients inside a worker. Options that
would have no effect, or that exchanges cannot support, are refused.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from gradwire.comms.config import COMPRESSION, MEASURE, NVTX, PLANNING, Config, asks
from gradwire.comms.outer.fragments import OuterSettings
from gradwire.topology.cluster import LEVEL_NAMES

EXACT, NONE = "exact", "none"
"""Values of `inside`: a worker is a node, or each rank is a worker."""
INSIDE = (EXACT, NONE, *LEVEL_NAMES[:-1])
"""Valid values of `inside`; levels of the cluster except the outermost one."""

INSIDE_ONLY = ("nic_bytes_per_second", "fusion", "trace", "reduction", "straggler_every")
"""Options of the hook that averages gradients inside a worker. Exchanges between workers ignore them, except for the
values in `_is_of_exchanges`."""

OF_EXCHANGES = (*PLANNING, *COMPRESSION, "elastic", "stall_seconds")
"""Options of exchanges between workers."""

DEFAULT_COMPRESSOR = "waterfill2"
"""Default compressor between workers. It reaches the quality of int4 with half of the bytes, and no compressor with
fewer bytes came within 0.06 bits of exact averages (docs/results/outer.md). For gradients at every step under AdamW it
reaches a higher loss, but averaged pseudo-gradients do not pass through AdamW."""


def provisional(given: Mapping[str, int], **others: float) -> OuterSettings:
    """Returns valid settings with the user's values, for the time before the missing ones are chosen.

    Args:
        given: The user's values of `every`, `fragments` and `delay`, by name; missing ones are chosen later.
        others: Values of all other settings, by name.

    Raises:
        TypeError: A value has a wrong type.
        ValueError: A value is out of range.
    """
    numbers = {name: value for name, value in {**others, **given}.items() if type(value) is int}
    turns = numbers.get("fragments", 1) * max(numbers.get("delay", 0), 1)
    least = max(turns, numbers.get("warmup_every", 1), 1)
    return OuterSettings(**{"every": least, "fragments": 1, "delay": 0, **others, **given})  # type: ignore[arg-type]  # checked there


def config_of(config: Config | None, options: Mapping[str, object]) -> Config:
    """Returns the configuration of an `Outer` from its `config` or its options.

    Without `config`, the options that are not given come from the environment; if neither says anything of a
    compressor, it is `waterfill2` (`DEFAULT_COMPRESSOR`). The option `compressor=None` is exact. A passed `config` is
    used as it is: without a compressor, it is exact.

    Args:
        config: Configuration of the user; None if there is none.
        options: Fields of `Config` by name; empty if `config` is given.

    Raises:
        TypeError: Both `config` and `options` are given, or an option has an unknown name.
        ValueError: A value is out of range.
    """
    found = Config.given(config, options)
    if config is None and "compressor" not in options and found.compressor is None:
        found = replace(found, compressor=DEFAULT_COMPRESSOR)
    return found


def refuse_unfit(config: Config) -> None:
    """Checks that no option is set that exchanges of parameters cannot support.

    Raises:
        ValueError: `elastic` lets ranks join, or `reduction` is anything but a plain average.
    """
    if config.join is not None:
        raise ValueError(
            f"`elastic` is {config.join!r}, and no rank can join Outer's exchanges while they run: leave it out"
        )
    if not config.sums.average or config.sums.kind != "sum":
        raise ValueError(f"`reduction` is {config.reduction!r}, and Outer averages parameters: leave it out")


def idle_in(config: Config, without: Collection[str] = ()) -> list[str]:
    """Returns the names of the options that have no effect on exchanges and differ from their defaults, in order.

    They are options of the hook that averages gradients inside a worker.

    Args:
        config: Configuration to examine.
        without: Names to leave out.
    """
    asked = config.asked_for([name for name in INSIDE_ONLY if name not in without])
    return [name for name in asked if not _is_of_exchanges(name, getattr(config, name))]


def _is_of_exchanges(name: str, value: object) -> bool:
    """Returns whether exchanges, too, use this value of an option in `INSIDE_ONLY`: NVTX marks, and rates not measured.

    Args:
        name: Name of the option.
        value: Value of the option.
    """
    return (name == "trace" and value == NVTX) or (name == "nic_bytes_per_second" and value != MEASURE)


def refuse_idle(options: Mapping[str, object], why: str) -> None:
    """Checks that no options of the hook inside a worker are given if there is no such hook.

    Args:
        options: Options of the user, by name.
        why: Reason why they would have no effect, for the error.

    Raises:
        ValueError: One was given, with another value than its default, which exchanges do not use either.
    """
    for name in INSIDE_ONLY:
        if name in options and asks(name, options[name]) and not _is_of_exchanges(name, options[name]):
            raise ValueError(f"`{name}` is {options[name]!r}, and {why}: it would change nothing, so leave it out")
