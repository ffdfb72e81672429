"""Deep gradient compression on CUDA: the launches of csrc/cuda/dgc_step.cu and dgc_select.cu."""

import math

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors import cuda_launch
from gradwire.compressors.cuda_launch import address, check_tensors
from gradwire.compressors.reference_dgc import DgcRule, DgcState

_TILE = 4096
"""kTile of csrc/cuda/marks.cuh: elements of one warp's work in the selection."""
_SHARES = 4
"""kShares of csrc/cuda/dgc_step.cu: warps that share a tile in the pass over memory."""
_SELECTION_NBYTES = 32 + 4 * 2048
"""struct Selection of csrc/cuda/radix.cuh."""
_SAMPLE_LINES, _LINE = 1024, 16
"""As csrc/cpu/dgc.cpp: 16384 elements are read and ordered in a twentieth of the pass at 25 MiB."""
_MOST_NUMEL = 2**31 - 1


def _sample_rank(numel: int, k: int) -> tuple[int, int]:
    """Returns the sample's lines, and which of its largest is the threshold; 0: there is none.

    Four standard deviations of the sample's count above k: a threshold that a few more than k elements reach.
    """
    lines = min(_SAMPLE_LINES, numel // _LINE)
    if not lines:
        return 0, 0
    expected = k * lines * _LINE / numel
    rank = int(expected + 4 * math.sqrt(expected) + 8)
    return lines, 0 if rank >= lines * _LINE else rank + 1


def dgc_step(gradient: Tensor, state: DgcState, rule: DgcRule, indices: Tensor, values: Tensor) -> None:
    """See reference.dgc_step; seven launches, none of which waits for the host."""
    device, numel, k = gradient.device, gradient.numel(), indices.numel()
    check_tensors(device, numel, torch.float32, gradient=gradient, velocity=state.velocity, total=state.total,
                  velocity_out=state.velocity_out, total_out=state.total_out)
    check_tensors(device, k, torch.int32, indices=indices)
    check_tensors(device, k, torch.float32, values=values)
    if not 1 <= k <= numel:
        raise ValueError(f"`indices` has {k} elements; wanted between 1 and the gradient's {numel}")
    if numel > _MOST_NUMEL:
        raise ValueError(f"`gradient` has {numel} elements; wanted at most {_MOST_NUMEL}, which an int32 index reaches")
    tiles = -(-numel // _TILE)
    selection = cuda_launch.scratch(device, _SELECTION_NBYTES + tiles * (_TILE // 8 + 8)).data_ptr()
    marks = selection + _SELECTION_NBYTES
    counts = marks + tiles * _TILE // 8
    lines, rank = _sample_rank(numel, k)
    blocks = cuda_launch.blocks_for(device, 32 * tiles, cuda_launch.RESIDENT_CTAS)  # each CTA has counts of its own
    on_device = rule.scale if isinstance(rule.scale, Tensor) else None
    check_tensors(device, 1, torch.float32, scale=on_device)
    numbers = (np.float32(rule.momentum), np.float32(1.0 if isinstance(rule.scale, Tensor) else rule.scale),
               address(on_device), np.int32(rule.nesterov))
    inputs = gradient.data_ptr(), state.velocity.data_ptr(), state.total.data_ptr()
    velocity, total = state.velocity_out.data_ptr(), state.total_out.data_ptr()
    cuda_launch.launch("dgc_step", "dgc_sample", device, 1, (*inputs, numel, *numbers, lines, rank, k, selection), 1024)
    cuda_launch.launch("dgc_step", "dgc_advance", device, cuda_launch.blocks_for(device, 32 * _SHARES * tiles),
                       (*inputs, velocity, total, numel, *numbers, marks, selection))
    for shift in (20, 10, 0):
        cuda_launch.launch("dgc_select", "dgc_radix", device, blocks,
                           (total, marks, numel, k, np.int32(shift), selection))
    cuda_launch.launch("dgc_select", "dgc_count", device, blocks, (total, marks, numel, k, counts, selection))
    cuda_launch.launch("dgc_select", "dgc_write", device, blocks,
                       (velocity, total, marks, numel, k, counts, selection, indices.data_ptr(), values.data_ptr()))


def scatter_add(indices: Tensor, values: Tensor, target: Tensor) -> None:
    """See reference.scatter_add.

    An index that occurs once gives the same bits every time; of one that occurs more than twice the order of the
    additions is open. An index outside `target` makes target[0] NaN: to raise would mean to wait for the device.
    """
    device, count = target.device, indices.numel()
    check_tensors(device, count, torch.int32, indices=indices)
    check_tensors(device, count, torch.float32, values=values)
    check_tensors(device, target.numel(), torch.float32, target=target)
    if not target.numel() and count:
        raise ValueError(f"`target` is empty; wanted a place for each of the {count} `indices`")
    cuda_launch.launch("dgc_select", "dgc_scatter_add", device, cuda_launch.blocks_for(device, count),
                       (indices.data_ptr(), values.data_ptr(), count, target.data_ptr(), target.numel()))
