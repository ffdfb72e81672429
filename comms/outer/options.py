"""Options of `Outer`: which belong to the exchanges, which to the hook inside a worker, and which are refused."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from gradwire.comms.config import COMPRESSION, NVTX, PLANNING, Config, asks
from gradwire.comms.outer.fragments import OuterSettings
from gradwire.topology.cluster import LEVEL_NAMES

EXACT, NONE = "exact", "none"
INSIDE = (EXACT, NONE, *LEVEL_NAMES[:-1])
"""What `inside` may be; the levels are those that have one above."""

INSIDE_ONLY = ("fusion", "probe", "trace", "reduction", "straggler_every")
"""Options of the hook that averages gradients inside a worker; exchanges between workers have no use for them."""

OF_EXCHANGES = (*PLANNING, *COMPRESSION, "elastic", "stall_seconds")
"""Options of exchanges between workers; the others are of the gradients inside one."""

DEFAULT_COMPRESSOR = "waterfill2"
"""The compressor between workers: it ends where int4 ends, with half of its bytes, and nothing sparser came within 0.06
bits of exact averages (docs/results/outer.md). What holds of gradients at every step under AdamW, where it ends behind,
does not hold here: what is averaged goes through no AdamW."""


def provisional(given: Mapping[str, int], **others: float) -> OuterSettings:
    """Settings that fit what the user has said, until the rest is chosen; no exchange goes by them.

    Args:
        given: Of `CHOSEN`, by name.
        others: All that is not chosen, by name.

    Raises:
        TypeError: A value is of another type.
        ValueError: A value does not fit.
    """
    numbers = {name: value for name, value in {**others, **given}.items() if type(value) is int}
    turns = numbers.get("fragments", 1) * max(numbers.get("delay", 0), 1)
    least = max(turns, numbers.get("warmup_every", 1), 1)
    return OuterSettings(**{"every": least, "fragments": 1, "delay": 0, **others, **given})  # type: ignore[arg-type]  # checked there


def config_of(config: Config | None, options: Mapping[str, object]) -> Config:
    """The configuration that Outer is made with; where neither options nor the environment name a compressor, its own.

    Raises:
        TypeError: Both are given, or an option has an unknown name.
        ValueError: A value does not fit.
    """
    found = Config.given(config, options)
    if config is None and "compressor" not in options and found.compressor is None:
        found = replace(found, compressor=DEFAULT_COMPRESSOR)
    return found


def refuse_unfit(config: Config) -> None:
    """Refuses what an exchange of parameters cannot do.

    Raises:
        ValueError: Such an option is set.
    """
    if config.join is not None:
        raise ValueError(
            f"`elastic` is {config.join!r}, and nobody can join Outer's exchanges while they run: leave it out"
        )
    if not config.sums.average or config.sums.kind != "sum":
        raise ValueError(f"`reduction` is {config.reduction!r}, and Outer averages parameters: leave it out")


def idle_in(config: Config, without: Collection[str] = ()) -> list[str]:
    """Options of the hook inside a worker that have another value than their default, in order.

    Args:
        config: Where they are.
        without: Names that do not count.
    """
    asked = config.asked_for([name for name in INSIDE_ONLY if name not in without])
    return [name for name in asked if not _is_of_exchanges(name, getattr(config, name))]


def _is_of_exchanges(name: str, value: object) -> bool:
    """Whether a value of one of `INSIDE_ONLY` is one that exchanges heed, too: they are marked for Nsight Systems."""
    return name == "trace" and value == NVTX


def refuse_idle(options: Mapping[str, object], why: str) -> None:
    """Refuses options of the hook inside a worker where there is none.

    Raises:
        ValueError: One was given, with another value than its default.
    """
    for name in INSIDE_ONLY:
        if name in options and asks(name, options[name]) and not _is_of_exchanges(name, options[name]):
            raise ValueError(f"`{name}` is {options[name]!r}, and {why}: it would change nothing, so leave it out")
