"""Which rule decides, and what several compressors do to one bucket."""

from dataclasses import replace

import pytest
import torch

from gradwire.compressors.base import Layout, Slice
from gradwire.compressors.composite import Composite, make_composite
from gradwire.compressors.optim.peers import run_requests
from gradwire.compressors.rules import Rule, rules_from
from support.threads import ThreadGroup, take_turns


def item(name: str, *shape: int) -> Slice:
    return Slice(name, shape, 0, 0, torch.Size(shape).numel())


def test_conditions_hold_together() -> None:
    rule = Rule(pattern="*.embed.*", max_dim=2, max_numel=100)
    assert rule.matches(item("net.embed.weight", 10, 10))
    assert not rule.matches(item("net.embed.weight", 10, 11))
    assert not rule.matches(item("net.embed.weight", 1, 10, 10))
    assert not rule.matches(item("net.Embed.weight", 10, 10))


def test_a_shard_of_a_large_parameter_is_not_small() -> None:
    assert not Rule(max_numel=1023).matches(replace(item("w", 100, 100), numel=5))


def test_the_users_rules_come_first(layout: Layout) -> None:
    rules = rules_from([{"pattern": "b.*", "compressor": "int8"}, Rule(pattern="conv.*")])
    composite = Composite("onebit", {"warmup_steps": 0}, rules)
    numbers = [composite.choice_of(layout, index) for index in range(len(layout.slices))]
    assert [composite.choices[number].name for number in numbers] == ["onebit", "none", "none", "int8", "none"]


def test_an_unknown_field_of_a_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`rules\[1\]` has 'name'; a rule has pattern"):
        rules_from([{"pattern": "*"}, {"name": "x"}])
    with pytest.raises(ValueError, match="`compressor` is 'zip'"):
        make_composite("int8", {}, [{"pattern": "*", "compressor": "zip"}])


@pytest.mark.parametrize("name", ["onebit", "int4", "powersgd", "dgc"])
def test_dense_parameters_arrive_exactly(name: str, layout: Layout) -> None:
    """Also where the main compressor folds in momentum: a bias gets the same momentum, summed exactly."""
    options = {"warmup_steps": 0} if name != "int4" else {}
    size, groups, bias = 2, ThreadGroup.create(2), layout.slices[1]

    def body(rank: int) -> list[torch.Tensor]:
        composite, outputs = make_composite(name, options), []
        for step in range(3):
            shard = torch.randn(layout.numel, generator=torch.Generator().manual_seed(step * size + rank))
            run_requests(composite.all_reduce(shard, layout, groups[rank].member), groups[rank])
            composite.end_step(True)
            outputs.append(shard[bias.start : bias.stop].clone())
        return outputs

    outputs = take_turns(size, body)
    momentum = 0.9 if name in ("onebit", "dgc") else 0.0
    velocity = torch.zeros(2, bias.numel)
    for step in range(3):
        for rank in range(size):
            gradient = torch.randn(layout.numel, generator=torch.Generator().manual_seed(step * size + rank))
            velocity[rank] = momentum * velocity[rank] + gradient[bias.start : bias.stop]
        for rank in range(size):
            torch.testing.assert_close(outputs[rank][step], velocity.sum(0))


def test_one_run_is_no_copy(layout: Layout) -> None:
    composite = Composite("int4")
    order = sorted(range(len(layout.slices)), key=lambda index: composite.choice_of(layout, index))
    start, slices = 0, []
    for index in order:
        slices.append(replace(layout.slices[index], start=start))
        start += layout.slices[index].numel
    shard = torch.zeros(layout.numel)
    for _, selection in composite._split(Layout(tuple(slices))):
        assert selection.gather(shard).untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
