"""Collects, on the live host, what no file says; every question has a time limit and a stated failure."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from gradwire.topology.gdr.facts import Facts, facts_from_json

_NATIVE_SECONDS = 60.0  # cuInit on eight GPUs without persistence mode takes up to half of this
_COMMAND_SECONDS = 5.0
_LOG_PATTERN = re.compile(r"peer_mem|peermem|DMAR|AMD-Vi|iommu", re.IGNORECASE)
_LOG_NBYTES = 1 << 20
_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def collect(hardware: bool, switches: bool, prove: bool) -> Facts:
    """Asks the libraries and the system.

    Args:
        hardware: There are GPUs and NICs; without them no library is asked, which keeps the answer fast.
        switches: There are NVSwitches, so the fabric manager matters.
        prove: Also register GPU memory.
    """
    answers: dict[str, object] = {"kernel": platform.release(), "shm_nbytes": _shm_nbytes()}
    if hardware:
        answers |= {"nccl_version": _wheel_version()}
        answers |= {name: value for name, value in _native(prove).items() if value is not None}
        answers |= {"device_files": _try_device_files(Path("/dev/infiniband")), "kernel_log": _kernel_log()}
        answers |= {"user_conf": _user_conf(), "ofed_version": _first_line(("ofed_info", "-s"))}
    if switches:
        state = _first_line(("systemctl", "is-active", "nvidia-fabricmanager"))
        answers["fabric_manager_active"] = None if state is None else state == "active"
        version = re.search(r"\d{3}\.\d+(\.\d+)?", _first_line(("nv-fabricmanager", "--version")) or "")
        answers["fabric_manager_version"] = version[0] if version else None
    return facts_from_json(answers)


def _native(prove: bool) -> dict[str, object]:
    """The answers of gradwire.topology.gdr.native, run as a child process.

    -P keeps the current folder off the child's module path: a prolog runs as root wherever it was started.
    """
    command = [sys.executable, "-P", "-m", "gradwire.topology.gdr.native", *(["--prove"] if prove else [])]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_NATIVE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"probe_error": f"driver libraries did not answer: {type(error).__name__}"}
    try:
        answers = json.loads(done.stdout[-_LOG_NBYTES:])
    except ValueError:
        return {"probe_error": f"driver libraries crashed the probe: exit code {done.returncode}"}
    return answers if isinstance(answers, dict) else {}


def _first_line(command: Sequence[str]) -> str | None:
    """First line a command prints; None when it is not installed, hangs or prints nothing."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    return lines[0].strip() if lines else None


def _shm_nbytes() -> int | None:
    try:
        stat = os.statvfs("/dev/shm")
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


def _try_device_files(folder: Path) -> dict[str, int]:
    """Opens every uverbs file for reading and writing, as a program would; 0 or the errno."""
    outcomes: dict[str, int] = {}
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.name.startswith("uverbs"))
    except OSError:
        return outcomes
    for name in names[:256]:
        try:
            os.close(os.open(folder / name, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
            outcomes[str(folder / name)] = 0
        except OSError as error:
            outcomes[str(folder / name)] = error.errno or -1
    return outcomes


def _kernel_log(path: Path = Path("/dev/kmsg")) -> list[str] | None:
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
