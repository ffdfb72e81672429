"""A profile is believed only where it is whole and was made for this job."""

import json
import logging
from pathlib import Path

import pytest

from gradwire.comms.autotune.profile import TunerSetting, load, save

KEY: dict[str, object] = {"model": "abc", "world": 4, "topology": "def", "torch": "2.13"}
SETTING = TunerSetting("best cuts", (1, 3), (10, 20, 30), 0, "hierarchical", 2)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    save(tmp_path / "profile.json", KEY, SETTING, 0.1)
    return tmp_path / "profile.json"


def test_what_was_saved_is_loaded(profile: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(profile, KEY) == SETTING
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
    document["setting"]["chunks"] = 100_000
    profile.write_text(json.dumps(document))
    assert load(profile, KEY) is None
    assert "digest" in caplog.text
