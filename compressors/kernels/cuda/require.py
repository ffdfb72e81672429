"""Checks that a machine has what the CUDA kernels need; errors name what to install."""

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch

OLDEST_CAPABILITY = (7, 0)
"""Independent thread scheduling and the *_sync warp functions as the kernels use them begin with Volta.

Source: CUDA C++ Programming Guide, "Compute Capabilities". NVRTC of CUDA 13 begins at 7.5 and says so itself.
"""


class CudaKernelsError(RuntimeError):
    """The CUDA kernels cannot be used here; the message says what was found and what to install."""


@dataclass(frozen=True, slots=True)
class CudaSetup:
    """The CUDA found on a machine: of torch, of CuPy, of the driver, and one device.

    A version that is an int is 1000 * major + 10 * minor, as cudaRuntimeGetVersion and cuDriverGetVersion return it.
    """

    torch_cuda: str | None
    """CUDA that torch was built for, such as "13.0"; None for a build without CUDA."""
    device_count: int
    """CUDA devices that torch sees."""
    cupy_cuda: int | None
    """CUDA that CuPy was built for; None if CuPy cannot be imported."""
    cupy_problem: str
    """Reason why CuPy cannot be imported; only read if `cupy_cuda` is None."""
    driver: int
    """Newest CUDA that the driver supports; 0 if unknown."""
    capability: tuple[int, int]
    """Compute capability of the device, (major, minor)."""
    device_name: str
    """Name of the device."""
    torch_hip: str | None = None
    """ROCm that torch was built for; None for a build for CUDA."""


def _text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def check(found: CudaSetup) -> None:
    """Refuses a machine on which the kernels cannot run.

    Raises:
        CudaKernelsError: A part is missing, too old, or built for another CUDA; the message says what to install.
    """
    # Torch: a build with CUDA, which sees a device.
    if found.torch_hip is not None:
        raise CudaKernelsError(
            f"no kernels for AMD's GPUs: torch was built for ROCm {found.torch_hip}, the CUDA kernels run on NVIDIA's "
            "alone; there is nothing to install"
        )
    if found.torch_cuda is None:
        raise CudaKernelsError(
            "no CUDA: this torch was built without it; install a CUDA build of torch, and then "
            "`pip install cupy-cuda13x` (or `cupy-cuda12x`, whichever torch was built for)"
        )
    install = f"`pip install cupy-cuda{found.torch_cuda.split('.')[0]}x`"
    if not found.device_count:
        raise CudaKernelsError(
            f"no CUDA device: torch was built for CUDA {found.torch_cuda} but sees none; check "
            "`nvidia-smi` (a driver older than that CUDA shows no device) and CUDA_VISIBLE_DEVICES"
        )
    # CuPy: installed, and built for the same major version of CUDA as torch.
    if found.cupy_cuda is None:
        raise CudaKernelsError(
            f"no CuPy ({found.cupy_problem}): the CUDA kernels are compiled and launched by it; "
            f"torch was built for CUDA {found.torch_cuda}, so {install}"
        )
    if found.cupy_cuda // 1000 != int(found.torch_cuda.split(".")[0]):
        raise CudaKernelsError(
            f"CuPy was built for CUDA {_text(found.cupy_cuda)}, torch for CUDA {found.torch_cuda}: "
            f"`pip uninstall cupy-cuda{found.cupy_cuda // 1000}x`, then {install}"
        )
    # Driver and device: recent enough for CuPy's CUDA and for the kernels.
    if found.driver // 1000 < found.cupy_cuda // 1000:
        raise CudaKernelsError(
            f"the driver supports CUDA {_text(found.driver)} at most, CuPy was built for CUDA "
            f"{_text(found.cupy_cuda)}: install a newer driver, or a torch built for CUDA "
            f"{found.driver // 1000} with `pip install cupy-cuda{found.driver // 1000}x`"
        )
    if found.capability < OLDEST_CAPABILITY:
        raise CudaKernelsError(
            f"{found.device_name} has compute capability {'.'.join(map(str, found.capability))}; "
            "the CUDA kernels need 7.0 (Volta) or later: use such a device, or no compressor"
        )


def _import_cupy() -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module("cupy"), ""
    except (ImportError, AttributeError, RuntimeError) as error:
        # not installed; a library that it links to is missing; or it was built for another numpy
        return None, str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _versions(cupy: ModuleType) -> tuple[int, int]:
    """Returns the CUDA that CuPy was built for, and the newest that the driver supports.

    Raises:
        CudaKernelsError: CUDA's own libraries do not answer, as with a driver that is too old for them.
    """
    runtime = cupy.cuda.runtime
    try:
        return int(runtime.runtimeGetVersion()), int(runtime.driverGetVersion())
    except (runtime.CUDARuntimeError, ImportError, RuntimeError) as error:
        raise CudaKernelsError(
            f"CuPy cannot ask CUDA for its version ({error}): its CUDA libraries and the driver do not fit together; "
            "compare `nvidia-smi` with `python -c 'import cupy; cupy.show_config()'`, and install a newer driver or a "
            "CuPy for an older CUDA"
        ) from error


def require_cupy(device_index: int) -> ModuleType:
    """Imports CuPy and checks that it, the driver, torch and the device fit together.

    Args:
        device_index: The CUDA device that is to be used.

    Returns:
        The module cupy.

    Raises:
        CudaKernelsError: They do not fit; the message says what to install.
    """
    count = torch.cuda.device_count()
    cupy, problem = _import_cupy() if count and torch.version.hip is None else (None, "not looked for")
    capability, name = (0, 0), ""
    built_for, driver = (None, 0) if cupy is None else _versions(cupy)
    if count:
        capability, name = torch.cuda.get_device_capability(device_index), torch.cuda.get_device_name(device_index)
    check(
        CudaSetup(
            torch.version.cuda,
            count,
            built_for,
            problem,
            driver,
            capability,
            name,
            torch.version.hip,
        )
    )
    assert cupy is not None, "`check` refuses this"
    return cupy
