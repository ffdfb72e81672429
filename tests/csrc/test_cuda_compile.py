"""Every CUDA kernel compiles for the GPUs in use, without a warning and without a register spilled to memory."""

import importlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gradwire.compressors.kernels.cuda.load import (
    ENTRY_POINTS,
    FOLDER,
    OPTIONS,
    cached_cubin,
    compile_cubin,
    kernel_source,
)
from gradwire.compressors.kernels.cuda.require import CudaKernelsError

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120, 121)
"""T4; A100; A10 and RTX 3090; L4, L40S and RTX 4090; H100 and H200; B200; RTX 5090 and RTX PRO 6000; GB10."""


@pytest.fixture
def nvrtc() -> None:
    """NVRTC through CuPy: it needs the wheels, but no GPU and no driver."""
    try:
        importlib.import_module("cupy.cuda").nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"no NVRTC ({error}): `pip install cupy-cuda13x nvidia-cuda-nvrtc` brings it")


def test_every_file_is_known() -> None:
    assert {file.stem for file in (FOLDER / "cuda").glob("*.cu")} == set(ENTRY_POINTS)


def whole_source() -> str:
    """All files in one, each in a namespace of its own: nvcc's own headers are read once for all, a third of its time.

    That each compiles alone is what the emulated kernels and NVRTC show.
    """
    files = {name: FOLDER / "cuda" / f"{name}.cu" for name in ENTRY_POINTS}
    shared = {line for file in files.values() for line in re.findall(r'^#include ".*$', file.read_text(), re.MULTILINE)}
    return "\n".join(sorted(shared)) + "".join(
        f'''
namespace gradwire_{name} {{ using namespace gradwire; }}
#define gradwire gradwire_{name}
#include "{file}"
#undef gradwire
'''
        for name, file in files.items()
    )


def test_nvcc_finds_nothing_to_warn_about(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    targets = [word for cc in ARCHITECTURES for word in ("-gencode", f"arch=compute_{cc},code=sm_{cc}")]
    options = [option.replace("-std", "--std") for option in OPTIONS]
    source = tmp_path / "kernels.cu"
    source.write_text(whole_source())
    result = subprocess.run(
        [
            "nvcc",
            *options,
            "-Werror",
            "all-warnings",
            "-Xptxas",
            "-v",
            "--threads",
            "0",  # as many as there are processors
            f"-I{FOLDER}",
            f"-I{FOLDER / 'cuda'}",
            *targets,
            "-fatbin",
            "-o",
            str(tmp_path / "kernels.fatbin"),
            str(source),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    said = re.findall(r"Compiling entry function '(\w+)' for 'sm_(\d+)'", result.stderr)
    kernels = [kernel for names in ENTRY_POINTS.values() for kernel in names]
    assert sorted(said) == sorted((kernel, str(cc)) for kernel in kernels for cc in ARCHITECTURES)
    stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", result.stderr)
    assert stacks == [("0", "0", "0")] * len(said), result.stderr


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_the_inlined_source_is_whole(name: str) -> None:
    """NVRTC gets one text: all own headers in it, each once, and no system header outside g++'s branch."""
    source = kernel_source(name)
    assert '#include "' not in source
    assert source.count("constexpr unsigned kAllLanes") == 1
    assert all(f"{kernel}(" in source or "##" in source for kernel in ENTRY_POINTS[name])


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_no_products_are_paired(name: str) -> None:
    """ptxas 13.0 fuses a paired product with the sum behind it, whatever -fmad says: payloads would be other bits."""
    assert not re.search(r"(mul|fma)\.rn\S*f32x2", kernel_source(name))


@pytest.mark.parametrize("name", ENTRY_POINTS)
@pytest.mark.usefixtures("nvrtc")
def test_nvrtc_compiles_it(name: str) -> None:
    cubin = compile_cubin(name, 90)
    assert cubin[:4] == b"\x7fELF"
    assert all(kernel.encode() in cubin for kernel in ENTRY_POINTS[name])


@pytest.mark.usefixtures("nvrtc")
def test_a_compiled_kernel_is_kept(tmp_path: Path) -> None:
    first = cached_cubin("cast", 90, tmp_path)
    written = first.stat().st_mtime_ns
    assert cached_cubin("cast", 90, tmp_path) == first
    assert first.stat().st_mtime_ns == written
    assert cached_cubin("cast", 80, tmp_path) != first
    assert len(list(tmp_path.glob("*.cubin"))) == 2


@pytest.mark.usefixtures("nvrtc")
def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(CudaKernelsError, match=r"sm_37.*update CuPy"):
        compile_cubin("cast", 37)
