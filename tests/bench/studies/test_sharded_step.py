"""Steps of sharded models: every setting trains on an emulated cluster, and sends what its table would say."""

import pytest

from gradwire.bench.studies.sharded_step import NATIVE, PLAIN, SETTINGS, main, measure


@pytest.mark.netns
def test_bytes_follow_the_settings() -> None:
    names = [PLAIN, "FSDP2, shards=int4 weights=int8", NATIVE, "HSDP, int4"]
    assert {one.name for one in SETTINGS} >= set(names)
    results = {one.name: one for one in measure("2x2", None, 1, (1, 8), names)}
    assert results[names[1]].fewer > 8.0
    assert results[names[3]].fewer > 7.0
    assert results[PLAIN].speed_up == results[NATIVE].speed_up == 1.0


def test_an_unknown_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["5x5"])
    assert "wanted one of 2x2, 4x2" in capsys.readouterr().err
