"""Runs every compiled CPU kernel on fixed inputs and prints digests of the results, to compare processors.

Needs the compiled module and Python's standard library alone, so that it runs under emulation:

    python vectors.py PATH_TO_NATIVE_MODULE INSTRUCTION_SET [DIGESTS]

INSTRUCTION_SET is that of the module, or `best` for the widest of this processor. With DIGESTS, a file that was printed
before, it names the cases that differ from it instead, and ends with status 1 if there are any: so a wheel is tried on
each processor that it is built for.

The output is JSON: digests by case. NaNs count as one value: processors differ in the sign and payload of a NaN that
they make, and no result of a training depends on them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import sys
from array import array
from math import isnan
from types import ModuleType

NUMELS = (1, 5, 63, 64, 100, 512, 1_025, 4_099, 16_384, 16_417, 33_000)
WORKERS = 3
QUIET_NAN = b"\x00\x00\xc0\x7f"
Results = dict[str, str]


def load(path: str) -> ModuleType:
    """Loads the extension module at `path`, whatever its file is called."""
    spec = importlib.util.spec_from_file_location("_native", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gradient(numel: int, seed: int) -> array[float]:
    """Returns float32 of magnitudes from 2^-7 to 2 with random signs."""
    width = 4 * numel
    bits = int.from_bytes(random.Random(seed).randbytes(width), "little")
    keep = int.from_bytes(b"\xff\xff\xff\x83" * numel, "little")
    exponents = int.from_bytes(b"\x00\x00\x00\x3c" * numel, "little")
    return array("f", (bits & keep | exponents).to_bytes(width, "little"))


def any_bits(numel: int, seed: int) -> array[float]:
    """Returns random bits as float32: subnormal numbers, infinities and NaNs are among them."""
    return array("f", random.Random(seed).randbytes(4 * numel))


def special(numel: int, seed: int) -> array[float]:
    """Returns a gradient with zeros of both signs, subnormal and huge numbers, the halves between two of float16."""
    values = gradient(numel, seed)
    rare = (0.0, -0.0, 1e-40, -1e-45, 6e-8, 3e-5, 65_519.0, 65_520.0, 3e38, 1.0009765625, 1.00390625, 2.0**-24)
    for place in range(0, numel, 7):
        values[place] = rare[place // 7 % len(rare)]
    return values


def not_finite(numel: int, seed: int) -> array[float]:
    """Returns a gradient with an infinity and a NaN in it."""
    values = gradient(numel, seed)
    values[numel // 2] = float("inf")
    values[numel // 3] = float("nan")
    return values


INPUTS = {"gradient": gradient, "special": special, "not finite": not_finite, "any bits": any_bits}


def address(buffer: array[float] | array[int]) -> int:
    return buffer.buffer_info()[0]


def one_nan(values: array[float]) -> bytes:
    """Returns the bytes of float32 with every NaN replaced by the same one."""
    return b"".join(QUIET_NAN if isnan(value) else array("f", (value,)).tobytes() for value in values)


def one_nan_16(payload: bytes, half: bool) -> bytes:
    """Returns 16-bit floats with every NaN replaced by the same one, as `one_nan`."""
    infinity = 0x7C00 if half else 0x7F80
    words = array("H", payload)
    return array("H", (0x7FFF if word & 0x7FFF > infinity else word for word in words)).tobytes()


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()[:16]


def waterfill_nbytes(numel: int, bits: int) -> int:
    """Bytes of a payload: see csrc/common/waterfill_formula.h."""
    nbytes = 0
    for start in range(0, numel, 16_384):
        blocks = -(-min(16_384, numel - start) // 32)
        nbytes += 4 + -(-blocks // 4) * 4 + 4 * (bits * blocks - 129 * blocks // 512)
    return nbytes


def formats() -> dict[str, tuple[str, list[float], int]]:
    """Returns family, parameters and bits of a 16-bit float (0 for others) by the name of a case."""
    found: dict[str, tuple[str, list[float], int]] = {
        "fp16": ("cast", [1.0, 0.125], 16),
        "bf16": ("cast", [0.0, 0.125], 16),
        "onebit": ("onebit", [], 0),
    }
    for bits in (8, 4):
        for rounding in (0, 1):
            found[f"int{bits} {'random' if rounding else 'nearest'}"] = ("quantize", [bits, rounding, 77], 0)
    for bits in (2, 3, 4, 5):
        found[f"waterfill{bits}"] = ("waterfill", [bits], 0)
    return found


def payload_nbytes(family: str, parameters: list[float], numel: int) -> int:
    if family == "cast":
        return 2 * numel
    if family == "onebit":
        return 4 * -(-numel // 1_024) + -(-numel // 8)
    if family == "quantize":
        return 8 * -(-numel // 512) + -(-numel * int(parameters[0]) // 8)
    return waterfill_nbytes(numel, int(parameters[0]))


def run_formats(native: ModuleType) -> Results:
    """Encodes, sums and encodes again with every block codec, on every input."""
    results: Results = {}
    for name, (family, parameters, cast) in formats().items():
        codec = native.block_format(family, parameters)

        for kind, make in INPUTS.items():
            for numel in NUMELS if kind != "any bits" else (100, 4_099):
                scales = 4 * -(-numel // 1_024) if family == "onebit" else 0  # floats at the start of a payload

                def clean(payload: bytes, scales: int = scales, cast: int = cast, name: str = name) -> bytes:
                    if cast:
                        return one_nan_16(payload, name == "fp16")
                    return one_nan(array("f", payload[:scales])) + payload[scales:]

                nbytes = payload_nbytes(family, parameters, numel)
                stride = -(-nbytes // 64) * 64
                payloads, residuals = array("B", bytes(stride * WORKERS)), b""
                for worker in range(WORKERS):
                    source, residual = make(numel, 10 * numel + worker), gradient(numel, worker)
                    kept = residual if worker else None
                    left = array("f", bytes(4 * numel))
                    codec.encode_pieces(
                        address(source), address(kept) if kept else 0, address(left),
                        address(payloads) + worker * stride, stride, numel, numel,
                    )  # fmt: skip
                    residuals += one_nan(left)
                raw = payloads.tobytes()
                sent = b"".join(clean(raw[at : at + nbytes]) for at in range(0, stride * WORKERS, stride))
                total, addend = array("f", bytes(4 * numel)), gradient(numel, 5)
                codec.decode_reduce(address(payloads), stride, WORKERS, address(addend), address(total), numel)
                residual, left = gradient(numel, 6), array("f", bytes(4 * numel))
                again = array("B", bytes(stride))
                codec.reduce_encode(
                    address(payloads), stride, WORKERS, address(residual), address(left), address(again), numel
                )
                results[f"{name}, {kind}, {numel}"] = digest(
                    sent, residuals, one_nan(total), one_nan(left), clean(again.tobytes()[:nbytes])
                )
    return results


def run_dgc(native: ModuleType) -> Results:
    """Two steps of deep gradient compression, heavy ball and Nesterov."""
    results: Results = {}
    for kind in ("gradient", "special", "not finite"):
        for numel in (17, 600, 16_417, 40_000):
            for nesterov in (False, True):
                k = max(1, numel // 50)
                velocity, total = array("f", bytes(4 * numel)), array("f", bytes(4 * numel))
                parts: list[bytes] = []
                for step in range(2):
                    source = INPUTS[kind](numel, numel + step)
                    indices, values = array("i", bytes(4 * k)), array("f", bytes(4 * k))
                    native.dgc_step(
                        address(source), address(velocity), address(total), address(velocity), address(total), numel,
                        0.9, 0.5, nesterov, k, address(indices), address(values),
                    )  # fmt: skip
                    parts += [indices.tobytes(), one_nan(values), one_nan(velocity), one_nan(total)]
                results[f"dgc, {kind}, {numel}, {nesterov}"] = digest(*parts)
    return results


def run_powersgd(native: ModuleType) -> Results:
    """One step of PowerSGD's local work on matrices of even and odd sizes."""
    results: Results = {}
    for rows, columns, rank in ((64, 128, 4), (33, 77, 5), (7, 1_030, 2), (16, 16, 1)):
        matrix, residual = gradient(rows * columns, 1), gradient(rows * columns, 2)
        q = gradient(rank * columns, 3)
        p, own = array("f", bytes(4 * rank * rows)), array("f", bytes(4 * rank * columns))
        native.orthogonalize(address(q), rank, columns, 5)
        native.powersgd_project(address(matrix), address(residual), rows, columns, rank, address(q), address(p))
        native.orthogonalize(address(p), min(rank, rows), rows, 9)
        native.powersgd_back_project(address(matrix), rows, columns, rank, address(p), address(own))
        left = array("f", bytes(4 * rows * columns))
        native.powersgd_restore(
            address(matrix), address(left), rows, columns, rank, address(p), address(own), address(q)
        )
        results[f"powersgd, {rows} x {columns}, {rank}"] = digest(
            *(one_nan(each) for each in (q, p, own, matrix, left))
        )
    return results


def run_outer(native: ModuleType) -> Results:
    """What an exchange of parameters does to them."""
    numel = 4_101
    parameter, anchor = gradient(numel, 1), gradient(numel, 2)
    sent, flat = array("f", bytes(4 * numel)), array("f", bytes(4 * numel))
    native.outer_set_out([(address(parameter), numel)], address(anchor), address(sent), address(flat))
    native.outer_take_up([(address(parameter), numel)], address(flat), address(sent), address(anchor))
    inputs = [INPUTS[kind](numel, 3) for kind in ("gradient", "not finite")]  # alive while they are read
    finite = [native.all_finite(address(each), numel) for each in inputs]
    return {"outer": digest(*(one_nan(each) for each in (parameter, anchor, sent, flat)), repr(finite).encode())}


DTYPES = {"float32": ("f", 0), "float64": ("d", 1), "float16": ("H", 2), "bfloat16": ("H", 3), "int32": ("i", 4)}
"""Typecode of `array` and number in csrc/cpu/shm/layout.h."""
OPS = {"sum": 0, "max": 1, "min": 2}
SIZE = 2
NUMEL = 5_003


def shared_input(name: str, rank: int) -> array[float] | array[int]:
    """Returns a rank's tensor of 5,003 elements."""
    code, _ = DTYPES[name]
    if name in ("float32", "float64"):
        return array(code, special(NUMEL, rank))
    if name == "int32":
        return array(code, random.Random(rank).randbytes(4 * NUMEL))
    words = array(code, random.Random(rank).randbytes(2 * NUMEL))
    infinity = 0x7C00 if name == "float16" else 0x7F80
    return array(code, (word & 0x8000 | 0x3C01 if word & infinity == infinity else word for word in words))


def run_shared(native: ModuleType) -> Results:
    """All-reduces through shared memory between two processes: every dtype and reduce op, and a scaled sum."""
    block = 64 << 10
    nbytes = native.shm_segment_nbytes(SIZE, block)
    descriptor = os.memfd_create("vectors")
    os.ftruncate(descriptor, nbytes)
    child = os.fork()
    rank = 1 if child == 0 else 0
    results: Results = {}
    status = 1
    try:
        group = native.SharedMemoryGroup(descriptor, rank, SIZE, block, 60.0)
        for name, (_, number) in DTYPES.items():
            for op, code in OPS.items():
                for scale in (1.0, 0.5) if op == "sum" and name != "int32" else (1.0,):
                    data = shared_input(name, rank)
                    assert group.all_reduce(address(data), NUMEL, number, code, scale), group.failure()
                    results[f"shared memory, {name}, {op}, {scale}"] = digest(data.tobytes())
        group.barrier()
        group.close()
        status = 0
    finally:
        if rank == 1:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    assert ended == 0, f"rank 1 ended with {ended}"
    return results


def main() -> None:
    native = load(sys.argv[1])
    isa = native.isa() if sys.argv[2] == "best" else sys.argv[2]
    native.limit_isa(isa)
    assert native.isa() == isa, f"this processor has {native.isa()}"
    results = run_formats(native) | run_dgc(native) | run_powersgd(native) | run_outer(native)
    if isa != "plain":  # shared memory chooses its instruction set by itself
        results |= run_shared(native)
    if len(sys.argv) < 4:
        print(json.dumps(results, indent=0))
        return
    with open(sys.argv[3]) as file:  # noqa: PTH123 - the standard library's least
        recorded: Results = json.load(file)
    differ = sorted(case for case in recorded.keys() | results.keys() if recorded.get(case) != results.get(case))
    print(f"{isa}: {len(results)} results, {len(differ)} differ: {', '.join(differ[:8])}".removesuffix(": "))
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
