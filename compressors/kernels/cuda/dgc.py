"""Deep gradient compression on CUDA: the launches of csrc/cuda/dgc_step.cu and dgc_select.cu."""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.cuda.launch import address, check_rows, check_tensors
from gradwire.compressors.kernels.reference import DgcRule, DgcRun, DgcState

_TILE = 4096
"""kTile of csrc/cuda/marks.cuh: elements of one warp's work in the selection."""
_SHARES = 4
"""kShares of csrc/cuda/dgc_step.cu: warps that share a tile in the pass over memory."""
_SELECTION_NBYTES = 32 + 4 * 2048
"""struct Selection of csrc/cuda/radix.cuh."""
_SAMPLE_LINES, _LINE = 1024, 16
"""As csrc/cpu/kernels/dgc.cpp: to read and order 16384 elements is 5 % of the pass over 25 MiB."""
_FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""dtype of the values -> its number in dgc_sum."""
_MOST_NUMEL = 2**31 - 1


def _sample_rank(numel: int, k: int) -> tuple[int, int]:
    """Returns how to estimate the k-th largest magnitude of `numel` elements from a sample of them.

    The sample has up to 1024 lines of 16 elements. Of its magnitudes, `expected = k * sample / numel` are expected
    among the k largest. The rank is `floor(expected + 4 * sqrt(expected) + 8) + 1`: so far below the expected one that
    mostly a few more than k elements reach the threshold, and hardly ever fewer.

    Args:
        numel: Number of elements.
        k: Number of elements to select.

    Returns:
        (Lines to sample; rank of the threshold among the sample's magnitudes in descending order, from 1). The rank is
        0, and no threshold is taken, if it would be larger than the sample, or if there are fewer than 16 elements to
        sample.
    """
    lines = min(_SAMPLE_LINES, numel // _LINE)
    if not lines:
        return 0, 0
    expected = k * lines * _LINE / numel
    rank = int(expected + 4 * math.sqrt(expected) + 8)
    return lines, 0 if rank >= lines * _LINE else rank + 1


@functools.lru_cache(maxsize=1024)
def _table(runs: tuple[DgcRun, ...], budget: int) -> tuple[tuple[int, ...], int, int]:
    """Returns the table of the selection's kernels.

    Args:
        runs: The parameters.
        budget: Number of CTAs to distribute over the parameters by their size; each gets at least one.

    Returns:
        The words of struct Parameter of csrc/cuda/marks.cuh for each run; the number of tiles and of CTAs in all.
    """
    words: list[int] = []
    counts = [-(-run.numel // _TILE) for run in runs]
    every, chosen, tile, block = sum(counts), 0, 0, 0
    for run, tiles in zip(runs, counts, strict=True):
        blocks = max(1, budget * tiles // every)
        words += [run.start, run.numel, chosen, run.count, *_sample_rank(run.numel, run.count), tile, block, blocks]
        chosen, tile, block = chosen + run.count, tile + tiles, block + blocks
    return tuple(words), tile, block


def _check_step(
    gradient: Tensor, state: DgcState, scales: Tensor | None, runs: Sequence[DgcRun], indices: Tensor, values: Tensor
) -> None:
    device, numel, chosen = gradient.device, gradient.numel(), sum(run.count for run in runs)
    check_tensors(
        device,
        numel,
        torch.float32,
        gradient=gradient,
        velocity=state.velocity,
        total=state.total,
        velocity_out=state.velocity_out,
        total_out=state.total_out,
    )
    check_tensors(device, chosen, torch.int32, indices=indices)
    check_tensors(device, chosen, torch.float32, values=values)
    check_tensors(device, len(runs), torch.float32, scales=scales)
    for run in runs:
        if not 1 <= run.count <= run.numel:
            raise ValueError(
                f"`indices` has {run.count} elements for a parameter; wanted between 1 and its {run.numel}"
            )
        if run.start < 0 or run.start + run.numel > numel:
            raise ValueError(f"`runs` hold {run}; `gradient` has {numel} elements")
    if numel > _MOST_NUMEL:
        raise ValueError(f"`gradient` has {numel} elements; wanted at most {_MOST_NUMEL}, which an int32 index reaches")


def dgc_step(gradient: Tensor, state: DgcState, rule: DgcRule, indices: Tensor, values: Tensor) -> None:
    """Updates DGC's momentum and total of one parameter, and moves its k largest totals into `values`.

    Args:
        gradient: (n) float32 on a CUDA device.
        state: Momentum and total, each (n) float32; its `_out` tensors are overwritten.
        rule: Factor of the momentum, and the scale of the gradient.
        indices: (k) int32, 1 <= k <= n, overwritten with the places of the selected elements, ascending.
        values: (k) float32, overwritten with the totals there.

    Raises:
        ValueError: A tensor has another device, dtype or numel, there are more `indices` than elements or none, or more
            than 2**31 - 1 elements.
    """
    run = DgcRun(0, gradient.numel(), indices.numel())
    dgc_step_many(gradient, state, rule, None, [run], indices, values)


def dgc_step_many(
    gradient: Tensor,
    state: DgcState,
    rule: DgcRule,
    scales: Tensor | None,
    runs: Sequence[DgcRun],
    indices: Tensor,
    values: Tensor,
) -> None:
    """Updates DGC's momentum and total of each parameter of a shard, and moves its k largest totals into `values`.

    Seven kernels are launched for all parameters together, on the current stream; the host does not wait for the
    device.

    Args:
        gradient: (n) float32 on a CUDA device, the shard.
        state: Momentum and total of the shard, each (n) float32; its `_out` tensors are overwritten.
        rule: Factor of the momentum, and the scale of all gradients.
        scales: (number of runs) float32 on the same device, a scale for each parameter in place of the rule's; None for
            none.
        runs: Place of each parameter in the shard and its k, in ascending order of places.
        indices: (sum of all k) int32, overwritten with the places in the shard of the selected elements, ascending.
        values: (sum of all k) float32, overwritten with the totals there.

    Raises:
        ValueError: A tensor has another device, dtype or numel, a run is outside the gradient, its k is not between 1
            and its number of elements, or the gradient has more than 2**31 - 1 elements.
    """
    if not runs:
        return
    _check_step(gradient, state, scales, runs, indices, values)
    device, count = gradient.device, len(runs)
    # Each CTA of the selection has counts of its own: not more of them than fit at a time.
    budget = cuda_launch.blocks_for(device, 32 * -(-gradient.numel() // _TILE), cuda_launch.RESIDENT_CTAS)
    words, tiles, blocks = _table(tuple(runs), budget)
    table = cuda_launch.upload(words, device)
    selections = cuda_launch.scratch(device, count * _SELECTION_NBYTES + tiles * (_TILE // 8 + 8)).data_ptr()
    marks = selections + count * _SELECTION_NBYTES
    counts = marks + tiles * _TILE // 8
    numbers = np.float32(rule.momentum), np.float32(rule.scale), address(scales), np.int32(rule.nesterov)
    inputs = gradient.data_ptr(), state.velocity.data_ptr(), state.total.data_ptr()
    velocity, total = state.velocity_out.data_ptr(), state.total_out.data_ptr()
    cuda_launch.launch("dgc_step", "dgc_sample", device, count, (table.data_ptr(), *inputs, *numbers, selections), 1024)
    cuda_launch.launch(
        "dgc_step",
        "dgc_advance",
        device,
        cuda_launch.blocks_for(device, 32 * _SHARES * tiles),
        (table.data_ptr(), count, tiles, *inputs, velocity, total, *numbers, marks, selections),
    )
    selecting: list[tuple[str, tuple[cuda_launch.Argument, ...]]] = [
        *(("dgc_radix", (total, marks, np.int32(shift), selections)) for shift in (20, 10, 0)),
        ("dgc_count", (total, marks, counts, selections)),
        ("dgc_write", (velocity, total, marks, counts, selections, indices.data_ptr(), values.data_ptr())),
    ]
    for kernel, arguments in selecting:
        cuda_launch.launch("dgc_select", kernel, device, blocks, (table.data_ptr(), count, *arguments))


def dgc_sum(payloads: Tensor, count: int, value_dtype: torch.dtype, target: Tensor) -> None:
    """Replaces `target` by the sum of sparse payloads; one launch, and the same bits every time.

    An index outside `target` makes target[0] NaN: raising an error would mean waiting for the device.

    Raises:
        ValueError: A tensor has another device, dtype or numel, `target` is empty, or `value_dtype` is no value's.
    """
    device = target.device
    if value_dtype not in _FORMATS:
        raise ValueError(f"`value_dtype` is {value_dtype}; wanted one of {', '.join(map(str, _FORMATS))}")
    check_tensors(device, target.numel(), torch.float32, target=target)
    check_rows(device, "payloads", payloads, count * (4 + value_dtype.itemsize))
    if not target.numel():
        raise ValueError(f"`target` is empty; wanted a place for each of the {count} indices of a payload")
    tiles = -(-target.numel() // _TILE)
    cuda_launch.launch(
        "dgc_select",
        "dgc_sum",
        device,
        cuda_launch.blocks_for(device, cuda_launch.THREADS * tiles),
        (
            payloads.data_ptr(),
            payloads.stride(0),
            len(payloads),
            count,
            np.int32(_FORMATS[value_dtype]),
            target.data_ptr(),
            target.numel(),
        ),
    )


def scatter_add(indices: Tensor, values: Tensor, target: Tensor) -> None:
    """Adds `values` to `target` at `indices`, in place.

    An index that occurs once gives the same bits every time; if one occurs more than twice, the order of its
    additions is unspecified. An index outside `target` makes target[0] NaN: raising an error would mean waiting for the
    device.

    Raises:
        ValueError: A tensor has another device, dtype or numel, or `target` is empty.
    """
    device, count = target.device, indices.numel()
    check_tensors(device, count, torch.int32, indices=indices)
    check_tensors(device, count, torch.float32, values=values)
    check_tensors(device, target.numel(), torch.float32, target=target)
    if not target.numel() and count:
        raise ValueError(f"`target` is empty; wanted a place for each of the {count} `indices`")
    cuda_launch.launch(
        "dgc_select",
        "dgc_scatter_add",
        device,
        cuda_launch.blocks_for(device, count),
        (indices.data_ptr(), values.data_ptr(), count, target.data_ptr(), target.numel()),
    )
