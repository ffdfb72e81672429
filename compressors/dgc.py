"""Deep gradient compression: only the largest accumulated gradients are sent, a hundredth of them by default.

The optimizer's momentum moves in here (momentum correction), because a gradient that waits many steps would otherwise
miss it; the optimizer then runs without momentum.
Source: Lin et al., Deep Gradient Compression, ICLR 2018.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.compressors.base import (
    ALL_GATHER,
    ALL_REDUCE,
    Collective,
    Layout,
    Member,
    Slice,
    check_gradient,
    equal_bounds,
    refuse_capture,
)
from gradwire.compressors.codecs.base import PieceCodec
from gradwire.compressors.codecs.cast import CAST_DTYPES
from gradwire.compressors.kernels.dispatch import DGC_FAMILY, KERNELS_ON, prepare_kernels
from gradwire.compressors.kernels.reference import DgcRule, DgcRun, DgcState
from gradwire.compressors.stateful import Stateful
from gradwire.compressors.two_stage import SHARD_ALIGN, TwoStage

WARMUP_DENSITIES = (0.25, 0.0625, 0.015625, 0.004)
"""Source: Lin et al., ICLR 2018, section 3.3: four epochs of rising sparsity before the final one."""
INDEX_NBYTES = 4
"""Bytes of an index, an int32."""
MOST_NUMEL = 2**31 - 1
"""Elements of a shard whose places an int32 holds."""
WINDOW = 1 << 16
"""Elements whose places in a shard differ only in the lower two bytes."""


class DGC(Stateful):
    """The compressor "dgc".

    Args:
        inner: Compressor whose codec encodes the values: "dgc+int4". The compression error stays in the total. None
            sends the values in `value_dtype`.
        density: Share of each parameter's elements that is sent, 0 < density <= 1; at least one element is.
        momentum: Factor of the momentum correction; the optimizer then runs without momentum.
        nesterov: Nesterov's momentum instead of the heavy ball.
        clip_norm: Clips each parameter's local gradient to this norm times group size^-1/2 before it is accumulated;
            0 clips nothing.
        warmup_steps: Steps over which the density falls from 0.25 to `density`, in four equal stages.
        value_dtype: "float32", "float16" or "bfloat16": the dtype in which the values are sent; the rounding error
            stays in the total.
        mask_momentum: Sets the momentum of what is sent to zero (momentum factor masking), as the paper does: an
            element that is sent in every step then moves as without momentum. Measured: with it the CNN of
            docs/results/convergence.md ended further behind plain DDP, the more so the more was sent.

    Raises:
        ValueError: An option is out of range.
    """

    def __init__(
        self,
        inner: TwoStage | None = None,
        *,
        density: float = 0.01,
        momentum: float = 0.9,
        nesterov: bool = False,
        clip_norm: float = 0.0,
        warmup_steps: int = 100,
        value_dtype: str = "float32",
        mask_momentum: bool = False,
    ) -> None:
        _check_options(density, momentum, clip_norm, warmup_steps, value_dtype)
        super().__init__("dgc" if inner is None else f"dgc+{inner.name}", ["total", "velocity"])
        self.inner = inner
        self.density = density
        self.momentum = momentum
        self.nesterov = nesterov
        self.clip_norm = clip_norm
        self.warmup_steps = warmup_steps
        self.value_dtype = CAST_DTYPES.get(value_dtype, torch.float32)
        self.mask_momentum = mask_momentum

    @property
    def current_density(self) -> float:
        """Density of this step: the larger of the warm-up's and `density`; `density` after the warm-up."""
        if self.step >= self.warmup_steps:
            return self.density
        stage = self.step * len(WARMUP_DENSITIES) // self.warmup_steps
        return max(self.density, WARMUP_DENSITIES[stage])

    def prepare(self, device: torch.device) -> None:
        """Compiles and loads the kernels that select elements, and those of `inner`, for a device."""
        prepare_kernels(device, {DGC_FAMILY})
        if self.inner is not None:
            self.inner.prepare(device)

    def partition(self, layout: Layout, parts: int) -> tuple[int, ...]:
        """Cuts a bucket into `parts` shards of one length, a multiple of 1024 elements; the last takes the remainder.

        With fewer than `1024 * parts` elements that length is 0: the last shard has the whole bucket and all others are
        empty.

        Args:
            layout: Parameters of the bucket; only its number of elements counts.
            parts: Number of shards.

        Returns:
            `parts + 1` ascending offsets from 0 to `layout.numel`.
        """
        return equal_bounds(layout.numel, parts, SHARD_ALIGN)

    def wire_nbytes(self, layout: Layout, group_size: int) -> int:
        """Returns the bytes that one rank sends for a shard, at the density of the current step."""
        if self._is_sent_dense(group_size):
            return round(2 * (group_size - 1) / group_size * 4 * layout.numel)
        count = sum(self._count(item) for item in layout.slices)
        if self.inner is not None:
            return (group_size - 1) * (places_nbytes(count, layout.numel) + self.inner.codec.wire_nbytes(count))
        return (group_size - 1) * count * (INDEX_NBYTES + self.value_dtype.itemsize)

    def all_reduce(self, shard: Tensor, layout: Layout, group: Member) -> Iterator[Collective]:
        """Adds the gradient to the totals, and replaces `shard` by the sum of the largest totals of all ranks.

        Raises:
            ValueError: The shard has more elements than an index reaches; also in dense steps, so that no later step
                is the first to raise.
        """
        if shard.numel() > MOST_NUMEL and group.size > 1 and self.density < 1.0:
            raise ValueError(
                f"compressor {self.name!r} got {shard.numel()} elements at once; wanted at most {MOST_NUMEL}, which an "
                "int32 index reaches: set DDP's `bucket_cap_mb`, or the hook's `fusion`, below 8192 MiB, and give a "
                'larger parameter another compressor, rules=[{"pattern": NAME, "compressor": "int8"}]'
            )
        if shard.is_cuda:
            refuse_capture(self.name)
        check_gradient(shard)
        kernels = KERNELS_ON[shard.device.type]  # before anything changes: they may not be there
        if group.size == 1 or self.current_density == 1.0 or not shard.numel():
            self._everything(shard, layout, group.size)
            if group.size > 1 and shard.numel():
                yield Collective(ALL_REDUCE, (shard,))
            return
        indices, values = self._select(shard, layout, group.size)
        if self.inner is not None and not self._is_sent_dense(group.size):
            yield from self._exchange_encoded(shard, layout, group, indices, values, self.inner)
            return
        sent = self._rounded(layout, indices, values)
        if self._is_sent_dense(group.size):
            wide = sent.float()
            shard.zero_()
            kernels.scatter_add(indices, wide, shard)
            yield Collective(ALL_REDUCE, (shard,))
            return
        payload = torch.cat([indices.view(torch.uint8), sent.view(torch.uint8)])
        payloads = torch.empty(group.size, payload.numel(), dtype=torch.uint8, device=shard.device)
        yield Collective(ALL_GATHER, (payloads, payload))
        kernels.dgc_sum(payloads, indices.numel(), self.value_dtype, shard)

    def _exchange_encoded(
        self, shard: Tensor, layout: Layout, group: Member, indices: Tensor, values: Tensor, inner: TwoStage
    ) -> Iterator[Collective]:
        """Encodes the selected values, gathers all ranks' payloads, and replaces `shard` by their sum in rank order.

        Args:
            shard: 1-D float32, overwritten with the sum.
            layout: Layout of the shard.
            group: The ranks to sum over.
            indices: (k) int32, places of the selected elements, ascending.
            values: (k) float32, the selected totals.
            inner: Compressor whose codec encodes the values; the compression error goes into the staged total.
        """
        inner.step = self.step
        codec: PieceCodec = inner.codec_for(layout, group.rank)
        encoded = torch.empty(codec.wire_nbytes(values.numel()), dtype=torch.uint8, device=shard.device)
        rest = torch.empty_like(values)
        codec.encode_residual(values, None, rest, encoded)
        self.fields["total"].stage(layout, values.device)[indices.long()] = rest
        places = pack_places(indices, shard.numel())
        payload = torch.cat([places, encoded])
        payloads = torch.empty(group.size, payload.numel(), dtype=torch.uint8, device=shard.device)
        yield Collective(ALL_GATHER, (payloads, payload))
        shard.zero_()
        for row in payloads:
            codec.decode(row[places.numel() :].clone(), rest)
            theirs = unpack_places(row[: places.numel()], indices.numel(), shard.numel())
            KERNELS_ON[shard.device.type].scatter_add(theirs, rest, shard)

    def flush(self, shard: Tensor, layout: Layout) -> None:
        """Adds the totals, which are what this rank has not sent so far, to `shard`, before a dense all-reduce.

        They are set to zero when the step commits; the momentum stays.

        Args:
            shard: 1-D float32, changed in place.
            layout: Places of the parameters in `shard`.
        """
        self.fields["total"].pour(shard, layout)

    def _is_sent_dense(self, group_size: int) -> bool:
        """Returns whether a dense all-reduce costs less than exchanging places: from a density of 1 / group_size on."""
        return self.current_density * group_size >= 1.0

    def _count(self, item: Slice) -> int:
        """Returns how many elements of a slice are sent in this step, at least one."""
        return min(item.numel, max(1, math.ceil(self.current_density * item.numel)))

    def _state(self, layout: Layout, device: torch.device) -> DgcState:
        """Returns the stored state of a shard, and the staged buffers for the new one."""
        velocity, new_velocity = self.fields["velocity"].update(layout, device)
        total, new_total = self.fields["total"].update(layout, device)
        return DgcState(velocity, total, new_velocity, new_total)

    def _scales(self, shard: Tensor, layout: Layout, group_size: int) -> Tensor | None:
        """Returns the factor that clips each slice's gradient, (slices) float32; None if nothing is clipped.

        It is computed on the device; the host does not wait.
        """
        if not self.clip_norm:
            return None
        limit = self.clip_norm * group_size**-0.5
        norms = torch.stack(torch._foreach_norm([shard[item.start : item.stop] for item in layout.slices])).double()
        clipped = torch.full_like(norms, limit) / norms
        return torch.where((norms > limit) & (norms < math.inf), clipped, 1.0).float()

    def _select(self, shard: Tensor, layout: Layout, group_size: int) -> tuple[Tensor, Tensor]:
        """Updates the staged state, and moves the largest totals out of it.

        Returns:
            (k) int32, the places of the selected elements in the shard, ascending; and (k) float32, their totals.
        """
        state = self._state(layout, shard.device)
        runs = [DgcRun(item.start, item.numel, self._count(item)) for item in layout.slices]
        indices = torch.empty(sum(run.count for run in runs), dtype=torch.int32, device=shard.device)
        values = torch.empty(indices.numel(), dtype=torch.float32, device=shard.device)
        scales = self._scales(shard, layout, group_size)
        rule = DgcRule(self.momentum, self.nesterov)
        KERNELS_ON[shard.device.type].dgc_step_many(shard, state, rule, scales, runs, indices, values)
        if self.momentum and not self.mask_momentum:
            self._keep_momentum(shard, state, scales, runs, indices)
        return indices, values

    def _keep_momentum(
        self, shard: Tensor, state: DgcState, scales: Tensor | None, runs: list[DgcRun], indices: Tensor
    ) -> None:
        """Restores the staged momentum of the selected elements, which the kernel has set to zero.

        Args:
            shard: 1-D float32 gradient of the step.
            state: State of the shard; `velocity_out` is changed in place.
            scales: (runs) float32 factors that clip the gradients; None without clipping.
            runs: Parameters of the shard, and how many elements of each are selected.
            indices: (k) int32, places of the selected elements.
        """
        places = indices.long()
        gradient = shard[places]
        if scales is not None:
            gradient *= torch.cat([scale.expand(run.count) for scale, run in zip(scales, runs, strict=True)])
        velocity = state.velocity[places]
        if self.nesterov:
            velocity = velocity.add_(gradient).mul_(self.momentum)
        else:
            velocity = velocity.mul_(self.momentum).add_(gradient)
        state.velocity_out[places] = velocity

    def _rounded(self, layout: Layout, indices: Tensor, values: Tensor) -> Tensor:
        """Returns the values as they are sent, and puts the rounding error into the staged total."""
        sent = values.to(self.value_dtype)
        if self.value_dtype != torch.float32:
            staged = self.fields["total"].stage(layout, values.device)
            staged[indices.long()] = values - sent.float()
        return sent

    def _everything(self, shard: Tensor, layout: Layout, group_size: int) -> None:
        """Prepares a dense step: updates the momentum, moves the whole total into the shard, and leaves it zero."""
        state = self._state(layout, shard.device)
        scales = self._scales(shard, layout, group_size)
        for number, item in enumerate(layout.slices):
            run = slice(item.start, item.stop)
            g, u = shard[run] if scales is None else shard[run] * scales[number], state.velocity[run]
            new = self.momentum * (u + g) if self.nesterov else self.momentum * u + g
            state.velocity_out[run] = new
            shard[run] = state.total[run] + new + (g if self.nesterov else 0.0)
        state.total_out.zero_()


def places_nbytes(count: int, numel: int) -> int:
    """Returns the bytes that the places of selected elements take in a stack such as "dgc+int4"; see `pack_places`.

    They are two for each place and four for each window of 65,536 elements but the first; or four for each place, if
    that is less.

    Args:
        count: Number of selected elements.
        numel: Number of elements of the shard.
    """
    return min(4 * count, 2 * count + 4 * ((numel - 1) // WINDOW))


def pack_places(indices: Tensor, numel: int) -> Tensor:
    """Packs ascending places into fewer bytes; the host does not wait for the device.

    Args:
        indices: (k) int32, ascending, k >= 1, each below `numel`.
        numel: Elements of the shard.

    Returns:
        (places_nbytes(k, numel)) uint8: for each window of 65,536 elements but the first, how many places lie before
        it (int32), then the lower 16 bits of each place; or the places themselves.
    """
    count = indices.numel()
    if places_nbytes(count, numel) == 4 * count:
        return indices.view(torch.uint8)
    windows = torch.arange(1, 1 + (numel - 1) // WINDOW, dtype=torch.int32, device=indices.device)
    before = torch.searchsorted(indices, windows * WINDOW, out_int32=True)
    low = indices.to(torch.int16)  # keeps the lower half
    return torch.cat([before.view(torch.uint8), low.view(torch.uint8)])


def unpack_places(packed: Tensor, count: int, numel: int) -> Tensor:
    """Unpacks places: the inverse of `pack_places`.

    Args:
        packed: (places_nbytes(count, numel)) uint8; it may start at any byte.
        count: Number of places.
        numel: Number of elements of the shard.

    Returns:
        (count) int32, ascending.
    """
    if places_nbytes(count, numel) == 4 * count:
        return packed.clone().view(torch.int32)
    split = 4 * ((numel - 1) // WINDOW)
    before, low = packed[:split].clone().view(torch.int32), packed[split:].clone().view(torch.int16).int() & 0xFFFF
    order = torch.arange(count, dtype=torch.int32, device=packed.device)
    return low + torch.searchsorted(before, order, right=True, out_int32=True) * WINDOW


def _check_options(density: float, momentum: float, clip_norm: float, warmup_steps: int, value_dtype: str) -> None:
    if not 0.0 < density <= 1.0:
        raise ValueError(f"`density` is {density}; wanted 0 < density <= 1")
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"`momentum` is {momentum}; wanted 0 <= momentum < 1")
    if not clip_norm >= 0.0:
        raise ValueError(f"`clip_norm` is {clip_norm}; wanted a norm, or 0 to clip nothing")
    if warmup_steps < 0:
        raise ValueError(f"`warmup_steps` is {warmup_steps}; wanted 0 or more")
    if value_dtype not in ("float32", *CAST_DTYPES):
        raise ValueError(f"`value_dtype` is {value_dtype!r}; wanted float32, {' or '.join(CAST_DTYPES)}")
