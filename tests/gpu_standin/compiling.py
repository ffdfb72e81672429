"""Compiles the stand-in's libraries: the layers, and torch's operators on CUDA tensors."""

import hashlib
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from support.cuda_wheel import run

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True, slots=True)
class Layer:
    """One library: the sources of a folder, under the name by which torch's libraries look for it."""

    soname: str
    folder: str
    needs: tuple[str, ...] = ()


LAYERS = (
    Layer("libcudart.so.13", "runtime"),
    Layer("libcuda.so.1", "driver", needs=("libcudart.so.13",)),
    Layer("libnccl.so.2", "runtime/nccl", needs=("libcudart.so.13",)),
)


def compile_all(sources: Iterable[Path], scratch: Path, flags: list[str]) -> list[Path]:
    """Compiles each source into an object file in `scratch`; through ccache where the machine has it.

    Returns:
        The object files.
    """
    launcher = os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER") or shutil.which("ccache")
    compiler = [*([launcher] if launcher else []), "c++", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", *flags]
    # ccache then finds what was compiled in another checkout of the same sources
    base = {"CCACHE_BASEDIR": str(ROOT)} | os.environ

    def compile_one(source: Path) -> Path:
        compiled = scratch / f"{source.stem}.o"
        run(*compiler, "-c", source, "-o", compiled, environment=base)
        return compiled

    scratch.mkdir()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, sources))


def digest_of(*parts: object) -> str:
    """Tells one state of things from another; a path stands for its name and what is in the file."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.name.encode() + part.read_bytes() if isinstance(part, Path) else str(part).encode())
    return digest.hexdigest()


def compile_layer(layer: Layer, libraries: Path, scratch: Path, flags: list[str]) -> None:
    """Compiles the sources of a layer into its library."""
    sources = sorted((HERE / layer.folder).glob("*.cpp"))
    objects = compile_all(sources, scratch / layer.soname, ["-std=c++17", *flags])
    needed = [libraries / soname for soname in layer.needs]
    run("c++", "-shared", f"-Wl,-soname,{layer.soname}", "-Wl,-rpath,$ORIGIN", *objects, "-o", libraries / layer.soname,
        *needed, "-lpthread", "-ldl")  # fmt: skip


def compile_operators(packages: Path, scratch: Path, flags: list[str]) -> None:
    """Compiles torch's operators on CUDA tensors, which torch loads by itself: it finds them by an entry point.

    Done anew only where their sources have changed: they include torch's headers, which take a minute.
    """
    folder, information = packages / "gpu_standin_operators", packages / "gpu_standin_operators-0.dist-info"
    sources = sorted((HERE / "operators").glob("*.cpp"))
    texts = [*sources, *sorted((HERE / "operators").glob("*.h")), HERE / "operators" / "load.py"]
    state = digest_of(*texts, HERE / "runtime" / "gpu_standin.h", packages / "torch" / "version.py")
    built = folder / "digest"
    if built.exists() and built.read_text() == state:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    torch = packages / "torch"
    headers = ["-isystem", str(torch / "include"), "-isystem", str(torch / "include/torch/csrc/api/include")]
    objects = compile_all(sources, scratch / "operators", ["-std=c++20", "-fopenmp", *flags, *headers])
    names = ("libc10.so", "libc10_cuda.so", "libtorch_cpu.so", "libtorch_cuda.so", "libgomp.so.1")
    run("c++", "-shared", "-Wl,-rpath,$ORIGIN/../torch/lib:$ORIGIN/../nvidia/cu13/lib", *objects,
        "-o", folder / "liboperators.so", *(torch / "lib" / name for name in names),
        packages / "nvidia" / "cu13" / "lib" / "libcudart.so.13")  # fmt: skip
    shutil.copy(HERE / "operators" / "load.py", folder / "__init__.py")
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: gpu-standin-operators\nVersion: 0\n")
    (information / "entry_points.txt").write_text("[torch.backends]\ngpu_standin = gpu_standin_operators:load\n")
    built.write_text(state)
