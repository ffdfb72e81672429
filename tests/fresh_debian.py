"""`make fresh-debian`: what README promises for a fresh machine, in minimal Debian roots made by debootstrap.

    python tests/fresh_debian.py                              # Debian 12 and 13: make run as a user, then as root
    python tests/fresh_debian.py --release trixie --target test-fast
    python tests/fresh_debian.py --torch FOLDER               # with PyPI's torch, without 2.5 GB of NVIDIA's packages
    python tests/fresh_debian.py --release sid --python 3.15  # with another Python of that release than its python3

Needs root, debootstrap and git. In each root: the committed state of this checkout is cloned; `make` must first say in
one message all that is missing, before it downloads anything; its own apt-get line is followed; then the targets run.
A root is one folder, made and entered in mount and process namespaces of their own: nothing stays mounted, nothing goes
on running, and the folder is deleted, also where SIGINT, SIGTERM or SIGHUP ends this. pip is set up as on this machine,
with the local folders it names.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from support.cuda_wheel import write_cpu_wheel

CHECKOUT = Path(__file__).resolve().parents[1]
RELEASES = ("bookworm", "trixie")
USER = "ann"

_ENTER = """
set -e
root=$1; shift
mount --bind "$root" "$root"
cd "$root"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t tmpfs tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
while [ "$1" != -- ]; do mkdir -p ".$1"; mount --bind "$1" ".$1"; shift; done; shift
mkdir -p .outside
pivot_root . .outside
umount -l /.outside
cd /
status=0
"$@" < /dev/null || status=$?
exit $status
"""
# Process 1 stays root's: the kernel forgets --kill-child's signal where a process changes its user.
# pivot_root, not chroot: the kernel gives no user namespace to a process that has been chrooted.


def pip_settings() -> tuple[dict[str, str], list[str], list[str]]:
    """This machine's pip configuration, as variables, and the local folders and files that it names."""
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    variables = {}
    for name, value in re.findall(r"^[^.\n]+\.([\w-]+)='(.*)'$", shown, re.MULTILINE):
        variables["PIP_" + name.upper().replace("-", "_")] = value
    words = " ".join(variables.values()).replace("file://", "").split()
    folders = {Path(word) for word in words if Path(word).is_dir()}
    # An index in a folder has its files beside it.
    named = sorted({str(folder.parent if folder.name == "simple" else folder) for folder in folders})
    return variables, named, sorted({word for word in words if Path(word).is_file()})


@contextmanager
def contained(words: Sequence[str | Path], output: int) -> Iterator[subprocess.Popen[str]]:
    """Runs a command in namespaces of its own: its mounts and its processes end with the block.

    Args:
        words: The command, process 1 of its namespace.
        output: For `subprocess.Popen`, of both streams.
    """
    command: list[str | Path] = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--mount-proc"]
    command += ["--kill-child=KILL", "--uts", *words]
    # A signal that comes before the process can be ended again is handled afterwards.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    with subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=let_through,  # noqa: PLW1509  # this program has one thread
    ) as process:
        try:
            let_through()
            yield process
        except BaseException:
            # A namespace's process 1 has ended when all others in it have, and unshare ends after it.
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for child in map(int, children):
                os.kill(child, signal.SIGKILL)
            if not children:
                process.kill()
            raise


def let_through() -> None:
    """Unblocks the signals that end this process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def end_in_order(number: int, _frame: object) -> None:
    """Ends this process by way of its `with` blocks; a signal handler. What comes after the first one is left out."""
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Done:
    """How a command in a root ended.

    Attributes:
        status: Its exit status.
        output: What it printed, both streams.
        seconds: How long it took.
    """

    status: int
    output: str
    seconds: float


class Root:
    """A minimal Debian in a folder, deleted at the end of the `with` block."""

    def __init__(self, release: str, base: Path | None = None, torch: Path | None = None) -> None:
        """Makes it.

        Args:
            release: Debian's name for it: `bookworm`.
            base: A folder with one that debootstrap has made, `base/bookworm`, to copy; None to make one.
            torch: A folder with builds of torch for CUDA, which pip finds inside as builds for CPUs.
        """
        self.variables, self.folders, files = pip_settings()
        self._folder = Path(tempfile.mkdtemp(prefix=f"gradwire-{release}-"))
        self.path = self._folder / "root"
        try:
            # From the machine's own configuration: which mirror, and which keys.
            making = ["debootstrap", "--variant=minbase", release, str(self.path)]
            if base is not None:
                making = ["cp", "--archive", str(base / release), str(self.path)]
            with contained(making, subprocess.PIPE) as process:
                said, _ = process.communicate()
            checked(Done(process.returncode, said, 0.0))
            for name in ("etc/resolv.conf", "etc/hosts"):
                shutil.copy(f"/{name}", self.path / name)
            if torch is not None:
                wheels = self._folder / "wheels"
                wheels.mkdir()
                for wheel in sorted(torch.glob("torch-*.whl")):
                    write_cpu_wheel(wheel, wheels)
                self.folders.append(str(wheels))
                # A cap of this machine on releases of torch is not for those that were asked for.
                self.variables.pop("PIP_CONSTRAINT", None)
                self.variables["PIP_FIND_LINKS"] = f"{self.variables.get('PIP_FIND_LINKS', '')} {wheels}".strip()
            # Certificates, constraints: under names that no package of Debian's has.
            (self.path / "etc/pip-files").mkdir()
            for number, file in enumerate(files):
                inside = f"/etc/pip-files/{number}-{Path(file).name}"
                shutil.copy(file, self.path / inside[1:])
                for name, value in self.variables.items():
                    self.variables[name] = " ".join(inside if word == file else word for word in value.split())
        except BaseException:
            self.close()
            raise

    def run(self, command: str, user: str = "root", show: bool = True) -> Done:
        """Runs a shell command inside.

        Args:
            command: For `sh -c`, in the user's home.
            user: Whose.
            show: Print what it prints.
        """
        settings = [f"{name}={value}" for name, value in self.variables.items()]
        folder = "/root" if user == "root" else f"/home/{user}"
        switch = [] if user == "root" else ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        path = "/usr/local/bin:/usr/bin:/bin" + (":/usr/sbin:/sbin" if user == "root" else "")
        words = ["sh", "-c", _ENTER, "sh", str(self.path), *self.folders, "--", *switch]
        words += ["env", "-i", f"PATH={path}", f"HOME={folder}", "LANG=C.UTF-8", *settings]
        words += ["sh", "-c", f"cd {folder} && {command}"]
        start = time.monotonic()
        lines = []
        with contained(words, subprocess.PIPE) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if show:
                    print(f"  {line}", end="", flush=True)
        return Done(process.returncode, "".join(lines), time.monotonic() - start)

    def close(self) -> None:
        """Deletes it."""
        shutil.rmtree(self._folder)

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Deletes it."""
        self.close()


def try_release(
    release: str, targets: list[str], users: list[str], base: Path | None, torch: Path | None, python: str | None
) -> dict[str, object]:
    """Does what a newcomer does, and returns how each step ended.

    Args:
        release: Debian's name for it.
        targets: Of make.
        users: `ann`, `root`; in this order, in one checkout.
        base: As for `Root`.
        torch: As for `Root`.
        python: The version of the release's Python that is `python3` there, such as `3.15`; None for its own.
    """
    with Root(release, base, torch) as root:
        home = root.path / "home" / USER
        checked(root.run(f"useradd --create-home {USER}"))
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", CHECKOUT, home / "gradwire"], check=True)
        checked(root.run(f"chown -R {USER}: /home/{USER}"))
        checked(root.run("apt-get update && apt-get install -y --no-install-recommends make ca-certificates"))
        told = root.run("cd gradwire && make run", USER)
        found = re.search(r"apt-get install --no-install-recommends (.+)", told.output)
        if told.status == 0 or found is None or "Collecting" in told.output or (home / "gradwire/.venv").exists():
            raise RuntimeError(
                f"{release}: wanted one message with an apt-get line and no download; found:\n{told.output}"
            )
        lines = re.findall(r"^sudo apt-get install (.+)$", (CHECKOUT / "README.md").read_text(), re.MULTILINE)
        forgotten = sorted(set(found[1].split()) - set(" ".join(lines).split()))
        if forgotten:
            raise RuntimeError(f"README.md does not name {', '.join(forgotten)}, which {release} needs")
        checked(root.run(f"apt-get install -y --no-install-recommends {found[1]}"))
        if python is not None:
            checked(root.run(f"apt-get install -y --no-install-recommends python{python}-dev python{python}-venv"))
            checked(root.run(f"ln -s /usr/bin/python{python} /usr/local/bin/python3"))
        version = checked(root.run("python3 --version", USER)).output.strip()
        outcomes: dict[str, object] = {"packages": found[1], "interpreter": version}
        for user in users:
            for target in targets:
                print(f"{release}: make {target} as {user}", flush=True)
                done = root.run(f"cd /home/{USER}/gradwire && make {target}", user)
                if target == "run" and done.status == 0 and "x as fast" not in done.output:
                    raise RuntimeError(f"{release}: make run as {user} shows no gain")
                outcomes[f"make {target} as {user}"] = {"status": done.status, "seconds": round(done.seconds)}
        used = root.run(f"du -sm /home/{USER}/gradwire/.venv", show=False)
        outcomes["MB of .venv"] = int(used.output.split()[0])
        return outcomes


def checked(done: Done) -> Done:
    """Returns it, or raises RuntimeError unless the command ended with status 0."""
    if done.status != 0:
        raise RuntimeError(f"status {done.status}:\n{done.output}")
    return done


def main(argv: list[str]) -> int:
    """Tries each release, prints how it went as JSON, and returns 1 if a target failed.

    Args:
        argv: Options.
    """
    parser = argparse.ArgumentParser(prog="tests/fresh_debian.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--release", action="append", help=f"repeatable (default {' '.join(RELEASES)})")
    parser.add_argument("--target", action="append", help="of make; repeatable (default run)")
    parser.add_argument("--user", action="append", choices=(USER, "root"), help=f"repeatable (default {USER} root)")
    parser.add_argument("--base", type=Path, metavar="FOLDER", help="copy FOLDER/RELEASE, made by debootstrap before")
    parser.add_argument(
        "--torch", type=Path, metavar="FOLDER", help="its builds for CUDA are torch's CPU builds inside"
    )
    parser.add_argument("--python", metavar="VERSION", help="of that release's Pythons, 3.15 (default: its python3)")
    options = parser.parse_args(argv)
    for each in ENDING:
        signal.signal(each, end_in_order)
    failed = False
    for release in options.release or RELEASES:
        outcomes = try_release(
            release,
            options.target or ["run"],
            options.user or [USER, "root"],
            options.base,
            options.torch,
            options.python,
        )
        print(json.dumps({release: outcomes}, indent=2), flush=True)
        failed |= any(isinstance(one, dict) and one["status"] != 0 for one in outcomes.values())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
