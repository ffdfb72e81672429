"""State of a sharded model with which 4-bit formats suffice: residuals of gradients, and the weights sent last.

Gradients: the compression error of a flat shard is added to the next one for the same owner (error feedback). Between
nodes a rank sends N - 1 flat shards, each as long as its own shard, so that is what it keeps.

Weights: a rank sends the difference between its flat shard and what the others have of it, and all of them, the rank
itself included, add what they decode: they have the same bits, and the compression error is in the next difference. A
rank keeps the N flat shards of its counterparts and itself. The all-gather of the backward pass needs nothing from
other nodes: its weights are those of the forward pass.

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
from gradwire.comms.sharded.flat_shards import gather_runs, scatter_runs
from gradwire.comms.sharded.layout import NamedShard, ShardRuns, runs_of
from gradwire.comms.step.loaded import LoadConsistencyCheck, Loaded
from gradwire.compressors.rules import Rule

CARRIED_ON = PREFIX + "carried/"
"""Prefix of the keys in a rank's entry with saved flat shards: `RESIDUAL` or `SENT` and a parameter group's number
follow."""

SUMS_OF = PREFIX + "sums/"
"""Prefix of the keys in a rank's entry that count the sums behind a residual; followed as `CARRIED_ON` is."""

RESIDUAL, SENT = "residual", "sent"
"""Kinds of carried flat shards: compression errors of gradients, and weights as the counterparts have them."""


class ShardResidual:
    """The compression error of one parameter group's flat shards for other owners, added to the next ones.

    Args:
        shards: Shards of the parameter group, in their order in a flat shard.
        rules: Rules that decide which shards are sent uncompressed.
        others: Number of other owners, to each of which one flat shard is sent: one less than there are nodes.

    Attributes:
        flushing: True if the next reduce-scatter sends the residual exactly, and leaves it zero.
        loss_scale: Loss scale of the gradients in the residual; a change rescales the residual.
        sums: Reduce-scatters of this parameter group so far; the same on all its ranks.
    """

    key = SUMS_OF
    """Prefix of the entry that must be equal on all ranks after a load: the count of sums. Residuals differ by rank."""

    def __init__(self, shards: Sequence[NamedShard], rules: Sequence[Rule], others: int) -> None:
        self.flushing = False
        self._shards = tuple(shards)
        self._rules = tuple(rules)
        self._others = others
        self.rows: Tensor | None = None
        """(others, compressed elements of a flat shard) float32; None before the first one was encoded."""
        self.loss_scale = LossScale(self._rescale)
        self.sums = 0
        self.holds = False
        """True if the residual may be non-zero; the same on all ranks."""

    def check(self, rows: Tensor | None) -> None:
        """Refuses a saved residual of another model, or a damaged one.

        Raises:
            ValueError: Wrong shape or dtype, or values that are not finite.
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
        """Replaces the residual by a saved one that `check` has accepted; None starts from zero."""
        self.rows = None if rows is None else rows.clone()
        self.holds = rows is not None

    def describe(self) -> str:
        """Returns the number of reduce-scatters so far as text, to compare it between ranks."""
        return str(self.sums)

    def take(self, present: Sequence[NamedShard], device: torch.device) -> list[Tensor]:
        """Returns the residuals to add to the flat shards of the next encoding.

        Args:
            present: Parameters that have a gradient, in the order of the flat shard.
            device: Device of the flat shard; the residual is moved there.

        Returns:
            For each other owner, (compressed elements of `present`) float32; a view of the residual if all parameters
            are present in their own order.
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
            present: The same as in `take`.
            rows: The tensors that `take` returned, changed in place. Elements that are not finite become zero.
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
        """Returns the runs of the residual that belong to `present`, in its order; None for the whole residual."""
        if list(present) == list(self._shards):
            return None
        places, start = {}, 0
        for shard in self._shards:
            stop = start + runs_of([shard], self._rules).compressed_numel
            places[shard.name] = start, stop
            start = stop
        return [places[shard.name] for shard in present if places[shard.name][0] < places[shard.name][1]]


class SentShards:
    """The weights of one parameter group that were sent last, from which the next all-gather sends the differences.

    They are those of this rank's shard and of its counterparts', the ranks at the same place in the other nodes.

    Invariant: counterparts apply the same payloads in the same order, so their copies have the same bits.

    Args:
        runs: Compressed and dense runs of a flat shard.
        count: Number of flat shards: one for each counterpart, this rank included.
    """

    key = CARRIED_ON
    """Prefix of the entry that must be equal on all counterparts after a load: the flat shards."""

    def __init__(self, runs: ShardRuns, count: int) -> None:
        self.runs = runs
        self._count = count
        self.rows: Tensor | None = None
        """(count, numel of a flat shard) float32; None before the first all-gather, which is exact."""

    def check(self, rows: Tensor | None) -> None:
        """Refuses saved flat shards of another model, or damaged ones.

        Raises:
            ValueError: Wrong shape or dtype.
        """
        wanted = (self._count, self.runs.numel)
        if rows is not None and tuple(rows.shape) != wanted:
            raise ValueError(
                f"`state` has sent weights of shape {tuple(rows.shape)}; wanted {wanted}: it is of another model or of "
                "other parameter groups"
            )
        _refuse_other_dtype(rows)

    def restore(self, rows: Tensor | None) -> None:
        """Replaces the flat shards by saved ones that `check` has accepted; None makes the next all-gather exact."""
        self.rows = None if rows is None else rows.clone()

    def describe(self) -> str:
        """Returns a digest of the flat shards in 8 hex digits, to compare them between ranks; `not there` without."""
        if self.rows is None:
            return "not there"
        return hashlib.sha256(self.rows.cpu().contiguous().numpy().tobytes()).hexdigest()[:8]


def _refuse_other_dtype(rows: Tensor | None) -> None:
    if rows is not None and rows.dtype != torch.float32:
        raise ValueError(f"`state` has rows of {rows.dtype}; wanted torch.float32, as they were saved: {INSTEAD}")


class LoadedShards:
    """Compares between ranks what they have loaded from a checkpoint: residuals, or the weights that were sent last.

    A rank with other flat shards than its counterparts would send differences from weights that they do not have, or
    whole flat shards where they expect differences. A residual of another step belongs to other weights.

    Args:
        alike: Makes the check that compares this object on all ranks; None if another object's check covers it.

    Attributes:
        loaded: Name -> description, equal on ranks that have loaded the same; see `Loaded`.
    """

    def __init__(self, alike: Callable[[Loaded], LoadConsistencyCheck] | None = None) -> None:
        self.loaded: Mapping[str, str] = {"state": "not loaded"}
        self._rows: dict[str, ShardResidual | SentShards] = {}
        self._alike = None if alike is None else alike(self)

    def add(self, param_group: str, rows: ShardResidual | SentShards) -> None:
        """Adds a parameter group's state to what `compare` compares; called when the model is set up.

        Args:
            param_group: Kind of the state and number of the parameter group, such as `residual/3`: the end of its key
                in a checkpoint.
            rows: The state of this rank. It is described by `note` after a checkpoint was loaded.
        """
        self._rows[rows.key + param_group] = rows

    def note(self) -> None:
        """Records what the added states hold now; called after a checkpoint was loaded."""
        self.loaded = {"state": "loaded"} | {f"state[{key!r}]": each.describe() for key, each in self._rows.items()}

    def compare(self) -> None:
        """Compares the loaded state with the other ranks: at the first call, and at the first one after each load.

        At the first call all ranks take part, even if none has loaded a state; after a later load only those that have
        loaded, and they wait for all others. All other calls return at once, and so do all if another object's check
        covers this one. Counts of sums must be equal on all ranks; sent weights only on counterparts.

        Raises:
            ValueError: On all ranks, if they loaded different states, or at the first call some did and others did not.
            RuntimeError: After a later load: a rank did not load a state before this step.
        """
        if self._alike is not None:
            self._alike.compare()
