"""PowerSGD: a gradient matrix is sent as two thin factors, found by one step of power iteration with a warm start.

    D_w = gradient_w + residual_w         P = orthonormal(sum_w D_w Q)
    Q_w = D_w^T P                         out = P (sum_w Q_w)^T        residual_w = D_w - P Q_w^T

The residual is what this rank's own factor leaves out, not its distance from the mean of all ranks: the sum of the
outputs is the same, and the residual stays bounded.
Source: Vogels et al., PowerSGD, NeurIPS 2019, algorithms 1 and 2.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gradwire.compressors.base import (
    ALL_REDUCE,
    Collective,
    HeldRun,
    Layout,
    Member,
    Slice,
    StateDict,
    StateValue,
    check_gradient,
)
from gradwire.compressors.cast import CAST_DTYPES, CastCodec
from gradwire.compressors.kernels.dispatch import KERNELS_ON
from gradwire.compressors.kernels.hashing import hash_uniforms, mix_key, name_key
from gradwire.compressors.matrices import MatrixSlice, as_matrix, cut_between
from gradwire.compressors.stateful import Stateful
from gradwire.compressors.two_stage import Parts, Residuals, two_stage, two_stage_nbytes


class PowerSGD(Stateful):
    """The compressor "powersgd". Options that mean the same are named as in torch's PowerSGDState.

    Args:
        rank: Columns of the factors: the more, the closer and the larger.
        warmup_steps: Steps at the start whose gradients are sent dense (torch: start_powerSGD_iter).
        min_compression_rate: Matrices that shrink by less are sent dense, exactly.
        use_error_feedback: Keep what the factors leave out and add it to the next step's gradient.
        warm_start: Begin with the last step's factor instead of random numbers.
        random_seed: Of the first factors.
        factor_dtype: "float32", "float16" or "bfloat16": the dtype in which the factors are sent.

    Raises:
        ValueError: An option is out of range.
    """

    def __init__(
        self,
        *,
        rank: int = 4,
        warmup_steps: int = 100,
        min_compression_rate: float = 2.0,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        random_seed: int = 0,
        factor_dtype: str = "float32",
    ) -> None:
        _check_options(rank, warmup_steps, min_compression_rate, factor_dtype)
        super().__init__("powersgd", ["residual"] if use_error_feedback else [])
        self.rank = rank
        self.warmup_steps = warmup_steps
        self.min_compression_rate = min_compression_rate
        self.warm_start = warm_start
        self.random_seed = random_seed
        self.codec = CastCodec(factor_dtype) if factor_dtype in CAST_DTYPES else None
        self._factors: dict[str, Tensor] = {}
        self._staged_factors: dict[str, tuple[Tensor, Tensor]] = {}
        """By parameter: the factor that this step began with, and the one that it found."""
        self._drawn: set[str] = set()
        """Parameters whose first factor was stored by the last `end_step`, which a tensor decided."""

    def matrix(self, item: Slice) -> MatrixSlice | None:
        """Returns the slice as the matrix it is compressed as, or None where it is sent dense."""
        return as_matrix(item, self.rank, self.min_compression_rate)

    def partition(self, layout: Layout, parts: int) -> tuple[int, ...]:
        """See `Compressor.partition`: whole matrices, the largest share as small as it can be."""
        return cut_between(layout, parts, lambda item: self.matrix(item) is not None)

    def wire_nbytes(self, layout: Layout, group_size: int) -> int:
        """See `Compressor.wire_nbytes`."""
        matrices = [found for item in layout.slices if (found := self.matrix(item))]
        dense = layout.numel - sum(found.item.numel for found in matrices)
        p = sum(found.rank * found.rows for found in matrices)
        q = sum(found.rank * found.columns for found in matrices)
        ring = 2 * (group_size - 1) / group_size * 4
        if self.codec is None:
            return round(ring * (p + dense)) + round(ring * q)
        factors = sum(two_stage_nbytes(numel, group_size, self.codec, self.codec) for numel in (p, q) if matrices)
        return factors + round(ring * dense)

    def all_reduce(self, shard: Tensor, layout: Layout, group: Member) -> Iterator[Collective]:
        """See `Compressor.all_reduce`."""
        check_gradient(shard)
        matrices = [found for item in layout.slices if (found := self.matrix(item))]
        if group.size == 1 or self.step < self.warmup_steps or not matrices:
            self.flush(shard, layout)
            if group.size > 1 and shard.numel():
                yield Collective(ALL_REDUCE, (shard,))
            return
        dense = [item for item in layout.slices if self.matrix(item) is None]
        q = [self._factor(found, shard.device) for found in matrices]
        p_flat, p = _stack(matrices, [found.rows for found in matrices], sum(item.numel for item in dense), shard)
        q_flat, q_own = _stack(matrices, [found.columns for found in matrices], 0, shard)
        q_total = torch.empty_like(q_flat)  # before the first write to `shard`: out of memory leaves it intact
        residual, new_residual = self._residual(shard, layout, matrices)
        kernels = KERNELS_ON[shard.device.type]
        for found, p_part, q_part in zip(matrices, p, q, strict=True):
            kernels.powersgd_project(_view(shard, found), _maybe_view(residual, found), q_part, p_part)
        yield from self._reduce_p(p_flat, sum(part.numel() for part in p), shard, dense, group)
        kernels.orthogonalize_many(p, [self._key(found) for found in matrices])
        for found, p_part, q_part in zip(matrices, p, q_own, strict=True):
            kernels.powersgd_back_project(_view(shard, found), p_part, q_part)
        q_total.copy_(q_flat)
        yield from self._reduce_q(q_flat, q_total, group)
        q_sum = [q_total[part.storage_offset() : part.storage_offset() + part.numel()].view_as(part) for part in q_own]
        for found, p_part, began, own, total in zip(matrices, p, q, q_own, q_sum, strict=True):
            kernels.powersgd_restore(_view(shard, found), _maybe_view(new_residual, found), p_part, own, total)
            self._staged_factors[found.item.name] = (began, total)

    def flush(self, shard: Tensor, layout: Layout) -> None:
        """See `Compressor.flush`."""
        store = self.fields.get("residual")
        if store is not None and store.holds(layout):
            shard.add_(store.read(layout, shard.device))
            store.stage(layout, shard.device).zero_()

    def end_step(self, finite: bool | Tensor) -> None:
        """See `Compressor.end_step`."""
        super().end_step(finite)
        self._drawn.clear()
        if self.warm_start and isinstance(finite, Tensor):
            self._drawn.update(name for name in self._staged_factors if name not in self._factors)
            self._factors.update(
                {
                    name: torch.where(finite.to(total.device), total, began)
                    for name, (began, total) in self._staged_factors.items()
                }
            )
        elif self.warm_start and finite:
            self._factors.update({name: total.clone() for name, (_, total) in self._staged_factors.items()})
        self._staged_factors.clear()

    def retract_step(self) -> None:
        """See `Compressor.retract_step`; the first factors that the step had drawn will be drawn again."""
        super().retract_step()
        for name in self._drawn:
            self._factors.pop(name, None)
        self._drawn.clear()

    def held(self) -> Iterator[HeldRun]:
        """See `Stateful.held`; a factor belongs to its whole parameter."""
        yield from super().held()
        for name in self._factors:
            yield HeldRun(name, 0, None)

    def export(self, layout: Layout, device: torch.device) -> Tensor:
        """See `Stateful.export`; the last row holds the factors, at the beginning of their matrices' elements."""
        rows = super().export(layout, device)
        factors = torch.zeros(layout.numel, device=device)
        for item in layout.slices:
            factor = self._factors.pop(item.name, None) if self.matrix(item) else None
            if factor is not None:
                factors[item.start : item.start + factor.numel()] = factor.view(-1)
        return torch.cat([rows, factors.unsqueeze(0)])

    def adopt(self, layout: Layout, rows: Tensor) -> None:
        """See `Stateful.adopt`."""
        super().adopt(layout, rows[:-1])
        for item in layout.slices:
            found = self.matrix(item)
            if found is None:
                continue
            factor = rows[-1, item.start : item.start + found.rank * found.columns].view(found.rank, found.columns)
            if bool(factor.any()):
                self._factors[item.name] = factor.clone()

    def state_dict(self) -> StateDict:
        """See `Compressor.state_dict`."""
        return {**super().state_dict(), **{f"factor/{name}": value.clone() for name, value in self._factors.items()}}

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """See `Compressor.load_state_dict`."""
        super().load_state_dict(state)
        self._factors = {
            key.partition("/")[2]: value.clone()
            for key, value in state.items()
            if key.startswith("factor/") and isinstance(value, Tensor)
        }
        self._staged_factors.clear()
        self._drawn.clear()

    def _checks(self, key: str, value: StateValue) -> bool:
        if not key.startswith("factor/"):
            return False
        if not isinstance(value, Tensor) or value.dim() != 2 or value.dtype != torch.float32:
            raise ValueError(f"`state[{key!r}]` is no 2-D float32 tensor")
        if len(value) > self.rank:
            raise ValueError(
                f"`state[{key!r}]` has rank {len(value)}, this compressor has rank {self.rank}: "
                "use the rank that saved it"
            )
        self.check_parameter(key, key.partition("/")[2], value.numel())
        return True

    def _residual(
        self, shard: Tensor, layout: Layout, matrices: list[MatrixSlice]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the residual and the buffer for the new one; the residual of dense slices is added to them here."""
        store = self.fields.get("residual")
        if store is None:
            return None, None
        residual, new_residual = store.read(layout, shard.device), store.stage(layout, shard.device)
        for item in layout.slices:
            if self.matrix(item) is None:
                shard[item.start : item.stop] += residual[item.start : item.stop]
                new_residual[item.start : item.stop] = 0.0
        return residual, new_residual

    def _key(self, found: MatrixSlice) -> int:
        return mix_key(self.random_seed, self.step, name_key(found.item.name))

    def _factor(self, found: MatrixSlice, device: torch.device) -> Tensor:
        """Returns Q (rank, columns): the last step's, or random numbers that all ranks draw alike."""
        factor = self._factors.get(found.item.name)
        if factor is None or factor.shape != (found.rank, found.columns):
            numbers = hash_uniforms(self._key(found), found.rank * found.columns, device) - 0.5
            return numbers.view(found.rank, found.columns)
        return factor.to(device)

    def _reduce_p(
        self, p_flat: Tensor, p_numel: int, shard: Tensor, dense: list[Slice], group: Member
    ) -> Iterator[Collective]:
        """Sums the factors P and the dense slices: in one collective, or the factors through the cast."""
        at = p_numel
        for item in dense:
            p_flat[at : at + item.numel] = shard[item.start : item.stop]
            at += item.numel
        if self.codec is None:
            yield Collective(ALL_REDUCE, (p_flat,))
        else:
            yield from two_stage(p_flat[:p_numel], p_flat[:p_numel], group, self.codec, self.codec, Residuals())
            if dense:
                yield Collective(ALL_REDUCE, (p_flat[p_numel:],))
        at = p_numel
        for item in dense:
            shard[item.start : item.stop] = p_flat[at : at + item.numel]
            at += item.numel

    def _reduce_q(self, own: Tensor, total: Tensor, group: Member) -> Iterator[Collective]:
        """Sums the factors Q into `total`; with a cast, `own` becomes this rank's part of the sum, as rounded."""
        if self.codec is None:
            yield Collective(ALL_REDUCE, (total,))
            return
        parts = Parts(own.numel(), group.size).bounds(group.rank)
        new_worker = torch.zeros_like(own)
        new_server = torch.zeros(parts[1] - parts[0], device=own.device)
        residuals = Residuals(None, new_worker, None, new_server)
        yield from two_stage(own, total, group, self.codec, self.codec, residuals)
        own.sub_(new_worker)
        own[parts[0] : parts[1]].sub_(new_server)


def _stack(matrices: list[MatrixSlice], widths: list[int], extra: int, like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns one flat buffer, and the factors in it as views (rank, width); `extra` elements follow them."""
    flat = torch.empty(
        sum(found.rank * width for found, width in zip(matrices, widths, strict=True)) + extra, device=like.device
    )
    views, at = [], 0
    for found, width in zip(matrices, widths, strict=True):
        views.append(flat[at : at + found.rank * width].view(found.rank, width))
        at += found.rank * width
    return flat, views


def _view(flat: Tensor, found: MatrixSlice) -> Tensor:
    return flat[found.item.start : found.item.stop].view(found.rows, found.columns)


def _maybe_view(flat: Tensor | None, found: MatrixSlice) -> Tensor | None:
    return None if flat is None else _view(flat, found)


def _check_options(rank: int, warmup_steps: int, min_compression_rate: float, factor_dtype: str) -> None:
    if rank < 1:
        raise ValueError(f"`rank` is {rank}; wanted 1 or more")
    if warmup_steps < 0:
        raise ValueError(f"`warmup_steps` is {warmup_steps}; wanted 0 or more")
    if not min_compression_rate > 0.0:
        raise ValueError(f"`min_compression_rate` is {min_compression_rate}; wanted more than 0")
    if factor_dtype not in ("float32", *CAST_DTYPES):
        raise ValueError(f"`factor_dtype` is {factor_dtype!r}; wanted float32, {' or '.join(CAST_DTYPES)}")
