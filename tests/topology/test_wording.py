"""Wording of rates, sizes, durations and lists."""

from importlib.metadata import Distribution
from pathlib import Path

import pytest

from gradwire.topology import wording
from gradwire.topology.wording import duration, listed, ms, nbytes, page, ranks_in_words, rate, rates_in_words, verb


@pytest.mark.parametrize(
    ("bytes_per_second", "text"),
    [(25e6, "200 Mbit/s"), (2.875e9, "23 Gbit/s"), (124.97e6, "1 Gbit/s"), (0, "0 bit/s"), (1.25e11, "1 Tbit/s")],
)
def test_rates_are_in_bits_and_have_no_exponent(bytes_per_second: float, text: str) -> None:
    assert rate(bytes_per_second) == text


def test_several_rates_are_the_slowest_to_the_fastest() -> None:
    assert rates_in_words([1.25e9, 1e9]) == "8 to 10 Gbit/s"
    assert rates_in_words([1.25e9] * 3) == "10 Gbit/s"
    assert rates_in_words([1e8, 1.25e9]) == "800 Mbit/s to 10 Gbit/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.44, "12.4 s"), (1234.5, "1234 s"), (0.203, "203 ms"), (2e-5, "20 us"), (5e-9, "5 ns"), (0.0, "0 s")],
)
def test_durations_have_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_and_milliseconds() -> None:
    assert [nbytes(64e6), nbytes(1.5e9), nbytes(12)] == ["64 MB", "1.5 GB", "12 bytes"]
    assert [ms(0.0464), ms(2.031)] == ["46.4", "2031"]


def test_long_lists_are_shortened() -> None:
    assert [listed([]), listed("a"), listed("abc")] == ["", "a", "a, b and c"]
    assert listed("abcdefg") == "a, b, c, d, e and 2 more"
    assert [ranks_in_words([3]), ranks_in_words([0, 1])] == ["rank 3", "ranks 0, 1"]
    assert ranks_in_words(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    assert [verb("a", "run"), verb("ab", "run")] == ["runs", "run"]


def test_a_page_is_a_file_in_a_checkout_and_an_address_where_the_wheel_knows_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "how-to/slow_links.md"
    assert Path(page(name)).is_file() and page(name).endswith(f"/docs/{name}")
    about = tmp_path / "gradwire-1.2.3.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: gradwire\nVersion: 1.2.3\n")
    monkeypatch.setattr(wording, "__file__", str(tmp_path / "gradwire" / "topology" / "wording.py"))
    monkeypatch.setattr(wording, "distributions", lambda name: Distribution.discover(name=name, path=[str(tmp_path)]))
    assert page(name) == f"docs/{name} in gradwire's repository"
    with (about / "METADATA").open("a") as file:
        file.write("Project-URL: Source, https://forge.example/owner/gradwire\n")
        file.write("Project-URL: Documentation, https://forge.example/owner/gradwire/blob/v1.2.3/docs/index.md\n")
    assert page(name) == f"https://forge.example/owner/gradwire/blob/v1.2.3/docs/{name}"
