"""A signal to `tests/fresh_debian.py` leaves no root, no mount and no process behind.

Its debootstrap is one of this test's: it copies a shell and what that needs, or stops half way, with a mount and a
process of its own, as the real one has them while it configures packages.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fresh_debian.py")
SECONDS = 60
PROGRAMS = ("sh", "env", "mount", "umount", "sleep", "setsid")

# {hang}: a mount, a process of a session of its own, and a sign that both are there.
DEBOOTSTRAP = """#!/bin/sh
set -e
for root; do :; done
mkdir -p "$root/etc" "$root/proc" "$root/sys" "$root/dev/shm" "$root/dev/pts" "$root/root" "$root/tmp" "$root/usr/bin"
: > "$root/dev/null"
ln -s usr/bin "$root/bin"
{hang}
for program in {programs}; do
  cp "$(command -v "$program")" "$root/usr/bin/$program"
  for library in $(ldd "$(command -v "$program")" | grep -o '/[^ ]*'); do
    mkdir -p "$root${{library%/*}}"
    cp "$library" "$root$library"
  done
done
cat > "$root/usr/bin/useradd" <<'END'
#!/bin/sh
root=
{hang}
END
chmod +x "$root/usr/bin/useradd"
"""

HANG = """
mount -t tmpfs tmpfs "$root/tmp"
setsid sleep {token} &
: > "$root/reached"
sleep {token}
"""


def why_not() -> str:
    """What this machine lacks for a mount namespace; empty: nothing."""
    if shutil.which("unshare") is None:
        return "there is no unshare"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--uts", "true"], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip() if tried.returncode else ""


def processes_with(word: str) -> list[str]:
    """The command lines that hold a word."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if word in line:
            found.append(line)
    return found


def wait_until(happened: Callable[[], object]) -> bool:
    """Whether it happens in time."""
    deadline = time.monotonic() + SECONDS
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=f"no mount namespace can be made: {why_not()}")
@pytest.mark.parametrize("stage", ["debootstrap", "useradd"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(stage: str, number: signal.Signals, tmp_path: Path) -> None:
    roots, tools = tmp_path / "roots", tmp_path / "tools"
    roots.mkdir()
    tools.mkdir()
    token = f"300.{os.getpid()}{time.monotonic_ns()}"
    hang = HANG.format(token=token)
    text = DEBOOTSTRAP.format(hang=hang, programs=" ".join(PROGRAMS))
    if stage == "useradd":
        text = text.replace(hang, "", 1)
    (tools / "debootstrap").write_text(text)
    (tools / "debootstrap").chmod(0o755)
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "TMPDIR": str(roots)}
    words = [sys.executable, str(SCRIPT), "--release", "made-up"]
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            reached = wait_until(lambda: process.poll() is not None or list(roots.glob("*/root/reached")))
            assert reached and process.poll() is None, process.communicate(timeout=SECONDS)[0]
            assert wait_until(lambda: len(processes_with(token)) >= 2)  # the second begins behind the file
            process.send_signal(number)
            said, _ = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert process.returncode == 128 + number, said
    assert not processes_with(token)
    assert not list(roots.iterdir())
    assert str(roots) not in Path("/proc/self/mountinfo").read_text()


STARTED = """
import os, signal, subprocess, sys
sys.path.insert(0, {folder!r})
import fresh_debian

class Slow(subprocess.Popen):
    def __init__(self, *words, **options):
        super().__init__(*words, **options)
        while not os.path.exists({reached!r}):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

for each in fresh_debian.ENDING:
    signal.signal(each, fresh_debian.end_in_order)
fresh_debian.subprocess.Popen = Slow
with fresh_debian.contained(["sh", "-c", ": > {reached}; sleep {token}"], subprocess.DEVNULL) as process:
    process.wait()
"""


@pytest.mark.skipif(bool(why_not()), reason=f"no mount namespace can be made: {why_not()}")
def test_a_signal_while_a_command_is_started_leaves_nothing_behind(tmp_path: Path) -> None:
    """The process that starts it may get its turn only when the command has long begun."""
    token = f"300.{os.getpid()}{time.monotonic_ns()}"
    script = STARTED.format(folder=str(SCRIPT.parent), reached=str(tmp_path / "reached"), token=token)
    done = subprocess.run([sys.executable, "-c", script], timeout=SECONDS, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert not processes_with(token)
