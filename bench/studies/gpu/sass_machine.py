"""Runs a kernel's machine code, one CTA at a time, and counts: instructions by the unit that takes them, and sectors.

It knows the instructions that gradwire's kernels compile to for sm_80 and sm_90, and raises at any other. What they do
is not published by NVIDIA; that a kernel's results come out with the reference's bits is the evidence that they are
read rightly here. Nothing is said about time: that is sass_costs.py's estimate.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gradwire.bench.studies.gpu.sass import Instruction, Kernel

Words = NDArray[np.uint32]
Lanes = NDArray[np.bool_]
Floats = NDArray[np.float32]
Step = Callable[["Warp", Lanes], None]
"""What an instruction does to the lanes that run it."""

LANES = 32
SECTOR = 32
"""Bytes that memory moves at least."""
SHARED_BASE = 0x400
"""Where a CTA's shared memory begins on sm_90."""
GLOBAL_BASE = 0x7F0000000000
PARAMETERS = {80: 0x160, 90: 0x210}
"""Where the arguments begin in constant bank 0."""
RZ, URZ = 255, 63

_LANE = np.arange(LANES, dtype=np.uint32)
_ADDRESS = re.compile(r"\[([^\[\]]*)\]$")

UNITS = {
    "convert": ("MUFU", "I2F", "F2I", "F2F", "POPC", "FLO", "BREV", "FCHK"),
    "memory": (
        "LDG",
        "STG",
        "LDGSTS",
        "LD",
        "ST",
        "LDS",
        "STS",
        "ATOMS",
        "ATOMG",
        "RED",
        "SHFL",
        "LDC",
        "CCTL",
        "MEMBAR",
    ),
    "fma": ("FFMA", "FMUL", "FADD", "IMAD", "HFMA2", "HADD2"),
    "control": ("BRA", "BSSY", "BSYNC", "BREAK", "EXIT", "CALL", "RET", "WARPSYNC", "NOP", "BAR", "YIELD", "ERRBAR"),
    "uniform": ("S2UR", "R2UR", "S2R", "CS2R", "VOTEU", "CGAERRBAR"),
}


def unit_of(opcode: str) -> str:
    """Returns the unit that an instruction occupies besides its issue slot; `integer` for all not named above."""
    name = opcode.split(".")[0]
    for unit, names in UNITS.items():
        if name in names:
            return unit
    return "uniform" if name.startswith("U") else "integer"


class SassMemory:
    """Bytes at consecutive addresses from GLOBAL_BASE on, and which of their sectors a kernel has touched."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.zeros(nbytes, np.uint8)
        self.read, self.written = np.zeros(nbytes // SECTOR + 1, bool), np.zeros(nbytes // SECTOR + 1, bool)
        self._used = 256

    def place(self, data: NDArray[np.uint8]) -> int:
        """Copies bytes into memory, and returns their address: a multiple of 256, as of what cudaMalloc gives."""
        start = -(-self._used // 256) * 256
        if start + data.size > self.bytes.size:
            raise ValueError(f"`data` has {data.size} bytes; wanted at most {self.bytes.size - start}")
        self.bytes[start : start + data.size] = data
        self._used = start + data.size
        return GLOBAL_BASE + start

    def taken(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Returns what lies at an address."""
        return self.bytes[address - GLOBAL_BASE :][:nbytes].copy()


@dataclass
class SassCounts:
    """What the warps of a launch have done."""

    instructions: Counter[str] = field(default_factory=Counter)
    """Unit -> how many instructions of warps it took."""
    sectors: int = 0
    """Sectors that those asked for; one that is asked for twice counts twice."""

    def issued(self) -> int:
        """Returns how many instructions warps have issued."""
        return sum(self.instructions.values())


class Warp:
    """32 threads, their registers, and where each of them is."""

    def __init__(self, cta: "Cta", index: int) -> None:
        self.cta, self.index = cta, index
        self.words = np.zeros((256, LANES), np.uint32)
        self.predicates = np.zeros((8, LANES), bool)
        self.uniform = np.zeros(64, np.uint32)
        self.uniform_predicates = np.zeros(8, bool)
        self.predicates[7], self.uniform_predicates[7] = True, True
        self.place = np.zeros(LANES, np.int64)
        self.ended, self.held = np.zeros(LANES, bool), np.zeros(LANES, bool)
        self.barriers: dict[str, Lanes] = {}
        self.waiting = np.full(LANES, "", dtype=object)

    def run(self) -> bool:
        """Runs until every thread has ended or waits for the CTA; True where all have ended."""
        steps, executed = self.cta.steps, self.cta.executed
        while True:
            free = ~(self.ended | self.held | (self.waiting != ""))
            if not free.any():
                if self.ended.all():
                    return True
                if (self.ended | self.held).all():
                    return False
                raise RuntimeError(f"warp {self.index}: its threads wait for each other at {set(self.waiting)}")
            at = int(self.place[free].min())
            active = free & (self.place == at)
            # Straight on, as long as nothing but the place changes.
            while True:
                step, guard, straight = steps[at]
                executed[at] += 1
                self.place[active] = at + 1
                running = active if guard is None else active & guard(self)
                step(self, running)
                if not straight:
                    break
                at += 1

    def release(self, barrier: str) -> None:
        """Lets the threads go on that wait for each other, if all have come."""
        members = self.barriers[barrier] & ~self.ended
        if (self.waiting[members] == barrier).all():
            self.waiting[members] = ""


class Cta:
    """One CTA of a kernel."""

    def __init__(self, kernel: Kernel, constants: NDArray[np.uint8], memory: SassMemory, counts: SassCounts) -> None:
        self.kernel, self.constants, self.memory, self.counts = kernel, constants, memory, counts
        self.shared = np.zeros(SHARED_BASE + kernel.shared_nbytes + 256, np.uint8)
        self.block, self.threads = 0, 0
        self.steps = [_compiled(instruction) for instruction in kernel.instructions]
        self.executed = [0] * len(self.steps)

    def run(self, block: int, threads: int) -> None:
        """Runs all threads to their end; warps take turns at barriers."""
        self.block, self.threads = block, threads
        warps = [Warp(self, index) for index in range(threads // LANES)]
        while warps:
            warps = [warp for warp in warps if not warp.run()]
            for warp in warps:
                warp.held[:] = False


def launch(
    kernel: Kernel, blocks: int, threads: int, arguments: Sequence[np.generic], memory: SassMemory
) -> SassCounts:
    """Runs a kernel and returns what its warps did.

    Args:
        kernel: For an architecture of `PARAMETERS`.
        blocks: CTAs; they run one after the other.
        threads: Of a CTA.
        arguments: In the kernel's own order and types.
        memory: Where the addresses among them point to.

    Raises:
        NotImplementedError: The kernel has an instruction that is not known here.
    """
    constants, at = np.zeros(4096, np.uint8), PARAMETERS[kernel.architecture]
    for place, value in ((0, threads), (4, 1), (8, 1), (12, blocks), (16, 1), (20, 1)):
        constants[place : place + 4] = np.array([value], np.uint32).view(np.uint8)
    for argument in arguments:
        raw = np.array([argument]).view(np.uint8)
        at = -(-at // raw.size) * raw.size
        constants[at : at + raw.size] = raw
        at += raw.size
    counts = SassCounts()
    cta = Cta(kernel, constants, memory, counts)
    with np.errstate(all="ignore"):
        for block in range(blocks):
            cta.run(block, threads)
    for instruction, times in zip(kernel.instructions, cta.executed, strict=True):
        if times:
            counts.instructions[unit_of(instruction.opcode)] += times
    return counts


# Operands.


def _constant(cta: Cta, operand: str) -> int:
    where = operand.rpartition("[")[2].rstrip("]")
    place = 0 if where == "RZ" else int(where, 16)
    return int(cta.constants[place : place + 4].view(np.uint32)[0])


def _register(operand: str) -> int:
    name = operand.lstrip("-~|+").split(".")[0].rstrip("|")
    return RZ if name == "RZ" else URZ if name == "URZ" else int(name.lstrip("UR"))


def _word(operand: str, offset: int = 0) -> Callable[[Warp], Words]:
    """Reads an operand as 32 words. `offset` takes the next register of a pair; an immediate has zeros there."""
    name = operand.lstrip("-~|+")
    negative, inverted = operand.startswith("-"), operand.startswith("~")
    if re.match(r"U?R(\d|Z)", name):
        index, uniform = _register(operand), name.startswith("U")
        index += offset if index != (URZ if uniform else RZ) else 0

        def read(warp: Warp) -> Words:
            value = np.full(LANES, warp.uniform[index], np.uint32) if uniform else warp.words[index]
            return -value if negative else ~value if inverted else value

        return read
    if name.startswith("c["):
        return lambda warp: np.full(LANES, _constant(warp.cta, operand), np.uint32)
    fixed = np.full(LANES, 0 if offset else int(operand.replace("+", ""), 16) & 0xFFFFFFFF, np.uint32)
    return lambda warp: fixed


def _wide(operand: str) -> Callable[[Warp], NDArray[np.uint64]]:
    low, high = _word(operand), _word(operand, 1)
    return lambda warp: low(warp).astype(np.uint64) | high(warp).astype(np.uint64) << np.uint64(32)


def _float(operand: str) -> Callable[[Warp], Floats]:
    name = operand.lstrip("-|+").split(".reuse")[0].rstrip("|")
    negative, absolute = operand.startswith("-"), "|" in operand
    if re.match(r"U?R(\d|Z)", name) or name.startswith("c["):
        word = _word(name)
    else:
        special = {"INF": math.inf, "QNAN": math.nan}
        number = special[name] if name in special else float.fromhex(name) if name.startswith("0x") else float(name)
        fixed = np.full(LANES, number, np.float32)
        word = lambda warp: fixed.view(np.uint32)

    def read(warp: Warp) -> Floats:
        bits = word(warp)
        if absolute:
            bits = bits & np.uint32(0x7FFFFFFF)
        if negative:
            bits = bits ^ np.uint32(0x80000000)
        return bits.view(np.float32)

    return read


def _flag(operand: str) -> Callable[[Warp], Lanes]:
    name = operand.lstrip("!")
    negative, uniform = operand.startswith("!"), name.startswith("U")
    index = 7 if name.endswith("PT") else int(name.lstrip("UP"))

    def read(warp: Warp) -> Lanes:
        value = np.full(LANES, warp.uniform_predicates[index]) if uniform else warp.predicates[index]
        return ~value if negative else value

    return read


def _is_flag(operand: str) -> bool:
    return re.fullmatch(r"!?U?P[0-6T]", operand) is not None


def _write(warp: Warp, operand: str, value: Words, lanes: Lanes, offset: int = 0) -> None:
    index = _register(operand)
    if operand.startswith("U"):
        if index != URZ and lanes.any():
            warp.uniform[index + offset] = value[lanes][0]
    elif index != RZ:
        np.copyto(warp.words[index + offset], value, where=lanes)


def _write_flag(warp: Warp, operand: str, value: Lanes, lanes: Lanes) -> None:
    if operand.endswith("PT"):
        return
    index = int(operand.lstrip("UP"))
    if operand.startswith("U"):
        if lanes.any():
            warp.uniform_predicates[index] = bool(value[lanes][0])
    else:
        np.copyto(warp.predicates[index], value, where=lanes)


def _pure(destination: str, of: Callable[[Warp], Words]) -> Step:
    def step(warp: Warp, lanes: Lanes) -> None:
        _write(warp, destination, of(warp), lanes)

    return step


# Instructions, by their first word.

Maker = Callable[[list[str], list[str]], Step]
"""(the words of an opcode, operands) -> what the instruction does."""

_STEPS: dict[str, Maker] = {}
"""First word of an opcode -> what makes its steps."""


def _of(*names: str) -> Callable[[Maker], Maker]:
    """Makes the function below it that of these instructions."""

    def known(make: Maker) -> Maker:
        _STEPS.update(dict.fromkeys(names, make))
        return make

    return known


@_of("IADD3", "VIADD", "UIADD3")
def _add(kind: list[str], ops: list[str]) -> Step:
    """IADD3, VIADD, UIADD3: sums with carries; a negated register counts as its complement and one."""
    outs = [ops[0]]
    rest = ops[1:]
    while rest and _is_flag(rest[0]):
        outs.append(rest.pop(0))
    flags = [_flag(op) for op in rest if _is_flag(op)]
    terms = []
    for op in (op for op in rest if not _is_flag(op)):
        negated = op.startswith("-") and re.match(r"-U?R", op) is not None
        terms.append((_word("~" + op[1:] if negated else op), negated))

    def step(warp: Warp, lanes: Lanes) -> None:
        total = np.zeros(LANES, np.uint64)
        for read, negated in terms:
            total = total + read(warp).astype(np.uint64) + np.uint64(negated)
        for flag in flags:
            total = total + flag(warp).astype(np.uint64)
        carry = total >> np.uint64(32)
        _write(warp, outs[0], total.astype(np.uint32), lanes)
        for i, out in enumerate(outs[1:]):
            _write_flag(warp, out, carry > i, lanes)

    return step


@_of("IMAD", "UIMAD")
def _multiply_add(kind: list[str], ops: list[str]) -> Step:
    """IMAD in all its forms; WIDE and HI add a pair of registers to the 64 bits of the product."""
    outs, rest = [ops[0]], ops[1:]
    if _is_flag(rest[0]):
        outs.append(rest.pop(0))
    wide, high, signed = "WIDE" in kind, "HI" in kind, "U32" not in kind
    a, b = _word(rest[0]), _word(rest[1])
    c = _wide(rest[2]) if wide or high else _word(rest[2])
    carry = _flag(rest[3]) if len(rest) > 3 else None

    def step(warp: Warp, lanes: Lanes) -> None:
        x, y = a(warp), b(warp)
        if not (wide or high):
            value = x * y + c(warp).astype(np.uint32)
            _write(warp, outs[0], value + carry(warp) if carry else value, lanes)
            return
        if signed:
            product = (x.view(np.int32).astype(np.int64) * y.view(np.int32).astype(np.int64)).view(np.uint64)
        else:
            product = x.astype(np.uint64) * y.astype(np.uint64)
        total = product + c(warp)
        carried = total < product
        if carry:
            total = total + carry(warp)
            carried |= carry(warp) & (total == 0)
        if high:
            _write(warp, outs[0], (total >> np.uint64(32)).astype(np.uint32), lanes)
        else:
            _write(warp, outs[0], total.astype(np.uint32), lanes)
            _write(warp, outs[0], (total >> np.uint64(32)).astype(np.uint32), lanes, 1)
        if len(outs) > 1:
            _write_flag(warp, outs[1], carried, lanes)

    return step


@_of("LEA", "ULEA")
def _lea(kind: list[str], ops: list[str]) -> Step:
    """LEA: a shifted and added; HI the upper half of the pair (c, a), X with a carry.

    A negated a counts, shifted, as its complement and one, as in IADD3: so the carry of b - 0 is set.
    """
    outs, rest = [ops[0]], ops[1:]
    if _is_flag(rest[0]):
        outs.append(rest.pop(0))
    high, extended, negated = "HI" in kind, "SX32" in kind, rest[0].startswith("-")
    if negated and high:
        raise NotImplementedError("a negated pair")
    a, b = _word(rest[0].lstrip("-")), _word(rest[1])
    third = _word(rest[2]) if high and not extended else None
    shift = np.uint64(int(rest[3 if third else 2], 16))
    carry = _flag(rest[-1]) if "X" in kind else None

    def step(warp: Warp, lanes: Lanes) -> None:
        x = a(warp)
        if extended:
            pair = x.view(np.int32).astype(np.int64).view(np.uint64)
        else:
            pair = x.astype(np.uint64)
            if third:
                pair = pair | third(warp).astype(np.uint64) << np.uint64(32)
        shifted = (pair << shift) >> np.uint64(32) if high else (pair << shift) & np.uint64(0xFFFFFFFF)
        if negated:
            shifted = (shifted ^ np.uint64(0xFFFFFFFF)) + np.uint64(1)
        total = shifted + b(warp).astype(np.uint64)
        if carry:
            total = total + carry(warp).astype(np.uint64)
        _write(warp, outs[0], total.astype(np.uint32), lanes)
        if len(outs) > 1:
            _write_flag(warp, outs[1], total >> np.uint64(32) > 0, lanes)

    return step


@_of("SHF", "USHF")
def _shift(kind: list[str], ops: list[str]) -> Step:
    """SHF: a pair of words shifted; shifts of the width and more give zero unless W wraps them."""
    low, by, upper = _word(ops[1]), _word(ops[2]), _word(ops[3])
    left, wide, high, signed = "L" in kind, "U64" in kind or "S64" in kind, "HI" in kind, "S32" in kind
    most = np.uint64(63 if wide else 32)

    def of(warp: Warp) -> Words:
        count = by(warp).astype(np.uint64)
        count = count & np.uint64(31) if "W" in kind else np.minimum(count, most)
        if wide:
            pair = low(warp).astype(np.uint64) | upper(warp).astype(np.uint64) << np.uint64(32)
            shifted = pair << count if left else (pair.view(np.int64) >> count.view(np.int64)).view(np.uint64)
            if not left and "U64" in kind:
                shifted = pair >> count
            return (shifted >> np.uint64(32) if high else shifted).astype(np.uint32)
        if left:
            pair = low(warp).astype(np.uint64) | (
                upper(warp).astype(np.uint64) << np.uint64(32) if high else np.uint64(0)
            )
            return ((pair << count) >> np.uint64(32 if high else 0)).astype(np.uint32)
        word = upper(warp) if high else low(warp)
        if signed:
            return (word.view(np.int32).astype(np.int64) >> count.view(np.int64)).astype(np.uint32)
        return (word.astype(np.uint64) >> count).astype(np.uint32)

    return _pure(ops[0], of)


@_of("LOP3", "ULOP3")
def _logic(kind: list[str], ops: list[str]) -> Step:
    """LOP3: any function of three bits; a predicate says whether anything is left."""
    outs, rest = [ops[0]], ops[1:]
    if _is_flag(outs[0]):
        outs.append(rest.pop(0))
    a, b, c = map(_word, rest[:3])
    table, also = int(rest[3], 16), _flag(rest[4])

    rows = [row for row in range(8) if table >> row & 1]

    def step(warp: Warp, lanes: Lanes) -> None:
        x, y, z = a(warp), b(warp), c(warp)
        if table == 0xC0:
            value = x & y
        elif table == 0xFC:
            value = x | y
        else:
            value = np.zeros(LANES, np.uint32)
            for row in rows:
                value |= (x if row & 4 else ~x) & (y if row & 2 else ~y) & (z if row & 1 else ~z)
        if len(outs) > 1:
            _write_flag(warp, outs[0], (value != 0) | also(warp), lanes)
        _write(warp, outs[-1], value, lanes)

    return step


@_of("PLOP3", "UPLOP3")
def _flag_logic(kind: list[str], ops: list[str]) -> Step:
    """PLOP3: any function of three predicates, and a second one of them."""
    a, b, c = map(_flag, ops[2:5])
    tables = int(ops[5], 16), int(ops[6], 16)

    def step(warp: Warp, lanes: Lanes) -> None:
        index = a(warp) * 4 + b(warp) * 2 + c(warp) * 1
        for out, table in zip(ops[:2], tables, strict=True):
            _write_flag(warp, out, (table >> index & 1).astype(bool), lanes)

    return step


_COMPARE: dict[str, Callable[..., Lanes]] = {
    "LT": lambda x, y: x < y,
    "LE": lambda x, y: x <= y,
    "GT": lambda x, y: x > y,
    "GE": lambda x, y: x >= y,
    "EQ": lambda x, y: x == y,
    "NE": lambda x, y: x != y,
}
_COMBINE: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "AND": lambda x, y: x & y,
    "OR": lambda x, y: x | y,
    "XOR": lambda x, y: x ^ y,
}


@_of("ISETP", "UISETP")
def _compare(kind: list[str], ops: list[str]) -> Step:
    """ISETP; EX is the upper half of 64 bits, whose last predicate is what the lower half found."""
    compare = _COMPARE[kind[1]]
    signed, combine = "U32" not in kind, _COMBINE[next(word for word in kind if word in _COMBINE)]
    a, b, also = _word(ops[2]), _word(ops[3]), _flag(ops[4])
    lower = _flag(ops[5]) if "EX" in kind else None

    def step(warp: Warp, lanes: Lanes) -> None:
        x, y = a(warp), b(warp)
        left, right = (x.view(np.int32), y.view(np.int32)) if signed else (x, y)
        found = compare(left, right)
        if lower:
            strict = _COMPARE[{"LE": "LT", "GE": "GT"}.get(kind[1], kind[1])](left, right)
            same = lower(warp)
            found = (x == y) & same if kind[1] == "EQ" else strict | (x == y) & same
        _write_flag(warp, ops[0], combine(found, also(warp)), lanes)
        _write_flag(warp, ops[1], combine(~found, also(warp)), lanes)

    return step


@_of("FSETP")
def _compare_floats(kind: list[str], ops: list[str]) -> Step:
    name = kind[1]
    compare, unordered = _COMPARE[name[:2]], len(name) == 3
    combine = _COMBINE[next(word for word in kind if word in _COMBINE)]
    a, b, also = _float(ops[2]), _float(ops[3]), _flag(ops[4])

    def step(warp: Warp, lanes: Lanes) -> None:
        x, y = a(warp), b(warp)
        nan = np.isnan(x) | np.isnan(y)
        found = compare(x, y) | nan if unordered else compare(x, y) & ~nan
        _write_flag(warp, ops[0], combine(found, also(warp)), lanes)
        _write_flag(warp, ops[1], combine(~found, also(warp)), lanes)

    return step


def _float_step(of: Callable[..., Floats], ops: list[str]) -> Step:
    reads = [_float(op) for op in ops[1:]]
    return _pure(ops[0], lambda warp: of(*(read(warp) for read in reads)).astype(np.float32).view(np.uint32))


def _rounded(exact: NDArray[np.float64], kind: list[str]) -> Floats:
    """To float32: to the nearest, or where the instruction says."""
    rounded = exact.astype(np.float32)
    if "RZ" in kind:
        return np.where(np.abs(rounded) > np.abs(exact), np.nextafter(rounded, np.float32(0)), rounded)
    if "RM" in kind:
        return np.where(rounded > exact, np.nextafter(rounded, np.float32(-np.inf)), rounded)
    if "RP" in kind:
        return np.where(rounded < exact, np.nextafter(rounded, np.float32(np.inf)), rounded)
    return rounded


@_of("FADD")
def _sum(kind: list[str], ops: list[str]) -> Step:
    return _float_step(lambda x, y: _rounded(x.astype(np.float64) + y.astype(np.float64), kind), ops)


@_of("FFMA")
def _fused(kind: list[str], ops: list[str]) -> Step:
    """FFMA: in float64 the product is exact and the sum nearly; the kernels have it in divisions alone."""

    def of(x: Floats, y: Floats, z: Floats) -> Floats:
        return _rounded(x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64), kind)

    return _float_step(of, ops)


@_of("FMNMX", "VIMNMX", "VIMNMX3", "VIADDMNMX", "IMNMX")
def _extreme(kind: list[str], ops: list[str]) -> Step:
    """VIMNMX, VIMNMX3, FMNMX: the smaller where the predicate holds, else the larger."""
    least = _flag(ops[-1])
    if kind[0] == "FMNMX":
        x, y = _float(ops[1]), _float(ops[2])
        return _pure(
            ops[0],
            lambda w: np.where(least(w), np.fmin(x(w), y(w)), np.fmax(x(w), y(w))).astype(np.float32).view(np.uint32),
        )
    reads = [_word(op) for op in ops[1:-1]]
    kind_of = np.uint32 if "U32" in kind else np.int32

    def of(warp: Warp) -> Words:
        values = [read(warp).view(kind_of) for read in reads]
        if kind[0] == "VIADDMNMX":
            values = [values[0] + values[1], values[2]]
        small, large = values[0], values[0]
        for value in values[1:]:
            small, large = np.minimum(small, value), np.maximum(large, value)
        return np.where(least(warp), small, large).astype(kind_of).view(np.uint32)

    return _pure(ops[0], of)


@_of("SEL", "USEL", "FSEL")
def _select(kind: list[str], ops: list[str]) -> Step:
    flag = _flag(ops[3])
    if kind[0] == "FSEL":
        x, y = _float(ops[1]), _float(ops[2])
        return _pure(ops[0], lambda warp: np.where(flag(warp), x(warp).view(np.uint32), y(warp).view(np.uint32)))
    a, b = _word(ops[1]), _word(ops[2])
    return _pure(ops[0], lambda warp: np.where(flag(warp), a(warp), b(warp)))


@_of("PRMT", "UPRMT")
def _permute(kind: list[str], ops: list[str]) -> Step:
    """PRMT: four of the eight bytes of two words; the fourth bit of a choice spreads the sign."""
    a, choice, b = map(_word, ops[1:4])

    def of(warp: Warp) -> Words:
        pair = a(warp).astype(np.uint64) | b(warp).astype(np.uint64) << np.uint64(32)
        chosen, value = choice(warp).astype(np.uint64), np.zeros(LANES, np.uint64)
        for i in range(4):
            pick = chosen >> np.uint64(4 * i) & np.uint64(15)
            byte = pair >> np.uint64(8) * (pick & np.uint64(7)) & np.uint64(255)
            sign = np.where(byte >> np.uint64(7), np.uint64(255), np.uint64(0))
            value |= np.where(pick & np.uint64(8), sign, byte) << np.uint64(8 * i)
        return value.astype(np.uint32)

    return _pure(ops[0], of)


def _rounded_pair(whole: NDArray[np.uint64], kind: list[str]) -> Floats:
    """64 bits to float32, upward: the only way that kernels have it, in divisions."""
    if "RP" not in kind:
        raise NotImplementedError("64 bits to the nearest float32")
    rounded = whole.astype(np.float32)
    low = np.array([int(float(found)) < int(exact) for found, exact in zip(rounded, whole, strict=True)])
    return np.where(low, np.nextafter(rounded, np.float32(np.inf)), rounded)


@_of("I2F", "I2FP")
def _to_float(kind: list[str], ops: list[str]) -> Step:
    if "U64" in kind:
        pair = _wide(ops[1])
        return _pure(ops[0], lambda warp: _rounded_pair(pair(warp), kind).view(np.uint32))
    read, part = _word(ops[1].split(".B")[0]), int(ops[1].partition(".B")[2][:1] or 0)

    def of(warp: Warp) -> Words:
        word = read(warp)
        if "U8" in kind:
            word = word >> np.uint32(8 * part) & np.uint32(255)
        unsigned = "U32" in kind or "U8" in kind
        exact = word.astype(np.float64) if unsigned else word.view(np.int32).astype(np.float64)
        bits: Words = _rounded(exact, kind).view(np.uint32)
        return bits

    return _pure(ops[0], of)


@_of("F2I")
def _to_integer(kind: list[str], ops: list[str]) -> Step:
    read = _float(ops[1])
    if "U64" in kind:

        def both(warp: Warp, lanes: Lanes) -> None:
            whole = np.trunc(read(warp)).astype(np.float64).astype(np.uint64)
            _write(warp, ops[0], whole.astype(np.uint32), lanes)
            _write(warp, ops[0], (whole >> np.uint64(32)).astype(np.uint32), lanes, 1)

        return both
    least, most = (0, 2**32 - 1) if "U32" in kind else (-(2**31), 2**31 - 1)

    def of(warp: Warp) -> Words:
        x = np.nan_to_num(np.trunc(read(warp).astype(np.float64)), nan=0.0, posinf=most, neginf=least)
        whole: Words = np.clip(x, least, most).astype(np.int64).astype(np.uint32)
        return whole

    return _pure(ops[0], of)


@_of("FCHK")
def _check_division(kind: list[str], ops: list[str]) -> Step:
    """FCHK: whether a quotient is out of reach of the quick sequence; ours leaves a margin."""
    a, b = _float(ops[1]), _float(ops[2])

    def step(warp: Warp, lanes: Lanes) -> None:
        x = a(warp).view(np.uint32) >> np.uint32(23) & np.uint32(255)
        y = b(warp).view(np.uint32) >> np.uint32(23) & np.uint32(255)
        apart = x.astype(np.int64) - y.astype(np.int64)
        _write_flag(warp, ops[0], (x == 255) | (y == 255) | (y < 3) | (y > 252) | (apart < -100) | (apart > 100), lanes)

    return step


@_of("SHFL")
def _shuffle(kind: list[str], ops: list[str]) -> Step:
    value, by = _word(ops[2]), _word(ops[3])

    def step(warp: Warp, lanes: Lanes) -> None:
        count = by(warp)
        sources = {"BFLY": _LANE ^ count, "IDX": count & np.uint32(31), "UP": _LANE - count, "DOWN": _LANE + count}
        source = sources[kind[1]]
        inside = source < LANES
        source = np.where(inside, source, _LANE)
        _write(warp, ops[1], value(warp)[source], lanes)
        _write_flag(warp, ops[0], inside, lanes)

    return step


@_of("VOTE", "VOTEU")
def _vote(kind: list[str], ops: list[str]) -> Step:
    flag = _flag(ops[-1])

    def step(warp: Warp, lanes: Lanes) -> None:
        votes = flag(warp) & lanes
        word = np.full(LANES, int((votes.astype(np.uint64) << _LANE.astype(np.uint64)).sum()), np.uint32)
        found = np.full(LANES, votes.any() if kind[1] == "ANY" else bool((flag(warp) | ~lanes).all()))
        outs = ops[:-1]
        if not _is_flag(outs[0]):
            _write(warp, outs[0], word, lanes)
        for out in outs:
            if _is_flag(out):
                _write_flag(warp, out, found, lanes)

    return step


@_of("S2R", "S2UR", "CS2R")
def _special(kind: list[str], ops: list[str]) -> Step:
    def of(warp: Warp) -> Words:
        found = {
            "SR_TID.X": np.uint32(warp.index * LANES) + _LANE,
            "SR_CTAID.X": np.full(LANES, warp.cta.block, np.uint32),
            "SR_LANEID": _LANE,
            "SR_LTMASK": (np.uint32(1) << _LANE) - np.uint32(1),
            "SR_EQMASK": np.uint32(1) << _LANE,
            "SRZ": np.zeros(LANES, np.uint32),
            "SR_CgaCtaId": np.zeros(LANES, np.uint32),
        }
        return found[ops[1]]

    def step(warp: Warp, lanes: Lanes) -> None:
        _write(warp, ops[0], of(warp), lanes)
        if kind[0] == "CS2R" and "32" not in kind:
            _write(warp, ops[0], of(warp), lanes, 1)

    return step


def _address(operand: str) -> Callable[[Warp], NDArray[np.int64]]:
    """Reads what stands in the last brackets: registers, of which one may be a pair, and a distance."""
    found = _ADDRESS.search(operand)
    assert found, operand
    parts = found[1].replace("+-", "+~").split("+")
    wide, narrow, distance = [], [], 0
    for part in parts:
        if part.startswith(("0x", "~0x")):
            distance += int(part.lstrip("~"), 16) * (-1 if part.startswith("~") else 1)
        elif part.endswith(".64") or (part.startswith("UR") and "desc" in operand):
            wide.append(_wide(part.removesuffix(".64")))
        elif ".X" in part:
            narrow.append((_word(part.partition(".X")[0]), int(part.partition(".X")[2])))
        elif part:
            narrow.append((_word(part), 1))
    if not wide and "desc" in operand:
        raise NotImplementedError(operand)

    def of(warp: Warp) -> NDArray[np.int64]:
        total = np.full(LANES, distance, np.int64)
        for read in wide:
            total = total + read(warp).view(np.int64)
        for word, times in narrow:
            total = total + word(warp).astype(np.int64) * times
        return total

    return of


def _nbytes_of(kind: list[str]) -> int:
    for word, nbytes in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1), ("16", 2), ("8", 1)):
        if word in kind:
            return nbytes
    return 4


@_of("LDG", "STG", "LD", "ST", "LDS", "STS")
def _load_store(kind: list[str], ops: list[str]) -> Step:
    """LDG, LD, LDS and their stores."""
    store, shared, nbytes = kind[0].startswith("ST"), kind[0].endswith("S"), _nbytes_of(kind)
    at = _address(ops[0] if store else ops[1])
    register = ops[1] if store else ops[0]
    words = max(1, nbytes // 4)
    reads = [_word(register, i) for i in range(words)]

    def step(warp: Warp, lanes: Lanes) -> None:
        if not lanes.any():
            return
        cta = warp.cta
        place = at(warp)[lanes]
        if shared:
            memory = cta.shared
        else:
            memory, place = cta.memory.bytes, place - GLOBAL_BASE
            if place.min() < 0 or place.max() + nbytes > memory.size:
                raise IndexError(f"{'.'.join(kind)} outside of memory: {place.min() + GLOBAL_BASE:#x}")
            sectors = np.unique(np.concatenate([place // SECTOR, (place + nbytes - 1) // SECTOR]))
            cta.counts.sectors += len(sectors)
            (cta.memory.written if store else cta.memory.read)[sectors] = True
        if (place % nbytes).any():
            raise IndexError(f"{'.'.join(kind)}: an address is no multiple of {nbytes}")
        where = place[:, None] + np.arange(nbytes)
        if store:
            data = np.stack([read(warp)[lanes] for read in reads], 1).copy().view(np.uint8)[:, :nbytes]
            memory[where] = data
            return
        data = np.zeros((len(place), 4 * words), np.uint8)
        data[:, :nbytes] = memory[where]
        found = data.view(np.uint32)
        for i in range(words):
            value = np.zeros(LANES, np.uint32)
            value[lanes] = found[:, i]
            _write(warp, register, value, lanes, i)

    return step


@_of("LDGSTS")
def _copy(kind: list[str], ops: list[str]) -> Step:
    """LDGSTS: from global to shared memory; here it has arrived at once."""
    to, at, nbytes = _address(ops[0]), _address(ops[1]), _nbytes_of(kind)

    def step(warp: Warp, lanes: Lanes) -> None:
        if not lanes.any():
            return
        cta, place = warp.cta, at(warp)[lanes] - GLOBAL_BASE
        sectors = np.unique(place // SECTOR)
        cta.counts.sectors += len(sectors)
        cta.memory.read[sectors] = True
        cta.shared[to(warp)[lanes][:, None] + np.arange(nbytes)] = cta.memory.bytes[place[:, None] + np.arange(nbytes)]

    return step


@_of("ATOMS", "ATOMG", "RED")
def _atomic(kind: list[str], ops: list[str]) -> Step:
    """ATOMS, ATOMG, RED: one lane after the other."""
    shared = kind[0] == "ATOMS"
    place_at = next(i for i, op in enumerate(ops) if "[" in op)
    at, outs, values = _address(ops[place_at]), ops[:place_at], [_word(op) for op in ops[place_at + 1 :]]

    def step(warp: Warp, lanes: Lanes) -> None:
        memory = warp.cta.shared if shared else warp.cta.memory.bytes
        places = at(warp) - (0 if shared else GLOBAL_BASE)
        given = [value(warp) for value in values]
        before = np.zeros(LANES, np.uint32)
        for lane in np.flatnonzero(lanes):
            cell = memory[places[lane] : places[lane] + 4].view(np.uint32)
            before[lane] = cell[0]
            if "POPC" in kind:
                cell[0] += np.uint32(1)
            elif "OR" in kind:
                cell[0] |= given[0][lane]
            elif "ADD" in kind:
                cell[0] += given[0][lane]
            elif "CAS" in kind:
                cell[0] = given[1][lane] if cell[0] == given[0][lane] else cell[0]
            else:
                raise NotImplementedError(".".join(kind))
        _write(warp, outs[-1], before, lanes)

    return step


@_of("MOV", "UMOV", "LDC", "ULDC", "R2UR")
def _move(kind: list[str], ops: list[str]) -> Step:
    read = _word(ops[1])
    high = _word(ops[1], 1) if "64" in kind and not ops[1].startswith("c[") else None

    def step(warp: Warp, lanes: Lanes) -> None:
        if ops[1].startswith("c[") and "64" in kind:
            start, _, rest = ops[1].rpartition("[")
            for i in range(2):
                value = _constant(warp.cta, f"{start}[{int(rest.rstrip(']'), 16) + 4 * i:#x}]")
                _write(warp, ops[0], np.full(LANES, value, np.uint32), lanes, i)
            return
        _write(warp, ops[0], read(warp), lanes)
        if high:
            _write(warp, ops[0], high(warp), lanes, 1)

    return step


@_of("P2R")
def _flags_to_register(kind: list[str], ops: list[str]) -> Step:
    mask = int(ops[3], 16)

    def of(warp: Warp) -> Words:
        bits = np.zeros(LANES, np.uint32)
        for i in range(7):
            bits |= warp.predicates[i].astype(np.uint32) << np.uint32(i)
        return bits & np.uint32(mask)

    return _pure(ops[0], of)


@_of("R2P")
def _register_to_flags(kind: list[str], ops: list[str]) -> Step:
    """R2P: seven bits of a word, or of the byte of it that is named, become predicates."""
    name, _, byte = ops[1].partition(".B")
    read, mask, first = _word(name), int(ops[2], 16), 8 * int(byte or 0)

    def step(warp: Warp, lanes: Lanes) -> None:
        for i in range(7):
            if mask >> i & 1:
                _write_flag(warp, f"P{i}", (read(warp) >> np.uint32(first + i) & np.uint32(1)).astype(bool), lanes)

    return step


def _count_bits(words: Words) -> Words:
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8).reshape(-1, 4), axis=1)
    counts: Words = bits.sum(1).astype(np.uint32)
    return counts


def _highest_bit(words: Words) -> Words:
    return (
        np.where(words == 0, np.float64(-1), np.floor(np.log2(np.maximum(words, 1).astype(np.float64))))
        .astype(np.int64)
        .astype(np.uint32)
    )


def _unary(of: Callable[[Words], Words], ops: list[str]) -> Step:
    read = _word(ops[1])
    return _pure(ops[0], lambda warp: of(read(warp)))


def _reversed(words: Words) -> Words:
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return np.packbits(np.ascontiguousarray(bits[:, ::-1]), axis=1, bitorder="little").view(np.uint32).reshape(-1)


_STEPS |= {
    "FMUL": lambda kind, ops: _float_step(np.multiply, ops),
    "POPC": lambda kind, ops: _unary(_count_bits, ops),
    "UPOPC": lambda kind, ops: _unary(_count_bits, ops),
    "FLO": lambda kind, ops: _unary(
        (lambda words: np.uint32(31) - _highest_bit(words)) if "SH" in kind else _highest_bit, ops
    ),
    "BREV": lambda kind, ops: _unary(_reversed, ops),
    "IABS": lambda kind, ops: _unary(lambda words: np.abs(words.view(np.int32)).view(np.uint32), ops),
}


def _nothing(warp: Warp, lanes: Lanes) -> None:
    """Orders memory, which has an order here."""


# Control.


def _control(instruction: Instruction) -> Step | None:
    """Returns what changes which instruction comes next, None for all others."""
    name, ops, target = instruction.opcode.split(".")[0], instruction.operands, instruction.target
    if name == "EXIT":

        def leave(warp: Warp, lanes: Lanes) -> None:
            warp.ended |= lanes
            for barrier in warp.barriers:
                warp.release(barrier)

        return leave
    if instruction.opcode == "BRA.DIV":

        def diverge(warp: Warp, lanes: Lanes) -> None:
            if (lanes != ~warp.ended).any():
                raise NotImplementedError("a collective of a part of the warp")

        return diverge
    if name in ("BRA", "CALL"):
        flag = _flag(ops[0]) if ops and _is_flag(ops[0]) else None

        def jump(warp: Warp, lanes: Lanes) -> None:
            warp.place[lanes & flag(warp) if flag else lanes] = target

        return jump
    if name == "RET":
        register = _register(ops[0])

        def go_back(warp: Warp, lanes: Lanes) -> None:
            warp.place[lanes] = warp.words[register][lanes].astype(np.int64) // 16

        return go_back
    if name == "BSSY":

        def gather(warp: Warp, lanes: Lanes) -> None:
            warp.barriers[ops[0]] = lanes.copy()

        return gather
    if name == "BREAK":

        def give_up(warp: Warp, lanes: Lanes) -> None:
            warp.barriers[ops[-1]] = warp.barriers[ops[-1]] & ~lanes
            warp.release(ops[-1])

        return give_up
    if name in ("BSYNC", "WARPSYNC"):
        barrier = ops[0] if name == "BSYNC" else "warp"

        def wait(warp: Warp, lanes: Lanes) -> None:
            if name == "WARPSYNC":
                warp.barriers["warp"] = ~warp.ended
            warp.waiting[lanes] = barrier
            warp.release(barrier)

        return wait
    if name == "BAR":

        def hold(warp: Warp, lanes: Lanes) -> None:
            warp.held |= lanes

        return hold
    return None


_NOTHING = ("NOP", "MEMBAR", "ERRBAR", "CCTL", "CGAERRBAR", "YIELD", "DEPBAR", "LDGDEPBAR", "ENDCOLLECTIVE")


@_of("HFMA2")
def _unary_half(kind: list[str], ops: list[str]) -> Step:
    """HFMA2.MMA R, -RZ, RZ, a, b: how the compiler writes two halves as a constant."""
    if ops[1].strip("-") != "RZ" or ops[2] != "RZ":
        raise NotImplementedError("HFMA2 with registers")
    halves = np.array([float(ops[4]), float(ops[3])], np.float16).view(np.uint32)
    return _pure(ops[0], lambda warp: np.full(LANES, halves[0], np.uint32))


@_of("MUFU")
def _mufu(kind: list[str], ops: list[str]) -> Step:
    """MUFU.RCP and RSQ, which the hardware gives within one unit in the last place: here rounded."""
    read, root = _float(ops[1]), kind[1] == "RSQ"
    if kind[1] not in ("RCP", "RSQ"):
        raise NotImplementedError(".".join(kind))

    def of(warp: Warp) -> Words:
        x = read(warp).astype(np.float64)
        bits: Words = (1.0 / (np.sqrt(x) if root else x)).astype(np.float32).view(np.uint32)
        return bits

    return _pure(ops[0], of)


def _compiled(instruction: Instruction) -> tuple[Step, Callable[[Warp], Lanes] | None, bool]:
    """Returns the step, the guard, and whether the next instruction always follows for the same threads."""
    guard = _flag(instruction.predicate) if instruction.predicate else None
    step = _control(instruction)
    if step is not None:
        return step, guard, False
    kind = instruction.opcode.split(".")
    ops = [op.replace(".reuse", "") for op in instruction.operands]
    if kind[0] in _NOTHING:
        return _nothing, guard, True
    make = _STEPS.get(kind[0])
    try:
        if make is None:
            raise NotImplementedError(instruction.opcode)
        return make(kind, ops), guard, True
    except (NotImplementedError, ValueError, IndexError) as problem:
        why = f"{instruction.opcode} {', '.join(instruction.operands)}: {problem!r}"

        def unknown(warp: Warp, lanes: Lanes) -> None:
            raise NotImplementedError(why)

        return unknown, guard, True
