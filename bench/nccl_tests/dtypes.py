"""The element types of nccl-tests, under its names."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ElementType:
    """Element type of a collective's tensors.

    Attributes:
        name: Name in nccl-tests.
        torch: dtype of torch.
        exact: Largest integer up to which the type represents every integer exactly; sums of the inputs stay below it.
        signed: Whether it has negative values.
    """

    name: str
    torch: torch.dtype
    exact: int
    signed: bool = True

    @property
    def nbytes(self) -> int:
        """Size of one element in bytes."""
        return self.torch.itemsize

    @property
    def floating(self) -> bool:
        """Whether it is a floating-point type."""
        return self.torch.is_floating_point


ELEMENT_TYPES = {
    each.name: each
    for each in (
        ElementType("int8", torch.int8, 127),
        ElementType("uint8", torch.uint8, 255, signed=False),
        ElementType("int32", torch.int32, 2**31 - 1),
        ElementType("uint32", torch.uint32, 2**32 - 1, signed=False),
        ElementType("int64", torch.int64, 2**53),
        ElementType("uint64", torch.uint64, 2**53, signed=False),
        ElementType("half", torch.float16, 2**11),
        ElementType("float", torch.float32, 2**24),
        ElementType("double", torch.float64, 2**53),
        ElementType("bfloat16", torch.bfloat16, 2**8),
        ElementType("f8e4m3", torch.float8_e4m3fn, 2**4),
        ElementType("f8e5m2", torch.float8_e5m2, 2**3),
    )
}
"""Types by name, in nccl-tests' order. `exact` is 2^(mantissa bits + 1) for floating types (IEEE 754, table 3.5)."""

OPERATIONS = ("sum", "prod", "max", "min", "avg", "mulsum")
"""The reductions of nccl-tests; `mulsum` multiplies every input by `MULSUM_FACTOR` first."""

MULSUM_FACTOR = 2.0
"""Factor of `mulsum`: a power of two, so that the product is exact in every floating type."""

NO_ARITHMETIC = {torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2}
"""dtypes that torch can copy and send, but neither add nor compare on the CPU."""
