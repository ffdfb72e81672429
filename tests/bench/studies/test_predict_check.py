"""What is predicted for a cluster is what its network cards carry, to the headers. No time decides anything here."""

import pytest

from gradwire.bench.studies import predict_check
from gradwire.bench.studies.predict_check import CASES, CLUSTERS, LARGE_MB, CheckedCase, check_on_cluster

FEW_BYTES = ("onebit", "dgc", "powersgd")
"""Of a small gradient they would send no more than the barriers between the rounds do."""


@pytest.mark.netns
@pytest.mark.parametrize("name", ["2x2", "4x2"])  # of 4x4 the study checks the bytes too
def test_plans_and_compressors_send_what_was_predicted(name: str) -> None:
    nodes = CLUSTERS[name]
    words = ",".join(f"{case}@{LARGE_MB if case.partition('+')[2] in FEW_BYTES else 4}" for case in CASES)
    cases = check_on_cluster(nodes, None, ["--bytes", "--rounds", "2", "--cases", words])
    assert [case.name for case in cases] == list(CASES)
    wrong = [case for case in cases if not case.sends_what_was_predicted(sum(nodes))]
    assert not wrong


def made_up(name: str, measured_seconds: float, nic_nbytes: float) -> CheckedCase:
    rounds = (measured_seconds,) * 4
    return CheckedCase(name, 1e6, nic_nbytes, 1.0, measured_seconds=measured_seconds, rounds_seconds=rounds)


@pytest.mark.parametrize(
    ("seconds", "nic_nbytes", "idle", "status", "remark"),
    [
        (1.1, 1.05e6, True, 0, ""),
        (1.5, 1.05e6, True, 1, "seconds are off"),
        (1.5, 1.05e6, False, 0, "seconds are off"),  # other programs may be to blame
        (1.1, 1.3e6, False, 1, "bytes are off"),
        (1.1, 0.9e6, True, 1, "bytes are off"),
    ],
)
def test_the_study_ends_with_1_where_a_case_is_off(
    seconds: float,
    nic_nbytes: float,
    idle: bool,
    status: int,
    remark: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(predict_check, "check_on_cluster", lambda *_: [made_up("flat", seconds, nic_nbytes)])
    monkeypatch.setattr(predict_check, "launcher_variables", dict)
    clocks = iter(((0.0, 0.0, 0.0), (10.0, 10.0 if idle else 15.0, 10.0)))
    monkeypatch.setattr(predict_check, "_clocks", lambda: next(clocks))
    assert predict_check.main(["2x2"]) == status
    assert remark in capsys.readouterr().out


def test_an_unknown_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        predict_check.main(["7x7"])
    assert "`CLUSTER`: found '7x7', wanted one of" in capsys.readouterr().err
