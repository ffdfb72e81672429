"""The lists of what `make test-fast` and `make test` leave out (slow.txt, long.txt) name tests that there are."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_line_is_the_beginning_of_a_test(tiers: tuple[str, ...]) -> None:
    assert tiers and not [line for line in tiers if not _begins_a_test(line)]


def test_every_parameter_of_a_line_is_one_of_its_test(tiers: tuple[str, ...]) -> None:
    """Parameters are known where a test is collected: these tests alone, 4 s; the whole suite takes half a minute."""
    lines = [line for line in tiers if "[" in line]
    assert lines and not lines_without_a_test(lines)


def test_a_parameter_that_is_gone_is_named() -> None:
    here = "tests/test_layers.py::test_a_folder_imports_only_what_its_layer_allows"
    assert lines_without_a_test([f"{here}[comms", f"{here}[gone"]) == [f"{here}[gone"]


def test_unsteady_tests_are_named_until_they_are_mended() -> None:
    lines = (ROOT / "tests" / "unsteady.txt").read_text().splitlines()
    tests = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert not [each for each in tests if not _begins_a_test(each)], "a test that is gone leaves the list, too"


def lines_without_a_test(lines: list[str]) -> list[str]:
    """Those of the lists' lines that begin no test of the functions that they name."""
    functions = sorted({line.partition("[")[0] for line in lines})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", *functions]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = done.stdout.splitlines()
    return [line for line in lines if not any(each.startswith(line) for each in found)]


def _begins_a_test(line: str) -> bool:
    path, _, test = line.partition("::")
    if not test:
        return any((ROOT / path).parent.glob(f"{Path(path).name}*"))
    function, parameters, _ = test.partition("[")
    names = [each.name for each in ast.parse((ROOT / path).read_text()).body if isinstance(each, ast.FunctionDef)]
    return function in names if parameters else any(each.startswith(function) for each in names)
