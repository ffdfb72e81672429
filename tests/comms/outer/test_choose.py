"""What `Outer` chooses for itself: a pure function with laws, alike on all ranks, kept in the saved state."""

import hashlib
import io
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradwire
from gradwire.comms.bootstrap.placement import INTER_NODE
from gradwire.comms.checkpoint import OUTER, pack, unpack
from gradwire.comms.communicator import Communicator
from gradwire.comms.links import quick_probe
from gradwire.comms.outer.fragments import OuterSettings
from gradwire.comms.outer.options import provisional
from gradwire.comms.outer.schedule_selection import (
    CHOSEN,
    FILL,
    LEAST_TURNS,
    MEASURED_STEPS,
    MOST_EVERY,
    OuterLink,
    choose,
    describe,
)
from gradwire.topology.cluster import Cluster, Level, Link
from support.processes import Processes

LINKS = st.builds(OuterLink, st.floats(0.0, 100.0), st.floats(0.0, 2.0))
STEPS = st.floats(1e-3, 5.0)
PARAMETERS = st.integers(1, 60)


def fits(link: OuterLink, step: float, every: int, fragments: int, delay: int) -> bool:
    """Whether an exchange is through in its delay, and the link is no more than half full."""
    through = math.ceil((link.wire_seconds / fragments + link.trip_seconds) / step) <= delay
    return through and link.wire_seconds <= FILL * every * step and (delay == 1 or LEAST_TURNS * delay <= every)


@given(LINKS, STEPS, PARAMETERS)
@settings(deadline=None, max_examples=20)
def test_the_smallest_every_that_the_link_carries_is_taken(link: OuterLink, step: float, parameters: int) -> None:
    every, fragments, delay = choose(link, step, parameters)
    OuterSettings(every=every, fragments=fragments, delay=delay)  # or it raises
    assert fragments <= parameters
    if every < MOST_EVERY:
        assert fits(link, step, every, fragments, delay)
        assert not any(
            fits(link, step, less, pieces, late)
            for less in range(1, min(every, 40))
            for pieces in range(1, min(less, parameters) + 1)
            for late in range(1, less // pieces + 1)
        )


@given(LINKS, STEPS, PARAMETERS, st.integers(1, 60), st.integers(1, 5), st.integers(0, 4))
@settings(deadline=None, max_examples=20)
def test_what_the_user_says_is_taken(
    link: OuterLink, step: float, parameters: int, every: int, fragments: int, delay: int
) -> None:
    fragments = min(fragments, parameters)
    every = max(every, fragments * max(delay, 1))
    said = {"every": every, "fragments": fragments, "delay": delay}
    for number in range(8):
        given = {name: said[name] for place, name in enumerate(CHOSEN) if number >> place & 1}
        provisional(given, lr=1.0)
        found = dict(zip(CHOSEN, choose(link, step, parameters, given), strict=True))
        OuterSettings(every=found["every"], fragments=found["fragments"], delay=found["delay"])
        assert found | given == found and found["fragments"] <= parameters


@given(LINKS, STEPS, PARAMETERS, st.floats(1.0, 50.0))
@settings(deadline=None, max_examples=20)
def test_a_slower_link_never_exchanges_more_often(link: OuterLink, step: float, parameters: int, times: float) -> None:
    slower = OuterLink(link.wire_seconds * times, link.trip_seconds * times)
    assert choose(slower, step, parameters)[0] >= choose(link, step, parameters)[0]


def test_it_takes_what_the_pages_have_measured() -> None:
    """Text on 10 Mbit/s, waterfill2, two workers: docs/results/outer.md has every 6 in thirds for steps of 40 ms."""
    link = OuterLink(131e3 * 8 / 10e6, 2e-3)
    assert choose(link, 0.0404, 30) == (6, 3, 1)
    far = OuterLink(131e3 * 8 / 10e6, 4 * 0.04)
    every, fragments, delay = choose(far, 0.0404, 30)
    assert fragments == LEAST_TURNS and delay > 1 and every == fragments * delay


@pytest.mark.parametrize(("workers", "times"), [(2, 1.0), (4, 1.5)])
def test_the_link_is_the_one_between_the_workers(workers: int, times: float) -> None:
    near, far = Link(alpha_seconds=1e-5, bytes_per_second=1e10), Link(alpha_seconds=0.02, bytes_per_second=1e6)
    cluster = Cluster(
        tuple((rank // 2,) for rank in range(2 * workers)), (Level("intra_node", near), Level("inter_node", far))
    )
    assert OuterLink.of(cluster, 1e6) == OuterLink(times, 0.08)


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 8))


def start(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, gradwire.Outer]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, gradwire.Outer(model, optimizer, nic_bytes_per_second=2e4, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(8, 24, generator=generator)).square().mean().backward()
        optimizer.step()


def digest(model: nn.Module) -> str:
    flat = torch.cat([each.detach().flatten() for each in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def copy(state: Mapping[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


def use(rank: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    said: dict[str, Any] = {}
    model, optimizer, outer = start()
    said["compressor"] = outer.config.compressor
    early = copy(outer.state_dict())
    train(model, optimizer, range(MEASURED_STEPS - 1))
    said["apart"] = digest(model)
    said["before"] = outer.report().exchanges
    train(model, optimizer, range(MEASURED_STEPS - 1, MEASURED_STEPS + 2))
    chosen = outer.settings
    said["chosen"] = (chosen.every, chosen.fragments, chosen.delay)
    said["report"] = outer.report().full()
    lines = str(outer.report()).splitlines()
    assert len(lines) <= 5 and max(map(len, lines)) <= 80, "\n".join(lines)
    saved = [copy(each.state_dict()) for each in (outer, model, optimizer)]
    train(model, optimizer, range(MEASURED_STEPS + 2, MEASURED_STEPS + 12))
    after = digest(model)
    said["exchanges"] = outer.report().exchanges
    outer.synchronize()
    said["together"] = digest(model)
    with pytest.raises(ValueError, match=r"was saved before settings were chosen|wanted the same: make Outer with"):
        outer.load_state_dict(early)
    outer.close()

    model, optimizer, outer = start()
    damaged = pack((unpack(saved[0], rank, 2) or {}) | {OUTER + "steps": -1}, rank, 2, True)
    provisionally = outer.settings
    with pytest.raises(ValueError, match="has -1 for steps"):
        outer.load_state_dict(damaged)
    said["as before"] = outer.settings == provisionally and not outer.report().chosen
    stateful: list[Any] = [outer, model, optimizer]
    for each, state in zip(stateful, saved, strict=True):
        each.load_state_dict(state)
    said["restored"] = outer.settings == chosen
    train(model, optimizer, range(MEASURED_STEPS + 2, MEASURED_STEPS + 12))
    said["resumed"] = digest(model) == after
    outer.close()

    model, optimizer, outer = start(every=40, compressor=None)
    train(model, optimizer, range(4))
    outer.synchronize()  # before the eighth step: all ranks choose now, from what they have seen
    said["given"] = (outer.settings.every, outer.config.compressor, digest(model))
    outer.close()
    model, optimizer, outer = start(lr=0.7, momentum=0.9)
    outer.synchronize()  # nobody has seen a step
    said["nothing seen"] = outer.report().chosen
    outer.close()
    with pytest.raises(ValueError, match="`elastic` is set and `delay` not given"):
        start(every=4, fragments=2, elastic=True)
    dist.barrier()
    dist.destroy_process_group()
    return said


def use_a_link_that_was_looked_at(rank: int) -> tuple[int, str]:
    """Its rate is given by the look at the start; what is assumed before would have it exchange at every step."""
    dist.init_process_group("gloo")
    looked: list[float] = []

    def look(communicator: Communicator) -> bool:
        inside, between = communicator.cluster.levels
        looked.append(between.link.bytes_per_second)
        link = replace(between.link, bytes_per_second=200.0, presumed=False)
        communicator.rank_plans.learned([inside, replace(between, link=link)], at_start=True)
        return True

    quick_probe.quick_probe = look
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = gradwire.Outer(model, optimizer, nic_bytes_per_second=None)
    train(model, optimizer, range(MEASURED_STEPS + 1))
    assert looked == [INTER_NODE.bytes_per_second]
    found = outer.settings.every, str(outer.report())
    outer.close()
    for delay in (1, None):
        gradwire.Outer(model, optimizer, nic_bytes_per_second=None, every=4, fragments=1, delay=delay).close()
    gradwire.Outer(model, optimizer, nic_bytes_per_second="assume").close()
    gradwire.Outer(model, optimizer, every=4, fragments=1, delay=1, nic_bytes_per_second=None, elastic=True).close()
    assert len(looked) == 3  # where nothing may be looked at, nobody looks
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_the_choice_goes_by_the_rate_that_was_measured(processes: Processes) -> None:
    for every, report in processes(2, use_a_link_that_was_looked_at, nodes=["one", "two"]):
        assert every > 20
        assert "1.6 kbit/s inter_node (probed)" in report and "assumed" not in report
        assert max(map(len, report.splitlines())) <= 80


def test_ranks_choose_alike_and_go_on_from_a_saved_state(processes: Processes) -> None:
    one, other = processes(2, use, nodes=["one", "two"], seconds=300)
    for name in ("chosen", "together", "compressor", "given", "exchanges"):
        assert one[name] == other[name], name
    assert one["apart"] != other["apart"] and one["before"] == 0
    assert one["compressor"] == "waterfill2"
    chosen = OuterSettings(**dict(zip(CHOSEN, one["chosen"], strict=True)))
    assert f"{describe(chosen)}: a step takes " in " ".join(one["report"].split())
    for said in (one, other):
        assert said["as before"] and said["restored"] and said["resumed"]
        assert said["given"][:2] == (40, None)
        assert said["nothing seen"] == ""
