"""Laws of Adasum: orthogonal gradients add, parallel ones average, alike on all ranks, on any layout of the ranks."""

from datetime import timedelta

import pytest
import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.run.launches import Bucket, Launch
from gradwire.compressors.adasum import Adasum, combination
from gradwire.compressors.base import Layout, Slice
from gradwire.compressors.optim.peers import carry_out
from support.threads import ThreadGroup, run_ranks

SIZES = (700, 1, 30, 4100)
"""Of the parameters: shards and shares end inside of them."""


def layout_of(sizes: tuple[int, ...]) -> Layout:
    slices, at = [], 0
    for number, size in enumerate(sizes):
        slices.append(Slice(f"parameter{number}", (size,), 0, at, size))
        at += size
    return Layout(tuple(slices))


def pair(first: Tensor, second: Tensor) -> Tensor:
    """The definition, in float64."""
    both = first @ second
    return (1 - both / (2 * (first @ first))) * first + (1 - both / (2 * (second @ second))) * second


def reference(gradients: list[Tensor]) -> Tensor:
    """Neighbours in pairs, then those results in pairs; parameter by parameter, in float64."""
    terms = [gradient.double() for gradient in gradients]
    while len(terms) > 1:
        rest = terms[len(terms) // 2 * 2 :]
        terms = [
            torch.cat(
                [
                    pair(first[item.start : item.stop], second[item.start : item.stop])
                    for item in layout_of(SIZES).slices
                ]
            )
            for first, second in zip(terms[0::2], terms[1::2], strict=False)
        ] + rest
    return terms[0]


def gradient_of(rank: int) -> Tensor:
    """Of one rank: partly common, partly its own."""
    common = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(99))
    return common + torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(rank))


def combined(gradients: list[Tensor]) -> list[Tensor]:
    """Every rank's result, each rank a node of its own."""
    groups, layout = ThreadGroup.create(len(gradients)), layout_of(SIZES)

    def run(rank: int) -> Tensor:
        shard = gradients[rank].clone()
        carry_out(Adasum().all_reduce(shard, layout, groups[rank].member), groups[rank])
        return shard

    return run_ranks(len(gradients), run)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8])
def test_it_is_the_definition_over_the_tree_and_the_same_bits_everywhere(nodes: int) -> None:
    gradients = [gradient_of(rank) for rank in range(nodes)]
    first, *others = combined(gradients)
    torch.testing.assert_close(first.double(), reference(gradients), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(first, other) for other in others)


def test_orthogonal_gradients_add_parallel_ones_average_and_order_does_not_matter() -> None:
    layout = layout_of(SIZES)
    gradient = gradient_of(0)
    halves = [gradient.clone(), gradient.clone()]
    for item in layout.slices:
        halves[0][item.start : item.start + item.numel // 2] = 0.0
        halves[1][item.start + item.numel // 2 : item.stop] = 0.0
    torch.testing.assert_close(combined(halves)[0], halves[0] + halves[1])
    torch.testing.assert_close(combined([gradient] * 4)[0], gradient)
    torch.testing.assert_close(combined([gradient, 3 * gradient])[0], 2 * gradient)  # their mean
    one, other = gradient_of(1), gradient_of(2)
    torch.testing.assert_close(combined([one, other])[0], combined([other, one])[0])
    assert torch.equal(combined([one, torch.zeros_like(one)])[0], one)


def test_it_follows_the_scale_and_what_is_not_finite_stays_so() -> None:
    gradients = [gradient_of(rank) for rank in range(3)]
    scaled = combined([8 * gradient for gradient in gradients])[0]
    assert torch.equal(scaled, 8 * combined(gradients)[0])
    gradients[1][5] = torch.inf
    assert all(result[: SIZES[0]].isnan().all() and result[-1].isfinite() for result in combined(gradients))
    assert combination(torch.zeros(1, 4, 4, dtype=torch.float64)).isfinite().all()


@pytest.mark.parametrize(("nodes", "plan"), [("aabb", "auto"), ("aaabbc", "auto"), ("aabb", "leader"), ("abc", "flat")])
def test_on_any_placement_it_is_that_of_the_nodes_means(nodes: str, plan: str) -> None:
    """Inner products are those of whole parameters, although every rank holds shards of them."""
    store, layout = HashStore(), layout_of(SIZES)

    def run(rank: int) -> tuple[Tensor, str]:
        config = Config(hostname=nodes[rank], reduction="adasum", plan=plan, timeout=timedelta(seconds=20))
        communicator = Communicator(
            store, rank, len(nodes), torch.device("cpu"), config, name="test", compressor=Adasum()
        )
        try:
            buckets = []
            for dtype in (torch.float32, torch.bfloat16):
                flat = gradient_of(rank).to(dtype)
                buckets.append(Bucket.of(flat, layout))
                share = 1.0 if plan == "flat" else 1.0 / nodes.count(nodes[rank])
                communicator.start(Launch((flat,), layout, (buckets[-1],)), scale=share)
            return torch.cat([bucket.result().wait().float() for bucket in buckets]), str(communicator.report())
        finally:
            communicator.close()

    results = run_ranks(len(nodes), run)
    own = {name: [gradient_of(rank) for rank, each in enumerate(nodes) if each == name] for name in nodes}
    expected = reference([torch.stack(gradients).mean(0) for gradients in own.values()])
    for result, report in results:
        torch.testing.assert_close(result[: sum(SIZES)].double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result[sum(SIZES) :].double(), expected, rtol=3e-2, atol=3e-2)
        assert "adasum" in report and torch.equal(result, results[0][0])
