"""Stubs in the place of NVIDIA's packages: on a library that asks for them as torch's do."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from support.cuda_wheel import (
    ENDS_THE_PROCESS,
    BuildError,
    answers_without_device,
    bring_torch,
    find_wheel,
    run,
    write_cpu_wheel,
    write_stubs,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cc") is None or shutil.which("c++") is None, reason="no C compiler"),
]

SOURCE = """
int cudaGetDeviceCount(int*);
int cublasCreate_v2(void*);
int devices(void) { int count = 7; int error = cudaGetDeviceCount(&count); return error * 10 + count; }
int multiply(void) { return cublasCreate_v2(0); }
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Site-packages with a `torch` of one library, linked against a libcudart and a libcublas that are gone."""
    library, gone = tmp_path / "torch" / "lib", tmp_path / "gone"
    library.mkdir(parents=True)
    gone.mkdir()
    for name, function in (("libcudart.so.13", "cudaGetDeviceCount"), ("libcublas.so.13", "cublasCreate_v2")):
        source = gone / f"{function}.c"
        source.write_text(f"int {function}(void) {{ return 0; }}\n")
        run("cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", source, "-o", gone / name)
    (gone / "torch.c").write_text(SOURCE)
    rpath = "-Wl,-rpath,$ORIGIN/../../stubs:$ORIGIN/../../nvidia/cu13/lib"
    run("cc", "-shared", "-fPIC", "-fno-builtin", rpath, gone / "torch.c", "-o",
        library / "libtorch.so", gone / "libcudart.so.13", gone / "libcublas.so.13")  # fmt: skip
    shutil.rmtree(gone)
    information = tmp_path / "torch-2.15.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.15.0\n"
        "Requires-Dist: nvidia-cudnn-cu13==9.26.0.51\nRequires-Dist: nvidia-nccl-cu13==2.30.7\n"
    )
    return tmp_path


def call(packages: Path, function: str) -> subprocess.CompletedProcess[str]:
    code = f"import ctypes; print(ctypes.CDLL({str(packages / 'torch/lib/libtorch.so')!r}).{function}())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_torch_is_told_that_there_is_no_device_and_ends_by_name_in_anything_else(packages: Path) -> None:
    assert call(packages, "devices").returncode != 0, "the libraries are gone"
    stubs = packages / "stubs"
    stubs.mkdir()
    scratch = packages / "scratch"
    scratch.mkdir()
    answers = answers_without_device(packages)
    assert write_stubs(packages, stubs, scratch, unknown=ENDS_THE_PROCESS, answers=answers) == 1
    assert {path.name for path in stubs.iterdir()} >= {"libcudart.so.13", "libcublas.so.13"}
    assert call(packages, "devices").stdout == "1000\n"  # cudaErrorNoDevice, and a count of 0
    multiplied = call(packages, "multiply")
    assert multiplied.returncode < 0
    assert "cublasCreate_v2" in multiplied.stderr


def test_a_wheel_of_another_release_is_refused(tmp_path: Path) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = tmp_path / "inner" / f"torch-2.15.0-{tag}-{tag}-manylinux_2_28_x86_64.whl"
    wheel.parent.mkdir()
    wheel.touch()
    assert find_wheel(tmp_path, "2.15.0") == wheel
    assert find_wheel(tmp_path, "2.15") is None
    with pytest.raises(BuildError, match=r"no wheel of torch 2\.14\.1"):
        bring_torch(tmp_path, "2.14.1", tmp_path, cuda=False)


def test_pip_installs_a_wheel_for_cuda_as_one_for_cpus(
    packages: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    library, folder = packages / "torch" / "lib", tmp_path_factory.mktemp("wheels")
    shutil.copy(library / "libtorch.so", library / "libtorch_cuda.so")
    (packages / "torch" / "version.py").write_text("__version__ = '2.15.0+cu130'\n")
    information = packages / "torch-2.15.0.dist-info"
    (information / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: false\n")
    (information / "RECORD").touch()
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = folder / f"torch-2.15.0-{tag}-{tag}-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted(packages.rglob("*")):
            archive.write(path, path.relative_to(packages))
    into = folder / "into"
    into.mkdir()
    made = write_cpu_wheel(wheel, into)
    assert made.name == wheel.name.replace("2.15.0", "2.15.0+cpu") and list(into.iterdir()) == [made]
    target = folder / "target"
    # Alone, as it needs nothing; whatever this machine's pip is told of releases of torch.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    own["PIP_CONFIG_FILE"] = os.devnull
    run(sys.executable, "-m", "pip", "install", "-q", "--no-index", "--target", target, made, environment=own)
    assert call(target, "devices").stdout == "1000\n"
    assert (target / "torch" / "version.py").read_text() == "__version__ = '2.15.0+cpu'\n"
    (library / "libtorch_cuda.so").unlink()
    with zipfile.ZipFile(folder / "torch-2.15.0-x.whl", "w") as archive:
        archive.write(library / "libtorch.so", "torch/lib/libtorch.so")
    with pytest.raises(BuildError, match="no build for CUDA"):
        write_cpu_wheel(folder / "torch-2.15.0-x.whl", into)
