"""Configurations take turns step by step in one process group, so that other load on the machine slows all alike."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

Progress = Callable[[str, int, int], None]
"""Called on rank 0 after each turn with (name of the configuration, turns taken, turns in all)."""


@dataclass(slots=True)
class Configuration:
    """One of the things that are compared: the same work for all, averaged by its own hook or algorithm.

    Attributes:
        name: As the table shows it.
        step: Does the work once on this rank; it is given the number of the round.
        after: Called after each step, outside the clock.
        seconds: Of each timed round, the slowest rank's.
        nic_nbytes: Of each timed round, the most that any node sent or received.
    """

    name: str
    step: Callable[[int], None]
    after: Callable[[int], None] | None = None
    seconds: list[float] = field(default_factory=list)
    nic_nbytes: list[int] = field(default_factory=list)

    @property
    def median_seconds(self) -> float:
        """Median over the timed rounds."""
        return statistics.median(self.seconds)

    @property
    def median_nic_nbytes(self) -> float:
        """Median over the timed rounds."""
        return statistics.median(self.nic_nbytes)


def nic_nbytes(interface: str | None) -> tuple[int, int]:
    """(sent, received) bytes of an interface of this rank's own node, Ethernet headers included; zeros without one.

    Source: Linux Documentation/ABI/testing/sysfs-class-net-statistics.
    """
    if interface is None:
        return 0, 0
    folder = Path("/sys/class/net", interface, "statistics")
    return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())


def take_turns(
    configurations: Sequence[Configuration],
    *,
    rounds: int,
    warmup: int,
    interface: str | None,
    before_round: Callable[[int], None] | None = None,
    progress: Progress | None = None,
) -> None:
    """Lets every configuration do its step in every round; all ranks call this together.

    Args:
        configurations: Their `seconds` and `nic_nbytes` are appended to, alike on all ranks.
        rounds: Timed rounds.
        warmup: Rounds before them that are not kept: connections are made and DDP rebuilds its buckets there.
        interface: Whose bytes are counted, for example `eth0`; None counts nothing.
        before_round: Called with the number of each round before its turns, outside the clock.
        progress: Called on rank 0.
    """
    turns = 0
    for number in range(warmup + rounds):
        if before_round is not None:
            before_round(number)
        for configuration in configurations:
            # The barriers stand outside the clock: nobody's bytes or waits leak into another configuration's turn.
            dist.barrier()
            before, began = nic_nbytes(interface), time.perf_counter()
            configuration.step(number)
            seconds = time.perf_counter() - began
            dist.barrier()
            after = nic_nbytes(interface)
            if configuration.after is not None:
                configuration.after(number)
            sent, received = (now - then for now, then in zip(after, before, strict=True))
            worst = torch.tensor([seconds, max(sent, received)], dtype=torch.float64)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            if number >= warmup:
                configuration.seconds.append(worst[0].item())
                configuration.nic_nbytes.append(int(worst[1].item()))
            turns += 1
            if progress is not None and dist.get_rank() == 0:
                progress(configuration.name, turns, (warmup + rounds) * len(configurations))
