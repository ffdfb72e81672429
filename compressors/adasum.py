"""Adasum: gradients of nodes that agree are averaged, those that are orthogonal are added, parameter by parameter.

    adasum(a, b) = (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b

More than two are combined in a tree: neighbours in pairs, then those results in pairs, and so on; one that has no
neighbour goes on as it is. Whatever the tree, the result is a sum of the nodes' own gradients with factors that follow
from their inner products alone. So no vector has to go up and down the tree: each rank of the group gets everybody's
part of a share of the elements, the inner products of the shares are added up, all ranks compute the same factors in
float64, and the weighted sums are gathered. That takes three rounds and the bytes of a plain all-reduce.
Source: Maleki et al., Scaling Distributed Training with Adaptive Summation, MLSys 2021, equation 4 and section 3.3; the
tree over inner products instead of vectors is ours.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from gradwire.compressors.base import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PRODUCTS,
    Collective,
    Layout,
    Member,
    Request,
    check_gradient,
    equal_bounds,
)
from gradwire.compressors.dense import CACHE_LINE_NUMEL
from gradwire.compressors.stateful import Stateful

BLOCK_NUMEL = 1 << 18
"""Elements that are widened to float64 at a time: 2 MiB for each node, which stay in the cache."""


class Adasum(Stateful):
    """The reduction "adasum" between nodes; what it is given are the nodes' own sums or means. It keeps nothing."""

    is_sum = whole_parameters = True

    def __init__(self) -> None:
        super().__init__("adasum", [])

    def partition(self, layout: Layout, parts: int) -> tuple[int, ...]:
        """See `Compressor.partition`."""
        return equal_bounds(layout.numel, parts, CACHE_LINE_NUMEL)

    def wire_nbytes(self, layout: Layout, group_size: int) -> int:
        """See `Compressor.wire_nbytes`."""
        products = 2 * (group_size - 1) / group_size * 8 * len(layout.slices) * group_size**2
        return 2 * (group_size - 1) * 4 * -(-layout.numel // group_size) + round(products)

    def all_reduce(self, shard: Tensor, layout: Layout, group: Member) -> Iterator[Request]:
        """See `Compressor.all_reduce`: of a shard that is all there is of its parameters."""
        products = self.products(layout, group.size, shard.device)
        for request in self.combine(shard, layout, group, layout, products):
            yield Collective(ALL_REDUCE, (products,)) if request == PRODUCTS else request

    def products(self, bucket: Layout, group_size: int, device: torch.device) -> Tensor:
        """Memory for the inner products of a bucket: (parameters, nodes, nodes), float64, zero."""
        return torch.zeros(len(bucket.slices), group_size, group_size, dtype=torch.float64, device=device)

    def combine(
        self, shard: Tensor, layout: Layout, group: Member, bucket: Layout, products: Tensor
    ) -> Iterator[Request]:
        """Replaces `shard` by the combination of the group's.

        Args:
            shard: 1-D contiguous float32, changed in place.
            layout: Which parameter lies where in it.
            group: One rank of each node, and this one among them.
            bucket: Which parameters the bucket holds that the shard is a part of.
            products: As `products` gives them, for all shards of this rank. This shard's are added.

        Yields:
            Collectives of the group, and once `PRODUCTS`: to be answered with the sum of `products` over all ranks that
            hold a part of the bucket, in place, the same bits on all of them.
        """
        check_gradient(shard)
        size, numel = group.size, shard.numel()
        if size == 1:
            yield PRODUCTS
            return
        share = -(-numel // size)
        source = shard.new_zeros(size * share)
        source[:numel] = shard
        everybody = torch.empty_like(source)
        yield Collective(ALL_TO_ALL, (everybody, source))
        rows = everybody.view(size, share)
        start = min(group.rank * share, numel)
        own = layout.cut(start, min(start + share, numel))
        places = {item.name: place for place, item in enumerate(bucket.slices)}
        for item in own.slices:
            products[places[item.name]] += _inner_products(rows[:, item.start : item.stop])
        yield PRODUCTS
        factors = combination(products).to(torch.float32)
        result = shard.new_zeros(share)
        for item in own.slices:
            torch.mv(
                rows[:, item.start : item.stop].t(), factors[places[item.name]], out=result[item.start : item.stop]
            )
        yield Collective(ALL_GATHER, (everybody, result))
        shard.copy_(everybody[:numel])

    def flush(self, shard: Tensor, layout: Layout) -> None:
        """See `Compressor.flush`; there is no residual, so `shard` stays as it is."""


def combination(products: Tensor) -> Tensor:
    """The factors of the nodes' gradients in their combination.

    Args:
        products: (parameters, nodes, nodes), float64: inner products of each parameter's gradients. Where one is not
            finite, the parameter's factors are NaN.

    Returns:
        (parameters, nodes), float64.
    """
    size = products.shape[-1]
    terms = list(
        torch.eye(size, dtype=torch.float64, device=products.device).expand(len(products), size, size).unbind(1)
    )
    while len(terms) > 1:
        pairs = [_pair(products, *terms[at : at + 2]) for at in range(0, len(terms) - 1, 2)]
        terms = pairs + terms[2 * len(pairs) :]
    return terms[0]


def _pair(products: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The factors of two terms' combination; one whose gradient is zero is left out of the quotient, and adds zero."""
    towards_first, towards_second = (torch.einsum("pij,pj->pi", products, term) for term in (first, second))
    both = (first * towards_second).sum(1)
    norms = (first * towards_first).sum(1), (second * towards_second).sum(1)
    weights = [torch.where(norm == 0.0, 1.0, 1.0 - both / (2.0 * norm)) for norm in norms]
    return weights[0].unsqueeze(1) * first + weights[1].unsqueeze(1) * second


def _inner_products(rows: Tensor) -> Tensor:
    """(nodes, nodes), float64, of (nodes, elements), float32."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    bounds = [*range(0, rows.shape[1], BLOCK_NUMEL), rows.shape[1]]
    for start, stop in pairwise(bounds):
        block = rows[:, start:stop].double()
        total.addmm_(block, block.t())
    return total
