"""What a watch has seen, for people, programs and dashboards."""

import json
from dataclasses import asdict, dataclass, field

from gradwire.comms.watch.collective import IssuedCollective, in_words, sender_of
from gradwire.comms.watch.links import LinkSummary, SlowLink
from gradwire.comms.watch.stragglers import WatchStraggler
from gradwire.topology.wording import duration, ranks_in_words

MOST_LINKS = 8
"""Most of a report for people, the busiest first."""


def late_in_words(late: WatchStraggler, host: str, how: str, longest_in: str = "") -> str:
    """`rank 2 on node1 is late, from 14 s on: ranks 0, 1 and 3 of the default group wait for it 12% of the time; ...`.

    Args:
        late: Which, and what it does.
        host: Of the rank.
        how: `is late`, and since when.
        longest_in: As `Episode.longest_in` has it.
    """
    why = ""
    if late.busy_with is not None:
        why = f"; it spends the time in {late.busy_with}" + (f" ({late.line})" if late.line else "")
    return (
        f"rank {late.rank} on {host} {how}: {ranks_in_words(late.waiting)} of {in_words(late.group)} "
        f"{'waits' if len(late.waiting) == 1 else 'wait'} for it {late.seconds:.0%} of the time{longest_in}{why}"
    )


@dataclass(slots=True)
class Episode:
    """How long one rank was late.

    Attributes:
        late: As it was last seen.
        host: Of the rank.
        began: Seconds since the watch began.
        ended: When it was no longer late; None while it is.
        waited_in: The collective in which the others stand longest for it; None while nobody has been asked.
        asked: How often all ranks were asked for that.
    """

    late: WatchStraggler
    host: str
    began: float
    ended: float | None = None
    waited_in: IssuedCollective | None = None
    requested: int = 0

    def __str__(self) -> str:
        when = f"from {duration(self.began)} on" if self.ended is None else f"{self.began:.0f} to {self.ended:.0f} s"
        return late_in_words(self.late, self.host, f"is late, {when}", self.longest_in())

    def longest_in(self) -> str:
        """`, longest in all_reduce of [72] Float, gradients of 1.bias to 1.weight`; empty where that is not known."""
        return "" if self.waited_in is None else f", longest in {self.waited_in}"


@dataclass(slots=True)
class GroupSummary:
    """One process group.

    Attributes:
        name: As torch numbers it.
        ranks: Of the default group.
        collectives: How many have ended, on the rank that is furthest.
        waited: Rank -> for how long it had something under way.
    """

    name: str
    ranks: tuple[int, ...]
    collectives: int
    waited: dict[int, float]


@dataclass(slots=True)
class WatchReport:
    """Everything that a watch has seen so far.

    Attributes:
        seconds: For how long it has watched.
        groups: The process groups with a collective.
        late: Ranks that were late, in order.
        suspects: In words, the ranks that were late in all that was seen, where that is too little to name them.
        decided: Whether there were steps enough to name a late rank.
        stalls: What hung, in words.
        disagreements: Which ranks disagreed, in words.
        links: What each host has sent to each other one over TCP.
        slow_links: Links that were slower than the others, in order.
    """

    seconds: float
    groups: list[GroupSummary] = field(default_factory=list)
    late: list[Episode] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)
    decided: bool = False
    stalls: list[str] = field(default_factory=list)
    disagreements: list[str] = field(default_factory=list)
    links: list[LinkSummary] = field(default_factory=list)
    slow_links: list[SlowLink] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"watched for {duration(self.seconds)}"]
        for group in self.groups:
            low, high = min(group.waited.values()), max(group.waited.values())
            what = "under way" if sender_of(group.name) is None else "a rank stands waiting for those of this group"
            count = f"{ranks_in_words(group.ranks)}, {group.collectives} collectives"
            count = count if sender_of(group.name) is None else f"{group.collectives} messages"
            lines.append(
                f"{in_words(group.name)}: {count}; {what} for {low / self.seconds:.0%} to {high / self.seconds:.0%} of "
                "the time"
            )
        busiest = sorted(self.links, key=lambda each: -each.busy_seconds)
        lines += [each.in_words(self.seconds) for each in busiest[:MOST_LINKS]]
        if len(busiest) > MOST_LINKS:
            lines.append(f"and {len(busiest) - MOST_LINKS} links that were less busy")
        lines += [str(each) for each in self.late] + self.suspects
        lines += [str(each) for each in self.slow_links]
        lines += [f"stall: {text}" for text in self.stalls]
        lines += self.disagreements
        if not (self.late or self.slow_links or self.stalls or self.disagreements):
            late = "no rank was late" if self.decided else "too little was seen to say that no rank was late"
            late = "no rank was late for sure" if self.suspects else late
            lines.append(f"{late}, nothing hung, all ranks issued the same collectives")
        return "\n".join(lines)

    def to_json(self) -> str:
        """All of it as one JSON object; seconds, ranks and groups as in the attributes."""
        return json.dumps(asdict(self))

    def to_prometheus(self) -> str:
        """The text format of Prometheus: counters of collectives, waits and stalls, and who is late now."""
        lines = ["# TYPE gradwire_watch_collectives counter"]
        lines += [f'gradwire_watch_collectives{{group="{each.name}"}} {each.collectives}' for each in self.groups]
        lines.append("# TYPE gradwire_watch_under_way_seconds counter")
        lines += [
            f'gradwire_watch_under_way_seconds{{group="{each.name}",rank="{rank}"}} {seconds:.6g}'
            for each in self.groups
            for rank, seconds in each.waited.items()
        ]
        lines.append("# TYPE gradwire_watch_late_share gauge")
        lines += [
            f'gradwire_watch_late_share{{group="{each.late.group}",rank="{each.late.rank}"}} {each.late.seconds:.6g}'
            for each in self.late
            if each.ended is None
        ]
        for name, kind in (("bytes", "nbytes"), ("busy_seconds", "busy_seconds")):
            lines.append(f"# TYPE gradwire_watch_link_{name} counter")
            lines += [
                f'gradwire_watch_link_{name}{{source="{each.source}",target="{each.target}"}} {getattr(each, kind):.6g}'
                for each in self.links
            ]
        lines += ["# TYPE gradwire_watch_stalls counter", f"gradwire_watch_stalls {len(self.stalls)}"]
        lines += [
            "# TYPE gradwire_watch_disagreements counter",
            f"gradwire_watch_disagreements {len(self.disagreements)}",
        ]
        return "\n".join(lines) + "\n"
