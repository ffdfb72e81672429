"""The trainings whose launches are looked at: each compressor with CUDA's own kernels, launched as on a GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed.tensor  # noqa: F401 - registers its operators once, before threads do

from fake_cuda.drive import OPTIONS, train

MORE: dict[str, dict[str, Any]] = {"waterfill4": {}}
COMPRESSORS = OPTIONS | MORE

ALIKE = {"one": (48, 64), "two": (48, 64), "three": (48, 64), "four": (48, 64)}
"""Buckets of one layout, whose tables have the same words."""


def job(compressor: str, buckets: Sequence[Sequence[Sequence[str]]], **more: Any) -> Callable[..., Any]:
    """A training of two nodes of two ranks, whose sums between nodes are compressed."""
    settings: dict[str, Any] = {
        "nodes": "aabb",
        "plan": {"name": "hierarchical", "chunks": 2},
        "compressor": compressor,
    }
    settings["compressor_options"] = COMPRESSORS[compressor]
    return train(buckets=buckets, **settings | more)


def alike(compressor: str) -> Callable[..., Any]:
    """Three buckets a step, of one layout."""
    return job(compressor, ((("one",), ("two",), ("three",)),) * 3, shapes=ALIKE)


def owned_by_some(compressor: str) -> Callable[..., Any]:
    """A rank shares a bucket's matrices with three others, and the next bucket's with one of them.

    So what it waits for in the second says nothing of what it has issued last for the first.
    """
    return job(
        compressor,
        ((("one", "two", "three"), ("four",)),) * 4,
        nodes="aaab",
        plan={"name": "hierarchical", "chunks": 1},
        shapes=ALIKE,
    )
