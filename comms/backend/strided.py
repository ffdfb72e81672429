"""CPU tensors in the shape in which gloo takes them: contiguous, and of one of its dtypes.

ProcessGroupGloo of torch 2.13 reads and writes `numel` elements from a tensor's first one on, whatever its strides:
gaps are summed and sent too, and wrong elements are added up where strides differ between ranks. So a strided tensor
travels as a contiguous copy. Whether one is made concerns this rank alone: what goes over the wire is the same.

What only moves has any dtype: one that gloo does not know travels as the bytes that it is made of.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import GLOO_DTYPES


@dataclass(slots=True)
class Packing:
    """What travels in the place of CPU tensors. NCCL refuses strided tensors itself.

    Attributes:
        moves: The tensors are moved only, and may travel as bytes.
        flat: They are taken as the elements that they hold, in order, whatever their shapes.
        copies: The tensors that travel as copies, and the copies.
        changes: Whether anything but the tensor itself travels, for one of them.
    """

    moves: bool = False
    flat: bool = False
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    changes: bool = False

    def pack(self, argument: object) -> object:
        """What takes the place of a tensor, of a list (of lists) of them, or of any other argument: itself."""
        match argument:
            case list() | tuple():
                return [self.pack(each) for each in argument]
            case Tensor() if argument.device.type == "cpu" and argument.layout == torch.strided:
                return self._pack(argument)
        return argument

    def _pack(self, tensor: Tensor) -> Tensor:
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
        """Overwrites the tensors that travelled as copies with what has become of these."""
        for tensor, copy in self.copies:
            overwrite(tensor, copy)


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's memory holds its elements in order, and not their conjugates or negatives."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def plain(tensor: Tensor) -> Tensor:
    """The tensor, or a copy in whose memory its elements lie in order."""
    return tensor if is_plain(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous()


def overwrite(tensor: Tensor, value: Tensor) -> None:
    """Copies `value` into `tensor` (a leaf, an inference tensor or any other; any strides), unseen by autograd.

    Elements of an expand()ed tensor that share their memory take the first one's value.
    """
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        for dimension, (numel, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and numel > 1:
                tensor, value = tensor.narrow(dimension, 0, 1), value.narrow(dimension, 0, 1)
        tensor.copy_(value)


def tensors_in(argument: object) -> list[Tensor]:
    """The tensor, or those in a list (of lists), one after the other; none in any other argument."""
    match argument:
        case Tensor():
            return [argument]
        case list() | tuple():
            return [tensor for each in argument for tensor in tensors_in(each)]
    return []
