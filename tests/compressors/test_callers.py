"""Whose line a call comes from: gradwire's, torch's and Python's own are passed over."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from gradwire.compressors import callers
from gradwire.compressors.callers import is_users, users_frame, warn

PACKAGE = Path(callers.__file__).parents[1]


@pytest.mark.parametrize(
    ("file", "users"),
    [
        (__file__, True),
        (PACKAGE / "bench" / "terminal.py", True),
        (PACKAGE / "lightning.py", False),
        (PACKAGE / "comms" / "hook.py", False),
        (PACKAGE / "compressors" / "rules.py", False),
        (torch.__file__, False),
        (threading.__file__, False),
        ("<string>", False),
    ],
)
def test_a_file_is_the_users_or_of_what_he_calls(file: Path | str, users: bool) -> None:
    assert is_users(str(file)) == users


def test_a_stack_without_the_user_has_no_frame_of_his() -> None:
    assert users_frame(None) is None


def test_where_no_line_is_the_users_a_warning_names_the_first_one() -> None:
    """As in `python -c`; torch is not needed, which commands do without."""
    script = "import sys; sys.modules['torch'] = None\nfrom gradwire.compressors.callers import warn\n\nwarn('so')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.startswith("<string>:4: UserWarning: gradwire: so")


def test_a_filter_goes_by_the_users_module() -> None:
    with pytest.warns(UserWarning, match="so"):
        warn("so")
    script = "from gradwire.compressors.callers import warn\nwarn('so')"
    command = [sys.executable, "-W", "error::UserWarning:__main__", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "UserWarning: gradwire: so" in done.stderr
