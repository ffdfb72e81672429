import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.bench.emulation import namespaces
from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.fork import run_forked
from gradwire.bench.emulation.namespaces import Holder, available, find_tool

# `available` remembers its answer; `__wrapped__` asks again, under other conditions.


def test_without_root_and_user_namespaces_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespaces, "find_tool", lambda name: f"/bin/{name}")
    asked: list[list[str]] = []

    def refuse(script: str, prefix: list[str]) -> subprocess.CompletedProcess[str]:
        asked.append(prefix)
        return subprocess.CompletedProcess([], 1, stdout="", stderr="unshare failed: Operation not permitted")

    monkeypatch.setattr(namespaces, "run_shell", refuse)
    reason = available.__wrapped__() or ""
    assert "need root here" in reason and "sudo" in reason and "Operation not permitted" in reason
    assert "--user" in asked[0]


@pytest.mark.netns
def test_without_root_the_nodes_share_a_user_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if (reason := available.__wrapped__()) is not None:
        pytest.skip(reason)
    says = (
        "import os, socket; print(socket.gethostname(), os.readlink('/proc/self/ns/user'), os.getuid(), "
        "sorted(os.listdir('/sys/class/net')), os.listdir('/dev/shm'))"
    )
    tc = find_tool("tc")
    assert tc is not None
    with EmulatedCluster([1, 1], "20mbit") as cluster:
        outcome = cluster.run([sys.executable, "-c", says], timeout_seconds=60)
        shaped = subprocess.run([*cluster.enter(1), tc, "qdisc"], capture_output=True, text=True, check=True).stdout
    outcome.check()
    (name0, space0, *rest0), (name1, space1, *rest1) = (line.split(maxsplit=2) for line in outcome.output)
    assert (name0, name1) == ("node0", "node1")
    assert space0 == space1 != str(Path("/proc/self/ns/user").readlink())
    assert rest0 == rest1 == ["0 ['eth0', 'lo'] []\n"]
    assert "tbf" in shaped and "rate 20Mbit" in shaped


@pytest.mark.netns
def test_without_root_ranks_are_forked_into_the_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if (reason := available.__wrapped__()) is not None:
        pytest.skip(reason)
    module = tmp_path / "says.py"
    module.write_text(
        "import socket\ndef rank_main(place, arguments):\n    print(place.rank, socket.gethostname())\n    return 0\n"
    )
    with EmulatedCluster([1, 1]) as cluster:
        outcome = run_forked(cluster, str(module), [], nodes=[2, 2], timeout_seconds=60)
    outcome.check()
    assert [sorted(lines.splitlines()) for lines in outcome.output] == [
        ["0 node0", "1 node0"],
        ["2 node1", "3 node1"],
    ]


def test_a_missing_command_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces, "find_tool", lambda name: None if name == "tc" else f"/bin/{name}")
    assert "`tc` is missing: install the package iproute2" in (available.__wrapped__() or "")


@pytest.mark.parametrize(("status", "words"), [(13, "no tbf"), (12, "no bridge"), (1, "refuses new namespaces")])
def test_a_kernel_that_lacks_something_is_named(monkeypatch: pytest.MonkeyPatch, status: int, words: str) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces, "find_tool", lambda name: f"/bin/{name}")
    refused = subprocess.CompletedProcess([], status, stdout="", stderr="Operation not supported")
    monkeypatch.setattr(namespaces, "run_shell", lambda script, prefix: refused)
    reason = available.__wrapped__() or ""
    assert words in reason and "Operation not supported" in reason


def test_commands_are_found() -> None:
    assert find_tool("sh") is not None
    assert find_tool("no-such-command-anywhere") is None


@pytest.mark.netns
def test_a_setup_that_fails_says_what_it_said() -> None:
    with pytest.raises(RuntimeError, match=r"cannot set up the namespaces of nodeX: .*out of cheese"):
        Holder("nodeX", "echo out of cheese >&2; exit 1")


@pytest.mark.netns
def test_a_network_script_that_fails_says_what_it_said() -> None:
    holder = Holder("nodeX", "")
    try:
        with pytest.raises(RuntimeError, match=r"cannot set up the emulated network: (.|\n)*nothing0"):
            holder.run("ip link set nothing0 up")
        with pytest.raises(RuntimeError, match="no interface eth7"):
            holder.nic_bytes("eth7")
        assert holder.nic_bytes("lo") == (0, 0)
    finally:
        holder.close()
