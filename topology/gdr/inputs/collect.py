"""Collects on the live host what no file says, from driver libraries and commands, each with a time limit.

Each library is asked in a child process of its own, all at once: one that crashes or hangs costs only its own facts.
"""

import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from gradwire.topology.gdr.inputs.child import run_child
from gradwire.topology.gdr.inputs.facts import HostFacts, RawFacts, facts_from_json

LIBRARY_SECONDS = 60.0  # cuInit on eight GPUs without persistence mode takes up to half of this
_LIBRARIES = ("nvml", "cuda", "verbs", "nccl")
_MAX_NBYTES = 1 << 20
_COMMAND_SECONDS = 5.0
_LOG_PATTERN = re.compile(r"peer_mem|peermem|DMAR|AMD-Vi|iommu", re.IGNORECASE)
_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def collect(root: Path, hardware: bool, switches: bool, prove: bool) -> HostFacts:
    """Asks driver libraries, commands and the kernel for the facts that no file holds.

    Args:
        root: Root folder, `/` on a live host.
        hardware: True if there are GPUs and NICs; otherwise no library is asked, which keeps it fast.
        switches: True if there are NVSwitches, so that the fabric manager matters.
        prove: True also registers GPU memory with the NICs.
    """
    facts: dict[str, object] = {"kernel": platform.release(), "shm_nbytes": _shm_nbytes(root / "dev/shm")}
    if hardware:
        facts |= {"nccl_version": _wheel_version()}
        facts |= {name: value for name, value in ask_libraries(prove).items() if value is not None}
        facts |= {"device_files": _try_device_files(root), "kernel_log": _kernel_log(root / "dev/kmsg")}
        facts |= {"user_conf": _user_conf(), "ofed_version": _first_line(("ofed_info", "-s"))}
    if switches:
        state = _first_line(("systemctl", "is-active", "nvidia-fabricmanager"))
        facts["fabric_manager_active"] = None if state is None else state == "active"
        version = re.search(r"\d{3}\.\d+(\.\d+)?", _first_line(("nv-fabricmanager", "--version")) or "")
        facts["fabric_manager_version"] = version[0] if version else None
    return facts_from_json(facts)


def ask_libraries(prove: bool) -> RawFacts:
    """Asks all libraries at once, each in a child process of its own, and returns their facts in one dictionary.

    Args:
        prove: True also registers GPU memory with the NICs.
    """
    names = (*_LIBRARIES, "probe") if prove else _LIBRARIES
    with ThreadPoolExecutor(len(names)) as pool:
        return merged(pool.map(_ask_library, names))


def _ask_library(name: str) -> RawFacts:
    """Asks one library in a child process; returns its facts, or NAME_error with how the child ended.

    -P keeps the current folder off the child's module path: a prolog runs as root wherever it was started.
    """
    ended = run_child([sys.executable, "-P", "-m", "gradwire.topology.gdr.inputs.native", name], LIBRARY_SECONDS)
    try:
        facts = json.loads(ended.output[-_MAX_NBYTES:])
    except ValueError:
        return {f"{name}_error": ended.explanation}
    return facts if isinstance(facts, dict) else {f"{name}_error": "no answer"}


def merged(parts: Iterable[RawFacts]) -> RawFacts:
    """Merges the facts of several libraries; what they say about one GPU is joined by its bus id.

    Args:
        parts: Facts of each library; of a name that several have, the last counts.
    """
    everything: RawFacts = {}
    gpus: dict[str, RawFacts] = {}
    for part in parts:
        everything |= part
        listed = part.get("gpus")
        for gpu in listed if isinstance(listed, list) else ():
            gpus.setdefault(gpu["bus_id"], {}).update(gpu)
    return everything | ({"gpus": list(gpus.values())} if "gpus" in everything else {})


def _first_line(command: Sequence[str]) -> str | None:
    """Runs a command and returns the first line it prints; None if it is not installed, hangs or prints nothing."""
    if shutil.which(command[0]) is None:
        return None
    lines = run_child(command, _COMMAND_SECONDS).output.decode("utf-8", "replace").splitlines()
    return lines[0].strip() if lines else None


def _shm_nbytes(path: Path) -> int | None:
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return stat.f_frsize * stat.f_blocks


def _wheel_version() -> str | None:
    """Returns the version of the NCCL wheel that torch depends on, or None; importing torch would take seconds."""
    for name in _WHEELS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _try_device_files(root: Path) -> dict[str, int]:
    """Opens every uverbs file for reading and writing, as a program would; returns path -> 0 or the errno."""
    outcomes: dict[str, int] = {}
    folder = root / "dev/infiniband"
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.name.startswith("uverbs"))
    except OSError:
        return outcomes
    for name in names[:256]:
        try:
            os.close(os.open(folder / name, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
            outcomes[f"/dev/infiniband/{name}"] = 0
        except OSError as error:
            outcomes[f"/dev/infiniband/{name}"] = error.errno or -1
    return outcomes


def _kernel_log(path: Path) -> list[str] | None:
    """Reads the last 200 lines of the kernel log about peer memory and the IOMMU; None if it may not be read."""
    lines: list[str] = []
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        for _ in range(100_000):  # one record a read
            try:
                record = os.read(handle, 8192)
            except BlockingIOError:  # the end of the log for now
                break
            except BrokenPipeError:  # a record was overwritten meanwhile, the next read goes on
                continue
            if not record:
                break
            text = record.decode("utf-8", "replace").partition(";")[2].partition("\n")[0]
            if _LOG_PATTERN.search(text):
                lines.append(text[:400])
    except OSError:
        return None
    finally:
        os.close(handle)
    return lines[-200:]


def _user_conf() -> str | None:
    try:
        with (Path.home() / ".nccl.conf").open("rb") as file:
            text = file.read(1 << 16).decode("utf-8", "replace")
    except (OSError, RuntimeError):
        return None
    return "\n".join(line for line in text.splitlines() if line.strip().startswith("NCCL_"))
