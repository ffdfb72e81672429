"""Law: memory that a store lets go of is noted as in use on the current stream first.

On CUDA a freed block belongs to the stream that allocated it at once, while the copy out of it is still queued on
another. Here the note is replaced by a recorder, and the storages that a store holds are compared before and after.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.compressors import element_scale, residual
from gradwire.compressors.base import Layout
from gradwire.compressors.element_scale import ElementScale
from gradwire.compressors.residual import ElementStore, Piece
from support.layouts import partitions

CPU = torch.device("cpu")


class Watch:
    """Takes the place of `keep_until_read`, and checks what a store lets go of."""

    def __init__(self, patch: pytest.MonkeyPatch, store: ElementStore) -> None:
        self._store = store
        self._kept: list[Tensor] = []
        for module in (residual, element_scale):
            patch.setattr(module, "keep_until_read", self._keep)

    def _keep(self, *values: Tensor | None) -> None:
        self._kept += [value for value in values if value is not None]

    def _held(self) -> dict[int, Tensor]:
        """What the store refers to, by the address of the storage; kept alive, so that no address is used twice."""
        store = self._store
        tensors = [tensor for shard in store._shards.values() for tensor in (shard.value, shard.spare)]
        tensors += [piece.value for piece in store._pieces]
        if isinstance(store, ElementScale):
            tensors += [tensor for pair in store._sums.values() for tensor in pair]
            tensors += [piece.value for pieces in store._summed_pieces or () for piece in pieces]
        return {each.untyped_storage().data_ptr(): each for each in tensors if each is not None and each.numel()}

    def check(self, action: Callable[[], object]) -> None:
        """Carries `action` out: all that is held before and not afterwards must have been noted meanwhile."""
        before, self._kept = self._held(), []
        action()
        noted = {value.untyped_storage().data_ptr() for value in self._kept}
        gone = set(before) - set(self._held())
        assert gone <= noted, f"{len(gone - noted)} of {len(before)} tensors were let go of without a note"


@given(
    st.lists(partitions(), min_size=2, max_size=4),
    st.lists(st.sampled_from(["read", "stage", "adopt", "export", "select", "commit", "replace"]), max_size=12),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_nothing_is_let_go_of_unnoted(history: list[list[Layout]], actions: list[str], scales: bool) -> None:
    store = ElementScale() if scales else ElementStore()
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch, store)
        for number, action in enumerate(actions):
            for layout in history[number % len(history)]:
                does: dict[str, Callable[[], object]] = {
                    "read": partial(store.read, layout, CPU),
                    "stage": partial(store.stage, layout, CPU),
                    "adopt": partial(store.adopt, layout, torch.ones(layout.numel)),
                    "export": partial(store.export, layout, CPU),
                    "select": partial(store.select, torch.tensor(True)),
                    "commit": store.commit,
                    "replace": partial(store.replace, [Piece("a", 0, torch.ones(3))]),
                }
                watch.check(does[action])
        if isinstance(store, ElementScale):
            watch.check(partial(store.freeze, revocable=True))
            for change in (store.revoke, store.freeze, store.confirm):
                watch.check(change)
