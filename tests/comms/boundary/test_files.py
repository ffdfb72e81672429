"""A file is written whole or not at all, and damage to a saved state is noticed."""

import errno
import io
import os
import random
import resource
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from gradwire.comms import checkpoint
from gradwire.comms.autotune import profile
from gradwire.comms.boundary.files import replace_file, replace_text
from gradwire.comms.fusion import FusionPlan
from gradwire.compressors.base import StateDict

STATE: StateDict = {"compressor": "int8", "step": 3, "loss": 0.5, "residual/0/weight": torch.linspace(-1, 1, 501)}


class FullDisk(io.RawIOBase):
    """A file that takes some bytes, and then has no room."""

    def __init__(self, file: BinaryIO, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: Any) -> int:
        taken = bytes(data)[: self.room]
        self.room -= len(taken)
        self.file.write(taken)
        if len(taken) < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(taken)

    def flush(self) -> None:
        self.file.flush()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.7, 0.999])
def test_a_full_disk_at_any_byte_leaves_the_old_file(share: float, tmp_path: Path) -> None:
    path = tmp_path / "state.pth"
    saved = checkpoint.pack(STATE, 0, 2, True)
    checkpoint.save_file(saved, str(path))
    before = path.read_bytes()
    with pytest.raises((OSError, RuntimeError)):
        replace_file(path, lambda file: torch.save(saved, FullDisk(file, int(share * len(before)))))  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["state.pth"]


def in_child(call: Callable[[], object]) -> int:
    """Calls in a forked child; how that ended, as `os.wait` says."""
    child = os.fork()
    if child == 0:
        try:
            call()
        except (OSError, RuntimeError):
            os._exit(7)
        os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("ignored", [True, False])
def test_a_limit_on_files_sizes_at_any_byte_leaves_the_old_file(ignored: bool, tmp_path: Path) -> None:
    """Beyond RLIMIT_FSIZE a write fails, or SIGXFSZ kills the process."""
    path = tmp_path / "state.pth"
    old, new = (checkpoint.pack({**STATE, "step": step}, 0, 2, True) for step in (1, 2))
    checkpoint.save_file(old, str(path))
    before, nbytes = path.read_bytes(), path.stat().st_size

    def save(room: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN if ignored else signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        checkpoint.save_file(new, str(path))

    for room in range(0, nbytes, max(nbytes // 12, 1)):
        ended = in_child(lambda room=room: save(room))  # type: ignore[misc]
        assert os.WEXITSTATUS(ended) == 7 if ignored else os.WTERMSIG(ended) == signal.SIGXFSZ
        assert path.read_bytes() == before
        assert ignored is ([each.name for each in tmp_path.iterdir()] == ["state.pth"])
    checkpoint.save_file(new, str(path))
    assert dict(checkpoint.normalize(checkpoint.load_file(str(path)))[checkpoint.rank_key(0)])["step"] == 2


def test_a_kill_between_any_two_calls_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is: write, fsync the file, rename, fsync the folder."""
    path = tmp_path / "last.txt"
    replace_text(path, "old")
    calls: list[str] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return real(*arguments, **named)

        return call

    monkeypatch.setattr(os, "fsync", noted("fsync", os.fsync))
    monkeypatch.setattr(Path, "replace", noted("rename", Path.replace))
    replace_text(path, "new")
    assert calls == ["fsync", "rename", "fsync"] and path.read_text() == "new"

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for of, name in ((os, "fsync"), (Path, "replace")):
        with monkeypatch.context() as until:
            until.setattr(of, name, die)
            assert os.WTERMSIG(in_child(lambda: replace_text(path, "newer"))) == signal.SIGKILL
        assert path.read_text() == "new"


def test_permissions_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    path, link = tmp_path / "own.txt", tmp_path / "link.txt"
    replace_text(path, "1")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    path.chmod(0o640)
    link.symlink_to(path)
    replace_text(link, "2")
    assert link.is_symlink() and path.read_text() == "2" and stat.S_IMODE(path.stat().st_mode) == 0o640
    replace_text(Path("/dev/null"), "3")
    assert not Path("/dev/null").is_file()


def damaged(data: bytes, random_numbers: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(random_numbers.choice([1, 1, 1, 2, 8])):
        found[random_numbers.randrange(len(found))] ^= 1 << random_numbers.randrange(8)
    return bytes(found)


def flips(tmp_path: Path, count: int) -> None:
    """Either the damage is noticed, or what was loaded is what was saved: the bit was one that nothing reads."""
    path = tmp_path / "state.pth"
    saved = checkpoint.pack(STATE, 1, 2, True)
    checkpoint.save_file(saved, str(path))
    data, numbers, noticed = path.read_bytes(), random.Random(8), 0
    for _ in range(count):
        path.write_bytes(damaged(data, numbers))
        try:
            found = checkpoint.unpack(checkpoint.normalize(checkpoint.load_file(str(path))), 1, 2)
        except Exception:  # noqa: BLE001 - find_own takes any
            noticed += 1
            continue
        assert found is not None and list(found) == list(STATE)
        for key, value in STATE.items():
            assert torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value  # type: ignore[arg-type]
    assert noticed > count // 2


def test_flipped_bits_are_noticed(tmp_path: Path) -> None:
    flips(tmp_path, 300)


def test_flipped_bits_are_noticed_in_thousands_of_files(tmp_path: Path) -> None:
    flips(tmp_path, 10_000)


def test_a_profile_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    setting = FusionPlan(threshold_nbytes=1)
    profile.save(file, {"ranks": 2}, setting)

    def save() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40, resource.RLIM_INFINITY))
        profile.save(file, {"ranks": 2}, setting)

    assert os.WEXITSTATUS(in_child(save)) == 7
    assert profile.load(file, {"ranks": 2}) == setting
