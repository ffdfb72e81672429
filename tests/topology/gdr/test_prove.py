"""Reading the proof: the child's log and rates, and every way in which the child may fail."""

from pathlib import Path

import pytest

from gradwire.topology.gdr import prove
from gradwire.topology.gdr.environment import Launch
from gradwire.topology.gdr.prove import prove_with_nccl


def test_log_and_rates_of_both_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def child(label: str, environment: dict[str, str]) -> dict[str, object]:
        seen.append(environment)
        line = "n:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA\n"
        Path(environment["NCCL_DEBUG_FILE"]).write_text(line)
        return {"label": label, "gigabits_per_second": 300.0 if label == "default" else 200.0}

    monkeypatch.setattr(prove, "_run", child)
    log, rates = prove_with_nccl(Launch(0, 2, 1), {"host": 1.0})
    assert log is not None and log.gdr_channels.total() == 1
    assert rates == {"host": 1.0, "default": 300.0, "LOC": 200.0}
    assert "NCCL_P2P_DISABLE" not in seen[0] and seen[1]["NCCL_NET_GDR_LEVEL"] == "LOC"
    prove_with_nccl(Launch(0, 2, 2), {})
    assert seen[2]["NCCL_P2P_DISABLE"] == seen[2]["NCCL_SHM_DISABLE"] == "1", "one host: only the NICs are left"


def test_a_child_that_fails_is_reported_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    labels: list[str] = []

    def child(label: str, environment: dict[str, str]) -> dict[str, object]:
        labels.append(label)
        return {"error": "exit code 1: boom"}

    monkeypatch.setattr(prove, "_run", child)
    assert prove_with_nccl(Launch(0, 2, 1), {}) == (None, {})
    assert labels == ["default"] and "boom" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("executable", "word"),
    [("/bin/false", "exit code 1"), ("/bin/echo", "exit code 0"), ("/nowhere", "FileNotFoundError")],
)
def test_every_end_of_the_child_is_an_answer(monkeypatch: pytest.MonkeyPatch, executable: str, word: str) -> None:
    monkeypatch.setattr("sys.executable", executable)
    assert word in str(prove._run("default", {})["error"])
