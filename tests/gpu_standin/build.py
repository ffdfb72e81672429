"""Builds the GPU stand-in: an environment with torch's own CUDA wheel, over a CUDA runtime and an NCCL in host memory.

    python tests/gpu_standin/build.py .venv/gpu-standin                      # make gpu-standin
    python tests/gpu_standin/build.py .venv/gpu-standin --torch FOLDER       # a wheel that is here already

The environment sees the packages of the one that runs this. Its own are torch and, where torch's libraries look for
NVIDIA's (nvidia/cu13/lib beside torch), the stand-in's: the runtime, NCCL, the layers of LAYERS, and for everything
else that torch's libraries want a function that ends the process with its name. Nothing needs to be preloaded.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_standin.compiling import HERE, LAYERS, compile_layer, compile_operators, digest_of
from support.cuda_wheel import (
    BuildError,
    bring_torch,
    download,
    has_cuda,
    link_or_copy,
    listed_releases,
    make_environment,
    run,
    version_code,
    write_stubs,
)

BINDINGS = {"cupy": ("cupy-cuda13x>=14", "cuda-pathfinder"), "nccl": ("nccl4py>=0.6", "cuda-bindings", "cuda-core")}
"""Module -> what is installed for it."""

UNKNOWN = """
int gpu_standin_unknown(const char* what);
#define unknown_call gpu_standin_unknown
"""
"""What the functions call that are not modelled: the runtime ends the process with their name."""


def modelled_torch() -> str:
    """The release of torch whose calls of CUDA and NCCL are modelled: the oldest that is tested."""
    return listed_releases()[-1]


def cuda_version(packages: Path) -> str:
    """The release of CUDA that torch was built with, as "13.0"."""
    text = (packages / "torch" / "version.py").read_text()
    found = re.search(r"cuda: Optional\[str\] = '([\d.]+)'", text)
    if found is None:
        raise BuildError("torch/version.py names no CUDA")
    return found[1]


def cuda_headers(packages: Path) -> Path:
    """The folder with cuda_runtime_api.h: of a toolkit on this machine, or of NVIDIA's package, which is kept."""
    version = cuda_version(packages)
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):
        toolkits.append(str(Path(nvcc).resolve().parents[1]))
    toolkits += [f"/usr/local/cuda-{version}", "/usr/local/cuda"]
    for toolkit in toolkits:
        header = Path(toolkit or "/nowhere") / "include" / "cuda_runtime_api.h"
        if header.exists() and f"#define CUDART_VERSION  {int(float(version) * 1000)}" in header.read_text():
            return header.parent
    kept = packages / f"cuda-headers-{version}"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=packages) as scratch:
            for package in ("nvidia-cuda-runtime", "nvidia-cuda-crt"):
                with zipfile.ZipFile(download(f"{package}=={version}.*", Path(scratch))) as archive:
                    archive.extractall(scratch)
            next(Path(scratch).rglob("cuda_runtime_api.h")).parent.rename(kept)
    return kept


def bring_nvrtc(libraries: Path, scratch: Path, packages: Path) -> None:
    """Puts NVIDIA's own compiler into `libraries`, which needs no GPU."""
    version = cuda_version(packages)
    kept = packages / f"nvrtc-{version}"
    if not kept.exists():
        with zipfile.ZipFile(download(f"nvidia-cuda-nvrtc=={version}.*", scratch)) as archive:
            archive.extractall(scratch / "nvrtc")
        kept.mkdir()
        for library in (scratch / "nvrtc").rglob("*.so*"):
            shutil.move(library, kept)
    for library in kept.iterdir():
        link_or_copy(str(library), str(libraries / library.name))


def bring_bindings(environment: Path) -> None:
    """Puts CuPy and NVIDIA's own binding of NCCL into the environment, where it does not see them already."""
    python = environment / "bin" / "python"
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    for module, packages in BINDINGS.items():
        if subprocess.run([python, "-c", look, module], check=False).returncode:
            run(sys.executable, "-m", "pip", "--python", python, "install", "--disable-pip-version-check", "--quiet",
                "--no-deps", *packages)  # fmt: skip


def hook_cupy(packages: Path, libraries: Path) -> None:
    """Lets Python begin with driver/cupy_hook.py in the environment."""
    lines = [
        f"import sys; sys.path.append({str(HERE.parent)!r})",
        f"from gpu_standin.driver import cupy_hook; cupy_hook.install({str(libraries)!r})",
    ]
    (packages / "gpu_standin_cupy.pth").write_text("; ".join(lines) + "\n")


def sources_digest() -> str:
    """Tells one state of the sources, and the checkout that they lie in, from another."""
    paths = [*HERE.rglob("*.cpp"), *HERE.rglob("*.h"), *(HERE.parent / "kernels_on_cpu").glob("*.h")]
    made_by = [HERE / name for name in ("build.py", "compiling.py", "operators/load.py", "../support/cuda_wheel.py")]
    return digest_of(str(HERE), *sorted(paths), *made_by)


def build(environment: Path, given: Path | None) -> None:
    """Makes the environment, or compiles the stand-in anew in one that is there, where its sources have changed."""
    ready = environment / "ready"
    state = {"torch": modelled_torch(), "sources": sources_digest()}
    found = json.loads(ready.read_text()) if ready.exists() else {}
    if found == state:
        return
    print(f"building the GPU stand-in in {environment} ...", flush=True)
    if found.get("torch") == modelled_torch():
        packages = next((environment / "lib").glob("python*/site-packages"))
    else:
        packages = make_environment(environment)
        bring_torch(packages, modelled_torch(), given, cuda=True)
        if not has_cuda(packages):
            raise BuildError(f"`--torch`: {given} is a build without CUDA")
    ready.write_text(json.dumps({"torch": modelled_torch()}))  # a compilation that fails costs no second download
    libraries = packages / "nvidia" / "cu13" / "lib"
    shutil.rmtree(libraries, ignore_errors=True)
    libraries.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        flags = [
            f"-I{cuda_headers(packages)}",
            f"-I{HERE / 'runtime'}",
            f"-I{HERE.parent / 'kernels_on_cpu'}",
            f"-DNCCL_VERSION_CODE={version_code('nccl', packages)}",
        ]
        for layer in LAYERS:
            compile_layer(layer, libraries, scratch, flags)
        bring_nvrtc(libraries, scratch, packages)
        bring_bindings(environment)
        hook_cupy(packages, libraries)
        cudnn = f"unsigned long cudnnGetVersion(void) {{ return {version_code('cudnn', packages)}; }}"
        stubs = write_stubs(
            packages,
            libraries,
            scratch,
            unknown=UNKNOWN,
            answers={"cudnnGetVersion": cudnn},  # torch asks for it before it finds cuDNN switched off
            links=[libraries / "libcudart.so.13"],
        )
        compile_operators(packages, scratch, flags)
    run(
        environment / "bin" / "python", "-c", "import torch; assert torch.arange(3).cuda().add(1).tolist() == [1, 2, 3]"
    )
    ready.write_text(json.dumps(state))
    print(f"{environment}: torch {modelled_torch()} over the stand-in; {stubs} functions of NVIDIA's are not modelled")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path, help="the folder to make; torch stays in one that is there")
    parser.add_argument("--torch", type=Path, help="a wheel of torch's CUDA build, a folder with it, or it unpacked")
    arguments = parser.parse_args()
    try:
        build(arguments.environment.absolute(), arguments.torch and arguments.torch.absolute())
    except BuildError as error:
        print(f"gpu-standin: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
