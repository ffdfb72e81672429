"""Chooses the kernels by the tensor's device: the compiled ones, CUDA's, or the reference."""

import logging
from collections.abc import Collection, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from gradwire.compressors.kernels import reference
from gradwire.compressors.kernels.block import BlockFormat
from gradwire.compressors.kernels.reference import DgcRule, DgcRun, DgcState, FactorRuns

logger = logging.getLogger("gradwire")

DGC_FAMILY, POWERSGD_FAMILY = "dgc", "powersgd"
"""Families of kernels beside those of block formats (`BlockFormat.family`)."""


OPERATORS_COST = "5 to 140"
"""Bytes that torch's operators read and write for those of a kernel, by compressor: the least are dgc's, the most
waterfill's. Counted, as in `comms.plan.codec_price.CODEC_FACTS`, to which a test holds it."""


class Kernels(Protocol):
    """Functions that a set of kernels offers, for the tensors of one type of device.

    The function of the same name in compressors/kernels/reference/ defines what each computes, and documents its
    arguments with shapes and dtypes. All write into tensors that the caller has made, and return nothing.
    """

    def encode_pieces(
        self,
        codec: BlockFormat,
        gradient: Tensor,
        residual: Tensor | None,
        new_residual: Tensor | None,
        payloads: Tensor,
        width: int,
    ) -> None:
        """Encodes each run of `width` elements of gradient + residual into its row of `payloads`.

        The compression error is written to `new_residual`.
        """

    def decode_pieces(self, codec: BlockFormat, payloads: Tensor, target: Tensor, width: int) -> None:
        """Decodes each row of `payloads` into its run of `width` elements of `target`, which is overwritten."""

    def decode_reduce(self, codec: BlockFormat, payloads: Tensor, addend: Tensor | None, target: Tensor) -> None:
        """Writes addend + decode(payloads[0]) + decode(payloads[1]) + ..., in this order, into `target`."""

    def reduce_encode(
        self,
        codec: BlockFormat,
        payloads: Tensor,
        residual: Tensor | None,
        new_residual: Tensor | None,
        reduced: Tensor,
        numel: int,
    ) -> None:
        """Encodes the sum of the decoded payloads plus `residual` into `reduced`; see `encode_pieces`."""

    def dgc_step(self, gradient: Tensor, state: DgcState, rule: DgcRule, indices: Tensor, values: Tensor) -> None:
        """Adds `gradient` to DGC's momentum and total, and moves the k largest totals to `values`.

        The places of these go to `indices`, (k) int32 ascending; there the new momentum and total are zero. The new
        state is written to the `_out` tensors of `state`.
        """

    def dgc_step_many(
        self,
        gradient: Tensor,
        state: DgcState,
        rule: DgcRule,
        scales: Tensor | None,
        runs: Sequence[DgcRun],
        indices: Tensor,
        values: Tensor,
    ) -> None:
        """Runs `dgc_step` on every parameter of a shard, each with its own k."""

    def dgc_sum(self, payloads: Tensor, count: int, value_dtype: torch.dtype, target: Tensor) -> None:
        """Replaces `target` by the sum of sparse payloads in their order; each is `count` int32 places, then values."""

    def scatter_add(self, indices: Tensor, values: Tensor, target: Tensor) -> None:
        """Adds `values` to `target` at `indices`, in place, in their order."""

    def powersgd_project(self, matrix: Tensor, residual: Tensor | None, q: Tensor, p: Tensor) -> None:
        """Adds the residual to a matrix in place, and writes P = matrix Q to `p`; `p` and `q` hold them transposed."""

    def powersgd_back_project(self, matrix: Tensor, p: Tensor, q: Tensor) -> None:
        """Writes the factor Q = matrix^T P to `q`, from the orthonormal P; `p` and `q` hold them transposed."""

    def powersgd_restore(
        self, matrix: Tensor, new_residual: Tensor | None, p: Tensor, q_own: Tensor, q_sum: Tensor
    ) -> None:
        """Replaces a matrix by its approximation P Q_sum^T, in place; `p`, `q_own` and `q_sum` hold them transposed.

        The compression error, the matrix before that minus P Q_own^T, is written to `new_residual`; None discards it.
        """

    def powersgd_project_many(
        self, flat: Tensor, residual: Tensor | None, matrices: FactorRuns, q: Tensor, p: Tensor
    ) -> None:
        """Adds the residual to each matrix of a shard, in place, and writes its factor P = matrix Q: one call for all.

        Args:
            flat: 1-D float32, the shard; the residual is added to its matrices in place.
            residual: 1-D float32, the compression error of earlier steps, as long as the shard; None for none.
            matrices: Places of the matrices in the shard, and of their factors in `q` and `p`.
            q: 1-D float32, the factors Q of all matrices, each transposed.
            p: 1-D float32, overwritten with the factors P of all matrices, each transposed.
        """

    def powersgd_back_project_many(self, flat: Tensor, matrices: FactorRuns, p: Tensor, q: Tensor) -> None:
        """Writes the factor Q = matrix^T P of each matrix of a shard to `q`; shapes as in `powersgd_project_many`."""

    def powersgd_restore_many(
        self,
        flat: Tensor,
        new_residual: Tensor | None,
        matrices: FactorRuns,
        p: Tensor,
        q_own: Tensor,
        q_sum: Tensor,
    ) -> None:
        """Replaces each matrix of a shard by its approximation P Q_sum^T, in place; see `powersgd_restore`.

        Args:
            flat: 1-D float32, the shard; its matrices are replaced.
            new_residual: 1-D float32, as long as the shard; overwritten with the compression error where a matrix is.
                None discards it.
            matrices: Places of the matrices in the shard, and of their factors.
            p: 1-D float32, the orthonormal factors P of all matrices, each transposed.
            q_own: 1-D float32, this rank's factors Q, each transposed.
            q_sum: 1-D float32, their sums over the ranks, each transposed.
        """

    def orthogonalize_many(self, matrices: Sequence[Tensor], keys: Sequence[int]) -> None:
        """Makes the rows of each matrix orthonormal, in place; a zero or dependent row is replaced by random numbers.

        A row with inf or NaN becomes NaN.

        Args:
            matrices: Contiguous float32 matrices on one device, each of shape (rank, n) with rank <= n; replaced.
            keys: One number of 32 bits for each matrix, the same on all ranks: it alone decides the random numbers, so
                all ranks replace a row by the same ones.
        """


class _KernelsByDevice(dict[str, Kernels]):
    """Device type -> kernels, chosen when the first tensor on such a device is seen."""

    def __missing__(self, device_type: str) -> Kernels:
        register_kernels(device_type, _choose(device_type))
        return self[device_type]


KERNELS_ON = _KernelsByDevice()
"""The kernels for each device type: `KERNELS_ON[tensor.device.type].encode_pieces(codec, ...)`.

They are chosen, and the choice is logged, when the first tensor of a device type is seen, or before, by `kernels_for`.
On a CUDA device that cannot use CUDA's kernels (no CuPy, an old driver, AMD's GPUs) they are the reference, in torch
operators, and a warning says what to install. `register_kernels("cuda", reference)` takes these on purpose.
"""


def kernels_for(device: torch.device) -> Kernels:
    """Returns the kernels for tensors on a device, and chooses them at the first call for its type.

    Args:
        device: The device. At the first call for its type, its driver and compute capability decide.
    """
    if device.type not in KERNELS_ON:
        register_kernels(device.type, _choose(device.type, device.index))
    return KERNELS_ON[device.type]


def prepare_kernels(device: torch.device, families: Collection[str]) -> None:
    """Chooses the kernels for a device; if they are CUDA's, also compiles and loads those of some families.

    If there are none for a family, or CUDA's compiler or driver refuses them, all of CUDA's are replaced by the
    reference, after a warning.

    Args:
        device: The device; its type decides.
        families: `BlockFormat.family` of each codec in use, `DGC_FAMILY` or `POWERSGD_FAMILY`.
    """
    kernels = kernels_for(device)
    if device.type != "cuda":
        return
    from gradwire.compressors.kernels import cuda
    from gradwire.compressors.kernels.cuda.load import load_families
    from gradwire.compressors.kernels.cuda.require import CudaKernelsError

    if kernels is not cuda:
        return
    try:
        load_families(families, torch.cuda.current_device() if device.index is None else device.index)
    except CudaKernelsError as error:
        _warn_of_reference(error)
        register_kernels(device.type, cast(Kernels, reference))


def _warn_of_reference(error: Exception) -> None:
    logger.warning(
        "gradwire: compressors run in torch operators, which are slower on a GPU, as they read and write %s times as "
        "many bytes as kernels; advise() counts that: %s",
        OPERATORS_COST,
        error,
    )


def kernels_name(device: torch.device) -> str:
    """Returns the name of the kernels for a device: `native`, `cuda`, `reference`, or that of the user's own module."""
    kernels = kernels_for(device)
    return str(getattr(kernels, "__name__", type(kernels).__name__)).rpartition(".")[2]


def has_kernels(device_type: str) -> bool:
    """Returns whether compressors have kernels on a type of device; False if they compute in torch's operators there.

    As long as nothing is chosen, it is what can be said without CuPy: a CUDA device has kernels, AMD's GPUs have none.

    Args:
        device_type: Type of the device, as in `torch.device.type`.
    """
    if device_type in KERNELS_ON:
        return KERNELS_ON[device_type] is not reference
    return device_type == "cpu" or (device_type == "cuda" and torch.version.hip is None)


def register_kernels(device_type: str, kernels: Kernels) -> None:
    """Uses `kernels` for tensors on `device_type` from now on.

    Args:
        device_type: Type of the devices, as in `torch.device.type`: "cpu", "cuda", ...
        kernels: A module or an object with the functions of `Kernels`.
    """
    KERNELS_ON[device_type] = kernels
    logger.info("gradwire: %s kernels: %s", device_type, getattr(kernels, "__name__", type(kernels).__name__))


def _choose(device_type: str, index: int | None = None) -> Kernels:
    """Returns the fastest kernels that fit the device type; the reference for a device without kernels of its own."""
    if device_type == "cpu":
        try:
            from gradwire.compressors.kernels import native
        except ImportError as error:  # a source tree that was never built
            logger.warning("gradwire: no compiled kernels (%s): the slower torch reference is used", error)
        else:
            return cast(Kernels, native)
    if device_type == "cuda":  # CuPy is imported here, with the first CUDA tensor, and never before
        from gradwire.compressors.kernels import cuda
        from gradwire.compressors.kernels.cuda.load import require_kernels
        from gradwire.compressors.kernels.cuda.require import CudaKernelsError

        try:
            require_kernels(torch.cuda.current_device() if index is None else index)
        except CudaKernelsError as error:
            _warn_of_reference(error)
        else:
            return cast(Kernels, cuda)
    return cast(Kernels, reference)
