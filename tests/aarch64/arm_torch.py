"""Brings torch for 64-bit Arm, to be imported by the emulated Arm Python of this folder."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

from support.cuda_wheel import (
    ENDS_THE_PROCESS,
    ROOT,
    answers_without_device,
    has_cuda,
    write_stubs,
)

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


def pip_download(into: Path, version: str, requirement: str, *options: str) -> str:
    """Downloads a wheel for Arm, without what it requires; returns pip's last line where there is none."""
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (28, 27, 17)]
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps",
               "--only-binary=:all:", *platforms, f"--python-version={version}", f"--dest={into}", *options,
               requirement]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["pip failed"])[-1]


def bring_wheel(kept: Path, version: str, release: str) -> Path:
    """The wheel of torch: of the folder ARM_TORCH, or a CPU build of an index, which is kept in `kept`.

    Raises:
        NoArmTorchError: There is none. The one of PyPI, 430 MB with its kernels for CUDA, is not fetched unasked.
    """
    tag = f"cp{version.replace('.', '')}"
    given = os.environ.get("ARM_TORCH")
    if given is not None:
        found = [path for path in Path(given).rglob(f"torch-{release}[-+]*{tag}-*aarch64.whl")]
        if not found:
            raise NoArmTorchError(f"ARM_TORCH={given} has no wheel of torch {release} for Arm and Python {version}")
        return found[0]
    why = ""
    if not list(kept.glob("torch-*.whl")):
        index = os.environ.get("TORCH_INDEX", CPU_INDEX)
        why = pip_download(kept, version, f"torch=={release}+cpu", f"--extra-index-url={index}", "--retries=0")
    for path in kept.glob(f"torch-{release}+cpu-*{tag}-*.whl"):
        return path
    raise NoArmTorchError(
        f"no CPU build of torch {release} for Arm and Python {version} ({why}). TORCH_INDEX=ADDRESS names an index "
        "that has one. Or take that of PyPI, 430 MB, once: pip download --no-deps --only-binary=:all: "
        f"--platform=manylinux_2_28_aarch64 --python-version={version} -d FOLDER torch==={release}, then "
        "make aarch64 ARM_TORCH=FOLDER"
    )


def prepare(built: Path) -> dict[str, str]:
    """Puts torch, NumPy and this checkout beside the Arm Python.

    Args:
        built: What build.sh has made; everything stays there for the next run.

    Returns:
        The environment variables with which the Arm Python finds them.

    Raises:
        NoArmTorchError: See `bring_wheel`.
    """
    root, packages, kept = built / "root", built / "site", built / "wheels"
    kept.mkdir(exist_ok=True)
    named = re.fullmatch(r"python(\d+\.\d+)", (root / "python").readlink().name)
    assert named is not None
    version, release = named[1], metadata.version("torch").partition("+")[0]
    wheel = bring_wheel(kept, version, release)
    ready = packages / "ready"
    if not ready.exists() or ready.read_text() != wheel.name:
        numpy = f"numpy=={metadata.version('numpy')}"
        if not list(kept.glob("numpy-*.whl")) and (why := pip_download(kept, version, numpy)):
            raise NoArmTorchError(f"no {numpy} for Arm and Python {version} ({why})")
        shutil.rmtree(packages, ignore_errors=True)
        for each in (wheel, next(kept.glob("numpy-*.whl"))):
            with zipfile.ZipFile(each) as archive:
                archive.extractall(packages)
        if has_cuda(packages):
            libraries = packages / "nvidia" / "cu13" / "lib"
            libraries.mkdir(parents=True)
            with tempfile.TemporaryDirectory() as scratch:
                answers = answers_without_device(packages)
                write_stubs(packages, libraries, Path(scratch), unknown=ENDS_THE_PROCESS, answers=answers, tools=TOOLS)
        ready.write_text(wheel.name)
    # This checkout, with the Arm module.
    gradwire = packages / "gradwire"
    shutil.rmtree(gradwire, ignore_errors=True)
    gradwire.mkdir()
    for path in [*(ROOT / "gradwire").iterdir(), built / "_native.so"]:
        (gradwire / path.name).symlink_to(path)
    # qemu looks for the files of its processes below this folder first.
    for name, text in (("proc/cpuinfo", CPUINFO), ("sys/devices/system/cpu/cpu0/regs/identification/midr_el1", MIDR)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    # What is pure Python is this environment's; it lies behind, so that torch and NumPy are the Arm ones.
    own = [path for path in sys.path if path.endswith("site-packages")]
    return {"PYTHONPATH": os.pathsep.join([str(packages), *own]), "PYTHONPYCACHEPREFIX": str(built / "pycache")}
