"""Linux namespaces without names; each set is kept open by one holder process, which cannot outlive this process.

A holder is `cat` on a pipe from this process, as process 1 of a PID namespace of its own. Three things end it: the
pipe's end of file, SIGKILL from the kernel when its parent dies (PR_SET_PDEATHSIG), and `Holder.close`. With process
1 the kernel kills everything in its PID namespace, ranks and their children included, and with the last process the
network namespace and its links vanish. Nothing has a name in the file system, so nothing can be left there.

Root makes them directly. Any other user becomes root in a new user namespace, which the first holder makes and the
others join: a cable has its ends in two network namespaces, and only a user that is root in both can make it.

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
    """Returns whether this process is not root's, so that namespaces need a user namespace first."""
    return os.geteuid() != 0


def new_namespaces() -> list[str]:
    """Returns the words that, put before a command, run it in new namespaces, to probe what the kernel supports."""
    return ["unshare", *_become_root(), *_NEW]


def _become_root() -> list[str]:
    """Returns the options with which unshare makes a user namespace; none if this process is root's."""
    return ["--user", "--map-root-user"] if is_unprivileged() else []


def run_shell(script: str, prefix: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a shell script by a command such as nsenter, and returns its status and output.

    Args:
        script: Lines for `sh`; `ip` and `tc` are found even if PATH lacks the administrator's folders.
        prefix: Words of the command that runs `sh`.
    """
    sbin = 'PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"\n'
    return subprocess.run([*prefix, "sh", "-c", sbin + script], text=True, capture_output=True, check=False)


def start_piped(words: Sequence[str]) -> "subprocess.Popen[str]":
    """Starts a process with pipes to its stdin, stdout and stderr; a terminal's Ctrl-C does not reach it.

    Args:
        words: Command line of the process.
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
    """Ends a process by closing its stdin, or kills it after ten seconds; does nothing if it has ended already.

    Args:
        process: Process that `start_piped` has started.
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
    """Set of new namespaces for network, hostname, mounts and processes, which exist until `close`."""

    def __init__(self, name: str, setup: str, beside: Self | None = None, *, ipv6: bool = False) -> None:
        """Makes the namespaces.

        Args:
            name: Hostname inside.
            setup: Lines for `sh -e`, run inside as process 1 before anything else.
            beside: Holder whose user namespace this one shares, so that a cable can join them; None for the first.
            ipv6: Whether IPv6 is on; its router and neighbour messages add to the bytes counted.

        Raises:
            RuntimeError: The kernel refuses, or the set-up fails; the message has its output.
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
        """Process ID, on this machine, of process 1 inside."""

    def enter(self) -> list[str]:
        """Returns the words that, put before a command, run it inside; SIGTERM reaches the command, not nsenter."""
        return ["env", "--ignore-signal=TERM", *self._enter("--mount", "--uts", "--net", "--pid")]

    def enter_network(self) -> list[str]:
        """Returns the words that, put before a command, run it in the network namespace only."""
        return self._enter("--net")

    def enter_user(self) -> list[str]:
        """Returns the words that, put before a command, run it in the user namespace only; none if root made it."""
        return self._enter() if is_unprivileged() else []

    def _enter(self, *kinds: str) -> list[str]:
        user = ["--user", "--preserve-credentials"] if is_unprivileged() else []
        return ["nsenter", f"--target={self.pid}", *user, *kinds]

    def run(self, script: str) -> None:
        """Runs a shell script in the network namespace only; process IDs and files are those of the machine.

        Args:
            script: Lines for `sh`; the first that fails ends the script.

        Raises:
            RuntimeError: A line failed; the message has its output.
        """
        done = run_shell("set -e\n" + script, prefix=self._enter("--net"))
        if done.returncode != 0:
            raise RuntimeError(f"cannot set up the emulated network: {done.stderr.strip()}")

    def run_python(self, script: str) -> None:
        """Runs lines of Python, without gradwire, in the network namespace only.

        Args:
            script: Lines of Python.

        Raises:
            RuntimeError: They failed; the message has their output.
        """
        self.run(shlex.join([sys.executable, "-I", "-S", "-c", script]))

    def nic_bytes(self, interface: str) -> tuple[int, int]:
        """Reads how many bytes an interface inside has carried.

        Args:
            interface: Name of the interface, for example `eth0`.

        Returns:
            Bytes (sent, received) since the interface was made, with Ethernet headers.

        Raises:
            RuntimeError: There is no interface of this name.
        """
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == interface:
                # Source: proc_pid_net(5), /proc/net/dev: eight receive columns, then eight transmit columns.
                columns = counters.split()
                return int(columns[8]), int(columns[0])
        raise RuntimeError(f"the emulated node has no interface {interface}")

    def close(self) -> None:
        """Kills all processes inside and waits for their end; the namespaces vanish with them."""
        # At the end of file process 1 leaves, and its parent returns only when the kernel has emptied the namespace.
        end_piped(self._process)
