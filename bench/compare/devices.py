"""Published peak throughputs of processors, to carry a model's assumed step time from one device to another."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradwire.bench.compare.public_models import PublicModel
from gradwire.topology.graph import Machine
from gradwire.topology.readers.affinity import members


@dataclass(frozen=True, slots=True)
class Device:
    """Published peak throughput of one processor.

    Attributes:
        name: Name that its maker gives it.
        teraflops: Peak in TFLOP/s: on a GPU of dense products of 16-bit matrices with sums in 32 bits, on a CPU of
            float32.
        source: Publication of the peak.
    """

    name: str
    teraflops: float
    source: str


REFERENCE = Device("A10", 125.0, "NVIDIA A10 data sheet")
"""Device for which the step times in `PUBLIC_MODELS` are assumed."""

ZEN4_CORE_TERAFLOPS = 0.0864
"""Peak TFLOP/s in float32 of one core of Zen 4 at 2.7 GHz: two 256-bit fused multiply-adds a cycle, 32 operations.

Source: AMD, Software Optimization Guide for Zen 4, section 2.10; EPYC 9334 product page (base clock).
"""

DEVICES = (
    Device("T4", 65.0, "NVIDIA T4 data sheet"),
    Device("L4", 121.0, "NVIDIA L4 data sheet, half of the figure with sparsity"),
    REFERENCE,
    Device("A30", 165.0, "NVIDIA A30 data sheet"),
    Device("A100", 312.0, "NVIDIA A100 data sheet"),
    Device("A40", 149.7, "NVIDIA A40 data sheet"),
    Device("L40", 181.0, "NVIDIA L40 data sheet"),
    Device("L40S", 362.0, "NVIDIA L40S data sheet"),
    Device("RTX 3090", 71.0, "NVIDIA Ampere GA102 whitepaper"),
    Device("RTX 4090", 165.0, "NVIDIA Ada whitepaper"),
    Device("RTX 5090", 209.0, "NVIDIA RTX Blackwell whitepaper"),
    Device("RTX PRO 6000", 500.0, "NVIDIA RTX PRO 6000 data sheet, an eighth of FP4 with sparsity"),
    Device("GB10", 125.0, "NVIDIA DGX Spark data sheet, an eighth of FP4 with sparsity"),
    Device("H100 PCIe", 756.0, "NVIDIA H100 data sheet"),
    Device("H100 NVL", 835.0, "NVIDIA H100 data sheet, half of the figure with sparsity"),
    Device("H100", 989.0, "NVIDIA H100 data sheet"),
    Device("H200", 989.0, "NVIDIA H200 data sheet"),
    Device("H20", 148.0, "NVIDIA H20 data sheet"),
    Device("GH200", 990.0, "NVIDIA GH200 data sheet, half of the figure with sparsity"),
    Device("B200", 2250.0, "NVIDIA DGX B200 data sheet"),
    Device("GB200", 2500.0, "NVIDIA GB200 NVL72 data sheet, a 72nd of half of the figure with sparsity"),
    Device("B300", 2250.0, "NVIDIA DGX B300 data sheet, an eighth of half of the figure with sparsity"),
    Device("GB300", 2500.0, "NVIDIA GB300 NVL72 data sheet, a 72nd of half of the figure with sparsity"),
    Device("MI300X", 1307.0, "AMD Instinct MI300X data sheet"),
    Device("MI325X", 1307.0, "AMD Instinct MI325X data sheet"),
    Device("MI350X", 2307.0, "AMD Instinct MI350X data sheet"),
    Device("MI355X", 2516.0, "AMD Instinct MI355X data sheet"),
    Device("Radeon 8060S", 59.0, "AMD Ryzen AI Max+ 395: 40 compute units, 512 operations each, 2.9 GHz"),
)
"""Known GPUs. The first whose name is part of the name that the driver reports is taken, so "H100 PCIe" precedes
"H100"."""


def device_of(machine: Machine, ranks: int) -> Device | None:
    """Returns the device on which each rank of a machine computes; None if its peak is not known.

    Args:
        machine: Topology of a node. With GPUs the device is its first GPU; without, an equal share of its cores, which
            are assumed to be Zen 4.
        ranks: Number of ranks of that node.
    """
    if not machine.gpus:
        cores = sum(len(members(cpu.cores or "")) for cpu in machine.cpus) / ranks
        source = "AMD's optimization guide for Zen 4"
        return Device(f"{cores:g} cores of Zen 4", cores * ZEN4_CORE_TERAFLOPS, source) if cores else None
    name = machine.gpus[0].name or ""
    return next((device for device in DEVICES if re.search(rf"\b{re.escape(device.name)}\b", name)), None)


def on_machine(model: PublicModel, machine: Machine, ranks: int) -> PublicModel:
    """Returns the model with the step time assumed for a machine, and a text that says that it is assumed.

    The step time of the reference device is scaled by the ratio of the peak rates: both are assumed to reach the
    same share of their peaks.

    Args:
        model: Model of the table, with the step time of the reference device.
        machine: Topology of a node; if its device is not known, the step time stays that of the reference device.
        ranks: Number of ranks of that node.
    """
    device = device_of(machine, ranks)
    if device is None:
        name = next((gpu.name for gpu in machine.gpus if gpu.name), "this machine's processors")
        why = f"{model.batch} on an {REFERENCE.name}, as nothing is known here of {name}"
        return replace(model, assumed=why)
    seconds = model.step_seconds * REFERENCE.teraflops / device.teraflops
    why = f"{model.batch} on {device.name}, from its peak of {device.teraflops:.4g} TFLOP/s [{device.source}]"
    return replace(model, step_seconds=seconds, assumed=why)


def all_on_machine(models: Sequence[PublicModel], machine: Machine, ranks: int) -> list[PublicModel]:
    """Returns the models with the step times assumed for a machine, each as `on_machine` computes it.

    Args:
        models: Models of the table, with the step times of the reference device.
        machine: Topology of a node.
        ranks: Number of ranks of that node.
    """
    return [on_machine(model, machine, ranks) for model in models]
