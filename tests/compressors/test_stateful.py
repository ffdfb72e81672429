"""State of another compressor, another model, or damaged: refused whole, with the difference named."""

import io

import pytest
import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Layout, Member, StateDict, StateValue
from gradwire.compressors.composite import Composite
from gradwire.compressors.kernels import dispatch
from gradwire.compressors.kernels.cuda.require import CudaKernelsError
from gradwire.compressors.kernels.dispatch import KERNELS_ON
from gradwire.compressors.optim.peers import run_requests
from gradwire.compressors.registry import Option, make
from support.threads import ThreadGroup, take_turns

NUMELS = {"a.weight": 3500, "a.bias": 37, "conv.weight": 1728, "b.weight": 2400, "cut.weight": 900}


def used(compressor_name: str, layout: Layout) -> Compressor:
    """A compressor of a model with these parameters, after two steps on two ranks."""
    groups = ThreadGroup.create(2)
    options = {"warmup_steps": 0} if compressor_name in ("onebit", "powersgd", "dgc") else {}

    def body(rank: int) -> Compressor:
        made = make(compressor_name, options)
        made.bind_model(NUMELS)
        for step in range(2):
            shard = torch.randn(layout.numel, generator=torch.Generator().manual_seed(step * 2 + rank))
            run_requests(made.all_reduce(shard, layout, groups[rank].member), groups[rank])
            made.end_step(True)
        return made

    return take_turns(2, body)[0]


def refuses(compressor: Compressor, state: StateDict, match: str) -> None:
    """Checks that `state` is refused, and that nothing changed."""
    before = compressor.state_dict()
    with pytest.raises(ValueError, match=match):
        compressor.load_state_dict(state)
    assert_equal(compressor.state_dict(), before)


def assert_equal(ours: StateDict, wanted: StateDict) -> None:
    assert list(ours) == list(wanted)
    for key, value in ours.items():
        other = wanted[key]
        assert torch.equal(value, other) if isinstance(value, Tensor) and isinstance(other, Tensor) else value == other


@pytest.mark.parametrize("name", ["int4", "onebit", "dgc", "powersgd"])
def test_wrong_states_are_refused_whole(name: str, layout: Layout) -> None:
    compressor = used(name, layout)
    state = compressor.state_dict()
    key = next(key for key in state if key.endswith("b.weight") and not key.startswith("factor"))
    value = state[key]
    assert isinstance(value, Tensor)
    renamed: dict[str, StateValue] = {k.replace("b.weight", "z.weight"): v for k, v in state.items()}
    refuses(compressor, {**state, "compressor": "other"}, "belongs to compressor 'other'")
    refuses(compressor, {}, "belongs to compressor None")
    refuses(compressor, {**state, "step": -1}, "`state\\['step'\\]`")
    refuses(compressor, renamed, "no parameter 'z.weight'")
    refuses(compressor, {**state, key: torch.zeros(9999)}, "'b.weight' has 2400 elements")
    refuses(compressor, {**state, key: value.double()}, "no 1-D float32")
    refuses(compressor, {**state, key: 3}, "no 1-D float32")
    refuses(compressor, {**state, "what/0/b.weight": value}, "is no entry")
    field = key.split("/")[0]
    refuses(compressor, {**state, f"{field}/1/a.weight": torch.zeros(5)}, "overlaps")


def test_a_factor_of_another_rank_is_refused(layout: Layout) -> None:
    compressor = used("powersgd", layout)
    state = compressor.state_dict()
    key = next(key for key in state if key.startswith("factor/"))
    refuses(compressor, {**state, key: torch.zeros(9, 50)}, "rank 9")
    refuses(compressor, {**state, key: torch.zeros(9)}, "no 2-D float32")


@pytest.mark.parametrize("name", ["int4", "onebit", "dgc", "powersgd"])
def test_a_state_survives_a_safe_file(name: str, layout: Layout) -> None:
    compressor = used(name, layout)
    file = io.BytesIO()
    torch.save(compressor.state_dict(), file)
    file.seek(0)
    fresh = make(name)
    fresh.bind_model(NUMELS)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert_equal(fresh.state_dict(), compressor.state_dict())


def test_compressors_are_loaded_all_or_none(layout: Layout) -> None:
    composite = Composite("onebit", {"warmup_steps": 0})
    composite.bind_model(NUMELS)
    group = ThreadGroup.create(1)[0]
    run_requests(composite.all_reduce(torch.randn(layout.numel), layout, group.member), group)
    composite.end_step(True)
    state = composite.state_dict()
    last = next(key for key in reversed(state) if key.startswith("1|momentum"))
    refuses(composite, {**state, last: torch.zeros(5000), "0|step": 99}, "elements")
    refuses(composite, {**state, "7|step": 1}, "2 compressors")
    refuses(composite, make("onebit").state_dict(), "is no entry")
    fresh = Composite("onebit", {"warmup_steps": 0})
    fresh.load_state_dict(state)
    assert_equal(fresh.state_dict(), state)


class OnCuda(Tensor):
    """A tensor that says it is on a CUDA device."""

    is_cuda = True


@pytest.mark.parametrize("name", ["int4", "onebit", "dgc", "powersgd", "none", "bf16"])
def test_a_capture_is_refused_before_anything_changes(
    name: str, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient and the state stay as they were."""
    options: dict[str, dict[str, Option]] = {"none": {"momentum": 0.9}, "bf16": {"plain": True}}
    compressor = make(name, options.get(name))
    shard = torch.randn(layout.numel).as_subclass(OnCuda)
    before, state = shard.clone(), compressor.state_dict()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=f"captured, and compressor '{name}'"):
        next(compressor.all_reduce(shard, layout, Member(0, 2)))
    assert torch.equal(shard, before)
    assert_equal(compressor.state_dict(), state)


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "int4", "onebit", "dgc", "powersgd"])
def test_missing_kernels_are_found_missing_in_the_first_step(
    name: str, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after a dense start of a hundred steps; and the gradient and the state stay as they were."""

    def missing(device_type: str, index: int | None = None) -> None:
        raise CudaKernelsError(f"no CuPy for {device_type}")

    compressor = make(name)
    shard = torch.randn(layout.numel)
    before, state = shard.clone(), compressor.state_dict()
    monkeypatch.delitem(KERNELS_ON, "cpu", raising=False)
    monkeypatch.setattr(dispatch, "_choose", missing)
    for member in (Member(0, 2), Member(0, 1)):
        with pytest.raises(CudaKernelsError, match="no CuPy for cpu"):
            next(compressor.all_reduce(shard, layout, member))
    assert torch.equal(shard, before)
    assert_equal(compressor.state_dict(), state)
