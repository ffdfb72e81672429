"""Law: ranks plan alike whatever their Pythons make of `sum`, which rounds floats otherwise from 3.12 on."""

import math
import random
from collections.abc import Callable, Iterable
from types import ModuleType

import pytest

from gradwire.comms.bootstrap.placement import with_node_rates
from gradwire.comms.links import probe
from gradwire.comms.plan import owners, planner
from gradwire.comms.plan.cost import EXACT, CodecPrice
from gradwire.topology.cluster import LEVEL_NAMES, Level, Link, uniform_cluster
from support.simulate import two_level_cluster

MODULES = (planner, owners, probe)


def one_by_one(numbers: Iterable[float], start: float = 0) -> float:
    """Python 3.11's."""
    for each in numbers:
        start += each
    return start


def rounded_once(numbers: Iterable[float], start: float = 0) -> float:
    """Nearly that of Python 3.12."""
    several = [start, *numbers]
    return math.fsum(several) if any(isinstance(each, float) for each in several) else sum(several)


def decide_with(adds: Callable[..., float], patch: pytest.MonkeyPatch) -> list[object]:
    """Plans, shares and fitted links of many clusters, from modules whose `sum` is another one."""
    for module in MODULES:
        patch.setattr(module, "sum", adds, raising=False)
        forget(module)
    draw, found = random.Random(3), list[object]()
    for _ in range(20):
        nodes, each = draw.choice([3, 4, 6]), draw.choice([1, 2])
        rates = [draw.uniform(1e7, 1e9) for _ in range(nodes)]
        inside, nic = Link(2e-5, draw.uniform(1e9, 1e10)), Link(1e-4, min(rates), gap_seconds=3e-4)
        cluster = two_level_cluster([node for node in range(nodes) for _ in range(each)], inside, nic)
        price = draw.choice([EXACT, CodecPrice("int8", 0.26, 1e-10, 1e-5)])
        found += planner.candidate_plans(
            with_node_rates(cluster, rates), draw.randrange(4, 1 << 26), "hierarchical", 0, price
        )
        found.append(owners.exact_shares(rates, nodes - 2))
    for _ in range(200):
        links = [Link(draw.uniform(1e-6, 1e-4), draw.uniform(1e8, 1e10)) for _ in range(3)]
        deep = uniform_cluster((2, 2, 2), list(map(Level, LEVEL_NAMES, links)))
        small, large = draw.uniform(1e-3, 2e-3), draw.uniform(0.1, 0.2)
        found.append(probe.fitted(deep, 2, small, large, probe.LARGE_NBYTES))
    return found


def forget(module: ModuleType) -> None:
    """Has a module's functions compute again what they have kept."""
    for each in vars(module).values():
        if hasattr(each, "cache_clear"):
            each.cache_clear()


def test_ranks_with_other_pythons_plan_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decide_with(one_by_one, monkeypatch) == decide_with(rounded_once, monkeypatch)
