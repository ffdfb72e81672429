"""What a rank that joins has to know: parameters, buffers, and whatever else has a `state_dict`, from rank 0 to all.

Tensors travel by the planned broadcast, end to end in pieces of `PIECE_NBYTES`; everything else in one piece before
them, in the format of `torch.save`, which is read back without unpickling anything but plain values. What is small
travels as a sum with zeros, for which the ranks are connected already.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradwire.comms.backend.planned_collectives import PlannedCollectives
from gradwire.comms.communicator import Communicator
from gradwire.comms.elastic.survive import as_bytes
from gradwire.comms.execute import FutureTensor

PIECE_NBYTES = 64 << 20
"""Of one broadcast: large against a latency, small against a model."""

SMALL_NBYTES = 512 << 10
"""Up to here a broadcast saves less than its connections cost: tenths of a second on a busy machine."""

TENSOR = "gradwire tensor"
"""Stands for a tensor in what is saved: (TENSOR, number, dtype, shape)."""


def rehearse() -> None:
    """Has torch import what it reads states with, a tenth of a second: before other ranks wait for this one."""
    file = io.BytesIO()
    torch.save({}, file)
    file.seek(0)
    torch.load(file, weights_only=True)


class Carried(Protocol):
    """Something that training goes on with: an optimizer, a scheduler, a GradScaler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """What it knows: tensors, numbers, strings, and lists, tuples and dictionaries of them."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Takes over what `state_dict` of another process returned."""


def pack(value: object, tensors: list[Tensor]) -> object:
    """`value` with a mark in the place of each tensor, which is appended to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return (TENSOR, len(tensors) - 1, value.dtype, tuple(value.shape))
    if isinstance(value, Mapping):
        return {key: pack(each, tensors) for key, each in value.items()}
    if isinstance(value, list):
        return [pack(each, tensors) for each in value]
    if isinstance(value, tuple):
        return tuple(pack(each, tensors) for each in value)
    return value


def unpack(value: object, tensor: Callable[[int], Tensor]) -> Any:
    """What was packed, with `tensor(number)` in the place of each mark."""
    if isinstance(value, tuple) and len(value) == 4 and value[0] == TENSOR:
        return tensor(value[1])
    if isinstance(value, dict):
        return {key: unpack(each, tensor) for key, each in value.items()}
    if isinstance(value, list):
        return [unpack(each, tensor) for each in value]
    if isinstance(value, tuple):
        return tuple(unpack(each, tensor) for each in value)
    return value


class StateTransfer:
    """A broadcast of rank 0's state to all ranks; all of them call `run`.

    Args:
        communicator: Of ranks that are all there.
        wait: Waits for an all-reduce, or raises what went wrong.
    """

    def __init__(self, communicator: Communicator, wait: Callable[[FutureTensor], Tensor]) -> None:
        self._communicator = communicator
        self._wait = wait
        self._planned = PlannedCollectives(communicator) if communicator.device.type == "cpu" else None

    def run(self, own: Callable[[], Mapping[str, object]], *, wanted: bool) -> dict[str, Any]:
        """Sends rank 0's state.

        Args:
            own: Gives this rank's; called on rank 0 alone.
            wanted: Whether this rank takes the tensors; else they pass by.

        Returns:
            Rank 0's state; where the tensors are not wanted, with their marks.

        Raises:
            RuntimeError: A rank was lost.
        """
        root, device = self._communicator.rank == 0, self._communicator.device
        tensors: list[Tensor] = []
        said = b""
        if root:
            file = io.BytesIO()
            torch.save(pack(own(), tensors), file)
            said = file.getvalue()
        nbytes = int(self._send(torch.tensor([len(said)], device=device)).item())
        flat = torch.frombuffer(bytearray(said or bytes(nbytes)), dtype=torch.uint8).to(device)
        packed = torch.load(io.BytesIO(self._send(flat).cpu().numpy().tobytes()), weights_only=True)
        shapes: dict[int, tuple[torch.dtype, tuple[int, ...]]] = {}
        _collect(packed, shapes)
        found: dict[int, Tensor] = {}
        for numbers in _pieces(shapes):
            counts = [_nbytes(*shapes[number]) for number in numbers]
            if root:
                piece = torch.cat([as_bytes(tensors[number].contiguous()).to(device) for number in numbers])
            else:
                piece = torch.empty(sum(counts), dtype=torch.uint8, device=device)
            piece = self._send(piece)
            if wanted:
                for number, part in zip(numbers, torch.split(piece, counts), strict=True):
                    dtype, shape = shapes[number]
                    found[number] = part.clone().view(dtype).view(shape)
        for number, (dtype, shape) in shapes.items():
            found.setdefault(number, torch.empty(shape, dtype=dtype, device=device))
        return unpack(packed, found.__getitem__) if wanted else dict(packed)

    def _send(self, flat: Tensor) -> Tensor:
        if self._planned is not None and flat.nbytes > SMALL_NBYTES:
            self._planned.broadcast(flat, 0).wait()
            return flat
        if self._communicator.rank != 0:
            flat.zero_()
        self._wait(self._communicator.all_reduce(as_bytes(flat)))
        return flat


def load_module(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Fills a model's parameters and buffers, in place.

    Raises:
        ValueError: It has others than rank 0's.
    """
    own = module.state_dict()
    if own.keys() != state.keys():
        odd = min(own.keys() ^ state.keys())
        raise ValueError(f"`{odd}` is in the model here or in the running job, not in both: start the same script")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(state[name])


def _collect(value: object, shapes: dict[int, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    if isinstance(value, tuple) and len(value) == 4 and value[0] == TENSOR:
        shapes[value[1]] = value[2], value[3]
    elif isinstance(value, dict):
        for each in value.values():
            _collect(each, shapes)
    elif isinstance(value, list | tuple):
        for each in value:
            _collect(each, shapes)


def _nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    numel = 1
    for length in shape:
        numel *= length
    return numel * dtype.itemsize


def _pieces(shapes: Mapping[int, tuple[torch.dtype, tuple[int, ...]]]) -> list[list[int]]:
    """Numbers of tensors that travel together, in order; empty ones do not travel."""
    pieces: list[list[int]] = []
    total = PIECE_NBYTES
    for number in sorted(shapes):
        nbytes = _nbytes(*shapes[number])
        if total + nbytes > PIECE_NBYTES:
            pieces.append([])
            total = 0
        pieces[-1].append(number)
        total += nbytes
    return [piece for piece in pieces if sum(_nbytes(*shapes[number]) for number in piece)]
