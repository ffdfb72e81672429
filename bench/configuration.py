"""Timing of several configurations in turns, step by step in one process group: other load then slows all alike."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

Progress = Callable[[str, int, int], None]
"""Callback on rank 0 after each turn: (name of the configuration, number of finished turns, number of all turns)."""


@dataclass(slots=True)
class Configuration:
    """Configuration to compare with others: the work of one step, with its own hook or algorithm, and its measurements.

    Attributes:
        name: Name of the configuration in the table.
        step: Function that does the work of one step on this rank, called with the number of the round.
        after: Function called with the number of the round after each step, which is not timed; None for none.
        seconds: Time of each timed round on its slowest rank.
        nic_nbytes: For each timed round, the bytes that the busiest node sent or received, whichever is more.
    """

    name: str
    step: Callable[[int], None]
    after: Callable[[int], None] | None = None
    seconds: list[float] = field(default_factory=list)
    nic_nbytes: list[int] = field(default_factory=list)

    @property
    def median_seconds(self) -> float:
        """Median of `seconds` over the timed rounds."""
        return statistics.median(self.seconds)

    @property
    def median_nic_nbytes(self) -> float:
        """Median of `nic_nbytes` over the timed rounds."""
        return statistics.median(self.nic_nbytes)


def nic_nbytes(interface: str | None) -> tuple[int, int]:
    """Reads how many bytes a network interface of this rank's node has (sent, received), with Ethernet headers.

    Source: Linux Documentation/ABI/testing/sysfs-class-net-statistics.

    Args:
        interface: Name of the interface; None returns zeros.
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
    """Runs and times one step of each configuration in every round. Collective.

    Args:
        configurations: Configurations to time; their `seconds` and `nic_nbytes` are extended in place, with the same
            values on all ranks.
        rounds: Number of timed rounds.
        warmup: Number of rounds before them that are not recorded: connections are made, and DDP rebuilds its buckets.
        interface: Network interface whose bytes are counted, for example `eth0`; None counts nothing.
        before_round: Callback with the number of a round before its turns, which is not timed; None for none.
        progress: Callback on rank 0 after each turn; None for none.
    """
    turns = 0
    for number in range(warmup + rounds):
        if before_round is not None:
            before_round(number)
        for configuration in configurations:
            # The barriers are not timed. They keep bytes and waits of one configuration out of another one's turn.
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
