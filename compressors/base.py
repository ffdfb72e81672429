"""The contracts between a compressor and its caller.

A *codec* turns a flat tensor into a payload of fixed size and back. A *compressor* is an approximate all-reduce over a
group, built on a codec or on an exchange of its own. Neither communicates: a compressor yields the collectives that it
needs as data, and is resumed when they are done. It works on one shard at a time: the slice of a bucket that this rank
owns between the phases inside the node.
"""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol, cast, runtime_checkable
from weakref import WeakValueDictionary

import torch
from torch import Tensor

StateValue = Tensor | int | float | str
"""Type of a value in a state dict."""
StateDict = dict[str, StateValue]
"""Flat and plain, so that `torch.load(weights_only=True)` and torch.distributed.checkpoint accept it."""


class Work(Protocol):
    """A collective that has been issued and may still be in flight."""

    def wait(self) -> None:
        """Returns when the result may be read (on CUDA: by work queued later on the current stream).

        Raises:
            RuntimeError: The collective failed; the message names the peer if the transport knows it.
        """


ALL_REDUCE = "all_reduce"
ALL_TO_ALL = "all_to_all"
ALL_GATHER = "all_gather"


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """A collective that a compressor needs. Its caller issues it, on all ranks in the same order.

    Every tensor is contiguous, on one device, and of the same numel and dtype on all ranks. The compressor neither
    reads nor writes any of them until it is resumed.
    """

    op: str
    """`all_reduce`, `all_to_all` or `all_gather`: the method of a transport that runs it."""
    tensors: tuple[Tensor, ...]
    """`all_reduce`: (tensor,), replaced by its sum over the ranks, the same bits on all of them. `all_to_all`: (output,
    source) of one shape; the r-th of `size` equal parts of `source` goes to rank r. `all_gather`: (output, source);
    `output` (numel = size * source.numel()) receives every rank's `source`, in rank order."""
    bounds: tuple[int, ...] = ()
    """Unequal parts of the ranks: part r is the rows `bounds[r]:bounds[r + 1]` (dim 0); empty for equal parts.
    `all_to_all`: parts of `source`; `output` (size times the rows of this rank's part) receives this rank's part from
    every rank, in rank order. `all_gather`: parts of `output`; `source` is this rank's part."""
    as_ring: bool = False
    """True if an all_reduce over unequal parts, which the caller runs as several collectives, must give the same
    bits as the transport's own all_reduce."""


Request = Collective | tuple[Collective, ...]
"""Value that a compressor yields: one collective, or several that may be in flight together."""


@dataclass(frozen=True, slots=True)
class Member:
    """This rank's place in the group that a shard is summed over: its rank, the group's size, the weights of parts."""

    rank: int
    """Index in the group, 0 <= rank < size."""
    size: int
    """Number of ranks."""
    shares: tuple[int, ...] = ()
    """Weight of the part of a shard that each rank owns and sums in the two-stage exchange, if their links differ in
    rate; empty for equal parts."""


WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Attributes in which torch.compile and torch's checkpoint_wrapper (and offload_wrapper) keep the module they wrap."""


def plain_name(name: str) -> str:
    """Returns a parameter's name in the model without the parts that wrappers put into it.

    With them a run that compiles its model, or recomputes activations, would match no pattern of one that does not, and
    could not load its state.

    Args:
        name: Name from `named_parameters()`: `0._checkpoint_wrapped_module._orig_mod.weight` is `0.weight`.
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@dataclass(frozen=True, slots=True)
class Slice:
    """A run of one parameter inside a flat tensor."""

    name: str
    """Name of the parameter: the key of every state."""
    shape: tuple[int, ...]
    """Shape of the whole parameter in memory order (a channels_last weight is permuted accordingly)."""
    parameter_start: int
    """First element of the run within the flattened parameter."""
    start: int
    """First element of the run in the flat tensor."""
    numel: int
    """Elements in the run; fewer than the parameter has if a shard boundary cuts it."""

    @property
    def stop(self) -> int:
        """One past the run's last element in the flat tensor."""
        return self.start + self.numel


_known_layouts: "WeakValueDictionary[tuple[Slice, ...], Layout]" = WeakValueDictionary()
_knowing = threading.Lock()
"""Guards `_known_layouts`."""


@dataclass(frozen=True, slots=True, eq=False, init=False, weakref_slot=True)
class Layout:
    """Places of parameters in a flat tensor: ascending slices without gaps or overlaps.

    Layouts of equal slices are one object. They are the keys of a compressor's tables, looked up several times for each
    bucket: so no slice is hashed or compared again.
    """

    slices: tuple[Slice, ...]
    _cuts: "dict[tuple[int, int], Layout]" = field(repr=False)

    def __new__(cls, slices: tuple[Slice, ...]) -> "Layout":  # noqa: PYI034 - it may be an older object
        """Returns the layout of these slices: a new one only if no equal one is in use."""
        with _knowing:
            found = _known_layouts.get(slices)
            if found is None:
                found = object.__new__(cls)
                object.__setattr__(found, "slices", slices)
                object.__setattr__(found, "_cuts", {})
                _known_layouts[slices] = found
        return found

    def __reduce__(self) -> "tuple[type[Layout], tuple[tuple[Slice, ...]]]":
        return Layout, (self.slices,)

    @property
    def numel(self) -> int:
        """Elements of the flat tensor."""
        return self.slices[-1].stop if self.slices else 0

    def cut(self, start: int, stop: int) -> "Layout":
        """Returns the layout of `flat[start:stop]`; the same object at every call."""
        found = self._cuts.get((start, stop))
        if found is None:
            found = self._cuts[start, stop] = Layout(tuple(self._pieces(start, stop)))
        return found

    def _pieces(self, start: int, stop: int) -> Iterator[Slice]:
        for piece in self.slices:
            first, last = max(piece.start, start), min(piece.stop, stop)
            if first < last:
                offset = piece.parameter_start + first - piece.start
                yield Slice(piece.name, piece.shape, offset, first - start, last - first)


@dataclass(frozen=True, slots=True)
class StateRun:
    """A run of one parameter's elements that a compressor keeps state of."""

    name: str
    """Name of the parameter."""
    start: int
    """First element within the flattened parameter."""
    numel: int | None
    """Elements; None if the state belongs to the parameter as a whole."""


def even_bounds(numel: int, parts: int, align: int = 1) -> tuple[int, ...]:
    """Cuts `numel` elements into `parts` runs at multiples of `align`, whose lengths differ by at most `align`.

    With fewer than `parts` blocks of `align` elements some runs are empty.

    Returns:
        `parts + 1` ascending offsets from 0 to `numel`.
    """
    blocks = -(-numel // align)
    return tuple(min(numel, blocks * part // parts * align) for part in range(parts + 1))


def weighted_bounds(numel: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Cuts `numel` elements into runs whose lengths are in proportion to `shares`.

    Args:
        numel: Number of elements.
        shares: Weight of each run, an integer >= 0; not all are 0.

    Returns:
        `len(shares) + 1` ascending offsets from 0 to `numel`.
    """
    total = sum(shares)
    return tuple(numel * before // total for before in accumulate(shares, initial=0))


def equal_bounds(numel: int, parts: int, align: int) -> tuple[int, ...]:
    """Cuts `numel` elements into `parts` runs of one length, a multiple of `align`; the last also takes the remainder.

    With fewer than `parts * align` elements that length is 0, and the last run has all elements. NCCL's reduce_scatter
    and all_gather take equal slices: one call moves all slices without the remainder.

    Returns:
        `parts + 1` ascending offsets from 0 to `numel`.
    """
    length = numel // parts // align * align
    return (*(length * part for part in range(parts)), numel)


class Codec(Protocol):
    """A flat tensor -> a payload of fixed size -> an approximation of the tensor. No state, no communication.

    The three methods are all that a user's codec needs: `register_codec` adds residuals and the exchange. Every rank
    that decodes a payload must get the same bits. A NaN or inf must not decode to finite numbers only, so that every
    rank sees that the step is not finite. Methods may be called from several threads at once, and with zero elements.

    A codec that can add the residual, or encode a shard's parts together, faster than one step after the other offers
    `FusedCodec` or `PieceCodec` (compressors/codecs/base.py) as well.
    """

    def wire_nbytes(self, numel: int) -> int:
        """Returns the bytes of the payload of `numel` elements; they depend on `numel` alone."""

    def encode(self, flat: Tensor, payload: Tensor) -> None:
        """Encodes a tensor.

        Args:
            flat: 1-D float32; must not be changed.
            payload: 1-D uint8 on the same device, `wire_nbytes(flat.numel())` long, overwritten. It may start at any
                byte, so `payload[:4].view(torch.float32)` may fail: assign to it instead.
        """

    def decode(self, payload: Tensor, flat: Tensor) -> None:
        """Decodes a payload.

        Args:
            payload: 1-D uint8, as `encode` wrote it, on any rank; must not be changed. It may start at any byte: clone
                what is viewed as a wider dtype.
            flat: 1-D float32 on the same device, overwritten with the approximation.
        """


class CompressorTraits:
    """Properties of a compressor by which plans and executors are chosen, with the defaults for a plain one.

    Attributes:
        is_sum: Whether it only sums in another way, such as in a wider dtype, and sends no fewer bytes.
        two_stage: Whether the sum of the ranks' payloads is encoded again for the way back (two_stage.py).
    """

    is_sum = False
    two_stage = False

    @property
    def dtypes(self) -> Collection[torch.dtype] | None:
        """The dtypes of the buckets that go through it; None for all."""
        return None

    @property
    def has_owners(self) -> bool:
        """True if each rank owns a part of a shard: it gets the payloads of that part, and sends all ranks their sum.

        That is the two-stage exchange of two_stage.py: an all-to-all, then an all-gather.
        """
        return False

    @property
    def by_element(self) -> bool:
        """True if an element's result depends only on the ranks' values of it, and no state of it is kept.

        Then a bucket may be cut anywhere, and at other places in each start of the job.
        """
        return False

    def parts(self, layout: Layout) -> "list[tuple[Compressor, Layout]]":
        """Returns (compressor, layout of the parameters that it gets) for each compressor of a shard."""
        return [(cast("Compressor", self), layout)]

    def every(self) -> "tuple[Compressor, ...]":
        """Returns all compressors that it consists of; itself if it consists of no others."""
        return (cast("Compressor", self),)

    def shared(self) -> Sequence[Any]:
        """Returns the stores whose values must be equal on all nodes, because payloads are decoded with them.

        Returns:
            `ElementStore`s (compressors/residual.py), computed from averages alone; empty if there are none.
        """
        return ()

    def rounds(self, *, by_owners: bool) -> int:
        """Returns the most collectives that follow one another in an `all_reduce`; ranks connect for them in advance.

        Args:
            by_owners: Whether a sum counts as two collectives: to the owners of its parts, and back.
        """
        return 2

    def prepare(self, device: torch.device) -> None:
        """Compiles and loads the kernels that it needs on a device, so that no step waits for a compiler.

        Args:
            device: Device of the gradients.
        """

    def residual_square(self) -> float:
        """Returns the squared norm of this rank's residuals. Blocks until the device is done; changes nothing."""
        return 0.0

    def exchanged(self, layouts: Sequence[Layout], finite: bool | Tensor, unused: Collection[str] = ()) -> None:
        """Receives what was exchanged in the step; called before `end_step`, on all ranks with equal arguments.

        Args:
            layouts: Layouts that were exchanged, those of all ranks.
            finite: Whether all averages of the step are finite; see `end_step`. A tensor takes effect at the end of the
                next step, unless the step was retracted until then.
            unused: Names of parameters whose averages are not used: their stored state is kept, and what was
                staged of them is dropped.
        """

    def report_lines(self) -> list[str]:
        """Returns lines for reports about what the compressor has done so far; empty for none."""
        return []


class _DefaultTraits(CompressorTraits):
    """Default answers for a compressor that does not subclass `CompressorTraits`."""

    def __init__(self, compressor: "Compressor") -> None:
        self._compressor = compressor

    def parts(self, layout: Layout) -> "list[tuple[Compressor, Layout]]":
        return [(self._compressor, layout)]

    def every(self) -> "tuple[Compressor, ...]":
        return (self._compressor,)


def traits_of(compressor: "Compressor") -> CompressorTraits:
    """Returns the `CompressorTraits` interface of a compressor, with default answers if it has none."""
    return compressor if isinstance(compressor, CompressorTraits) else _DefaultTraits(compressor)


def keeps_momentum(compressor: "Compressor") -> bool:
    """Returns whether a compressor keeps the optimizer's momentum (`take_momentum`), of some parameters at least.

    Only what goes through the compressor gets that momentum: gradients that are averaged without it lack it.
    """
    return any(getattr(each, "momentum", 0.0) for each in traits_of(compressor).every())


@runtime_checkable
class Compressor(Protocol):
    """An approximate all-reduce over one group, with the state (residuals, momenta, factors) that it needs.

    One instance compresses all buckets of one model on one rank; state is keyed by parameter name and slice. State
    changes of a step are staged and take effect in `end_step`, so that a step with a non-finite gradient leaves the
    state as it was. `all_reduce` and `flush` may run in several threads at once, each on another shard; the other
    methods run while none of them does.

    `Stateful` (compressors/stateful.py) implements everything but `partition`, `wire_nbytes`, `all_reduce` and `flush`.
    """

    name: str
    """Name by which the user chooses it: `compressor="onebit"`."""

    def partition(self, layout: Layout, parts: int) -> tuple[int, ...]:
        """Cuts a bucket into shards, one for each rank of a node, where it suits the compressor.

        PowerSGD cuts between whole matrices, codecs at the bounds of their blocks.

        Args:
            layout: Layout of the bucket.
            parts: Number of shards.

        Returns:
            `parts + 1` ascending offsets from 0 to `layout.numel`; a shard may be empty, and their lengths may differ
            much.
        """

    def wire_nbytes(self, layout: Layout, group_size: int) -> int:
        """Returns the bytes that one rank of the group sends for a shard with this layout, headers not counted."""

    def all_reduce(self, shard: Tensor, layout: Layout, group: Member) -> Iterator[Request]:
        """Replaces `shard` by an approximation of its sum over the group; the same bits on all ranks.

        A generator: it yields the collectives that it needs and is resumed when they are done, so that several shards
        overlap. The number, kinds and sizes of the collectives depend on the layout, the step and the configuration,
        and on what earlier ones have given all ranks of the group alike, never on one rank's values: otherwise the
        ranks would disagree about what comes next.

        Args:
            shard: 1-D contiguous float32, changed in place.
            layout: Places of the parameters in `shard`.
            group: The ranks to sum over, and this rank among them.

        Yields:
            A collective, or several that may be in flight together.

        Raises:
            TypeError: `shard` is complex or of an integer dtype.
            ValueError: `shard` is not 1-D and contiguous.
        """

    def end_step(self, finite: bool | Tensor) -> None:
        """Ends a step, on all ranks alike.

        Args:
            finite: Whether the step's outputs were finite on all ranks: True commits the staged state, False drops it.
                A 0-dim bool tensor on the gradients' device decides there, by work on the current stream, and the host
                waits for nothing: if it is False, the stored state keeps its bits. What the host counts
                (`step`, the length of a dense start) counts the step as finite at once; see `retract_step`.

        Raises:
            TypeError: `finite` is a tensor, but no 0-dim bool one; nothing was changed.
        """

    def retract_step(self) -> None:
        """Takes the last step out of the count, because the tensor given to `end_step` turned out to be False.

        Called at most once for each such `end_step`, before the next one: at once, or after the all-reduces of the step
        that follows; on all ranks at the same point. What is stored does not change: the tensor has decided that.
        Called at once, it leaves what `end_step(False)` leaves. A step in between was issued with a count that is one
        too high on all ranks alike, so that a dense start may have ended one step early.
        """

    def flush(self, shard: Tensor, layout: Layout) -> None:
        """Adds this rank's residual to `shard`, before a dense all-reduce.

        The residual is set to zero when the step commits; momenta stay.

        Args:
            shard: 1-D float32, changed in place.
            layout: Places of the parameters in `shard`.
        """

    def state_runs(self) -> Iterator[StateRun]:
        """Yields the runs of elements that this rank keeps state of, without reading or copying any state.

        When shard boundaries change, state is moved to the ranks that own the elements from then on.
        """

    def export(self, layout: Layout, device: torch.device) -> Tensor:
        """Removes and returns the state of the elements of `layout`.

        Args:
            layout: Layout of a bucket or a part of one.
            device: Device of the result.

        Returns:
            2-D float32 (rows, layout.numel), zero for elements without state here; the number of rows depends on the
            configuration alone. The sum of all local ranks' exports of a bucket is the bucket's state, so that a sum
            moves state to new owners when shard boundaries have moved.
        """

    def adopt(self, layout: Layout, rows: Tensor) -> None:
        """Adds `rows` (2-D float32, as `export` returns them for this layout) to the state."""

    def bind_model(self, numels: Mapping[str, int]) -> None:
        """Sets the model, so that another model's state can be refused.

        Args:
            numels: Elements of each parameter, by name.
        """

    def rescale(self, factor: float | Tensor) -> None:
        """Multiplies residuals and momenta by `factor`, because the loss scale has changed.

        Args:
            factor: A number, or a 0-dim float32 or float64 tensor on the gradients' device, for which the host does not
                wait. It is rounded to float32; a power of two changes no mantissa.

        Raises:
            TypeError: `factor` is a tensor, but no 0-dim floating-point one; nothing was changed.
        """

    def state_dict(self) -> StateDict:
        """Returns a copy of this rank's committed state, keyed by parameter name and slice."""

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Restores `state_dict()`'s result.

        Raises:
            ValueError: The state is of another compressor or another model, or is damaged; nothing was changed.
        """


def check_finite(finite: bool | Tensor) -> None:
    """Refuses a value of `finite` that `Compressor.end_step` does not accept.

    Raises:
        TypeError: `finite` is a tensor, but no 0-dim bool one.
    """
    if isinstance(finite, Tensor) and (finite.dim() or finite.dtype != torch.bool):
        raise TypeError(
            f"`finite` is a tensor of shape {tuple(finite.shape)} and {finite.dtype}; wanted a bool, or a 0-dim "
            "torch.bool tensor: reduce it with .all()"
        )


def check_factor(factor: float | Tensor) -> None:
    """Refuses a value of `factor` that `Compressor.rescale` does not accept.

    Raises:
        TypeError: `factor` is a tensor, but no 0-dim float32 or float64 one.
    """
    if isinstance(factor, Tensor) and (factor.dim() or factor.dtype not in (torch.float32, torch.float64)):
        raise TypeError(
            f"`factor` is a tensor of shape {tuple(factor.shape)} and {factor.dtype}; wanted a number, or a 0-dim "
            "float32 or float64 tensor"
        )


def refuse_capture(name: str) -> None:
    """Refuses to record a compressor's step into a CUDA graph; for CUDA gradients, before anything is changed.

    Which buffers hold the state, how many steps there were and whether the start is dense is decided on the host: a
    replayed graph would repeat the captured step's decisions.

    Args:
        name: Name of the compressor, for the message.

    Raises:
        RuntimeError: The current stream is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"a CUDA graph is being captured, and compressor {name!r} decides on the host which of its buffers a step "
            'reads and writes: run the backward pass outside the capture, or train with compressor="none"'
        )


def check_gradient(flat: Tensor) -> None:
    """Refuses a tensor that no compressor can compress.

    Raises:
        TypeError: `flat` is complex or of an integer dtype.
        ValueError: `flat` is not 1-D and contiguous.
    """
    if not flat.is_floating_point():
        raise TypeError(
            f"`flat` has dtype {flat.dtype}; compression needs a real floating-point gradient: "
            'use compressor="none" for this parameter (see `rules`)'
        )
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(
            f"`flat` has shape {tuple(flat.shape)}; wanted a contiguous 1-D tensor: pass tensor.contiguous().view(-1)"
        )
