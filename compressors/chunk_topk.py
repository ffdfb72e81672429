"""The largest 64 of each 4,096 values at two bits each: for what is exchanged rarely, such as a pseudo-gradient."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.compressors.kernels.dispatch import KERNELS_ON
from gradwire.compressors.kernels.reference import ChunkRule, chunk_topk_nbytes
from gradwire.compressors.two_stage import PieceCodec, TwoStage


@dataclass(frozen=True, slots=True)
class ChunkTopkCodec(PieceCodec):
    """The largest magnitudes of each chunk as sign, one of two levels, and place.

    What it encodes is p = flat + decay * residual, and exactly p is what the payload and the new residual account for:
    approximation + new residual == p wherever nothing was sent, and within one rounding where something was. A chunk of
    zeros decodes to zeros; a chunk with inf or NaN decodes to NaN at every place that was kept.
    Source: Sarfi et al., SparseLoCo, arXiv 2508.15706.
    """

    rule: ChunkRule

    def wire_nbytes(self, numel: int) -> int:
        """See `Codec.wire_nbytes`."""
        return chunk_topk_nbytes(numel, self.rule)

    def encode_residual(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor
    ) -> None:
        """See `FusedCodec.encode_residual`, with decay * residual in place of the residual."""
        if flat.numel():
            KERNELS_ON[flat.device.type].chunk_topk_encode(self.rule, flat, residual, new_residual, payload)

    def decode_reduce(self, payloads: Tensor, addend: Tensor | None, flat: Tensor) -> None:
        """See `FusedCodec.decode_reduce`."""
        if flat.numel():
            KERNELS_ON[flat.device.type].chunk_topk_decode_reduce(self.rule, payloads, addend, flat)

    def encode_pieces(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payloads: Tensor, width: int
    ) -> None:
        """See `PieceCodec.encode_pieces`, with decay * residual in place of the residual."""
        KERNELS_ON[flat.device.type].chunk_topk_encode_pieces(self.rule, flat, residual, new_residual, payloads, width)

    def decode_pieces(self, payloads: Tensor, flat: Tensor, width: int) -> None:
        """See `PieceCodec.decode_pieces`."""
        KERNELS_ON[flat.device.type].chunk_topk_decode_pieces(self.rule, payloads, flat, width)

    def reduce_encode(
        self, payloads: Tensor, residual: Tensor | None, new_residual: Tensor | None, reduced: Tensor, numel: int
    ) -> None:
        """See `PieceCodec.reduce_encode`, with decay * residual in place of the residual."""
        if numel:
            KERNELS_ON[payloads.device.type].chunk_topk_reduce_encode(
                self.rule, payloads, residual, new_residual, reduced, numel
            )


class ChunkTopk(TwoStage):
    """The compressor "chunk_topk": 0.164 bits an element each way with the defaults.

    Published schemes gather everybody's payload everywhere; here owners sum and encode again, so that what a rank
    receives does not grow with the group.

    With decay 1 outputs and residuals account for every gradient, as with the other compressors. With a smaller one a
    residual e gives up (1 - decay) e each time that it is added to the next gradient, on both stages: after T steps the
    outputs and the residuals together are the gradients less what was given up. `flush` and moving state give up
    nothing.

    Args:
        chunk: Elements of a chunk, a power of two from 256 to 4096.
        keep: How many of each chunk are sent, 1 to min(chunk, 512); of a shorter chunk the same share, rounded up.
        decay: Factor of the residual before it is added to the next gradient, 0 to 1.
        residual: Keep what is left out; without, it is lost.
        warmup_steps: Steps at the start whose gradients are sent dense.

    Raises:
        ValueError: An option is out of range.

    Source: Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, arXiv 2508.15706.
    """

    def __init__(
        self,
        *,
        chunk: int = 4096,
        keep: int = 64,
        decay: float = 0.95,
        residual: bool = True,
        warmup_steps: int = 0,
    ) -> None:
        if chunk not in (256, 512, 1024, 2048, 4096):
            raise ValueError(f"`chunk` is {chunk}; wanted a power of two from 256 to 4096")
        if not 1 <= keep <= min(chunk, 512):
            raise ValueError(f"`keep` is {keep}; wanted 1 to {min(chunk, 512)}")
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"`decay` is {decay}; wanted 0 <= decay <= 1")
        rule = ChunkRule(chunk, keep, float(decay))
        super().__init__("chunk_topk", ChunkTopkCodec(rule), residual=residual, warmup_steps=warmup_steps)

    def prepare(self, device: torch.device) -> None:
        """See `TwoStage.prepare`."""
        _ = KERNELS_ON[device.type]
