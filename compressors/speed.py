"""Measures how fast codecs run on this machine, which depends on its instruction set: AVX-512, AVX2, NEON."""

import functools
import time

import torch

from gradwire.compressors.codecs.quantize import QuantizeCodec

ASSUMED_BYTES_PER_SECOND = 20e9
"""Bytes per second that codecs move through memory on one core where the kernels are not compiled and cannot be timed:
EPYC (Zen 4) with AVX-512, gradients of 8 MiB, 2026."""

_NUMEL = 1 << 18
"""Elements of the gradient that is encoded: with its residuals more bytes than the caches of one core hold."""
_SECONDS = 0.003
_LEAST_ROUNDS = 3
"""Rounds at least; the first one touches new pages."""


@functools.cache
def core_bytes_per_second() -> float:
    """Returns the bytes per second that codecs read and write on one core of this machine.

    Measured once a process, in about 3 ms: int8, encoded with a residual and decoded, the fastest of the rounds. Codecs
    of the same instruction set move about as many bytes a second, because memory limits them.
    """
    try:
        from gradwire.compressors.kernels import native
    except ImportError:  # the wheel without the compiled part, for predictions alone
        return ASSUMED_BYTES_PER_SECOND
    codec = QuantizeCodec(8)
    gradient, residual, decoded = (torch.zeros(_NUMEL, dtype=torch.float32, device="cpu") for _ in range(3))
    payload = torch.zeros(1, codec.wire_nbytes(_NUMEL), dtype=torch.uint8, device="cpu")
    moved = 4 * gradient.nbytes + 2 * payload.nbytes  # gradient, both residuals and the result; the payload twice
    fastest, rounds, stop = float("inf"), 0, time.perf_counter() + _SECONDS
    while rounds < _LEAST_ROUNDS or time.perf_counter() < stop:
        began = time.perf_counter()
        native.encode_pieces(codec, gradient, residual, residual, payload, _NUMEL)
        native.decode_pieces(codec, payload, decoded, _NUMEL)
        fastest, rounds = min(fastest, time.perf_counter() - began), rounds + 1
    return moved / fastest
