"""Saves and loads the hook's state in users' checkpoints: one entry for each rank, under a key that carries the rank.

What a rank holds (residuals, momenta, factors, transfers) changes in number and shape with DDP's buckets. So an entry
is one opaque value, a tuple of (key, value) pairs: torch.distributed.checkpoint stores it as it does every value that
is no tensor, of any size, and a state that has just been bound offers the same keys as the one that was saved. Where
rank 0 writes the file for all, the ranks' dictionaries are merged into one, because their keys differ.

Where a framework saves, each rank adds a file of its own to the checkpoint: nothing of it goes through the network.

Each rank's value states what belongs to it, so that a checkpoint which lost residuals on the way is refused: training
would go on without them, and nothing would show it.
"""

import io
import json
import logging
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from queue import Empty
from types import UnionType
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.bootstrap.probe import PeerWait
from gradwire.comms.bootstrap.threads import in_thread, outcome_of
from gradwire.comms.boundary.files import replace_file
from gradwire.comms.boundary.gathering import gather_bytes
from gradwire.comms.boundary.messages import Count, MessageError, MessageType
from gradwire.comms.errors import PeerError
from gradwire.compressors.base import StateDict, StateValue

log = logging.getLogger("gradwire")

PREFIX = "gradwire/"
"""Prefix of the hook's own keys, in a checkpoint and in an entry."""
JOB = PREFIX + "job"
"""Key in a checkpoint of an entry that is equal on all ranks: `size`, the number of ranks, `dirty`, whether residuals
are pending, and `format`."""
FORMAT = 3
"""Version of the checkpoint format that is written. In format 3 each rank's entry lists its values, with the number of
elements and a checksum of each; in 2 it lists the numbers of elements only, in 1 nothing. Formats 1 and 2 are read,
with a warning that damage to them may go unnoticed."""
NAMED = PREFIX + "named"
"""Key in an entry: 1 if parameters go by their names in the model, 0 if they are numbered."""
ENTRIES = PREFIX + "entries"
"""Key in an entry of the list of its values, as text: the CRC-32 of the JSON that follows in hexadecimal digits, and
JSON with the entry's own key and, for each other key in the entry, the number of elements of its tensor (null for a
number or a string) and the CRC-32 of its value. In format 2 it is JSON alone, key -> number of elements."""
CHECK = "check"
"""Key in `JOB` of the CRC-32 of all its other values."""

Entry = tuple[tuple[str, StateValue], ...]
"""A state dict as one value: (key, value) pairs in plain tuples, which `torch.load(weights_only=True)` takes."""
Checkpoint = dict[str, Entry]
"""Entries by key, as `HookState.state_dict` returns them: `JOB`, and one for each rank, see `rank_key`."""

SHARDS = PREFIX + "shards"
"""Key in an entry of a sharded model: number of ranks over which the first unit's parameters are sharded."""
OUTER = PREFIX + "outer/"
"""Prefix of all keys in an entry of `Outer`."""
OWNERS = {
    SHARDS: "a model that fully_shard has sharded (gradwire.fsdp.apply)",
    OUTER: "gradwire.Outer",
    "": "a DistributedDataParallel model (HookState)",
}
"""Prefix of keys that only one kind of state has -> the kind, as a phrase; the empty prefix matches all others."""

NOT_OURS = "`state` has no entries of gradwire's hook: wanted what HookState.state_dict() returned"
EMPTY = (
    "`state` is empty, as it is where nothing is compressed: leave it out, and training begins without residuals; "
    "if there was a compressor, wanted what HookState.state_dict() returned"
)

SLICE_SECONDS = 1.0
"""Seconds between two probes of the other ranks while their states are waited for."""
GRACE_SECONDS = 5.0
"""Seconds in which probes may find the rank that has ended, after torch's gather has failed; then torch's error is
raised."""

INSTEAD = "load another checkpoint, or train on from the weights without this state"
"""Advice of the errors about a damaged state."""


def rank_key(rank: int) -> str:
    """Returns the key of a rank's entry in a checkpoint."""
    return f"{PREFIX}rank{rank}"


def pack(state: Mapping[str, StateValue], rank: int, size: int, dirty: bool) -> Checkpoint:
    """Makes one rank's part of a checkpoint from its state: the job's entry and its own, both with checksums.

    Args:
        state: State dict of this rank; its tensors, of any shape and dtype, are copied to the CPU if they are not
            there. Empty if the rank holds nothing yet.
        rank: This rank.
        size: Number of ranks.
        dirty: True if residuals are pending; the same on all ranks.
    """
    own = tuple((key, value.cpu() if isinstance(value, Tensor) else value) for key, value in state.items())
    text = json.dumps([rank_key(rank), {key: [_numel(each), _crc(each)] for key, each in own}], separators=(",", ":"))
    job = (("size", size), ("dirty", int(dirty)), ("format", FORMAT))
    return {JOB: (*job, (CHECK, _crc(repr(job)))), rank_key(rank): (*own, (ENTRIES, f"{_crc(text):08x} {text}"))}


def normalize(saved: Mapping[str, object]) -> Checkpoint:
    """Checks a saved checkpoint of any supported format, and returns it in the types that `pack` writes.

    Logs a warning if its format has no checksums.

    Args:
        saved: Result of `pack` or `gather`, also if a serializer has made lists of its tuples; or a state dict of an
            old gradwire, whose keys did not carry the rank.

    Raises:
        ValueError: It is no state of the hook, is of a newer format, lacks entries that were saved, or is damaged; the
            message says what was wanted.
    """
    # Refuse what is no state; take over a state dict without ranks in its keys.
    if not isinstance(saved, Mapping):
        raise ValueError(NOT_OURS)  # noqa: TRY004 - the content of a file is a value, whatever its type
    if not saved:
        raise ValueError(EMPTY)
    if all(PREFIX + key in saved for key in ("size", "rank", "dirty", "loss_scale", "transfers")):
        state = [(key, value) for key, value in saved.items() if isinstance(value, Tensor | int | float | str)]
        numbers = dict(state)
        refuse_other_kinds(numbers, {PREFIX + key: int for key in ("rank", "size", "dirty")})
        rank, size, dirty = (int(numbers[PREFIX + key]) for key in ("rank", "size", "dirty"))
        return {JOB: (("size", size), ("dirty", dirty)), rank_key(rank): tuple(state)}
    # Check the job's entry.
    found = {key: _entry(value) for key, value in saved.items()}
    job = dict(found.get(JOB, ()))
    if not all(isinstance(job.get(key), int) for key in ("size", "dirty")):
        raise ValueError(NOT_OURS)
    number = job.get("format", 1)
    if not isinstance(number, int) or not 1 <= number <= FORMAT:
        raise ValueError(
            f"`state` is of format {number!r}, this gradwire reads up to {FORMAT}: use the one that saved it"
        )
    if number < FORMAT and CHECK not in job and not any(_has_checksums(entry) for entry in found.values()):
        log.warning(
            "`state` is of format %d, which has no checksums: damage to it may go unnoticed; save it again", number
        )
    elif number < FORMAT or job.pop(CHECK, None) != _crc(repr(tuple(job.items()))):
        raise ValueError(f"`state[{JOB!r}]` is not what was saved: it is damaged; {INSTEAD}")
    if number > 1:  # check the parts of all ranks that are here, so that all ranks refuse alike
        for key, entry in found.items():
            if key != JOB:
                _check_complete(key, dict(entry), number)
    return found


def refuse_other_owner(saved: Checkpoint, mark: str) -> None:
    """Refuses a checkpoint of another kind of state, for example of a sharded model for a DDP model.

    Its residuals would belong to other elements, though parameters and shapes may be the same.

    Args:
        saved: Result of `normalize`.
        mark: Key in `OWNERS` of the kind of state that loads it.

    Raises:
        ValueError: The checkpoint is of another kind; the message names both.
    """
    keys = [key for part in without_job(saved) for key in part if key != ENTRIES]
    found = next(each for each in OWNERS if not keys or any(key.startswith(each) for key in keys))
    if keys and found != mark:
        raise ValueError(
            f"`state` is of {OWNERS[found]}, and this one is of {OWNERS[mark]}: load what that has saved, or train on "
            "from the weights without it"
        )


def refuse_other_kinds(state: Mapping[str, StateValue], kinds: Mapping[str, type | UnionType]) -> None:
    """Refuses a rank's state in which a required value is missing or has another type.

    Args:
        state: State dict of one rank.
        kinds: Key -> type of the value, for each required key.

    Raises:
        ValueError: A value is missing or of another type; the message names its key.
    """
    for key, kind in kinds.items():
        if not isinstance(found := state.get(key), kind):
            raise ValueError(  # noqa: TRY004 - the content of a file is a value, whatever its type
                f"`state[{key!r}]` is {found!r}, which no saved state holds: the checkpoint is corrupt; {INSTEAD}"
            )


def refuse_odd_numbers(state: Mapping[str, StateValue]) -> None:
    """Refuses a rank's state with a number that no state is saved with: NaN, an infinity, or 64 bits and more.

    Args:
        state: State dict of one rank; its tensors and texts are not checked.

    Raises:
        ValueError: It holds such a number; the message names its key.
    """
    for key, value in state.items():
        if not isinstance(value, int | float):
            continue
        nbits = value.bit_length() if isinstance(value, int) else 0
        if nbits > 63 or not math.isfinite(value):
            odd = f"a whole number of {nbits} bits" if nbits > 63 else str(value)
            raise ValueError(f"`state[{key!r}]` is {odd}, which no saved state holds: it is damaged; {INSTEAD}")


def without_job(saved: Checkpoint) -> list[StateDict]:
    """Returns the state dict of each rank whose part is in a checkpoint, in the order of its keys.

    The entry that is equal on all ranks, `JOB` (number of ranks, whether residuals are pending, format), is left out.
    """
    return [dict(part) for key, part in saved.items() if key != JOB]


def _has_checksums(entry: Entry) -> bool:
    """Returns whether a rank's entry lists its values with checksums, as format 3 does; formats 1 and 2 do not."""
    return not str(dict(entry).get(ENTRIES, "{")).startswith("{")  # format 2 has an object there


_ListedValues = Mapping[str, tuple[Count | None, Count | None]]
"""Key of a value -> (number of elements, None if it is no tensor; checksum, None in format 2)."""
_LIST: MessageType[tuple[str, _ListedValues]] = MessageType(tuple[str, _ListedValues], most_nbytes=1 << 28)
_LIST_IN_2: MessageType[Mapping[str, Count | None]] = MessageType(Mapping[str, Count | None], most_nbytes=1 << 28)


def _listed_values(key: str, listed: object, number: int) -> _ListedValues:
    """Parses the list of the values that a rank's entry was saved with: their keys, sizes and checksums.

    Args:
        key: Key of the rank's entry in the checkpoint.
        listed: Value under `ENTRIES` in the entry; text if the checkpoint is whole, None if it is missing.
        number: Version of the checkpoint's format, 2 or 3.

    Returns:
        Key of each value -> (number of elements, None if it is no tensor; CRC-32, None in format 2).

    Raises:
        MessageError: There is no such list, it is damaged, or it is of another rank.
    """
    if not isinstance(listed, str):
        raise MessageError("a rank's part does not list its entries")
    if number == 2:
        return {name: (numel, None) for name, numel in _LIST_IN_2.read(listed).items()}
    crc, _, text = listed.partition(" ")
    if crc != f"{_crc(text):08x}":
        raise MessageError("a rank's list of its entries has another checksum")
    of, found = _LIST.read(text)
    if of != key:
        raise MessageError("a rank's list of its entries is of another rank")
    return found


def _check_complete(key: str, entry: Mapping[str, StateValue], number: int) -> None:
    """Refuses a rank's entry that lacks values it was saved with, or in which a size or a checksum differs.

    Args:
        key: Key of the rank's entry in the checkpoint, for messages.
        entry: State dict of the rank, with the list of its values.
        number: Version of the checkpoint's format, 2 or 3. In format 2 there are no checksums, so only missing values
            and other numbers of elements are found.

    Raises:
        ValueError: The list of values is missing or damaged, a value is missing, or its number of elements or its
            CRC-32 is not that in the list.
    """
    try:
        wanted = _listed_values(key, entry.get(ENTRIES), number)
    except MessageError as error:
        raise ValueError(
            f"`state[{key!r}]` does not state its entries as it was saved with ({error}): it is damaged; {INSTEAD}"
        ) from None
    lacking = [name for name in wanted if name not in entry]
    if lacking:
        raise ValueError(
            f"`state[{key!r}]` lacks {len(lacking)} of the {len(wanted)} entries that it was saved with, "
            f"{lacking[0]!r} for one: it is damaged; {INSTEAD}"
        )
    for name, (numel, crc) in wanted.items():
        if _numel(entry[name]) != numel:
            raise ValueError(
                f"`state[{key!r}]` was saved with {_elements(numel)} under {name!r} and holds "
                f"{_elements(_numel(entry[name]))}: it is damaged; {INSTEAD}"
            )
        if crc is not None and crc != _crc(entry[name]):
            raise ValueError(
                f"`state[{key!r}]` holds another value under {name!r} than it was saved with (its CRC-32 differs): it "
                f"is damaged; {INSTEAD}"
            )


def _crc(value: StateValue) -> int:
    """Returns the CRC-32 of a value; of a tensor on any device, that of its dtype, shape and content."""
    if not isinstance(value, Tensor):
        return zlib.crc32(repr(value).encode(errors="surrogatepass"))
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data, zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode()))


def _numel(value: StateValue) -> int | None:
    """Returns the number of elements of a tensor; None for any other value."""
    return value.numel() if isinstance(value, Tensor) else None


def _elements(numel: int | None) -> str:
    """Describes a result of `_numel` for an error: `5 elements`, or `no tensor` for None."""
    return "no tensor" if numel is None else f"{numel} elements"


def unpack(saved: Checkpoint, rank: int, size: int) -> StateDict | None:
    """Returns the state dict of one rank from a checkpoint of any number of ranks.

    Args:
        saved: Result of `pack`, `gather` or `normalize`.
        rank: This rank.
        size: Number of ranks.

    Returns:
        The state dict; None if there is nothing to restore, because the checkpoint is of another number of ranks and
        was flushed, or was saved before the first bucket.

    Raises:
        ValueError: `saved` holds residuals of another number of ranks, or lacks this rank's part, or that holds a
            number that is not finite or has more than 64 bits.
    """
    job = dict(saved[JOB])
    if job["size"] != size:
        if job["dirty"]:
            raise ValueError(
                f"`state` is of {job['size']} ranks, there are {size}, and it still holds residuals that belong to "
                "those ranks: call state.flush() and train one more step before saving, or load it at the number of "
                "ranks that saved it"
            )
        # The residuals are in the weights; momenta and factors of other shards build up again.
        log.info("a flushed state of %s ranks in a job of %d: no residuals are loaded", job["size"], size)
        return None
    if rank_key(rank) not in saved:
        ranks = ", ".join(sorted(key.removeprefix(PREFIX + "rank") for key in saved if key != JOB))
        raise ValueError(
            f"`state` holds the part of rank {ranks or 'none'} alone, this is rank {rank} of {size}: where rank 0 "
            "saves for all, save state.gathered_state_dict(), called on all ranks; or save each rank's state_dict() "
            "and load its own"
        )
    own = dict(saved[rank_key(rank)])
    own.pop(ENTRIES, None)
    refuse_odd_numbers(own)
    return own or None


@runtime_checkable
class GathersBytes(Protocol):
    """Protocol of groups that gather bytes themselves, as in elastic training, where ranks may change meanwhile."""

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """Returns the bytes of each rank, in rank order; every rank calls it with its own, and waits for the others."""


def gather(
    own: Checkpoint, group: dist.ProcessGroup, on_all_ranks: bool, peer_wait: Callable[[], PeerWait] | None = None
) -> Checkpoint:
    """Merges the parts of all ranks of a group into one checkpoint; every rank calls it, and waits for the others.

    Args:
        own: Part of this rank, the result of `pack`.
        group: Process group of the ranks, or a `GathersBytes`.
        on_all_ranks: True if all ranks get the whole checkpoint; False if only rank 0 of the group does.
        peer_wait: Makes the check for ranks that exit during the wait; None relies on the errors of torch.

    Returns:
        The whole checkpoint; on ranks that do not get it, their own part.

    Raises:
        PeerError: A rank has exited, or has aborted.
        RuntimeError: Torch's gather failed, and no such rank was found.
        ValueError: A rank sent no state.
    """
    packed = io.BytesIO()
    torch.save(own, packed)
    if isinstance(group, GathersBytes):
        parts = group.gather_bytes(packed.getvalue())
    else:
        receiver = None if on_all_ranks else 0
        parts = _watched(lambda: gather_bytes(packed.getvalue(), group, receiver), peer_wait)
    merged = dict(own)
    if on_all_ranks or group.rank() == 0:
        for part in parts:
            merged |= _part(part)
    return merged


def _part(packed: bytes) -> Checkpoint:
    """Parses the part of another rank into tensors on the CPU and plain values; nothing in it is run as code.

    Args:
        packed: Bytes that the rank has written with `torch.save`.

    Raises:
        ValueError: The bytes are no part of a checkpoint.
    """
    try:
        part: object = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"a rank has given no state: {f'{error}'.partition(chr(10))[0]}") from error
    if not isinstance(part, Mapping):
        raise ValueError(NOT_OURS)  # noqa: TRY004 - bytes of another rank are a value, whatever their type
    return {str(key): _entry(value) for key, value in part.items()}


def _watched(collect: Callable[[], list[bytes]], peer_wait: Callable[[], PeerWait] | None) -> list[bytes]:
    """Runs `collect` in a thread, and waits for it until it ends or a rank is found to have exited.

    Torch's own error for a lost rank does not name it, and some ranks get it only at the timeout.

    Args:
        collect: Function that gathers bytes of all ranks. After an error about a rank, its thread is left behind.
        peer_wait: Makes the check for ranks that have exited; None calls `collect` in this thread, without a check.

    Returns:
        The result of `collect`.

    Raises:
        PeerError: A rank has exited, or has aborted.
        RuntimeError: `collect` raised it, and no such rank was found within `GRACE_SECONDS`.
    """
    if peer_wait is None:
        return collect()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def run() -> list[bytes]:
        with nullcontext() if device is None else torch.cuda.device(device):  # each thread has its own
            return collect()

    others = peer_wait()
    told = in_thread(run, "gradwire gathers")
    failed, deadline = None, 0.0
    while failed is None or time.monotonic() < deadline:
        with suppress(Empty):
            found = told.get(timeout=SLICE_SECONDS)
            if not isinstance(found, RuntimeError):
                return outcome_of(found)
            failed, deadline = found, time.monotonic() + GRACE_SECONDS
        if (lost := others.failure("before it had given its state")) is not None:
            raise PeerError(f"the ranks' states cannot be gathered: {lost}")
    raise failed


def rank_file(place: str, rank: int) -> str:
    """Returns the path of a rank's own file, beside or in a framework's checkpoint.

    Args:
        place: Prefix of the path: the checkpoint's folder with a separator behind, or its file with a dot behind.
        rank: The rank.
    """
    return f"{place}gradwire_state_{rank}.pth"


def save_file(state: Checkpoint, path: str) -> None:
    """Writes one rank's file of a checkpoint, and makes its folder if that is missing.

    If this fails (with a full disk, say) or the process ends meanwhile, an earlier file stays as it was.

    Args:
        state: Part of this rank, the result of `pack`.
        path: Result of `rank_file`.

    Raises:
        OSError: The file cannot be written.
        RuntimeError: The file cannot be written, and torch has noticed it first.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace_file(Path(path), lambda file: torch.save(state, file))


def load_file(path: str) -> dict[str, object]:
    """Reads a file that `save_file` has written, with its tensors on the CPU; `normalize` has to check the content.

    Args:
        path: Result of `rank_file`.

    Raises:
        FileNotFoundError: There is no such file.
        Exception: Whatever torch.load raises of a file that is damaged or no state.
    """
    saved: dict[str, object] = torch.load(path, map_location="cpu", weights_only=True)
    return saved


_FOUND: MessageType[tuple[bool, str]] = MessageType(tuple[bool, str])
"""Message of a rank: (whether it has loaded a file, why a file cannot be read; empty if there was no error)."""


def find_own(place: str, load: Callable[[str], dict[str, object]] = load_file) -> dict[str, object] | None:
    """Loads this rank's file of a checkpoint with a file for each rank; all ranks of the default group call it.

    If this rank has none, because more ranks resume than saved, it loads rank 0's, which tells whether the state was
    flushed.

    Args:
        place: Prefix of the files' paths; see `rank_file`.
        load: Reads a file; raises FileNotFoundError if there is none.

    Returns:
        Content of the file, unchecked; None if no rank has a file, because the checkpoint was written without gradwire
        or without a compressor.

    Raises:
        FileNotFoundError: This rank finds neither its file nor rank 0's, and others find one.
        ValueError: A rank's file cannot be read; raised on all ranks.
    """
    # Load this rank's file, or else rank 0's. An error is kept until the other ranks know of it.
    saved: dict[str, object] | None = None
    unread = ""
    for rank in dict.fromkeys((dist.get_rank(), 0)):
        path = rank_file(place, rank)
        try:
            saved = load(path)
            break
        except FileNotFoundError:
            continue
        except Exception as error:  # noqa: BLE001 - of many types; raised where the others are told
            unread = f"{path} cannot be read on rank {dist.get_rank()} ({f'{error}'.partition(chr(10))[0]}): {INSTEAD}"
            break
    # Tell all ranks what was found, so that all of them raise if one has to.
    own = json.dumps([saved is not None, unread]).encode()
    everywhere = [_FOUND.read(each) for each in gather_bytes(own, dist.group.WORLD)]
    for _, said in everywhere:
        if said:
            raise ValueError(said)
    if saved is None and any(has for has, _ in everywhere):
        raise FileNotFoundError(
            f"{rank_file(place, dist.get_rank())} is missing on this machine, while other ranks have theirs: copy the "
            "whole checkpoint, with the files of all ranks, to each machine"
        )
    return saved


def _entry(value: object) -> Entry:
    """Returns an entry of a loaded checkpoint as a tuple of (key, value) tuples, also if a serializer has made lists.

    Raises:
        ValueError: The entry does not consist of such pairs.
    """
    if not isinstance(value, Sequence) or any(not isinstance(pair, Sequence) or len(pair) != 2 for pair in value):
        raise ValueError(NOT_OURS)
    return tuple((str(key), each) for key, each in value)
