"""Marks of the whole suite, and the inputs that every kernel is tried on.

What a machine cannot run is skipped with the reason, or fails where it is required. torch is imported where it is
needed: most of the suite's folders do without it.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from gradwire.bench.emulation.namespaces import available
from support.forked import ForkServer, fork_server

if TYPE_CHECKING:
    import torch


os.environ.setdefault("GRADWIRE_NIC_BYTES_PER_SECOND", "assume")
"""For the suite's time: hundreds of states are made for nodes of one machine, and a look at their links before each
takes 0.1 to 0.4 s. Tests of that look say `nic_bytes_per_second=None`, or make the Config themselves."""

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
"""OpenMP's threads sleep where they wait for each other: where the machine has more to do than cores, they spend twenty
times what they compute on looking. Read when torch is loaded; how many they are, and all bits, stay."""


settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
# No example fails because the machine is slow: hypothesis gives each 200 ms unless told otherwise.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        action="append",
        default=[],
        metavar="MARK",
        help="instead of skipping: netns, wheel, aarch64, gpu_standin",
    )
    parser.addoption(
        "--hosts-network",
        metavar="NETWORK",
        help="run the ranks of the fixture `processes` in network namespaces with addresses of this network, as "
        "10.201.0.0/16 or fd77::/64, without a default route and without names",
    )
    parser.addoption("--schedules", type=int, default=3, help="random schedules of each plan on the GPU stand-in")


def no_gpu() -> str | None:
    """The reason why GPU tests cannot run here."""
    import torch

    return None if torch.cuda.is_available() else f"no CUDA device (torch {torch.__version__})"


SLOW_FIXTURES = {"processes", "_server", "ranks_of_scripts", "ranks_of_torch"}
"""Tests that use them start ranks as processes."""

SLOW, LONG = (
    tuple(line for line in Path(__file__).with_name(name).read_text().splitlines() if line and not line.startswith("#"))
    for name in ("slow.txt", "long.txt")
)
"""What `make test-fast` and `make test` leave out, beside those: beginnings of node ids."""


@pytest.fixture
def tiers() -> tuple[str, ...]:
    """All that the two lists name."""
    return SLOW + LONG


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out, unread, the files of which `-m long` or `-m "not long"` takes no test.

    Every worker collects by itself: torch's modules that only those files import cost each of them seconds.
    """
    expression = config.getoption("markexpr")
    node = collection_path.relative_to(config.rootpath).as_posix()
    if expression == "long":
        return None if any(line.startswith(node) or node.startswith(line) for line in LONG) else True
    if expression in ("not long", "not slow and not long"):
        return True if node.startswith(LONG) else None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what `make test-fast` and `make test` leave out, and puts the files first that have most of it.

    Their ranks wait for each other: last, with nothing else left to run beside them, they took half of the time.
    """
    for item in items:
        if "processes" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)
        starts_ranks = SLOW_FIXTURES & set(getattr(item, "fixturenames", ()))
        emulated = item.get_closest_marker("netns") or item.get_closest_marker("mpi")
        if starts_ranks or emulated or item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if item.nodeid.startswith(LONG):
            item.add_marker(pytest.mark.long)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])  # stable: within a file, and of files alike, the order stays


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Has the garbage collector pass over what is collected: ten thousand items, and all of torch, that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        for name, logger in logging.root.manager.loggerDict.items():
            if name.startswith("torch.") and isinstance(logger, logging.Logger):
                # else pytest hangs its handlers on 44 of torch, six times a test: half of what an empty test costs
                logger.propagate = True


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and (without := no_gpu()) is not None:
        pytest.skip(without)
    if item.get_closest_marker("wheel") is not None and "wheel" not in item.config.getoption("--require"):
        pytest.skip("compiles gradwire from its sdist, over a minute: run `make wheel`")
    if item.get_closest_marker("aarch64") is not None and "aarch64" not in item.config.getoption("--require"):
        pytest.skip("needs a cross compiler and qemu-user, and takes minutes: run `make aarch64`")
    if item.get_closest_marker("netns") is None or (reason := available()) is None:
        return
    if "netns" in item.config.getoption("--require"):
        pytest.fail(f"`--require=netns` was given, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def ranks_of_scripts() -> Iterator[ForkServer]:
    """Runs scripts as ranks, which one process forks that has imported torch."""
    with fork_server() as server:
        yield server


@pytest.fixture
def full_memory() -> Callable[[int], AbstractContextManager[object]]:
    """A function that returns an allocator which fails after so many tensors.

    Every operation that returns a tensor of its own takes memory.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class FullMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is not annotated
        def __init__(self, allowed: int) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.allowed = allowed

        def __torch_dispatch__(
            self,
            func: torch._ops.OpOverload,
            types: object,
            args: tuple[object, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            returns = func._schema.returns
            if returns and all(one.alias_info is None for one in returns):
                if not self.allowed:
                    raise torch.OutOfMemoryError("no memory left")
                self.allowed -= 1
            return func(*args, **(kwargs or {}))

    return FullMemory


@pytest.fixture(params=["random", "constant", "zero", "denormal", "huge", "inf", "nan"])
def make_input(request: pytest.FixtureRequest) -> Callable[[int], torch.Tensor]:
    """A function of numel that returns an input of one kind, as a view that is not aligned."""
    import torch

    def special(numel: int, where: int, value: float, generator: torch.Generator) -> torch.Tensor:
        x = torch.randn(numel, generator=generator)
        x[where] = value
        return x

    def make(numel: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(numel)
        kinds: dict[str, Callable[[], torch.Tensor]] = {
            "random": lambda: torch.randn(numel, generator=generator),
            "constant": lambda: torch.full((numel,), -0.3),
            "zero": lambda: torch.zeros(numel),
            "denormal": lambda: torch.randn(numel, generator=generator) * 1e-41,
            "huge": lambda: torch.randn(numel, generator=generator) * 1e38,
            "inf": lambda: special(numel, numel // 2, float("inf"), generator),
            "nan": lambda: special(numel, numel // 3, float("nan"), generator),
        }
        return torch.cat([torch.zeros(1), kinds[request.param]()])[1:]

    return make
