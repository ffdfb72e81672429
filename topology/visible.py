"""Determines which GPUs a process sees, and in which order, from the driver's GPUs and the launcher's variables."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gradwire.topology.graph import Gpu, Machine
from gradwire.topology.pci_ids import AMD_GPU

CUDA, HIP, ROCR, ORDER = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
VARIABLES = (CUDA, HIP, ROCR, ORDER)
"""What decides about it in a process's environment."""

_SHOWN_CHARACTERS = 60
_HIDING = ("", "-1", "NoDevFiles")
"""What is written to hide all GPUs; Slurm writes the last."""


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """Lists the GPUs that a process sees, its device 0 first."""

    gpus: tuple[Gpu, ...]
    """Visible GPUs; if `unknown`, all GPUs that may be among them."""
    unknown: bool = False
    """True if the selection or the order of the GPUs cannot be known."""
    why: str = ""
    """Reason for `unknown`, or for fewer GPUs than the variable names; empty otherwise."""


def given_gpus(machine: Machine) -> tuple[Gpu, ...]:
    """Returns the GPUs that this process may use, in the order of the driver's numbers if it has numbered any.

    In a container, a cgroup or a guest the bus shows more of them than the driver counts.

    Args:
        machine: Machine on which this process runs.

    Returns:
        The numbered GPUs, lowest number first; all GPUs in bus order if the driver has numbered none.
    """
    numbered = [gpu for gpu in machine.gpus if gpu.index is not None]
    return tuple(sorted(numbered, key=lambda gpu: gpu.index or 0)) or machine.gpus


def without_idle_gpus(machine: Machine, variables: Mapping[str, str]) -> Machine:
    """Returns the machine without the GPUs that a job leaves idle: those that its processes do not see.

    A process that sees one GPU is taken to be one of several, each with a GPU of its own: then no GPU counts as idle,
    nor if it is unknown which GPUs the process sees.

    Args:
        machine: The process's machine.
        variables: Name -> value of those variables in `VARIABLES` that are set for the process.
    """
    seen = visible_gpus(machine, variables)
    if seen.unknown or len(seen.gpus) < 2:
        return machine
    keys = {gpu.key for gpu in seen.gpus}
    return replace(machine, gpus=tuple(gpu for gpu in machine.gpus if gpu.key in keys))


def visible_gpus(machine: Machine, variables: Mapping[str, str]) -> VisibleGpus:
    """Returns the GPUs that a process sees under its environment variables.

    Args:
        machine: The process's machine.
        variables: Name -> value of those variables in `VARIABLES` that are set for the process.
    """
    given = given_gpus(machine)
    if not given:
        return VisibleGpus(())
    if all(gpu.vendor == AMD_GPU for gpu in given):
        return _of_amd(given, variables)
    return _of_nvidia(given, variables)


def _of_nvidia(given: Sequence[Gpu], variables: Mapping[str, str]) -> VisibleGpus:
    """Returns the GPUs that CUDA shows under CUDA_VISIBLE_DEVICES: by number or by UUID, or one with a MIG slice alone.

    Source: CUDA C++ programming guide, CUDA environment variables (what stands behind an entry that names no GPU does
    not count; UUIDs may be shortened); PyTorch torch/cuda/__init__.py (an entry that comes twice hides all, a number
    ends at the first letter); MIG user guide, CUDA visible devices (one slice, and no whole GPU beside it).
    """
    text = variables.get(CUDA)
    words = [word.strip() for word in (text or "").split(",")]
    if words[0].startswith(("GPU-", "MIG-")):
        found = _by_uuid(given, words)
    else:
        found = _by_number(given, None if text is None else words, variables.get(ORDER))
    sliced = [gpu for gpu in found.gpus if gpu.slices]
    return VisibleGpus((sliced[0],), found.unknown, found.why) if sliced and not found.unknown else found


def _by_number(given: Sequence[Gpu], words: Sequence[str] | None, order: str | None) -> VisibleGpus:
    """Returns the GPUs that the entries of CUDA_VISIBLE_DEVICES name by number.

    It stops at the first entry that is no number of a GPU. A number that comes twice leaves no GPU at all. GPUs of
    several models in CUDA's own order (fastest first) are returned as `unknown`.

    Args:
        given: GPUs that the process may use, by the driver's numbers.
        words: Entries of the variable; None if it is not set, and all GPUs are visible then.
        order: Value of CUDA_DEVICE_ORDER; None if it is not set.
    """
    numbers = [] if words is not None else list(range(len(given)))
    why = ""
    for word in words or ():
        match = re.match(r"\+?([0-9]{1,4})(?![0-9])", word)
        if match is None or int(match[1]) >= len(given):
            if word not in _HIDING:
                name = f"`{CUDA}` is {','.join(words or ())[:_SHOWN_CHARACTERS]}: {word[:_SHOWN_CHARACTERS]}"
                why = f"{name} is none of the {len(given)} GPUs here, and CUDA shows none from it on"
            break
        if int(match[1]) in numbers:
            return VisibleGpus((), why=f"`{CUDA}` names {match[1]} twice, for which CUDA shows no GPU")
        numbers.append(int(match[1]))
    models = {gpu.name or gpu.device for gpu in given}
    if numbers and len(models) > 1 and order != "PCI_BUS_ID":
        why = f"the GPUs differ, and CUDA numbers the fastest first: set {ORDER}=PCI_BUS_ID"
        return VisibleGpus(tuple(given), unknown=True, why=why)
    return VisibleGpus(tuple(given[number] for number in numbers), why=why)


def _by_uuid(given: Sequence[Gpu], words: Sequence[str]) -> VisibleGpus:
    """Returns the GPUs that the entries of CUDA_VISIBLE_DEVICES name by UUID.

    An entry is the UUID of a GPU or of one of its MIG slices, or a prefix that only one of them has. It stops at the
    first entry that matches none or several, and at one of the other kind; a GPU that is named twice leaves no GPU at
    all. The result is `unknown` if the UUIDs that an entry may mean are not known.

    Args:
        given: GPUs that the process may use.
        words: Entries of the variable; the first begins with `GPU-` or `MIG-`.
    """
    found: list[Gpu] = []
    named = f"`{CUDA}` is {','.join(words)[:_SHOWN_CHARACTERS]}"
    for word in words:
        if not word.startswith(words[0][:4]):
            break
        own = re.fullmatch(r"(?:MIG-)?(GPU-[^/]*)(?:/.*)?", word)  # MIG-GPU-uuid/1/0: a slice as drivers before 470 say
        names = {gpu.key: ((gpu.uuid,) if gpu.uuid else ()) if own else gpu.slices for gpu in given}
        matches = [gpu for gpu in given if any(name.startswith(own[1] if own else word) for name in names[gpu.key])]
        if not matches and not all(names.values() if own else [any(names.values())]):
            kind = "UUIDs of this machine's GPUs" if own else "MIG slices of this machine's GPUs and their UUIDs"
            tool = "nvidia-ml-py, or /proc/driver/nvidia/gpus," if own else "nvidia-ml-py"
            why = f"{named}, and the {kind} are not known: {tool} has them"
            return VisibleGpus(tuple(given), unknown=True, why=why)
        if len(matches) != 1:
            what = "a UUID that several GPUs have" if matches else "the UUID of no GPU here"
            why = f"{named}: {word[:_SHOWN_CHARACTERS]} is {what} (nvidia-smi -L), and CUDA shows none from it on"
            return VisibleGpus(tuple(found), why=why)
        if matches[0] in found and word[:4] == "GPU-":
            return VisibleGpus((), why=f"{named}: one GPU twice, for which CUDA shows none")
        found += matches
    return VisibleGpus(tuple(found))


def _of_amd(given: Sequence[Gpu], variables: Mapping[str, str]) -> VisibleGpus:
    """Returns the GPUs that HIP shows: of those that ROCR_VISIBLE_DEVICES leaves, those that HIP's variable names.

    Source: ROCR-Runtime, amd_filter_device.cpp (numbers or UUIDs, which may be shortened; it ends at the first entry
    that names none, or one again); clr, rocdevice.cpp (HIP_VISIBLE_DEVICES, where that is empty CUDA_VISIBLE_DEVICES).
    """
    named = {ROCR: variables.get(ROCR), HIP: variables.get(HIP) or None}
    if named[HIP] is None:
        named = {ROCR: named[ROCR], CUDA: variables.get(CUDA) or None}
    left = list(given)
    for variable, text in named.items():
        if text is None:
            continue
        found: list[Gpu] = []
        for word in (each.strip().upper() for each in text.split(",")):
            if word.startswith("G") and not all(gpu.uuid for gpu in left):
                why = f"`{variable}` is {text[:_SHOWN_CHARACTERS]}, and the UUIDs of this machine's GPUs are not known"
                return VisibleGpus(tuple(left), unknown=True, why=why)
            gpu = _amd_gpu(left, word)
            if gpu is None or gpu in found:
                break
            found.append(gpu)
        left = found
    return VisibleGpus(tuple(left))


def _amd_gpu(left: Sequence[Gpu], word: str) -> Gpu | None:
    """Returns the GPU that an entry names, or None if it names none or several.

    Args:
        left: GPUs that are still visible.
        word: Index into `left`, or a UUID or its prefix (`GPU-...`), in capital letters.
    """
    if word.startswith("G"):
        matches = [gpu for gpu in left if len(word) > 4 and (gpu.uuid or "").upper().startswith(word)]
        return matches[0] if len(matches) == 1 else None
    return left[int(word)] if re.fullmatch(r"[0-9]{1,4}", word) and int(word) < len(left) else None
