"""Law: each stage of the two-stage exchange is one launch on CUDA, however many owners there are; the bits stay."""

from collections.abc import Sequence

import pytest
import torch

from gradwire.comms.transport.echo import EchoGroup
from gradwire.compressors.codecs.cast import CastCodec
from gradwire.compressors.codecs.onebit import OneBitCodec
from gradwire.compressors.codecs.quantize import QuantizeCodec
from gradwire.compressors.kernels import cuda, reference
from gradwire.compressors.kernels import dispatch as kernels
from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.optim.peers import run_requests
from gradwire.compressors.two_stage import Residuals, two_stage
from support.block_codecs import CODECS, check_pieces, randn

CUTS = ((2500, 640), (2048, 1024), (100, 64), (10, 64), (9001, 1408), (5000, 1000))


@pytest.mark.parametrize(("numel", "width"), CUTS)
@pytest.mark.parametrize("name", CODECS)
def test_pieces_are_the_references(device: torch.device, name: str, numel: int, width: int) -> None:
    side_by_side = CODECS[name].family == "cast"
    for padding in (0,) if side_by_side else (0, 1):
        check_pieces(cuda, CODECS[name], numel, width, device, padding)


@pytest.mark.parametrize("numel", [1, 33, 513, 1025, 4097])
@pytest.mark.parametrize("name", CODECS)
def test_the_sum_of_one_payload_is_encoded_again(device: torch.device, name: str, numel: int) -> None:
    codec, payloads = CODECS[name], torch.empty(1, CODECS[name].wire_nbytes(numel), dtype=torch.uint8)
    reference.encode_pieces(codec, randn(numel, 10), None, None, payloads, numel)
    reduced, wanted = torch.empty_like(payloads[0], device=device), torch.empty_like(payloads[0])
    cuda.reduce_encode(codec, payloads.to(device), None, None, reduced, numel)
    reference.reduce_encode(codec, payloads, None, None, wanted, numel)
    assert torch.equal(reduced.cpu(), wanted)


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
        run_requests(two_stage(shard, shard, EchoGroup(size).member, codec, codec, residuals), EchoGroup(size))
        outputs.append(
            [tensor.cpu() for tensor in (shard, residuals.new_worker, residuals.new_server) if tensor is not None]
        )
    assert len(launched) == (4 if name == "float16 scaled" else 3), launched  # no kernel sums and scales
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(*outputs, strict=True))


def test_pieces_that_do_not_fit_are_refused(device: torch.device) -> None:
    x = torch.randn(2048, device=device)
    codec = OneBitCodec()
    payloads = torch.empty(2, codec.wire_nbytes(1024), dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="`width`"):
        cuda.encode_pieces(codec, x, None, None, payloads, 0)
    with pytest.raises(ValueError, match="`payloads` has 1 rows"):
        cuda.encode_pieces(codec, x, None, None, payloads[:1], 1024)
    with pytest.raises(ValueError, match="`payloads`"):
        cuda.decode_pieces(QuantizeCodec(8), payloads, x, 1024)
    halves = torch.empty(2, 2050, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="2050 bytes apart; wanted 2048"):
        cuda.decode_pieces(CastCodec("bfloat16"), halves, x, 1024)
