"""A compressor from any codec: two-stage exchange, worker and server residual, momentum, dense warm-up."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.compressors.base import Codec, Group, Layout, Work, check_gradient, even_bounds
from gradwire.compressors.exchange import Parts, Residuals, two_stage, two_stage_nbytes
from gradwire.compressors.stateful import Stateful

SHARD_ALIGN = 1024
"""Shards are cut at multiples of the largest block of any codec here, so that few blocks are cut short."""


class TwoStage(Stateful):
    """An approximate all-reduce built on a codec; what a user's own codec is wrapped in.

    Args:
        name: What the user writes as `compressor=`.
        codec: Encodes what goes to the owners of the parts.
        back: Encodes the owners' sums; `codec` by default.
        residual: Keep what a payload leaves out and add it to the next step's gradient (error feedback).
        momentum: Factor of a momentum that is folded in before the compression: u = momentum * u + gradient is
            what travels. The optimizer then runs without momentum. 0 folds in none.
        warmup_steps: Steps that travel dense at the start.

    Source: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, algorithm 2 (residual).
    """

    def __init__(
        self,
        name: str,
        codec: Codec,
        *,
        back: Codec | None = None,
        residual: bool = True,
        momentum: float = 0.0,
        warmup_steps: int = 0,
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"`momentum` is {momentum}; wanted 0 <= momentum < 1")
        if warmup_steps < 0:
            raise ValueError(f"`warmup_steps` is {warmup_steps}; wanted 0 or more")
        super().__init__(name, [*(["residual", "server"] if residual else []), *(["momentum"] if momentum else [])])
        self.codec = codec
        self.back = codec if back is None else back
        self.residual = residual
        self.momentum = momentum
        self.warmup_steps = warmup_steps

    def partition(self, layout: Layout, parts: int) -> tuple[int, ...]:
        """See `Compressor.partition`."""
        return even_bounds(layout.numel, parts, SHARD_ALIGN)

    def wire_nbytes(self, layout: Layout, group_size: int) -> int:
        """See `Compressor.wire_nbytes`."""
        return two_stage_nbytes(layout.numel, group_size, self.codec, self.back)

    def all_reduce(self, shard: Tensor, layout: Layout, group: Group) -> Iterator[Work]:
        """See `Compressor.all_reduce`."""
        check_gradient(shard)
        source = self._with_momentum(shard, layout)
        if group.size == 1 or self.step < self.warmup_steps or not shard.numel():
            yield from self._dense(source, shard, layout, group)
            return
        codec = self.codec_for(layout, group.rank)
        back = codec if self.back is self.codec else self.back
        units = self.units_of(layout, shard.device)
        if units is not None:
            source = torch.div(source, units, out=shard)
        yield from two_stage(source, shard, group, codec, back, self._residuals(layout, group, shard.device))
        if units is not None:
            shard.mul_(units)

    def codec_for(self, layout: Layout, rank: int) -> Codec:
        """Returns the codec for this step's payload of this shard: codecs with random numbers override this."""
        return self.codec

    def units_of(self, layout: Layout, device: torch.device) -> Tensor | None:
        """Returns what each element is divided by before it is encoded; residuals are kept in these units too.

        None divides by nothing: compressors that know the elements' sizes override this. All ranks of a group must have
        the same bits.
        """
        return None

    def observe(self, total: Tensor, layout: Layout) -> None:
        """Is shown the sum of every dense step of the start, the same on all ranks; to be overridden."""

    def flush(self, shard: Tensor, layout: Layout) -> None:
        """Adds what this rank has left out so far to `shard`, in place; it is forgotten when the step commits."""
        if not self.residual:
            return
        self._fold_server(layout, shard.device)
        if self.fields["residual"].holds(layout):
            left_out, units = self.fields["residual"].read(layout, shard.device), self.units_of(layout, shard.device)
            shard.add_(left_out if units is None else left_out * units)
            self.fields["residual"].stage(layout, shard.device).zero_()

    def export(self, layout: Layout, device: torch.device) -> Tensor:
        """See `Stateful.export`; what the server left out is counted with the worker's."""
        if self.residual:
            self._fold_server(layout, device)
        return super().export(layout, device)

    def _with_momentum(self, shard: Tensor, layout: Layout) -> Tensor:
        if not self.momentum:
            return shard
        store = self.fields["momentum"]
        old, new = store.read(layout, shard.device), store.stage(layout, shard.device)
        return torch.add(shard, old, alpha=self.momentum, out=new)

    def _dense(self, source: Tensor, shard: Tensor, layout: Layout, group: Group) -> Iterator[Work]:
        if source is not shard:
            shard.copy_(source)
        self.flush(shard, layout)
        if group.size > 1:
            yield group.all_reduce(shard)
            if self.step < self.warmup_steps:
                self.observe(shard, layout)

    def _residuals(self, layout: Layout, group: Group, device: torch.device) -> Residuals:
        if not self.residual:
            return Residuals()
        start, stop = Parts(layout.numel, group.size).bounds(group.rank)
        part = layout.cut(start, stop)
        worker, server = self.fields["residual"], self.fields["server"]
        if not server.has(part) and not server.covers(layout, part):
            self._fold_server(layout, device)
        return Residuals(
            worker.read(layout, device),
            worker.stage(layout, device),
            server.read(part, device),
            server.stage(part, device),
        )

    def _fold_server(self, layout: Layout, device: torch.device) -> None:
        """Moves what this rank's answers left out into its worker residual: the sum of both is what counts."""
        if self.fields["server"].holds(layout):
            self.fields["residual"].adopt(layout, self.fields["server"].export(layout, device))
