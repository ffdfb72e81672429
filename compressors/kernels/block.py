"""What the kernels of every device need to know of a block codec: one description, found by name and numbers."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor


class BlockFormat(ABC):
    """A format of payloads with kernels: how long a payload is, what is in it, and which kernels write and read it.

    A set of kernels (kernels/reference/, native.py, cuda/) has four operations, each written once for all formats:
    encode_pieces, decode_pieces, decode_reduce and reduce_encode. The compiled ones take their inner loops from a table
    by `family`, and get `parameters`. The two methods in torch are what those loops are compared with; they define the
    payload's bytes, for which their docstrings are the documentation.

    Formats are immutable and hashable: what belongs to one is made once.
    """

    family: ClassVar[str]
    """Name of the kernels in csrc/cpu/kernels/codecs/block_format.cpp and in kernels/cuda/families.py."""
    alone_from: ClassVar[float] = 0.0
    """What the sum of a single payload without an addend starts from; -0.0 leaves its zeros their signs."""

    @property
    def parameters(self) -> tuple[float, ...]:
        """The numbers that the family's kernels take, in their order."""
        return ()

    @abstractmethod
    def wire_nbytes(self, numel: int) -> int:
        """Returns the bytes of a payload of `numel` elements."""

    def torch_input(self, gradient: Tensor, residual: Tensor | None) -> Tensor:
        """Returns p, what a payload is made of: (n) float32, gradient + residual unless the format says otherwise."""
        return gradient if residual is None else gradient + residual

    @abstractmethod
    def torch_encode(self, p: Tensor, payload: Tensor) -> Tensor:
        """Writes the payload of p.

        Args:
            p: (n) float32, n >= 1.
            payload: (wire_nbytes(n)) uint8, overwritten.

        Returns:
            (n) float32: what the payload decodes to.
        """

    @abstractmethod
    def torch_add(self, payload: Tensor, total: Tensor) -> None:
        """Adds what a payload decodes to.

        Args:
            payload: 1-D uint8, at least wire_nbytes(n) long; whatever it holds, nothing outside `total` is written.
            total: (n) float32, n >= 1, changed in place.
        """
