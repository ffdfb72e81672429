"""Types of the compiled module `gradwire._native` (csrc/cpu).

Tensors are passed as addresses (`tensor.data_ptr()`, 0 for None): the callers in compressors/kernels/native.py check
device, dtype, contiguity and length first. Every function releases the GIL.
"""

from collections.abc import Sequence

SHM_MAX_RANKS: int

def shm_segment_nbytes(size: int, block_nbytes: int) -> int: ...

class SharedMemoryGroup:
    def __init__(self, descriptor: int, rank: int, size: int, block_nbytes: int, timeout_seconds: float) -> None: ...
    def all_reduce(self, data: int, numel: int, dtype: int, op: int, scale: float, /) -> bool: ...
    def reduce(self, data: int, numel: int, dtype: int, root: int, op: int, scale: float, /) -> bool: ...
    def reduce_scatter(self, data: int, numel: int, dtype: int, bounds: Sequence[int], scale: float, /) -> bool: ...
    def all_gather_slices(self, data: int, numel: int, dtype: int, bounds: Sequence[int], /) -> bool: ...
    def all_gather(self, output: int, source: int, numel: int, dtype: int, /) -> bool: ...
    def all_to_all(self, output: int, source: int, numel: int, dtype: int, /) -> bool: ...
    def broadcast(self, data: int, numel: int, dtype: int, root: int, /) -> bool: ...
    def barrier(self) -> bool: ...
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...
    def failure(self) -> tuple[bool, str, list[int]]: ...

def isa() -> str: ...
def limit_isa(name: str) -> None: ...
def cast_encode(
    half: bool, gradient: int, scale: float, residual: int, new_residual: int, target: int, numel: int
) -> None: ...
def cast_decode_reduce(
    half: bool, sources: int, stride: int, workers: int, addend: int, target: int, numel: int
) -> None: ...
def onebit_encode(gradient: int, residual: int, new_residual: int, payload: int, numel: int) -> None: ...
def onebit_decode_reduce(payloads: int, stride: int, workers: int, addend: int, target: int, numel: int) -> None: ...
def onebit_reduce_encode(
    payloads: int, stride: int, workers: int, residual: int, new_residual: int, reduced: int, numel: int
) -> None: ...
def quantize_encode(
    bits: int, gradient: int, residual: int, new_residual: int, payload: int, numel: int, random: bool, key: int
) -> None: ...
def quantize_decode_reduce(
    bits: int, payloads: int, stride: int, workers: int, addend: int, target: int, numel: int
) -> None: ...
def quantize_reduce_encode(
    bits: int,
    payloads: int,
    stride: int,
    workers: int,
    residual: int,
    new_residual: int,
    reduced: int,
    numel: int,
    random: bool,
    key: int,
) -> None: ...
def waterfill_encode(bits: int, gradient: int, residual: int, new_residual: int, payload: int, numel: int) -> None: ...
def waterfill_decode_reduce(
    bits: int, payloads: int, stride: int, workers: int, addend: int, target: int, numel: int
) -> None: ...
def waterfill_reduce_encode(
    bits: int,
    payloads: int,
    stride: int,
    workers: int,
    residual: int,
    new_residual: int,
    reduced: int,
    numel: int,
) -> None: ...
def chunk_topk_encode(
    chunk: int,
    keep: int,
    decay: float,
    gradient: int,
    residual: int,
    new_residual: int,
    payload: int,
    numel: int,
) -> None: ...
def chunk_topk_decode_reduce(
    chunk: int, keep: int, payloads: int, stride: int, workers: int, addend: int, target: int, numel: int
) -> None: ...
def chunk_topk_reduce_encode(
    chunk: int,
    keep: int,
    decay: float,
    payloads: int,
    stride: int,
    workers: int,
    residual: int,
    new_residual: int,
    reduced: int,
    numel: int,
) -> None: ...
def dgc_step(
    gradient: int,
    velocity: int,
    total: int,
    velocity_out: int,
    total_out: int,
    numel: int,
    momentum: float,
    scale: float,
    nesterov: bool,
    k: int,
    indices_out: int,
    values_out: int,
) -> None: ...
def scatter_add(indices: int, values: int, count: int, target: int, numel: int) -> None: ...
def powersgd_project(matrix: int, residual: int, rows: int, columns: int, rank: int, q: int, p: int) -> None: ...
def powersgd_back_project(matrix: int, rows: int, columns: int, rank: int, p: int, q: int) -> None: ...
def powersgd_restore(
    matrix: int, new_residual: int, rows: int, columns: int, rank: int, p: int, q_own: int, q_sum: int
) -> None: ...
def orthogonalize(matrix: int, rank: int, columns: int, key: int) -> None: ...
def move(
    pieces: Sequence[tuple[int, int, int, int]], scale: float, buffer: int, buffer_format: int, into_buffer: bool
) -> None: ...
