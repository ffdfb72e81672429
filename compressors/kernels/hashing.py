"""Random numbers without a generator: hashes of a key and a counter, the same on every machine and in every order."""

import zlib

import torch
from torch import Tensor


def hash_uniforms(key: int, numel: int, device: torch.device) -> Tensor:
    """Returns (numel) float32 numbers in [0, 1) that depend only on `key` (32 bits) and their index.

    Source: the 32-bit finaliser of MurmurHash3 (Austin Appleby, public domain).
    """
    mask = 0xFFFFFFFF
    h = (torch.arange(numel, dtype=torch.int64, device=device) * 0x9E3779B9 + key) & mask
    h = ((h ^ h >> 16) * 0x85EBCA6B) & mask
    h = ((h ^ h >> 13) * 0xC2B2AE35) & mask
    return ((h ^ h >> 16) >> 8).float() * 2.0**-24


def mix_key(*numbers: int) -> int:
    """Returns 32 bits that depend on all `numbers` and their order: a key for `hash_uniforms`."""
    return zlib.crc32(b"".join(number.to_bytes(8, "little", signed=True) for number in numbers))


def name_key(name: str) -> int:
    """Returns 32 bits that depend on a parameter's name."""
    return zlib.crc32(name.encode())
