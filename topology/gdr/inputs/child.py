"""Child processes that may crash or hang: their end is an answer, and waiting for it has a limit."""

import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_GRACE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Ended:
    """What a child left."""

    code: int | None
    """Its exit code, negative for a signal; None when it was given up."""
    output: bytes = b""
    errors: bytes = b""
    trouble: str = ""
    """`crashed (SIGSEGV)`, `no answer within 60 s`, ...; empty when it ended with 0."""

    @property
    def last_words(self) -> str:
        """How it ended, with the last line that it wrote to stderr."""
        lines = self.errors.decode("utf-8", "replace").strip().splitlines()
        return f"{self.trouble or 'no usable answer'}{f': {lines[-1][:300]}' if lines else ''}"


def run_child(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> Ended:
    """Runs a command to its end, or gives it up.

    Args:
        command: Program and arguments.
        seconds: How long to wait.
        environment: All of the child's variables; those of this process where None.
    """
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    except OSError as error:
        return Ended(None, trouble=f"{command[0]}: {error.strerror or error}")
    try:
        output, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return _given_up(child, seconds)
    return Ended(child.returncode, output, errors, _trouble(child.returncode))


def _given_up(child: subprocess.Popen[bytes], seconds: float) -> Ended:
    """Kills a child; one that sleeps inside a broken driver cannot be killed, and is left behind rather than waited for."""
    child.kill()
    try:
        output, errors = child.communicate(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired as still:
        output, errors = still.stdout or b"", still.stderr or b""
    return Ended(None, output, errors, f"no answer within {seconds:g} s")


def _trouble(code: int) -> str:
    if code >= 0:
        return f"exit code {code}" if code else ""
    try:
        return f"crashed ({signal.Signals(-code).name})"
    except ValueError:
        return f"crashed (signal {-code})"
