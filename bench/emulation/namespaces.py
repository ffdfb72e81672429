"""Anonymous Linux namespaces, each set kept open by one holder process that cannot outlive this one.

A holder is `cat` on a pipe from this process, as process 1 of a PID namespace of its own. Three things end it: the
pipe's end of file, SIGKILL from the kernel when its parent dies (PR_SET_PDEATHSIG), and `Holder.close`. With process
1 the kernel kills everything in its PID namespace, ranks and their children included, and with the last process the
network namespace and its links vanish. Nothing has a name in the file system, so nothing can be left there.

Source: pid_namespaces(7), network_namespaces(7), PR_SET_PDEATHSIG(2const), unshare(1), setpriv(1).
"""

import functools
import os
import shlex
import shutil
import subprocess
from pathlib import Path

TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}
"""Command -> the Debian package that has it."""

_PROBE = """
ip link add probe0 type veth peer name probe1 || exit 11
ip link add probe2 type bridge || exit 12
tc qdisc add dev probe0 root tbf rate 1mbit burst 64kb limit 1mb || exit 13
"""

_PROBE_MEANING = {
    11: "the kernel has no veth devices",
    12: "the kernel has no bridge",
    13: "the kernel has no tbf queue",
}


def find_tool(name: str) -> str | None:
    """Returns the path of a command, looking into the administrator's folders too; None where it is missing.

    Args:
        name: The command, for example `tc`.
    """
    return shutil.which(name) or shutil.which(name, path="/usr/local/sbin:/usr/sbin:/sbin")


@functools.cache
def available() -> str | None:
    """Returns why no cluster can be emulated on this machine, with what to do about it; None if one can."""
    if os.geteuid() != 0:
        return "an emulated cluster needs root (network namespaces): run as root, for example with sudo"
    for name, package in TOOLS.items():
        if find_tool(name) is None:
            return f"the command `{name}` is missing: install the package {package} (apt-get install {package})"
    probe = run_shell(_PROBE, prefix=["unshare", "--net", "--mount", "--uts", "--pid", "--fork"])
    if probe.returncode == 0:
        return None
    cause = _PROBE_MEANING.get(probe.returncode, "the kernel refuses new namespaces (a container without privileges?)")
    return f"{cause}: {probe.stderr.strip() or f'status {probe.returncode}'}"


def run_shell(script: str, prefix: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a shell script behind a command such as nsenter.

    Args:
        script: Lines for `sh`; `ip` and `tc` are found even where PATH lacks the administrator's folders.
        prefix: The command that runs `sh`.
    """
    sbin = 'PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"\n'
    return subprocess.run([*prefix, "sh", "-c", sbin + script], text=True, capture_output=True, check=False)


class Holder:
    """New namespaces for network, hostname, mounts and processes, open until `close`."""

    def __init__(self, name: str, setup: str) -> None:
        """Makes the namespaces.

        Args:
            name: The hostname inside.
            setup: Lines for `sh -e`, run inside as process 1 before anything else.

        Raises:
            RuntimeError: if the kernel or the set-up refuses, with what it said.
        """
        script = "\n".join(
            [
                "set -e",
                'PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"',
                # /proc still shows the parent's processes here: this is the pid by which nsenter finds the namespaces.
                "read -r pid rest < /proc/self/stat",
                f"echo {shlex.quote(name)} > /proc/sys/kernel/hostname",
                "mount -t proc proc /proc",
                # IPv6 would add router and neighbour chatter to the bytes counted.
                "for knob in all default; do file=/proc/sys/net/ipv6/conf/$knob/disable_ipv6",
                "[ ! -e $file ] || echo 1 > $file; done",
                "ip link set lo up",
                setup,
                # Orphans become children of process 1; with SIGCHLD ignored the kernel reaps them.
                "trap '' CHLD",
                'echo "$pid"',
                "exec cat > /dev/null",
            ]
        )
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount", "--propagation", "private"]
        words += ["--pid", "--fork", "--kill-child=KILL", "sh", "-c", script]
        # A session of its own keeps the terminal's Ctrl-C away: the holder ends when this process says so.
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        pid = self._process.stdout.readline().strip()
        if not pid:
            said = self._process.stderr.read().strip()
            self.close()
            raise RuntimeError(f"cannot set up the namespaces of {name}: {said or 'no reason given'}")
        self.pid = int(pid)
        """Of process 1 inside, as seen from here."""

    def enter(self) -> list[str]:
        """Returns the words that run a command inside; SIGTERM is for the command, nsenter itself ignores it."""
        return ["env", "--ignore-signal=TERM", "nsenter", f"--target={self.pid}", "--mount", "--uts", "--net", "--pid"]

    def run(self, script: str) -> None:
        """Runs a shell script in the network namespace alone, where process ids and files are those of the machine.

        Args:
            script: Lines for `sh`; the first that fails stops it.

        Raises:
            RuntimeError: if a line fails, with what it said.
        """
        done = run_shell("set -e\n" + script, prefix=["nsenter", f"--target={self.pid}", "--net"])
        if done.returncode != 0:
            raise RuntimeError(f"cannot set up the emulated network: {done.stderr.strip()}")

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
        assert self._process.stdin and self._process.stdout and self._process.stderr
        # At the end of file process 1 leaves, and its parent returns only when the kernel has emptied the namespace.
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()
