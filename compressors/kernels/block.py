"""Description of a block codec for the kernels of every device: a name of a family, and numbers."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor


class BlockFormat(ABC):
    """Describes a format of payloads with kernels: a payload's length and content, and the kernels that handle it.

    A set of kernels (kernels/reference/, native.py, cuda/) has four operations, each written once for all formats:
    encode_pieces, decode_pieces, decode_reduce and reduce_encode. The compiled ones take their inner loops from a table
    by `family`, and get `parameters`. The two methods in torch are what those loops are compared with; they define the
    payload's bytes, for which their docstrings are the documentation.

    Formats are immutable and hashable: what belongs to one is made once.
    """

    family: ClassVar[str]
    """Name of the kernels in csrc/cpu/kernels/codecs/block_format.cpp, and in the tables of kernels/cuda/families.py
    (their grids) and kernels/cuda/load.py (their files)."""
    alone_from: ClassVar[float] = 0.0
    """Value from which the sum of a single payload without an addend starts; -0.0 keeps the signs of its zeros."""

    @property
    def parameters(self) -> tuple[float, ...]:
        """The numbers that the family's kernels take as arguments, in their order; empty if they take none."""
        return ()

    @abstractmethod
    def wire_nbytes(self, numel: int) -> int:
        """Returns the bytes of a payload of `numel` elements."""

    def torch_input(self, gradient: Tensor, residual: Tensor | None) -> Tensor:
        """Returns p, the values to encode, (n) float32: gradient + residual, unless the format overrides this.

        Args:
            gradient: (n) float32; not changed.
            residual: (n) float32 compression error of earlier payloads; None for none.
        """
        return gradient if residual is None else gradient + residual

    @abstractmethod
    def torch_encode(self, p: Tensor, payload: Tensor) -> Tensor:
        """Encodes p into a payload.

        Args:
            p: (n) float32, n >= 1.
            payload: (wire_nbytes(n)) uint8, overwritten.

        Returns:
            (n) float32: what the payload decodes to.
        """

    @abstractmethod
    def torch_add(self, payload: Tensor, total: Tensor) -> None:
        """Decodes a payload, and adds the result to `total`.

        Args:
            payload: 1-D uint8, at least wire_nbytes(n) long; whatever it holds, nothing outside `total` is written.
            total: (n) float32, n >= 1, changed in place.
        """
