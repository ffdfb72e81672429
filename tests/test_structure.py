"""The files of a bucket's path name no optional feature, and each message to users names gradwire as its sender."""

import ast
import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

COMMS = Path(__file__).resolve().parents[1] / "comms"
CORE = ("hook.py", "communicator.py", "session.py", "run", "transport/groups.py")
"""Files and folders that everybody reads who follows a bucket."""

FEATURES = re.compile(r"elastic|samples|resume|used_?map|first_?steps", re.IGNORECASE)
MOST_LINES_OF_THE_HOOK = 500
"""With comments and docstrings; 610, with fewer of them, when the hook held a branch for each feature."""

MOST_LINES_WITH_ELASTIC = {"communicator.py": 3, "session.py": 3, "run": 0, "transport/groups.py": 0}
"""File or folder -> lines that name elastic training: a condition on the option, and descriptions."""


def lines_with(pattern: re.Pattern[str], place: str) -> list[str]:
    """Returns the lines of a file, or of all Python files in a folder, that match."""
    path = COMMS / place
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    assert files, place
    return [line.strip() for file in files for line in file.read_text().splitlines() if pattern.search(line)]


def test_the_hook_names_no_feature() -> None:
    assert lines_with(FEATURES, "hook.py") == []


def test_the_hook_is_read_in_one_go() -> None:
    assert len((COMMS / "hook.py").read_text().splitlines()) <= MOST_LINES_OF_THE_HOOK


@pytest.mark.parametrize("place", MOST_LINES_WITH_ELASTIC)
def test_the_core_hardly_names_elastic_training(place: str) -> None:
    found = lines_with(re.compile("elastic", re.IGNORECASE), place)
    assert len(found) <= MOST_LINES_WITH_ELASTIC[place], found


def test_names_of_features_are_found() -> None:
    assert lines_with(FEATURES, "step/features.py")
    assert set(MOST_LINES_WITH_ELASTIC) | {"hook.py"} == set(CORE)


MESSENGERS = ("comms", "compressors", "gradwire", "topology")
"""Packages that run in a user's job."""


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """Everything in a file; each is read once for all tests."""
    return tuple(ast.walk(ast.parse(file.read_text())))


def calls_of(name: str) -> Iterator[tuple[Path, ast.Call]]:
    """Yields each call of a function or method of this name in `MESSENGERS`, with its file."""
    for package in MESSENGERS:
        for file in sorted((COMMS.parent / package).rglob("*.py")):
            for node in nodes_of(file):
                if not isinstance(node, ast.Call):
                    continue
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
                if called == name:
                    yield file, node


def test_all_messages_go_through_the_logger_that_names_the_sender(caplog: pytest.LogCaptureFixture) -> None:
    loggers = [(file.name, ast.unparse(call)) for file, call in calls_of("getLogger")]
    assert loggers
    assert [each for each in loggers if each[1] != "logging.getLogger('gradwire')"] == []
    with caplog.at_level(logging.WARNING, "gradwire"):
        logging.getLogger("gradwire").warning("watch: %d ranks", 2)
        logging.getLogger("gradwire").warning("gradwire: no second prefix")
    assert caplog.messages == ["gradwire: watch: 2 ranks", "gradwire: no second prefix"]


def test_warnings_are_issued_in_one_place_that_names_the_sender() -> None:
    direct = {file.name for file, call in calls_of("warn") if ast.unparse(call.func) == "warnings.warn"}
    assert direct == set()
    assert {file.name for file, _ in calls_of("warn_explicit")} == {"callers.py"}


SHIPPED = (*MESSENGERS, "bench")
"""Packages of the wheel, which has no docs/."""

PAGES = {path.relative_to(COMMS.parent / "docs") for path in (COMMS.parent / "docs").rglob("*.md")}
OWN_PAGE = re.compile(
    "|".join([r"\bdocs/", *(rf"\b{re.escape(str(path.with_suffix('')))}\b" for path in PAGES if path.parent.name)])
)


def texts_of(nodes: tuple[ast.AST, ...]) -> Iterator[ast.Constant]:
    """Yields the texts in a file that are no docstrings."""
    described = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
            yield node


def test_messages_name_a_page_where_readers_of_an_installed_wheel_find_it() -> None:
    """By `topology.wording.page`, whose argument is a page that there is."""
    root, pages = COMMS.parent, set[str]()
    for file in (file for folder in SHIPPED for file in sorted((root / folder).rglob("*.py"))):
        if file.is_relative_to(root / "bench" / "studies") or file == root / "topology" / "wording.py":
            continue
        nodes = nodes_of(file)
        named = {
            id(node.args[0]): ast.literal_eval(node.args[0])
            for node in nodes
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "page"
        }
        pages.update(named.values())
        wrong = [node.value for node in texts_of(nodes) if OWN_PAGE.search(str(node.value)) and id(node) not in named]
        assert not wrong, f"{file}: {wrong}; name it by `page(...)` of topology/wording.py"
    assert pages and set(map(Path, pages)) <= PAGES
