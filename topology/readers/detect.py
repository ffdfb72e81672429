"""This host's Machine, from whatever there is: sysfs, NVML, and the file a cloud provider left for NCCL.

What sysfs says takes precedence; each further source is merged into it. readers/__init__.py says how one is added.
"""

from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Machine
from gradwire.topology.pci_ids import NVIDIA
from gradwire.topology.readers.sysfs import read as read_sysfs

PROVIDED = "var/run/nvidia-topologyd/virtualTopology.xml"
"""Where NCCL itself looks when NCCL_TOPO_FILE is not set. Source: NCCL v2.30 src/graph/topo.cc."""

DRIVER_FILES = ("dev/nvidiactl", "dev/dxg", "dev/nvgpu", "dev/nvhost-ctrl", "proc/driver/nvidia")
"""Each shows an NVIDIA driver where the GPU itself is not on the visible PCI bus: containers, WSL, Jetson."""

LIVE = Path("/")


def detect_machine(root: Path = LIVE, *, library: ModuleType | SimpleNamespace | None = None) -> Machine:
    """Reads the topology of this host, or of a captured tree, from sysfs, NVML and the cloud provider's file.

    Facts that no source has are None, and `notes` names the missing source.

    Args:
        root: `/` for this host, or the root of a captured tree, for which NVML is not asked.
        library: Module to use in place of nvidia-ml-py; if set, it is asked for a captured tree, too.

    Raises:
        TopologyError: The root has no `sys` folder.
    """
    machine = read_sysfs(root)
    if library is not None or (root == LIVE and _has_driver(machine, root)):
        machine = _with_nvml(machine, library)
    provided = root / PROVIDED
    return _with_file(machine, provided) if provided.is_file() else machine


def _has_driver(machine: Machine, root: Path) -> bool:
    """Returns whether there may be an NVIDIA driver, so that loading NVML is worthwhile."""
    return any(gpu.vendor == NVIDIA for gpu in machine.gpus) or any((root / name).exists() for name in DRIVER_FILES)


def _with_file(machine: Machine, provided: Path) -> Machine:
    """Returns the machine merged with the provider's topology file, or with a note why the file was left out."""
    from gradwire.topology.readers.files import read_text  # here, because few hosts have such a file
    from gradwire.topology.readers.merge import merge
    from gradwire.topology.readers.nccl_xml import read as read_nccl_xml

    try:
        return merge(machine, read_nccl_xml(read_text(provided)), add=False)
    except TopologyError as error:
        return replace(machine, notes=(*machine.notes, f"{provided} was left out: {error}"))


def _with_nvml(machine: Machine, library: ModuleType | SimpleNamespace | None) -> Machine:
    """Returns the machine merged with NVML's GPUs and links.

    If NVML does not answer, the machine gets a note if it has an NVIDIA GPU, and is unchanged otherwise.
    """
    from gradwire.topology.paths import Distances
    from gradwire.topology.readers import nvml  # here, because hosts without a GPU need neither
    from gradwire.topology.readers.merge import merge

    reading = nvml.read(library)
    if reading.reason is not None:
        expected = any(gpu.vendor == NVIDIA for gpu in machine.gpus)
        named = all(gpu.name for gpu in machine.gpus if gpu.vendor == NVIDIA)
        note = f"NVLink {'is' if named else 'and GPU models are'} unknown: {reading.reason}."
        return replace(machine, notes=(*machine.notes, note)) if expected else machine
    doubts = []
    if reading.unresolved:
        doubts.append(
            f"{reading.unresolved} NVLinks are up and do not say where they lead: the driver hides their far end."
        )
    if reading.silent:
        doubts.append(f"{reading.silent} GPUs are counted by the driver and do not answer: see dmesg for Xid 79.")
    driver = Machine(
        gpus=reading.gpus,
        links=reading.links,
        links_known=not reading.unresolved,
        nvswitches=reading.nvswitches,
        notes=tuple(doubts),
        sources=("nvml",),
    )
    merged = merge(machine, driver, add=True)
    distances = Distances(merged)  # a GPU may hang below switches: the link leads to the CPU above them
    cpus = {cpu.key for cpu in merged.cpus}
    coherent = [
        replace(reading.c2c[gpu.key], b=cpu)
        for gpu in merged.gpus
        if gpu.key in reading.c2c and (cpu := distances.cpu_of(gpu)) is not None and cpu in cpus
    ]
    return replace(merged, links=(*merged.links, *coherent))
