import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.bench.emulation.rate import LEAST_BITS_PER_SECOND, format_rate, parse_rate


@given(st.integers(LEAST_BITS_PER_SECOND, 10**13))
def test_reading_undoes_writing(bits_per_second: int) -> None:
    assert parse_rate(format_rate(bits_per_second), "nic") == bits_per_second


def test_units_are_decimal_bits_in_any_case() -> None:
    assert parse_rate("200mbit", "nic") == parse_rate("200 MBit", "nic") == parse_rate("0.2gbit", "nic") == 200_000_000


@pytest.mark.parametrize("text", ["", "fast", "200", "200mbps", "-1mbit", "1e3mbit", "200mbit/s", "nanmbit", "0mbit"])
def test_what_is_no_rate_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"`--nic`: found .*, wanted"):
        parse_rate(text, "--nic")
