"""torch's CUDA wheel without NVIDIA's packages: an environment of its own, and stubs for the libraries it asks for.

A wheel from PyPI needs 3 GB of nvidia-* packages to be imported; on a machine without a GPU nothing of them is run.
`make_cpu_environment` gives the wheel a stub in the place of each function, and it computes on CPU tensors. The GPU
stand-in (tests/gpu_standin) puts its own libraries in the place of some of them.
"""

import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

NVIDIA_LIBRARY = re.compile(r"lib(cu|nccl|nv)")
"""Names of the libraries that come with NVIDIA's packages."""

EVERYONES_LIBRARY = re.compile(r"(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|libz|ld-linux[\w-]*)\.so")
"""Names of the libraries of the machine."""

STUBS = "libtorch_wheel_stubs.so"


ROOT = Path(__file__).resolve().parents[2]


class BuildError(Exception):
    """What is missing, and how to get it."""


def run(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    """The output of a command; what it says where it fails goes into the error."""
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise BuildError(f"`{' '.join(map(str, command))[:300]}` failed:\n{done.stderr[-3000:]}")
    return done.stdout


def listed_releases() -> list[str]:
    """The releases of torch that constraints.txt lists: what gradwire is tested on, the newest first."""
    listed = re.search(r"^# torch: (.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if listed is None:
        raise BuildError("constraints.txt has no line `# torch: ...`")
    return listed[1].split()


def make_environment(folder: Path) -> Path:
    """An environment in `folder` that sees the packages of this one, behind its own.

    Returns:
        Its site-packages.
    """
    if folder.exists():
        shutil.rmtree(folder)
    venv.create(folder, symlinks=True, with_pip=False)
    packages = next((folder / "lib").glob("python*/site-packages"))
    # With this environment's .pth files, so that an editable install is seen, too.
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "beside.pth").write_text("\n".join(lines) + "\n")
    return packages


def download(requirement: str, folder: Path) -> Path:
    """The one wheel of `requirement`, without what it requires, brought by pip into `folder`."""
    into = Path(tempfile.mkdtemp(dir=folder))
    run(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps",
        "--only-binary", ":all:", "--dest", into, requirement)  # fmt: skip
    return next(into.glob("*.whl"))


def find_wheel(folder: Path, release: str) -> Path | None:
    """The wheel of a release of torch for this Python in a folder, or in one inside it; None where there is none."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return next(iter(sorted(folder.rglob(f"torch-{release}[-+]*{tag}-*.whl"))), None)


def bring_torch(packages: Path, release: str, given: Path | None, *, cuda: bool) -> None:
    """Puts a wheel of torch into `packages`, and nothing of what it requires.

    Args:
        packages: Where it goes.
        release: `2.15.0`.
        given: A wheel, a folder with one, or a folder into which one was unpacked, whose files are linked; pip
            downloads it where this is None.
        cuda: Whether pip must bring the build for CUDA; else it brings the one that it prefers.

    Raises:
        BuildError: What is given is another release, or there is none.
    """
    if given is not None and (given / "torch" / "version.py").exists():
        for entry in given.iterdir():
            shutil.copytree(entry, packages / entry.name, copy_function=link_or_copy)
    else:
        with tempfile.TemporaryDirectory(dir=packages) as scratch:
            if given is None:
                print(f"downloading torch {release}, some 500 MB ...", flush=True)
                # === leaves out releases with a suffix, as 2.13.0+cpu, which pip prefers where it finds one
                wheel: Path | None = download(f"torch{'===' if cuda else '=='}{release}", Path(scratch))
            else:
                wheel = find_wheel(given, release) if given.is_dir() else given
            if wheel is None:
                raise BuildError(f"`--torch`: {given} has no wheel of torch {release} for this Python")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(packages)
    found = re.search(r"__version__ = '([^']+)'", (packages / "torch" / "version.py").read_text())
    if found is None or found[1].split("+")[0] != release:
        raise BuildError(f"`--torch` is torch {found and found[1]}, wanted {release}")


def has_cuda(packages: Path) -> bool:
    """Whether the torch in `packages` is a build for CUDA."""
    return (packages / "torch" / "lib" / "libtorch_cuda.so").exists()


def link_or_copy(source: str, target: str) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def version_code(library: str, packages: Path) -> int:
    """The number, as in NCCL_VERSION_CODE, of the release of nccl or cudnn that the wheel requires."""
    metadata = next(packages.glob("torch-*.dist-info/METADATA")).read_text()
    found = re.search(rf"nvidia-{library}-cu\d+==(\d+)\.(\d+)\.(\d+)", metadata)
    if found is None:
        raise BuildError(f"torch's wheel does not say which {library} it requires")
    major, minor, patch = map(int, found.groups())
    return major * 10000 + minor * 100 + patch


def libraries_of(folder: Path) -> Iterator[Path]:
    """The shared libraries in a folder."""
    yield from (path for path in folder.iterdir() if ".so" in path.name and path.is_file())


def symbols(library: Path, kind: str, tools: str = "") -> set[str]:
    """Dynamic symbols of a library, without versions; `kind` is --undefined-only or --defined-only."""
    lines = run(f"{tools}nm", "-D", kind, library).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line.split()[-2] != "w"}


def needed_libraries(library: Path, tools: str = "") -> set[str]:
    """What a library asks the loader for."""
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", run(f"{tools}readelf", "-d", library)))


def machine_libraries(needed: set[str], tools: str = "") -> list[Path]:
    """Where the machine's own libraries of `needed` lie."""
    compiler = f"{tools}g++" if tools else "c++"
    names = [name for name in needed if EVERYONES_LIBRARY.match(name)]
    found = {name: run(compiler, f"-print-file-name={name}").strip() for name in names}
    return [Path(path) for path in found.values() if Path(path).is_absolute()]


def write_stubs(
    packages: Path,
    libraries: Path,
    scratch: Path,
    *,
    unknown: str,
    answers: Mapping[str, str],
    links: Sequence[Path] = (),
    tools: str = "",
) -> int:
    """Makes every NVIDIA library that torch's ask for and that is not in `libraries`.

    Args:
        packages: Where torch is.
        libraries: Where they go, a folder of torch's RUNPATH.
        scratch: For the sources.
        unknown: C source of, or a declaration of, `int unknown_call(const char* what)`, which every function calls
            with its name that has no answer.
        answers: Functions that do something else: name -> its C definition.
        links: Libraries that the sources need.
        tools: What the names of the compiler and of nm begin with, `aarch64-linux-gnu-`, where torch is another
            processor's.

    Returns:
        The number of functions without an answer.
    """
    own = list(libraries_of(packages / "torch" / "lib"))
    needed = set().union(*(needed_libraries(library, tools) for library in own)) - {library.name for library in own}
    missing = {name for name in needed if NVIDIA_LIBRARY.match(name) and not (libraries / name).exists()}
    wanted = set().union(*(symbols(library, "--undefined-only", tools) for library in own))
    for library in [*own, *libraries_of(libraries), *machine_libraries(needed, tools)]:
        wanted -= symbols(library, "--defined-only", tools)
    answered = {name: text for name, text in answers.items() if name in wanted}
    wanted -= answered.keys()
    source = scratch / "stubs.c"
    lines = [f'int {name}(void) {{ return unknown_call("{name}"); }}' for name in sorted(wanted)]
    source.write_text("\n".join([unknown, *answered.values(), *lines]) + "\n")
    stubs = libraries / STUBS
    shared = (
        f"{tools}gcc" if tools else "cc",
        "-shared",
        "-fPIC",
        "-O1",
        "-fno-builtin",
        "-Wl,-rpath,$ORIGIN",
        "-Wl,--no-as-needed",
    )
    run(*shared, f"-Wl,-soname,{stubs.name}", source, "-o", stubs, *links)
    empty = scratch / "empty.c"
    empty.touch()
    for name in missing:
        run(*shared, f"-Wl,-soname,{name}", empty, "-o", libraries / name, stubs)
    return len(wanted)


ENDS_THE_PROCESS = """
#include <stdio.h>
#include <stdlib.h>
static int unknown_call(const char* what) {
  fprintf(stderr, "torch called %s, and NVIDIA's packages are not installed\\n", what);
  abort();
}
"""

NO_DEVICE = 100
"""cudaErrorNoDevice."""


def answers_without_device(packages: Path) -> dict[str, str]:
    """What torch's CUDA build asks on a machine without a GPU, and is told: C definitions by name."""
    device, nccl = "no CUDA-capable device is detected", version_code("nccl", packages)
    registered = ("FatBinary", "FatBinaryEnd", "Function", "Var", "ManagedVar", "HostVar", "Texture", "Surface")
    # At load time, by the code that nvcc has put in front of every kernel.
    names = [f"__cuda{verb}{name}" for verb in ("Register", "Unregister") for name in registered]
    answers = {name: f"void* {name}(void) {{ static void* handle; return &handle; }}" for name in names}
    return answers | {
        "__cudaInitModule": "int __cudaInitModule(void) { return 1; }",
        "cudaGetDeviceCount": f"int cudaGetDeviceCount(int* count) {{ *count = 0; return {NO_DEVICE}; }}",
        "cudaDriverGetVersion": "int cudaDriverGetVersion(int* version) { *version = 0; return 0; }",
        "cudaGetLastError": "int cudaGetLastError(void) { return 0; }",
        "cudaPeekAtLastError": "int cudaPeekAtLastError(void) { return 0; }",
        "cudaGetErrorString": f'const char* cudaGetErrorString(int error) {{ return "{device}"; }}',
        "cudaGetErrorName": 'const char* cudaGetErrorName(int error) { return "cudaErrorNoDevice"; }',
        "cudnnGetVersion": f"unsigned long cudnnGetVersion(void) {{ return {version_code('cudnn', packages)}; }}",
        "ncclGetVersion": f"int ncclGetVersion(int* version) {{ *version = {nccl}; return 0; }}",
    }


def make_cpu_environment(folder: Path, release: str, given: Path | None) -> Path:
    """An environment with a release of torch for CPU tensors, whichever build it is, and this environment's packages.

    Args:
        folder: For the environment; replaced if it exists.
        release: `2.15.0`.
        given: See `bring_torch`.

    Returns:
        Its interpreter.

    Raises:
        BuildError: See `bring_torch`; or there is no C compiler.
    """
    packages = make_environment(folder)
    bring_torch(packages, release, given, cuda=False)
    if has_cuda(packages):
        libraries = packages / "nvidia" / "cu13" / "lib"
        libraries.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as scratch:
            write_stubs(
                packages, libraries, Path(scratch), unknown=ENDS_THE_PROCESS, answers=answers_without_device(packages)
            )
    python = folder / "bin" / "python"
    run(python, "-c", "import torch; assert torch.arange(3).add(1).tolist() == [1, 2, 3]")
    return python


NOT_NEEDED = re.compile(r"^Requires-Dist: (nvidia-|cuda-|triton)[^\n]*\n", re.MULTILINE)
"""What torch's CUDA build requires and no CPU tensor needs."""


def write_cpu_wheel(wheel: Path, into: Path, tools: str = "") -> Path:
    """PyPI's wheel of torch for CUDA as one for CPU tensors, which pip installs like any other.

    It has stubs in the place of NVIDIA's libraries, requires none of NVIDIA's packages, and is called `+cpu`, as the
    builds are that have no CUDA.

    Args:
        wheel: Of any Python; nothing of it is run.
        into: A folder for the new one.
        tools: See `write_stubs`.

    Raises:
        BuildError: It is no build for CUDA; or there is no C compiler.
    """
    name, version, tags = wheel.name.removesuffix(".whl").split("-", 2)
    version = f"{version.partition('+')[0]}+cpu"
    made = into / f"{name}-{version}-{tags}.whl"
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        packages = Path(scratch, "wheel")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
        if not has_cuda(packages):
            raise BuildError(f"`{wheel.name}` is no build for CUDA: pip can install it as it is")
        libraries = packages / "nvidia" / "cu13" / "lib"
        libraries.mkdir(parents=True)
        answers = answers_without_device(packages)
        write_stubs(packages, libraries, Path(scratch), unknown=ENDS_THE_PROCESS, answers=answers, tools=tools)
        [information] = packages.glob("*.dist-info")
        information = information.rename(packages / f"{name}-{version}.dist-info")
        metadata, code = information / "METADATA", packages / "torch" / "version.py"
        text = re.sub(r"^Version: .*$", f"Version: {version}", metadata.read_text(), count=1, flags=re.MULTILINE)
        metadata.write_text(NOT_NEEDED.sub("", text))
        code.write_text(re.sub(r"__version__ = '[^']+'", f"__version__ = '{version}'", code.read_text()))
        record = information / "RECORD"
        record.unlink()
        files = sorted(path.relative_to(packages) for path in packages.rglob("*") if path.is_file())
        # Hashes are left out, as the format allows: pip compares none.
        record.write_text("".join(f'"{path}",,\n' for path in [*files, record.relative_to(packages)]))
        part = made.with_suffix(".part")
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for path in [*files, record.relative_to(packages)]:
                archive.write(packages / path, path)
        part.rename(made)
    return made
