"""Runs child processes that may crash or hang: with a time limit, and with a description of how they ended."""

import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_GRACE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ChildExit:
    """Describes how a child process ended, and what it wrote."""

    code: int | None
    """Exit code, negative for a signal; None if it was killed after its time, or never ran."""
    output: bytes = b""
    errors: bytes = b""
    problem: str = ""
    """`crashed (SIGSEGV)`, `no answer within 60 s`, ...; empty when it ended with 0."""

    @property
    def explanation(self) -> str:
        """Returns how the child ended, with the last line that it wrote to stderr."""
        lines = self.errors.decode("utf-8", "replace").strip().splitlines()
        return f"{self.problem or 'no usable answer'}{f': {lines[-1][:300]}' if lines else ''}"


def run_child(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> ChildExit:
    """Runs a command to its end, or kills it after a time.

    Args:
        command: Program and arguments.
        seconds: Time limit in seconds.
        environment: All variables of the child; None passes those of this process.
    """
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    except OSError as error:
        return ChildExit(None, problem=f"{command[0]}: {error.strerror or error}")
    try:
        output, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return _killed(child, seconds)
    return ChildExit(child.returncode, output, errors, _problem(child.returncode))


def _killed(child: subprocess.Popen[bytes], seconds: float) -> ChildExit:
    """Kills a child; one that sleeps inside a broken driver cannot be killed, and is not waited for any longer."""
    child.kill()
    try:
        output, errors = child.communicate(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired as still:
        output, errors = still.stdout or b"", still.stderr or b""
    return ChildExit(None, output, errors, f"no answer within {seconds:g} s")


def _problem(code: int) -> str:
    if code >= 0:
        return f"exit code {code}" if code else ""
    try:
        return f"crashed ({signal.Signals(-code).name})"
    except ValueError:
        return f"crashed (signal {-code})"
