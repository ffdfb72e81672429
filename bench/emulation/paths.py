"""Properties of the network between emulated nodes: delay, jitter, loss, queues, by node and by pair of regions."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gradwire.topology.printable import shortened

SECONDS_PER_UNIT = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
"""Source: tc(8), section PARAMETERS, TIMES."""

MOST_DELAY_SECONDS = 10.0
"""Longest delay in one direction. A geostationary satellite takes 0.27 s; with more than this, connections time out
before they are made."""
MOST_LOSS = 0.5
"""Largest share of packets lost. TCP hardly connects at half, and a link that loses all is no link."""
DEFAULT_QUEUE_SECONDS = 0.2
"""Longest wait for a node's link if no queue is given, so that TCP fills the links without losing packets."""
MOST_QUEUE_SECONDS = 10.0
_REGION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,30}")
_EXAMPLE = "eu/us:delay=40ms,loss=0.1%,jitter=5ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPath:
    """Path in one direction from a node to another one.

    Attributes:
        delay_seconds: Seconds from the sender's link to the receiver's.
        jitter_seconds: Largest deviation of a packet's delay from `delay_seconds`; deviations are uniform.
        loss: Probability that a packet is lost, independent of other packets; 0 to `MOST_LOSS`.
    """

    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The network between all nodes.

    Attributes:
        paths: Path of each pair of nodes, by sender, then receiver; a node's path to itself is not used.
        queue_seconds: For each node, the longest time that a packet waits for the node's link in each direction;
            packets that would wait longer are dropped.
        reorder: Whether jitter may let a packet overtake another one.
        seed: Seed of losses and jitter.
    """

    paths: tuple[tuple[NetworkPath, ...], ...]
    queue_seconds: tuple[float, ...]
    reorder: bool = False
    seed: int = 0

    def round_trip_seconds(self, node: int, other: int) -> float:
        """Returns the seconds of a round trip between two nodes, on idle links and without jitter."""
        return self.paths[node][other].delay_seconds + self.paths[other][node].delay_seconds


def parse_seconds(text: str, parameter: str, most: float) -> float:
    """Parses a time, and returns its seconds.

    Args:
        text: Number with its unit: `40ms`, `0.5s`, `100us`.
        parameter: Name of the parameter for error messages, as the user wrote it.
        most: Longest accepted time, in seconds.

    Raises:
        ValueError: The text is no time, or a longer one.
    """
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)\s*([a-z]+)", text.strip().lower())
    if match is None or match[2] not in SECONDS_PER_UNIT:
        units = ", ".join(SECONDS_PER_UNIT)
        raise ValueError(
            f"`{parameter}`: found {shortened(text, 40)!r}, wanted a time with its unit ({units}) such as 40ms"
        )
    seconds = float(match[1]) * SECONDS_PER_UNIT[match[2]]
    if seconds > most:
        raise ValueError(f"`{parameter}`: found {shortened(text, 40)!r}, wanted at most {most:g}s")
    return seconds


def parse_loss(text: str, parameter: str) -> float:
    """Parses a share of lost packets.

    Args:
        text: Share in percent: `0.1%`.
        parameter: Name of the parameter for error messages, as the user wrote it.

    Returns:
        The share as a fraction, 0 to `MOST_LOSS`.

    Raises:
        ValueError: The text is no share, or a larger one.
    """
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,12})?)\s*%", text.strip())
    if match is None:
        raise ValueError(
            f"`{parameter}`: found {shortened(text, 40)!r}, wanted a share of the packets in percent such as 0.1%"
        )
    loss = float(match[1]) / 100
    if loss > MOST_LOSS:
        raise ValueError(
            f"`{parameter}`: found {shortened(text, 40)!r}, wanted at most {MOST_LOSS:.0%}: TCP does not get through"
        )
    return loss


def _parse_delay(text: str, parameter: str) -> float:
    return parse_seconds(text, parameter, MOST_DELAY_SECONDS)


_BETWEEN: dict[str, tuple[str, Callable[[str, str], float]]] = {
    "delay": ("delay_seconds", _parse_delay),
    "jitter": ("jitter_seconds", _parse_delay),
    "loss": ("loss", parse_loss),
}
"""Word of `between` -> (field of `NetworkPath`, function that parses its value)."""


def _one_each(text: str, count: int, parameter: str) -> list[str]:
    """Splits a list with commas into one word for each node; a single word stands for all nodes.

    Args:
        text: Words separated by commas.
        count: Number of nodes.
        parameter: Name of the parameter for error messages, as the user wrote it.

    Raises:
        ValueError: There are neither one nor `count` words.
    """
    words = text.split(",")
    if len(words) not in (1, count):
        raise ValueError(
            f"`{parameter}`: found {len(words)} values in {shortened(text, 60)!r}, wanted one for all nodes or "
            f"{count}, one for each"
        )
    return words * count if len(words) == 1 else words


def _check_jitter(path: NetworkPath, parameter: str) -> NetworkPath:
    if path.jitter_seconds > path.delay_seconds:
        raise ValueError(
            f"`{parameter}`: found {path.jitter_seconds * 1e3:g}ms with a delay of {path.delay_seconds * 1e3:g}ms, "
            "wanted at most the delay: no packet arrives before it is sent"
        )
    return path


def _parse_regions(text: str, count: int, parameter: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if len(words) != count or not all(map(_REGION.fullmatch, words)):
        raise ValueError(
            f"`{parameter}`: found {shortened(text, 60)!r}, wanted the region of each of the {count} nodes, for "
            f"example {','.join(['eu', *['us'] * (count - 1)][:4])}"
        )
    return words


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOptions:
    """Options of the network between nodes, as a user writes them; None or empty if not given.

    Attributes:
        delay: Delay in one direction of what a node sends: `40ms`, or one value for each node, separated by commas. The
            round trip between two nodes is the sum of their delays.
        jitter: Largest time by which a packet is earlier or later than the delay: `5ms`, or one value for each node.
        loss: Share of the packets sent by a node that are lost: `0.1%`, or one value for each node.
        queue: Longest wait for a node's link: `50ms`, or one value for each node; 200 ms if not given.
        regions: Region of each node: `eu,eu,us`.
        between: Paths between the nodes of two regions, in both directions, or within one region:
            `eu/us:delay=40ms,loss=0.1%,jitter=5ms`. Values left out are those of the sending node.
        reorder: Whether packets may overtake each other because of jitter.
        seed: Seed of losses and jitter.
    """

    delay: str | None = None
    jitter: str | None = None
    loss: str | None = None
    queue: str | None = None
    regions: str | None = None
    between: Sequence[str] = field(default=())
    reorder: bool = False
    seed: int = 0

    def read(self, count: int, *, has_rates: bool, prefix: str = "") -> Paths | None:
        """Parses the options for a number of nodes.

        Args:
            count: Number of nodes.
            has_rates: Whether the links have rates; without, there is nothing to queue for.
            prefix: Prefix of a parameter's name in error messages: `--` on the command line.

        Returns:
            The network; None if no option was given.

        Raises:
            ValueError: An option is no time or share, is too large, or contradicts another one.
        """
        said = (self.delay, self.jitter, self.loss, self.queue, self.regions)
        if all(word is None for word in said) and not self.between and not self.reorder and not self.seed:
            return None
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"`{prefix}seed`: found {self.seed}, wanted 0 to {2**32 - 1}")
        own = self._own(count, prefix)
        paths = [[path] * count for path in own]
        if (self.regions is None) != (not self.between):
            given, missing = ("between", "regions") if self.regions is None else ("regions", "between")
            raise ValueError(
                f"`{prefix}{given}` is given and `{prefix}{missing}` is not; wanted both: the region of each node, "
                f"such as eu,us, and what lies between two of them, such as {_EXAMPLE}"
            )
        if self.regions is not None:
            regions = _parse_regions(self.regions, count, f"{prefix}regions")
            for text in self.between:
                self._lay_between(text, regions, own, paths, f"{prefix}between")
        if self.reorder and not any(path.jitter_seconds for row in paths for path in row):
            raise ValueError(f"`{prefix}reorder`: found no jitter, wanted some: packets of equal delay never overtake")
        return Paths(
            paths=tuple(map(tuple, paths)),
            queue_seconds=self._queues(count, has_rates, prefix),
            reorder=self.reorder,
            seed=self.seed,
        )

    def _own(self, count: int, prefix: str) -> list[NetworkPath]:
        """Returns the path of each node to all others, before `between` changes some."""
        delays = _one_each(self.delay or "0ms", count, f"{prefix}delay")
        jitters = _one_each(self.jitter or "0ms", count, f"{prefix}jitter")
        losses = _one_each(self.loss or "0%", count, f"{prefix}loss")
        return [
            _check_jitter(
                NetworkPath(
                    delay_seconds=_parse_delay(delay, f"{prefix}delay"),
                    jitter_seconds=_parse_delay(jitter, f"{prefix}jitter"),
                    loss=parse_loss(loss, f"{prefix}loss"),
                ),
                f"{prefix}jitter",
            )
            for delay, jitter, loss in zip(delays, jitters, losses, strict=True)
        ]

    def _queues(self, count: int, has_rates: bool, prefix: str) -> tuple[float, ...]:
        if self.queue is None:
            return (DEFAULT_QUEUE_SECONDS,) * count
        if not has_rates:
            raise ValueError(
                f"`{prefix}queue`: found {shortened(self.queue, 40)!r} on links without a rate, wanted `{prefix}nic` "
                "besides: nothing waits for a link without a limit"
            )
        words = _one_each(self.queue, count, f"{prefix}queue")
        return tuple(parse_seconds(word, f"{prefix}queue", MOST_QUEUE_SECONDS) for word in words)

    @staticmethod
    def _lay_between(
        text: str, regions: Sequence[str], own: Sequence[NetworkPath], paths: list[list[NetworkPath]], parameter: str
    ) -> None:
        """Sets the paths between two regions in both directions, or within one region.

        Args:
            text: One value of `between`.
            regions: Region of each node.
            own: Path of each node to all others, for the values left out.
            paths: Paths by sender, then receiver; changed in place.
            parameter: Name of the parameter for error messages, as the user wrote it.

        Raises:
            ValueError: The text cannot be parsed, or names a region that no node has.
        """
        pair, colon, words = text.partition(":")
        names = [name.strip() for name in pair.split("/")]
        found = dict(word.strip().split("=", 1) for word in words.split(",") if "=" in word)
        sensible = len(names) == 2 and colon and found and len(found) == len(words.split(","))
        if not sensible or not found.keys() <= _BETWEEN.keys():
            raise ValueError(
                f"`{parameter}`: found {shortened(text, 80)!r}, wanted two regions and what lies between, {_EXAMPLE}"
            )
        for name in names:
            if name not in regions:
                raise ValueError(
                    f"`{parameter}`: found {shortened(name, 40)!r} in {shortened(text, 80)!r}, wanted a region that "
                    f"some node is in: {', '.join(dict.fromkeys(regions))}"
                )
        given = {
            name: read(found[word], f"{parameter}: {word}") for word, (name, read) in _BETWEEN.items() if word in found
        }
        for source, source_region in enumerate(regions):
            for target, target_region in enumerate(regions):
                if source == target or (source_region, target_region) not in (tuple(names), tuple(reversed(names))):
                    continue
                paths[source][target] = _check_jitter(replace(own[source], **given), f"{parameter}: jitter")
