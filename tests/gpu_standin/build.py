"""Builds the GPU stand-in: an environment with torch's own CUDA wheel, over a CUDA runtime and an NCCL in host memory.

    python tests/gpu_standin/build.py .venv/gpu-standin                      # make gpu-standin
    python tests/gpu_standin/build.py .venv/gpu-standin --torch FOLDER       # a wheel that is here already

The environment sees the packages of the one that runs this. Its own are torch and, where torch's libraries look for
NVIDIA's (nvidia/cu13/lib beside torch), the stand-in's: the runtime, NCCL, the layers of LAYERS, and for everything
else that torch's libraries want a function that ends the process with its name. Nothing needs to be preloaded.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

NVIDIA_LIBRARY = re.compile(r"lib(cu|nccl|nv)")
"""Names of the libraries that come with NVIDIA's packages."""

EVERYONES_LIBRARY = re.compile(r"(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux[\w-]*)\.so")
"""Names of the libraries of the machine."""


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


class BuildError(Exception):
    """What is missing, and how to get it."""


def run(*command: str | Path) -> str:
    """The output of a command; what it says where it fails goes into the error."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"`{' '.join(map(str, command))[:300]}` failed:\n{done.stderr[-3000:]}")
    return done.stdout


def pinned_torch() -> str:
    """The release of torch that constraints.txt pins."""
    pin = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if pin is None:
        raise BuildError("constraints.txt has no line torch==...")
    return pin[1]


def make_environment(folder: Path) -> Path:
    """An environment in `folder` that sees the packages of this one.

    Returns:
        Its site-packages.
    """
    if folder.exists():
        shutil.rmtree(folder)
    venv.create(folder, symlinks=True, with_pip=False)
    packages = next((folder / "lib").glob("python*/site-packages"))
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "beside.pth").write_text("\n".join(lines) + "\n")
    return packages


def download(requirement: str, folder: Path) -> Path:
    """The one wheel of `requirement`, without what it requires, brought by pip into `folder`."""
    into = Path(tempfile.mkdtemp(dir=folder))
    run(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps",
        "--only-binary", ":all:", "--dest", into, requirement)  # fmt: skip
    return next(into.glob("*.whl"))


def bring_torch(packages: Path, given: Path | None) -> None:
    """Puts torch's CUDA build into `packages`.

    Args:
        packages: Where it goes.
        given: A wheel, a folder with one, or a folder into which one was unpacked, whose files are linked; pip
            downloads it where this is None.
    """
    release = pinned_torch()
    if given is not None and (given / "torch" / "version.py").exists():
        for entry in given.iterdir():
            shutil.copytree(entry, packages / entry.name, copy_function=link_or_copy)
    else:
        with tempfile.TemporaryDirectory(dir=packages) as scratch:
            tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
            if given is None:
                print(f"downloading torch {release}, some 500 MB ...", flush=True)
                wheel = download(f"torch=={release}", Path(scratch))
            elif given.is_dir():
                wheels = sorted(given.glob(f"torch-{release}*-{tag}-*.whl"))
                if not wheels:
                    raise BuildError(f"`--torch`: {given} has no wheel of torch {release} for {tag}")
                wheel = wheels[0]
            else:
                wheel = given
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(packages)
    found = re.search(r"__version__ = '([^']+)'", (packages / "torch" / "version.py").read_text())
    if found is None or found[1].split("+")[0] != release:
        raise BuildError(f"`--torch` is torch {found and found[1]}, constraints.txt pins {release}")
    if not (packages / "torch" / "lib" / "libtorch_cuda.so").exists():
        raise BuildError(
            f"torch {found[1]} has no CUDA part: pip is set to prefer another build (pip config list). Run it without "
            "that setting (PIP_CONFIG_FILE=/dev/null), or give the wheel: make gpu-standin TORCH_CUDA=FOLDER"
        )


def link_or_copy(source: str, target: str) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def cuda_headers(scratch: Path, packages: Path) -> Path:
    """The folder with cuda_runtime_api.h: of a toolkit on this machine, or of NVIDIA's package."""
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):
        toolkits.append(str(Path(nvcc).resolve().parents[1]))
    wanted = re.search(r"cuda: Optional\[str\] = '([\d.]+)'", (packages / "torch" / "version.py").read_text())
    version = wanted[1] if wanted else "13.0"
    toolkits += [f"/usr/local/cuda-{version}", "/usr/local/cuda"]
    for toolkit in toolkits:
        header = Path(toolkit or "/nowhere") / "include" / "cuda_runtime_api.h"
        if header.exists() and f"#define CUDART_VERSION  {int(float(version) * 1000)}" in header.read_text():
            return header.parent
    for package in ("nvidia-cuda-runtime", "nvidia-cuda-crt"):
        with zipfile.ZipFile(download(f"{package}=={version}.*", scratch)) as archive:
            archive.extractall(scratch)
    return next(scratch.rglob("cuda_runtime_api.h")).parent


def version_code(library: str, packages: Path) -> int:
    """The number, as in NCCL_VERSION_CODE, of the release of nccl or cudnn that the wheel requires."""
    metadata = next(packages.glob("torch-*.dist-info/METADATA")).read_text()
    found = re.search(rf"nvidia-{library}-cu\d+==(\d+)\.(\d+)\.(\d+)", metadata)
    if found is None:
        raise BuildError(f"torch's wheel does not say which {library} it requires")
    major, minor, patch = map(int, found.groups())
    return major * 10000 + minor * 100 + patch


def compile_layer(layer: Layer, libraries: Path, scratch: Path, flags: list[str]) -> None:
    """Compiles the sources of a layer into its library."""
    sources = sorted((HERE / layer.folder).glob("*.cpp"))
    objects = [scratch / f"{layer.soname}-{source.stem}.o" for source in sources]

    def compile_one(pair: tuple[Path, Path]) -> None:
        run("c++", "-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", *flags, "-c", pair[0], "-o", pair[1])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, zip(sources, objects, strict=True)))
    needed = [libraries / soname for soname in layer.needs]
    run("c++", "-shared", f"-Wl,-soname,{layer.soname}", "-Wl,-rpath,$ORIGIN", *objects, "-o", libraries / layer.soname,
        *needed, "-lpthread", "-ldl")  # fmt: skip


def compile_operators(packages: Path, scratch: Path, flags: list[str]) -> None:
    """Compiles torch's operators on CUDA tensors, which torch loads by itself: it finds them by an entry point.

    Done anew only where their sources have changed: they include torch's headers, which take a minute.
    """
    folder, information = packages / "gpu_standin_operators", packages / "gpu_standin_operators-0.dist-info"
    sources = sorted((HERE / "operators").glob("*.cpp"))
    digest = hashlib.sha256(pinned_torch().encode())
    for path in [*sources, *sorted((HERE / "operators").glob("*.h")), HERE / "runtime" / "gpu_standin.h"]:
        digest.update(path.read_bytes())
    built = folder / "digest"
    if built.exists() and built.read_text() == digest.hexdigest():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    torch, objects = packages / "torch", [scratch / f"operators-{source.stem}.o" for source in sources]

    def compile_one(pair: tuple[Path, Path]) -> None:
        run("c++", "-std=c++20", "-O1", "-fPIC", "-fopenmp", "-Wall", "-Wextra", "-Werror", *flags,
            "-isystem", torch / "include", "-isystem", torch / "include/torch/csrc/api/include",
            "-c", pair[0], "-o", pair[1])  # fmt: skip

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, zip(sources, objects, strict=True)))
    names = ("libc10.so", "libc10_cuda.so", "libtorch_cpu.so", "libtorch_cuda.so", "libgomp.so.1")
    run("c++", "-shared", "-Wl,-rpath,$ORIGIN/../torch/lib:$ORIGIN/../nvidia/cu13/lib", *objects,
        "-o", folder / "liboperators.so", *(torch / "lib" / name for name in names),
        packages / "nvidia" / "cu13" / "lib" / "libcudart.so.13")  # fmt: skip
    shutil.copy(HERE / "operators" / "load.py", folder / "__init__.py")
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: gpu-standin-operators\nVersion: 0\n")
    (information / "entry_points.txt").write_text("[torch.backends]\ngpu_standin = gpu_standin_operators:load\n")
    built.write_text(digest.hexdigest())


def libraries_of(folder: Path) -> Iterator[Path]:
    """The shared libraries in a folder."""
    yield from (path for path in folder.iterdir() if ".so" in path.name and path.is_file())


def symbols(library: Path, kind: str) -> set[str]:
    """Dynamic symbols of a library, without versions; `kind` is --undefined-only or --defined-only."""
    lines = run("nm", "-D", kind, library).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line.split()[-2] != "w"}


def needed_libraries(library: Path) -> set[str]:
    """What a library asks the loader for."""
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", library)))


def write_stubs(packages: Path, libraries: Path, scratch: Path) -> int:
    """Makes the libraries that are no layer, whose every function ends the process with its name.

    Returns:
        The number of functions.
    """
    own = list(libraries_of(packages / "torch" / "lib"))
    needed = set().union(*(needed_libraries(library) for library in own)) - {library.name for library in own}
    missing = {name for name in needed if NVIDIA_LIBRARY.match(name) and not (libraries / name).exists()}
    wanted = set().union(*(symbols(library, "--undefined-only") for library in own))
    for library in [*own, *libraries_of(libraries), *machine_libraries(needed)]:
        wanted -= symbols(library, "--defined-only")
    lines = ["int gpu_standin_unknown(const char* what);"]
    # torch asks for cuDNN's version before it finds cuDNN switched off
    lines.append(f"unsigned long cudnnGetVersion(void) {{ return {version_code('cudnn', packages)}; }}")
    lines += [
        f'int {name}(void) {{ return gpu_standin_unknown("{name}"); }}' for name in sorted(wanted - {"cudnnGetVersion"})
    ]
    source = scratch / "stubs.c"
    source.write_text("\n".join(lines) + "\n")
    stubs = libraries / "libgpu_standin_stubs.so"
    shared = ("cc", "-shared", "-fPIC", "-O1", "-fno-builtin", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed")
    run(*shared, f"-Wl,-soname,{stubs.name}", source, "-o", stubs, libraries / "libcudart.so.13")
    empty = scratch / "empty.c"
    empty.touch()
    for name in missing:
        run(*shared, f"-Wl,-soname,{name}", empty, "-o", libraries / name, stubs)
    return len(wanted)


def machine_libraries(needed: set[str]) -> list[Path]:
    """Where the machine's own libraries of `needed` lie."""
    found = {name: run("c++", f"-print-file-name={name}").strip() for name in needed if EVERYONES_LIBRARY.match(name)}
    return [Path(path) for path in found.values() if Path(path).is_absolute()]


def bring_nvrtc(libraries: Path, scratch: Path, packages: Path) -> None:
    """Puts NVIDIA's own compiler into `libraries`, which needs no GPU, and CuPy into `packages` where it is missing."""
    wanted = re.search(r"cuda: Optional\[str\] = '([\d.]+)'", (packages / "torch" / "version.py").read_text())
    version = wanted[1] if wanted else "13.0"
    kept = packages / f"nvrtc-{version}"
    if not kept.exists():
        with zipfile.ZipFile(download(f"nvidia-cuda-nvrtc=={version}.*", scratch)) as archive:
            archive.extractall(scratch / "nvrtc")
        kept.mkdir()
        for library in (scratch / "nvrtc").rglob("*.so*"):
            shutil.move(library, kept)
    for library in kept.iterdir():
        link_or_copy(str(library), str(libraries / library.name))
    python = packages.parents[2] / "bin" / "python"
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('cupy') is None)"
    if subprocess.run([python, "-c", look], check=False).returncode:
        run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, "cupy-cuda13x>=14",
            "cuda-pathfinder")  # fmt: skip


def hook_cupy(packages: Path, libraries: Path) -> None:
    """Lets Python begin with driver/cupy_hook.py in the environment."""
    lines = [
        f"import sys; sys.path.append({str(HERE.parent)!r})",
        f"from gpu_standin.driver import cupy_hook; cupy_hook.install({str(libraries)!r})",
    ]
    (packages / "gpu_standin_cupy.pth").write_text("; ".join(lines) + "\n")


def sources_digest() -> str:
    """Tells one state of the sources from another."""
    digest = hashlib.sha256()
    for path in sorted([*HERE.rglob("*"), *(HERE.parent / "kernels_on_cpu").glob("*.h")]):
        if path.suffix in {".cpp", ".h"} or path == Path(__file__).resolve():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def build(environment: Path, given: Path | None) -> None:
    """Makes the environment, or compiles the stand-in anew in one that is there."""
    ready = environment / "ready"
    state = json.loads(ready.read_text()) if ready.exists() else {}
    if state.get("torch") == pinned_torch():
        packages = next((environment / "lib").glob("python*/site-packages"))
        ready.unlink()
    else:
        packages = make_environment(environment)
        bring_torch(packages, given)
    libraries = packages / "nvidia" / "cu13" / "lib"
    shutil.rmtree(libraries, ignore_errors=True)
    libraries.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        flags = [
            f"-I{cuda_headers(scratch, packages)}",
            f"-I{HERE / 'runtime'}",
            f"-I{HERE.parent / 'kernels_on_cpu'}",
            f"-DNCCL_VERSION_CODE={version_code('nccl', packages)}",
        ]
        for layer in LAYERS:
            compile_layer(layer, libraries, scratch, flags)
        bring_nvrtc(libraries, scratch, packages)
        hook_cupy(packages, libraries)
        stubs = write_stubs(packages, libraries, scratch)
        compile_operators(packages, scratch, flags)
    run(
        environment / "bin" / "python", "-c", "import torch; assert torch.arange(3).cuda().add(1).tolist() == [1, 2, 3]"
    )
    ready.write_text(json.dumps({"torch": pinned_torch(), "sources": sources_digest()}))
    print(f"{environment}: torch {pinned_torch()} over the stand-in; {stubs} functions of NVIDIA's are not modelled")


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
