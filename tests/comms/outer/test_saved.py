"""What `Outer` takes from a state is of the shapes and dtypes that it saves."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from gradwire.comms.outer.saved import read


@pytest.mark.parametrize("kind", ["anchor", "momentum"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.float16, torch.complex64])
def test_an_anchor_or_a_momentum_of_another_dtype_is_refused(kind: str, dtype: torch.dtype) -> None:
    anchor = torch.zeros(3)
    fragment = SimpleNamespace(names=["w"], anchor=anchor, momentum=anchor, views=lambda flat: [flat])
    settings = SimpleNamespace(fragments=1, warmup_steps=0, warmup_every=1)
    state: dict[str, Tensor | float | int | str] = {"steps": 4, "begun": 2, **vars(settings)}
    state |= {"anchor|w": torch.ones(3), "momentum|w": torch.ones(3)}
    assert torch.equal(read(state, [fragment], settings).flats[0][0], torch.ones(3))  # type: ignore[list-item,arg-type]
    with pytest.raises(ValueError, match=rf"one of {dtype}, shape \(3,\) as the {kind} of `w`; wanted torch.float32"):
        read(state | {f"{kind}|w": torch.ones(3, dtype=dtype)}, [fragment], settings)  # type: ignore[list-item,arg-type]
