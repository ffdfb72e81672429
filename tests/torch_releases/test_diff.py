"""`make torch-diff` names what another torch has changed, and what gradwire relies on is all in its tables."""

import ast
import re
import sys
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from gradwire.comms.bootstrap.compat import UNDECLARED
from support.cuda_wheel import listed_releases
from torch_releases import diff as torch_diff

sources = cache(lambda: torch_diff.sources(torch_diff.installed))
"""What the installed torch has; read by the first test that asks, not by each worker that collects."""

PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"


def test_every_release_that_is_tested_was_recorded() -> None:
    known = torch_diff.recorded()
    assert set(known) == set(listed_releases())
    names = set(torch_diff.sources(lambda _: None))
    assert all(set(each) == names for each in known.values()), "the tables have changed: record every release again"
    gone = [name for name in names if all(each[name] is None for each in known.values())]
    assert not gone, gone


def test_the_installed_torch_is_what_was_read() -> None:
    release = metadata.version("torch").partition("+")[0]
    found = torch_diff.hashes(sources())
    wanted = torch_diff.recorded()[release]
    assert {name for name in wanted if wanted[name] != found[name]} == set()


def private_names(module: str) -> set[str]:
    """Private attributes that a module of gradwire asks other objects for, by their name or by a string."""
    found = set()
    for node in ast.walk(ast.parse((torch_diff.ROOT / module).read_text())):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found.add(node.attr)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
    return {name for name in found if re.match(r"_[A-Za-z]", name)} - {"_C", "_distributed_c10d"}


@pytest.mark.parametrize("module", torch_diff.TABLES)
def test_a_private_name_is_in_the_table_of_its_module(module: str) -> None:
    found = {name: source for name, source in sources().items() if torch_diff.user_of(name) == module}
    text = "\n".join([*found, *(source.text for source in found.values() if source is not None)])
    declared = set(re.findall(r"\w+", text)) | set(UNDECLARED)
    assert private_names(module) <= declared, private_names(module) - declared


def test_comments_and_docstrings_count_for_nothing() -> None:
    def of(text: str) -> torch_diff.Source | None:
        return torch_diff.python_of(ast.parse(text), "A.f")

    plain = of("class A:\n    def f(self): return (1 +\n        2)\n")
    noted = of('class A:\n    if True:\n        def f(self):\n            "3"\n            return 1 + 2  # 3\n')
    assert plain is not None and noted is not None and plain.hash == noted.hash
    other = of("class A:\n    def f(self): return 1 + 3\n")
    assert other is not None and other.hash != plain.hash
    assert of("class A:\n    def g(self): ...\n") is None
    assert torch_diff.header_of("int a; // one\n/* two\n */ int b;").hash == torch_diff.header_of("int a;\nint b;").hash
    assert torch_diff.header_of("int a;").hash != torch_diff.header_of("int b;").hash


@pytest.mark.parametrize("lazy", [0, 1])
def test_a_python_that_knows_lazy_imports_reads_the_same_in_others(lazy: int) -> None:
    """What 3.15 makes of an import has the field, whichever Python this is."""
    older = type("Import", (ast.Import,), {"_fields": ("names",)})(names=[ast.alias("one")])
    newer = type("Import", (ast.Import,), {"_fields": ("names", "is_lazy")})(names=[ast.alias("one")], is_lazy=lazy)
    assert (torch_diff._structure(newer) == torch_diff._structure(older)) == (not lazy)


def test_another_torch_is_compared_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group, state = (f"torch/distributed/fsdp/_fully_shard/_fsdp_{name}.py" for name in ("param_group", "state"))
    with zipfile.ZipFile(tmp_path / f"torch-99.1.0-{PYTHON}-{PYTHON}-any.whl", "w") as wheel:
        for path in {path for table in torch_diff.TABLES.values() for path in table}:
            text = torch_diff.installed(path)
            assert text is not None, path
            if path == group:
                text = text.replace("def post_backward(self, *unused: Any):", "def post_backward(self, *other: Any):")
            if path == state:
                text = text.replace("def _lazy_init(", "def _renamed(").replace("# ", "#  ")
            wheel.writestr(path, text)
    release = metadata.version("torch").partition("+")[0]
    monkeypatch.setattr(torch_diff, "HASHES", tmp_path / "hashes.json")

    def run(*words: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["torch_diff.py", *words])
        status = torch_diff.main()
        return status, capsys.readouterr().out.splitlines()

    assert run(release, "--record")[0] == 0
    status, (first, second, *rest) = run("99.1.0", "--wheels", str(tmp_path))
    assert status == 1 and len(rest) == 2
    assert {line.split("   ")[0].split(None, 1)[0] + line.rpartition("::")[2] for line in (first, second)} == {
        "changedFSDPParamGroup.post_backward   (comms/sharded/param_groups.py)",
        "goneFSDPState._lazy_init   (comms/sharded/param_groups.py)",
    }
    _, shown = run("99.1.0", "--wheels", str(tmp_path), "--show")
    assert "    +def post_backward(self, *other: Any):" in shown
    assert run("99.1.0", "--wheels", str(tmp_path), "--record")[0] == 0
    assert run("99.1.0", "--wheels", str(tmp_path))[0] == 0
