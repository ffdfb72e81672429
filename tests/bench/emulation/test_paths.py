import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.bench.emulation.command import main
from gradwire.bench.emulation.paths import MOST_DELAY_SECONDS, PathOptions, Paths, parse_loss, parse_seconds


def read(count: int = 2, *, has_rates: bool = True, **said: object) -> Paths:
    paths = PathOptions(**said).read(count, has_rates=has_rates)  # type: ignore[arg-type]
    assert paths is not None
    return paths


def test_what_is_not_said_is_no_path() -> None:
    assert PathOptions().read(2, has_rates=True) is None


@given(st.integers(0, 10_000_000))
def test_reading_undoes_writing(microseconds: int) -> None:
    assert parse_seconds(f"{microseconds}us", "delay", MOST_DELAY_SECONDS) == pytest.approx(microseconds / 1e6)
    assert parse_seconds(f"{microseconds / 1e3} MS", "delay", MOST_DELAY_SECONDS) == pytest.approx(microseconds / 1e6)


def test_one_value_is_every_nodes_and_a_round_trip_is_both_ways() -> None:
    paths = read(3, delay="40ms", loss="0.1%", jitter="5ms", queue="50ms")
    assert paths.round_trip_seconds(0, 2) == pytest.approx(0.08)
    assert {path.loss for row in paths.paths for path in row} == {0.001}
    assert paths.queue_seconds == (0.05, 0.05, 0.05)


def test_values_of_nodes_are_of_what_they_send() -> None:
    paths = read(3, delay="40ms,1ms,0.1s", loss="0%,1%,2%")
    assert paths.round_trip_seconds(0, 1) == pytest.approx(0.041)
    assert paths.round_trip_seconds(2, 0) == pytest.approx(0.14)
    assert [paths.paths[node][(node + 1) % 3].loss for node in range(3)] == [0, 0.01, 0.02]


def test_a_pair_of_regions_has_its_own_path_both_ways_and_the_rest_keeps_its_own() -> None:
    paths = read(
        4,
        delay="1ms",
        loss="0.5%",
        regions="eu,eu,us-east,asia",
        between=["eu/us-east:delay=40ms,loss=0.1%,jitter=5ms", "us-east/asia:delay=75ms", "eu/eu:delay=0.2ms"],
    )
    trips = {(a, b): round(paths.round_trip_seconds(a, b) * 1e3, 6) for a in range(4) for b in range(a + 1, 4)}
    assert trips == {(0, 1): 0.4, (0, 2): 80, (1, 2): 80, (0, 3): 2, (1, 3): 2, (2, 3): 150}
    assert paths.paths[0][2] == paths.paths[2][1]
    assert paths.paths[2][3].loss == 0.005 and paths.paths[2][0].loss == 0.001


@pytest.mark.parametrize("text", ["", "40", "-1ms", "fast", "nanms", "1e3ms", "40m", "11s", "9" * 30 + "ms", "40ms/s"])
def test_what_is_no_time_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"`--delay`: found .*, wanted"):
        parse_seconds(text, "--delay", MOST_DELAY_SECONDS)


@pytest.mark.parametrize("text", ["", "0.001", "-1%", "much", "nan%", "51%", "100%", "1e-3%"])
def test_what_is_no_loss_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"`--loss`: found .*, wanted"):
        parse_loss(text, "--loss")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--delay", "fast"], "`--delay`: found 'fast', wanted a time"),
        (["--delay", "40ms,1ms,2ms"], "`--delay`: found 3 values in '40ms,1ms,2ms', wanted one for all nodes or 2"),
        (["--jitter", "5ms"], "`--jitter`: found 5ms with a delay of 0ms, wanted at most the delay"),
        (["--loss", "0.01"], "`--loss`: found '0.01', wanted a share of the packets in percent"),
        (["--loss", "80%"], "`--loss`: found '80%', wanted at most 50%"),
        (["--queue", "50ms"], "`--queue`: found '50ms' on links without a rate, wanted `--nic`"),
        (["--regions", "eu,us"], "`--regions` is given and `--between` is not"),
        (["--between", "eu/us:delay=1ms"], "`--between` is given and `--regions` is not"),
        (["--regions", "eu", "--between", "eu/us:delay=1ms"], "`--regions`: found 'eu', wanted the region of each"),
        (["--regions", "eu,us", "--between", "eu/as:delay=1ms"], "`--between`: found 'as' in 'eu/as:delay=1ms'"),
        (["--regions", "eu,us", "--between", "eu/us"], "`--between`: found 'eu/us', wanted two regions"),
        (["--regions", "eu,us", "--between", "eu/us:rate=1mbit"], "`--between`: found 'eu/us:rate=1mbit', wanted two"),
        (["--regions", "eu,us", "--between", "eu/us:jitter=9ms"], "`--between: jitter`: found 9ms with a delay of 0ms"),
        (["--regions", "eu,us", "--between", "eu/us:loss=2"], "`--between: loss`: found '2', wanted a share"),
        (["--delay", "40ms", "--reorder"], "`--reorder`: found no jitter"),
        (["--delay", "40ms", "--seed", "-1"], "`--seed`: found -1"),
        (["--congestion", "hope"], "`--congestion`: found 'hope', wanted one that this kernel has"),
    ],
)
def test_networks_that_make_no_sense_end_with_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--nodes", "2", *words, "--", "true"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
