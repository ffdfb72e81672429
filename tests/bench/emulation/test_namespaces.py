import os
import subprocess

import pytest

from gradwire.bench.emulation import namespaces
from gradwire.bench.emulation.namespaces import Holder, available, find_tool

# `available` remembers its answer; `__wrapped__` asks again, under other conditions.


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in (available.__wrapped__() or "")


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
