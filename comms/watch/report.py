"""Report of a watch: as text, as JSON, and as metrics for Prometheus."""

import json
from dataclasses import asdict, dataclass, field

from gradwire.comms.watch.collective import IssuedCollective, in_words, sender_of
from gradwire.comms.watch.links import LinkSummary, SlowLink
from gradwire.comms.watch.stragglers import WatchStraggler
from gradwire.topology.wording import duration, ranks_in_words

MOST_LINKS = 8
"""Most links in the text of a report, the busiest first."""


def late_in_words(late: WatchStraggler, host: str, how: str, longest_in: str = "") -> str:
    """Returns `rank 2 on node1 is late, from 14 s on: ranks 0, 1, 3 of group default wait for it 12% of the time`.

    `longest_in` follows; and, if it is known what the rank does for longer than the others (`busy_with`), `; it spends
    the time in the data loader (train.py:40 in load)`, with the line in parentheses if that is known as well.

    Args:
        late: The straggler.
        host: Host of the straggler.
        how: Verb and time of the sentence: `is late, from 14 s on`.
        longest_in: Clause about the collective in which the others wait, from `Episode.longest_in`; empty for none.
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
    """Episode in which one rank was late.

    Attributes:
        late: The straggler as it was named, or as it was last seen with a known `busy_with`.
        host: Host of the rank.
        began: Begin, in seconds since the watch began.
        ended: End, in seconds since the watch began; None while it lasts.
        waited_in: Collective in which the others wait longest for it; None while it is not known, and for a channel.
        requested: Number of requests for it.
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
        """Returns `, longest in all_reduce of [72] Float, gradients of 1.bias to 1.weight`; empty if not known."""
        return "" if self.waited_in is None else f", longest in {self.waited_in}"


@dataclass(slots=True)
class GroupSummary:
    """Summary of one process group, or channel of messages.

    Attributes:
        name: Name that ranks use for it: `default`, `3 (mesh_shard)`, `default: 0 to 1`.
        ranks: Ranks of the group, or sender and receiver of the channel, in the default group.
        collectives: Number of collectives or messages that have ended, on the rank with most.
        waited: Rank -> seconds for which it had something in flight. For a channel: seconds in which its threads waited
            for messages of the channel's group, in whatever channel.
    """

    name: str
    ranks: tuple[int, ...]
    collectives: int
    waited: dict[int, float]


@dataclass(slots=True)
class WatchReport:
    """Findings of a watch so far.

    Attributes:
        seconds: Time since the watch began.
        groups: Groups and channels with a collective or message.
        late: Episodes in which a rank was late, ascending by their begin.
        suspects: Sentences about ranks that were late in all slices, of which there are too few to name them.
        decided: True if there were enough slices to name a late rank.
        stalls: Sentences about stalls.
        disagreements: Sentences about ranks that issued different collectives.
        links: Traffic from each host to each other one over TCP, if it was 1 MiB or more.
        slow_links: Episodes in which a link was slow, ascending by their begin.
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
            what = "in flight" if sender_of(group.name) is None else "a rank waits for the others of this group"
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
        """Returns the attributes as one JSON object."""
        return json.dumps(asdict(self))

    def to_prometheus(self) -> str:
        """Returns metrics as Prometheus text: collectives, waits, present stragglers, links, stalls, disagreements."""
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
