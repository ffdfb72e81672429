"""PowerSGD: a gradient matrix is sent as two thin factors, found by one step of power iteration with a warm start.

    D_w = gradient_w + residual_w         P = orthonormal(sum_w D_w Q)
    Q_w = D_w^T P                         out = P (sum_w Q_w)^T        residual_w = D_w - P Q_w^T

The residual is the compression error of this rank's own factor, not its distance from the mean of all ranks: the sum
of the outputs is the same, and the residual stays bounded.
Source: Vogels et al., PowerSGD, NeurIPS 2019, algorithms 1 and 2.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.compressors.base import (
    ALL_REDUCE,
    Collective,
    Layout,
    Member,
    Slice,
    StateDict,
    StateRun,
    StateValue,
    check_gradient,
    refuse_capture,
)
from gradwire.compressors.codecs.base import BlockCodec, PieceCodec
from gradwire.compressors.codecs.cast import CAST_DTYPES, CastCodec
from gradwire.compressors.kernels.dispatch import KERNELS_ON, POWERSGD_FAMILY, prepare_kernels
from gradwire.compressors.kernels.hashing import hash_uniforms, mix_key, name_key
from gradwire.compressors.kernels.reference import FactorRun, FactorRuns
from gradwire.compressors.matrices import MatrixSlice, as_matrix, cut_between
from gradwire.compressors.residual import keep_until_read
from gradwire.compressors.stateful import Stateful
from gradwire.compressors.two_stage import Parts, Residuals, TwoStage, two_stage, two_stage_nbytes


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Compressed and dense parts of a shard, and the places of the factors; computed once for a layout."""

    matrices: FactorRuns
    names: tuple[str, ...]
    """Names of the matrices' parameters."""
    name_keys: tuple[int, ...]
    """Hash of each name, for random numbers that are the same on all ranks."""
    dense: tuple[Slice, ...]
    """Slices that are sent dense."""
    dense_numel: int
    """Elements of all dense slices."""
    p_numel: int
    """Elements of all P."""
    q_numel: int
    """Elements of all Q."""


class PowerSGD(Stateful):
    """The compressor "powersgd". Options that mean the same are named as in torch's PowerSGDState.

    Args:
        inner: Compressor whose codec encodes the factors: "powersgd+int8". They are then summed by the two-stage
            exchange instead of an all-reduce, and the compression error of this rank's second factor goes into the
            residual. None sends the factors in `factor_dtype`.
        rank: Columns of the factors; more columns give a closer approximation and larger payloads.
        warmup_steps: Steps at the start whose gradients are sent dense (torch: start_powerSGD_iter).
        min_compression_rate: Matrices that shrink by less are sent dense, exactly.
        use_error_feedback: Whether the compression error is kept and added to the next step's gradient.
        warm_start: Whether to begin with the last step's Q instead of random numbers.
        random_seed: Seed of the random Q, and of the numbers that replace dependent columns.
        factor_dtype: "float32", "float16" or "bfloat16": the dtype in which the factors are sent.

    Raises:
        ValueError: An option is out of range.
    """

    def __init__(
        self,
        inner: TwoStage | None = None,
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
        name = "powersgd" if inner is None else f"powersgd+{inner.name}"
        super().__init__(name, ["residual"] if use_error_feedback else [])
        self.rank = rank
        self.warmup_steps = warmup_steps
        self.min_compression_rate = min_compression_rate
        self.warm_start = warm_start
        self.random_seed = random_seed
        self.inner = inner
        self.codec: PieceCodec | None = CastCodec(factor_dtype) if factor_dtype in CAST_DTYPES else None
        if inner is not None:
            self.codec = inner.codec
        self._factors: dict[str, Tensor] = {}
        self._flat_factors: dict[tuple[str, ...], tuple[Tensor, tuple[Tensor, ...]]] = {}
        """Names of a shard's matrices -> (1-D buffer of all their Q, the views of it that are in `_factors`)."""
        self._staged_factors: dict[tuple[str, ...], tuple[_Parts, Tensor, Tensor]] = {}
        """Names of a shard's matrices -> (its parts, 1-D buffer of all Q at the step's begin, and of the new Q)."""
        self._parts: dict[Layout, _Parts] = {}
        self._drawn: set[str] = set()
        """Names of parameters whose first Q was stored by the last `end_step`, if a tensor decided about that step."""

    @property
    def has_owners(self) -> bool:
        """True if a codec encodes the factors: each rank then owns a part of them and sums it (two-stage exchange)."""
        return self.codec is not None

    def rounds(self, *, by_owners: bool) -> int:
        """See `CompressorTraits.rounds`: sums of P and Q; encoded, two exchanges and a sum of the dense slices."""
        sums = 1 if self.codec is not None else 2
        return (2 if by_owners else 1) * sums + (4 if self.codec is not None else 0)

    def prepare(self, device: torch.device) -> None:
        """Compiles and loads the kernels of PowerSGD, and those of the factors' codec, for a device."""
        encoded = {self.codec.family} if isinstance(self.codec, BlockCodec) else set()
        prepare_kernels(device, {POWERSGD_FAMILY, *encoded})

    def matrix(self, item: Slice) -> MatrixSlice | None:
        """Returns the slice as the matrix it is compressed as, or None if it is sent dense."""
        return as_matrix(item, self.rank, self.min_compression_rate)

    def partition(self, layout: Layout, parts: int) -> tuple[int, ...]:
        """Cuts a bucket between whole matrices, so that the largest shard is small; see `cut_between`.

        Slices that are sent dense may be divided. A shard may be empty, and one with a large matrix far larger than
        others.

        Args:
            layout: Layout of the bucket.
            parts: Number of shards.

        Returns:
            `parts + 1` ascending offsets from 0 to `layout.numel`.
        """
        return cut_between(layout, parts, lambda item: self.matrix(item) is not None)

    def wire_nbytes(self, layout: Layout, group_size: int) -> int:
        """Returns the bytes that one rank sends for a shard: both factors of its matrices, and its dense slices."""
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
        """Replaces the matrices of `shard` by P Q^T of the summed factors, and its dense slices by their exact sums."""
        if shard.is_cuda:
            refuse_capture(self.name)
        check_gradient(shard)
        kernels = KERNELS_ON[shard.device.type]  # before anything changes: they may not be there
        parts = self._parts_of(layout)
        if group.size == 1 or self.step < self.warmup_steps or not parts.names:
            self.flush(shard, layout)
            if group.size > 1 and shard.numel():
                yield Collective(ALL_REDUCE, (shard,))
            return
        device, matrices = shard.device, parts.matrices
        began = self._began(parts, device)
        p = torch.empty(parts.p_numel + parts.dense_numel, dtype=torch.float32, device=device)
        q_own = torch.empty(parts.q_numel, dtype=torch.float32, device=device)
        q_total = torch.empty_like(q_own)  # before the first write to `shard`: out of memory leaves it intact
        residual, new_residual = self._residual(shard, layout, parts.dense)
        kernels.powersgd_project_many(shard, residual, matrices, began, p)
        codec = self._codec_for(layout, group.rank)
        yield from self._reduce_p(p, parts.p_numel, shard, parts.dense, group, codec)
        keys = [mix_key(self.random_seed, self.step, key) for key in parts.name_keys]
        kernels.orthogonalize_many([run.p(p) for run in matrices.runs], keys)
        kernels.powersgd_back_project_many(shard, matrices, p, q_own)
        q_total.copy_(q_own)
        yield from self._reduce_q(q_own, q_total, group, codec)
        kernels.powersgd_restore_many(shard, new_residual, matrices, p, q_own, q_total)
        self._staged_factors[parts.names] = parts, began, q_total

    def flush(self, shard: Tensor, layout: Layout) -> None:
        """Adds this rank's residual to `shard`, before a dense all-reduce; there is none without error feedback.

        It is set to zero when the step commits.

        Args:
            shard: 1-D float32, changed in place.
            layout: Places of the parameters in `shard`.
        """
        if (store := self.fields.get("residual")) is not None:
            store.pour(shard, layout)

    def end_step(self, finite: bool | Tensor) -> None:
        """Commits or drops the staged residuals, and the factors Q with which the next step begins."""
        super().end_step(finite)
        self._drawn.clear()
        if self.warm_start and (isinstance(finite, Tensor) or finite):
            for parts, began, total in self._staged_factors.values():
                if isinstance(finite, Tensor):
                    self._drawn.update(name for name in parts.names if name not in self._factors)
                    torch.where(finite.to(total.device), total, began, out=total)
                self._keep_factors(parts, total)
        for _, began, total in self._staged_factors.values():
            keep_until_read(began, total)
        self._staged_factors.clear()

    def _keep_factors(self, parts: _Parts, flat: Tensor) -> None:
        """Stores the new Q of a shard, and drops buffers from which no Q is in use.

        Args:
            parts: Parts of the shard.
            flat: 1-D buffer of all its Q; kept, not copied.
        """
        views = tuple(run.q(flat) for run in parts.matrices.runs)
        self._factors.update(zip(parts.names, views, strict=True))
        if parts.names in self._flat_factors:
            keep_until_read(self._flat_factors[parts.names][0])
        else:  # a new layout: what no factor lies in any more is let go of
            current = {id(view) for view in self._factors.values()}
            for names, (old, old_views) in list(self._flat_factors.items()):
                if not any(id(view) in current for view in old_views):
                    keep_until_read(old)
                    del self._flat_factors[names]
        self._flat_factors[parts.names] = flat, views

    def retract_step(self) -> None:
        """Takes the last step out of the count; the first factors that it had drawn will be drawn again."""
        super().retract_step()
        for name in self._drawn:
            self._factors.pop(name, None)
        self._drawn.clear()

    def state_runs(self) -> Iterator[StateRun]:
        """Yields the runs of residuals, and each parameter that has a factor, which belongs to it as a whole."""
        yield from super().state_runs()
        for name in self._factors:
            yield StateRun(name, 0, None)

    def export(self, layout: Layout, device: torch.device) -> Tensor:
        """Removes and returns the state; the last row holds the factors, at the start of their matrices' elements."""
        rows = super().export(layout, device)
        factors = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        for item in layout.slices:
            factor = self._factors.pop(item.name, None) if self.matrix(item) else None
            if factor is not None:
                keep_until_read(factor)
                factors[item.start : item.start + factor.numel()] = factor.view(-1)
        return torch.cat([rows, factors.unsqueeze(0)])

    def adopt(self, layout: Layout, rows: Tensor) -> None:
        """Adds exported rows to the residuals, and stores the factors of the last row."""
        super().adopt(layout, rows[:-1])
        for item in layout.slices:
            found = self.matrix(item)
            if found is None:
                continue
            factor = rows[-1, item.start : item.start + found.rank * found.columns].view(found.rank, found.columns)
            if bool(factor.any()):
                self._factors[item.name] = factor.clone()

    def state_dict(self) -> StateDict:
        """Returns a copy of the residuals, and of the factors Q under `factor/<parameter name>`."""
        return {**super().state_dict(), **{f"factor/{name}": value.clone() for name, value in self._factors.items()}}

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Restores residuals and factors; a state with factors of a larger rank is refused."""
        super().load_state_dict(state)
        keep_until_read(*self._factors.values(), *(flat for flat, _ in self._flat_factors.values()))
        self._flat_factors.clear()
        self._factors = {
            key.partition("/")[2]: value.clone()
            for key, value in state.items()
            if key.startswith("factor/") and isinstance(value, Tensor)
        }
        self._staged_factors.clear()
        self._drawn.clear()

    def _checks(self, key: str, value: StateValue) -> bool:
        """Returns whether the entry is a factor Q, which is refused if its rank is larger than `rank`."""
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

    def _parts_of(self, layout: Layout) -> _Parts:
        """Returns the compressed and dense parts of a shard; computed at the first call for a layout."""
        parts = self._parts.get(layout)
        if parts is None:
            runs: list[FactorRun] = []
            names: list[str] = []
            dense: list[Slice] = []
            p_numel = q_numel = 0
            for item in layout.slices:
                found = self.matrix(item)
                if found is None:
                    dense.append(item)
                    continue
                names.append(item.name)
                runs.append(FactorRun(item.start, found.rows, found.columns, found.rank, p_numel, q_numel))
                p_numel, q_numel = p_numel + found.rank * found.rows, q_numel + found.rank * found.columns
            parts = self._parts[layout] = _Parts(
                FactorRuns(tuple(runs)),
                tuple(names),
                tuple(name_key(name) for name in names),
                tuple(dense),
                sum(item.numel for item in dense),
                p_numel,
                q_numel,
            )
        return parts

    def _residual(self, shard: Tensor, layout: Layout, dense: Sequence[Slice]) -> tuple[Tensor | None, Tensor | None]:
        """Returns the residual of a shard and the buffer for the new one; both None if none is kept.

        Args:
            shard: 1-D float32; the residual of the dense slices is added to them, in place.
            layout: Layout of the shard.
            dense: Slices that are sent dense; their new residual is zero.
        """
        store = self.fields.get("residual")
        if store is None:
            return None, None
        residual, new_residual = store.update(layout, shard.device)
        for item in dense:
            shard[item.start : item.stop] += residual[item.start : item.stop]
            new_residual[item.start : item.stop] = 0.0
        return residual, new_residual

    def _began(self, parts: _Parts, device: torch.device) -> Tensor:
        """Returns all Q that a step begins with, 1-D: the last step's, or random numbers, the same on all ranks."""
        flat, views = self._flat_factors.get(parts.names, (None, ()))
        if flat is not None and flat.device == device:
            same = zip(parts.names, views, parts.matrices.runs, strict=True)
            if all(self._factors.get(name) is view and len(view) == run.rank for name, view, run in same):
                return flat
        factors = []
        for name, key, run in zip(parts.names, parts.name_keys, parts.matrices.runs, strict=True):
            factor = self._factors.get(name)
            if factor is None or factor.shape != (run.rank, run.columns):
                mixed = mix_key(self.random_seed, self.step, key)
                factor = hash_uniforms(mixed, run.rank * run.columns, device) - 0.5
            keep_until_read(factor)
            factors.append(factor.to(device).view(-1))
        return torch.cat(factors)

    def _codec_for(self, layout: Layout, rank: int) -> PieceCodec | None:
        """Returns the codec for this step's factors (random rounding has a key per step); None if they are plain."""
        if self.inner is None:
            return self.codec
        self.inner.step = self.step
        return self.inner.codec_for(layout, rank)

    def _reduce_p(
        self,
        p_flat: Tensor,
        p_numel: int,
        shard: Tensor,
        dense: Sequence[Slice],
        group: Member,
        codec: PieceCodec | None,
    ) -> Iterator[Collective]:
        """Sums the factors P and the dense slices over the group, in place.

        Args:
            p_flat: 1-D float32: all P, then room for the dense slices.
            p_numel: Elements of all P.
            shard: 1-D float32, whose dense slices are replaced by their sums.
            dense: Slices that are sent dense.
            group: The ranks to sum over.
            codec: Encodes P for the two-stage exchange; None sums P and the dense slices in one all-reduce.
        """
        at = p_numel
        for item in dense:
            p_flat[at : at + item.numel] = shard[item.start : item.stop]
            at += item.numel
        if codec is None:
            yield Collective(ALL_REDUCE, (p_flat,))
        else:
            yield from two_stage(p_flat[:p_numel], p_flat[:p_numel], group, codec, codec, Residuals())
            if dense:
                yield Collective(ALL_REDUCE, (p_flat[p_numel:],))
        at = p_numel
        for item in dense:
            shard[item.start : item.stop] = p_flat[at : at + item.numel]
            at += item.numel

    def _reduce_q(self, own: Tensor, total: Tensor, group: Member, codec: PieceCodec | None) -> Iterator[Collective]:
        """Sums the factors Q over the group.

        Args:
            own: 1-D float32: this rank's Q. With a codec the compression errors are subtracted from it in place, so
                that it is what this rank has contributed to the sum.
            total: 1-D float32: a copy of `own`, replaced by the sum.
            group: The ranks to sum over.
            codec: Encodes Q for the two-stage exchange; None takes an all-reduce.
        """
        if codec is None:
            yield Collective(ALL_REDUCE, (total,))
            return
        parts = Parts(own.numel(), group.size, group.shares).bounds(group.rank)
        new_worker = torch.zeros_like(own)
        new_server = torch.zeros(parts[1] - parts[0], dtype=torch.float32, device=own.device)
        residuals = Residuals(None, new_worker, None, new_server)
        yield from two_stage(own, total, group, codec, codec, residuals)
        own.sub_(new_worker)
        own[parts[0] : parts[1]].sub_(new_server)


def _check_options(rank: int, warmup_steps: int, min_compression_rate: float, factor_dtype: str) -> None:
    if rank < 1:
        raise ValueError(f"`rank` is {rank}; wanted 1 or more")
    if warmup_steps < 0:
        raise ValueError(f"`warmup_steps` is {warmup_steps}; wanted 0 or more")
    if not min_compression_rate > 0.0:
        raise ValueError(f"`min_compression_rate` is {min_compression_rate}; wanted more than 0")
    if factor_dtype not in ("float32", *CAST_DTYPES):
        raise ValueError(f"`factor_dtype` is {factor_dtype!r}; wanted float32, {' or '.join(CAST_DTYPES)}")
