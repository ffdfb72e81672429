"""Deep gradient compression: only the largest accumulated gradients are sent, a thousandth of them by default.

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
from gradwire.compressors.cast import CAST_DTYPES
from gradwire.compressors.kernels.dispatch import KERNELS_ON
from gradwire.compressors.kernels.reference import DgcRule, DgcRun, DgcState
from gradwire.compressors.stateful import Stateful
from gradwire.compressors.two_stage import SHARD_ALIGN

WARMUP_DENSITIES = (0.25, 0.0625, 0.015625, 0.004)
"""Source: Lin et al., ICLR 2018, section 3.3: four epochs of rising sparsity before the final one."""
INDEX_NBYTES = 4
"""Of an int32."""


class DGC(Stateful):
    """The compressor "dgc".

    Args:
        density: Share of each parameter's elements that is sent, 0 < density <= 1; at least one element is.
        momentum: Of the momentum correction; the optimizer runs without.
        nesterov: Nesterov's momentum instead of the heavy ball.
        clip_norm: Clips each parameter's local gradient to this norm times group size^-1/2 before it is accumulated;
            0 clips nothing.
        warmup_steps: Steps over which the density falls from 0.25 to `density`, in four equal stages.
        value_dtype: "float32", "float16" or "bfloat16": the dtype in which the values are sent; the rounding error
            stays in the total.

    Raises:
        ValueError: An option is out of range.
    """

    def __init__(
        self,
        *,
        density: float = 0.001,
        momentum: float = 0.9,
        nesterov: bool = False,
        clip_norm: float = 0.0,
        warmup_steps: int = 100,
        value_dtype: str = "float32",
    ) -> None:
        _check_options(density, momentum, clip_norm, warmup_steps, value_dtype)
        super().__init__("dgc", ["total", "velocity"])
        self.density = density
        self.momentum = momentum
        self.nesterov = nesterov
        self.clip_norm = clip_norm
        self.warmup_steps = warmup_steps
        self.value_dtype = CAST_DTYPES.get(value_dtype, torch.float32)

    @property
    def current_density(self) -> float:
        """Density of this step: the warm-up's, where it is higher, then `density`."""
        if self.step >= self.warmup_steps:
            return self.density
        stage = self.step * len(WARMUP_DENSITIES) // self.warmup_steps
        return max(self.density, WARMUP_DENSITIES[stage])

    def partition(self, layout: Layout, parts: int) -> tuple[int, ...]:
        """See `Compressor.partition`."""
        return equal_bounds(layout.numel, parts, SHARD_ALIGN)

    def wire_nbytes(self, layout: Layout, group_size: int) -> int:
        """See `Compressor.wire_nbytes`; of the current step's density."""
        if self._is_sent_dense(group_size):
            return round(2 * (group_size - 1) / group_size * 4 * layout.numel)
        count = sum(self._count(item) for item in layout.slices)
        return (group_size - 1) * count * (INDEX_NBYTES + self.value_dtype.itemsize)

    def all_reduce(self, shard: Tensor, layout: Layout, group: Member) -> Iterator[Collective]:
        """See `Compressor.all_reduce`."""
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

    def flush(self, shard: Tensor, layout: Layout) -> None:
        """See `Compressor.flush`: the total is the residual."""
        total = self.fields["total"]
        if total.holds(layout):
            shard.add_(total.read(layout, shard.device))
            total.stage(layout, shard.device).zero_()

    def _is_sent_dense(self, group_size: int) -> bool:
        """Whether a sum of sparse tensors costs less as a dense one: from 1 / group_size of the elements on."""
        return self.current_density * group_size >= 1.0

    def _count(self, item: Slice) -> int:
        return min(item.numel, max(1, math.ceil(self.current_density * item.numel)))

    def _state(self, layout: Layout, device: torch.device) -> DgcState:
        velocity, new_velocity = self.fields["velocity"].update(layout, device)
        total, new_total = self.fields["total"].update(layout, device)
        return DgcState(velocity, total, new_velocity, new_total)

    def _scales(self, shard: Tensor, layout: Layout, group_size: int) -> Tensor | None:
        """Returns the factor that clips each slice's gradient, float32; computed on the device, without a wait."""
        if not self.clip_norm:
            return None
        limit = self.clip_norm * group_size**-0.5
        norms = torch.stack(torch._foreach_norm([shard[item.start : item.stop] for item in layout.slices])).double()
        clipped = torch.full_like(norms, limit) / norms
        return torch.where((norms > limit) & (norms < math.inf), clipped, 1.0).float()

    def _select(self, shard: Tensor, layout: Layout, group_size: int) -> tuple[Tensor, Tensor]:
        """Updates the staged state; returns the selected places within the shard (int32) and their totals."""
        state = self._state(layout, shard.device)
        runs = [DgcRun(item.start, item.numel, self._count(item)) for item in layout.slices]
        indices = torch.empty(sum(run.count for run in runs), dtype=torch.int32, device=shard.device)
        values = torch.empty(indices.numel(), device=shard.device)
        KERNELS_ON[shard.device.type].dgc_step_many(
            shard,
            state,
            DgcRule(self.momentum, self.nesterov),
            self._scales(shard, layout, group_size),
            runs,
            indices,
            values,
        )
        return indices, values

    def _rounded(self, layout: Layout, indices: Tensor, values: Tensor) -> Tensor:
        """Returns the values as they are sent, and puts the rounding error into the staged total."""
        sent = values.to(self.value_dtype)
        if self.value_dtype != torch.float32:
            staged = self.fields["total"].stage(layout, values.device)
            staged[indices.long()] = values - sent.float()
        return sent

    def _everything(self, shard: Tensor, layout: Layout, group_size: int) -> None:
        """Updates the momentum as usual, and replaces the shard by the whole total: nothing stays behind."""
        state = self._state(layout, shard.device)
        scales = self._scales(shard, layout, group_size)
        for number, item in enumerate(layout.slices):
            run = slice(item.start, item.stop)
            g, u = shard[run] if scales is None else shard[run] * scales[number], state.velocity[run]
            new = self.momentum * (u + g) if self.nesterov else self.momentum * u + g
            state.velocity_out[run] = new
            shard[run] = state.total[run] + new + (g if self.nesterov else 0.0)
        state.total_out.zero_()


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
