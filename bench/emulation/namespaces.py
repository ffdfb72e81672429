"""Anonymous Linux namespaces, each set kept open by one holder process that cannot outlive this one.

A holder is `cat` on a pipe from this process, as process 1 of a PID namespace of its own. Three things end it: the
pipe's end of file, SIGKILL from the kernel when its parent dies (PR_SET_PDEATHSIG), and `Holder.close`. With process
1 the kernel kills everything in its PID namespace, ranks and their children included, and with the last process the
network namespace and its links vanish. Nothing has a name in the file system, so nothing can be left there.

Root makes them as it is. Anybody else is root in a user namespace of their own: the first holder makes it and the
others join it, because a cable has its ends in two network namespaces, and belongs to who rules both.

Source: pid_namespaces(7), network_namespaces(7), user_namespaces(7), PR_SET_PDEATHSIG(2const), unshare(1), setpriv(1).
"""

import contextlib
import functools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}
"""Command -> the Debian package that has it."""

_PROBE = """
mount -t proc proc /proc || exit 14
mount -t sysfs sysfs /sys || exit 15
ip link add probe0 type veth peer name probe1 || exit 11
ip link add probe2 type bridge || exit 12
tc qdisc add dev probe0 root tbf rate 1mbit burst 64kb limit 1mb || exit 13
"""

_PROBE_MEANING = {
    11: "the kernel has no veth devices",
    12: "the kernel has no bridge",
    13: "the kernel has no tbf queue",
    14: "/proc cannot be mounted in a new namespace (a container that hides parts of it?)",
    15: "/sys cannot be mounted in a new namespace (a container that hides parts of it?)",
}

_NEW = ["--net", "--uts", "--mount", "--propagation", "private", "--pid", "--fork"]


def find_tool(name: str) -> str | None:
    """Returns the path of a command, looking into the administrator's folders too; None where it is missing.

    Args:
        name: The command, for example `tc`.
    """
    return shutil.which(name) or shutil.which(name, path="/usr/local/sbin:/usr/sbin:/sbin")


@functools.cache
def available() -> str | None:
    """Returns why no cluster can be emulated on this machine, with what to do about it; None if one can."""
    for name, package in TOOLS.items():
        if find_tool(name) is None:
            return f"the command `{name}` is missing: install the package {package} (apt-get install {package})"
    probe = run_shell(_PROBE, prefix=new_namespaces())
    if probe.returncode == 0:
        return None
    refused = "the kernel refuses new namespaces (a container without privileges?)"
    if is_unprivileged():
        refused = "network namespaces need root here (user namespaces are refused): run as root, for example with sudo"
    cause = _PROBE_MEANING.get(probe.returncode, refused)
    return f"{cause}: {probe.stderr.strip() or f'status {probe.returncode}'}"


def is_unprivileged() -> bool:
    """Whether namespaces take a user namespace first, because this process is not root's."""
    return os.geteuid() != 0


def new_namespaces() -> list[str]:
    """Returns the words that run a command in new namespaces of its own, to see what the kernel has."""
    return ["unshare", *_become_root(), *_NEW]


def _become_root() -> list[str]:
    """The options with which unshare makes a user namespace where one is needed."""
    return ["--user", "--map-root-user"] if is_unprivileged() else []


def run_shell(script: str, prefix: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a shell script behind a command such as nsenter.

    Args:
        script: Lines for `sh`; `ip` and `tc` are found even where PATH lacks the administrator's folders.
        prefix: The command that runs `sh`.
    """
    sbin = 'PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"\n'
    return subprocess.run([*prefix, "sh", "-c", sbin + script], text=True, capture_output=True, check=False)


def start_piped(words: Sequence[str]) -> "subprocess.Popen[str]":
    """Starts a process with pipes to its stdin, stdout and stderr; a terminal's Ctrl-C does not reach it.

    Args:
        words: Its command line.
    """
    return subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end_piped(process: "subprocess.Popen[str]") -> None:
    """Ends what leaves at the end of its stdin, in any case; harmless when done twice, and when it has ended by itself.

    Args:
        process: Of `start_piped`.
    """
    assert process.stdin and process.stdout and process.stderr
    with contextlib.suppress(BrokenPipeError):  # a line that it never read: it is dead already
        process.stdin.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
    process.stderr.close()


class Holder:
    """New namespaces for network, hostname, mounts and processes, open until `close`."""

    def __init__(self, name: str, setup: str, beside: Self | None = None, *, ipv6: bool = False) -> None:
        """Makes the namespaces.

        Args:
            name: The hostname inside.
            setup: Lines for `sh -e`, run inside as process 1 before anything else.
            beside: A holder whose user namespace this one shares, so that a cable can join them; None for the first.
            ipv6: Leaves IPv6 on: it adds router and neighbour chatter to the bytes counted.

        Raises:
            RuntimeError: if the kernel or the set-up refuses, with what it said.
        """
        script = "\n".join(
            [
                "set -e",
                'PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"',
                # /proc still shows the parent's processes here: this is the pid by which nsenter finds the namespaces.
                "read -r pid rest < /proc/self/stat",
                # By the system call: /proc/sys/kernel/hostname is the machine's root's alone to write.
                shlex.join([sys.executable, "-I", "-S", "-c", f"import socket; socket.sethostname({name!r})"]),
                "mount -t proc proc /proc",
                "for knob in all default; do file=/proc/sys/net/ipv6/conf/$knob/disable_ipv6",
                f"[ ! -e $file ] || echo {int(not ipv6)} > $file; done",
                "ip link set lo up",
                setup,
                # Orphans become children of process 1; with SIGCHLD ignored the kernel reaps them.
                "trap '' CHLD",
                'echo "$pid"',
                "exec cat > /dev/null",
            ]
        )
        first = _become_root() if beside is None else []
        words = [] if beside is None else [*beside.enter_user()]
        # After the user namespace: the kernel forgets the signal where a process gains rights.
        words += ["setpriv", "--pdeathsig", "KILL", "unshare", *first, *_NEW, "--kill-child=KILL", "sh", "-c", script]
        self._process = start_piped(words)
        assert self._process.stdout is not None and self._process.stderr is not None
        pid = self._process.stdout.readline().strip()
        if not pid:
            said = self._process.stderr.read().strip()
            self.close()
            raise RuntimeError(f"cannot set up the namespaces of {name}: {said or 'no reason given'}")
        self.pid = int(pid)
        """The pid of process 1 inside, as seen from here."""

    def enter(self) -> list[str]:
        """Returns the words that run a command inside; SIGTERM is for the command, nsenter itself ignores it."""
        return ["env", "--ignore-signal=TERM", *self._enter("--mount", "--uts", "--net", "--pid")]

    def enter_network(self) -> list[str]:
        """Returns the words that run a command in the network namespace alone; the process is this one's child."""
        return self._enter("--net")

    def enter_user(self) -> list[str]:
        """Returns the words that run a command in the user namespace alone; none where it is the machine's own."""
        return self._enter() if is_unprivileged() else []

    def _enter(self, *kinds: str) -> list[str]:
        user = ["--user", "--preserve-credentials"] if is_unprivileged() else []
        return ["nsenter", f"--target={self.pid}", *user, *kinds]

    def run(self, script: str) -> None:
        """Runs a shell script in the network namespace alone, where process ids and files are those of the machine.

        Args:
            script: Lines for `sh`; the first that fails stops it.

        Raises:
            RuntimeError: if a line fails, with what it said.
        """
        done = run_shell("set -e\n" + script, prefix=self._enter("--net"))
        if done.returncode != 0:
            raise RuntimeError(f"cannot set up the emulated network: {done.stderr.strip()}")

    def run_python(self, script: str) -> None:
        """Runs lines of Python, without gradwire, in the network namespace alone.

        Args:
            script: The lines.

        Raises:
            RuntimeError: if they fail, with what they said.
        """
        self.run(shlex.join([sys.executable, "-I", "-S", "-c", script]))

    def nic_bytes(self, interface: str) -> tuple[int, int]:
        """Reads how many bytes an interface inside has carried.

        Args:
            interface: Its name, for example `eth0`.

        Returns:
            (sent, received), since the interface was made; Ethernet headers included.
        """
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == interface:
                # Source: proc_pid_net(5), /proc/net/dev: eight receive columns, then eight transmit columns.
                columns = counters.split()
                return int(columns[8]), int(columns[0])
        raise RuntimeError(f"the emulated node has no interface {interface}")

    def close(self) -> None:
        """Kills everything inside and waits until it is dead; the namespaces go with it."""
        # At the end of file process 1 leaves, and its parent returns only when the kernel has emptied the namespace.
        end_piped(self._process)
