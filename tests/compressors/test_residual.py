"""Law: whatever the layouts were, every element finds its number again."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.compressors.base import Layout, Slice
from gradwire.compressors.residual import ElementStore
from support.layouts import NUMELS, layout_of, partitions

CPU = torch.device("cpu")


def number(item: Slice, offset: int) -> float:
    return 100.0 * (ord(item.name) - 96) + item.parameter_start + offset


@given(st.lists(partitions(), min_size=2, max_size=4))
@settings(max_examples=60, deadline=None)
def test_every_element_keeps_its_number(history: list[list[Layout]]) -> None:
    store = ElementStore()
    for shard in history[0]:
        staged = store.stage(shard, CPU)
        for item in shard.slices:
            for offset in range(item.numel):
                staged[item.start + offset] = number(item, offset)
    store.commit()
    for shards in history[1:]:
        for shard in shards:
            value = store.read(shard, CPU)
            for item in shard.slices:
                for offset in range(item.numel):
                    assert float(value[item.start + offset]) == number(item, offset)
    assert sum(piece.value.numel() for piece in store.pieces()) == sum(NUMELS.values())


def test_staged_values_wait_for_the_commit() -> None:
    store, shard = ElementStore(), layout_of([("a", 0, 7)])
    store.stage(shard, CPU).fill_(1.0)
    assert not store.read(shard, CPU).any()
    store.drop()
    store.commit()
    assert not store.read(shard, CPU).any()
    store.stage(shard, CPU).fill_(2.0)
    store.commit()
    assert torch.equal(store.read(shard, CPU), torch.full((7,), 2.0))


def test_exports_add_up_to_the_whole() -> None:
    whole, (left, right) = layout_of([("a", 0, 7)]), (layout_of([("a", 0, 3)]), layout_of([("a", 3, 4)]))
    stores = [ElementStore(), ElementStore()]
    for store, part, value in zip(stores, (left, right), (1.0, 2.0), strict=True):
        store.adopt(part, torch.full((part.numel,), value))
    total = stores[0].export(whole, CPU) + stores[1].export(whole, CPU)
    assert torch.equal(total, torch.tensor([1.0] * 3 + [2.0] * 4))
    assert not stores[0].holds(whole)
    assert not list(stores[1].pieces())


def test_adopting_twice_adds() -> None:
    store, part = ElementStore(), layout_of([("a", 2, 3)])
    store.adopt(part, torch.ones(3))
    store.adopt(part, torch.ones(3))
    assert torch.equal(store.read(part, CPU), torch.full((3,), 2.0))
    store.rescale(0.25)
    assert torch.equal(store.read(part, CPU), torch.full((3,), 0.5))


def test_what_lies_outside_a_part_is_seen() -> None:
    store, whole = ElementStore(), layout_of([("a", 0, 7), ("b", 0, 1)])
    store.adopt(layout_of([("a", 0, 3)]), torch.ones(3))
    assert store.covers(whole, layout_of([("a", 0, 4)]))
    assert not store.covers(whole, layout_of([("a", 1, 4)]))
    assert store.covers(layout_of([("b", 0, 1)]), layout_of([("a", 1, 4)]))
