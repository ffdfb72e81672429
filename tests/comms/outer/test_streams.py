"""Exchanges of parameters on CUDA, on the stand-in whose clocks find races: the CPU's bits, one host wait each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fake_cuda.drive import TIMEOUT, Body, first_module, on_cpu, on_cuda

SHAPES = {"one": (48, 64), "bias": (48,), "two": (40, 90), "three": (64, 40)}


def train(
    nodes: str,
    steps: int,
    compressor: str | None,
    *,
    after: Callable[[Any, int], None] | None = None,
    **settings: Any,
) -> Body:
    """The body of workers that train by themselves: parameters move by random numbers, the same on fake CUDA and a CPU.

    Args:
        nodes: A letter for each rank's node.
        steps: Of the optimizer.
        compressor: Between nodes.
        after: Called with the exchange after each step, and its number from 1; the end is left to it then.
        **settings: Of the exchange.

    Returns:
        Of each rank: all parameters, all anchors, and exchanges taken up.
    """
    session = first_module("gradwire.comms.session")
    config_of = first_module("gradwire.comms.config").Config
    exchange_of = first_module("gradwire.comms.outer.exchange").OuterExchange
    fragments = first_module("gradwire.comms.outer.fragments")

    def body(rank: int, device: torch.device, group: Any) -> tuple[list[Tensor], list[Tensor], int]:
        config = config_of(
            hostname=nodes[rank], plan="hierarchical", compressor=compressor, timeout=TIMEOUT, straggler_every=0,
            stall_seconds=0.0,
        )  # fmt: skip
        ranks = session.SessionRanks(group.store, "outer", rank, len(nodes), group)
        connected = session.AveragingSession(ranks, device, config, {})
        connected.watch_steps()
        communicator = connected.communicator
        rules = fragments.OuterSettings(**settings)
        named = [(name, nn.Parameter(torch.zeros(shape, device=device))) for name, shape in SHAPES.items()]
        exchange = exchange_of(connected, fragments.cut_into_fragments(named, rules), rules)
        exchange.copy_from_first_rank([each.detach() for _, each in named])
        try:
            for step in range(steps):
                generator = torch.Generator().manual_seed(100 * step + rank)
                for _, each in named:
                    each.data.add_(torch.randn(each.shape, generator=generator).to(device))
                torch.empty(1, device=device)  # memory that came back to this stream is handed out again
                exchange.step_ended()
                if after is not None:
                    after(exchange, step + 1)
            if after is None:
                exchange.synchronize()
            return (
                [each.detach().cpu() for _, each in named],
                [each.anchor.cpu() for each in exchange.fragments],
                (exchange.done),
            )
        finally:
            communicator.close()

    return body


@pytest.mark.parametrize("compressor", [None, "int8"])
def test_no_race_the_bits_of_the_cpu_and_one_wait_for_each_exchange(compressor: str | None) -> None:
    body = train("aabb", 9, compressor, every=4, fragments=2, delay=1, lr=0.7, momentum=0.9)
    found, running = on_cuda(4, body)
    for have, want in zip(found, on_cpu(4, body), strict=True):
        assert have[2] == want[2] == 6
        for one, other in zip([*have[0], *have[1]], [*want[0], *want[1]], strict=True):
            assert torch.equal(one, other)
    waits = [str(wait) for wait in running.host_waits]
    compared = [wait for wait in waits if "_differing" in wait]
    assert len(compared) == 4  # at the end
    waits = [wait for wait in waits if wait not in compared]
    ours = [wait for wait in waits if "is_finite" in wait]
    assert len(ours) == 4 * (4 + 2)  # four exchanges in turns, and two fragments at the end
    assert all("test_streams.py" in wait or "torch.cuda.synchronize" in wait for wait in waits if wait not in ours)


def test_what_was_given_up_while_it_was_under_way_changes_nothing() -> None:
    """The stream goes on when NCCL's communicators are aborted, with whatever the memory holds: that is no average."""

    def give_up(exchange: Any, step: int) -> None:
        if step != 2:
            return
        assert exchange._pending is not None
        exchange.averaging.communicator.executor.interrupt(RuntimeError("power lost"))
        anchors = [each.anchor.cpu() for each in exchange.fragments]
        values = [each.gather().cpu() for each in exchange.fragments]
        for _ in range(2):
            with pytest.raises(RuntimeError, match="power lost"):
                exchange.step_ended()
        with pytest.raises(RuntimeError, match="power lost"):
            exchange.state_dict()
        assert exchange.done == 0
        for fragment, anchor, value in zip(exchange.fragments, anchors, values, strict=True):
            assert torch.equal(fragment.anchor.cpu(), anchor)
            assert torch.equal(fragment.gather().cpu(), value)

    on_cuda(2, train("ab", 2, "int8", after=give_up, every=4, fragments=2, delay=1))
