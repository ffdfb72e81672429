"""Whose gradients a collective carries: sizes laid along the order in which a model exchanges them."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradwire.comms.sharded.param_groups import root_sharded_modules
from gradwire.comms.watch import names
from gradwire.comms.watch.collective import IssuedCollective
from gradwire.comms.watch.names import Cycle, find_cycles, lay_along

CYCLE = Cycle("default", "all_reduce", (9, 4, 9), ("head", "middle", "first"))


class AtOnce:
    """In place of a thread: what it does, when it is started."""

    def __init__(self, name: str, target: Callable[[], None], **options: object) -> None:
        self.start = target

    def is_alive(self) -> bool:
        return False


def issued(*numels: int) -> list[IssuedCollective]:
    return [IssuedCollective(place, f"all_reduce of [{numel}] Float") for place, numel in enumerate(numels)]


def test_every_collective_of_a_step_has_its_names_from_wherever_the_last_ones_begin() -> None:
    for first in range(3):
        sizes, names = (CYCLE.numels * 3)[first:], (CYCLE.names * 3)[first:]
        assert [each.holds for each in lay_along(CYCLE, issued(*sizes))] == list(names)


def test_where_sizes_fit_in_two_ways_or_in_none_nothing_is_named() -> None:
    assert {each.holds for each in lay_along(CYCLE, issued(9))} == {None}
    assert {each.holds for each in lay_along(CYCLE, issued(9, 4, 9, 4))} == {None}
    alike = Cycle("default", "all_reduce", (9, 9), ("head", "first"))
    assert {each.holds for each in lay_along(alike, issued(9, 9, 9))} == {None}


def test_other_collectives_between_them_are_left_alone() -> None:
    some = [
        *issued(9, 4),
        IssuedCollective(2, "barrier"),
        IssuedCollective(3, "all_reduce of [2, 5] Float"),
        *issued(9),
    ]
    assert [each.holds for each in lay_along(CYCLE, some)] == ["head", "middle", None, None, "first"]


def test_a_model_that_is_just_being_made_has_no_buckets_yet() -> None:
    unmade = DistributedDataParallel.__new__(DistributedDataParallel)
    assert find_cycles([unmade]) == []
    torch.nn.Module.__init__(unmade)
    unmade.logger = None  # as DDP does before its first collective
    assert find_cycles([unmade]) == []


def test_the_buckets_of_a_ddp_model_are_found_in_the_order_in_which_they_are_reduced() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        model = DistributedDataParallel(inner, bucket_cap_mb=1e-4)
        assert not find_cycles([model])
        for _ in range(3):  # DDP says so in the third forward pass
            model(torch.ones(2, 8)).sum().backward()
        (cycle,) = find_cycles([model])
        assert (cycle.group, cycle.operation, cycle.numels) == ("default", "all_reduce", (72, 72))
        assert cycle.names == ("gradients of 1.bias to 1.weight", "gradients of 0.bias to 0.weight")
    finally:
        dist.destroy_process_group()


class Averaged(DistributedDataParallel):
    """A class of the user's own."""


def test_models_are_found_wherever_they_are_held_and_asked_again_once_they_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However late the watch begins; a second model that is made later is asked, too. No object is held."""
    monkeypatch.setattr(names, "BackgroundThread", AtOnce)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        found, ended = names.WatchedModels(), []
        for width, kind in ((4, DistributedDataParallel), (6, Averaged)):
            model = kind(torch.nn.Linear(width, width))
            ended.append(weakref.ref(model))
            found.search(3.0 * 4**width)
            numel = width * (width + 1)
            (unnamed,) = found.name("default", issued(numel))
            assert unnamed.holds is None
            for _ in range(3):
                model(torch.ones(2, width)).sum().backward()
            found.search(6.0 * 4**width - 1.0)
            assert found.name("default", issued(numel)) == [unnamed]
            found.search(6.0 * 4**width)
            (named,) = found.name("default", issued(numel))
            assert named.holds == "gradients of bias to weight"
        del model
        gc.collect()
        assert [each() for each in ended] == [None, None]
        sharded = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        mesh = init_device_mesh("cpu", (1,))
        for each in (*sharded, sharded):
            fully_shard(each, mesh=mesh)
        assert sharded not in root_sharded_modules()
        sharded(torch.ones(2, 3)).sum().backward()
        assert sharded in root_sharded_modules() and sharded[0] not in root_sharded_modules()
    finally:
        dist.destroy_process_group()
