"""Product and studies are apart: what a command reaches is product, and nothing of the product needs a study."""

import ast
from pathlib import Path

from gradwire.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = {"gradwire.__main__", "gradwire.bench.train.main_job", *(module for module, _ in COMMANDS.values())}
"""What users start: the commands, and `make run`."""

IN_A_CHECKOUT = {"gradwire.bench.studies.gpu.hour"}
"""Studies that a command starts as a process, in a checkout alone: they run the tests, which no wheel has."""


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "gradwire" else ("gradwire", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for folder in ("bench", "gradwire/cli") for file in (ROOT / folder).rglob("*.py")} | {
    "gradwire.__main__": ROOT / "gradwire" / "__main__.py"
}


def needs(module: str) -> set[str]:
    """The modules of `FILES` that one names, in an import or in a string such as `run_forked` takes."""
    named: set[str] = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named.add(node.value)
            if node.value.endswith(".py"):  # a script beside it, that it starts by its file
                named.add(f"{module.rpartition('.')[0]}.{node.value.removesuffix('.py')}")
    return named & FILES.keys()


def test_every_module_is_reached_by_a_command_or_is_a_study() -> None:
    reached: set[str] = set()
    waiting = set(ENTRIES) & FILES.keys()
    while waiting:
        reached |= waiting
        waiting = {needed for module in waiting for needed in needs(module)} - reached - IN_A_CHECKOUT
    assert not [module for module in reached if ".studies" in module], "the product needs a study"
    bench = {name for name, file in FILES.items() if name.startswith("gradwire.bench") and file.name != "__init__.py"}
    lost = {name for name in bench - reached if ".studies" not in name}
    assert not lost, f"no command reaches {sorted(lost)}: move them to bench/studies, or delete them"


def test_every_study_says_which_page_it_feeds() -> None:
    studies = [file for name, file in FILES.items() if name.startswith("gradwire.bench.studies.")]
    alone = [file for file in studies if file.parent.name == "studies" or file.name == "__init__.py"]
    silent = [file.name for file in alone if ".md" not in (ast.get_docstring(ast.parse(file.read_text())) or "")]
    assert not silent, f"no page of docs/ in the docstrings of {silent}"
