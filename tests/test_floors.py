"""The folders' floors: who may import whom, and how long files and functions may be."""

import ast
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {
    "topology": {"topology"},
    "compressors": {"compressors"},
    "comms": {"comms", "compressors", "topology"},
    "bench": {"bench", "comms", "compressors", "topology"},
}
"""Folder -> the folders of ours that it may import."""

NATIVE_DOORS = {"compressors/kernels/native.py"}
"""Modules of `compressors` that may import the compiled part; kernels.py chooses between it and the others."""

MOST_LINES = 300
MOST_MEDIAN_LINES = 130
MOST_FUNCTION_LINES = 30


def python_files() -> list[Path]:
    files = [file for folder in (*ALLOWED, "gradwire") for file in (ROOT / folder).rglob("*.py")]
    # gradwire/ links to the other folders.
    return sorted({file.resolve() for file in files})


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "gradwire" else ("gradwire", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path, *, top_level: bool = False) -> Iterator[str]:
    """Yields the dotted names that a file imports; `from a import b` gives a and a.b."""
    tree = ast.parse(file.read_text(), str(file))
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import; write the whole name"
            assert node.module is not None
            if node.module != "gradwire" or not {alias.name for alias in node.names} <= {*ALLOWED, "_native"}:
                yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def our_folder(name: str) -> str | None:
    """The folder (or top-level module) of ours that a dotted name belongs to."""
    parts = name.split(".")
    return parts[1] if parts[0] == "gradwire" and len(parts) > 1 else None


FILES = python_files()


def test_there_is_something_to_check() -> None:
    assert len(FILES) >= len(ALLOWED)
    assert all((ROOT / folder).is_dir() for folder in ALLOWED)


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_what_its_floor_allows(folder: str) -> None:
    for file in (file for file in FILES if file.is_relative_to(ROOT / folder)):
        where = str(file.relative_to(ROOT))
        found = {
            ours for name in imports(file) if (ours := our_folder(name)) is not None and ours in (*ALLOWED, "_native")
        }
        allowed = ALLOWED[folder] | ({"_native"} if folder == "comms" or where in NATIVE_DOORS else set())
        assert found <= allowed, f"{where} imports {sorted(found - allowed)}"


def test_only_the_bench_imports_the_package_root() -> None:
    """The root gathers the public names from all folders: a folder that imports it would close a circle."""
    for file in (file for file in FILES if file.relative_to(ROOT).parts[0] in ("topology", "compressors", "comms")):
        assert "gradwire" not in set(imports(file)), f"{file} imports gradwire itself; import the module that is meant"


def test_topology_needs_no_torch() -> None:
    for file in (file for file in FILES if file.is_relative_to(ROOT / "topology")):
        assert not any(name.split(".")[0] == "torch" for name in imports(file)), f"{file} imports torch"


def test_bare_folder_names_are_never_imported() -> None:
    for file in FILES:
        bare = {name for name in imports(file) if name.split(".")[0] in ALLOWED}
        assert not bare, f"{file} imports {sorted(bare)}, a second copy of gradwire.*"


def test_no_circle_among_modules() -> None:
    files = {module_name(file): file for file in FILES}
    needs = {
        name: {other for other in imports(file, top_level=True) if other in files and other != name}
        for name, file in files.items()
    }
    # A package's own __init__ may gather its modules; they do not depend on it.
    left = {name: others - {name.rpartition(".")[0]} for name, others in needs.items()}
    while free := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in free}
    assert not left, f"these modules import each other in a circle: {sorted(left)}"


def test_no_file_is_long() -> None:
    native = itertools.chain.from_iterable((ROOT / "csrc").rglob(f"*.{suffix}") for suffix in ("cpp", "cu", "cuh", "h"))
    tests = (ROOT / "tests").rglob("*.py")
    long = {
        str(file.relative_to(ROOT)): lines
        for file in (*FILES, *native, *tests)
        if (lines := len(file.read_text().splitlines())) > MOST_LINES
    }
    assert not long, f"more than {MOST_LINES} lines: {long}; one idea a file"


def test_the_median_file_is_short() -> None:
    lengths = [lines for file in FILES if (lines := len(file.read_text().splitlines())) > 1]
    assert statistics.median(lengths) <= MOST_MEDIAN_LINES


def test_functions_are_short() -> None:
    lengths = {
        f"{file.relative_to(ROOT)}:{node.name}": function_lines(node)
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    ordered = sorted(lengths.values())
    percentile = ordered[int(0.9 * (len(ordered) - 1))]
    longest = sorted(lengths, key=lengths.__getitem__)[-8:]
    assert percentile <= MOST_FUNCTION_LINES, f"90th percentile {percentile} lines; the longest: {longest}"


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body, its docstring aside: explaining more must not count against it."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    signature = node.body[0].lineno - node.lineno
    return signature + (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else signature
