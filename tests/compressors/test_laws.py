"""Laws that hold for every compressor: nothing is lost, all ranks agree, the wire is as long as promised.

Ranks are threads of one process.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Layout
from gradwire.compressors.composite import Composite
from gradwire.compressors.optim.peers import run_requests
from gradwire.compressors.registry import BUILT_IN, Option, make, options_of
from gradwire.compressors.stateful import Stateful
from support.threads import ThreadGroup, take_turns

CASES: dict[str, tuple[str, dict[str, Option]]] = {
    "none": ("none", {}),
    "fp16": ("fp16", {"residual": True}),
    "bf16": ("bf16", {"residual": True}),
    "int8": ("int8", {"warmup_steps": 1}),
    "int8-random": ("int8", {"stochastic": True}),
    "int4": ("int4", {}),
    "waterfill5": ("waterfill5", {}),
    "waterfill4": ("waterfill4", {"warmup_steps": 1}),
    "onebit": ("onebit", {"momentum": 0.0, "warmup_steps": 2}),
    "onebit-long-start": ("onebit", {"momentum": 0.0, "warmup_steps": 4}),
    "onebit-return8": ("onebit", {"momentum": 0.0, "warmup_steps": 0, "return_bits": 8}),
    "onebit-return16": ("onebit", {"momentum": 0.0, "warmup_steps": 0, "return_bits": 16}),
    "dgc": ("dgc", {"momentum": 0.0, "density": 0.01, "warmup_steps": 4}),
    "dgc-half": ("dgc", {"momentum": 0.0, "density": 0.02, "warmup_steps": 0, "value_dtype": "float16"}),
    "powersgd": ("powersgd", {"rank": 2, "warmup_steps": 1}),
    "powersgd-cast": ("powersgd", {"rank": 3, "warmup_steps": 0, "factor_dtype": "bfloat16"}),
    "powersgd+int8": ("powersgd+int8", {"rank": 2, "warmup_steps": 1, "stochastic": True}),
    "powersgd+waterfill5": ("powersgd+waterfill5", {"rank": 3, "warmup_steps": 0}),
    "dgc+int4": ("dgc+int4", {"momentum": 0.0, "density": 0.02, "warmup_steps": 0}),
    "dgc+waterfill2": ("dgc+waterfill2", {"momentum": 0.0, "density": 0.05, "warmup_steps": 0}),
    "dgc+onebit": ("dgc+onebit", {"momentum": 0.0, "density": 0.05, "warmup_steps": 0}),
}
"""Without momentum and with residuals: then outputs and residuals account for every gradient."""
PLAIN = {"momentum": 0.0, "residual": True, "warmup_steps": 1}
CASES |= {
    name: (name, {option: value for option, value in PLAIN.items() if option in options_of(name)})
    for name in BUILT_IN
    if name not in [case for case, _ in CASES.values()]
}

Maker = Callable[[], Compressor]


@pytest.fixture(params=CASES)
def maker(request: pytest.FixtureRequest) -> Maker:
    name, options = CASES[request.param]
    return lambda: make(name, options)


@dataclass
class Run:
    """One rank's run."""

    compressor: Compressor
    outputs: list[Tensor] = field(default_factory=list)
    sent_nbytes: list[int] = field(default_factory=list)
    expected_nbytes: list[int] = field(default_factory=list)

    def step(self, gradient: Tensor, layout: Layout, group: ThreadGroup) -> None:
        shard, before = gradient.clone(), group.sent_nbytes
        self.expected_nbytes.append(self.compressor.wire_nbytes(layout, group.size))
        run_requests(self.compressor.all_reduce(shard, layout, group.member), group)
        self.sent_nbytes.append(group.sent_nbytes - before)
        self.outputs.append(shard)
        self.compressor.end_step(bool(shard.isfinite().all()))


def gradient_of(rank: int, step: int, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float32) * (1 + rank)


def run(maker: Maker, layout: Layout, size: int, steps: int, bad_step: int = -1) -> list[Run]:
    """Runs `steps` steps on `size` ranks; in `bad_step` the last rank has an inf."""
    groups = ThreadGroup.create(size)

    def body(rank: int) -> Run:
        ours = Run(maker())
        for step in range(steps):
            gradient = gradient_of(rank, step, layout.numel)
            if step == bad_step and rank == size - 1:
                gradient[layout.numel // 2] = float("inf")
            ours.step(gradient, layout, groups[rank])
        return ours

    return take_turns(size, body)


def residual_of(compressor: Compressor, layout: Layout) -> Tensor:
    held_back = torch.zeros(layout.numel)
    compressor.flush(held_back, layout)
    return held_back.double()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_nothing_is_lost_all_ranks_agree_and_the_wire_is_as_long_as_promised(
    maker: Maker, layout: Layout, size: int
) -> None:
    """Three laws of one training."""
    runs = run(maker, layout, size, steps=7)
    check_that_ranks_have_the_same_bits(runs)
    check_what_was_sent(runs)
    check_that_outputs_and_residuals_account_for_every_gradient(runs, layout)


def check_that_ranks_have_the_same_bits(runs: list[Run]) -> None:
    for other in runs[1:]:
        for ours, theirs in zip(runs[0].outputs, other.outputs, strict=True):
            assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def check_what_was_sent(runs: list[Run]) -> None:
    for ours in runs if len(runs) > 1 else ():
        warmup = getattr(ours.compressor, "warmup_steps", 0) if ours.compressor.name != "dgc" else 0
        for sent, expected in list(zip(ours.sent_nbytes, ours.expected_nbytes, strict=True))[warmup:]:
            # Each part of an uneven ring's share is rounded.
            assert abs(sent - expected) <= 2


def check_that_outputs_and_residuals_account_for_every_gradient(runs: list[Run], layout: Layout) -> None:
    arrived = torch.stack(runs[0].outputs).double().sum(0) + sum(residual_of(r.compressor, layout) for r in runs)
    steps = len(runs[0].outputs)
    sent = sum(gradient_of(rank, step, layout.numel).double() for rank in range(len(runs)) for step in range(steps))
    torch.testing.assert_close(arrived, sent, rtol=0.0, atol=2e-5)


def test_a_bad_step_leaves_the_state_as_it_was(maker: Maker, layout: Layout) -> None:
    """The output shows the bad gradient; the steps after it are those of a run in which it never happened."""
    bad = 2
    runs = run(maker, layout, 3, bad + 1, bad_step=bad)
    before = run(maker, layout, 3, bad)
    for ours, wanted in zip(runs, before, strict=True):
        assert not ours.outputs[bad].isfinite().all()
        state, old = ours.compressor.state_dict(), wanted.compressor.state_dict()
        assert set(old) <= set(state)
        for key, value in state.items():
            if isinstance(value, Tensor):  # what was never stored is zero
                assert torch.equal(value, torch.as_tensor(old.get(key, torch.zeros_like(value)))), key
            else:
                assert value == old[key]


def test_resume_is_no_interruption(maker: Maker, layout: Layout) -> None:
    size, half = 3, 3
    whole = run(maker, layout, size, 2 * half)
    first = run(maker, layout, size, half)
    groups = ThreadGroup.create(size)

    def resume(rank: int) -> Run:
        ours = Run(maker())
        ours.compressor.bind_model({item.name: torch.Size(item.shape).numel() for item in layout.slices})
        ours.compressor.load_state_dict(first[rank].compressor.state_dict())
        for step in range(half, 2 * half):
            ours.step(gradient_of(rank, step, layout.numel), layout, groups[rank])
        return ours

    for resumed, wanted in zip(take_turns(size, resume), whole, strict=True):
        for ours, theirs in zip(resumed.outputs, wanted.outputs[half:], strict=True):
            assert torch.equal(ours, theirs)


def shuffled(layout: Layout) -> tuple[Layout, Tensor]:
    """The same slices in another order, and where each element of the new tensor was."""
    order, start, slices = [3, 0, 4, 2, 1], 0, []
    for index in order:
        slices.append(replace(layout.slices[index], start=start))
        start += layout.slices[index].numel
    places = torch.cat([torch.arange(layout.slices[i].start, layout.slices[i].stop) for i in order])
    return Layout(tuple(slices)), places


def test_a_new_layout_keeps_everything(maker: Maker, layout: Layout) -> None:
    """After a bucket rebuild the residuals follow their parameters: outputs and residuals still account for all."""
    size, moved, places = 3, *shuffled(layout)
    groups = ThreadGroup.create(size)

    def body(rank: int) -> tuple[Tensor, Tensor]:
        ours, total = Run(maker()), torch.zeros(layout.numel, dtype=torch.float64)
        for step in range(6):
            gradient = gradient_of(rank, step, layout.numel)
            if step % 4 < 2:
                ours.step(gradient, layout, groups[rank])
                total += ours.outputs[-1].double()
            else:
                ours.step(gradient[places], moved, groups[rank])
                total[places] += ours.outputs[-1].double()
        return total, residual_of(ours.compressor, layout)

    results = take_turns(size, body)
    sent = sum(gradient_of(rank, step, layout.numel).double() for rank in range(size) for step in range(6))
    arrived = results[0][0] + sum(held_back for _, held_back in results)
    torch.testing.assert_close(arrived, sent, rtol=0.0, atol=2e-5)


def test_state_can_move_to_new_owners(maker: Maker, layout: Layout) -> None:
    """Two ranks of a node share a bucket; their boundary moves; the sum of their exports is the bucket's state."""
    size, steps = 2, 6
    groups = [ThreadGroup.create(size) for _ in range(2)]

    def body(rank: int) -> tuple[Tensor, Tensor]:
        owners, bounds = [maker(), maker()], (0, layout.slices[1].stop, layout.numel)
        total, held_back = torch.zeros(2, layout.numel, dtype=torch.float64)
        for step in range(steps):
            if step == 3:
                rows = torch.stack([owner.export(layout, torch.device("cpu")) for owner in owners]).sum(0)
                bounds = (0, layout.slices[2].stop, layout.numel)
                for owner, start, stop in zip(owners, bounds, bounds[1:], strict=False):
                    owner.adopt(layout.cut(start, stop), rows[:, start:stop])
            shard = gradient_of(rank, step, layout.numel)
            for owner, start, stop, local in zip(owners, bounds, bounds[1:], groups, strict=False):
                run_requests(
                    owner.all_reduce(shard[start:stop], layout.cut(start, stop), local[rank].member), local[rank]
                )
                owner.end_step(True)
            total += shard.double()
        for owner, start, stop in zip(owners, bounds, bounds[1:], strict=False):
            held_back[start:stop] = residual_of(owner, layout.cut(start, stop))
        return total, held_back

    results = take_turns(size, body)
    sent = sum(gradient_of(rank, step, layout.numel).double() for rank in range(size) for step in range(steps))
    arrived = results[0][0] + sum(held_back for _, held_back in results)
    torch.testing.assert_close(arrived, sent, rtol=0.0, atol=2e-5)


def test_what_is_held_back_has_a_norm(maker: Maker, layout: Layout) -> None:
    for ours in run(maker, layout, 2, 4):
        assert isinstance(ours.compressor, Stateful)
        norm = ours.compressor.residual_square() ** 0.5
        assert norm == pytest.approx(residual_of(ours.compressor, layout).norm().item(), rel=1e-5)


def test_a_new_loss_scale_rescales_what_is_held_back(maker: Maker, layout: Layout) -> None:
    for ours in run(maker, layout, 2, 4):
        before = residual_of(ours.compressor, layout)
        ours.compressor.end_step(False)  # the flush was only staged
        ours.compressor.rescale(0.5)
        assert torch.equal(residual_of(ours.compressor, layout), before * 0.5)


def test_several_compressors_account_for_every_gradient_too(layout: Layout) -> None:
    def maker() -> Compressor:
        return Composite("onebit", {"momentum": 0.0, "warmup_steps": 0})

    runs = run(maker, layout, 3, 5)
    arrived = torch.stack(runs[0].outputs).double().sum(0) + sum(residual_of(r.compressor, layout) for r in runs)
    sent = sum(gradient_of(rank, step, layout.numel).double() for rank in range(3) for step in range(5))
    torch.testing.assert_close(arrived, sent, rtol=0.0, atol=2e-5)
    bias = layout.slices[1]
    dense = sum(gradient_of(rank, 4, layout.numel)[bias.start : bias.stop] for rank in range(3))
    torch.testing.assert_close(runs[0].outputs[4][bias.start : bias.stop], dense)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_torchs_default_dtype_changes_no_bit(maker: Maker, layout: Layout, default: torch.dtype) -> None:
    """A script sets it for tensors of its own."""
    wanted = run(maker, layout, 2, 3)
    torch.set_default_dtype(default)
    try:
        found = run(maker, layout, 2, 3)
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.sent_nbytes == theirs.sent_nbytes
        assert all(map(torch.equal, ours.outputs, theirs.outputs))
