"""A sysfs tree that tests build device by device, and the folder with real machines' descriptions."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gradwire.topology.graph import Machine
from gradwire.topology.presets import cpu_only, dgx_a100, dgx_h100, pcie_box

FIXTURES = Path(__file__).resolve().parents[2].parent / "shared" / "fixtures"

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8480C
flags\t\t: fpu vme{flags}

processor\t: 1
vendor_id\t: GenuineIntel
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutations", type=int, default=500, help="mutated inputs that the readers are given")


MEMORY, WANTED_NBYTES = Path("/dev/shm"), 256 << 20


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is room for it, and programs run: then it is gone after the test.

    The trees of these tests are 60,000 files and folders, and making them on a disk can take two thirds of the time.
    """
    there = os.statvfs(MEMORY) if MEMORY.is_dir() else None
    if there is None or there.f_flag & os.ST_NOEXEC or there.f_bavail * there.f_frsize < WANTED_NBYTES:
        yield tmp_path
        return
    with TemporaryDirectory(prefix="pytest-", dir=MEMORY) as folder:
        yield Path(folder)


@dataclass(frozen=True)
class SysTree:
    """Writes what the kernel would show below `root`."""

    root: Path

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def host(self, cores: dict[int, str], *, virtual: bool = False) -> None:
        self.write("proc/cpuinfo", CPUINFO.format(flags=" hypervisor" if virtual else ""))
        self.write("proc/sys/kernel/hostname", "testhost")
        (self.root / "sys/bus/pci/devices").mkdir(parents=True, exist_ok=True)
        for numa, cpulist in cores.items():
            self.write(f"sys/devices/system/node/node{numa}/cpulist", cpulist)
            first = cpulist.split("-")[0]
            self.write(f"sys/devices/system/cpu/cpu{first}/topology/physical_package_id", str(numa))

    def device(self, *chain: str, kind: int, vendor: int, device: int = 1, numa: int = 0, **more: str) -> None:
        """Adds the last of a chain of bus ids below a host bridge, `pci0000:00`."""
        folder = Path("sys/devices").joinpath(*chain)
        facts = {"class": f"0x{kind:06x}", "vendor": f"0x{vendor:04x}", "device": f"0x{device:04x}"}
        facts |= {"subsystem_vendor": "0x0000", "subsystem_device": "0x0000", "numa_node": str(numa)}
        facts |= {"max_link_speed": "32.0 GT/s PCIe", "current_link_width": "16", **more}
        for name, text in facts.items():
            self.write(f"{folder}/{name}", text)
        self.link(f"sys/bus/pci/devices/{chain[-1]}", str(folder))

    def link(self, path: str, target: str) -> None:
        """Makes `path` a relative symbolic link to `target`, both below the root."""
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(*[".."] * (len(Path(path).parts) - 1)) / target)

    def switch(self, root: str, port: int, bus: int, places: int, numa: int = 0) -> list[tuple[str, ...]]:
        """Adds root port, upstream port and downstream ports; returns the chains below the latter."""
        domain = root[3:7]
        top, up = f"{domain}:00:{port:02x}.0", f"{domain}:{bus:02x}:00.0"
        for chain in ((root, top), (root, top, up)):
            self.device(*chain, kind=0x060400, vendor=0x11F8, numa=numa)
        chains: list[tuple[str, ...]] = []
        for place in range(places):
            down = f"{domain}:{bus + 1:02x}:{place:02x}.0"
            self.device(root, top, up, down, kind=0x060400, vendor=0x11F8, numa=numa)
            chains.append((root, top, up, down))
        return chains

    def interface(
        self, name: str, *chain: str, speed: str = "100000", state: str = "up", driver: str = "mlx5_core"
    ) -> None:
        """Adds a network interface on the function at the end of the chain."""
        folder = "/".join(["sys/devices", *chain])
        own = f"{folder}/net/{name}"
        for file, text in (("type", "1"), ("speed", speed), ("operstate", state), ("ifindex", "2"), ("iflink", "2")):
            self.write(f"{own}/{file}", text)
        self.link(f"sys/class/net/{name}", own)
        self.link(f"{own}/device", folder)
        if not (self.root / folder / "driver").is_symlink():
            self.link(f"{folder}/driver", f"sys/bus/pci/drivers/{driver}")

    def rdma(self, name: str, *chain: str, rate: str = "400 Gb/sec (4X NDR)", layer: str = "InfiniBand") -> None:
        """Adds an RDMA device on the function at the end of the chain."""
        folder = "/".join(["sys/devices", *chain])
        port = f"{folder}/infiniband/{name}/ports/1"
        for file, text in (("rate", rate), ("state", "4: ACTIVE"), ("link_layer", layer)):
            self.write(f"{port}/{file}", text)
        self.link(f"sys/class/infiniband/{name}", f"{folder}/infiniband/{name}")
        self.link(f"{folder}/infiniband/{name}/device", folder)


@pytest.fixture
def systree(tmp_path: Path) -> SysTree:
    return SysTree(tmp_path / "root")


@pytest.fixture
def fixtures() -> Path:
    if not FIXTURES.is_dir():
        pytest.skip("the descriptions of real machines (../shared/fixtures) are not here")
    return FIXTURES


@pytest.fixture(params=[dgx_a100, dgx_h100, pcie_box, cpu_only], ids=lambda make: make.__name__)
def preset(request: pytest.FixtureRequest) -> Machine:
    make: Callable[[], Machine] = request.param
    return make()
