"""What a rank that joins has to know: parameters, buffers, and whatever else has a `state_dict`, from rank 0 to all.

Tensors travel by the planned broadcast, end to end in pieces of `PIECE_NBYTES`; everything else in one piece before
them, in the format of `torch.save`, which is read back without unpickling anything but plain values, and by newcomers
alone. What all ranks need to take part is JSON. What is small travels as a sum with zeros, for which the ranks are
connected already. Where rank 0 cannot give its state, it gives the reason instead: newcomers leave, the others go on.
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from numbers import Number
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradwire.comms.backend.planned_collectives import PlannedCollectives
from gradwire.comms.boundary.messages import Count, MessageType
from gradwire.comms.communicator import Communicator
from gradwire.comms.elastic.resilient_ops import as_bytes
from gradwire.comms.run.all_reduces import FutureTensor

PIECE_NBYTES = 64 << 20
"""Bytes of one broadcast: large against a latency, small against a model."""

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
    if isinstance(value, Number) and hasattr(value, "item"):  # of numpy: schedulers have them
        return value.item()
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


class _Packed:
    """A state as it travels.

    Args:
        state: Tensors, numbers, strings, and lists, tuples and dictionaries of them.

    Attributes:
        said: All but the tensors, as `torch.save` writes it.
        tensors: In order; those without elements do not travel.
        pieces: Numbers of tensors that travel together.

    Raises:
        ValueError: It has something else in it.
    """

    def __init__(self, state: Mapping[str, object]) -> None:
        self.tensors: list[Tensor] = []
        file = io.BytesIO()
        marked = {name: pack(value, self.tensors) for name, value in state.items()}
        for name, value in marked.items():
            try:
                one = io.BytesIO()
                torch.save(value, one)
                one.seek(0)
                torch.load(one, weights_only=True)
            except Exception as error:
                raise ValueError(
                    f"the state `{name}` holds what cannot be handed over; wanted tensors, numbers, strings, and "
                    f"lists, tuples and dictionaries of them ({str(error).splitlines()[0] if str(error) else error!r})"
                ) from error
        odd = next((each for each in self.tensors if each.layout != torch.strided or each.is_meta), None)
        if odd is not None:
            raise ValueError(f"the state holds a tensor of layout {odd.layout} on {odd.device}; wanted a strided one")
        torch.save(marked, file)
        self.said = file.getvalue()
        self.pieces = _pieces([each.nbytes for each in self.tensors])


def check_state(own: Callable[[], Mapping[str, object]]) -> None:
    """Finds out whether a state can be handed over, before anybody waits for it.

    Args:
        own: Gives it.

    Raises:
        ValueError: It cannot: `own` raises, or it holds something that does not travel.
    """
    try:
        _Packed(own())
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"the state of the running job cannot be had: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Handed:
    """What `StateTransfer.run` has brought.

    Attributes:
        shared: What all ranks get.
        state: Rank 0's; None where it was not wanted, or could not be had.
        refused: Why it could not be had; None where it could.
    """

    shared: Any
    state: dict[str, Any] | None
    refused: str | None


@dataclass(frozen=True, slots=True)
class _Head:
    """What comes before the state: see `StateTransfer.run`.

    Attributes:
        shared: See there.
        refused: Why there is no state; None where there is one.
        said: Bytes of what is no tensor.
        pieces: Of each piece the bytes of its tensors.
    """

    shared: object
    refused: str | None
    said: Count
    pieces: tuple[tuple[Count, ...], ...]


_HEAD: MessageType[_Head] = MessageType(_Head, most_nbytes=1 << 28)
_WHY: MessageType[str | None] = MessageType(str | None)


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

    def run(self, own: Callable[[], Mapping[str, object]], shared: object, *, wanted: bool) -> Handed:
        """Sends rank 0's state.

        Args:
            own: Gives this rank's; called on rank 0 alone.
            shared: What all ranks shall know of rank 0, newcomers or not; plain values, as in JSON.
            wanted: Whether this rank takes the state; else it passes by.

        Raises:
            RuntimeError: A rank was lost.
        """
        root, device = self._communicator.rank == 0, self._communicator.device
        packed, refused = self._pack(own) if root else (None, None)
        head = {
            "shared": shared,
            "refused": refused,
            "said": len(packed.said) if packed else 0,
            "pieces": [[packed.tensors[number].nbytes for number in piece] for piece in packed.pieces]
            if packed
            else [],
        }
        sent = _HEAD.read(self._send_bytes(json.dumps(head).encode() if root else b""))
        refused = sent.refused
        said = self._send_bytes(packed.said if packed else b"", sent.said) if sent.said else b""
        bytes_of: list[Tensor] = []
        for number, counts in enumerate(sent.pieces):
            piece = torch.zeros(sum(counts), dtype=torch.uint8, device=device)
            if packed is not None:
                try:
                    offset = 0
                    for each in packed.pieces[number]:
                        part = as_bytes(packed.tensors[each].contiguous())
                        piece[offset : offset + part.numel()].copy_(part)
                        offset += part.numel()
                except Exception as error:  # noqa: BLE001 - the others wait for the piece
                    refused = f"the state of the running job has changed while it was handed over: {error!r}"
            piece = self._send(piece)
            if wanted:
                bytes_of += [part.clone() for part in torch.split(piece, list(counts))]
        if sent.pieces:
            refused = _WHY.read(self._send_bytes(json.dumps(refused).encode() if root else b""))
        if not wanted or refused is not None:
            return Handed(sent.shared, None, refused)
        marked = torch.load(io.BytesIO(said), weights_only=True)
        shapes: dict[int, tuple[torch.dtype, tuple[int, ...]]] = {}
        _collect(marked, shapes)
        waiting = iter(bytes_of)
        found = {
            number: next(waiting).view(dtype).view(shape)
            if prod(shape)
            else torch.empty(shape, dtype=dtype, device=device)
            for number, (dtype, shape) in sorted(shapes.items())
        }
        return Handed(sent.shared, unpack(marked, found.__getitem__), None)

    def _pack(self, own: Callable[[], Mapping[str, object]]) -> tuple[_Packed | None, str | None]:
        """Rank 0's state, or why there is none: whatever it is, the others go on."""
        try:
            return _Packed(own()), None
        except Exception as error:  # noqa: BLE001 - told to those that wanted it
            return None, f"{error}" if isinstance(error, ValueError) else f"{error!r}"

    def _send_bytes(self, own: bytes, nbytes: int | None = None) -> bytes:
        """Rank 0's bytes.

        Args:
            own: They, on rank 0.
            nbytes: How many, where all ranks know.
        """
        device = self._communicator.device
        if nbytes is None:
            nbytes = int(self._send(torch.tensor([len(own)], device=device)).item())
        flat = torch.frombuffer(bytearray(own or bytes(nbytes)), dtype=torch.uint8).to(device)
        return self._send(flat).cpu().numpy().tobytes()

    def _send(self, flat: Tensor) -> Tensor:
        if self._planned is not None and flat.nbytes > SMALL_NBYTES:
            self._planned.broadcast(flat, 0).wait()
            return flat
        if self._communicator.rank != 0:
            flat.zero_()
        self._wait(self._communicator.all_reduce(as_bytes(flat)))
        return flat


def load_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Fills a model's parameters and buffers, in place.

    Raises:
        ValueError: It has others than rank 0's.
    """
    own = module.state_dict()
    if own.keys() != state.keys():
        odd = min(own.keys() ^ state.keys())
        raise ValueError(f"`{odd}` is in the model here or in the running job, not in both: start the same script")
    tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        if (found := state[name]).shape != value.shape or found.dtype != value.dtype:
            raise ValueError(
                f"`{name}` is {value.dtype} of {list(value.shape)} here and {found.dtype} of {list(found.shape)} in "
                "the running job: start the same script"
            )
    if len(tensors) < len(own):  # what modules give by get_extra_state
        module.load_state_dict(dict(state))
        return
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


def _pieces(nbytes: Sequence[int]) -> list[list[int]]:
    """Numbers of tensors of so many bytes that travel together, in order; empty ones do not travel."""
    pieces: list[list[int]] = []
    total = PIECE_NBYTES
    for number, count in enumerate(nbytes):
        if not count:
            continue
        if total + count > PIECE_NBYTES:
            pieces.append([])
            total = 0
        pieces[-1].append(number)
        total += count
    return pieces
