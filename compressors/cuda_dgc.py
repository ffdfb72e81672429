"""Deep gradient compression on CUDA: the launches of csrc/cuda/dgc_step.cu and dgc_select.cu."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors import cuda_launch
from gradwire.compressors.cuda_launch import address, check_tensors
from gradwire.compressors.reference_dgc import DgcRule, DgcRun, DgcState

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


def _table(runs: Sequence[DgcRun], budget: int) -> tuple[list[int], int, int]:
    """Returns struct Parameter of csrc/cuda/marks.cuh for each run, and the tiles and CTAs of all of them.

    Args:
        runs: The parameters.
        budget: CTAs that the selection may start; each parameter has a share of them, and one at least.
    """
    words: list[int] = []
    counts = [-(-run.numel // _TILE) for run in runs]
    chosen = tile = block = 0
    for run, tiles in zip(runs, counts, strict=True):
        blocks = max(1, budget * tiles // sum(counts))
        words += [run.start, run.numel, chosen, run.count, *_sample_rank(run.numel, run.count), tile, block, blocks]
        chosen, tile, block = chosen + run.count, tile + tiles, block + blocks
    return words, tile, block


def _check_runs(runs: Sequence[DgcRun], numel: int) -> None:
    for run in runs:
        if not 1 <= run.count <= run.numel:
            raise ValueError(f"`indices` has {run.count} elements for a parameter; wanted between 1 and its {run.numel}")
        if run.start < 0 or run.start + run.numel > numel:
            raise ValueError(f"`runs` hold {run}; `gradient` has {numel} elements")
    if numel > _MOST_NUMEL:
        raise ValueError(f"`gradient` has {numel} elements; wanted at most {_MOST_NUMEL}, which an int32 index reaches")


def dgc_step(gradient: Tensor, state: DgcState, rule: DgcRule, indices: Tensor, values: Tensor) -> None:
    """See reference.dgc_step."""
    run = DgcRun(0, gradient.numel(), indices.numel())
    dgc_step_many(gradient, state, rule, None, [run], indices, values)


def dgc_step_many(
    gradient: Tensor, state: DgcState, rule: DgcRule, scales: Tensor | None, runs: Sequence[DgcRun], indices: Tensor,
    values: Tensor,
) -> None:
    """See reference.dgc_step_many; seven launches however many there are, none of which waits for the host."""
    if not runs:
        return
    device, numel, chosen = gradient.device, gradient.numel(), sum(run.count for run in runs)
    check_tensors(device, numel, torch.float32, gradient=gradient, velocity=state.velocity, total=state.total,
                  velocity_out=state.velocity_out, total_out=state.total_out)
    check_tensors(device, chosen, torch.int32, indices=indices)
    check_tensors(device, chosen, torch.float32, values=values)
    check_tensors(device, len(runs), torch.float32, scales=scales)
    _check_runs(runs, numel)
    budget = cuda_launch.blocks_for(device, 32 * -(-numel // _TILE), cuda_launch.RESIDENT_CTAS)  # each has its own counts
    words, tiles, blocks = _table(runs, budget)
    table, count = cuda_launch.upload(words, device).data_ptr(), len(runs)
    selections = cuda_launch.scratch(device, count * _SELECTION_NBYTES + tiles * (_TILE // 8 + 8)).data_ptr()
    marks = selections + count * _SELECTION_NBYTES
    counts = marks + tiles * _TILE // 8
    numbers = np.float32(rule.momentum), np.float32(rule.scale), address(scales), np.int32(rule.nesterov)
    inputs = gradient.data_ptr(), state.velocity.data_ptr(), state.total.data_ptr()
    velocity, total = state.velocity_out.data_ptr(), state.total_out.data_ptr()
    cuda_launch.launch("dgc_step", "dgc_sample", device, count, (table, *inputs, *numbers, selections), 1024)
    cuda_launch.launch("dgc_step", "dgc_advance", device, cuda_launch.blocks_for(device, 32 * _SHARES * tiles),
                       (table, count, tiles, *inputs, velocity, total, *numbers, marks, selections))
    for shift in (20, 10, 0):
        cuda_launch.launch("dgc_select", "dgc_radix", device, blocks,
                           (table, count, total, marks, np.int32(shift), selections))
    cuda_launch.launch("dgc_select", "dgc_count", device, blocks, (table, count, total, marks, counts, selections))
    cuda_launch.launch("dgc_select", "dgc_write", device, blocks,
                       (table, count, velocity, total, marks, counts, selections, indices.data_ptr(), values.data_ptr()))


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
