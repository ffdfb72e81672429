"""sysfs below a root folder -> Machine: this host with `/`, a captured tree with any other folder.

Nothing here fails on a strange tree: what cannot be read is None, and a note says so.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Cpu, Gpu, Machine, Nic
from gradwire.topology.pci_ids import AMD_GPU, amd_name, normal_bus_id
from gradwire.topology.readers.affinity import members
from gradwire.topology.readers.forest import Forest, card_of, link_between
from gradwire.topology.readers.pci import PciTree
from gradwire.topology.readers.pci_sysfs import read_tree
from gradwire.topology.readers.small_files import names_in, number_of, text_of
from gradwire.topology.readers.sysfs_ports import FoundPorts, find_ports

_NO_PRODUCT = re.compile(r"(to be filled by o\.?e\.?m\.?|system product name|default string|none|n/a|)", re.IGNORECASE)
MAX_NODES = 1024
"""Linux is built for at most 1024 NUMA nodes (CONFIG_NODES_SHIFT 10)."""


def read(root: Path) -> Machine:
    """Returns the machine that a root folder shows.

    Args:
        root: Folder that holds `sys/` and, for the processor's model, `proc/`.

    Raises:
        TopologyError: The folder has no `sys/` below it.
    """
    if not (root / "sys").is_dir():
        raise TopologyError(
            "there is no folder `sys` in it; expected the root of a (captured) Linux system", source=str(root)
        )
    tree = read_tree(root)
    cpus = _cpus(root)
    found = find_ports(root)
    machine = Forest(tree.functions.values(), cpus, link_between).build(found.by_bus, found.lent)
    only = cpus[0].key if len(cpus) == 1 else None
    return replace(
        machine,
        gpus=_numbered_by_amd(root, _named_by_nvidia(root, machine.gpus)),
        hostname=text_of(root / "proc/sys/kernel/hostname"),
        product=_product(root),
        nics=(*machine.nics, *_without_pci(found, machine, only)),
        notes=(*machine.notes, *_notes(machine, tree), *found.notes),
        sources=("sysfs",),
        virtual=is_virtual(root),
    )


def _product(root: Path) -> str | None:
    """Returns the host's model from its firmware; None if there is none or only a placeholder."""
    name = text_of(root / "sys/class/dmi/id/product_name")
    return None if name is None or _NO_PRODUCT.fullmatch(name) else name


def _cpus(root: Path) -> tuple[Cpu, ...]:
    """Returns the NUMA nodes that have processors; a kernel without NUMA gives one node."""
    about = _processor(root)
    nodes = root / "sys/devices/system/node"
    numbers = sorted(int(name[4:]) for name in names_in(nodes) if re.fullmatch(r"node\d{1,4}", name))[:MAX_NODES]
    lists = {number: text_of(nodes / f"node{number}/cpulist") for number in numbers}
    if not any(lists.values()):
        online = text_of(root / "sys/devices/system/cpu/online")
        lists = {} if online is None else {0: online}
    return tuple(
        replace(about, key=f"numa{number}", numa=number, cores=cores, socket=_socket(root, cores))
        for number, cores in lists.items()
        if cores
    )


def _socket(root: Path, cores: str) -> int | None:
    """Returns the number of the package of a node's first processor; None if unknown."""
    first = next(iter(members(cores)), None)
    return number_of(root / f"sys/devices/system/cpu/cpu{first}/topology/physical_package_id")


def _processor(root: Path) -> Cpu:
    """Returns the first processor's vendor, family, model and architecture from /proc/cpuinfo, without a key."""
    text = text_of(root / "proc/cpuinfo") or ""
    facts = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", text.split("\n\n")[0], re.MULTILINE))
    architecture = "x86_64" if "vendor_id" in facts else "arm64" if "CPU implementer" in facts else None
    family, model = facts.get("cpu family", ""), facts.get("model", "")
    return Cpu(
        key="",
        architecture="ppc64" if "POWER" in facts.get("cpu", "") else architecture,
        vendor=facts.get("vendor_id"),
        family=int(family) if re.fullmatch(r"\d{1,9}", family) else None,
        model=int(model) if re.fullmatch(r"\d{1,9}", model) else None,
    )


def is_virtual(root: Path) -> bool | None:
    """Returns whether the processor reports a hypervisor (flag in /proc/cpuinfo); None if it has no flags there."""
    text = text_of(root / "proc/cpuinfo")
    flags = None if text is None else re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return None if flags is None else "hypervisor" in flags[1].split()


def _named_by_nvidia(root: Path, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Returns the GPUs with the models and UUIDs that NVIDIA's driver shows in /proc.

    Source: NVIDIA driver README, Using the /proc File System Interface; a GPU that was not used yet has `?` there.
    """
    folder = root / "proc/driver/nvidia/gpus"
    texts = {normal_bus_id(name): text_of(folder / name / "information") or "" for name in names_in(folder)}
    told = {bus: dict(re.findall(r"^([\w ]+):[ \t]*(.+)$", text, re.MULTILINE)) for bus, text in texts.items()}
    return tuple(
        replace(
            gpu,
            name=gpu.name or told.get(gpu.bus, {}).get("Model"),
            uuid=uuid if "?" not in (uuid := told.get(gpu.bus, {}).get("GPU UUID", "?")) else None,
        )
        for gpu in gpus
    )


def _numbered_by_amd(root: Path, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Returns AMD GPUs with HIP's numbers and UUIDs, models and architectures; a card in partitions is as many GPUs.

    HIP counts the driver's nodes, whose order may differ from the bus's. Nodes hidden from a container cannot be read
    and are not counted. GPUs are returned unchanged if one of them is another maker's.

    Source: Linux drivers/gpu/drm/amd/amdkfd/kfd_topology.c (the number of a partition is in bits 31:28 of `location_id`
    or, by other releases, in those of the function; `gfx_target_version` is 90402 of gfx942); ROCR-Runtime,
    amd_filter_device.cpp (UUID).
    """
    if not gpus or any(gpu.vendor != AMD_GPU for gpu in gpus):
        return tuple(gpus)
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    numbers = sorted(int(name) for name in names_in(nodes) if re.fullmatch(r"\d{1,4}", name))
    known = {gpu.key for gpu in gpus}
    found: dict[str, list[tuple[int, int]]] = {}
    architectures: dict[str, int] = {}
    count = 0
    for number in numbers:
        text = text_of(nodes / str(number) / "properties") or ""
        facts = {name: int(value) for name, value in re.findall(r"^(\w+) (\d{1,20})$", text, re.MULTILINE)}
        if facts.get("simd_count"):
            place = facts.get("location_id", 0) & 0xFFFF
            bus = f"{facts.get('domain', 0):04x}:{place >> 8:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
            bus = bus if bus in known else card_of(bus)
            found.setdefault(bus, []).append((count, facts.get("unique_id", 0)))
            architectures[bus] = facts.get("gfx_target_version", 0)
            count += 1
    return tuple(
        replace(
            gpu,
            key=gpu.key if part == 0 else f"{gpu.key}/{part}",
            part=None if len(nodes_of) == 1 else part,
            index=index,
            name=gpu.name or amd_name(gpu.vendor, gpu.device),
            architecture=f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else None,
            uuid=f"GPU-{unique:016x}" if unique else None,
        )
        for gpu in gpus
        for version in [architectures.get(gpu.key)]
        for nodes_of in [found.get(gpu.key, [(None, 0)])]
        for part, (index, unique) in enumerate(nodes_of)
    )


def _without_pci(found: FoundPorts, machine: Machine, only: str | None) -> list[Nic]:
    """Returns the ports without a PCI card as NICs of their own.

    Args:
        found: All ports of the machine.
        machine: Machine with its PCI cards.
        only: Key of the machine's only CPU, which becomes their parent; None if it has several.
    """
    known = {nic.key for nic in machine.nics}
    loose = [port for port in found.loose if port.name not in known]
    return [Nic(key=port.name, parent=only, ports=(port,)) for port in loose]


def _notes(machine: Machine, tree: PciTree) -> list[str]:
    """Returns sentences on what is missing or doubtful."""
    notes = list(tree.problems)
    if not tree.functions:
        notes.append("No PCI device is visible: in a container, mount the host's /sys.")
    lost = sum(cpu.numa is None for cpu in machine.cpus)
    if lost:
        notes.append(f"{lost} root complexes report NUMA node -1: which CPU their devices hang off is unknown.")
    if sum(gpu.vendor == AMD_GPU for gpu in machine.gpus) > 1:
        notes.append("xGMI links are not read from the host; the file of RCCL's NCCL_TOPO_DUMP_FILE has them.")
    if any(switch.virtual for switch in machine.switches):
        notes.append("Some PCIe switches are virtual: their link speed says nothing about the hardware.")
    return notes
