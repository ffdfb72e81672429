"""DGC's kernels in a few lines of torch; see compressors/reference.py."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DgcRule:
    """How a gradient enters DGC's state."""

    momentum: float
    """Factor of the momentum correction; 0 accumulates plain gradients."""
    nesterov: bool = False
    """u = m (u + g), v = v + u + g instead of u = m u + g, v = v + u."""
    scale: float | Tensor = 1.0
    """Multiplies the gradient first: local clipping. A float32 scalar on the gradient's device spares the host the wait."""


@dataclass(frozen=True, slots=True)
class DgcState:
    """1-D float32 tensors of one numel; the `_out` ones may be the same memory as the others."""

    velocity: Tensor
    """u: the momentum."""
    total: Tensor
    """v: what was not sent yet."""
    velocity_out: Tensor
    """Receives the new u, zero where selected (momentum factor masking)."""
    total_out: Tensor
    """Receives the new v, zero where selected."""


def dgc_step(gradient: Tensor, state: DgcState, rule: DgcRule, indices: Tensor, values: Tensor) -> None:
    """Updates momentum and total, and moves the k largest totals out of them.

    Args:
        gradient: 1-D float32.
        state: Read and written.
        rule: How the gradient enters.
        indices: (k) int32, receives the places of the k largest magnitudes, ascending; of equals the first ones, and
            inf and NaN count as larger than any number.
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


def scatter_add(indices: Tensor, values: Tensor, target: Tensor) -> None:
    """Adds `values` (k, float32) to `target` (1-D float32) at `indices` (k, int32), in their order."""
    target.index_put_((indices.long(),), values, accumulate=True)
