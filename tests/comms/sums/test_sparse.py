"""Laws of sparse gradients, ranks as threads: the sum of all rows, once each, the same bits everywhere, fewer bytes."""

from datetime import timedelta

import pytest
import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.run.all_reduces import Bucket
from support.threads import run_ranks

LAYOUTS = ["aabb", "abab", "aaab", "aaa", "abc", "aaabbc", "a"]
"""A rank's node is its letter."""
ROWS, WIDTH = 60, 8
ROW_NBYTES = 8 + 4 * WIDTH

Outcome = tuple[list[Tensor], dict[str, float]]


def lookups(rank: int, count: int = 24, rows: int = ROWS) -> Tensor:
    """A gradient as an embedding makes it: rows come twice, in any order; whole numbers, so that sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    places = torch.randint(0, rows, (count,), generator=generator)
    values = torch.randint(-4, 5, (count, WIDTH), generator=generator).float()
    return torch.sparse_coo_tensor(places.unsqueeze(0), values, (rows, WIDTH), check_invariants=True)


def summed(nodes: str, given: list[list[Tensor]], *, scale: float = 1.0, **options: object) -> list[Outcome]:
    """Every rank's sums of its tensors, and the bytes that it has sent at each level."""
    store = HashStore()
    as_dense = options.pop("as_dense", "auto")

    def run(rank: int) -> Outcome:
        config = Config(hostname=nodes[rank], timeout=timedelta(seconds=20), **options)  # type: ignore[arg-type]
        communicator = Communicator(store, rank, len(nodes), torch.device("cpu"), config, name="test")
        try:
            buckets = [Bucket.of(sparse) for sparse in given[rank]]
            for bucket in buckets:
                communicator.start_sparse(bucket, scale=scale, as_dense=as_dense)  # type: ignore[arg-type]
                communicator.all_reduce(torch.ones(1000))  # dense ones go on beside it
            found = [bucket.result().wait() for bucket in buckets]
            sent: dict[str, float] = {}
            for row in communicator.report().rows:
                if row.op.startswith("sparse"):
                    sent[row.level] = sent.get(row.level, 0.0) + row.wire_nbytes
            return found, sent
        finally:
            communicator.close()

    return run_ranks(len(nodes), run)


@pytest.mark.parametrize("nodes", LAYOUTS)
@pytest.mark.parametrize(("as_dense", "plan"), [(True, "auto"), (False, "auto"), ("auto", "flat"), ("auto", "leader")])
def test_the_sum_is_exact_and_has_every_row_that_somebody_has(nodes: str, as_dense: bool | str, plan: str) -> None:
    ranks = range(len(nodes))
    given = [[lookups(rank), lookups(100 + rank, count=rank), lookups(rank, count=0)] for rank in ranks]
    results = summed(nodes, given, scale=0.5, as_dense=as_dense, plan=plan)
    for number, tensors in enumerate(zip(*given, strict=True)):
        expected = sum(tensors[1:], start=tensors[0]).coalesce()
        for found, _ in results:
            assert found[number].is_coalesced() and found[number].shape == expected.shape
            assert torch.equal(found[number].indices(), expected.indices()), number
            assert torch.equal(found[number].values(), expected.values() * 0.5), number


def test_rows_that_cancel_are_rows_of_the_sum_and_other_shapes_travel_too() -> None:
    """An optimizer for sparse gradients changes every row that is there, be its gradient zero or not."""
    places = torch.tensor([[0, 1], [3, 2]])  # two sparse dimensions, none dense
    signs = (1.0, -1.0, 1.0, -1.0)
    values = [torch.tensor([sign, 2.0]) for sign in signs]
    given = [[torch.sparse_coo_tensor(places, each, (2, 5), check_invariants=True)] for each in values]
    for as_dense in (True, False):
        for (found,), _ in summed("aabb", given, as_dense=as_dense):
            assert found.indices().tolist() == [[0, 1], [3, 2]] and found.values().tolist() == [0.0, 8.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_hold_the_same_bits(dtype: torch.dtype) -> None:
    given = [[(lookups(rank) * 0.37).to(dtype)] for rank in range(6)]
    results = summed("aaabbc", given, scale=1 / 3)
    first = results[0][0][0]
    assert all(torch.equal(found.values(), first.values()) for (found,), _ in results) and first.dtype == dtype


@pytest.mark.parametrize("nodes", ["aabb", "aabbcc"])
def test_a_row_leaves_its_node_once_and_a_full_tensor_travels_dense(nodes: str) -> None:
    """What a node sends: its different rows to each other node, where without a hierarchy each rank sends its own."""
    count = len(set(nodes))
    rows = 4000
    for wanted in (40, 20_000):
        given = [[lookups(rank, wanted, rows)] for rank in range(len(nodes))]
        results = summed(nodes, given)
        for node in set(nodes):
            own = [rank for rank, name in enumerate(nodes) if name == node]
            different = len({int(row) for rank in own for row in given[rank][0].coalesce().indices()[0]})
            flat = sum(given[rank][0].coalesce().values().shape[0] for rank in own) * ROW_NBYTES * (count - 1)
            sent = sum(results[rank][1]["inter_node"] for rank in own)
            if wanted == 40:
                assert sent == different * ROW_NBYTES * (count - 1) <= flat
            else:
                assert sent == 2 * (count - 1) / count * rows * (WIDTH + 1) * 4 < different * ROW_NBYTES * (count - 1)


def test_what_cannot_be_summed_is_refused() -> None:
    dense = torch.eye(4)
    whole_numbers = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1]), (4,), check_invariants=True)
    for sparse, words in ((dense, r"layout torch\.strided"), (whole_numbers, r"holds torch\.int64")):
        with pytest.raises(TypeError, match=words):
            summed("a", [[sparse]])
