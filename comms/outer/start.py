"""Starts `Outer`: collects facts that must be equal on all ranks, and copies rank 0's values to them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.comms.attach import unwrap
from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.boundary.messages import MessageType
from gradwire.comms.outer.fragments import OuterSettings
from gradwire.comms.outer.workers import model_inside
from gradwire.compressors.base import plain_name

PACKED_NBYTES = 2**25
"""Largest broadcast in bytes of tensors that are not trained."""


_DIGESTS: MessageType[tuple[str, ...]] = MessageType(tuple[str, ...], most_nbytes=1 << 26)
"""Message with the digest of each tensor that is not trained."""


def facts_of(
    settings: OuterSettings, inside: str, model: nn.Module, trained: Sequence[tuple[str, nn.Parameter]]
) -> dict[str, str]:
    """Returns the facts that must be equal on all ranks, as text by name.

    Args:
        settings: Settings of the exchanges.
        inside: Ranks of a worker, as in `Outer`: `exact`, `none` or the name of a level.
        model: Model given to `Outer`; its tensors are listed with shape and dtype.
        trained: (Name, parameter) pairs that are trained.
    """
    inner = model_inside(model)
    wanted = {id(each) for _, each in trained}
    facts = {name: repr(value) for name, value in asdict(settings).items()}
    facts["inside"] = repr(inside)
    facts["model"] = "in DDP" if isinstance(unwrap(model), DistributedDataParallel) else "a module"
    for name, each in inner.named_parameters():
        how = "trained" if id(each) in wanted else "not trained"
        sharded = ", sharded" if isinstance(each, DTensor) else ""
        facts[plain_name(name)] = f"{tuple(each.shape)} {each.dtype} {how}{sharded}"
    for name, buffer in inner.named_buffers():
        facts[plain_name(name)] = f"{tuple(buffer.shape)} {buffer.dtype}, a buffer"
    return facts


def copy_from_rank_0(tensors: Sequence[Tensor], device: torch.device, agreement: Agreement) -> None:
    """Gives all ranks of the job rank 0's values, in place; all call it. Tensors equal on all ranks are not sent.

    Args:
        tensors: Tensors that are not trained, in the same order on all ranks.
        device: Device of the broadcasts.
        agreement: Agreement of all ranks.
    """
    if agreement.size == 1 or not tensors:
        return
    # Compare one digest of all tensors first, and digests of each tensor only if it differs.
    digests = [hashlib.sha256(_bytes_of(each).cpu().numpy().tobytes()).hexdigest()[:16] for each in tensors]
    if len(set(agreement.gather(hashlib.sha256(repr(digests).encode()).hexdigest()))) == 1:
        return
    digests_of_ranks = [_DIGESTS.read(word) for word in agreement.gather(json.dumps(digests))]
    differ = [each for number, each in enumerate(tensors) if len({word[number] for word in digests_of_ranks}) > 1]
    # Broadcast the differing tensors, several at a time.
    packs: list[list[Tensor]] = [[]]
    for each in differ:
        if packs[-1] and sum(other.nbytes for other in packs[-1]) + each.nbytes > PACKED_NBYTES:
            packs.append([])
        packs[-1].append(each)
    for pack_ in packs:
        flat = torch.cat([_bytes_of(each).to(device) for each in pack_])
        dist.broadcast(flat, 0)
        for each, part in zip(pack_, flat.split_with_sizes([each.nbytes for each in pack_]), strict=True):
            each.copy_(part.clone().view(each.dtype).view(each.shape))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
