"""Laws of the compressor "auto": nothing is lost where a layer changes, all ranks agree, resume is no interruption."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradwire.compressors.adaptive import Adaptive, Measurable, check_auto, outstanding_share, parse_candidate
from gradwire.compressors.base import Collective, Layout, Request
from gradwire.compressors.optim.peers import carry_out
from gradwire.compressors.routed import Routed
from gradwire.compressors.rules import Rule
from support.layouts import layout_of_whole
from support.threads import ThreadGroup, take_turns

CANDIDATES = (
    "bf16(residual=True)",
    "int8",
    "int4",
    "powersgd(rank=2)",
    "dgc(density=0.05)",
    "powersgd+int8(rank=2)",
    "waterfill4",
)
SHAPES = {"embedding": (64, 96), "first": (40, 64), "bias": (40,), "second": (48, 64)}
STEPS = 9
CHOICES = {2: {"embedding": 4, "first": 5}, 4: {"embedding": 3, "first": 2, "second": 6}, 6: {"second": 1}}
"""Before the step of that number: parameter -> candidate; those left out become exact."""
CPU = torch.device("cpu")


def layout_of(names: tuple[str, ...] = tuple(SHAPES)) -> Layout:
    return layout_of_whole(SHAPES, names)


def make() -> Adaptive:
    made = Adaptive(0.5, {"candidates": CANDIDATES})
    made.bind_model({name: torch.Size(shape).numel() for name, shape in SHAPES.items()})
    return made


def gradient(rank: int, step: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank)) * (1 + rank)


Train = Callable[[int, ThreadGroup], tuple[list[Tensor], Adaptive]]


def train(rank: int, group: ThreadGroup, bad: int = -1, stop_at: int = -1) -> tuple[list[Tensor], Adaptive]:
    """All steps; in `bad` an inf; before `stop_at` the state goes through a dict into a new compressor."""
    layout, ours, outputs = layout_of(), make(), []
    for step in range(STEPS):
        if step == stop_at:
            state = ours.state_dict()
            ours = make()
            ours.load_state_dict(state)
        if step in CHOICES:
            ours.choose(CHOICES[step], CPU)
        for attempt in range(1 + (step == bad)):
            shard = gradient(rank, step, layout.numel)
            if step == bad and attempt == 0:
                shard[7] = float("inf")
            carry_out(ours.all_reduce(shard, layout, group.member), group)
            ours.end_step(bool(shard.isfinite().all()))
            if step == bad and attempt == 0:
                assert not shard.isfinite().all()
        outputs.append(shard)
    return outputs, ours


def on_ranks(size: int, **settings: int) -> list[tuple[list[Tensor], Adaptive]]:
    groups = ThreadGroup.create(size)
    return take_turns(size, lambda rank: train(rank, groups[rank], **settings))


def test_outputs_and_residuals_account_for_every_gradient_through_all_changes() -> None:
    size, layout = 3, layout_of()
    runs = on_ranks(size)
    held_back = torch.zeros(layout.numel, dtype=torch.float64)
    for _, compressor in runs:
        flushed = torch.zeros(layout.numel)
        compressor.flush(flushed, layout)
        held_back += flushed.double()
    assert held_back.abs().max() > 1e-3  # something is held back, or the law says nothing
    arrived = torch.stack(runs[0][0]).double().sum(0) + held_back
    sent = sum(gradient(rank, step, layout.numel).double() for rank in range(size) for step in range(STEPS))
    torch.testing.assert_close(arrived, sent, rtol=0.0, atol=2e-5)
    for outputs, _ in runs[1:]:
        assert all(
            torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(runs[0][0], outputs, strict=True)
        )


@pytest.mark.parametrize("settings", [{"bad": 2}, {"bad": 5}, {"stop_at": 2}, {"stop_at": 5}], ids=str)
def test_neither_an_inf_step_nor_a_resume_changes_a_bit(settings: dict[str, int]) -> None:
    """Also where it is the very step after a change, in which the old residual is added."""
    for (ours, _), (wanted, _) in zip(on_ranks(2, **settings), on_ranks(2), strict=True):
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(ours, wanted, strict=True))


def test_what_is_left_out_is_what_encoding_leaves_out() -> None:
    """One step without a residual before it: the residual's norm is the measured one, or less where it is estimated."""
    layout = layout_of(("embedding", "first"))
    for number, text in enumerate(CANDIDATES, 1):
        groups = ThreadGroup.create(2)

        def body(rank: int, number: int = number, groups: list[ThreadGroup] = groups) -> tuple[float, float]:
            ours, shard = make(), gradient(rank, 0, layout.numel)
            candidate = ours.candidates[number]
            assert isinstance(candidate, Measurable)
            wanted = sum(float(candidate.left_out(shard[i.start : i.stop], i)) for i in layout.slices)
            ours.choose({"embedding": number, "first": number}, CPU)
            ours.measuring = True
            carry_out(ours.all_reduce(shard, layout, groups[rank].member), groups[rank])
            ours.end_step(True)
            numbers = ours.collect()
            assert set(numbers) == {"embedding", "first"}
            assert sum(each.left_out[number] for each in numbers.values()) == pytest.approx(wanted, rel=1e-6)
            return wanted, sum(each.outstanding for each in numbers.values())

        found = take_turns(2, body)
        predicted, outstanding = (sum(column) for column in zip(*found, strict=True))
        # the owners' part comes on top; a cold start of one round leaves out more than the measured two
        assert 0.3 * outstanding < predicted < 1.3 * outstanding, (text, predicted, outstanding)


def test_exact_layers_of_16_bits_travel_in_16_bits_and_are_rounded_once() -> None:
    """But for the step after a change, which carries what was held back."""
    layout, size = layout_of(("embedding", "first")), 3
    groups, wire = ThreadGroup.create(size), [0, 0, 0]

    def gradient_of(rank: int, step: int) -> Tensor:
        return gradient(rank, step, layout.numel).bfloat16().float()

    def body(rank: int) -> list[Tensor]:
        ours, member, found = make(), replace(groups[rank].member, dtype=torch.bfloat16), []
        for step in range(5):
            if step == 1:
                ours.choose({"embedding": 2}, CPU)
            if step == 2:
                ours.choose({}, CPU)
            shard = gradient_of(rank, step)
            requests = ours.all_reduce(shard, layout, member)
            if step in (0, 2, 4):
                requests = counted(requests, step)
            carry_out(requests, groups[rank])
            ours.travelled([layout], True)
            ours.end_step(True)
            found.append(shard.bfloat16())
        return found

    def counted(requests: Iterator[Request], step: int) -> Iterator[Request]:
        for request in requests:
            for each in (request,) if isinstance(request, Collective) else request:
                wire[step // 2] += each.tensors[-1].nbytes
            yield request

    outputs = take_turns(size, body)
    for step in (0, 4):
        wanted = torch.stack([gradient_of(rank, step) for rank in range(size)]).sum(0).bfloat16()
        assert all(torch.equal(found[step], wanted) for found in outputs)
    sent = sum(gradient_of(rank, step).double() for rank in range(size) for step in (1, 2))
    arrived = outputs[0][1].double() + outputs[0][2].double()
    torch.testing.assert_close(arrived, sent, rtol=0.01, atol=0.05)  # two roundings to bfloat16, and nothing else
    part = 3072  # of each owner, aligned: all_to_all of all parts, all_gather of one
    assert wire[0] == wire[2] == size * 2 * (layout.numel + part)
    assert wire[1] == size * 4 * layout.numel


@pytest.mark.parametrize("late", [False, True])
def test_what_was_held_back_of_a_layer_that_comes_late_loses_no_bits_on_the_way(late: bool) -> None:
    """Its first step after the change is wide, whenever it is; on a device, the one in which that is known as well."""
    first, second, groups = layout_of(("first",)), layout_of(("second",)), ThreadGroup.create(2)

    def body(rank: int) -> tuple[Tensor, list[int]]:
        ours, member, arrived = make(), replace(groups[rank].member, dtype=torch.bfloat16), torch.zeros(())
        wire: list[int] = []
        for step in range(7):
            if step < 2:
                ours.choose({"first": 2, "second": 2} if step == 0 else {}, CPU)
            layouts = [first] if 1 <= step < 4 else [second] if step > 4 else [first, second]
            for layout in layouts:
                shard = (
                    gradient(rank, step, layout.numel).bfloat16().float() if step == 0 else torch.zeros(layout.numel)
                )
                requests = list_of(ours.all_reduce(shard, layout, member), wire if layout is second else [])
                carry_out(requests, groups[rank])
                arrived = arrived + shard.double() if layout is second else arrived
            good = torch.tensor(True) if late else True
            ours.travelled(layouts, good)
            ours.end_step(good)
            if step == 2:
                state = ours.state_dict()
                ours = make()
                ours.load_state_dict(state)
        return arrived, wire

    def list_of(requests: Iterator[Request], wire: list[int]) -> Iterator[Request]:
        for number, request in enumerate(requests):
            collectives = (request,) if isinstance(request, Collective) else request
            wire += [number * 10 + each.tensors[-1].element_size() for each in collectives]
            yield request

    (arrived, wire), (other, _) = take_turns(2, body)
    sent = sum(gradient(rank, 0, second.numel).bfloat16().double() for rank in range(2))
    assert torch.equal(arrived, other)
    torch.testing.assert_close(arrived, sent, rtol=0.0, atol=2e-6)
    narrow, wide = [1, 11], [4]  # two stages of bytes, or one sum of float32
    assert wire == [*narrow, *wide, *(wide if late else narrow), *narrow]


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.bfloat16, 1.0), (torch.float16, 1e-6), (torch.float16, 1e4)], ids=str
)
def test_an_average_of_16_bits_is_rounded_once_for_any_number_of_ranks(dtype: torch.dtype, size: float) -> None:
    """Also of values near the least that float16 holds, and where the sum is beyond the largest."""
    layout, groups = layout_of(("first",)), ThreadGroup.create(3)
    sent = [(gradient(0, rank, layout.numel) * size + 2 * size).to(dtype).float() for rank in range(3)]

    def body(rank: int) -> Tensor:
        shard = sent[rank] * (1 / 3)
        member = replace(groups[rank].member, dtype=dtype, scale=1 / 3)
        carry_out(make().all_reduce(shard, layout, member), groups[rank])
        return shard

    wanted = ((sent[0] + sent[1] + sent[2]) * (1 / 3)).to(dtype)
    assert wanted.isfinite().all() and all(torch.equal(found, wanted.float()) for found in take_turns(3, body))


def test_rules_keep_their_parameters() -> None:
    ours = Adaptive("int8", {}, (Rule(pattern="first", compressor="int4"), Rule(max_dim=1)))
    ours.choose({name: 1 for name in SHAPES}, CPU)
    names = [ours.routes[ours.route_of(layout_of(), index)].name for index in range(4)]
    assert names == ["bf16", "int4", "none", "bf16"]


def test_the_bound_of_what_stays_outstanding_holds() -> None:
    """A codec that leaves out a constant share: the residual grows to the bound and not beyond."""
    share, residual, g = 0.3, torch.zeros(100), torch.randn(100)
    for _ in range(200):
        residual = share * (g + residual)
    bound = outstanding_share(share**2 * float(g.square().sum()), float(g.square().sum()))
    assert float(residual.square().sum() / g.square().sum()) == pytest.approx(bound, rel=1e-4)
    assert outstanding_share(1.0, 1.0) == float("inf") and outstanding_share(0.0, 0.0) == 0.0


@pytest.mark.parametrize(
    ("options", "budget", "words"),
    [
        ({}, None, "names no budget"),
        ({}, 0.0, "between 0 and 1"),
        ({}, "none", 'compressor="none"'),
        ({}, "int9", "int9"),
        ({"rank": 4}, 0.1, "does not take"),
        ({"candidates": ("int8(4)",)}, 0.1, "options by name"),
        ({"candidates": ("int8(bits=4)",)}, 0.1, "does not take"),
        ({"plan_every": 1}, 0.1, "plan_every"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], budget: str | float | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_auto(options, budget)


def test_a_candidate_may_have_options() -> None:
    spec = parse_candidate(" dgc+int4(density=0.02) ")
    assert spec.name == "dgc+int4" and spec.options == {"warmup_steps": 0, "momentum": 0.0, "density": 0.02}


def test_a_state_of_another_compressor_is_refused_by_its_name() -> None:
    ours, int8 = make(), Routed("int8")
    with pytest.raises(ValueError, match="belongs to compressor 'int8', 'none', this one is 'auto'"):
        ours.load_state_dict(int8.state_dict())
    with pytest.raises(ValueError, match=r"belongs to compressor 'auto', this one is .* with 2 routes"):
        int8.load_state_dict(ours.state_dict())


def test_a_state_of_other_candidates_is_refused_and_changes_nothing() -> None:
    ours, other = make(), Adaptive(0.5, {"candidates": ("int8",)})
    ours.choose({"first": 2}, CPU)
    with pytest.raises(ValueError, match="candidates"):
        other.load_state_dict(ours.state_dict())
    assert other.candidate_of("first") == 0
