"""Captures: an archive of only what the checks read, and its reader, which trusts no archive."""

import gzip
import io
import json
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO

from gradwire.topology.gdr.host import Host
from gradwire.topology.gdr.inputs.environment import read_environment
from gradwire.topology.gdr.inputs.facts import HostFacts, facts_from_json
from gradwire.topology.gdr.pci_files import tree_files

INDEX = "gradwire-gdr.json"
FORMAT = 1

_MAX_MEMBER_NBYTES = 4 << 20
_MAX_TOTAL_NBYTES = 128 << 20
_MAX_MEMBERS = 30_000
"""Files, links and folders; a server with 16 network cards of 64 virtual functions each has some 20,000."""
_MAX_SECONDS = 20.0
"""Seconds for unpacking; on 2 busy cores 10,000 files took 3 s (2026-11-22)."""
_SECRET = frozenset(("NCCL_COMM_ID", "NCCL_HOSTID", "NCCL_MNNVL_UUID"))


Say = Callable[[str], None]
"""Is told, now and then, what is being done."""


class CaptureError(ValueError):
    """The archive is not one that `--capture` wrote, or is built to do harm."""


@dataclass(frozen=True, slots=True)
class Capture:
    """An unpacked archive."""

    root: Path
    denied: frozenset[str]
    """Paths that could not be read where the capture was made."""
    environment: Mapping[str, str] | None
    facts: HostFacts


def write_capture(path: Path, host: Host) -> int:
    """Writes everything the checks have read so far into an archive; returns the number of files in it.

    Addresses in GID tables lose their host part, variables that name hosts their value, home folders their owner.

    Args:
        path: The tar.gz to write.
        host: The machine, after the checks ran: what they did not read is not captured.

    Raises:
        OSError: The archive cannot be written.
    """
    contents, links = tree_files(host.tree)
    for name, kept in host.files.contents.items():
        if not name.startswith("sys/bus/pci/devices/"):
            lines = [_redact(name, line) for matches in kept.values() for line in matches]
            contents[name] = "\n".join(lines).encode() + b"\n"
    links |= {name: target for name, target in host.files.links.items() if name != target}
    index = {
        "format": FORMAT,
        "links": links,
        "present": sorted(host.files.present - set(contents)),
        "unreadable": sorted(host.files.unreadable),
        "environment": None if host.environment is None else {k: _hide(k, v) for k, v in host.environment.items()},
        "facts": host.facts.to_json(),
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, content in ((INDEX, json.dumps(index, indent=1).encode()), *sorted(contents.items())):
            member = tarfile.TarInfo(name)  # no owner, no times: nothing of the machine but the content
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return len(contents)


def _redact(path: str, text: str) -> str:
    """Removes from a line the host part of a GID (checks ask for its scope alone), host hashes and user names."""
    if "/gids/" not in path:
        return re.sub(r' host_hash="[^"]*"', "", re.sub(r"/home/[^/\s]+", "/home/USER", text))
    words = text.split(":")
    return text if len(words) != 8 or not text.strip("0:") else ":".join([*words[:6], "0000", "0001"])


def _hide(name: str, value: str) -> str:
    return "set" if name in _SECRET else re.sub(r"/home/[^/\s]+", "/home/USER", value)


@contextmanager
def opened_capture(path: Path, say: Say = lambda _: None) -> Iterator[Capture]:
    """Unpacks an archive into a temporary folder for the length of a `with` block, and yields the capture.

    Args:
        path: A tar.gz that `write_capture` wrote.
        say: Function that is called repeatedly with the number of unpacked files.

    Raises:
        CaptureError: It is no capture, or holds paths out of its root, links, devices, too much, or too much for
            20 seconds.
        OSError: The file cannot be read.
    """
    with TemporaryDirectory(prefix="gradwire-gdr-") as folder:
        root = Path(folder).resolve()
        with path.open("rb") as file:
            effort = _Effort(say)
            index = _unpack(file, root, effort)
        yield _restore(root, index, effort)


class _Effort:
    """Counts files and seconds while unpacking, and raises `CaptureError` beyond what any machine needs."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._count = 0
        self._deadline = time.monotonic() + _MAX_SECONDS

    def one_more(self) -> None:
        """Counts a file, a link or a folder; raises `CaptureError` beyond a limit."""
        self._count += 1
        if self._count > _MAX_MEMBERS:
            raise CaptureError(f"holds more than {_MAX_MEMBERS} files, links and folders")
        if self._count % 500 == 0:
            self._say(f"unpacking: {self._count} files")
            if time.monotonic() > self._deadline:
                raise CaptureError(f"is not unpacked after {_MAX_SECONDS:g} s and {self._count} files")


class _Limited(io.RawIOBase):
    """Wraps a decompressed stream, and raises `CaptureError` after a limit: zeros pack a thousand to one."""

    def __init__(self, stream: io.BufferedIOBase, nbytes: int) -> None:
        self._stream = stream
        self._left = nbytes

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(min(size if size >= 0 else self._left + 1, 1 << 20))
        self._left -= len(data)
        if self._left < 0:
            raise CaptureError(f"holds more than {_MAX_TOTAL_NBYTES >> 20} MiB unpacked")
        return data


def _unpack(file: IO[bytes], root: Path, effort: _Effort) -> bytes:
    """Writes the regular files of an archive below `root`; returns the index."""
    index = b""
    try:
        limited = _Limited(gzip.GzipFile(fileobj=file), _MAX_TOTAL_NBYTES)
        with tarfile.open(fileobj=limited, mode="r|", errorlevel=2) as archive:
            for member in archive:
                effort.one_more()
                name = _checked(member)
                content = archive.extractfile(member)
                data = content.read(_MAX_MEMBER_NBYTES) if content else b""
                index = data if name == INDEX else index
                _write(root / name, data)
    except CaptureError:
        raise
    except (tarfile.TarError, EOFError, ValueError, OverflowError, gzip.BadGzipFile) as error:
        raise CaptureError(f"is no complete tar.gz: {error}") from error
    except Exception as error:  # zlib.error and what tarfile lets through on damaged headers
        raise CaptureError(f"is no readable tar.gz: {type(error).__name__}: {error}") from error
    if not index:
        raise CaptureError(f"has no {INDEX}: `gradwire gdr-check --capture FILE.tar.gz` writes one")
    return index


def _checked(member: tarfile.TarInfo) -> str:
    """Returns the member's name if it is a small regular file that stays inside; raises `CaptureError` otherwise."""
    if not member.isreg() or member.issparse():
        kind = "link" if member.issym() or member.islnk() else "device" if member.isdev() else "special file"
        raise CaptureError(f"holds a {kind}, `{member.name[:100]}`; a capture has regular files alone")
    if member.size > _MAX_MEMBER_NBYTES:
        raise CaptureError(f"`{member.name[:100]}` has {member.size} bytes, at most {_MAX_MEMBER_NBYTES} are allowed")
    return _inside(member.name)


def _inside(name: str) -> str:
    """Normalizes a relative path; raises `CaptureError` if it could leave its root."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name or len(name) > 1024 or "\\" in name:
        raise CaptureError(f"path `{name[:100]}` leads out of the archive")
    return "/".join(parts)


def _write(place: Path, data: bytes) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    except OSError as error:
        raise CaptureError(f"`{place.name[:100]}` collides with another path: {error.strerror}") from error


def _restore(root: Path, raw: bytes, effort: _Effort) -> Capture:
    """Makes the links and folders that the index names, and returns the capture.

    Args:
        root: Folder with the unpacked files.
        raw: The index as JSON.
        effort: Counter of what is made.
    """
    try:
        index = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CaptureError(f"{INDEX} is no JSON") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        found = index.get("format") if isinstance(index, dict) else str(index)[:40]
        raise CaptureError(f"{INDEX} has format {found}, not {FORMAT}")
    for name in _strings(index.get("present")):
        effort.one_more()
        place = root / _inside(name)
        if not place.exists() and not any(parent.is_file() for parent in place.parents if parent != root):
            place.mkdir(parents=True)
    links = index.get("links")
    for name, target in links.items() if isinstance(links, dict) else ():
        effort.one_more()
        _link(root, _inside(str(name)), _inside(str(target)))
    environment = index.get("environment")
    texts = {k: v for k, v in environment.items() if isinstance(v, str)} if isinstance(environment, dict) else None
    return Capture(
        root=root,
        denied=frozenset(_strings(index.get("unreadable"))),
        environment=None if texts is None else read_environment(texts),
        facts=facts_from_json(index.get("facts")),
    )


def _link(root: Path, name: str, target: str) -> None:
    """Makes a relative link, unless its path exists already; never through a link that leads out of `root`."""
    place = root / name
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.is_dir() and not place.is_symlink() and not any(place.iterdir()):
            place.rmdir()
        if not place.parent.resolve().is_relative_to(root):
            raise CaptureError(f"link `{name[:100]}` leads out of the archive")
        if not place.exists() and not place.is_symlink():
            place.symlink_to(Path(*[".."] * name.count("/")) / target)
    except (OSError, RuntimeError) as error:
        raise CaptureError(f"link `{name[:100]}` cannot be made: {error}") from error


def _strings(value: object) -> list[str]:
    return [item for item in value[: _MAX_MEMBERS + 1] if isinstance(item, str)] if isinstance(value, list) else []
