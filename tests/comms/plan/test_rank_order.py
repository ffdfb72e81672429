"""Law: how an element is summed does not depend on where it lies, so no cut of a gradient changes a bit of it."""

from datetime import timedelta
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.plan.cost import sent_nbytes
from gradwire.comms.plan.plan import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Transfer
from gradwire.comms.plan.rank_order import rank_ordered
from support.threads import run_ranks

NODES = {
    "2x2": "aabb",
    "2x2 round-robin": "abab",
    "3+1": "aaab",
    "3x1": "abc",
    "4x1": "abcd",
    "2+2+1": "aabbc",
    "4x2": "aabbccdd",
    "6x1": "abcdef",
}
CUTS = ((0, 10_007), (0, 1, 18, 5000, 10_007), (0, 4096, 8192, 10_007), (0, 333, 10_007))


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
@pytest.mark.parametrize("plan", ["flat", "hierarchical"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_cut_changes_a_bit(nodes: str, plan: str, dtype: torch.dtype) -> None:
    store = HashStore()

    def run(rank: int) -> list[Tensor]:
        config = Config(hostname=nodes[rank], plan=plan, fusion=25, timeout=timedelta(seconds=30))
        communicator = Communicator(store, rank, len(nodes), torch.device("cpu"), config, name="order")
        gradient = torch.randn(10_007, generator=torch.Generator().manual_seed(rank)).to(dtype)
        results = []
        try:
            for cuts in CUTS:
                flat = gradient.clone()
                futures = [communicator.all_reduce(flat[start:stop], scale=0.25) for start, stop in pairwise(cuts)]
                for future in futures:
                    future.wait()
                results.append(flat)
        finally:
            communicator.close()
        return results

    for results in run_ranks(len(nodes), run):
        for other in results[1:]:
            assert torch.equal(results[0], other)


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 7, 4096])
@pytest.mark.parametrize("members", [(0, 2, 4), (0, 2, 4, 6), (1, 2, 3, 5, 8, 9), tuple(range(8)), tuple(range(12))])
@pytest.mark.parametrize("together", [True, False])
def test_the_steps_sum_everything_once_and_by_one_tree(members: tuple[int, ...], numel: int, together: bool) -> None:
    start = 5
    whole = Transfer(ALL_REDUCE, 1, members, start, start + numel, ())
    held: dict[int, dict[int, str]] = {
        rank: {place: str(rank) for place in range(start, start + numel)} for rank in members
    }
    for step in rank_ordered(whole, lambda pair: together):
        for transfer in step:
            run(transfer, held)
    texts = {text for ours in held.values() for text in ours.values()}
    assert all(set(ours) == set(range(start, start + numel)) for ours in held.values())
    assert len(texts) == (numel > 0)


def run(transfer: Transfer, held: dict[int, dict[int, str]]) -> None:
    """Runs a collective on texts: a sum is written out in brackets, in rank order, as every member would find it."""
    for place in range(transfer.start, transfer.stop):
        owner = next(
            (
                index
                for index, (low, high) in enumerate(pairwise(transfer.bounds))
                if low <= place - transfer.start < high
            ),
            None,
        )
        if transfer.op == ALL_GATHER:
            total = held[transfer.members[owner]][place] if owner is not None else ""
        else:
            total = f"({'+'.join(held[rank][place] for rank in transfer.members)})"
        for index, rank in enumerate(transfer.members):
            if transfer.op == REDUCE_SCATTER and index != owner:
                held[rank].pop(place)
            else:
                held[rank][place] = total


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("count", [3, 4, 6, 8, 12, 16])
def test_the_steps_move_the_bytes_of_a_ring(count: int, together: bool) -> None:
    numel = 48 * 16
    for rank in range(count):
        steps = rank_ordered(Transfer(ALL_REDUCE, 1, tuple(range(count)), 0, numel, ()), lambda pair: together)
        sent = sum(
            sent_nbytes(each.op, each.stop - each.start, len(each.members), each.members.index(rank), each.bounds)
            for step in steps
            for each in step
            if rank in each.members
        )
        assert sent == pytest.approx(2 * (count - 1) / count * numel)
