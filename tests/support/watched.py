"""Words as the ranks of a job would leave them, made from the times at which their collectives begin and end."""

from collections.abc import Iterator, Mapping, Sequence

from gradwire.comms.watch.flight import Progress
from gradwire.comms.watch.rank import RankLog, RankStatus

POLL_SECONDS, STATUS_SECONDS = 0.02, 0.5

Collective = tuple[str, tuple[int, ...]]
"""A group's name and its ranks."""


class SimulatedJob:
    """Ranks that compute and then make collectives, one after the other.

    Args:
        size: Number of ranks.
        step: The collectives of each step, in order.
        transfer_seconds: A collective takes so long after its last rank has come.
    """

    def __init__(self, size: int, step: Sequence[Collective], transfer_seconds: float = 0.002) -> None:
        self.members = {name: ranks for name, ranks in step}
        self._step = step
        self._transfer = transfer_seconds
        self._now = [0.0] * size
        self._logs = [RankLog() for _ in range(size)]
        self._progress: list[dict[str, Progress]] = [
            {name: Progress(0, 0) for name in self.members} for _ in range(size)
        ]
        self._looked = [POLL_SECONDS * rank / size for rank in range(size)]
        self._activity = [{"the forward pass": 0.0} for _ in range(size)]
        self._spoken = 0.0
        self._beats = 0

    def steps(self, compute: Iterator[Sequence[float]]) -> Iterator[Mapping[int, RankStatus] | None]:
        """Makes a step for each row of compute times; yields the ranks' statuses where it is time for some."""
        for row in compute:
            for rank, seconds in enumerate(row):
                self._activity[rank]["the forward pass"] += seconds
                self._advance(rank, self._now[rank] + seconds)
            for name, ranks in self._step:
                for rank in ranks:
                    done = self._progress[rank][name]
                    self._progress[rank] = self._progress[rank] | {name: Progress(done.issued + 1, done.ended)}
                end = max(self._now[rank] for rank in ranks) + self._transfer
                for rank in ranks:
                    self._advance(rank, end)
                    done = self._progress[rank][name]
                    self._progress[rank] = self._progress[rank] | {name: Progress(done.issued, done.ended + 1)}
            yield self._statuses()

    def _advance(self, rank: int, until: float) -> None:
        """Looks at the rank every `POLL_SECONDS`, at moments that differ from rank to rank."""
        while self._looked[rank] + POLL_SECONDS <= until:
            self._looked[rank] += POLL_SECONDS
            self._logs[rank].note(self._looked[rank] + rank * 1000.0, self._progress[rank])
        self._now[rank] = until

    def _statuses(self) -> Mapping[int, RankStatus] | None:
        if min(self._now) < self._spoken + STATUS_SECONDS:
            return None
        self._spoken = min(self._now)
        self._beats += 1
        return {
            rank: RankStatus(self._beats, self._now[rank], dict(log.states()), dict(self._activity[rank]), {})
            for rank, log in enumerate(self._logs)
        }
