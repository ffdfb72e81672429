import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.bench.emulation.rate import (
    LEAST_BITS_PER_SECOND,
    format_nic_rates,
    format_rate,
    parse_nic_rates,
    parse_rate,
    parse_rates,
)


@given(st.integers(LEAST_BITS_PER_SECOND, 10**13))
def test_reading_undoes_writing(bits_per_second: int) -> None:
    assert parse_rate(format_rate(bits_per_second), "nic") == bits_per_second


def test_units_are_decimal_bits_in_any_case() -> None:
    assert parse_rate("200mbit", "nic") == parse_rate("200 MBit", "nic") == parse_rate("0.2gbit", "nic") == 200_000_000


@pytest.mark.parametrize("text", ["", "fast", "200", "200mbps", "-1mbit", "1e3mbit", "200mbit/s", "nanmbit", "0mbit"])
def test_what_is_no_rate_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"`--nic`: found .*, wanted"):
        parse_rate(text, "--nic")


def test_nics_are_read_by_node_and_written_back() -> None:
    assert parse_nic_rates("300mbit+100mbit", 2, "nic") == ((300_000_000, 100_000_000),) * 2
    assert parse_nic_rates("1gbit+100mbit,50mbit+50mbit", 2, "nic") == ((10**9, 10**8), (5 * 10**7, 5 * 10**7))
    assert parse_rates("300mbit+100mbit,50mbit+50mbit", 2, "nic") == (400_000_000, 100_000_000)
    assert format_nic_rates((300_000_000, 100_000_000)) == "300mbit+100mbit"


@pytest.mark.parametrize(
    "text", ["100mbit+", "+100mbit", "100mbit+100mbit,100mbit", "1mbit,1mbit,1mbit", "+".join(["1mbit"] * 9)]
)
def test_what_is_no_nic_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"`--nic`: found .*, wanted"):
        parse_nic_rates(text, 2, "--nic")
