"""`gradwire predict --sharded` from its command line to what it prints."""

import json
from typing import Any

import pytest

from gradwire.cli.predict import main

SLOW = ["--preset", "cpu_only", "--nodes", "2", "--ranks-per-node", "2", "--nic", "200mbit", "--parameters", "4e6"]
A100 = ["--preset", "dgx_a100", "--nodes", "4", "--nic", "25gbit", "--parameters", "7e9", "--backward-ms", "900"]


def test_programs_get_every_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SLOW, "--sharded", "full", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    plain = answer["choices"]["full flat"]
    assert answer["parameters"] == 4_000_000 and answer["sharded"] == "full"
    assert plain["bytes_by_level"]["inter_node"] == pytest.approx(3 * 16e6)
    assert answer["choices"]["full hierarchical"]["bytes_by_level"]["inter_node"] == pytest.approx(1.5 * 16e6)
    assert plain["memory"]["extra_nbytes"] == 0 and plain["fits"] is None
    assert set(plain["collectives"]) == {"forward_gather", "backward_gather", "reduce_scatter", "all_reduce"}
    verdict = answer["recommend"]
    assert answer["choices"][verdict["name"]]["step_seconds"] < plain["step_seconds"]
    assert verdict["why"]


def test_people_get_the_recommendation_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*A100, "--sharded", "full", "--optimizer", "adamw", "--gpu-memory-gb", "80"]) == 0
    text = capsys.readouterr().out
    said = " ".join(text.split())
    assert said.startswith("4 nodes train ") and "plain FSDP2 (full)" in said.partition("recommended: ")[0]
    assert "\nrecommended: hybrid hierarchical, " in text
    assert "Use hybrid instead of full: it fits" in said and "--all shows" in said
    rows = [line.split()[:5] for line in text.splitlines() if " exact " in line and "flat" in line.split()]
    assert ["full", "flat", "exact", "exact", "-"] in rows
    assert main([*A100, "--sharded", "hybrid", "--optimizer", "adamw", "--all"]) == 0
    assert "onebit requires SGD" in " ".join(capsys.readouterr().out.split())


def test_a_public_model_has_its_passes_here_too(capsys: pytest.CaptureFixture[str]) -> None:
    """As the answer for DDP has them; so both say whether two nodes beat one."""
    ask = ["--model", "gpt2", "--nodes", "2", "--nic", "1gbit", "--json"]
    assert main(ask) == main([*ask, "--sharded", "hybrid"]) == 0
    plain, end = json.JSONDecoder().raw_decode(text := capsys.readouterr().out)
    sharded = json.loads(text[end:])
    assert sharded["forward_seconds"] == pytest.approx(sharded["backward_seconds"] / 2)
    assert 0 < sharded["against_one_node"]["flat"] < 1 and 0 < plain["against_one_node"]["flat"] < 1
    assert main([*SLOW, "--sharded", "full"]) == 0
    assert capsys.readouterr().out.startswith("Whether the nodes beat one depends on the passes")


def test_both_passes_and_dtypes_are_asked(capsys: pytest.CaptureFixture[str]) -> None:
    def ask(*words: str) -> dict[str, Any]:
        assert main([*A100, "--sharded", "full", "--json", *words]) == 0
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    answer = ask()
    assert answer["forward_seconds"] == 0.45
    narrow = ask("--param-dtype", "bfloat16", "--reduce-dtype", "bfloat16", "--forward-ms", "300", "--units", "60")
    assert (narrow["forward_seconds"], narrow["units"]) == (0.3, 60)
    half = answer["choices"]["full flat"]["bytes_by_level"]["inter_node"] / 2
    assert narrow["choices"]["full flat"]["bytes_by_level"]["inter_node"] == pytest.approx(half)
    kept = ask("--reshard-after-forward", "no")
    assert kept["choices"]["full flat"]["collectives"]["backward_gather"]["seconds"] == 0.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--units", "5"], "`--units` is given without `--sharded`"),
        (["--gpu-memory-gb", "5"], "`--gpu-memory-gb` is given without `--sharded`"),
        (["--sharded", "full", "--units", "0"], "`--units` is 0"),
        (["--sharded", "full", "--forward-ms", "-1"], "`--forward-ms` is -1"),
        (["--sharded", "full", "--gpu-memory-gb", "0"], "`--gpu-memory-gb` is 0"),
        (["--sharded", "full", "--activations-gb", "nan"], "`--activations-gb` is nan"),
        (["--sharded", "full", "--plot", "steps.svg"], "`--plot`"),
    ],
)
def test_nonsense_is_refused_by_name(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SLOW, *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_number_of_parameters_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--preset", "dgx_a100", "--parameters", "-7"]) == 2
    assert "`--parameters` is -7" in capsys.readouterr().err
