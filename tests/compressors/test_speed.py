"""The speed of codecs on this machine's processor is measured once, quickly, and assumed only where it cannot be."""

import sys
import time
from collections.abc import Iterator

import pytest

from gradwire.comms.plan.machine_cluster import codec_bytes_per_second
from gradwire.compressors import kernels, speed
from gradwire.compressors.kernels import native
from gradwire.topology.presets import cpu_only, dgx_h100


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    speed.core_bytes_per_second.cache_clear()
    yield
    speed.core_bytes_per_second.cache_clear()


def test_it_is_the_fastest_round_and_takes_three_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the kernels move: rounds of 9, 2, 1 and 1 ms, of which the last is not begun."""
    now, took = [0.0], iter([0.009, 0.002, 0.001, 0.001])

    def encode(*arguments: object) -> None:
        now[0] += next(took)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(native, "encode_pieces", encode)
    monkeypatch.setattr(native, "decode_pieces", lambda *arguments: None)
    moved = 18 * speed._NUMEL + 2 * 8 * speed._NUMEL / 512
    assert codec_bytes_per_second(cpu_only()) == pytest.approx(moved / 0.001)
    assert codec_bytes_per_second(cpu_only()) == pytest.approx(moved / 0.001), "once a process"
    assert next(took) == 0.001


def test_the_kernels_of_this_machine_are_timed() -> None:
    assert 1e7 < speed.core_bytes_per_second() < 1e13
    assert codec_bytes_per_second(dgx_h100()) > speed.ASSUMED_BYTES_PER_SECOND, "a GPU's own memory"


def test_without_the_compiled_part_it_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kernels, "native")
    monkeypatch.setitem(sys.modules, "gradwire.compressors.kernels.native", None)
    assert speed.core_bytes_per_second() == speed.ASSUMED_BYTES_PER_SECOND
