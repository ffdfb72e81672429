"""Law: how an element is summed does not depend on where it lies, so no cut of a gradient changes a bit of it."""

from datetime import timedelta
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gradwire.comms.communicator import Communicator
from gradwire.comms.compat import HashStore
from gradwire.comms.config import Config
from gradwire.comms.execute import both_halves
from gradwire.comms.plan import ALL_REDUCE
from gradwire.comms.schedule import Transfer
from gradwire.comms.transport.threads import run_ranks

NODES = {"2x2": "aabb", "2x2 round-robin": "abab", "3+1": "aaab", "3x1": "abc", "4x1": "abcd", "2+2+1": "aabbc"}
CUTS = ((0, 10_007), (0, 1, 18, 5000, 10_007), (0, 4096, 8192, 10_007), (0, 333, 10_007))


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
@pytest.mark.parametrize("plan", ["flat", "hierarchical"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_cut_changes_a_bit(nodes: str, plan: str, dtype: torch.dtype) -> None:
    store = HashStore()

    def run(rank: int) -> list[Tensor]:
        config = Config(hostname=nodes[rank], plan=plan, fusion_mb=25, timeout=timedelta(seconds=30))
        communicator = Communicator(store, rank, len(nodes), torch.device("cpu"), config, name="order")
        gradient = torch.randn(10_007, generator=torch.Generator().manual_seed(rank)).to(dtype)
        results = []
        try:
            for cuts in CUTS:
                flat = gradient.clone()
                futures = [communicator.all_reduce(flat[start:stop], scale=0.25)
                           for start, stop in pairwise(cuts)]
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
def test_both_halves_cover_the_region_once(numel: int) -> None:
    scatter, gather = both_halves(Transfer(ALL_REDUCE, 1, (0, 2, 4), 5, 5 + numel, ()))
    assert scatter.bounds == gather.bounds
    assert scatter.bounds[0] == 0 and scatter.bounds[-1] == numel
    assert list(scatter.bounds) == sorted(scatter.bounds)
