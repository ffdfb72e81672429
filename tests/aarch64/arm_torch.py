"""Brings torch for 64-bit Arm into the emulated Arm environment that build.sh makes."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from support.cuda_wheel import write_cpu_wheel

TOOLS = "aarch64-linux-gnu-"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU builds; TORCH_INDEX names another one."""

CPUINFO = "\n".join(
    f"processor\t: {core}\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp "
    "asimdhp cpuid asimdrdm\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\n"
    "CPU part\t: 0xd0c\nCPU revision\t: 1\n"
    for core in range(2)
)
"""/proc/cpuinfo of a Neoverse N1. torch's cpuinfo library looks for an Arm processor there and dies of this machine's
own, which qemu shows up to release 8."""
MIDR = "0x00000000413fd0c1\n"
"""The same processor for oneDNN, in sysfs."""


class NoArmTorchError(Exception):
    """Why there is no torch for Arm, and how to get it."""


def pip(command: str, version: str, *words: str) -> str:
    """Runs this environment's pip for wheels that fit an Arm Python; returns its last line where it fails."""
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (28, 27, 17)]
    full = [sys.executable, "-m", "pip", command, "--disable-pip-version-check", "--quiet", "--only-binary=:all:",
            *platforms, f"--python-version={version}", *words]  # fmt: skip
    done = subprocess.run(full, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["pip failed"])[-1]


def bring_wheel(kept: Path, version: str, release: str) -> Path:
    """A CPU build of torch: of an index, or made of the wheel in the folder ARM_TORCH; it is kept in `kept`.

    Raises:
        NoArmTorchError: There is none. The one of PyPI, 430 MB with its kernels for CUDA, is not fetched unasked.
    """
    tag = f"cp{version.replace('.', '')}"
    made = f"torch-{release}+cpu-{tag}-{tag}-*aarch64.whl"
    given, why = os.environ.get("ARM_TORCH"), ""
    if not list(kept.glob(made)) and given is not None:
        found = [path for path in Path(given).rglob(f"torch-{release}[-+]*{tag}-*aarch64.whl")]
        if not found:
            raise NoArmTorchError(f"ARM_TORCH={given} has no wheel of torch {release} for Arm and Python {version}")
        return found[0] if "+cpu" in found[0].name else write_cpu_wheel(found[0], kept, TOOLS)
    if not list(kept.glob(made)):
        index = f"--extra-index-url={os.environ.get('TORCH_INDEX', CPU_INDEX)}"
        why = pip("download", version, "--no-deps", f"--dest={kept}", index, "--retries=0", f"torch=={release}+cpu")
    for path in kept.glob(made):
        return path
    raise NoArmTorchError(
        f"no CPU build of torch {release} for Arm and Python {version} ({why}). TORCH_INDEX=ADDRESS names an index "
        "that has one. Or take that of PyPI, 430 MB, once: pip download --no-deps --only-binary=:all: "
        f"--platform=manylinux_2_28_aarch64 --python-version={version} -d FOLDER torch==={release}, then "
        "make aarch64 ARM_TORCH=FOLDER"
    )


def prepare(built: Path) -> None:
    """Puts torch, and what it requires, beside the wheel of gradwire.

    Args:
        built: What build.sh has made; everything stays there for the next run.

    Raises:
        NoArmTorchError: See `bring_wheel`.
    """
    kept, [site] = built / "wheels", (built / "env" / "lib").glob("python*/site-packages")
    kept.mkdir(exist_ok=True)
    version, release = site.parent.name.removeprefix("python"), metadata.version("torch").partition("+")[0]
    wheel = bring_wheel(kept, version, release)
    there = (site / f"torch-{release}+cpu.dist-info").exists()
    # The emulated pip would take minutes to unpack it.
    if not there and (why := pip("install", version, "--upgrade", f"--target={site}", str(wheel))):
        raise NoArmTorchError(f"{wheel.name} cannot be installed ({why})")
    # qemu looks for the files of its processes below this folder first.
    for name, text in (("proc/cpuinfo", CPUINFO), ("sys/devices/system/cpu/cpu0/regs/identification/midr_el1", MIDR)):
        (built / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (built / "root" / name).write_text(text)
