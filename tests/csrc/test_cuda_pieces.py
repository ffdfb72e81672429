"""Law: each stage of the two-stage exchange is one launch on CUDA, however many owners there are; the bits stay."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gradwire.comms.transport.echo import EchoGroup
from gradwire.compressors.cast import CastCodec
from gradwire.compressors.chunk_topk import ChunkTopkCodec
from gradwire.compressors.kernels import cuda, reference
from gradwire.compressors.kernels import dispatch as kernels
from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.reference import ChunkRule
from gradwire.compressors.onebit import OneBitCodec
from gradwire.compressors.optim.peers import carry_out
from gradwire.compressors.quantize import QuantizeCodec
from gradwire.compressors.two_stage import PieceCodec, Residuals, two_stage
from gradwire.compressors.waterfill import WaterfillCodec

CUTS = ((2500, 640), (2048, 1024), (100, 64), (10, 64), (9001, 1408), (5000, 1000))
TOPK = ChunkRule(1024, 40, 0.5)
CODECS: dict[str, PieceCodec] = {
    "bf16": CastCodec("bfloat16"),
    "fp16": CastCodec("float16"),
    "int8": QuantizeCodec(8, 5),
    "int4": QuantizeCodec(4),
    "onebit": OneBitCodec(),
    "waterfill4": WaterfillCodec(4),
    "chunk_topk": ChunkTopkCodec(TOPK),
}


def randn(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("numel", "width"), CUTS)
@pytest.mark.parametrize("padding", [0, 1])
def test_onebit_pieces_are_the_references(device: torch.device, numel: int, width: int, padding: int) -> None:
    nbytes = reference.onebit_nbytes(width)
    check_pieces("onebit", (), (), device, numel, width, nbytes, padding)


@pytest.mark.parametrize(("numel", "width"), CUTS)
def test_chunk_topk_pieces_are_the_references(device: torch.device, numel: int, width: int) -> None:
    check_pieces("chunk_topk", (TOPK,), (), device, numel, width, reference.chunk_topk_nbytes(width, TOPK), 1)


@pytest.mark.parametrize(("numel", "width"), [*CUTS[:4], (40_000, 17_024)])
def test_waterfill_pieces_are_the_references(device: torch.device, numel: int, width: int) -> None:
    check_pieces("waterfill", (5,), (), device, numel, width, reference.waterfill_nbytes(width, 5), numel % 3)


@pytest.mark.parametrize(("numel", "width"), CUTS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("key", [None, 11])
def test_quantized_pieces_are_the_references(
    device: torch.device, numel: int, width: int, bits: int, key: int | None
) -> None:
    check_pieces("quantize", (bits,), (key,), device, numel, width, reference.quantize_nbytes(width, bits), bits % 8)


def check_pieces(
    stage: str,
    first: tuple[object, ...],
    last: tuple[object, ...],
    device: torch.device,
    numel: int,
    width: int,
    nbytes: int,
    padding: int,
) -> None:
    """Payloads, what they leave out and what comes back, in rows that are `padding` bytes apart."""
    x, residual, rows = randn(numel, 0), randn(numel, 1), -(-numel // width)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for there, of in ((device, cuda), (torch.device("cpu"), reference)):
        payload = torch.full((rows, nbytes + padding), 0xAA, dtype=torch.uint8, device=there)
        new_residual, target = torch.empty(numel, device=there), torch.empty(numel, device=there)
        getattr(of, f"{stage}_encode_pieces")(
            *first, x.to(there), residual.to(there), new_residual, payload, width, *last
        )
        getattr(of, f"{stage}_decode_pieces")(*first, payload, target, width)
        found.append((payload.cpu(), new_residual.cpu(), target.cpu()))
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(*found, strict=True))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("numel", [1, 33, 513, 1025, 4097])
def test_reducing_is_the_references(device: torch.device, workers: int, with_residual: bool, numel: int) -> None:
    residual = randn(numel, 1) if with_residual else None
    for name, codec in CODECS.items():
        payloads = torch.empty(workers, codec.wire_nbytes(numel), dtype=torch.uint8)
        for seed, payload in enumerate(payloads):
            codec.encode(randn(numel, 10 + seed), payload)
        there = None if residual is None else residual.to(device)
        reduced, new_residual = torch.empty_like(payloads[0], device=device), torch.empty(numel, device=device)
        wanted, wanted_residual = torch.empty_like(payloads[0]), torch.empty(numel)
        reduce_encode(cuda, codec, payloads.to(device), there, new_residual, reduced)
        reduce_encode(reference, codec, payloads, residual, wanted_residual, wanted)
        assert torch.equal(reduced.cpu(), wanted), name
        assert torch.equal(new_residual.cpu(), wanted_residual), name


def reduce_encode(
    of: object, codec: PieceCodec, payloads: Tensor, residual: Tensor | None, new_residual: Tensor, reduced: Tensor
) -> None:
    """The codec's owner's stage by one set of kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kernels.KERNELS_ON, payloads.device.type, of)
        codec.reduce_encode(payloads, residual, new_residual, reduced, new_residual.numel())


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("name", CODECS)
def test_an_exchange_is_three_launches(
    device: torch.device, name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, numel, launched, start = CODECS[name], 6000, [], cuda_launch.launch

    def count(
        file: str,
        kernel: str,
        where: torch.device,
        blocks: int,
        arguments: Sequence[cuda_launch.Argument],
        threads: int = cuda_launch.THREADS,
    ) -> None:
        launched.append(kernel)
        start(file, kernel, where, blocks, arguments, threads)

    outputs = []
    for of, there in ((cuda, device), (reference, torch.device("cpu"))):
        monkeypatch.setattr(cuda_launch, "launch", count)
        monkeypatch.setitem(kernels.KERNELS_ON, there.type, of)
        shard, width = randn(numel, 0).to(there), -(-numel // (64 * size)) * 64
        residuals = Residuals(
            randn(numel, 1).to(there),
            torch.empty(numel, device=there),
            randn(width, 2).to(there),
            torch.empty(width, device=there),
        )
        carry_out(two_stage(shard, shard, EchoGroup(size).member, codec, codec, residuals), EchoGroup(size))
        outputs.append(
            [tensor.cpu() for tensor in (shard, residuals.new_worker, residuals.new_server) if tensor is not None]
        )
    assert len(launched) == 3, launched
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(*outputs, strict=True))


def test_pieces_that_do_not_fit_are_refused(device: torch.device) -> None:
    x = torch.randn(2048, device=device)
    payloads = torch.empty(2, reference.onebit_nbytes(1024), dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="`width`"):
        cuda.onebit_encode_pieces(x, None, None, payloads, 0)
    with pytest.raises(ValueError, match="`payloads` has 1 rows"):
        cuda.onebit_encode_pieces(x, None, None, payloads[:1], 1024)
    with pytest.raises(ValueError, match="`payloads`"):
        cuda.quantize_decode_pieces(8, payloads, x, 1024)
