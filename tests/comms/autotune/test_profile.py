"""A profile is believed only where it is whole and was made for this job."""

import json
import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradwire.comms.autotune.cuts import LearnsCuts
from gradwire.comms.autotune.profile import load, save
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.bootstrap.failure_reporter import CollectiveError
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.fusion import Fusion, FusionPlan
from gradwire.comms.step.listeners import EndedStep

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


@pytest.mark.parametrize("elastic", [True, False])
def test_new_cuts_hold_on_all_ranks_also_where_a_lost_rank_keeps_one_from_connecting(
    elastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(nbytes: int) -> None:
        raise CollectiveError("rank 1 is lost", (1,))

    config = Config(fusion="auto", elastic=elastic)
    communicator = Communicator(HashStore(), 0, 1, torch.device("cpu"), config, name="job")
    changed: list[FusionPlan] = []
    try:
        fusion = Fusion(FusionPlan())
        learning = LearnsCuts(communicator, fusion, communicator.plain_store, "job", "model")
        fusion.last_sizes = PLAN.sizes
        monkeypatch.setattr(fusion, "change", changed.append)
        monkeypatch.setattr(learning.finder, "step_ended", lambda seen: PLAN)
        monkeypatch.setattr(communicator, "connect", connect)
        bucket: Any = SimpleNamespace(times=SimpleNamespace(arrived=0.0))
        with nullcontext() if elastic else pytest.raises(CollectiveError):
            learning.step_ended(EndedStep(1, [bucket], [], communicator.report))
    finally:
        communicator.close()
    assert changed == [PLAN]
