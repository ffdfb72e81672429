"""Law: of a rank that is killed while groups are made nothing stays, and no other waits longer than its time-out."""

from datetime import timedelta

import pytest

from gradwire.bench.studies import start_kills


@pytest.mark.parametrize(("victim", "how"), [(1, "kill"), (2, "memory")])
def test_a_rank_that_ends_at_once_is_named_and_nothing_stays(
    victim: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_kills, "TIMEOUT", timedelta(seconds=3))
    found = start_kills.one_round(victim, 0.0, how)
    assert found.ended and found.hanging == 0 and found.left == [] and not found.crashed, found
    assert found.naming == 3 or not any(each.error for each in found.survivors), found
