"""A profile is believed only where it is whole and was made for this job."""

import json
import logging
from pathlib import Path

import pytest
import torch

from gradwire.comms.autotune.cuts import LearnsCuts
from gradwire.comms.autotune.profile import load, save
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.fusion import Fusion, FusionPlan

KEY: dict[str, object] = {"model": "abc", "world": 4, "topology": "def", "torch": "2.13"}
PLAN = FusionPlan((1, 3), (10, 20, 30))


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    save(tmp_path / "profile.json", KEY, PLAN)
    return tmp_path / "profile.json"


def test_what_was_saved_is_loaded(profile: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(profile, KEY) == PLAN
    assert not caplog.records


def test_no_profile_is_no_reason_to_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(tmp_path / "none.json", KEY) is None
    assert not caplog.records


@pytest.mark.parametrize("name", KEY)
def test_another_jobs_profile_is_ignored_with_one_warning(
    profile: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert load(profile, KEY | {name: "other"}) is None
    assert [record.getMessage().count(name) > 0 for record in caplog.records] == [True]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 1}', '{"version": 99}', "\x00\x01"])
def test_rubbish_is_ignored_with_one_warning(profile: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    profile.write_text(text)
    assert load(profile, KEY) is None
    assert len(caplog.records) == 1


def test_an_edited_profile_is_ignored(profile: Path, caplog: pytest.LogCaptureFixture) -> None:
    document = json.loads(profile.read_text())
    document["plan"]["cuts"] = [3]
    profile.write_text(json.dumps(document))
    assert load(profile, KEY) is None
    assert "digest" in caplog.text


def test_a_profile_that_cannot_be_written_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    missing = tmp_path / "missing" / "profile.json"
    communicator = Communicator(HashStore(), 0, 1, torch.device("cpu"), Config(fusion=str(missing)), name="job")
    try:
        learning = LearnsCuts(communicator, Fusion(FusionPlan()), communicator.plain_store, "job", "model")
        for _ in range(2):
            learning._keep(PLAN)
    finally:
        communicator.close()
    record, _ = caplog.records
    assert record.getMessage().startswith(f"gradwire: `fusion` is {missing}, and rank 0 cannot write it ")
