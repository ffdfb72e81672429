"""A kernel's machine code: compiled by nvcc, disassembled by nvdisasm, parsed. Neither needs a GPU.

pip install nvidia-cuda-nvdisasm      # where the toolkit's own nvdisasm is not on PATH
"""

import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gradwire.compressors.kernels.cuda.load import FOLDER, OPTIONS

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w)\s+)?([A-Z]\S*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^\s*([$.\w]+):\s*$")
_TARGET = re.compile(r"`\((\S+?)\)")
_SAID = re.compile(r"Compiling entry function '(\w+)'.*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction."""

    predicate: str
    """Such as `P0`, `!P3` or `UP1`; empty where it always runs."""
    opcode: str
    """With its modifiers: `ISETP.GE.AND`."""
    operands: tuple[str, ...]
    target: int
    """Index of the instruction that it jumps to; -1 where it is no jump."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel as nvcc compiled it for one architecture."""

    name: str
    architecture: int
    """10 major + minor, such as 90."""
    instructions: tuple[Instruction, ...]
    registers: int
    """Of a thread."""
    shared_nbytes: int
    """Of a CTA."""


def find_tool(name: str) -> str:
    """Returns the path of a tool of the CUDA toolkit: on PATH, or from the package nvidia-cuda-NAME.

    Raises:
        FileNotFoundError: It is in neither place.
    """
    found = shutil.which(name)
    if found:
        return found
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{name}") or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    for file in files:
        if file.name == name:
            return str(Path(str(file.locate())).resolve())
    raise FileNotFoundError(f"no {name} on PATH: install the CUDA toolkit, or `pip install nvidia-cuda-{name}`")


def _tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [find_tool(name), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr}")
    return result


def compile_file(name: str, architecture: int) -> dict[str, Kernel]:
    """Compiles one file of csrc/cuda and reads its machine code.

    Args:
        name: The file's, without its suffix.
        architecture: 10 major + minor, such as 90.

    Returns:
        The file's kernels by name.

    Raises:
        FileNotFoundError: There is no nvcc or no nvdisasm.
        RuntimeError: nvcc refuses the source.
    """
    options = [option.replace("-std", "--std") for option in OPTIONS]
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernels.cubin")
        said = _tool(
            "nvcc",
            *options,
            "-Xptxas",
            "-v",
            f"-I{FOLDER}",
            f"-I{FOLDER / 'cuda'}",
            f"-arch=sm_{architecture}",
            "-cubin",
            "-o",
            cubin,
            FOLDER / "cuda" / f"{name}.cu",
        ).stderr
        text = _tool("nvdisasm", "-c", cubin).stdout
    used = {kernel: (int(registers), int(shared or 0)) for kernel, registers, shared in _SAID.findall(said)}
    parts = re.split(r"^//-+ \.text\.(\w+)\s+-+$", text, flags=re.MULTILINE)
    return {
        kernel: Kernel(kernel, architecture, parse(body.split("//---")[0]), *used[kernel])
        for kernel, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def parse(text: str) -> tuple[Instruction, ...]:
    """Returns the instructions of one kernel from nvdisasm's text of its section."""
    labels: dict[str, int] = {}
    lines: list[re.Match[str]] = []
    for line in text.splitlines():
        label, found = _LABEL.match(line), _LINE.search(line)
        if label:
            labels[label[1]] = len(lines)
        if found:
            lines.append(found)

    def instruction(found: re.Match[str]) -> Instruction:
        _, predicate, opcode, rest = found.groups()
        jump = _TARGET.search(rest)
        operands = tuple(part.strip() for part in _TARGET.sub("", rest).split(",") if part.strip())
        return Instruction(predicate or "", opcode, operands, labels[jump[1]] if jump else -1)

    return tuple(map(instruction, lines))
