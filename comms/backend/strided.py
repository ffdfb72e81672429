"""Makes CPU tensors what gloo can take: contiguous, and of one of its dtypes.

ProcessGroupGloo of torch 2.13 reads and writes `numel` elements from a tensor's first one on, whatever its strides:
gaps are summed and sent too, and wrong elements are added up where strides differ between ranks. So a strided tensor
is sent as a contiguous copy. Whether one is made concerns this rank alone: what goes over the wire is the same.

Tensors that are only moved, not added, may have any dtype: one that gloo does not know is sent as bytes.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import GLOO_DTYPES


@dataclass(slots=True)
class Packing:
    """Replaces a call's CPU tensors by tensors that gloo takes, and copies results back.

    CUDA tensors are left as they are: NCCL refuses strided ones itself.

    Attributes:
        moves: True if the collective only moves tensors, so that they may be sent as bytes.
        flat: True if the collective does not look at shapes, so that tensors are sent as 1-D.
        copies: (tensor, its contiguous copy) of each tensor that is sent as a copy.
        changes: True if a view or copy is sent in place of at least one of them.
    """

    moves: bool = False
    flat: bool = False
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    changes: bool = False

    def pack(self, argument: object) -> object:
        """Returns what is passed on in place of one argument of a call.

        Args:
            argument: A tensor, or a list or tuple of arguments, whose tensors are replaced; anything else is returned
                as it is.
        """
        match argument:
            case list() | tuple():
                return [self.pack(each) for each in argument]
            case Tensor() if argument.device.type == "cpu" and argument.layout == torch.strided:
                return self._pack(argument)
        return argument

    def _pack(self, tensor: Tensor) -> Tensor:
        """Returns the tensor that is sent in place of a dense CPU tensor: itself, a view, or a view of a copy."""
        packed = plain(tensor)
        if packed is not tensor:
            self.copies.append((tensor, packed))
        if self.flat and packed.dim() != 1:
            packed = packed.detach().view(-1)
        if self.moves and packed.dtype not in GLOO_DTYPES:
            packed = packed.detach().unsqueeze(-1).view(torch.uint8)  # rows stay rows
        self.changes |= packed is not tensor
        return packed

    def copy_back(self) -> None:
        """Overwrites each tensor that was sent as a copy with the content of its copy."""
        for tensor, copy in self.copies:
            overwrite(tensor, copy)


def is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor is contiguous, and no lazy conjugate or negative of its memory.

    A last dimension of one element and another stride is not: torch calls it contiguous, and refuses its view as bytes.
    """
    row = tensor.stride()[-1:] in ((), (1,))
    return row and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def plain(tensor: Tensor) -> Tensor:
    """Returns the tensor itself if `is_plain`, else a contiguous copy."""
    return tensor if is_plain(tensor) else tensor.detach().clone(memory_format=torch.contiguous_format)


def overwrite(tensor: Tensor, value: Tensor) -> None:
    """Copies `value` into `tensor`, unseen by autograd.

    Args:
        tensor: Tensor that is overwritten; may be a leaf or an inference tensor, with any strides. Elements that share
            their memory, after expand(), take the first one's value.
        value: Tensor of the same shape.
    """
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        for dimension, (numel, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and numel > 1:
                tensor, value = tensor.narrow(dimension, 0, 1), value.narrow(dimension, 0, 1)
        tensor.copy_(value)


def tensors_in(argument: object) -> list[Tensor]:
    """Returns the tensors in an argument of a call, in order: a tensor itself, those in nested lists, or none."""
    match argument:
        case Tensor():
            return [argument]
        case list() | tuple():
            return [tensor for each in argument for tensor in tensors_in(each)]
    return []
