"""Names and labels of devices and links in everything that people read: tree, matrix, picture, JSON."""

import re
from collections import Counter
from collections.abc import Mapping
from functools import cached_property

from gradwire.topology.bandwidth import nic_bytes_per_second, pcie_bytes_per_second
from gradwire.topology.graph import Cpu, DeviceLink, Gpu, Machine, Nic, PcieLink, PciSwitch
from gradwire.topology.paths import Distances, PathType
from gradwire.topology.pci_ids import VENDOR_NAMES
from gradwire.topology.wording import rate

UNKNOWN = "?"
_MAKER = re.compile(r"^(NVIDIA|Mellanox|AMD|Intel|Broadcom Inc\.)( Corporation| Technologies| and subsidiaries)? ")


def gigabytes(bytes_per_second: float | None) -> str:
    """Returns a rate as people write it: `48 GB/s`, `1.8 TB/s`, or `?`.

    Args:
        bytes_per_second: The rate.
    """
    return UNKNOWN if bytes_per_second is None else f"{_scaled(bytes_per_second)}B/s"


def gigabits(bits_per_second: float | None) -> str:
    """Returns a line rate as people write it: `400 Gbit/s`, `1.6 Tbit/s`, or `?`.

    Args:
        bits_per_second: The rate.
    """
    return UNKNOWN if not bits_per_second else rate(bits_per_second / 8)


def _scaled(rate: float) -> str:
    """Returns three digits and a prefix, never an exponent: `450 G`, `1.6 T`, `375 M`."""
    for prefix, unit in (("T", 1e12), ("G", 1e9)):
        if float(f"{rate:.3g}") >= unit:
            return f"{float(f'{rate / unit:.3g}'):g} {prefix}"
    return f"{float(f'{rate / 1e6:.3g}'):g} M"


def pcie_text(link: PcieLink | None) -> str:
    """Returns the rate and width of a PCIe link: `32 GT/s x16, 48 GB/s`, or `virtual link`; unknown parts are `?`.

    Args:
        link: PCIe link; None gives an empty text.
    """
    if link is None:
        return ""
    if link.virtual:
        return "virtual link"
    rate = UNKNOWN if link.gigatransfers_per_second is None else f"{link.gigatransfers_per_second:g}"
    now = link.current_gigatransfers_per_second
    lowered = "" if now is None else f" (now {now:g} GT/s)"
    return f"{rate} GT/s x{link.lanes or UNKNOWN}, {gigabytes(pcie_bytes_per_second(link))}{lowered}"


def nic_rate(nic: Nic) -> str:
    """Returns a NIC's line rate as text: the sum of its usable ports, or `virtual`, `down`, `standby` or `?`.

    Args:
        nic: NIC with its ports.
    """
    if nic.ports and all(port.virtual for port in nic.ports):
        return "virtual"
    if nic.ports and all(port.active is False for port in nic.ports):
        return "down"
    if nic.ports and not any(port.carries for port in nic.ports):
        return "standby"
    return gigabits(sum(port.bits_per_second or 0 for port in nic.ports if port.carries))


def nic_with_state(nic: Nic) -> str:
    """Returns a NIC's name, and in brackets why it cannot send, if so: `mlx5_0 (down)`.

    Args:
        nic: NIC with its ports.
    """
    state = nic_rate(nic)
    return f"{nic_name(nic)} ({state})" if state in ("down", "standby") else nic_name(nic)


def nic_name(nic: Nic) -> str:
    """Returns a NIC's name: its ports' names (`mlx5_0`, `mlx5_0+mlx5_1`, `mlx5_0-3`), else its bus id.

    Args:
        nic: NIC with its ports.
    """
    names = list(dict.fromkeys(port.name for port in nic.ports))
    return _in_series(names) or "+".join(names) or nic.bus or nic.key


def _in_series(names: list[str]) -> str:
    """Returns `mlx5_0-3` for three or more names that count up; an empty text for others."""
    found = [re.fullmatch(r"(.*?)(\d{1,4})", name) for name in names]
    if len(names) < 3 or any(match is None for match in found):
        return ""
    numbers = [int(match[2]) for match in found if match is not None]
    alike = len({match[1] for match in found if match is not None}) == 1
    first = numbers[0]
    return f"{names[0]}-{numbers[-1]}" if alike and numbers == list(range(first, first + len(names))) else ""


def vendor_name(vendor: int | None) -> str:
    """Returns a vendor's name, or `vendor` and its hexadecimal id if it is not in the table.

    Args:
        vendor: PCI vendor id; None gives an empty text.
    """
    return "" if vendor is None else VENDOR_NAMES.get(vendor, f"vendor {vendor:04x}")


def model_name(device: Gpu | Nic) -> str:
    """Returns a device's model without its maker: `H100 80GB HBM3`, `ConnectX-7`; empty where unknown.

    Args:
        device: A GPU or a card.
    """
    name = device.name or ""
    bracketed = re.search(r"\[([^\]]+)\]$", name)
    return bracketed[1] if bracketed else _MAKER.sub("", name)


def cpu_name(cpu: Cpu) -> str:
    """Returns the name of a NUMA node, `NUMA 0`; `NUMA unknown` and its root complex if it has no number.

    Args:
        cpu: NUMA node.
    """
    if cpu.numa is not None:
        return f"NUMA {cpu.numa}"
    _, _, root = cpu.key.partition("@")
    return f"NUMA unknown, {root}" if root else "NUMA unknown"


def switch_name(switch: PciSwitch) -> str:
    """Returns a switch's maker and bus id.

    Args:
        switch: The switch.
    """
    if switch.virtual:
        return f"virtual PCIe switch {switch.key}"
    return f"{vendor_name(switch.vendor)} PCIe switch {switch.key}".strip()


class Labels:
    """Provides names and link sums that depend on the machine as a whole."""

    def __init__(self, machine: Machine) -> None:
        """Prepares the names.

        Args:
            machine: The machine.
        """
        self.machine = machine
        self.distances = Distances(machine)
        self._gpus = {gpu.key: f"GPU{position}" for position, gpu in enumerate(_numbered(machine))}
        if len({gpu.index for gpu in machine.gpus} - {None}) == len(machine.gpus):
            self._gpus = {gpu.key: f"GPU{gpu.index}" for gpu in machine.gpus}

    def gpu(self, gpu: Gpu) -> str:
        """Returns `GPU3`: the driver's number where known, else the position in bus order.

        Args:
            gpu: A GPU of the machine.
        """
        return self._gpus[gpu.key]

    @cached_property
    def bundles(self) -> Mapping[str, list[DeviceLink]]:
        """Returns key of a GPU -> its NVLink and xGMI bundles."""
        bundles: dict[str, list[DeviceLink]] = {gpu.key: [] for gpu in self.machine.gpus}
        for link in self.machine.links:
            if link.kind in ("nvlink", "xgmi"):
                for end in (link.a, link.b):
                    if end in bundles:
                        bundles[end].append(link)
        return bundles

    def link_count(self, gpu: Gpu) -> int:
        """Returns the number of NVLinks or xGMI links of a GPU.

        Args:
            gpu: A GPU of the machine.
        """
        return sum(link.count for link in self.bundles[gpu.key])

    def link_notes(self) -> list[str]:
        """Returns sentences on GPUs with fewer NVLinks than most, or with none: a collective waits for the slowest."""
        counts = {gpu: self.link_count(gpu) for gpu in self.machine.gpus}
        usual, having = max(Counter(counts.values()).items(), key=lambda item: (item[1], item[0]), default=(0, 0))
        amd = any(link.kind == "xgmi" for link in self.machine.links)
        kind, look = ("xGMI link", "`rocm-smi --showxgmierr`") if amd else ("NVLink", "`nvidia-smi nvlink -s`")
        notes = []
        for count in sorted(set(counts.values()) - {usual}):
            fewer = [self.gpu(gpu) for gpu in self.machine.gpus if counts[gpu] == count]
            if count < usual and len(fewer) < having and (count or self.machine.links_known):
                have = "have" if len(fewer) > 1 else "has"
                number = f"{count} {kind}{'s' if count > 1 else ''}" if count else f"no {kind}"
                notes.append(
                    f"{', '.join(fewer[:8])} {have} {number} where {having} others have {usual}: a collective over all "
                    f"is as fast as its slowest link. {look} and dmesg say more."
                )
        return notes

    def cpu(self, device: Gpu | Nic) -> Cpu | None:
        """Returns the CPU a device hangs off, or None where unknown.

        Args:
            device: A GPU or NIC of the machine.
        """
        key = self.distances.cpu_of(device)
        return next((cpu for cpu in self.machine.cpus if cpu.key == key), None)

    def link_bytes_per_second(self, gpu: Gpu) -> float | None:
        """Returns the sum of a GPU's NVLinks or xGMI links, or None where there are none or their speed is unknown.

        Args:
            gpu: A GPU of the machine.
        """
        rates = [link.bytes_per_second for link in self.bundles[gpu.key]]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known and len(known) == len(rates) else None

    def c2c(self, gpu: Gpu) -> str:
        """Returns `C2C 224 GB/s` for a GPU with a chip-to-chip link to its CPU, `C2C` if its rate is unknown, or "".

        Args:
            gpu: A GPU of the machine.
        """
        link = next((link for link in self.machine.links if link.kind == "c2c" and link.a == gpu.key), None)
        rate = None if link is None else link.bytes_per_second
        return "" if link is None else "C2C" if rate is None else f"C2C {gigabytes(rate)}"

    def gpu_gpu(self, a: Gpu, b: Gpu) -> str:
        """Returns the cell of a matrix for two GPUs: `NV12`, `XGMI`, a path type, or `?`.

        Args:
            a: A GPU of the machine.
            b: Another one.
        """
        path = self.distances.gpu_gpu(a, b)
        if path is not PathType.NVL:
            return UNKNOWN if path is None else path.name
        direct = [link for link in self.bundles[a.key] if b.key in (link.a, link.b)]
        if any(link.kind == "xgmi" for link in direct):
            return "XGMI"
        if direct:
            return f"NV{sum(link.count for link in direct)}"
        return f"NV{min(self.link_count(a), self.link_count(b))}"


def _numbered(machine: Machine) -> list[Gpu]:
    """Returns the GPUs in bus order."""
    return sorted(machine.gpus, key=lambda gpu: gpu.bus or gpu.key)


def nic_summary(nic: Nic) -> str:
    """Returns one line about a NIC: bus id, model, rate, link layer, driver, bond; unknown parts are left out.

    Args:
        nic: NIC with its ports.
    """
    layer = next((port.link_layer for port in nic.ports if port.link_layer), "")
    usable = nic_bytes_per_second(nic)
    rate = nic_rate(nic).replace(UNKNOWN, "") + ("" if usable is None else f", {gigabytes(usable)} usable")
    bonds = sorted({port.bond for port in nic.ports if port.bond})
    about = [
        (nic.bus or "") if nic.bus != nic_name(nic) else "",
        model_name(nic) or vendor_name(nic.vendor),
        rate,
        layer,
        nic.driver or "",
        f"+{nic.virtual_functions} VFs" if nic.virtual_functions else "",
        *(f"in {bond}" for bond in bonds),
    ]
    return " · ".join(filter(None, about))
