"""Law, on the emulated cluster: by its own measurement the tuner never ends slower than where it began."""

import csv
import json
import re
from pathlib import Path

import pytest

from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.fork import run_forked
from gradwire.comms.autotune.tune import Budget

SCRIPT = Path(__file__).parents[1] / "jobs" / "tuner_job.py"


@pytest.mark.netns
def test_the_setting_that_is_kept_was_measured_to_be_no_slower_than_the_first(tmp_path: Path) -> None:
    profile = tmp_path / "tuned.json"
    with EmulatedCluster([1, 1], nic="200mbit") as cluster:
        result = run_forked(cluster, str(SCRIPT), [str(profile)], nodes=[2, 2], timeout_seconds=600)
    result.check()
    said = [match for text in result.output for match in re.findall(r"tuning took \d+ steps; keeping (.+)", text)]
    assert len(said) == 4  # every rank
    kept = set(said)
    assert len(kept) == 1
    with profile.with_suffix(".csv").open(encoding="utf-8") as log:
        rows = {row["kind"]: row for row in csv.DictReader(log)}
    begun, seconds = rows["incumbent"], {kind: float(row["seconds"]) for kind, row in rows.items()}
    found = json.loads(profile.read_text(encoding="utf-8"))
    assert begun["setting"] == "as begun"
    if "kept" in rows:  # its turns and those of the first alternated
        assert seconds["kept"] < seconds["incumbent"] * (1 - Budget().margin)
        assert kept == {rows["kept"]["setting"]} == {found["setting"]["label"]}
    else:
        assert kept == {"as begun"} == {found["setting"]["label"]}
    assert found["step_seconds"] <= seconds["incumbent"]
