"""Laws of the question whether state must move: answered from names and places alone, without touching a tensor."""

import copy
import pickle
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.comms.migration import is_with_owners, migrate
from gradwire.comms.transport.echo import EchoGroup
from gradwire.compressors.base import Compressor, Layout, even_bounds
from gradwire.compressors.composite import make_composite
from gradwire.compressors.optim.peers import run_requests
from support.layouts import layout_of_whole

SHAPES = {"a.weight": (64, 48), "a.bias": (64,), "b.weight": (48, 64), "c.weight": (40, 30)}


class Untouched(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is not annotated
    """Refuses every operation on a tensor."""

    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise AssertionError(f"{func} was called")


def layout_of(names: list[str]) -> Layout:
    return layout_of_whole(SHAPES, names)


def used(name: str, layouts: list[Layout]) -> Compressor:
    compressor = make_composite(name, {"warmup_steps": 0} if name in ("onebit", "dgc", "powersgd") else {})
    group = EchoGroup(2)
    for layout in layouts:
        shard = torch.randn(layout.numel, generator=torch.Generator().manual_seed(layout.numel))
        run_requests(compressor.all_reduce(shard, layout, group.member), group)
    compressor.end_step(True)
    return compressor


@pytest.mark.parametrize("name", ["int4", "onebit", "dgc", "powersgd"])
def test_what_is_held_is_what_is_saved(name: str) -> None:
    """Every run in the state dict is yielded, and no other; a factor as its whole parameter's."""
    compressor = used(name, [layout_of(list(SHAPES)).cut(0, 3136), layout_of(list(SHAPES)).cut(3136, 7408)])
    saved = set()
    for key, value in compressor.state_dict().items():
        field, _, rest = key.rpartition("|")[2].partition("/")
        start, _, parameter = rest.partition("/")
        if isinstance(value, Tensor):
            saved.add((rest, 0, None) if field == "factor" else (parameter, int(start), value.numel()))
    with Untouched():  # type: ignore[no-untyped-call]
        assert {(run.name, run.start, run.numel) for run in compressor.state_runs()} == saved
    assert any(numel is None for _, _, numel in saved) == (name == "powersgd")


@pytest.mark.parametrize("name", ["int4", "onebit", "dgc", "powersgd"])
def test_the_answer_costs_no_tensor(name: str) -> None:
    bucket = layout_of(list(SHAPES))
    bounds = make_composite(name).partition(bucket, 2)
    own, other = (bucket.cut(start, stop) for start, stop in pairwise(bounds))
    compressor = used(name, [own])
    with Untouched():  # type: ignore[no-untyped-call]
        assert is_with_owners(compressor.state_runs(), bucket, [own])
        assert not is_with_owners(compressor.state_runs(), bucket, [other])
        assert is_with_owners(compressor.state_runs(), bucket, [other, own])
        assert is_with_owners(compressor.state_runs(), layout_of([]), [])
        migrate(compressor, bucket, [(0, own.numel)], None, torch.device("cpu"))  # alone and settled


def test_equal_layouts_are_one_object() -> None:
    bucket = layout_of(list(SHAPES))
    assert layout_of(list(SHAPES)) is bucket and layout_of(["a.bias"]) is not bucket
    for copied in (pickle.loads(pickle.dumps(bucket)), copy.deepcopy(bucket), copy.copy(bucket)):
        assert copied is bucket
    for start, stop in pairwise(even_bounds(bucket.numel, 5, 16)):
        cut = bucket.cut(start, stop)
        assert cut is layout_of(list(SHAPES)).cut(start, stop)
        assert cut is Layout(tuple(replace(item) for item in cut.slices))
        assert cut.numel == stop - start
