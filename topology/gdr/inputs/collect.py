"""Collects, on the live host, what no file says; every question has a time limit and a stated failure."""

import os
import platform
import re
import shutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from gradwire.topology.gdr.inputs.ask import ask_libraries
from gradwire.topology.gdr.inputs.child import run_child
from gradwire.topology.gdr.inputs.facts import Facts, facts_from_json

_COMMAND_SECONDS = 5.0
_LOG_PATTERN = re.compile(r"peer_mem|peermem|DMAR|AMD-Vi|iommu", re.IGNORECASE)
_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def collect(root: Path, hardware: bool, switches: bool, prove: bool) -> Facts:
    """Asks the libraries and the system.

    Args:
        root: `/`.
        hardware: There are GPUs and NICs; without them no library is asked, which keeps the answer fast.
        switches: There are NVSwitches, so the fabric manager matters.
        prove: Also register GPU memory.
    """
    answers: dict[str, object] = {"kernel": platform.release(), "shm_nbytes": _shm_nbytes(root / "dev/shm")}
    if hardware:
        answers |= {"nccl_version": _wheel_version()}
        answers |= {name: value for name, value in ask_libraries(prove).items() if value is not None}
        answers |= {"device_files": _try_device_files(root), "kernel_log": _kernel_log(root / "dev/kmsg")}
        answers |= {"user_conf": _user_conf(), "ofed_version": _first_line(("ofed_info", "-s"))}
    if switches:
        state = _first_line(("systemctl", "is-active", "nvidia-fabricmanager"))
        answers["fabric_manager_active"] = None if state is None else state == "active"
        version = re.search(r"\d{3}\.\d+(\.\d+)?", _first_line(("nv-fabricmanager", "--version")) or "")
        answers["fabric_manager_version"] = version[0] if version else None
    return facts_from_json(answers)


def _first_line(command: Sequence[str]) -> str | None:
    """First line a command prints; None when it is not installed, hangs or prints nothing."""
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
    """Version of the NCCL wheel that torch brings along; importing torch would take seconds."""
    for name in _WHEELS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _try_device_files(root: Path) -> dict[str, int]:
    """Opens every uverbs file for reading and writing, as a program would; 0 or the errno."""
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
    """Lines of the kernel log about peer memory and the IOMMU; None without the right to read it."""
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
