"""The machine that runs SASS: single instructions against what they mean, and kernels against the reference's bits."""

import shutil

import numpy as np
import pytest
import torch

from gradwire.bench.studies.gpu.sass import Instruction, Kernel, compile_file, find_tool, parse
from gradwire.bench.studies.gpu.sass_cases import Arena, all_cases
from gradwire.bench.studies.gpu.sass_costs import cost_of
from gradwire.bench.studies.gpu.sass_machine import GLOBAL_BASE, LANES, SassMemory, launch


def listing(*lines: str) -> tuple[Instruction, ...]:
    """As nvdisasm prints them."""
    return parse("\n".join(f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(lines)))


def result(*lines: str) -> int:
    """Runs one warp, whose threads store R0 from `GLOBAL_BASE` on; returns the first one's."""
    memory = SassMemory(1 << 12)
    end = (
        "S2R R9, SR_TID.X",
        "IMAD.SHL.U32 R10, R9, 0x4, RZ",
        f"IADD3 R10, P6, R10, {GLOBAL_BASE & 0xFFFFFFFF:#x}, RZ",
        f"IADD3.X R11, RZ, {GLOBAL_BASE >> 32:#x}, RZ, P6, !PT",
        "STG.E desc[UR60][R10.64], R0",
        "EXIT",
    )
    kernel = Kernel("probe", 90, listing(*lines, *end), 16, 0)
    launch(kernel, 1, LANES, (), memory)
    return int(memory.taken(GLOBAL_BASE, 4).view(np.uint32)[0])


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        # A difference in two halves, where what is taken off is zero: the lower half borrows nothing.
        (("MOV R1, RZ", "MOV R2, 0x5", "LEA R0, P0, -R1, R2, 0xc", "IADD3.X R0, R2, ~RZ, RZ, P0, !PT"), 5),
        (("MOV R1, 0x1", "MOV R2, 0x5", "LEA R0, P0, -R1, R2, 0xc", "IADD3.X R0, R2, ~RZ, RZ, P0, !PT"), 4),
        (("MOV R1, 0x3", "LEA R0, R1, 0x10, 0x2"), 0x1C),
        (("MOV R1, 0x80000000", "MOV R2, 0x1", "LEA.HI R0, R1, R2, RZ, 0x1"), 2),
        # The upper half of a product and a pair, as in an integer division.
        (("MOV R2, RZ", "MOV R3, 0x7", "MOV R4, 0x80000000", "IMAD.HI.U32 R0, R4, 0x4, R2"), 9),
        (("MOV R2, 0xffffffff", "MOV R3, RZ", "MOV R4, 0x1", "IMAD.HI.U32 R0, R4, 0x1, R2"), 1),
        (("MOV R1, 0x12345678", "MOV R2, 0x9abcdef0", "PRMT R0, R1, 0x5410, R2"), 0xDEF05678),
        (("MOV R1, 0xf0", "LOP3.LUT R0, R1, 0xff, RZ, 0x3c, !PT"), 0x0F),
        (("S2R R1, SR_TID.X", "ISETP.LT.U32.AND P0, PT, R1, 0x4, PT", "VOTE.ANY R0, PT, P0"), 0xF),
        (("S2R R1, SR_TID.X", "SHFL.BFLY PT, R0, R1, 0x10, 0x1f"), 16),
        (("MOV R1, 0x500", "R2P PR, R1.B1, 0x7", "SEL R0, RZ, 0x9, P1"), 9),
        (("MOV R1, 0x500", "R2P PR, R1.B1, 0x7", "SEL R0, RZ, 0x9, P2"), 0),
        (("MOV R1, 0x3f800000", "FADD R0, R1, -|R1|"), 0),
    ],
)
def test_an_instruction(lines: tuple[str, ...], wanted: int) -> None:
    assert result(*lines) == wanted


def test_an_unknown_instruction_is_refused_by_its_name() -> None:
    with pytest.raises(NotImplementedError, match="DADD R0, R2, R4"):
        result("DADD R0, R2, R4")


@pytest.fixture(scope="module")
def nvcc() -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc: kernels cannot be compiled")
    try:
        find_tool("nvdisasm")
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["onebit reduce_encode, W = 4", "dgc_sum of 1%, W = 4"])
@pytest.mark.usefixtures("nvcc")
def test_a_kernel_has_the_bits_of_the_reference_and_counts(name: str) -> None:
    (case,) = [each for each in all_cases() if each.name == name]
    cost = cost_of(case, compile_file(case.file, 90)[case.kernel])  # raises where a bit differs
    assert cost.written >= 4
    assert 0 < cost.instructions < 500
    assert sum(cost.units.values()) == pytest.approx(cost.instructions)


def test_a_wrong_bit_is_found() -> None:
    arena = Arena()
    arena.expect("target", torch.ones(4))
    with pytest.raises(ValueError, match="`target`: 8 of 16 bytes differ"):
        arena.check()
