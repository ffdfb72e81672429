"""What a compressor loses: checked against a bound, with figures that stand beside the table, never in it.

Inputs are drawn as gradients are: a part that all ranks share and noise of each rank's own. One step is taken with
empty residuals, so that the bounds below hold; s is the true sum, x_r the inputs, e the error of the result.

| compressor      | bound                                            | why                                              |
|-----------------|--------------------------------------------------|--------------------------------------------------|
| fp16            | abs(e_i) <= 2^-10 sum_r abs(x_ri) + (n+1) 2^-24  | each input and the sum are rounded once          |
| bf16            | abs(e_i) <= 2^-7 sum_r abs(x_ri)                 | the same with 8 bits of precision                |
| int8, int4      | abs(e_i) <= (sum_r range(x_r) + 2 range) / (2^b - 1) | one step of a block's range, twice           |
| any other       | norm(e) <= 2 sum_r norm(x_r)                     | a compressor is a contraction, applied twice     |

Source: IEEE 754-2019, section 4.3 (rounding); Karimireddy et al., Error Feedback Fixes SignSGD (ICML 2019),
assumption A (contraction).
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.bench.nccl_tests.backends.backend import Way
from gradwire.bench.nccl_tests.backends.gradwire_backend import GradwireWay
from gradwire.bench.nccl_tests.collectives import Collective, Counts
from gradwire.bench.nccl_tests.measure import gather
from gradwire.bench.nccl_tests.table import Case
from gradwire.compressors.base import Codec, Compressor

_SHARED, _OWN = 1.0, 0.5
"""Standard deviations of the two parts of a gradient."""

_TIMED_CODINGS = 3


@dataclass(frozen=True, slots=True)
class Loss:
    """What one size lost and saved.

    Attributes:
        nbytes: Size of the tensor.
        bound: The bound that was checked, in words.
        relative_error: norm(result - sum) / norm(sum).
        cosine: Between result and sum.
        logical_nbytes: Bytes that this phase would send without a compressor, of the rank that sends most.
        wire_nbytes: Bytes that it sends.
        encode_seconds: To encode a rank's shard; None where the compressor has no codec of its own.
        decode_seconds: To decode it.
    """

    nbytes: int
    bound: str
    relative_error: float
    cosine: float
    logical_nbytes: float
    wire_nbytes: float
    encode_seconds: float | None
    decode_seconds: float | None


def gradients(ranks: int, numel: int, seed: int) -> list[Tensor]:
    """Every rank's input: 1-D float32."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + 17)
    shared = torch.randn(numel, generator=generator) * _SHARED
    return [shared + torch.randn(numel, generator=generator) * _OWN for _ in range(ranks)]


def bound_of(name: str) -> str:
    """The bound of a compressor in words."""
    return {
        "none": "equal to a float32 sum within 2^-22 sum_r |x_r|",
        "fp16": "|e_i| <= 2^-10 sum_r |x_ri|",
        "bf16": "|e_i| <= 2^-7 sum_r |x_ri|",
        "int8": "|e_i| <= (sum_r range(x_r) + 2 range) / 255",
        "int4": "|e_i| <= (sum_r range(x_r) + 2 range) / 15",
    }.get(name, "norm(e) <= 2 sum_r norm(x_r)")


def count_outside(name: str, result: Tensor, inputs: list[Tensor]) -> int:
    """Elements outside the bound; all of them where a norm is.

    Args:
        name: Of the compressor.
        result: 1-D float32, on the CPU.
        inputs: Of all ranks.
    """
    total = torch.stack(inputs).double().sum(0)
    error = (result.double() - total).abs()
    magnitude = torch.stack(inputs).double().abs().sum(0)
    if name in ("none", "fp16", "bf16"):
        share = {"none": 2.0**-22, "fp16": 2.0**-10, "bf16": 2.0**-7}[name]
        limit = magnitude * share + (len(inputs) + 1) * 2.0**-24
    elif name in ("int8", "int4"):
        ranges = sum(float(each.max() - each.min()) for each in inputs)
        limit = torch.full_like(
            error, (ranges + 2 * float(total.max() - total.min())) / (255 if name == "int8" else 15)
        )
    else:
        within = float(error.norm()) <= 2 * sum(float(each.norm()) for each in inputs)
        return 0 if within else error.numel()
    return int((~(error <= limit)).sum().item())


class LossyCheck:
    """Judges a lossy all_reduce by its compressor's bound, and keeps what it lost.

    Args:
        ranks: How many.
        device: Of the tensors.
        control: Group of all ranks.
    """

    def __init__(self, ranks: int, device: torch.device, control: dist.ProcessGroup) -> None:
        self._ranks = ranks
        self._device = device
        self._control = control
        self.losses: list[Loss] = []
        """Of the out-of-place halves, in the order of the rows."""

    def wrong(self, way: Way, collective: Collective, case: Case, counts: Counts, in_place: bool, seed: int) -> int:
        """See `Check.wrong`."""
        numel = counts.source
        if not numel:
            return 0
        lossy = cast(GradwireWay, way)
        inputs = gradients(self._ranks, numel, seed)
        source = inputs[way.rank].clone().to(self._device)
        output = source if in_place else torch.empty_like(source)
        before = lossy.sent_nbytes()
        lossy.forget()
        collective.prepare(way, output, source, case.operation, 0)().wait()
        result = output.cpu() * (self._ranks if case.operation == "avg" else 1)
        if not in_place:
            sent = [now - then for now, then in zip(lossy.sent_nbytes(), before, strict=True)]
            self._keep(lossy.compressor, result, inputs, lossy.shard_numel(numel), sent)
        return count_outside(lossy.compressor.name, result, inputs)

    def _keep(
        self, compressor: Compressor, result: Tensor, inputs: list[Tensor], shard: int, sent: list[float]
    ) -> None:
        total = torch.stack(inputs).double().sum(0)
        norms = float(result.double().norm() * total.norm())
        logical, wire = (max(gather(value, self._control)) for value in sent)
        codec: Codec | None = getattr(compressor, "codec", None)
        encode, decode = coding_seconds(codec, inputs[0][:shard].to(self._device)) if codec else (None, None)
        self.losses.append(
            Loss(
                nbytes=result.numel() * 4,
                bound=bound_of(compressor.name),
                relative_error=float((result.double() - total).norm() / total.norm()),
                cosine=float(result.double() @ total) / norms if norms else 0.0,
                logical_nbytes=logical,
                wire_nbytes=wire,
                encode_seconds=encode,
                decode_seconds=decode,
            )
        )


def coding_seconds(codec: Codec, flat: Tensor) -> tuple[float, float]:
    """Median seconds to encode and to decode `flat` (1-D float32), which is left alone."""
    payload = torch.empty(codec.wire_nbytes(flat.numel()), dtype=torch.uint8, device=flat.device)
    target = torch.empty_like(flat)
    encode, decode = [], []
    for _ in range(_TIMED_CODINGS):
        encode.append(_seconds(lambda: codec.encode(flat, payload), flat))
        decode.append(_seconds(lambda: codec.decode(payload, target), flat))
    return statistics.median(encode), statistics.median(decode)


def _seconds(call: Callable[[], None], flat: Tensor) -> float:
    began = time.perf_counter()
    call()
    if flat.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began
