"""Errors of the commands have one form, those of argparse too: the option in backticks, what was found and wanted."""

import ast
from pathlib import Path

import pytest

from gradwire.__main__ import main
from gradwire.bench.arguments import in_one_form


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "argument --model: invalid choice: 'gpt' (choose from 'gpt2', 'sdxl')",
            "`--model`: found 'gpt', wanted one of gpt2, sdxl; did you mean gpt2?",
        ),
        (
            "argument --model: invalid choice: 'x' (choose from gpt2, sdxl)",  # Python 3.12 and later
            "`--model`: found 'x', wanted one of gpt2, sdxl",
        ),
        (
            "argument --model: invalid choice: 'gpt', maybe you meant 'gpt2'? (choose from gpt2, sdxl)",  # Python 3.15
            "`--model`: found 'gpt', wanted one of gpt2, sdxl; did you mean gpt2?",
        ),
        ("argument -o/--output: expected one argument", "`-o/--output`: expected one argument"),
        (
            "unrecognized arguments: --foo bar",
            "`--foo`: found an unknown option, wanted one of those that --help lists",
        ),
        ("argument --seconds: invalid float value: 'x'", "`--seconds`: found 'x', wanted a number"),
        ("the following arguments are required: FILE.json", "`FILE.json`: found nothing, wanted a value"),
        ("something else", "something else"),
    ],
)
def test_messages_of_argparse_are_rewritten(message: str, said: str) -> None:
    assert in_one_form(message) == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["topo", "--foo"], "gradwire topo: `--foo`: found"),
        (["predict", "--model", "gpt"], "gradwire predict: `--model`: found 'gpt', wanted one of"),
        (["bench", "allreduce"], "did you mean all_reduce?"),
        (["emulate", "--nodes", "0", "--", "true"], "gradwire emulate: `--nodes`: found 0, wanted 1 to"),
        (["compare", "--nodes", "0"], "gradwire compare: `--nodes`: found 0, wanted 1 to"),
    ],
)
def test_commands_refuse_in_one_form(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(words)
    except SystemExit as stop:
        status = int(stop.code or 0)
    error = capsys.readouterr().err
    assert status == 2 and said in error and len(error.splitlines()) == 1, error


ROOT = Path(__file__).resolve().parents[2]


def test_every_command_and_study_has_the_one_parser() -> None:
    """Errors of a parser of its own would have argparse's form, and escape sequences of the words in them."""
    own = []
    for file in sorted(
        each for folder in ("bench", "gradwire", "comms", "topology") for each in (ROOT / folder).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(file.read_text())):
            made = node.func if isinstance(node, ast.Call) else None
            names = [made] if made is not None else node.bases if isinstance(node, ast.ClassDef) else []
            if any(ast.unparse(name).endswith("ArgumentParser") for name in names):
                own.append(str(file.relative_to(ROOT)))
    assert own == ["bench/arguments.py"]
