"""The folders' layers: who may import whom, also by a string or for types alone, and how many files a folder holds.

What a reader pays for is capped: 20 files in a folder, one class of a name, no edge upward. Lines: test_budgets.py.
"""

import ast
import re
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {
    "topology": {"topology"},
    "compressors": {"compressors"},
    "comms": {"comms", "compressors", "topology"},
    "bench": {"bench", "comms", "compressors", "topology"},
    "gradwire/cli": {"cli", "bench", "comms", "compressors", "topology"},
}
"""Folder -> the folders of ours that it may import."""

FOLDERS = {folder.rpartition("/")[2] for folder in ALLOWED}
NATIVE_DOORS = {"compressors/compiled.py", "bench/emulation/relay.py"}
"""Modules that may import the compiled part: one says to all others what to do where it is missing."""

MOST_FILES = 20
MOST_OF_A_CLASS = {"compressors": (25, 23), "comms": (28, 15)}
"""Folder -> methods and attributes that a class of it has at most. A state of the hook has the methods of a training
state, and those that elastic training overrides."""

STUDIES = "gradwire.bench.studies"

FACTORIES = {
    *(
        "arange",
        "as_tensor",
        "asarray",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "logspace",
        "normal",
        "ones",
    ),
    *("rand", "randint", "randn", "randperm", "scalar_tensor", "sparse_coo_tensor", "tensor", "zeros"),
}
"""Functions of torch whose tensors go to the default device where none is named."""


def python_files() -> list[Path]:
    files = [file for folder in (*ALLOWED, "gradwire") for file in (ROOT / folder).rglob("*.py")]
    # gradwire/ links to the other folders.
    return sorted({file.resolve() for file in files})


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "gradwire" else ("gradwire", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's syntax tree; parsed once for all tests."""
    return tuple(ast.walk(ast.parse(file.read_text(), str(file))))


def body_of(file: Path) -> list[ast.stmt]:
    """What stands in a file at the top."""
    module = nodes_of(file)[0]
    assert isinstance(module, ast.Module)
    return module.body


def is_call_of(node: ast.AST, name: str) -> TypeGuard[ast.Call]:
    """Whether a node calls the function of that name."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def imports(file: Path) -> Iterator[str]:
    """Yields the dotted names that a file imports, wherever and why ever; `from a import b` gives a and a.b."""
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import; write the whole name"
            assert node.module is not None
            if node.module != "gradwire" or not {alias.name for alias in node.names} <= {*FOLDERS, "_native"}:
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
def test_a_folder_imports_only_what_its_layer_allows(folder: str) -> None:
    for file in (file for file in FILES if file.is_relative_to(ROOT / folder)):
        where = str(file.relative_to(ROOT))
        found = {
            ours for name in imports(file) if (ours := our_folder(name)) is not None and ours in (*FOLDERS, "_native")
        }
        allowed = ALLOWED[folder] | ({"_native"} if where in NATIVE_DOORS else set())
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
        bare = {name for name in imports(file) if name.split(".")[0] in FOLDERS}
        assert not bare, f"{file} imports {sorted(bare)}, a second copy of gradwire.*"


def test_no_circle_among_modules() -> None:
    files = {module_name(file): file for file in FILES}
    needs = {
        name: {other for other in imports(file) if other in files and other != name} for name, file in files.items()
    }
    # A package's own __init__ may gather its modules; they do not depend on it.
    left = {name: others - {name.rpartition(".")[0]} for name, others in needs.items()}
    while free := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in free}
    assert not left, f"these modules import each other in a circle: {sorted(left)}"


@pytest.mark.parametrize("folder", ALLOWED)
def test_no_layer_is_reached_by_a_string(folder: str) -> None:
    """`python -m gradwire.bench...` started from topology is an import too."""
    for file in (file for file in FILES if file.is_relative_to(ROOT / folder)):
        for name in module_strings(file):
            ours = our_folder(name)
            assert ours not in FOLDERS - ALLOWED[folder], f"{file.relative_to(ROOT)} names {name} in a string"


def module_strings(file: Path) -> Iterator[str]:
    """Yields the dotted names of gradwire's modules that stand in strings; docstrings and attribute docs aside."""
    prose = {id(node.value) for node in nodes_of(file) if isinstance(node, ast.Expr)}
    for node in nodes_of(file):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield from re.findall(r"\bgradwire(?:\.[a-z_]+)+", node.value)


def test_no_product_needs_a_study() -> None:
    """Studies feed pages of docs/; the wheel does without them."""
    for file in (file for file in FILES if not file.is_relative_to(ROOT / "bench" / "studies")):
        named = [name for name in (*imports(file), *module_strings(file)) if name.startswith(STUDIES)]
        allowed_in_help = file.name == "command.py"  # a help text may say which program wrote a file
        assert not named or (allowed_in_help and not any(name.startswith(STUDIES) for name in imports(file))), (
            f"{file.relative_to(ROOT)} needs {named}"
        )


def test_a_folder_holds_twenty_files_at_most() -> None:
    names = [str(file.relative_to(ROOT)) for file in FILES]
    if (git := shutil.which("git")) is not None:  # who unpacked an archive may have none
        command = [git, "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        names = listed.stdout.split("\n") if listed.returncode == 0 else names
    there = [Path(name) for name in names if name and (ROOT / name).exists()]
    full = {str(folder): count for folder, count in Counter(f.parent for f in there).items() if count > MOST_FILES}
    assert not full, f"more than {MOST_FILES} files: {full}; a folder answers one question: split it by questions"


def test_a_codec_is_described_once() -> None:
    """A class says what it is; what is done with it stands in the base and in each set of kernels, for all alike."""
    operations = {"encode", "decode", "encode_residual", "decode_reduce", "encode_pieces", "decode_pieces"}
    operations |= {"reduce_encode"}
    found = []
    for file in (ROOT / "compressors" / "codecs").glob("*.py"):
        for node in body_of(file):
            if isinstance(node, ast.ClassDef) and "BlockCodec" in {ast.unparse(base) for base in node.bases}:
                found.append(node.name)
                own = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                assert not own & operations, f"{node.name} has operations of its own: {sorted(own & operations)}"
    assert len(found) >= 4
    for file in (ROOT / "compressors" / "kernels").rglob("*.py"):
        of_one = [name for name in imports(file) if name.startswith("gradwire.compressors.codecs")]
        assert not of_one, f"{file.relative_to(ROOT)} imports {of_one}; kernels know formats by `BlockFormat`"


@pytest.mark.parametrize("folder", MOST_OF_A_CLASS)
def test_a_class_is_of_a_size_that_one_can_know(folder: str) -> None:
    most_methods, most_attributes = MOST_OF_A_CLASS[folder]
    for file in (file for file in FILES if file.is_relative_to(ROOT / folder)):
        for node in nodes_of(file):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(each, ast.FunctionDef) for each in node.body)
                where = f"{file.relative_to(ROOT)}: {node.name}"
                assert methods <= most_methods, f"{where} has {methods} methods"
                assert len(attributes_of(node)) <= most_attributes, f"{where} has {sorted(attributes_of(node))}"


def attributes_of(node: ast.ClassDef) -> set[str]:
    """The fields that a class declares, and what its methods assign to `self`."""
    fields = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assigned = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
    }
    return fields | assigned


def test_nobody_asks_for_a_class_of_another_folder() -> None:
    """Compressors, transports and groups declare what differs between them: see `CompressorTraits`, `Abortable`."""
    folders: dict[str, Path] = {}
    for file in FILES:
        for node in body_of(file):
            if isinstance(node, ast.ClassDef):
                made_of = {ast.unparse(each) for each in (*node.bases, *node.decorator_list)}
                data = any(each.startswith(("Protocol", "Generic", "ABC", "dataclass")) for each in made_of)
                if not data and not node.name.endswith("Error"):
                    folders[node.name] = file.parent
    for file in (file for file in FILES if file.is_relative_to(ROOT / "comms")):
        asked: set[str] = set()
        for call in nodes_of(file):
            if is_call_of(call, "isinstance"):
                names = set(re.findall(r"\w+", ast.unparse(call.args[1])))
                asked |= {name for name in names & folders.keys() if folders[name] != file.parent}
        where = str(file.relative_to(ROOT))
        assert not asked, f"{where} asks for {sorted(asked)}"


def test_a_lost_rank_is_noticed_by_one_mechanism() -> None:
    """Each module that detects failures makes a `PeerFailure` of them, and is in the table of failures.py."""
    failures = "gradwire.comms.bootstrap.failures"
    head = ast.get_docstring(ast.parse((ROOT / "comms/bootstrap/failures.py").read_text())) or ""
    package = "gradwire.comms.bootstrap"
    asks = {failures, f"{package}.kernel.listener_state", f"{package}.ring_connections.rank_state"}
    found = {str(file.relative_to(ROOT / "comms")) for file in FILES if asks & set(imports(file))}
    unnamed = [each for each in found if each.removeprefix("bootstrap/") not in head]
    assert len(found) >= 5 and not unnamed, f"{unnamed} have something to say of lost ranks, and failures.py names none"


def test_ranks_agree_by_one_mechanism() -> None:
    """Each module that publishes in the store by itself is in the list of agree.py, which says why."""
    head = ast.get_docstring(ast.parse((ROOT / "comms/bootstrap/agree.py").read_text())) or ""
    found = set()
    for file in (file for file in FILES if file.is_relative_to(ROOT / "comms")):
        for node in nodes_of(file):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of_a_store = re.search("store|polling", ast.unparse(node.func.value))
                if of_a_store and node.func.attr in ("set", "add", "compare_set"):
                    found.add(str(file.relative_to(ROOT / "comms")).removeprefix("bootstrap/"))
    found -= {"agree.py", "store.py"}
    named = set(re.findall(r"[\w/]+\.py", head)) - {"observe/number_exchange.py"}
    assert len(found) > 5 and found == named, f"{found - named} publish by themselves; agree.py names {named - found}"


def test_what_links_give_is_kept_in_one_place() -> None:
    """`Links` alone says which rates count, and a communicator's plans alone tell it of new ones."""
    told = {"Links", "self.links.decide", "self.links.learn"}
    for file in (file for file in FILES if file.is_relative_to(ROOT / "comms")):
        made = {ast.unparse(each.func) for each in nodes_of(file) if isinstance(each, ast.Call)} & told
        assert not made or file == ROOT / "comms/plan/rank_plans.py", f"{file.relative_to(ROOT)} calls {sorted(made)}"


@pytest.mark.parametrize("folder", ["comms", "compressors"])
def test_a_new_tensor_names_its_device(folder: str) -> None:
    """A script may call `torch.set_default_device` for tensors of its own."""
    for file in (file for file in FILES if file.is_relative_to(ROOT / folder)):
        made = [each for each in nodes_of(file) if isinstance(each, ast.Call) and is_factory(each.func)]
        unnamed = [ast.unparse(each) for each in made if "device" not in {keyword.arg for keyword in each.keywords}]
        assert not unnamed, f"{file.relative_to(ROOT)} has no device in {unnamed}"


def is_factory(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch" and node.attr in FACTORIES


def test_plans_ask_no_compressor_for_its_class() -> None:
    """A compressor declares what plans go by: `CompressorTraits`."""
    for file in (file for file in FILES if file.is_relative_to(ROOT / "comms" / "plan")):
        for node in nodes_of(file):
            if is_call_of(node, "isinstance") and "compressor" in ast.unparse(node.args[0]):
                raise AssertionError(f"{file.relative_to(ROOT)}:{node.lineno} asks a compressor for its class")


def test_warnings_name_the_users_line() -> None:
    """`gradwire.compressors.callers.warn` finds it, whatever lies between; a `stacklevel` knows one way alone."""
    for file in (file for file in FILES if file != ROOT / "compressors/callers.py"):
        assert "warnings" not in set(imports(file)), f"{file.relative_to(ROOT)} imports warnings: use `callers.warn`"


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for file in FILES:
        for node in body_of(file):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(file.relative_to(ROOT)))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert not twice, f"name each after what it is, not after its kind: {twice}"
