"""What is refused, and what a process without a group has of a watch."""

import subprocess
import sys

import pytest

from gradwire.comms.backend.register import register
from support.processes import Processes


def started(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_what_is_no_setting_is_refused_by_name_where_torch_is_imported() -> None:
    assert "`GRADWIRE_WATCH` is 'yes'; wanted 1" in started("import torch", GRADWIRE_WATCH="yes").stderr


def refused(_: int) -> str:
    """What `import torch` raises at its end."""
    try:
        register()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"GRADWIRE_WATCH": "yes"}, "`GRADWIRE_WATCH` is 'yes'; wanted 1"),
        ({"GRADWIRE_WATCH": "1", "GRADWIRE_WATCH_STALL_SECONDS": "soon"}, "`GRADWIRE_WATCH_STALL_SECONDS` is 'soon'"),
        ({"GRADWIRE_WATCH": "1", "GRADWIRE_WATCH_STALL_SECONDS": "-1"}, "`stall_seconds` is -1.0"),
    ],
)
def test_what_is_no_setting_is_refused_by_name(variables: dict[str, str], words: str, processes: Processes) -> None:
    (said,) = processes(1, refused, environment=variables)
    assert words in said


@pytest.mark.slow
def test_a_script_without_ranks_ends_as_it_would_and_hears_nothing() -> None:
    ended = started("import torch, gradwire; assert gradwire.watch().report is None; print('done')", GRADWIRE_WATCH="1")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


@pytest.mark.slow
def test_without_the_variable_nothing_of_it_is_imported() -> None:
    ended = started("import sys, torch, gradwire; print([name for name in sys.modules if 'comms.watch' in name])")
    assert ended.stdout == "[]\n", ended.stderr
