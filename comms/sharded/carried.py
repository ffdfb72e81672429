"""State of a sharded model that makes four bits suffice both ways: gradient residuals, and the weights last sent.

Gradients: the compression error of a row is added to the next one for the same owner (error feedback). Between
nodes a rank sends N - 1 rows, each as long as its own shard, so that is what it keeps.

Weights: a rank sends the difference between its row and what the others have of it, and all of them, the rank itself
included, add what they decode: they have the same bits, and the compression error is in the next difference. A rank
keeps the N rows of its counterparts and itself. The all-gather of the backward pass needs nothing from other nodes: its
weights are those of the forward pass.

Sources: weights as quantized differences from the last ones: SDP4Bit, Jia et al., NeurIPS 2024; carried from step to
step as in EF21, Richtarik et al., NeurIPS 2021. Error feedback: Seide et al., 1-bit SGD, Interspeech 2014.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gradwire.comms.checkpoint import INSTEAD, PREFIX
from gradwire.comms.compression import refuse_not_finite
from gradwire.comms.loss_scale import LossScale
from gradwire.comms.sharded.layout import NamedShard, RowRuns, runs_of
from gradwire.comms.sharded.rows import gather_runs, scatter_runs
from gradwire.comms.step.loaded import LoadConsistencyCheck, Loaded
from gradwire.compressors.rules import Rule

CARRIED_ON = PREFIX + "carried/"
"""Begins the keys in a rank's entry of what collectives carry on; kind and number of the parameter group follow."""

SUMS_OF = PREFIX + "sums/"
"""Prefix of the keys in a rank's entry that count the sums behind a residual; followed as `CARRIED_ON` is."""

RESIDUAL, SENT = "residual", "sent"
"""Prefixes of the keys of saved rows; the number of the parameter group follows."""


class ShardResidual:
    """The compression error of one parameter group's rows for other owners, added to the next rows.

    Args:
        shards: All of the parameter group's, in their order in a row.
        rules: Which of them travel as they are.
        others: How many rows are sent.

    Attributes:
        loss_scale: Of the gradients that this parameter group's rows are of; the residual follows it.
        sums: Of this parameter group so far; the same on all its ranks.
    """

    key = SUMS_OF
    """What of it all ranks must have loaded alike: rows are each rank's own."""

    def __init__(self, shards: Sequence[NamedShard], rules: Sequence[Rule], others: int) -> None:
        self.flushing = False
        self._shards = tuple(shards)
        self._rules = tuple(rules)
        self._others = others
        self.rows: Tensor | None = None
        """(others, compressed elements of a row) float32; None before the first row was encoded."""
        self.loss_scale = LossScale(self._rescale)
        self.sums = 0
        self.holds = False
        """True if the residual may be non-zero; the same on all ranks."""

    def check(self, rows: Tensor | None) -> None:
        """Refuses what was saved of another model, or is damaged.

        Raises:
            ValueError: The rows are of another number or length, or not finite.
        """
        wanted = (self._others, runs_of(self._shards, self._rules).compressed_numel)
        if rows is not None and tuple(rows.shape) != wanted:
            raise ValueError(
                f"`state` has rows of {tuple(rows.shape)} in a residual; wanted {wanted}: it is of "
                "another model, or of other parameter groups or `rules`"
            )
        _refuse_other_dtype(rows)
        refuse_not_finite({RESIDUAL: rows} if rows is not None else {})

    def restore(self, rows: Tensor | None) -> None:
        """Takes over what was saved, and has been checked; None begins anew."""
        self.rows = None if rows is None else rows.clone()
        self.holds = rows is not None

    def describe(self) -> str:
        """The sums in a word."""
        return str(self.sums)

    def take(self, present: Sequence[NamedShard], device: torch.device) -> list[Tensor]:
        """What is to be added to each row of these parameters, in the order of their compressed elements; (n) float32.

        Args:
            present: Those that have a gradient, in their order.
            device: Where rows are.
        """
        if self.rows is None:
            numel = runs_of(self._shards, self._rules).compressed_numel
            self.rows = torch.zeros((self._others, numel), dtype=torch.float32, device=device)
        self.rows = self.rows.to(device)
        places = self._places(present)
        return [row if places is None else gather_runs(row, places) for row in self.rows]

    def put(self, present: Sequence[NamedShard], rows: Sequence[Tensor]) -> None:
        """Stores the compression error of this step.

        Args:
            present: As in `take`.
            rows: What `take` returned, changed in place; what is not finite is dropped.
        """
        assert self.rows is not None
        places = self._places(present)
        for kept, row in zip(self.rows, rows, strict=True):
            row.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            if places is not None:
                scatter_runs(row, kept, places)

    def _rescale(self, factor: float | Tensor) -> None:
        if self.rows is not None:
            rows = self.rows.to(factor.device) if isinstance(factor, Tensor) else self.rows
            self.rows = rows.mul_(factor)

    def _places(self, present: Sequence[NamedShard]) -> list[tuple[int, int]] | None:
        """Where the compressed elements of these parameters are among all, in this order; None for all as they lie."""
        if list(present) == list(self._shards):
            return None
        places, start = {}, 0
        for shard in self._shards:
            stop = start + runs_of([shard], self._rules).compressed_numel
            places[shard.name] = start, stop
            start = stop
        return [places[shard.name] for shard in present if places[shard.name][0] < places[shard.name][1]]


class SentRows:
    """The rows of one parameter group's counterparts, as all of them have them.

    Args:
        runs: Of a row.
        count: How many rows there are.
    """

    key = CARRIED_ON
    """What of it counterparts must have loaded alike: the rows."""

    def __init__(self, runs: RowRuns, count: int) -> None:
        self.runs = runs
        self._count = count
        self.rows: Tensor | None = None
        """(count, numel of a row) float32; None before the first all-gather, which is exact."""

    def check(self, rows: Tensor | None) -> None:
        """See `ShardResidual.check`."""
        wanted = (self._count, self.runs.numel)
        if rows is not None and tuple(rows.shape) != wanted:
            raise ValueError(
                f"`state` has sent weights of shape {tuple(rows.shape)}; wanted {wanted}: it is of another model or of "
                "other parameter groups"
            )
        _refuse_other_dtype(rows)

    def restore(self, rows: Tensor | None) -> None:
        """Takes over what was saved, and has been checked; None has the next all-gather be exact."""
        self.rows = None if rows is None else rows.clone()

    def describe(self) -> str:
        """The rows in a word, which tells them from others."""
        if self.rows is None:
            return "not there"
        return hashlib.sha256(self.rows.cpu().contiguous().numpy().tobytes()).hexdigest()[:8]


def _refuse_other_dtype(rows: Tensor | None) -> None:
    if rows is not None and rows.dtype != torch.float32:
        raise ValueError(f"`state` has rows of {rows.dtype}; wanted torch.float32, as they were saved: {INSTEAD}")


class LoadedRows:
    """What a rank has loaded of one kind of rows, which other ranks must have loaded, too.

    With other rows than its counterparts have of it, what a rank sends would be differences from weights that they do
    not have, or whole rows where they wait for differences. A residual of another step belongs to other weights.

    Args:
        alike: Makes what has the ranks compare; None: others do.

    Attributes:
        loaded: What they must have alike; see `Compression.loaded`.
    """

    def __init__(self, alike: Callable[[Loaded], LoadConsistencyCheck] | None = None) -> None:
        self.loaded: Mapping[str, str] = {"state": "not loaded"}
        self._rows: dict[str, ShardResidual | SentRows] = {}
        self._alike = None if alike is None else alike(self)

    def add(self, param_group: str, rows: ShardResidual | SentRows) -> None:
        """Takes in the rows of a parameter group; what they are saved under ends with `param_group`."""
        self._rows[rows.key + param_group] = rows

    def note(self) -> None:
        """Notes that a state was loaded."""
        self.loaded = {"state": "loaded"} | {f"state[{key!r}]": each.describe() for key, each in self._rows.items()}

    def compare(self) -> None:
        """Has the ranks compare; see `LoadConsistencyCheck.compare`."""
        if self._alike is not None:
            self._alike.compare()
