"""The PCI tree below a root folder: `lspci -tvv` from sysfs, of this machine or of a captured one.

Attributes are small, capped reads that cannot block, loop or leave the device's folder.
"""

import errno
import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from gradwire.topology.readers.pci import PciFunction, PciTree
from gradwire.topology.readers.pci_config import ConfigSpace, decode
from gradwire.topology.readers.small_files import names_in

DEVICES = "sys/bus/pci/devices"
BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

_MAX_FUNCTIONS = 65536
_ENDPOINTS = (0x02, 0x03, 0x12)  # network, display, accelerator
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_PAGE_NBYTES = 4096  # a sysfs attribute never exceeds a page
_MAX_CHILDREN = 256
_SAFE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no symlink, no waiting for a fifo's writer


def read_tree(root: Path) -> PciTree:
    """Reads every PCI function below a root folder without ever raising; failures are listed in `problems`.

    Args:
        root: Folder that holds `sys/`: `/` for this machine, else a captured tree.
    """
    top = root / DEVICES
    try:
        names = sorted(entry.name for entry in top.iterdir())
    except OSError as error:
        return PciTree(problems=(f"{top}: {error.strerror}",))
    problems = [f"{top}: `{name}` is no bus id" for name in names if not BUS_ID.fullmatch(name)][:8]
    functions: dict[str, PciFunction] = {}
    base = root.resolve()
    for name in [name for name in names if BUS_ID.fullmatch(name)][:_MAX_FUNCTIONS]:
        try:
            functions[name] = _read_function(base, top / name, name)
        except (OSError, RuntimeError) as error:  # RuntimeError: a symlink loop, before Python 3.13
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "symlink loop"
            problems.append(f"{top / name}: {reason}")
    return PciTree(MappingProxyType(functions), tuple(problems))


def _read_function(base: Path, link: Path, name: str) -> PciFunction:
    folder = link.resolve(strict=True)
    if not folder.is_relative_to(base):
        raise OSError(errno.EXDEV, "leads out of the root folder")
    present = {entry.name for entry in folder.iterdir()}
    with _opened(folder) as handle:
        read = Attributes(handle, present)
        class_code = read.number("class")
        host_bridge = next((part for part in reversed(folder.parts) if _HOST_BRIDGE.fullmatch(part)), None)
        base_class = None if class_code is None else class_code >> 16
        endpoint = base_class in _ENDPOINTS
        return PciFunction(
            bus_id=name,
            class_code=class_code,
            vendor=read.number("vendor"),
            device=read.number("device"),
            subsystem_vendor=read.number("subsystem_vendor"),
            subsystem_device=read.number("subsystem_device"),
            parents=parents(folder, base),
            reaches_root=host_bridge is not None,
            host_bridge=host_bridge,
            driver=read.link("driver"),
            numa_node=read.number("numa_node"),
            local_cpulist=read.text("local_cpulist") if endpoint else None,
            current_gigatransfers=gigatransfers(read.text("current_link_speed")),
            max_gigatransfers=gigatransfers(read.text("max_link_speed")),
            current_width=read.number("current_link_width"),
            max_width=read.number("max_link_width"),
            physical_function=bus_id(read.link("physfn")),
            virtual_functions=tuple(sorted(filter(None, (bus_id(read.link(f)) for f in present if f[:6] == "virtfn")))),
            removable=read.text("removable") == "removable",
            iommu_group=integer(read.link("iommu_group")),
            net_devices=tuple(names_in(folder / "net")[:_MAX_CHILDREN]) if "net" in present else (),
            rdma_devices=tuple(names_in(folder / "infiniband")[:_MAX_CHILDREN]) if "infiniband" in present else (),
            bar_nbytes=bar_nbytes(read.text("resource")) if base_class in (0x03, 0x12) else (),
            config=read.config() if endpoint or base_class == 0x06 else None,
            unreadable=tuple(read.unreadable),
        )


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


class Attributes:
    """Reads the attributes of one device relative to its open folder, and lists those it could not read."""

    def __init__(self, handle: int, present: Collection[str]) -> None:
        """Stores the folder.

        Args:
            handle: File descriptor of the open folder; the caller closes it.
            present: Names in the folder.
        """
        self._handle = handle
        self._present = present
        self.unreadable: list[str] = []

    def text(self, name: str) -> str | None:
        """Returns an attribute without its newline; None if it is absent or unreadable."""
        with self._opened(name) as file:
            if file is None:
                return None
            try:
                return os.read(file, _PAGE_NBYTES).decode("ascii", "replace").strip("\0 \n\t\r")
            except OSError:  # some attributes exist and refuse, a GPU that fell off the bus for one
                self.unreadable.append(name)
                return None

    def number(self, name: str) -> int | None:
        """Returns an attribute as a number, decimal or after 0x hexadecimal; None if it is absent or no number."""
        return integer(self.text(name))

    def link(self, name: str) -> str | None:
        """Returns the last component of a symbolic link's target; None if it is absent or no link."""
        if name not in self._present:
            return None
        try:
            return os.readlink(name, dir_fd=self._handle).rstrip("/").rpartition("/")[2] or None
        except OSError:
            return None

    def config(self) -> ConfigSpace | None:
        """Reads and decodes the configuration space, a few bytes at a time; None if it cannot be opened or read."""
        with self._opened("config") as file:
            if file is None:
                return None
            try:
                return decode(lambda offset, nbytes: os.pread(file, nbytes, offset))
            except OSError:
                self.unreadable.append("config")
                return None

    @contextmanager
    def _opened(self, name: str) -> Iterator[int | None]:
        file = None
        if name in self._present:
            try:
                file = os.open(name, _SAFE, dir_fd=self._handle)
            except OSError:
                self.unreadable.append(name)
        if file is None:
            yield None
            return
        try:
            regular = stat.S_ISREG(os.fstat(file).st_mode)
            if not regular:
                self.unreadable.append(name)
            yield file if regular else None
        finally:
            os.close(file)


def integer(text: str | None) -> int | None:
    """Parses a decimal number of up to 18 digits, or after 0x a hexadecimal of up to 16; None for other texts."""
    if text is None or not re.fullmatch(r"-?[0-9]{1,18}|0[xX][0-9a-fA-F]{1,16}", text):
        return None
    return int(text, 16) if text[:2].lower() == "0x" else int(text)


def gigatransfers(text: str | None) -> float | None:
    """Parses a link speed: 16.0 of `16.0 GT/s PCIe`; None for `Unknown` and other texts."""
    match = re.match(r"([0-9]{1,3}(?:\.[0-9]{1,2})?) ?GT/s", text or "")
    return float(match[1]) if match else None


def bus_id(text: str | None) -> str | None:
    """Returns the text if it is a bus id, else None."""
    return text if text is not None and BUS_ID.fullmatch(text) else None


def bar_nbytes(text: str | None) -> tuple[int, ...]:
    """Returns the sizes of base address registers 0 to 5 in bytes, 0 for an unused one.

    Args:
        text: Attribute `resource`: start, end and flags on each line; None gives no sizes.
    """
    sizes = []
    for line in (text or "").splitlines()[:6]:
        words = [integer(word) for word in line.split()]
        start, end = words[:2] if len(words) >= 2 else (None, None)
        sizes.append(end - start + 1 if start is not None and end is not None and end > start else 0)
    return tuple(sizes)


def parents(folder: Path, base: Path) -> tuple[str, ...] | None:
    """Returns the bus ids of the folders above a device, nearest first.

    Args:
        folder: Resolved folder of the device.
        base: Resolved root folder.

    Returns:
        None if there is no bridge above it, and its folder is not directly inside a host bridge's.
    """
    chain = []
    for part in reversed(folder.relative_to(base).parts[:-1]):
        if BUS_ID.fullmatch(part):
            chain.append(part)
        else:
            return tuple(chain) if _HOST_BRIDGE.fullmatch(part) or chain else None
    return None
