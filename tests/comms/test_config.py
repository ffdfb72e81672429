"""The configuration: strict about names and values; an option wins over its variable."""

import dataclasses
import re
from datetime import timedelta
from pathlib import Path

import pytest

from gradwire.comms import config as config_module
from gradwire.comms.config import (
    COMPRESSION,
    ELASTIC,
    FUSION,
    PLANNING,
    SUMMING,
    WATCHING,
    Config,
    PlanChoice,
    Reduction,
    unused_variables,
)
from gradwire.compressors.registry import names

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "hook.md"

VARIABLES: dict[str, tuple[str, str, object]] = {
    "plan": ("GRADWIRE_PLAN", '{"name": "leader", "chunks": 4}', PlanChoice("leader", 4)),
    "compressor": ("GRADWIRE_COMPRESSOR", "powersgd", "powersgd"),
    "compressor_options": (
        "GRADWIRE_COMPRESSOR_OPTIONS",
        '{"rank": 2, "levels": [0.25, 0.0625]}',
        {"rank": 2, "levels": (0.25, 0.0625)},
    ),
    "rules": ("GRADWIRE_RULES", '[{"pattern": "head.*"}]', ({"pattern": "head.*"},)),
    "transport": ("GRADWIRE_TRANSPORT", "gloo:8", "gloo:8"),
    "fusion": ("GRADWIRE_FUSION", "12.5", 12.5),
    "reduction": ("GRADWIRE_REDUCTION", '{"average": false}', Reduction(average=False)),
    "elastic": ("GRADWIRE_ELASTIC", "host:29500", "host:29500"),
    "timeout": ("GRADWIRE_TIMEOUT_SECONDS", "7.5", timedelta(seconds=7.5)),
    "hostname": ("GRADWIRE_HOSTNAME", "node7", "node7"),
    "nic_bytes_per_second": ("GRADWIRE_NIC_BYTES_PER_SECOND", "3.125e9", 3.125e9),
    "nics": ("GRADWIRE_NICS", "per_rank", "per_rank"),
    "straggler_every": ("GRADWIRE_STRAGGLER_EVERY", "20", 20),
    "stall_seconds": ("GRADWIRE_STALL_SECONDS", "2.5", 2.5),
    "trace": ("GRADWIRE_TRACE", "steps.json:5", ("steps.json", 5)),
}
"""Field -> its variable, a text for it, and the value that the text stands for."""

FIELDS = [entry.name for entry in dataclasses.fields(Config)]


def test_every_option_is_of_one_part() -> None:
    """States take and refuse options by their parts: an option of none would be ignored by all but the hook."""
    parts = [*PLANNING, *COMPRESSION, *SUMMING, *FUSION, *WATCHING, *ELASTIC]
    assert sorted(parts) == sorted(FIELDS)


def test_no_rules_may_be_none() -> None:
    assert Config(rules=None).rules == ()  # type: ignore[arg-type]


def test_defaults_ask_for_nothing() -> None:
    assert Config().asked_for(FIELDS) == Config(nic_bytes_per_second="assume").asked_for(FIELDS) == []
    given = Config(elastic=True, fusion=1.0, rules=({"pattern": "a"},))
    assert given.asked_for(ELASTIC) == ["elastic"] and given.asked_for(FIELDS) == ["rules", "fusion", "elastic"]
    assert given.only(PLANNING) == Config()


def test_a_number_of_another_library_is_a_number_of_mebibytes() -> None:
    np = pytest.importorskip("numpy")
    assert Config(fusion=np.float64(25)).fusion_mb == Config(fusion=np.int64(25)).fusion_mb == 25.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "ring"}, "`plan` is 'ring'; wanted one of auto, flat, hierarchical, leader"),
        ({"transport": "smoke"}, "`transport` is 'smoke'"),
        ({"fusion": "some"}, "`fusion` is 'some'; wanted one of bucket, auto, delayed"),
        ({"plan": {"chunks": -1}}, "`chunks` is -1"),
        ({"plan": {"chunks": 1025}}, "`chunks` is 1025; wanted 0 (the planner chooses), or 1 to 1024"),
        ({"transport": "gloo:257"}, "`transport` is 'gloo:257'"),
        ({"transport": "gloo:"}, "`transport` is 'gloo:'"),
        ({"transport": "mpi:2"}, "`transport` is 'mpi:2'"),
        ({"timeout": timedelta(seconds=-1)}, "`timeout` is -1 day, 23:59:59"),
        ({"hostname": "a/b/c/d"}, "`hostname` is 'a/b/c/d'; wanted a name, with at most two units before it"),
        ({"hostname": "/d"}, "`hostname` is '/d'"),
        ({"nic_bytes_per_second": 0.0}, "`nic_bytes_per_second` is 0.0; wanted a number of bytes per second > 0"),
        ({"nic_bytes_per_second": "fast"}, "`nic_bytes_per_second` is 'fast'; wanted a number of bytes per second > 0"),
        ({"plan": {"name": "ring"}}, "`plan` is 'ring'; wanted one of auto"),
        ({"straggler_every": -1}, "`straggler_every` is -1; wanted a number of steps, or 0 for never"),
        ({"stall_seconds": float("inf")}, "`stall_seconds` is inf"),
        ({"nics": "eth0,eth1"}, "`nics` is 'eth0,eth1'; wanted one of auto, per_rank"),
        ({"trace": ("steps.json", 0)}, "`trace` is of 0 steps"),
        ({"trace": ("nvtx", 5)}, "`trace` is ('nvtx', 5); wanted nvtx alone"),
        ({"transport": "nccl:8"}, "`transport` is 'nccl:8'"),
        ({"elastic": "host"}, "`elastic` is 'host'; wanted True, or HOST:PORT"),
        ({"fusion": "auto:many"}, "`fusion` is 'auto:many'; wanted one of bucket"),
        ({"fusion": -1.0}, "`fusion` is -1.0; wanted a number of MiB >= 0"),
        ({"fusion": None}, "`fusion` is None; wanted a number of MiB >= 0"),
        ({"fusion": True}, "`fusion` is True; wanted a number of MiB >= 0"),
        ({"compressor": "zip"}, "`compressor` is 'zip'; wanted one of"),
        ({"reduction": {"sum_dtype": "float64"}}, "`sum_dtype` is 'float64'; wanted one of own, float32"),
        ({"reduction": "max"}, "`reduction` is 'max'; wanted one of sum, samples"),
        ({"reduction": {"sparse_as_dense": "no"}}, "`sparse_as_dense` is 'no'; wanted auto, True or False"),
        ({"reduction": {"predivide": 0.0}}, "`predivide` is 0.0; wanted a number > 0, or None"),
        ({"reduction": {"predivide": 2.0, "average": False}}, "`predivide` is given and `average` is off"),
        ({"fusion": "cuts.json:many"}, "`fusion` is 'cuts.json:many'; wanted one of bucket"),
        ({"fusion": "delayed:25"}, "`fusion` is 'delayed:25'"),
        ({"fusion": ".json"}, "`fusion` is '.json'"),
        (
            {"reduction": {"sum_dtype": "float32"}, "compressor": "int8"},
            "`sum_dtype` is float32 and `compressor` is int8",
        ),
    ],
)
def test_a_bad_value_names_the_option(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Config.from_env(**options)
    assert str(caught.value).startswith(message)


def test_an_unknown_compressor_is_refused_with_all_that_are_accepted() -> None:
    with pytest.raises(ValueError, match="`compressor` is 'zip'") as refused:
        Config(compressor="zip")
    plain, stacks = str(refused.value).partition("wanted one of ")[2].split("; or ")
    outer, inner = stacks.removeprefix("a stack of ").split(", a `+`, and one of ")
    words = [*plain.split(", "), *(f"{one}+{codec}" for one in outer.split(" or ") for codec in inner.split(", "))]
    assert {*names()} <= {*words} and "powersgd+int8" in words
    for word in words:
        assert Config(compressor=word).compressor == word


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"`colour` is no option of gradwire; wanted one of compressor"):
        Config.from_env(colour="red")


@pytest.mark.parametrize(
    ("name", "near"),
    [("compresor", "compressor"), ("fusion_mb", "fusion"), ("trace_steps", "trace")],
)
def test_an_unknown_option_is_refused_with_the_nearest_one(name: str, near: str) -> None:
    with pytest.raises(TypeError, match=f"`{name}` is no option of gradwire; did you mean `{near}`\\? It is one of "):
        Config.from_env(**{name: 1})


def test_variables_are_read_and_options_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_PLAN", "leader")
    monkeypatch.setenv("GRADWIRE_TIMEOUT_SECONDS", "7.5")
    monkeypatch.setenv("GRADWIRE_HOSTNAME", "eu/rack7/")
    config = Config.from_env(plan="flat")
    assert (config.plan_name, config.timeout, config.location) == ("flat", timedelta(seconds=7.5), ("eu", "rack7"))


def test_a_misspelt_variable_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("COMPRESOR", "TIMEOUT", "WATCH_TRACE", "HOOK", "MINE"):
        monkeypatch.setenv(f"GRADWIRE_{name}", "fp16")
    for _ in range(2):
        Config.from_env()
    assert [record.getMessage() for record in caplog.records] == [
        "gradwire: `GRADWIRE_COMPRESOR` is set, and nothing reads it; wanted `GRADWIRE_COMPRESSOR`?",
        "gradwire: `GRADWIRE_TIMEOUT` is set, and nothing reads it; wanted `GRADWIRE_TIMEOUT_SECONDS`?",
    ]


def test_variables_are_unused_until_a_configuration_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, _, _ in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(config_module, "_made", False)
    monkeypatch.setenv("GRADWIRE_HOSTNAME", "node0")
    monkeypatch.setenv("GRADWIRE_COMPRESSOR", "")
    assert unused_variables() == {}
    monkeypatch.setenv("GRADWIRE_PLAN", "flat")
    assert unused_variables() == {"GRADWIRE_PLAN": "flat"}
    monkeypatch.setenv("GRADWIRE_HOOK", "none")
    assert unused_variables() == {}
    monkeypatch.delenv("GRADWIRE_HOOK")
    Config()
    assert unused_variables() == {}


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_has_a_variable(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable, text, value = VARIABLES[field]
    monkeypatch.setenv(variable, text)
    assert getattr(Config.from_env(), field) == value


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a job script leaves it that hands on a setting which nobody has made."""
    for variable, _, _ in VARIABLES.values():
        monkeypatch.setenv(variable, "")
    assert Config.from_env() == Config()
    monkeypatch.setenv("GRADWIRE_HOOK", "int8")
    assert Config.automatic() == Config(compressor="int8")


@pytest.mark.parametrize("text", ["0", "false", "No", "OFF"])
def test_a_switch_can_be_off(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_ELASTIC", text)
    assert Config.from_env().elastic is False


def rate_of(config: Config) -> tuple[float | None, bool, bool]:
    return config.given_rate, config.probes_links, config.measures_links


def test_a_rate_is_given_or_says_how_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "GRADWIRE_NIC_BYTES_PER_SECOND"
    wanted = {"Auto": (None, True, False), "measure": (None, False, True), "assume": (None, False, False)}
    for text, found in {**wanted, "1e9": (1e9, False, False)}.items():
        monkeypatch.setenv(variable, text)
        assert rate_of(Config.from_env()) == found
    monkeypatch.delenv(variable)
    assert rate_of(Config.from_env()) == (None, True, False)
    assert len({str(Config(nic_bytes_per_second=each).shared()) for each in (None, "measure", "assume", 1e9)}) == 4


def test_a_plan_is_its_name_or_a_mapping() -> None:
    assert Config(plan={"chunks": 2}).plan == PlanChoice(chunks=2) != Config().plan
    assert Config(plan="flat") == Config(plan={"name": "flat"}) == Config(plan=PlanChoice("flat"))
    assert Config(plan="flat").shared()["plan"] == "'flat'" != Config(plan={"chunks": 2}).shared()["plan"]
    assert Config().asked_for(["plan"]) == [] and Config(plan={"chunks": 2}).asked_for(["plan"]) == ["plan"]
    with pytest.raises(TypeError, match=r"`plan` has 'pieces'; wanted some of name, chunks"):
        Config(plan={"pieces": 2})


@pytest.mark.parametrize(
    ("variable", "text", "wanted"),
    [
        ("GRADWIRE_STRAGGLER_EVERY", "many", "a whole number"),
        ("GRADWIRE_PLAN", "{", "a plan, or a JSON object such as"),
        ("GRADWIRE_NIC_BYTES_PER_SECOND", "25gbit", "a number"),
        ("GRADWIRE_TIMEOUT_SECONDS", "5m", "a number of seconds"),
        ("GRADWIRE_TIMEOUT_SECONDS", "inf", "a number of seconds"),
        ("GRADWIRE_REDUCTION", "{", "sum, samples, or a JSON object such as"),
        ("GRADWIRE_COMPRESSOR_OPTIONS", "rank=2", 'a JSON object such as {"rank": 2} (Expecting value'),
        ("GRADWIRE_COMPRESSOR_OPTIONS", "[2]", 'a JSON object such as {"rank": 2}'),
        ("GRADWIRE_RULES", "head.*", 'a JSON list of objects such as [{"pattern": "head.*"}] (Expecting value'),
        ("GRADWIRE_RULES", '{"pattern": "head.*"}', "a JSON list of objects"),
        ("GRADWIRE_RULES", '["head.*"]', "a JSON list of objects"),
    ],
)
def test_a_bad_variable_is_named_with_what_was_wanted(
    variable: str, text: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError) as caught:
        Config.from_env()
    assert str(caught.value).startswith(f"`{variable}` is {text!r}; wanted {wanted}")


def test_the_reference_lists_every_field_with_its_variable() -> None:
    listed = re.findall(r"^\| `(\w+)` \| `(GRADWIRE_\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert dict(listed) == {field: variable for field, (variable, _, _) in VARIABLES.items()}
    assert [field for field, _ in listed] == FIELDS


def test_what_is_own_to_a_rank_is_not_compared() -> None:
    assert Config(hostname="x/a").shared() == Config(hostname="y/b").shared()
    assert Config(nic_bytes_per_second=1e9).shared() == Config(nic_bytes_per_second=2e9).shared()
    assert Config(plan="flat").shared() != Config().shared()


@pytest.mark.parametrize(("name", "value"), [("timeout", 5), ("straggler_every", "x"), ("nic_bytes_per_second", True)])
def test_a_value_of_another_type_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"`{name}` is .*wanted"):
        Config(**{name: value})  # type: ignore[arg-type]


def test_options_of_no_compressor_are_refused_unless_the_environment_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADWIRE_COMPRESSOR", raising=False)
    for without in ({}, {"compressor": None}, {"compressor": "none"}):
        with pytest.raises(ValueError, match=r"`compressor_options` is \{'rank': 2\}, and no compressor is given; "):
            Config.from_env(compressor_options={"rank": 2}, **without)
        with pytest.raises(ValueError, match=r"`rules` is \[\{'pattern': '\*', .*, and no compressor is given; "):
            Config.from_env(rules=[{"pattern": "*", "compressor": "int8"}], **without)
    assert Config.from_env(compressor_options={}).compressor is None
    monkeypatch.setenv("GRADWIRE_COMPRESSOR", "powersgd")
    assert Config.from_env(compressor_options={"rank": 2}).compressor == "powersgd"


def test_a_compressor_of_none_wins_over_the_environment_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRADWIRE_COMPRESSOR", "int8")
    with caplog.at_level("INFO", logger="gradwire"):
        assert Config.from_env().compressor == "int8" and not caplog.text
        assert Config.from_env(compressor=None).compressor is None
    assert "compressor=None: exact; GRADWIRE_COMPRESSOR=int8 does not count here" in caplog.text


@pytest.mark.parametrize("trace", [7, (None, 5), ("steps.json", True), (("steps.json", 5), 9), ("steps.json",)])
def test_a_timeline_is_a_file_and_a_number_of_steps(trace: object) -> None:
    with pytest.raises(TypeError, match=r"`trace` is .*; wanted a file, or \(file, steps\)"):
        Config(trace=trace)  # type: ignore[arg-type]


def test_the_variable_says_which_job_an_elastic_script_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_ELASTIC", "host:29500")
    assert Config.from_env(elastic=True).join == "host:29500"
    assert Config.from_env(elastic="other:2").join == "other:2"
    assert Config.from_env(elastic=False).join is None


def test_what_one_rank_is_told_is_no_difference() -> None:
    assert Config(elastic="host:1").shared() == Config(elastic=True).shared()
    assert Config(fusion="mine.json").shared() == Config(fusion="yours.json").shared() != Config().shared()
    assert Config(fusion="mine.json").shared() != Config(fusion="mine.json:25").shared()


def test_a_file_keeps_the_cuts_that_fusion_finds() -> None:
    assert Config(fusion="cuts.json").cuts_file == "cuts.json" and Config(fusion="cuts.json").fusion_mb == 0
    kept = Config(fusion="a/cuts.json:25")
    assert (kept.cuts_file, kept.fusion_mb, kept.learns_cuts, kept.fuses) == ("a/cuts.json", 25.0, True, True)
    assert Config(fusion="auto:25").cuts_file is None and Config(fusion=25).cuts_file is None


@pytest.mark.parametrize(
    ("hostname", "host", "location"),
    [(None, None, ()), ("node3", "node3", ()), ("eu/rack7/node3", "node3", ("eu", "rack7")), ("eu/", None, ("eu",))],
)
def test_units_come_before_the_name_of_a_node(
    hostname: str | None, host: str | None, location: tuple[str, ...]
) -> None:
    config = Config(hostname=hostname)
    assert (config.host, config.location) == (host, location)
