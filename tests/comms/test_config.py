"""The configuration: strict about names and values; an option wins over its variable."""

from datetime import timedelta

import pytest

from gradwire.comms.config import Config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "ring"}, "`plan` is 'ring'; wanted one of auto, flat, hierarchical, leader"),
        ({"transport": "smoke"}, "`transport` is 'smoke'"),
        ({"fusion": "some"}, "`fusion` is 'some'; wanted one of fixed, auto"),
        ({"chunks": -1}, "`chunks` is -1"),
        ({"timeout": timedelta(0)}, "`timeout` is 0:00:00"),
        ({"location": ("a", "b", "c")}, "`location` is"),
        ({"nic_bytes_per_second": 0.0}, "`nic_bytes_per_second` is 0"),
        ({"compressor": "zip"}, "`compressor` is 'zip'; wanted one of"),
    ],
)
def test_a_bad_value_names_the_option(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Config.from_env(**options)
    assert str(caught.value).startswith(message)


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"`colour` is no option of gradwire; wanted one of chunks"):
        Config.from_env(colour="red")


def test_variables_are_read_and_options_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_PLAN", "leader")
    monkeypatch.setenv("GRADWIRE_TIMEOUT_SECONDS", "7.5")
    monkeypatch.setenv("GRADWIRE_LOCATION", "eu/rack7")
    config = Config.from_env(plan="flat")
    assert (config.plan, config.timeout, config.location) == ("flat", timedelta(seconds=7.5), ("eu", "rack7"))


def test_a_bad_variable_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_CHUNKS", "many")
    with pytest.raises(ValueError, match="`GRADWIRE_CHUNKS` is 'many'"):
        Config.from_env()


def test_what_is_own_to_a_rank_is_not_compared() -> None:
    assert Config(hostname="a", location=("x",)).shared() == Config(hostname="b", location=("y",)).shared()
    assert Config(plan="flat").shared() != Config().shared()
