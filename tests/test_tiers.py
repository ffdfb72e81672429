"""The lists of what `make test-fast` and `make test` leave out (slow.txt, long.txt) name tests that there are."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_line_is_the_beginning_of_a_test(tiers: tuple[str, ...]) -> None:
    assert tiers and not [line for line in tiers if not _begins_a_test(line)]


def _begins_a_test(line: str) -> bool:
    path, _, test = line.partition("::")
    if not test:
        return any((ROOT / path).parent.glob(f"{Path(path).name}*"))
    function, parameters, _ = test.partition("[")
    names = [each.name for each in ast.parse((ROOT / path).read_text()).body if isinstance(each, ast.FunctionDef)]
    return function in names if parameters else any(each.startswith(function) for each in names)
