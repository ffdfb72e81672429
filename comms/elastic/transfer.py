"""Broadcasts rank 0's training state to processes that join: the model, and all else that has a `state_dict`.

Tensors are sent by the planned broadcast, end to end in pieces of `PIECE_NBYTES`. Everything else is sent before them
in the format of `torch.save`; only joining ranks read it, without unpickling anything but plain values. A first message
in JSON tells all ranks how many bytes follow. Small messages are sent as a sum with zeros, for which the ranks are
connected already. If rank 0 cannot make its state, it sends the reason instead: joining processes leave, the others go
on.
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
"""Largest number of bytes that are broadcast at once, unless one tensor is larger: many to hide the latency, few
against the memory of a model."""

SMALL_NBYTES = 512 << 10
"""Largest message in bytes that is sent as a sum with zeros: a broadcast would save less than its connections
cost, which is tenths of a second on a busy machine."""

TENSOR = "gradwire tensor"
"""First entry of the tuple (TENSOR, index, dtype, shape) that replaces a tensor in a packed state."""


def rehearse() -> None:
    """Saves and loads an empty state, so that torch's imports (a tenth of a second) do not delay other ranks later."""
    file = io.BytesIO()
    torch.save({}, file)
    file.seek(0)
    torch.load(file, weights_only=True)


class Carried(Protocol):
    """An object whose state a joining process receives: an optimizer, a scheduler, a GradScaler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state: tensors, numbers, strings, and lists, tuples and dictionaries of them."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Loads the state that `state_dict` has returned in another process."""


def pack(value: object, tensors: list[Tensor]) -> object:
    """Returns a copy of a state in which marks replace the tensors; see `TENSOR`.

    Args:
        value: Tensors, numbers, strings, and lists, tuples and dictionaries of them.
        tensors: List to which the tensors are appended, in the order of their marks.
    """
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
    """Returns a copy of a packed state in which tensors replace the marks: the inverse of `pack`.

    Args:
        value: Result of `pack`.
        tensor: Returns the tensor with an index in the list that `pack` has filled.
    """
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
    """A state, packed for the broadcast.

    Args:
        state: Tensors, numbers, strings, and lists, tuples and dictionaries of them.

    Attributes:
        plain: Everything but the tensors, in the format of `torch.save`.
        tensors: The tensors, in the order of their marks; those without elements are not sent.
        pieces: Indices of the tensors in each broadcast.

    Raises:
        ValueError: `state` holds something else, or a tensor that is sparse or has no memory.
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
                    f"the state `{name}` holds what cannot be sent; wanted tensors, numbers, strings, and "
                    f"lists, tuples and dictionaries of them ({str(error).splitlines()[0] if str(error) else error!r})"
                ) from error
        odd = next((each for each in self.tensors if each.layout != torch.strided or each.is_meta), None)
        if odd is not None:
            raise ValueError(f"the state holds a tensor of layout {odd.layout} on {odd.device}; wanted a strided one")
        torch.save(marked, file)
        self.plain = file.getvalue()
        self.pieces = _pieces([each.nbytes for each in self.tensors])


def check_state(own: Callable[[], Mapping[str, object]]) -> None:
    """Checks that rank 0's state can be sent, before any other rank waits for it.

    Args:
        own: Returns the state; see `_Packed`.

    Raises:
        ValueError: `own` raises, or the state holds something that cannot be sent.
    """
    try:
        _Packed(own())
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"the state of the running job cannot be read: {error!r}") from error


@dataclass(frozen=True, slots=True)
class ReceivedState:
    """The result of `StateTransfer.run` on one rank.

    Attributes:
        shared: Rank 0's argument `shared`, on all ranks.
        state: Rank 0's state; None if this rank did not want it, or rank 0 could not send it.
        refused: Reason for which rank 0 could not send its state; None if it could.
    """

    shared: Any
    state: dict[str, Any] | None
    refused: str | None


@dataclass(frozen=True, slots=True)
class _Head:
    """The first message of a broadcast, from which all ranks know how many bytes follow.

    Attributes:
        shared: Plain values that rank 0 sends to all ranks.
        refused: Reason for which no state follows; None if one does.
        plain: Number of bytes of everything but the tensors.
        pieces: Number of bytes of each tensor, by broadcast.
    """

    shared: object
    refused: str | None
    plain: Count
    pieces: tuple[tuple[Count, ...], ...]


_HEAD: MessageType[_Head] = MessageType(_Head, most_nbytes=1 << 28)
_WHY: MessageType[str | None] = MessageType(str | None)


class StateTransfer:
    """Broadcasts rank 0's state to the ranks of a communicator, all of which call `run`.

    Args:
        communicator: Communicator of the ranks.
        wait: Waits for an all-reduce and returns its tensor, or raises its error.
    """

    def __init__(self, communicator: Communicator, wait: Callable[[FutureTensor], Tensor]) -> None:
        self._communicator = communicator
        self._wait = wait
        self._planned = PlannedCollectives(communicator) if communicator.device.type == "cpu" else None

    def run(self, own: Callable[[], Mapping[str, object]], shared: object, *, wanted: bool) -> ReceivedState:
        """Broadcasts rank 0's state, and returns it on the ranks that want it.

        Args:
            own: Returns this rank's state; called on rank 0 alone.
            shared: Plain values, as in JSON, that rank 0 sends to all ranks; ignored on others.
            wanted: Whether this rank keeps the state; otherwise it only takes part in the broadcast.

        Raises:
            RuntimeError: A rank failed.
        """
        # Send the head, then everything but the tensors.
        root, device = self._communicator.rank == 0, self._communicator.device
        packed, refused = self._pack(own) if root else (None, None)
        head = {
            "shared": shared,
            "refused": refused,
            "plain": len(packed.plain) if packed else 0,
            "pieces": [[packed.tensors[number].nbytes for number in piece] for piece in packed.pieces]
            if packed
            else [],
        }
        sent = _HEAD.read(self._send_bytes(json.dumps(head).encode() if root else b""))
        refused = sent.refused
        plain = self._send_bytes(packed.plain if packed else b"", sent.plain) if sent.plain else b""
        # Send the tensors, some of them end to end in each broadcast.
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
                    refused = f"the state of the running job has changed while it was sent: {error!r}"
            piece = self._send(piece)
            if wanted:
                bytes_of += [part.clone() for part in torch.split(piece, list(counts))]
        if sent.pieces:
            refused = _WHY.read(self._send_bytes(json.dumps(refused).encode() if root else b""))
        # Rebuild the state where it is wanted.
        if not wanted or refused is not None:
            return ReceivedState(sent.shared, None, refused)
        marked = torch.load(io.BytesIO(plain), weights_only=True)
        shapes: dict[int, tuple[torch.dtype, tuple[int, ...]]] = {}
        _collect(marked, shapes)
        waiting = iter(bytes_of)
        found = {
            number: next(waiting).view(dtype).view(shape)
            if prod(shape)
            else torch.empty(shape, dtype=dtype, device=device)
            for number, (dtype, shape) in sorted(shapes.items())
        }
        return ReceivedState(sent.shared, unpack(marked, found.__getitem__), None)

    def _pack(self, own: Callable[[], Mapping[str, object]]) -> tuple[_Packed | None, str | None]:
        """Packs rank 0's state for the broadcast.

        Args:
            own: Returns the state.

        Returns:
            (Packed state, None); or (None, reason in words) if it could not be made, because of any error.
        """
        try:
            return _Packed(own()), None
        except Exception as error:  # noqa: BLE001 - sent to the joining processes instead of the state
            return None, f"{error}" if isinstance(error, ValueError) else f"{error!r}"

    def _send_bytes(self, own: bytes, nbytes: int | None = None) -> bytes:
        """Broadcasts bytes from rank 0, and returns them on all ranks.

        Args:
            own: The bytes on rank 0; empty on all other ranks.
            nbytes: Number of bytes, the same on all ranks; None sends it first.
        """
        device = self._communicator.device
        if nbytes is None:
            nbytes = int(self._send(torch.tensor([len(own)], device=device)).item())
        flat = torch.frombuffer(bytearray(own or bytes(nbytes)), dtype=torch.uint8).to(device)
        return self._send(flat).cpu().numpy().tobytes()

    def _send(self, flat: Tensor) -> Tensor:
        """Broadcasts rank 0's tensor, waits for it, and returns `flat`.

        Args:
            flat: 1-D tensor of any dtype, of the same dtype and size on all ranks; overwritten on all but rank 0.

        Raises:
            RuntimeError: A rank failed.
        """
        if self._planned is not None and flat.nbytes > SMALL_NBYTES:
            self._planned.broadcast(flat, 0).wait()
            return flat
        if self._communicator.rank != 0:
            flat.zero_()
        self._wait(self._communicator.all_reduce(as_bytes(flat)))
        return flat


def load_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads rank 0's state dict into a model, in place.

    Args:
        module: The module inside the DDP model.
        state: State dict of the same module on rank 0.

    Raises:
        ValueError: The names, shapes or dtypes of the entries differ.
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
    """Adds index -> (dtype, shape) of each tensor of a packed state to `shapes`, in place."""
    if isinstance(value, tuple) and len(value) == 4 and value[0] == TENSOR:
        shapes[value[1]] = value[2], value[3]
    elif isinstance(value, dict):
        for each in value.values():
            _collect(each, shapes)
    elif isinstance(value, list | tuple):
        for each in value:
            _collect(each, shapes)


def _pieces(nbytes: Sequence[int]) -> list[list[int]]:
    """Groups tensors, in their order, into broadcasts of at most `PIECE_NBYTES`; a larger tensor has one to itself.

    Args:
        nbytes: Number of bytes of each tensor.

    Returns:
        For each broadcast the indices of its tensors; empty tensors are in none.
    """
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
