"""Law: encoding a shard in pieces is encoding each piece by itself, and what comes back is each piece by itself."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from gradwire.comms.transport.works import Done
from gradwire.compressors.codecs.base import PieceCodec, in_pieces
from gradwire.compressors.kernels import reference
from gradwire.compressors.optim.peers import run_requests
from gradwire.compressors.two_stage import Parts, Residuals, two_stage
from support.block_codecs import CODECS, check_pieces, randn
from support.threads import ThreadGroup, take_turns

CUTS = ((2500, 640), (2048, 1024), (100, 64), (10, 64), (4097, 1408))
"""(elements, elements of a piece): short last pieces, none, a piece that is not full."""


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> PieceCodec:
    return CODECS[request.param]


@pytest.mark.parametrize(("numel", "width"), CUTS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_each_piece_is_encoded_by_itself(codec: PieceCodec, numel: int, width: int, with_residual: bool) -> None:
    x, residual, rows = randn(numel, 0), randn(numel, 1) if with_residual else None, -(-numel // width)
    payloads = torch.full((rows, codec.wire_nbytes(width)), 0xAA, dtype=torch.uint8)
    new_residual, decoded = torch.empty(numel), torch.empty(numel)
    codec.encode_pieces(x, residual, new_residual, payloads, width)
    codec.decode_pieces(payloads, decoded, width)
    for row, start in enumerate(range(0, numel, width)):
        run = slice(start, start + width)
        piece = x[run]
        payload = torch.empty(codec.wire_nbytes(piece.numel()), dtype=torch.uint8)
        wanted_residual, wanted = torch.empty_like(piece), torch.empty_like(piece)
        codec.encode_residual(piece, None if residual is None else residual[run], wanted_residual, payload)
        codec.decode(payload, wanted)
        assert torch.equal(payloads[row, : payload.numel()], payload)
        assert (payloads[row, payload.numel() :] == 0xAA).all(), "written past the payload"
        assert torch.equal(new_residual[run], wanted_residual)
        assert torch.equal(decoded[run], wanted)


@pytest.mark.parametrize(("numel", "width"), CUTS)
def test_the_pieces_are_the_references(native_kernels: ModuleType, numel: int, width: int) -> None:
    for codec in CODECS.values():
        check_pieces(native_kernels, codec, numel, width)


def test_an_empty_shard_has_no_pieces_and_leaves_its_payloads(native_kernels: ModuleType) -> None:
    nothing, width = torch.empty(0), Parts(0, 2).width
    for codec in CODECS.values():
        for kernels in (native_kernels, reference):
            payloads = torch.full((2, 3), 0xAA, dtype=torch.uint8)
            kernels.encode_pieces(codec, nothing, nothing, nothing, payloads, width)
            kernels.decode_pieces(codec, payloads, nothing, width)
            assert (payloads == 0xAA).all()
            with pytest.raises((ValueError, RuntimeError)):  # pieces of nothing never come to an end
                kernels.decode_pieces(codec, payloads, torch.empty(1), width)


def test_reducing_at_once_is_decoding_and_encoding(codec: PieceCodec, native_kernels: ModuleType) -> None:
    """The owner's stage as one is the sum of the payloads, encoded again."""
    numel, nbytes = 2500, codec.wire_nbytes(2500)
    payloads = torch.empty(3, nbytes, dtype=torch.uint8)
    for seed, payload in enumerate(payloads):
        codec.encode(randn(numel, seed), payload)
    residual, reduced_payloads, new_residuals = (
        randn(numel, 9),
        torch.empty(2, nbytes, dtype=torch.uint8),
        torch.empty(2, numel),
    )
    codec.reduce_encode(payloads, residual, new_residuals[0], reduced_payloads[0], numel)
    total = torch.empty(numel)
    codec.decode_reduce(payloads, None, total)
    codec.encode_residual(total, residual, new_residuals[1], reduced_payloads[1])
    assert torch.equal(reduced_payloads[0], reduced_payloads[1])
    assert torch.equal(new_residuals[0], new_residuals[1])


class Sparing:
    """A user's codec that writes every second byte of its payload, and reads no other."""

    def wire_nbytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, flat: Tensor, payload: Tensor) -> None:
        payload[::2] = flat.clamp(-3, 3).mul(16).round().to(torch.int8).view(torch.uint8)

    def decode(self, payload: Tensor, flat: Tensor) -> None:
        flat.copy_(payload[::2].view(torch.int8)).div_(16)


def test_a_codec_of_three_methods_does_each_stage_in_pieces() -> None:
    """What a user's codec lacks follows from its three methods: pieces, the sum of payloads, and what is left out."""
    codec, numel, width = in_pieces(Sparing()), 100, 64
    x, residual, left, decoded = randn(numel, 0), randn(numel, 1), torch.empty(numel), torch.empty(numel)
    payloads = torch.full((2, codec.wire_nbytes(width)), 0xAA, dtype=torch.uint8)
    codec.encode_pieces(x, residual, left, payloads, width)
    codec.decode_pieces(payloads, decoded, width)
    assert torch.allclose(decoded + left, x + residual)
    assert (payloads[0, 1::2] == 0).all() and (payloads[1, 1 : 2 * (numel - width) : 2] == 0).all(), "old memory"
    rows, addend, total = torch.stack([payloads[0], payloads[0]]), randn(width, 2), torch.empty(width)
    codec.decode_reduce(rows, addend, total)
    assert torch.allclose(total, addend + 2 * decoded[:width])
    back, owner_left, told = torch.empty(2 * width, dtype=torch.uint8), torch.empty(width), torch.empty(width)
    codec.reduce_encode(rows, None, owner_left, back, width)
    codec.decode(back, told)
    assert torch.allclose(told + owner_left, 2 * decoded[:width])
    assert in_pieces(codec) is codec


@pytest.mark.parametrize("numel", [0, 1, 65, 200, 2500])
def test_no_old_memory_travels(codec: PieceCodec, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the exchange sends depends on the gradient alone, though its buffers are not cleared as a whole."""
    size, groups = 3, ThreadGroup.create(3)
    parts, fill, sent = Parts(numel, size), 0x00, {}

    def dirty(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
        return torch.full(shape, fill, dtype=dtype, device=device)

    def body(rank: int) -> list[Tensor]:
        group, seen = groups[rank], []

        class Spy:
            rank, size = group.rank, group.size
            all_reduce = group.all_reduce

            def all_to_all(self, output: Tensor, source: Tensor) -> Done:
                seen.append(source.clone())
                return group.all_to_all(output, source)

            def all_gather(self, output: Tensor, source: Tensor) -> Done:
                seen.append(source.clone())
                return group.all_gather(output, source)

        shard = randn(numel, rank)
        run_requests(two_stage(shard, shard, group.member, codec, codec, Residuals()), Spy())
        return [*seen, shard]

    monkeypatch.setattr("gradwire.compressors.two_stage.torch.empty", dirty)
    for fill in (0x00, 0x55):
        sent[fill] = take_turns(size, body)
    assert parts.full <= size
    for clean, other in zip(sent[0x00], sent[0x55], strict=True):
        assert all(torch.equal(one, another) for one, another in zip(clean, other, strict=True))
