"""Compressor state of one model from step to step: commit or drop, loss scale, flush, save and load.

The changes that a step makes to residuals take effect at its end, and only if every element of the averaged gradient is
finite. All ranks hold the same averages, so all decide identically without communication.
"""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from types import UnionType

import torch
from torch import Tensor

from gradwire.comms.checkpoint import INSTEAD, PREFIX, refuse_odd_numbers, refuse_other_kinds
from gradwire.comms.loss_scale import LossScale, refuse_odd_scale
from gradwire.comms.resume import COLUMNS, encode_all_reduces
from gradwire.comms.run.all_reduces import Bucket
from gradwire.comms.streams import LateFlag
from gradwire.compressors.base import Compressor, Layout, StateDict, StateValue, traits_of
from gradwire.compressors.compiled import native
from gradwire.compressors.composite import make_composite
from gradwire.compressors.registry import Option
from gradwire.compressors.rules import Rule

KINDS: Mapping[str, type | UnionType] = {
    PREFIX + "dirty": int,
    PREFIX + "loss_scale": int | float,
    PREFIX + "transfers": Tensor,
}
"""Key of an entry that every saved state has -> its type."""

SHORT = 24
"""Number of characters that an error shows of a value if ranks have loaded different ones."""

IDLE = "exact "
"""Beginning of `Communicator.placement` if nothing is compressed."""


class Compression:
    """Holds the compressor of one model, and its state from step to step.

    Args:
        name: Name of the compressor.
        options: Options of the compressor.
        rules: Rules for single parameters; the default rules come after them.
        rank: This rank.
        size: Number of ranks.

    Attributes:
        compressor: The compressor; keeps the residuals.
        flushing: Whether the next step sends uncompressed, with the residuals added.
        loss_scale: Scale of the gradients; residuals are rescaled with it.
        placement: Plan and ranks of each node that a saved state belongs to; see `Communicator.placement`.
        unused: Names of parameters whose averages DDP ignores in the current step, the same on all ranks. Their
            residuals stay as they are.
        as_saved: Whether the loaded state was saved with the placement that ranks have now.
        loaded: Entries of the loaded state that must be equal on all ranks, as text by name.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Option],
        rules: Sequence[Rule | Mapping[str, object]],
        rank: int,
        size: int,
    ) -> None:
        self.compressor: Compressor = make_composite(name, options, rules)
        self.flushing = False
        self.unused: Collection[str] = ()
        self.placement, self.as_saved = "", True
        self.loaded: Mapping[str, str] = {"state": "not loaded"}
        self._rank = rank
        self._size = size
        self.loss_scale = LossScale(self.compressor.rescale)
        self._undecided: tuple[LateFlag, bool] | None = None
        self._last_layouts: list[Layout] = []
        self._saved_all_reduces: Tensor | None = None
        self._dirty = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is compressed, because all ranks are on one node."""
        return self.placement.startswith(IDLE)

    @property
    def keeps(self) -> bool:
        """Whether it keeps tensors from step to step, such as residuals or momenta, now or after a dense start."""
        return not self.is_idle and any(map(_keeps, traits_of(self.compressor).every()))

    def renumber(self, rank: int, size: int) -> None:
        """Sets the number of this rank and the number of ranks, after ranks have left or joined.

        Args:
            rank: This rank from now on.
            size: Number of ranks from now on.
        """
        self._rank, self._size = rank, size

    def progress(self) -> StateDict:
        """Returns the part of the state that is equal on all ranks: counters and loss scale, no residuals."""
        own: StateDict = {
            key: value for key, value in self.compressor.state_dict().items() if not isinstance(value, Tensor)
        }
        return own | {PREFIX + "loss_scale": float(self.loss_scale.value), PREFIX + "dirty": int(self.dirty)}

    def take_progress(self, progress: Mapping[str, StateValue]) -> None:
        """Sets the compressor's state, the loss scale and whether residuals are pending.

        Args:
            progress: Result of `progress` on another rank, which has counters and no residuals, or a whole state of
                this rank.

        Raises:
            ValueError: It holds a number that no state is saved with; nothing was changed.
        """
        refuse_odd_numbers(progress)
        own = {key: value for key, value in progress.items() if not key.startswith(PREFIX)}
        self.compressor.load_state_dict(own)
        self.loss_scale.value = float(progress[PREFIX + "loss_scale"])
        self._dirty = bool(progress[PREFIX + "dirty"])

    def residual_norm(self) -> float:
        """Returns the norm of this rank's residuals, in units of the gradients without loss scale."""
        return math.sqrt(traits_of(self.compressor).residual_square()) / (float(self.loss_scale.value) or 1.0)

    def take_saved_all_reduces(self) -> Tensor | None:
        """Returns the all-reduces of the step before a loaded checkpoint, and forgets them.

        Returns:
            Result of `encode_all_reduces`; None if no checkpoint was loaded since the last call, or it names none.
        """
        saved, self._saved_all_reduces = self._saved_all_reduces, None
        return saved

    def end_step(self, buckets: Sequence[Bucket], layouts: Sequence[Layout]) -> None:
        """Waits for the step's buckets and commits the changes of state, or drops them if an average is not finite.

        It is for CPUs; on CUDA `end_step_on_device` does it without a wait.

        Args:
            buckets: Buckets of the step.
            layouts: Layout of each all-reduce, in the order in which they were started.

        Raises:
            BaseException: Error of a bucket's all-reduce; then nothing is committed or dropped.
        """
        verdicts = [is_finite(_wait(bucket)) for bucket in buckets]
        self.end_pass(finite=all(verdicts), layouts=layouts)

    def end_pass(self, *, finite: bool, layouts: Sequence[Layout]) -> None:
        """Does what `decide` does for the averages of gradients, and warns of a loss scale that is not known.

        Args:
            finite: Whether all averages of the step are finite.
            layouts: Layout of each all-reduce of the step, in the order in which they were started.
        """
        self.decide(finite, layouts)
        if not finite and self.keeps:
            self.loss_scale.warn_if_unknown()

    def decide(self, finite: bool, layouts: Sequence[Layout]) -> None:
        """Commits the changes of state of a step, or drops them; its buckets must be done.

        Args:
            finite: Whether all averages of the step are finite.
            layouts: Layout of each all-reduce of the step, in the order in which they were started.
        """
        self._last_layouts = list(layouts)
        self._end_step(finite, layouts)
        if finite:
            self._dirty = not self.flushing
            self.flushing = False

    def end_step_on_device(self, extremes: Sequence[Tensor], layouts: Sequence[Layout]) -> None:
        """Commits or drops the changes of state on CUDA: the device decides, and the host reads it one step later.

        The current stream must come after the all-reduces of this step and before those of the next one. State that
        only the host keeps (numbers of steps, whether residuals were flushed) is corrected then, by
        `resolve_last_step`.

        Args:
            extremes: 0-dim tensors on the device, all finite if and only if the step's averages are. Empty if nothing
                was compressed in the step: then nothing is committed or dropped.
            layouts: Layout of each all-reduce of the step, in the order in which they were started.
        """
        self.resolve_last_step()
        self._last_layouts = list(layouts)
        if not extremes:
            return
        if len({each.dtype for each in extremes}) == 1:
            finite = torch.stack(list(extremes)).isfinite().all()
        else:
            finite = torch.stack([each.isfinite() for each in extremes]).all()
        self._end_step(finite, layouts)
        self._undecided = (LateFlag(finite), self.flushing)
        self._dirty = not self.flushing
        self.flushing = False

    def _end_step(self, finite: bool | Tensor, layouts: Sequence[Layout]) -> None:
        """Passes the step's end to the compressor.

        Args:
            finite: Whether all averages of the step are finite; on CUDA a 0-dim bool tensor on the device.
            layouts: Layout of each all-reduce of the step, in the order in which they were started.
        """
        traits_of(self.compressor).exchanged(layouts, finite, self.unused)
        self.unused = ()
        self.compressor.end_step(finite)

    def resolve_last_step(self) -> None:
        """Reverts the host's counters of the last step if the device has dropped that step; waits for its decision.

        Does nothing on a CPU, or if the decision was read already.
        """
        if self._undecided is None:
            return
        (flag, flushed), self._undecided = self._undecided, None
        if not flag.read():
            self.compressor.retract_step()
            self._dirty = True
            self.flushing = self.flushing or flushed
            if self.keeps:
                self.loss_scale.warn_if_unknown()

    @property
    def dirty(self) -> bool:
        """Whether there are residuals that have not been sent; the same on all ranks.

        On CUDA it waits until the device has decided about the last step; see `resolve_last_step`.
        """
        self.resolve_last_step()
        return self._dirty

    def state_dict(self) -> StateDict:
        """Returns the state of this rank for a checkpoint: of the compressor, the loss scale and the last all-reduces.

        After a load, these are the loaded all-reduces until a step takes them (`take_saved_all_reduces`). On CUDA it
        waits until the device has decided about the last step.
        """
        self.resolve_last_step()
        saved = self._saved_all_reduces
        own: StateDict = {
            PREFIX + "rank": self._rank,
            PREFIX + "size": self._size,
            PREFIX + "dirty": int(self._dirty),
            PREFIX + "loss_scale": float(self.loss_scale.value),
            PREFIX + "transfers": encode_all_reduces(self._last_layouts) if saved is None else saved.clone(),
            PREFIX + "placement": self.placement,
        }
        return own | self.compressor.state_dict()

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Restores a state that `state_dict` returned on the same rank of the same number of ranks.

        It also sets `as_saved` and `loaded`, by which ranks find out whether they have loaded the same state.

        Args:
            state: Saved state of this rank.

        Raises:
            ValueError: The state is of another model or compressor, or is damaged; or it holds residuals, and nothing
                is compressed here. Nothing was changed.
        """
        # Check all that can be checked before anything changes.
        refuse_other_kinds(state, KINDS)
        rows = state[PREFIX + "transfers"]
        assert isinstance(rows, Tensor)
        if rows.dim() != 2 or rows.shape[1] != COLUMNS or rows.dtype != torch.int64:
            raise ValueError(f"`state[{PREFIX + 'transfers'!r}]` holds no transfers: it is damaged; {INSTEAD}")
        refuse_odd_scale(float(state[PREFIX + "loss_scale"]))
        refuse_not_finite(state)
        placement = str(state.get(PREFIX + "placement", self.placement))
        if state[PREFIX + "dirty"] and self.is_idle and not placement.startswith(IDLE):
            raise ValueError(
                f"`state` was saved by ranks that compressed ({placement}) and holds residuals that would be lost: "
                f"here nothing is compressed ({self.placement}), as all ranks are on one node. Resume on several "
                'nodes, or with plan="flat", or call state.flush() and train one more step before saving (of Outer: '
                "synchronize())"
            )
        # Restore the compressor and the loss scale.
        try:
            self.take_progress(state)
        except (TypeError, KeyError, OverflowError, AttributeError) as error:
            raise ValueError(f"`state` is damaged in what the compressor saved: {error}; {INSTEAD}") from error
        # Keep the all-reduces for the next step, and the facts that ranks compare.
        self.as_saved = placement == self.placement
        self._undecided = None
        self._saved_all_reduces = rows if rows.numel() else None
        facts = self.progress() | {"placement": placement, "transfers": str(rows.tolist())}
        self.loaded = {"state": "loaded"} | {f"state[{key!r}]": _shortly(str(value)) for key, value in facts.items()}


def _keeps(compressor: Compressor) -> bool:
    """Returns whether a compressor keeps tensors; of one that does not say what it keeps, whether it does now."""
    fields = getattr(compressor, "fields", ())
    return bool(fields) or any(isinstance(value, Tensor) for value in compressor.state_dict().values())


def refuse_not_finite(state: Mapping[str, StateValue]) -> None:
    """Refuses a saved state with a tensor that holds a NaN or an infinity, which would make every later gradient NaN.

    Args:
        state: Saved state of one rank.

    Raises:
        ValueError: It holds such a tensor; the message names it.
    """
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point() and not is_finite(value):
            raise ValueError(
                f"`state` holds a NaN or an infinity in {name!r}: it was damaged, or saved by a training that had "
                "failed already; load an earlier one"
            )


def _shortly(text: str) -> str:
    """Shortens a text for an error: of one with more than 24 characters, its beginning and a hash of all of it."""
    return text if len(text) <= SHORT else f"{text[:SHORT]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _wait(bucket: Bucket) -> Tensor:
    """Blocks until a bucket's average is there, on a CPU, and returns it, or raises the error of its all-reduce."""
    assert bucket.future is not None
    value = bucket.future.wait()
    if isinstance(value, BaseException):
        raise value
    return value


ONE_THREAD_NUMEL = 1 << 20
"""Elements from which on `is_finite` uses torch's threads; for fewer one thread is faster.

One pass of one thread and aminmax of two, in us: 5.6 and 6.4 for 65,536 elements, 86 and 60 for 1,048,576, 1371 and 793
for 8,388,608, one call after the other; with a pause of 10 ms before each call, as in training, torch's threads were
asleep and waited for a processor: 52 and 7732 for 262,144, 194 and 240 for 1,048,576 (2-core EPYC VM beside one other
job, torch 2.13.0+cpu, 2026-11-22). One thread of torch takes 112 where the pass takes 86."""


def is_finite(flat: Tensor) -> bool:
    """Returns whether all elements of a tensor are finite; waits for the device if it is on CUDA.

    Args:
        flat: Floating-point tensor; of a sparse one, the stored values count. True if it has no elements.
    """
    if flat.layout != torch.strided:
        flat = flat._values()
    if flat.numel() == 0:
        return True
    alone = flat.numel() < ONE_THREAD_NUMEL or torch.get_num_threads() == 1
    if alone and flat.is_cpu and flat.dtype == torch.float32 and flat.is_contiguous():
        return native.all_finite(flat.data_ptr(), flat.numel())
    low, high = torch.aminmax(flat)
    if flat.is_cpu:
        return math.isfinite(low.item()) and math.isfinite(high.item())  # Ten times as fast as operators on tensors.
    return bool(torch.isfinite(low) & torch.isfinite(high))
