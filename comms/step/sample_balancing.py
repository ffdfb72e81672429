"""Balances samples between ranks of different speed: assigns each rank a part of the global batch that fits its speed.

The content of a global batch does not depend on the parts: batch b of an epoch holds the same samples for any
assignment, so gradients weighed by samples (`reduction="samples"`) equal those of equal parts, up to the order of sums.
The ranks exchange their measured times with the first bucket of each step. All ranks get the same numbers, so they make
the same decision, and use a new assignment from the same batch on.
"""

import heapq
import statistics
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Protocol

import torch
from torch.utils.data import Sampler

from gradwire.comms.step.samples import Told

if TYPE_CHECKING:
    from gradwire.comms.step.samples import SampleWeights

WINDOW = 8
"""Number of steps whose median is a rank's speed: one or two slow ones, because of a checkpoint say, change nothing."""

FIRST_STEPS = 3
"""Number of first steps that are not measured, because they include start-up."""

LEAST_GAIN = 0.03
"""Part of a step's time that another assignment must save: less is noise of a median of 8 steps, and ranks would get
now more samples and now fewer."""

SAVED = ("length", "batch_size", "shuffle", "seed", "drop_last")
"""Attributes of the sampler that must equal those of a loaded state: they decide which samples each batch holds."""


def shares_of(total: int, speeds: Sequence[float]) -> list[int]:
    """Returns how many samples of a batch each rank gets, so that the slowest rank is done as early as possible.

    Each rank gets at least one. Each further sample goes to the rank that would be done with it first, the lowest rank
    if several would: no other assignment has a smaller maximum of n_i / speed_i.

    Args:
        total: Number of samples in the batch.
        speeds: Speed of each rank, in samples a second or any other unit.

    Returns:
        Number of samples of each rank, by rank; they add up to `total`.

    Raises:
        ValueError: There are fewer samples than ranks, or a speed is no positive number.

    Source: Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17, 1969; for equal jobs the greedy
    rule is optimal.
    """
    if total < len(speeds):
        raise ValueError(f"`total` is {total}, and there are {len(speeds)} ranks; wanted a sample for each at least")
    if not all(0 < speed < float("inf") for speed in speeds):
        raise ValueError(f"`speeds` is {list(speeds)}; wanted positive numbers")
    known = sum(speeds)
    spare = total - len(speeds)
    sizes = [max(1, int(spare * speed / known)) for speed in speeds]
    ready = [((size + 1) / speed, rank) for rank, (size, speed) in enumerate(zip(sizes, speeds, strict=True))]
    heapq.heapify(ready)
    for _ in range(total - sum(sizes)):
        _, rank = ready[0]
        sizes[rank] += 1
        heapq.heapreplace(ready, ((sizes[rank] + 1) / speeds[rank], rank))
    return sizes


class MeasuredSpeeds:
    """Measures the speed of each rank from the times that all ranks report in each step.

    Args:
        ranks: Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._rates: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(ranks)]
        self._heard = 0

    def hear(self, told: Sequence[Told]) -> None:
        """Adds the reports of one step; ignores the first `FIRST_STEPS`, and steps without a rank's time or samples.

        Args:
            told: Report of each rank, by rank.
        """
        self._heard += 1
        if self._heard > FIRST_STEPS and all(each.seconds > 0 and each.samples_then > 0 for each in told):
            for rates, each in zip(self._rates, told, strict=True):
                rates.append(each.samples_then / each.seconds)

    def better(self, batch_size: int, speeds: Sequence[float]) -> tuple[float, ...] | None:
        """Returns the measured speeds if an assignment by them is worth a change, and starts a new window.

        Args:
            batch_size: Number of samples of all ranks together.
            speeds: Speed of each rank by which samples are assigned now.

        Returns:
            Speed of each rank in samples a second; None if the window of steps is not full yet, or if a step would
            become shorter by less than `LEAST_GAIN`.
        """
        if any(len(rates) < WINDOW for rates in self._rates):
            return None
        found = tuple(statistics.median(rates) for rates in self._rates)
        self._rates = [deque(maxlen=WINDOW) for _ in found]

        def seconds(by: Sequence[float]) -> float:
            return max(n / speed for n, speed in zip(shares_of(batch_size, by), found, strict=True))

        return found if seconds(found) < (1 - LEAST_GAIN) * seconds(speeds) else None


Assignment = tuple[int, tuple[float, ...]]
"""First batch to which the assignment applies, counted from the first epoch, and the speed of each rank."""


class HasWeights(Protocol):
    """The part of a session that the sampler uses."""

    @property
    def weights(self) -> "SampleWeights | None":
        """The listener that weighs gradients by samples; None if all ranks have equal weights."""

    @property
    def communicator(self) -> "HasPlace":
        """The communicator of the ranks."""


class HasPlace(Protocol):
    """The part of a communicator that the sampler uses: which of how many ranks this one is."""

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""


class WeighsBySamples(Protocol):
    """A `HookState` with `reduction="samples"`."""

    def _connected(self, call: str) -> HasWeights: ...


class SpeedBatchSampler(Sampler[list[int]]):
    """Gives each rank samples in proportion to its speed: a batch sampler for `DataLoader(..., batch_sampler=...)`.

    Every sample of an epoch goes to exactly one rank. All ranks get equally many at first; later their numbers follow
    the time that each rank needs for a sample, from the end of one step's all-reduces to its last gradient of the next.
    All ranks know all of these times::

        state = gradwire.HookState(model, reduction="samples")
        sampler = gradwire.data.SpeedBatchSampler(dataset, 256, state)
        loader = DataLoader(dataset, batch_sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for inputs, labels in loader:
                state.samples = len(labels)
                ...

    Args:
        dataset: Dataset whose indices are assigned; only its length is used.
        batch_size: Samples of all ranks together. If fewer samples than ranks are left at the end of an epoch, the
            last batch holds them in addition.
        state: Hook state of this rank, with `reduction="samples"` and a model.
        shuffle: Whether each epoch has its own random order.
        seed: Seed of that order; the same on all ranks.
        drop_last: Whether to skip the last batch of an epoch if it is shorter.
        adapt: Whether shares follow the measured speeds. If not, they stay equal, or as loaded.

    Raises:
        ValueError: `state` gives all ranks the same weight; or `dataset` or `batch_size` has fewer samples than there
            are ranks.
        RuntimeError: `state` has no model yet.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        state: WeighsBySamples,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        adapt: bool = True,
    ) -> None:
        session = state._connected("SpeedBatchSampler")
        if session.weights is None:
            raise ValueError(
                '`state` weighs all ranks alike, whatever their samples; wanted HookState(model, reduction="samples")'
            )
        self._rank, self._ranks = session.communicator.rank, session.communicator.size
        self.length, self.batch_size = len(dataset), batch_size
        self.shuffle, self.seed, self.drop_last, self.adapt = shuffle, seed, drop_last, adapt
        for name, given in (("dataset", self.length), ("batch_size", batch_size)):
            if given < self._ranks:
                raise ValueError(
                    f"`{name}` is of {given} samples, and there are {self._ranks} ranks; wanted one for each"
                )
        self._epoch = self._rounds = self._first = 0
        self._next = 0
        self._assignments: list[Assignment] = [(0, (1.0,) * self._ranks)]
        self._measured = MeasuredSpeeds(self._ranks)
        session.weights.assigner = self

    def set_epoch(self, epoch: int) -> None:
        """Sets the number that the next epoch's order comes from, as `DistributedSampler` has it."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Returns the number of batches in an epoch; the same on all ranks."""
        whole, rest = divmod(self.length, self.batch_size)
        return whole if self.drop_last or (whole and rest < self._ranks) else whole + 1

    def __iter__(self) -> Iterator[list[int]]:
        """Yields this rank's part of each batch of an epoch, as indices into the data set; resumes a loaded state."""
        count, order = len(self), self._order()
        start, first = self._rounds * count, self._first
        self._rounds, self._first = self._rounds + 1, 0
        self._assignments = [deal for deal, after in zip(self._assignments, [*self._assignments[1:], None], strict=True)
                       if after is None or after[0] > start]  # fmt: skip
        for batch in range(first, count):
            self._next = start + batch + 1
            yield self._part(order, batch, start + batch)

    def shares(self, place: int | None = None) -> list[int]:
        """Returns how many samples each rank gets in a full batch.

        Args:
            place: Number of the batch, counted from 0 in the epoch in which this sampler was made or loaded and
                counted on in later epochs; of this epoch or later. None means the next batch that this rank draws.

        Returns:
            Number of samples of each rank, by rank; they add up to `batch_size`.
        """
        return shares_of(self.batch_size, self._speeds_at(self._next if place is None else place))

    @property
    def place(self) -> int:
        """Number of the next batch that this rank will draw; see `SampleAssigner.place`."""
        return self._next

    @property
    def checksum(self) -> int:
        """CRC-32 of the settings and of the assignment; see `SampleAssigner.checksum`."""
        settings = [getattr(self, name) for name in SAVED]
        return zlib.crc32(repr((settings, self._epoch, self._assignments)).encode())

    def heard(self, told: Sequence[Told]) -> None:
        """Adds the reports of all ranks, and changes the assignment of samples if that is worth it.

        A new assignment begins with the first batch that no rank has drawn.

        Args:
            told: Report of each rank on the step that begins, by rank; the same on all ranks.

        Raises:
            ValueError: On all ranks: their assignments differ.
            RuntimeError: This rank has drawn batches meanwhile, in another thread.
        """
        if len({each.assignment for each in told}) > 1:
            raise ValueError(
                f"`SpeedBatchSampler` differs on other ranks ({', '.join(SAVED)}, epoch or loaded state), "
                "so samples would be lost or seen twice; wanted the same arguments, set_epoch() and state on all ranks"
            )
        if not self.adapt:
            return
        self._measured.hear(told)
        first, (last, speeds) = int(max(each.place for each in told)), self._assignments[-1]
        if last > first or (found := self._measured.better(self.batch_size, speeds)) is None:
            return
        if self._next > first:
            raise RuntimeError(
                f"batch {self._next - 1} was drawn while the ranks told each other their speeds; wanted batches drawn "
                "by the thread that trains, as DataLoader does: leave prefetching to its workers"
            )
        self._assignments.append((first, found))

    def state_dict(self, batches: int | None = None) -> dict[str, object]:
        """Returns the position in the epoch and the assignment of its samples; the same on all ranks.

        Args:
            batches: Number of batches of this epoch that were trained with; None takes all that were drawn, which are
                more if a DataLoader's workers draw ahead.

        Raises:
            ValueError: `batches` is negative, or more than were drawn.
        """
        count = len(self)
        start = max(self._rounds - 1, 0) * count
        drawn = max(self._next - start, 0)
        batch = drawn if batches is None else batches
        if not 0 <= batch <= drawn:
            raise ValueError(f"`batches` is {batches}, and {drawn} of this epoch were drawn; wanted 0 to {drawn}")
        over = batch == count
        begin = start + batch if over else start
        deals = [(max(place - begin, 0), list(speeds)) for place, speeds in self._assignments]
        state: dict[str, object] = {name: getattr(self, name) for name in SAVED}
        return state | {
            "epoch": self._epoch + over,
            "batch": 0 if over else batch,
            "assignments": [
                deal for deal, after in zip(deals, [*deals[1:], None], strict=True) if after is None or after[0]
            ],
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resumes at the position of a saved state; on all ranks, with the same state, before the epoch is iterated.

        If the state was saved on another number of ranks, all ranks get equally many samples again; each batch of all
        ranks holds the same samples.

        Args:
            state: Result of `state_dict`.

        Raises:
            ValueError: The state is for other data or other batches, or is no state of a SpeedBatchSampler.
        """
        missing = [name for name in (*SAVED, "epoch", "batch", "assignments") if name not in state]
        if missing:
            raise ValueError(
                f"`state` lacks {', '.join(missing)}; wanted what SpeedBatchSampler.state_dict() has returned"
            )
        for name in SAVED:
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"`{name}` is {getattr(self, name)}, and `state` was saved with {state[name]}; wanted the same: "
                    "batches would hold other samples"
                )
        epoch, batch, given = state["epoch"], state["batch"], state["assignments"]
        if not (isinstance(epoch, int) and isinstance(batch, int) and isinstance(given, Sequence) and given):
            raise ValueError("`state` is damaged: wanted what SpeedBatchSampler.state_dict() has returned")
        deals: list[Assignment] = [(int(place), tuple(float(speed) for speed in speeds)) for place, speeds in given]
        if any(len(speeds) != self._ranks for _, speeds in deals):
            deals = [(0, (1.0,) * self._ranks)]
        self._epoch, self._first, self._assignments = epoch, batch, deals
        self._rounds, self._next = 0, batch
        self._measured = MeasuredSpeeds(self._ranks)

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(self.seed + self._epoch)
        return list(torch.randperm(self.length, generator=generator, device="cpu").tolist())

    def _part(self, order: Sequence[int], batch: int, place: int) -> list[int]:
        """Returns this rank's part of a batch, which follows those of the lower ranks.

        Args:
            order: Indices of the epoch's samples, in the order in which they are drawn.
            batch: Number of the batch in the epoch.
            place: Number of the batch as in `shares`.
        """
        start = batch * self.batch_size
        last = batch == len(self) - 1 and not self.drop_last
        whole = order[start:] if last else order[start : start + self.batch_size]
        sizes = shares_of(len(whole), self._speeds_at(place))
        begin = sum(sizes[: self._rank])
        return list(whole[begin : begin + sizes[self._rank]])

    def _speeds_at(self, place: int) -> tuple[float, ...]:
        return next(speeds for first, speeds in reversed(self._assignments) if first <= place)
