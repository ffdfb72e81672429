"""docs/reference/gdr-check.md explains every check in the words of its docstring, so neither drifts from the other."""

import inspect
import re
from pathlib import Path

import pytest

from gradwire.cli.gdr_check import parser
from gradwire.topology.gdr.inputs.nccl_warnings import KNOWN_WARNINGS
from gradwire.topology.gdr.stages import CHECKS
from gradwire.topology.gdr.stages.basis import HOLDS, source_of

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "gdr-check.md").read_text()


@pytest.mark.parametrize("index", range(len(CHECKS)), ids=[check.name for check in CHECKS])
def test_check_is_explained(index: int) -> None:
    check = CHECKS[index]
    words = inspect.getdoc(check.function) or ""
    command = next(line for line in words.splitlines() if line.startswith("Command: ")).removeprefix("Command: ")
    kind = "advice" if check.verdict is None else check.verdict
    entry = f"- **{check.name} {check.title}** ({kind}). {words.splitlines()[0]}  \n  {command}\n"
    assert entry in PAGE, f"docs/reference/gdr-check.md lacks this entry:\n{entry}"


def test_every_option_is_shown() -> None:
    options = [option for action in parser()._actions for option in action.option_strings if option.startswith("--")]
    shown = {"--help", "--all-pairs", "--nvlink", "--perftest", "--nccl-version"}  # the help text says enough
    assert [option for option in options if option not in shown and option not in PAGE] == []


PUBLIC = re.compile(
    r"NCCL (?:user guide|src/|tags)|nccl(?:-tests)? issue|issues? \d|github\.com/|Documentation|documentation|README"
    r"|\(\d\)|(?:API|InfiniBand|PCIe) (?:reference|Architecture|Base)|(?:user )?guide|release notes|kernel-open/"
    r"|drivers/|NVIDIA, Understanding"
)
"""A manual, a page of man, a specification, a source file or an issue that anybody can open."""


def test_each_fix_has_a_condition_and_a_public_source() -> None:
    assert {check.name for check in CHECKS} == set(HOLDS)
    for check in CHECKS:
        assert len(HOLDS[check.name].split()) >= 4, check.name
        assert PUBLIC.search(source_of(check)), (check.name, source_of(check))
        assert "`half" not in source_of(check) and "as in" not in source_of(check), "a source is no name of our own"
    for known in KNOWN_WARNINGS:
        assert PUBLIC.search(known.source) and known.cause and known.fix, known
