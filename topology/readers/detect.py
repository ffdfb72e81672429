"""This host's Machine, from whatever there is: sysfs, NVML, and the file a cloud provider left for NCCL."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Machine
from gradwire.topology.readers import nvml
from gradwire.topology.readers.files import read_text
from gradwire.topology.readers.merge import merge
from gradwire.topology.readers.nccl_xml import read as read_nccl_xml
from gradwire.topology.readers.nvml_calls import Library
from gradwire.topology.readers.sysfs import read as read_sysfs

PROVIDED = "var/run/nvidia-topologyd/virtualTopology.xml"
"""Where NCCL itself looks when NCCL_TOPO_FILE is not set. Source: NCCL v2.30 src/graph/topo.cc."""

LIVE = Path("/")


def detect(root: Path = LIVE, *, library: Library | None = None) -> Machine:
    """Returns the machine; what no source could tell is None, and `notes` says which source was missing.

    Args:
        root: `/` for this host; a captured tree is read without asking this host's driver.
        library: Stands in for nvidia-ml-py; given one, a captured tree asks it too.

    Raises:
        TopologyError: The root has no `sys` folder.
    """
    machine = read_sysfs(root)
    if root == LIVE or library is not None:
        machine = _with_nvml(machine, nvml.read(library))
    provided = root / PROVIDED
    if provided.is_file():
        try:
            machine = merge(machine, read_nccl_xml(read_text(provided)), add=False)
        except TopologyError as error:
            machine = replace(machine, notes=(*machine.notes, f"{provided} was left out: {error}"))
    return machine


def _with_nvml(machine: Machine, reading: nvml.NvmlReading) -> Machine:
    """Returns the machine with what the driver knows, or with a note where it should have known something."""
    if reading.reason is not None:
        expected = any(gpu.vendor == 0x10DE for gpu in machine.gpus)
        note = f"NVLink and GPU models are unknown: {reading.reason}."
        return replace(machine, notes=(*machine.notes, note)) if expected else machine
    driver = Machine(
        gpus=reading.gpus,
        links=reading.links,
        links_known=not reading.unresolved,
        nvswitches=reading.nvswitches,
        notes=tuple(_doubts(reading)),
        sources=("nvml",),
    )
    merged = merge(machine, driver, add=True)
    cpus = {cpu.key for cpu in merged.cpus}
    coherent = [
        replace(reading.c2c[gpu.key], b=gpu.parent)
        for gpu in merged.gpus
        if gpu.parent in cpus and gpu.parent is not None and gpu.key in reading.c2c
    ]
    return replace(merged, links=(*merged.links, *coherent))


def _doubts(reading: nvml.NvmlReading) -> Iterator[str]:
    """Yields what the driver left open."""
    if reading.unresolved:
        yield f"{reading.unresolved} NVLinks are up and do not say where they lead: the driver hides their far end."
    if reading.silent:
        yield f"{reading.silent} GPUs are counted by the driver and do not answer: see dmesg for Xid 79."
