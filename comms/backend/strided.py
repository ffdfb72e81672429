"""Tensors with gaps, or in another order in memory, for gloo, which takes memory as it lies.

ProcessGroupGloo of torch 2.13 reads and writes `numel` elements from a tensor's first one on, whatever its strides:
gaps are summed and sent too, and wrong elements are added up where strides differ between ranks. So a strided tensor
travels as a contiguous copy. Whether one is made concerns this rank alone: what goes over the wire is the same.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Packing:
    """Contiguous copies in the place of strided CPU tensors. NCCL refuses such tensors itself.

    Attributes:
        copies: The strided tensors, and what travels in their place.
    """

    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def pack(self, argument: object) -> object:
        """What takes the place of a tensor, of a list (of lists) of them, or of any other argument: itself."""
        match argument:
            case list() | tuple():
                return [self.pack(each) for each in argument]
            case Tensor() if argument.device.type == "cpu" and argument.layout == torch.strided:
                if not argument.is_contiguous():
                    self.copies.append((argument, argument.detach().contiguous()))
                    return self.copies[-1][1]
        return argument

    def copy_back(self) -> None:
        """Overwrites the strided tensors with what has become of their copies."""
        for tensor, copy in self.copies:
            overwrite(tensor, copy)


def overwrite(tensor: Tensor, value: Tensor) -> None:
    """Copies `value` into `tensor` (a leaf, an inference tensor or any other; any strides), unseen by autograd."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(value)


def tensors_in(argument: object) -> list[Tensor]:
    """The tensor, or those in a list (of lists), one after the other; none in any other argument."""
    match argument:
        case Tensor():
            return [argument]
        case list() | tuple():
            return [tensor for each in argument for tensor in tensors_in(each)]
    return []
