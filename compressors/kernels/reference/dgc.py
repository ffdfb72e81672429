"""Deep gradient compression: momentum correction, and the largest accumulated gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DgcRule:
    """Settings by which a gradient is added to DGC's state."""

    momentum: float
    """Factor of the momentum correction; 0 accumulates plain gradients."""
    nesterov: bool = False
    """u = m (u + g), v = v + u + g instead of u = m u + g, v = v + u."""
    scale: float = 1.0
    """Multiplies the gradient first: local clipping."""


@dataclass(frozen=True, slots=True)
class DgcState:
    """DGC's state before and after a step: 1-D float32, of one numel; `_out` tensors may be the others' memory."""

    velocity: Tensor
    """u: the momentum."""
    total: Tensor
    """v: the accumulated gradients that were not sent yet."""
    velocity_out: Tensor
    """Receives the new u, zero where selected (momentum factor masking)."""
    total_out: Tensor
    """Receives the new v, zero where selected."""


@dataclass(frozen=True, slots=True)
class DgcRun:
    """Place of a parameter in a shard, and the number of its elements that are selected."""

    start: int
    """Index of the parameter's first element in the shard."""
    numel: int
    """Number of the parameter's elements, at least 1."""
    count: int
    """Number of elements to select, 1 <= count <= numel."""


def dgc_step(gradient: Tensor, state: DgcState, rule: DgcRule, indices: Tensor, values: Tensor) -> None:
    """Updates momentum and total, and moves the k largest totals out of them.

    Args:
        gradient: (n) float32.
        state: State of the n elements; its `_out` tensors are overwritten.
        rule: Settings by which the gradient is added.
        indices: (k) int32, 1 <= k <= n, receives the places of the k largest magnitudes, ascending; of equals the first
            ones, and inf and NaN count as larger than any number.
        values: (k) float32, receives the totals there.

    Source: Lin et al., Deep Gradient Compression, ICLR 2018, algorithm 4 and sections 3.2, 3.3.
    """
    g = gradient * rule.scale
    if rule.nesterov:
        velocity = rule.momentum * (state.velocity + g)
        total = state.total + velocity + g
    else:
        velocity = rule.momentum * state.velocity + g
        total = state.total + velocity
    magnitude = total.view(torch.int32) & 0x7FFFFFFF
    order = torch.argsort(magnitude, descending=True, stable=True)
    places = order[: len(indices)].sort().values
    indices.copy_(places)
    values.copy_(total[places])
    total[places] = 0.0
    velocity[places] = 0.0
    state.velocity_out.copy_(velocity)
    state.total_out.copy_(total)


Step = Callable[[Tensor, DgcState, DgcRule, Tensor, Tensor], None]
"""`dgc_step` of one set of kernels."""


def step_each(
    step: Step,
    gradient: Tensor,
    state: DgcState,
    rule: DgcRule,
    scales: Tensor | None,
    runs: Sequence[DgcRun],
    indices: Tensor,
    values: Tensor,
) -> None:
    """Runs `step` on one parameter after the other; the other arguments are those of `dgc_step_many`."""
    first = 0
    for number, run in enumerate(runs):
        part, chosen = slice(run.start, run.start + run.numel), slice(first, first + run.count)
        own = DgcState(state.velocity[part], state.total[part], state.velocity_out[part], state.total_out[part])
        step(
            gradient[part],
            own,
            rule if scales is None else replace(rule, scale=float(scales[number])),
            indices[chosen],
            values[chosen],
        )
        indices[chosen] += run.start
        first += run.count


def dgc_step_many(
    gradient: Tensor,
    state: DgcState,
    rule: DgcRule,
    scales: Tensor | None,
    runs: Sequence[DgcRun],
    indices: Tensor,
    values: Tensor,
) -> None:
    """Runs `dgc_step` on every parameter of a shard, each with its own k.

    Args:
        gradient: (n) float32, the shard.
        state: State of the shard; its `_out` tensors are overwritten.
        rule: Settings by which the gradients are added.
        scales: (runs) float32 on the gradient's device, each parameter's factor in place of the rule's; or None.
        runs: The parameters, in the order of their places.
        indices: (sum of the counts) int32, receives places in the shard, one parameter's after the other's.
        values: (sum of the counts) float32, receives the totals there.
    """
    step_each(dgc_step, gradient, state, rule, scales, runs, indices, values)


ScatterAdd = Callable[[Tensor, Tensor, Tensor], None]
"""`scatter_add` of one set of kernels."""


def sum_each(add: ScatterAdd, payloads: Tensor, count: int, value_dtype: torch.dtype, target: Tensor) -> None:
    """Replaces `target` by the sum of payloads, each added by `add`; the other arguments are those of `dgc_sum`."""
    target.zero_()
    for row in payloads:
        indices, values = row[: 4 * count].clone(), row[4 * count : (4 + value_dtype.itemsize) * count].clone()
        add(indices.view(torch.int32), values.view(value_dtype).float(), target)


def dgc_sum(payloads: Tensor, count: int, value_dtype: torch.dtype, target: Tensor) -> None:
    """Replaces `target` by the sum of sparse payloads, in their order.

    Args:
        payloads: (workers, count * (4 + width of a value)) uint8: each row holds `count` int32 places in `target`,
            ascending, none twice, and then their values.
        count: Number of values in a payload.
        value_dtype: Dtype of the values: float32, float16 or bfloat16.
        target: 1-D float32, overwritten.
    """
    sum_each(scatter_add, payloads, count, value_dtype, target)


def scatter_add(indices: Tensor, values: Tensor, target: Tensor) -> None:
    """Adds `values` to `target` at `indices`, in their order.

    Args:
        indices: (k) int32, places in `target`; one may occur several times.
        values: (k) float32.
        target: 1-D float32, changed in place.
    """
    target.index_put_((indices.long(),), values, accumulate=True)
