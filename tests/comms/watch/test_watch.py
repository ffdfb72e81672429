"""What is refused, and what a process without a group has of a watch."""

import subprocess
import sys

import pytest

from gradwire.comms.environment import watch_options


def started(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"GRADWIRE_WATCH": "maybe"},
            "`GRADWIRE_WATCH` is 'maybe'; wanted 1, true, yes, on, or one of 0, false, no, off",
        ),
        *(
            ({"GRADWIRE_WATCH": "1", "GRADWIRE_WATCH_STALL_SECONDS": bad}, f"`GRADWIRE_WATCH_STALL_SECONDS` is '{bad}'")
            for bad in ("soon", "-1", "inf")
        ),
    ],
)
def test_what_is_no_setting_is_refused(variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        watch_options()


@pytest.mark.slow
def test_what_is_no_setting_is_one_line_and_torch_is_imported() -> None:
    ended = started("import torch; print('done')", GRADWIRE_WATCH="1", GRADWIRE_WATCH_STALL_SECONDS="soon")
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    (said,) = ended.stderr.splitlines()
    assert said.startswith("gradwire: nothing is watched: `GRADWIRE_WATCH_STALL_SECONDS` is 'soon'")


@pytest.mark.slow
def test_a_script_without_ranks_ends_as_it_would_and_hears_nothing() -> None:
    ended = started("import torch, gradwire; assert gradwire.watch().report is None; print('done')", GRADWIRE_WATCH="1")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


@pytest.mark.slow
def test_without_the_variable_nothing_of_it_is_imported() -> None:
    ended = started("import sys, torch, gradwire; print([name for name in sys.modules if 'comms.watch' in name])")
    assert ended.stdout == "[]\n", ended.stderr
