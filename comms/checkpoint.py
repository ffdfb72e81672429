"""The hook's state in the checkpoints that people write: one entry for each rank, under a key that carries the rank.

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
"""The prefix of the hook's own keys, in a checkpoint and in an entry."""
JOB = PREFIX + "job"
"""Key of what all ranks know alike: `size`, the number of ranks, `dirty`, whether residuals are pending, `format`."""
FORMAT = 3
"""Version of the values. Since 3 each rank's lists its entries with a checksum of each; 2 lists their elements alone, 1
lists nothing. Both are read, too, with a warning that damage to them may go unnoticed."""
NAMED = PREFIX + "named"
"""Key in an entry: 1 where parameters go by their names in the model, 0 where they are numbered."""
ENTRIES = PREFIX + "entries"
"""Key in an entry: JSON, the entry's own key and, for each key that was saved, the elements of its tensor (null for a
number or a string) and the CRC-32 of its value; before it, in hexadecimal digits, the CRC-32 of that JSON. In format 2
it is JSON, key -> elements."""
CHECK = "check"
"""Key in `JOB`: the CRC-32 of what it holds besides."""

Entry = tuple[tuple[str, StateValue], ...]
"""A state dict as one value. Plain tuples, so that `torch.load(weights_only=True)` takes it."""
Checkpoint = dict[str, Entry]
"""What `HookState.state_dict` returns."""

SHARDS = PREFIX + "shards"
"""Key in an entry of a sharded model: over how many ranks the first unit's parameters are sharded."""
OUTER = PREFIX + "outer/"
"""Begins all keys in an entry of `Outer`."""
OWNERS = {
    SHARDS: "a model that fully_shard has sharded (gradwire.fsdp.apply)",
    OUTER: "gradwire.Outer",
    "": "a DistributedDataParallel model (HookState)",
}
"""What begins a key in the entries of one kind of state alone -> whose state that is; nothing: all others."""

NOT_OURS = "`state` has no entries of gradwire's hook: wanted what HookState.state_dict() returned"
EMPTY = (
    "`state` is empty, as it is where nothing is compressed: leave it out, and training begins without residuals; "
    "if there was a compressor, wanted what HookState.state_dict() returned"
)

SLICE_SECONDS = 1.0
"""Seconds of a wait for other ranks' states between two looks whether those ranks live."""
GRACE_SECONDS = 5.0
"""Seconds to find out which rank has ended, once torch has failed: two looks."""

INSTEAD = "load another checkpoint, or train on from the weights without this state"
"""What to do about a damaged state."""


def rank_key(rank: int) -> str:
    """The key of a rank's entry."""
    return f"{PREFIX}rank{rank}"


def pack(state: Mapping[str, StateValue], rank: int, size: int, dirty: bool) -> Checkpoint:
    """What one rank puts into a checkpoint.

    Args:
        state: Its own; tensors of any shape and dtype, copied to the CPU where they are not there. Empty for a rank
            that holds nothing yet.
        rank: This rank.
        size: Number of ranks.
        dirty: True if residuals are pending; the same on all ranks.
    """
    own = tuple((key, value.cpu() if isinstance(value, Tensor) else value) for key, value in state.items())
    text = json.dumps([rank_key(rank), {key: [_numel(each), _crc(each)] for key, each in own}], separators=(",", ":"))
    job = (("size", size), ("dirty", int(dirty)), ("format", FORMAT))
    return {JOB: (*job, (CHECK, _crc(repr(job)))), rank_key(rank): (*own, (ENTRIES, f"{_crc(text):08x} {text}"))}


def normalize(saved: Mapping[str, object]) -> Checkpoint:
    """A state as `pack` writes it.

    Args:
        saved: What `pack` or `gather` returned, also where a serializer has made lists of its tuples; or a state dict
            of gradwire before its keys carried the rank.

    Raises:
        ValueError: It is no state of the hook, or lacks entries that were saved; the message says what was wanted.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(NOT_OURS)  # noqa: TRY004 - the content of a file is a value, whatever its type
    if not saved:
        raise ValueError(EMPTY)
    if all(PREFIX + key in saved for key in ("size", "rank", "dirty", "loss_scale", "transfers")):
        state = [(key, value) for key, value in saved.items() if isinstance(value, Tensor | int | float | str)]
        numbers = dict(state)
        rank, size, dirty = (int(numbers[PREFIX + key]) for key in ("rank", "size", "dirty"))
        return {JOB: (("size", size), ("dirty", dirty)), rank_key(rank): tuple(state)}
    found = {key: _entry(value) for key, value in saved.items()}
    job = dict(found.get(JOB, ()))
    if not all(isinstance(job.get(key), int) for key in ("size", "dirty")):
        raise ValueError(NOT_OURS)
    number = job.get("format", 1)
    if not isinstance(number, int) or number > FORMAT:
        raise ValueError(
            f"`state` is of format {number!r}, this gradwire reads up to {FORMAT}: use the one that saved it"
        )
    if number < FORMAT and CHECK not in job and not any(_has_checksums(entry) for entry in found.values()):
        log.warning(
            "`state` is of format %d, which has no checksums: damage to it may go unnoticed; save it again", number
        )
    elif number < FORMAT or job.pop(CHECK, None) != _crc(repr(tuple(job.items()))):
        raise ValueError(f"`state[{JOB!r}]` is not what was saved: it is damaged; {INSTEAD}")
    if number > 1:  # of all ranks, where they are here: then all refuse it alike
        for key, entry in found.items():
            if key != JOB:
                _check_complete(key, dict(entry), number)
    return found


def refuse_other_owner(saved: Checkpoint, mark: str) -> None:
    """Refuses a state of another kind, whose elements lie elsewhere, though parameters and shapes may be the same.

    Args:
        saved: What `normalize` returned.
        mark: Of the kind that loads it, a key of `OWNERS`.

    Raises:
        ValueError: It is of another one; the message names both.
    """
    keys = [key for part in without_job(saved) for key in part if key != ENTRIES]
    found = next(each for each in OWNERS if not keys or any(key.startswith(each) for key in keys))
    if keys and found != mark:
        raise ValueError(
            f"`state` is of {OWNERS[found]}, and this one is of {OWNERS[mark]}: load what that has saved, or train on "
            "from the weights without it"
        )


def refuse_other_kinds(state: Mapping[str, StateValue], kinds: Mapping[str, type | UnionType]) -> None:
    """Refuses a rank's entries that are of a kind that nobody saves.

    Args:
        state: Of one rank.
        kinds: What each of these entries is; all of them are there.

    Raises:
        ValueError: One is of another kind, or missing.
    """
    for key, kind in kinds.items():
        if not isinstance(found := state.get(key), kind):
            raise ValueError(  # noqa: TRY004 - the content of a file is a value, whatever its type
                f"`state[{key!r}]` is {found!r}, which no saved state holds: the checkpoint is corrupt; {INSTEAD}"
            )


def without_job(saved: Checkpoint) -> list[StateDict]:
    """The entries of ranks that a checkpoint holds."""
    return [dict(part) for key, part in saved.items() if key != JOB]


def _has_checksums(entry: Entry) -> bool:
    return not str(dict(entry).get(ENTRIES, "{")).startswith("{")  # format 2 has an object there


_Stated = Mapping[str, tuple[Count | None, Count | None]]
"""Key of a value -> elements of its tensor, and its checksum; None where there is none."""
_STATED: MessageType[tuple[str, _Stated]] = MessageType(tuple[str, _Stated], most_nbytes=1 << 28)
_STATED_IN_2: MessageType[Mapping[str, Count | None]] = MessageType(Mapping[str, Count | None], most_nbytes=1 << 28)


def _stated(key: str, said: object, number: int) -> _Stated:
    """What a rank's part says that it was saved with.

    Raises:
        MessageError: It does not say so, or is damaged.
    """
    if not isinstance(said, str):
        raise MessageError("a rank's part does not list its entries")
    if number == 2:
        return {name: (numel, None) for name, numel in _STATED_IN_2.read(said).items()}
    crc, _, text = said.partition(" ")
    if crc != f"{_crc(text):08x}":
        raise MessageError("a rank's list of its entries has another checksum")
    of, found = _STATED.read(text)
    if of != key:
        raise MessageError("a rank's list of its entries is of another rank")
    return found


def _check_complete(key: str, entry: Mapping[str, StateValue], number: int) -> None:
    """Refuses a rank's part that lacks entries it was saved with, or elements of them, or holds other values."""
    try:
        wanted = _stated(key, entry.get(ENTRIES), number)
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
    """Return the CRC-32 of a value with its type, and of a tensor with its shape, on whatever device it is."""
    if not isinstance(value, Tensor):
        return zlib.crc32(repr(value).encode(errors="surrogatepass"))
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data, zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode()))


def _numel(value: StateValue) -> int | None:
    return value.numel() if isinstance(value, Tensor) else None


def _elements(numel: int | None) -> str:
    return "no tensor" if numel is None else f"{numel} elements"


def unpack(saved: Checkpoint, rank: int, size: int) -> StateDict | None:
    """This rank's part of a checkpoint of any number of ranks.

    Args:
        saved: What `pack`, `gather` or `normalize` returned.
        rank: This rank.
        size: Number of ranks.

    Returns:
        None where there is nothing to restore: the state is of another number of ranks, and was flushed, or was saved
        before the first bucket.

    Raises:
        ValueError: `saved` holds residuals of another number of ranks, or lacks this rank's part.
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
        log.info("a flushed state of %s ranks in a job of %d: the compressor starts anew", job["size"], size)
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
    return own or None


@runtime_checkable
class GathersBytes(Protocol):
    """A group whose ranks may change: torch's own would take one that is lost meanwhile for one that gave nothing."""

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """What each rank gave."""


def gather(
    own: Checkpoint, group: dist.ProcessGroup, on_all_ranks: bool, peer_wait: Callable[[], PeerWait] | None = None
) -> Checkpoint:
    """Merges what the ranks of a group put into a checkpoint; all of them call it.

    Args:
        own: What `pack` returned.
        group: Of the ranks.
        on_all_ranks: Whether all of them shall have everything.
        peer_wait: Makes the liveness check of the wait; None relies on the errors of torch.

    Returns:
        Everything on the group's rank 0 or, if `on_all_ranks`, on all; on the others their own part.

    Raises:
        PeerError: A rank has ended, or has given up.
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


def _part(said: bytes) -> Checkpoint:
    """What another rank has put into a checkpoint: tensors and plain values, no code.

    Raises:
        ValueError: It is something else.
    """
    try:
        found: object = torch.load(io.BytesIO(said), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"a rank has given no state: {f'{error}'.partition(chr(10))[0]}") from error
    if not isinstance(found, Mapping):
        raise ValueError(NOT_OURS)  # noqa: TRY004 - bytes of another rank are a value, whatever their type
    return {str(key): _entry(value) for key, value in found.items()}


def _watched(collect: Callable[[], list[bytes]], peer_wait: Callable[[], PeerWait] | None) -> list[bytes]:
    """Has a thread collect, and waits for that as long as no rank is known to have ended.

    Torch's own words for one that is lost name nobody, and some ranks hear of it at the time-out alone.
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
    """Where a rank's own file is, beside or in a framework's checkpoint.

    Args:
        place: The checkpoint's folder with its separator, or its file with a dot behind.
        rank: Which.
    """
    return f"{place}gradwire_state_{rank}.pth"


def save_file(state: Checkpoint, path: str) -> None:
    """Writes one rank's file into a local folder, which is made where it is missing.

    A failure, a full disk for one, or the end of the process leaves the file that was there before as it was.

    Args:
        state: What `pack` returned.
        path: What `rank_file` returned.

    Raises:
        OSError: The file cannot be written.
        RuntimeError: As above, in torch's words.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace_file(Path(path), lambda file: torch.save(state, file))


def load_file(path: str) -> dict[str, object]:
    """Reads what `save_file` has written.

    Raises:
        FileNotFoundError: There is none.
    """
    saved: dict[str, object] = torch.load(path, map_location="cpu", weights_only=True)
    return saved


_FOUND: MessageType[tuple[bool, str]] = MessageType(tuple[bool, str])
"""Whether a rank has a file, and why it cannot be read; empty where it can."""


def find_own(place: str, load: Callable[[str], dict[str, object]] = load_file) -> dict[str, object] | None:
    """What this rank loads of a checkpoint with a file for each rank; all ranks of the default group call it.

    That is its own file, or rank 0's, which says whether it was flushed, where more ranks resume than saved.

    Args:
        place: As for `rank_file`.
        load: Reads a file; raises FileNotFoundError where there is none.

    Returns:
        None where the checkpoint was written without gradwire, or without a compressor.

    Raises:
        FileNotFoundError: Other ranks have files.
        ValueError: A rank's file cannot be read; on all ranks.
    """
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
    if not isinstance(value, Sequence) or any(not isinstance(pair, Sequence) or len(pair) != 2 for pair in value):
        raise ValueError(NOT_OURS)
    return tuple((str(key), each) for key, each in value)
