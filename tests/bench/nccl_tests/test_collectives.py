"""A collective: its bytes, its bus factor, and what a reference run on plain tensors gives."""

import pytest
import torch

from gradwire.bench.nccl_tests.collectives import COLLECTIVES
from gradwire.bench.nccl_tests.dtypes import ELEMENT_TYPES
from gradwire.bench.nccl_tests.verify import ExactInputs


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("all_reduce", 2 * 3 / 4),
        ("all_gather", 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("alltoall", 3 / 4),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("sendrecv", 1.0),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(name: str, factor: float) -> None:
    assert COLLECTIVES[name].bus_factor(4) == pytest.approx(factor)
    assert COLLECTIVES[name].bus_factor(1) == 0


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "alltoall"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("nbytes", [1, 2, 4, 8])
def test_parts_are_whole_multiples_of_16_bytes(name: str, ranks: int, nbytes: int) -> None:
    counts = COLLECTIVES[name].counts(1000, ranks, nbytes)
    assert counts.shown * nbytes % 16 == 0
    assert max(counts.source, counts.output) == counts.shown * ranks <= 1000
    assert 1000 - counts.shown * ranks < ranks * max(1, 16 // nbytes) + ranks


def reference(name: str, sources: list[torch.Tensor], rank: int, root: int) -> torch.Tensor | None:
    ranks = len(sources)
    total = torch.stack(sources).sum(0)
    part = sources[0].numel() // ranks
    outputs = {
        "all_reduce": total,
        "reduce": total if rank == root else None,
        "broadcast": sources[root],
        "all_gather": torch.cat(sources),
        "reduce_scatter": total[rank * part : (rank + 1) * part],
        "alltoall": torch.cat([source[rank * part : (rank + 1) * part] for source in sources]),
        "sendrecv": sources[rank - 1],
        "barrier": None,
    }
    return outputs[name]


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_expected_output_is_what_the_definition_says(name: str, ranks: int) -> None:
    collective = COLLECTIVES[name]
    counts = collective.counts(10_000, ranks, 4)
    inputs = ExactInputs(ranks, ELEMENT_TYPES["float"], "sum" if collective.reduces else "none", seed=1)
    sources = [inputs.of(rank, 0, counts.source) for rank in range(ranks)]
    for rank in range(ranks):
        wanted = reference(name, sources, rank, root=ranks - 1)
        found = collective.expected(inputs, counts, rank, ranks - 1)
        if wanted is None:
            assert found is None
        else:
            assert found is not None
            assert torch.equal(found, wanted)
