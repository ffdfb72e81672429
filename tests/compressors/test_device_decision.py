"""Laws of a step that ends by a tensor's decision: the state is the one that the host's decision leaves.

Ranks are threads of one process.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.compressors.base import Collective, Compressor, Layout, Member, StateDict
from gradwire.compressors.composite import Composite
from gradwire.compressors.element_scale import ElementScale
from gradwire.compressors.optim.peers import run_requests
from gradwire.compressors.registry import Option, make
from gradwire.compressors.residual import ElementStore
from support.threads import ThreadGroup, take_turns

CASES: dict[str, tuple[str, dict[str, Option]]] = {
    "none": ("none", {"momentum": 0.9}),
    "fp16": ("fp16", {"residual": True, "warmup_steps": 2}),
    "int8-random": ("int8", {"stochastic": True}),
    "onebit": ("onebit", {"momentum": 0.9, "warmup_steps": 3}),
    "onebit-at-once": ("onebit", {"momentum": 0.0, "warmup_steps": 0, "return_bits": 8}),
    "onebit-one-dense": ("onebit", {"momentum": 0.0, "warmup_steps": 1}),
    "dgc": ("dgc", {"density": 0.01, "warmup_steps": 4}),
    "dgc-half": ("dgc", {"density": 0.02, "warmup_steps": 0, "value_dtype": "float16"}),
    "powersgd": ("powersgd", {"rank": 2, "warmup_steps": 2}),
    "powersgd-cast": ("powersgd", {"rank": 3, "warmup_steps": 0, "factor_dtype": "bfloat16"}),
    "powersgd-cold": ("powersgd", {"rank": 2, "warmup_steps": 0, "warm_start": False}),
    "composite": ("composite", {}),
}
BAD_STEPS = ((), (0,), (2,), (0, 1, 3, 4), (1, 2, 5))
"""Which of the steps are not finite: none, the first, the last of a dense start, several in a row."""
SIZE, STEPS = 3, 6


def made(case: str) -> Compressor:
    name, options = CASES[case]
    return Composite("onebit", {"warmup_steps": 2}) if name == "composite" else make(name, options)


def gradient_of(rank: int, step: int, layout: Layout, bad: bool) -> Tensor:
    gradient = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1000 * step + rank)) * (1 + rank)
    if bad and rank == SIZE - 1:
        gradient[[0, layout.numel // 2, layout.numel - 1]] = torch.tensor([float("inf"), float("nan"), -float("inf")])
    return gradient


def bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.int32)


def assert_same(ours: StateDict, wanted: StateDict, words: str) -> None:
    for key in {**ours, **wanted}:
        value, other = ours.get(key), wanted.get(key)
        if isinstance(value, Tensor):
            assert isinstance(other, Tensor) and torch.equal(bits(value), bits(other)), f"{key} {words}"
        else:
            assert value == other, f"{key} {words}"


@pytest.mark.parametrize("case", CASES)
def test_a_tensor_decides_as_the_host_does(case: str, layout: Layout) -> None:
    """Retracted at once, the whole state and every output are bit for bit those of a host's decisions."""

    def body(rank: int, bad_steps: Sequence[int], groups: list[ThreadGroup], on_device: bool) -> list[object]:
        ours, seen = made(case), list[object]()
        for step in range(STEPS):
            shard = gradient_of(rank, step, layout, step in bad_steps)
            run_requests(ours.all_reduce(shard, layout, groups[rank].member), groups[rank])
            finite = shard.isfinite().all()
            assert bool(finite) == (step not in bad_steps)
            ours.end_step(finite if on_device else bool(finite))
            if on_device and not finite:
                ours.retract_step()
            seen += [shard, ours.state_dict()]
        return seen

    for bad_steps in BAD_STEPS:
        groups = [ThreadGroup.create(SIZE) for _ in range(2)]
        ours = take_turns(SIZE, lambda rank: body(rank, bad_steps, groups[0], on_device=True))  # noqa: B023
        wanted = take_turns(SIZE, lambda rank: body(rank, bad_steps, groups[1], on_device=False))  # noqa: B023
        for rank in range(SIZE):
            for number, (one, other) in enumerate(zip(ours[rank], wanted[rank], strict=True)):
                words = f"of rank {rank} after step {number // 2} with {bad_steps} not finite"
                if isinstance(one, Tensor) and isinstance(other, Tensor):
                    finite = other.isfinite()
                    assert torch.equal(one.isfinite(), finite), words
                    assert torch.equal(bits(one[finite]), bits(other[finite])), words
                elif isinstance(one, dict) and isinstance(other, dict):
                    assert_same(one, other, words)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("none", "composite", "onebit", "dgc")])
def test_a_step_retracted_late_loses_no_other_gradient(case: str, layout: Layout) -> None:
    """The count is put back one step late: outputs and residuals still account for every finite step's gradient.

    All ranks end with the same bits, and with the count of the finite steps.
    """

    def body(rank: int, bad_steps: Sequence[int], groups: list[ThreadGroup]) -> tuple[Tensor, Tensor, int]:
        name, options = CASES[case]
        ours = make(name, {**options, **({"momentum": 0.0} if "momentum" in options or name == "dgc" else {})})
        arrived, last = torch.zeros(layout.numel, dtype=torch.float64), torch.tensor(True)
        for step in range(STEPS + 1):
            shard = gradient_of(rank, step, layout, step in bad_steps)
            run_requests(ours.all_reduce(shard, layout, groups[rank].member), groups[rank])
            if not last:
                ours.retract_step()
            last = shard.isfinite().all()
            ours.end_step(last)
            arrived += shard.double() if last else 0.0
        residual, count = torch.zeros(layout.numel), ours.state_dict()["step"]
        ours.flush(residual, layout)
        assert isinstance(count, int)
        return arrived, residual.double(), count

    for bad_steps in BAD_STEPS:
        groups = ThreadGroup.create(SIZE)
        ends = take_turns(SIZE, lambda rank: body(rank, bad_steps, groups))  # noqa: B023
        sent = sum(
            gradient_of(rank, step, layout, False).double()
            for rank in range(SIZE)
            for step in range(STEPS + 1)
            if step not in bad_steps
        )
        torch.testing.assert_close(ends[0][0] + sum(residual for _, residual, _ in ends), sent, rtol=0.0, atol=2e-5)
        assert all(torch.equal(arrived, ends[0][0]) for arrived, _, _ in ends)
        assert {count for _, _, count in ends} == {STEPS + 1 - len(bad_steps)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensor_rescales_as_a_number_does(case: str, dtype: torch.dtype, layout: Layout) -> None:
    groups = [ThreadGroup.create(1) for _ in range(2)]

    def after(factors: Sequence[float | Tensor], group: ThreadGroup) -> StateDict:
        ours = made(case)
        for step, factor in enumerate(factors):
            shard = gradient_of(0, step, layout, False)
            run_requests(ours.all_reduce(shard, layout, group.member), group)
            ours.end_step(True)
            ours.rescale(factor)
        return ours.state_dict()

    numbers = (0.5, 2.0**40, 2.0**-17, 3.0)
    ours = after([torch.tensor(each, dtype=dtype) for each in numbers], groups[0][0])
    assert_same(ours, after(numbers, groups[1][0]), "")


def test_scales_come_back_only_where_they_were_not_used(layout: Layout) -> None:
    """Another rank's step may have run with them: then they stay, and are made no second time."""
    left, right = layout.cut(0, 3537), layout.cut(3537, layout.numel)
    scale, cpu = ElementScale(), torch.device("cpu")
    for part in (left, right):
        scale.observe(part, torch.randn(part.numel, generator=torch.Generator().manual_seed(part.numel)))
    scale.commit()
    sums = {part: scale.read(part, cpu).clone() for part in (left, right)}
    scale.freeze(revocable=True)
    scales = scale.scales(left, cpu).clone()
    scale.revoke()
    assert torch.equal(scale.read(left, cpu), scales)
    assert torch.equal(scale.read(right, cpu), sums[right])
    scale.observe(left, torch.ones(left.numel))  # sums no more
    scale.commit()
    scale.freeze()
    assert torch.equal(scale.scales(left, cpu), scales)
    assert not torch.equal(scale.scales(right, cpu), sums[right])


def test_a_select_changes_nothing_that_was_not_staged(layout: Layout) -> None:
    store, cpu = ElementStore(), torch.device("cpu")
    left, right = layout.cut(0, 100), layout.cut(100, 250)
    for part in (left, right):
        store.stage(part, cpu).fill_(1.0)
    store.commit()
    store.stage(left, cpu).fill_(float("nan"))
    store.select(torch.tensor(False))
    assert bool((store.read(left, cpu) == 1.0).all())
    store.commit()  # nothing is staged any more
    assert bool((store.read(left, cpu) == 1.0).all())
    store.stage(left, cpu).fill_(2.0)
    store.select(torch.tensor(True))
    assert bool((store.read(left, cpu) == 2.0).all()) and bool((store.read(right, cpu) == 1.0).all())


class NoWait(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is not annotated
    """Refuses what reads a tensor on the host: on CUDA it waits for the device."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_for_nothing(case: str, layout: Layout) -> None:
    ours, member = made(case), Member(0, 2)
    for step in range(5):
        shard, finite = gradient_of(0, step, layout, False), torch.tensor(step != 3)
        for request in ours.all_reduce(shard, layout, member):
            for collective in (request,) if isinstance(request, Collective) else request:
                collective.tensors[0].zero_()
        with NoWait():  # type: ignore[no-untyped-call]
            ours.end_step(finite)
            ours.rescale(torch.tensor(0.5))
            if step == 3:
                ours.retract_step()


@pytest.mark.parametrize("name", ["none", "onebit", "powersgd", "composite"])
def test_what_cannot_decide_is_refused(name: str) -> None:
    compressor = made(name)
    before = compressor.state_dict()
    for finite in (torch.tensor([True]), torch.tensor(1.0)):
        with pytest.raises(TypeError, match="`finite` is a tensor"):
            compressor.end_step(finite)
    for factor in (torch.tensor([2.0]), torch.tensor(2)):
        with pytest.raises(TypeError, match="`factor` is a tensor"):
            compressor.rescale(factor)
    assert compressor.state_dict() == before
