"""PowerSGD's local work on one matrix, and orthonormal factors.

Factors are stored transposed, (rank, n), so that every loop runs along memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.compressors.kernels.hashing import hash_uniforms


@dataclass(frozen=True, slots=True)
class FactorRun:
    """Place of a matrix (n, m) in a shard, and of its factors P and Q in the buffers of all factors."""

    start: int
    """First element of the matrix in the shard, row after row."""
    rows: int
    """Rows of the matrix, n."""
    columns: int
    """Columns of the matrix, m."""
    rank: int
    """Rows of the transposed factors."""
    p_start: int
    """First element of its P (rank, n) in the buffer of all P."""
    q_start: int
    """First element of its Q (rank, m) in the buffer of all Q."""

    def matrix(self, flat: Tensor) -> Tensor:
        """Returns the matrix (n, m), a view of the shard."""
        return flat[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)

    def p(self, flat: Tensor) -> Tensor:
        """Returns P (rank, n), a view of the buffer."""
        return flat[self.p_start : self.p_start + self.rank * self.rows].view(self.rank, self.rows)

    def q(self, flat: Tensor) -> Tensor:
        """Returns Q (rank, m), a view of the buffer."""
        return flat[self.q_start : self.q_start + self.rank * self.columns].view(self.rank, self.columns)


@dataclass(frozen=True, slots=True, eq=False)
class FactorRuns:
    """The matrices of one shard; made once for a layout, so that tables can be cached by its identity."""

    runs: tuple[FactorRun, ...]
    """The matrices, in the order of their places."""


Project = Callable[[Tensor, Tensor | None, Tensor, Tensor], None]
"""`powersgd_project` of one set of kernels."""
BackProject = Callable[[Tensor, Tensor, Tensor], None]
"""`powersgd_back_project` of one set of kernels."""
Restore = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], None]
"""`powersgd_restore` of one set of kernels."""


def project_each(
    project: Project, flat: Tensor, residual: Tensor | None, matrices: FactorRuns, q: Tensor, p: Tensor
) -> None:
    """Computes the factor P of each matrix of a shard, by calling `project` on one matrix after the other.

    Args:
        project: `powersgd_project` of one set of kernels.
        flat: 1-D float32, the shard; the residual is added to its matrices in place.
        residual: 1-D float32 compression error of earlier steps, as long as the shard; None adds nothing.
        matrices: Places of the matrices and of their factors.
        q: 1-D float32, factors Q of all matrices.
        p: 1-D float32, overwritten with the factors P of all matrices.
    """
    for run in matrices.runs:
        project(run.matrix(flat), None if residual is None else run.matrix(residual), run.q(q), run.p(p))


def back_project_each(back_project: BackProject, flat: Tensor, matrices: FactorRuns, p: Tensor, q: Tensor) -> None:
    """Computes the factor Q of each matrix of a shard, by calling `back_project` on one matrix after the other.

    Args:
        back_project: `powersgd_back_project` of one set of kernels.
        flat: 1-D float32, the shard.
        matrices: Places of the matrices and of their factors.
        p: 1-D float32, factors P of all matrices.
        q: 1-D float32, overwritten with the factors Q of all matrices.
    """
    for run in matrices.runs:
        back_project(run.matrix(flat), run.p(p), run.q(q))


def restore_each(
    restore: Restore,
    flat: Tensor,
    new_residual: Tensor | None,
    matrices: FactorRuns,
    p: Tensor,
    q_own: Tensor,
    q_sum: Tensor,
) -> None:
    """Replaces each matrix of a shard by its approximation, by calling `restore` on one after the other.

    Args:
        restore: `powersgd_restore` of one set of kernels.
        flat: 1-D float32, the shard; its matrices are changed in place. All that follow as in `powersgd_restore_many`.
        new_residual: 1-D float32, overwritten with the compression errors; None discards them.
        matrices: Places of the matrices and of their factors.
        p: 1-D float32: all P.
        q_own: 1-D float32: this rank's Q.
        q_sum: 1-D float32: the sums of all ranks' Q.
    """
    for run in matrices.runs:
        rest = None if new_residual is None else run.matrix(new_residual)
        restore(run.matrix(flat), rest, run.p(p), run.q(q_own), run.q(q_sum))


def powersgd_project_many(flat: Tensor, residual: Tensor | None, matrices: FactorRuns, q: Tensor, p: Tensor) -> None:
    """Runs `powersgd_project` on every matrix of a shard.

    Args:
        flat: 1-D float32, the shard; the residual is added to its matrices in place.
        residual: 1-D float32 compression error of earlier steps, as long as the shard; None for none.
        matrices: Places of the matrices and of their factors.
        q: 1-D float32: all Q.
        p: 1-D float32, receives all P.
    """
    project_each(powersgd_project, flat, residual, matrices, q, p)


def powersgd_back_project_many(flat: Tensor, matrices: FactorRuns, p: Tensor, q: Tensor) -> None:
    """Runs `powersgd_back_project` on every matrix of a shard.

    Args:
        flat: 1-D float32, the shard.
        matrices: Places of the matrices and of their factors.
        p: 1-D float32: all P.
        q: 1-D float32, receives all Q.
    """
    back_project_each(powersgd_back_project, flat, matrices, p, q)


def powersgd_restore_many(
    flat: Tensor, new_residual: Tensor | None, matrices: FactorRuns, p: Tensor, q_own: Tensor, q_sum: Tensor
) -> None:
    """Runs `powersgd_restore` on every matrix of a shard.

    Args:
        flat: 1-D float32, the shard; its matrices are changed in place.
        new_residual: 1-D float32, as long as the shard; overwritten for elements of matrices. None discards the errors.
        matrices: Places of the matrices and of their factors.
        p: 1-D float32: all P.
        q_own: 1-D float32: this rank's Q.
        q_sum: 1-D float32: the sums of all ranks' Q.
    """
    restore_each(powersgd_restore, flat, new_residual, matrices, p, q_own, q_sum)


def powersgd_project(matrix: Tensor, residual: Tensor | None, q: Tensor, p: Tensor) -> None:
    """Adds the residual to the matrix in place, and multiplies: P = (matrix + residual) Q.

    Args:
        matrix: (n, m) float32, changed in place: the residual is added to it.
        residual: (n, m) float32, or None.
        q: (rank, m) float32: Q, transposed.
        p: (rank, n) float32, receives P, transposed.

    Source: Vogels et al., PowerSGD, NeurIPS 2019, algorithm 1, line 3.
    """
    if residual is not None:
        matrix += residual
    torch.mm(q, matrix.t(), out=p)


def powersgd_back_project(matrix: Tensor, p: Tensor, q: Tensor) -> None:
    """Multiplies Q = matrix^T P.

    Args:
        matrix: (n, m) float32.
        p: (rank, n) float32: P, transposed.
        q: (rank, m) float32, receives Q, transposed.

    Source: Vogels et al., PowerSGD, NeurIPS 2019, algorithm 1, line 6.
    """
    torch.mm(p, matrix, out=q)


def powersgd_restore(matrix: Tensor, new_residual: Tensor | None, p: Tensor, q_own: Tensor, q_sum: Tensor) -> None:
    """Replaces the matrix by P Q_sum^T, and writes (matrix before that) - P Q_own^T to `new_residual`.

    The residual is the local one: with Q_sum it would also hold each rank's distance from the mean, and grow without
    bound. Each element adds its products in the order of the factors, so that all ranks get the same bits.

    Args:
        matrix: (n, m) float32, changed in place.
        new_residual: (n, m) float32, overwritten; None discards the compression error.
        p: (rank, n) float32: P, transposed.
        q_own: (rank, m) float32: this rank's Q, transposed.
        q_sum: (rank, m) float32: the sum of all ranks' Q, transposed.

    Source: Vogels et al., PowerSGD, NeurIPS 2019, algorithm 1, line 11, and algorithm 2 (error feedback).
    """
    own, total = torch.zeros_like(matrix), torch.zeros_like(matrix)
    for p_row, own_row, sum_row in zip(p, q_own, q_sum, strict=True):
        own = own + p_row[:, None] * own_row
        total = total + p_row[:, None] * sum_row
    if new_residual is not None:
        torch.sub(matrix, own, out=new_residual)
    matrix.copy_(total)


_DEPENDENT = 1e-6
"""As kDependent of csrc/common/dependent_formula.h: a few times the rounding of float32. A shorter remainder is
noise."""


def _remove_previous(rows: Tensor, k: int) -> Tensor:
    """Makes row k orthogonal to the rows before it, in place, in two passes; returns its length, a 0-dim tensor."""
    for _ in range(2):
        for previous in rows[:k]:
            rows[k] -= (rows[k] @ previous) * previous
    length: Tensor = torch.linalg.vector_norm(rows[k])
    return length


def orthogonalize(matrix: Tensor, key: int) -> None:
    """Makes the rows of a matrix orthonormal, in place, by Gram-Schmidt in float64.

    A zero or dependent row is replaced by random numbers, hashed from `key`, so that the result never has fewer than
    `rank` directions; a row with inf or NaN becomes NaN.

    Args:
        matrix: (rank, n) float32, rank <= n; replaced.
        key: 32 bits for the hash; the same on all ranks.

    Source: Giraud, Langou, Rozloznik, Comput. Math. Appl. 50 (2005), 1069: Gram-Schmidt twice is enough.
    """
    rows = matrix.double()
    for k in range(len(rows)):
        before = torch.linalg.vector_norm(rows[k])
        length = _remove_previous(rows, k)
        for attempt in range(8):
            if not length <= _DEPENDENT * before:
                break
            rows[k] = (hash_uniforms(key + k * 8 + attempt, rows.shape[1], rows.device) - 0.5).double()
            length = _remove_previous(rows, k)
            before = torch.ones_like(before)
        rows[k] /= length
    matrix.copy_(rows)


def orthogonalize_many(matrices: Sequence[Tensor], keys: Sequence[int]) -> None:
    """Makes the rows of every matrix orthonormal, in place.

    Args:
        matrices: Each (rank, n), rank <= n, contiguous float32, all on one device; replaced.
        keys: One for each matrix; see `orthogonalize`.
    """
    for matrix, key in zip(matrices, keys, strict=True):
        orthogonalize(matrix, key)
