"""Bytes of other processes are never a pickle, whatever collective brings them."""

import ast
from collections import Counter
from pathlib import Path

import torch.distributed as dist

COMMS = Path(__file__).resolve().parents[3] / "comms"

OWN_BYTES = {"bootstrap/compat.py"}
"""Unpickles what torch's C++ has just made in this process."""


MAY_BE_INFINITE = {
    "comms/bootstrap/agree.py": 2,  # what a caller agrees on: rates of links, which are infinite on one host
    "comms/elastic/residual_notes.py": 1,  # the norm of a residual, which is shown and not used
    "bench/doctor/control.py": 1,  # facts of a rank, whose classes check them
}
"""Files in which messages with numbers that are not finite are read -> in how many places, and why they may be."""


def test_messages_with_infinities_are_few() -> None:
    found: Counter[str] = Counter()
    for file in (*COMMS.rglob("*.py"), *(COMMS.parent / "bench" / "doctor").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and any(
                each.arg == "finite" and isinstance(each.value, ast.Constant) for each in node.keywords
            ):
                found[str(file.relative_to(COMMS.parent))] += 1
    assert found == MAY_BE_INFINITE


def names_of(file: Path) -> set[str]:
    """Every name that a file imports, calls or asks for, the last part of dotted ones."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import() | ast.ImportFrom():
                found |= {each.name for each in node.names}
                found |= {node.module or ""} if isinstance(node, ast.ImportFrom) else set()
            case ast.Attribute(attr=name) | ast.Name(id=name):
                found.add(name)
    return found


def test_no_pickle_comes_from_another_rank() -> None:
    of_objects = {name for name in dir(dist) if "object" in name.lower()}
    assert {"all_gather_object", "gather_object", "broadcast_object_list"} <= of_objects
    for file in COMMS.rglob("*.py"):
        where, found = str(file.relative_to(COMMS)), names_of(file)
        assert not found & of_objects, f"{where} has {found & of_objects}: use gather_bytes and a MessageType"
        assert where in OWN_BYTES or not found & {"pickle", "cPickle", "dill", "marshal", "shelve"}, where


def test_one_parser_reads_json() -> None:
    """What a process reads of its own environment is no message."""
    own = {"config.py", "boundary/messages.py"}
    found = {
        str(file.relative_to(COMMS))
        for file in COMMS.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.loads", "json.load", "zlib.decompress")
    }
    assert found <= own, f"{found - own}: use a MessageType, parsed or inflated"


def test_torch_loads_tensors_and_plain_values_alone() -> None:
    for file in COMMS.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                safe = {each.arg for each in node.keywords if isinstance(each.value, ast.Constant) and each.value.value}
                assert "weights_only" in safe, f"{file.relative_to(COMMS)}:{node.lineno}"


def test_the_check_finds_what_it_looks_for(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("import pickle\nfrom torch import distributed as d\nd.all_gather_object([], 1)\n")
    assert {"pickle", "all_gather_object"} <= names_of(file)
