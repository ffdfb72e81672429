"""`gradwire predict` from its command line to what it prints."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from gradwire.cli import predict_show
from gradwire.cli.predict import OPTIMIZERS, assumed_memory, buckets_of_parameters, main
from gradwire.cli.predict_show import node_counts
from gradwire.comms.plan import machine_cluster
from gradwire.compressors import registry
from gradwire.compressors.codecs.quantize import QuantizeCodec
from gradwire.topology.presets import PRESETS

AIAK = ["--preset", "dgx_a100", "--nodes", "4", "--nic", "25gbit", "--gradient-mb", "113.2"]
FIXTURES = Path(__file__).resolve().parents[2].parent / "shared" / "fixtures"


@pytest.fixture(autouse=True)
def rate_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of this machine's: on a core in an emulator, which moves 0.05e9, no compressor is worth its time."""
    monkeypatch.setattr(machine_cluster, "core_bytes_per_second", lambda: 12e9)


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*words, "--json"]) == 0
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


def test_4_dgx_a100_on_25_gbit(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(capsys, *AIAK, "--backward-ms", "45")
    plans = answer["plans"]
    assert isinstance(plans, dict)
    assert plans["flat"]["seconds"] == pytest.approx(70.6e-3, rel=0.02)
    assert plans["hierarchical"]["seconds"] == pytest.approx(55.4e-3, rel=0.02)
    assert plans["hierarchical"]["bytes_by_level"]["inter_node"] == pytest.approx(1.5 * 113.2e6)
    assert answer["recommend"]["plan"] == "hierarchical"  # type: ignore[index]
    assert answer["recommend"]["why"]  # type: ignore[index]
    assert 0 < answer["planning_seconds"] < 10  # type: ignore[operator]


def test_a_card_for_each_gpu_needs_no_compression(capsys: pytest.CaptureFixture[str]) -> None:
    recommend = ask(capsys, "--preset", "dgx_h100", "--nodes", "64", "--gradient-mb", "500", "--backward-ms", "100")[
        "recommend"
    ]
    assert recommend["plan"] == "flat"  # type: ignore[index]
    assert recommend["compressor"] == "none"  # type: ignore[index]
    assert "Do not compress" in recommend["why"]  # type: ignore[index]


def test_buckets_hold_whole_parameters_from_the_last_one_on() -> None:
    """As DDP makes them; with its default cap the first bucket has a megabyte."""
    sizes = [1_245_456, 2_232] * 5
    pair = 2 * (1_245_456 + 2_232)
    assert buckets_of_parameters(sizes, 2 << 20) == (pair, pair, pair // 2)
    assert buckets_of_parameters(sizes, 25 << 20) == (pair // 2, 2 * pair)
    assert buckets_of_parameters([], 1) == ()


def test_trays_of_one_nvlink_domain_need_no_card_and_no_compressor(capsys: pytest.CaptureFixture[str]) -> None:
    """Up to 18 trays of 4 GPUs are one domain, whatever their cards have; 36 are two, joined by cards."""
    tray = ["--preset", "gb200_nvl72", "--gradient-mb", "2000", "--backward-ms", "40", "--nic", "10gbit"]
    times = {}
    for nodes in ("1", "2", "18", "36"):
        answer = ask(capsys, *tray, "--nodes", nodes)
        times[nodes] = answer["plans"]["flat"]["seconds"]  # type: ignore[index]
        recommended = answer["recommend"]["compressor"]  # type: ignore[index]
        assert (recommended == "none") is (nodes != "36"), nodes
    assert times["2"] < 2 * times["1"] and times["18"] < 2 * times["1"] < times["36"]
    assert main([*tray, "--nodes", "2"]) == 0
    text = capsys.readouterr().out
    assert "over NVLink, no card" in text and "NVLink MB" in text and "NIC" not in text
    assert main([*tray, "--nodes", "36"]) == 0
    assert "36 nodes x 4 ranks, 2 racks" in capsys.readouterr().out


def test_people_get_a_table_and_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*AIAK, "--optimizer", "adam"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("4 nodes beat one if a step on one node takes more than")
    assert "recommended: plan hierarchical, compressor int8\n" in text
    limits = ("card", "links", "latency", "processor")
    rows = [line.split() for line in text.splitlines() if line.rstrip().endswith(limits)]
    assert rows[0][:3] == ["*", "hierarchical", "int8"]
    assert ["flat", "(as", "DDP)", "none"] in [row[:4] for row in rows]
    firsts = sorted(" ".join(row[:3]) for row in rows)  # what is recommended, torch's hook, the best exact plan, DDP
    assert firsts == ["* hierarchical int8", "flat (as DDP)", firsts[2], "torch fp16 hook"], rows
    assert firsts[2].startswith("hierarchical none")
    assert "note:" not in text
    assert "halving_doubling" not in text and re.search("--all shows [0-9]+ more rows", text)
    assert main([*AIAK, "--optimizer", "adam", "--all"]) == 0
    everything = capsys.readouterr().out
    assert "halving_doubling" in everything and "note: dgc requires SGD" in " ".join(everything.split())


def test_whether_several_nodes_beat_one_comes_first_and_what_to_type_second(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["--preset", "pcie_box", "--nodes", "2", "--nic", "8gbit", "--gradient-mb", "440", "--backward-ms", "180"]
    answer = ask(capsys, *slow)
    gains, alone = answer["against_one_node"], ask(capsys, *slow, "--nodes", "1")
    assert isinstance(gains, dict) and alone["against_one_node"] is None
    plans = alone["plans"]
    assert isinstance(plans, dict)
    exact = [
        name
        for name, candidate in plans.items()
        if candidate["compressor"] == "none" and (candidate["available"] or name == "flat")
    ]
    one = min(plans[name]["step_seconds"] for name in exact)
    flat = answer["plans"]["flat"]["step_seconds"]  # type: ignore[index]
    assert gains["flat"] == pytest.approx(2 * one / flat) and gains["flat"] < 1 < gains["recommended"] <= 2.02
    assert main(slow) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"2 nodes train {gains['flat']:.2f} times as much as one with plain DDP")
    assert 'write: state = gradwire.HookState(model, compressor="int8")' in text
    assert one == pytest.approx(plans["flat"]["exposed_seconds"] + 0.18 + 0.09, rel=0.01)  # half of backward before it
    assert ask(capsys, *slow, "--forward-ms", "20")["forward_seconds"] == 0.02
    fast = ["--preset", "dgx_h100", "--nodes", "2", "--gradient-mb", "440", "--backward-ms", "180"]
    assert "plain DDP" in str(ask(capsys, *fast)["recommend"]["write"])  # type: ignore[index]
    assert ask(capsys, *fast[:-2])["against_one_node"] is None  # without a backward pass nothing is known of a step


@pytest.mark.parametrize(
    "document",
    [
        {"layer.weight": [1024, 4096], "layer.bias": [1024]},
        [{"name": "layer.weight", "shape": [1024, 4096]}, {"name": "layer.bias", "shape": [1024]}],
        {"parameters": [{"name": "layer.weight", "shape": [1024, 4096]}, {"name": "layer.bias", "shape": [1024]}]},
    ],
)
def test_a_model_is_read(document: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps(document))
    answer = ask(capsys, "--preset", "cpu_only", "--nodes", "4", "--model-json", str(file))
    assert answer["gradient_nbytes"] == 4 * (1024 * 4096 + 1024)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "dgx_a100", "--gradient-mb", "-1"], "`--gradient-mb`: found -1"),
        (["--preset", "dgx_a100", "--gradient-mb", "nan"], "`--gradient-mb`: found nan"),
        (["--preset", "dgx_a100", "--gradient-mb", "1", "--backward-ms", "-5"], "`--backward-ms`: found -5"),
        (["--gradient-mb", "1", "--forward-ms", "5"], "`--forward-ms` is 5 without `--backward-ms`"),
        (["--preset", "dgx_a100", "--gradient-mb", "1", "--nodes", "0"], "`--nodes`: found 0"),
        (["--preset", "dgx_a100", "--gradient-mb", "1", "--nodes", "2", "--nic", "fast"], "`--nic`"),
        (["--preset", "dgx_a100", "--gradient-mb", "1", "--nics-per-node", "0"], "`--nics-per-node`: found 0"),
        (["--preset", "dgx_a100", "--gradient-mb", "1", "--intra-node", "quick"], "`--intra-node`"),
        (
            ["--preset", "dgx_a100", "--model-json", "/nonexistent.json"],
            "`--model-json` /nonexistent.json: No such file",
        ),
        (["--topology", "/nonexistent.xml", "--gradient-mb", "1"], "nonexistent"),
        (["--gradient-mb", "100", "--bucket-mb", "1e-6"], "`--bucket-mb`: found 1e-06 (1e+08 buckets), wanted"),
        (["--gradient-mb", "1", "--nodes", "2", "--nic", ""], "`--nic`: found '', wanted"),
        (["--gradient-mb", "1", "--nodes", "2", "--nic", "10gbit,"], "`--nic`: found '', wanted"),
        (["--gradient-mb", "1", "--nodes", "2", "--rtt", ""], "`--rtt`: found '', wanted"),
        (["--models", "--nic", "10gbit"], "`--nic` is given with `--models`"),
        (["--nodes", "2", "--nic", "fast"], "`--nic`: found 'fast', wanted"),
        (["--nodes", "2", "--intra-node", "1gbit,2gbit"], "`--intra-node`: found '1gbit,2gbit', wanted"),
        (["--models", "--intra-node", "1gbit"], "`--intra-node` is given with `--models`"),
        (["--gradient-mb", "1", "--markdown"], "`--markdown` is given without `--models`"),
    ],
)
def test_nonsense_is_refused_by_name(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(words)
    except SystemExit as leaving:  # a word that does not parse
        status = leaving.code
    error = capsys.readouterr().err
    assert status == 2
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    [
        "{", "5", "{}", '{"a": [2, -1]}', '{"a": "big"}', '[{"name": 5, "shape": [1]}]',
        pytest.param(f'{{"a": [{"9" * 5000}]}}', id="more digits than Python reads"),
    ],
)  # fmt: skip
def test_a_broken_model_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.json"
    file.write_text(text)
    assert main(["--preset", "cpu_only", "--model-json", str(file)]) == 2
    assert "`--model-json`" in capsys.readouterr().err


def test_a_topology_file_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted((FIXTURES / "nccl_xml").glob("*.xml"))
    if not files:
        pytest.skip("the shared fixtures are not here")
    answered = 0
    for file in files:
        status = main(
            [
                "--topology",
                str(file),
                "--nodes",
                "4",
                "--nic",
                "100gbit",
                "--intra-node",
                "1880gbit",
                "--gradient-mb",
                "100",
                "--json",
            ]
        )
        out, error = capsys.readouterr()
        assert status == 0 or error.startswith("gradwire predict: "), file
        answered += status == 0 and "plans" in json.loads(out)
    assert answered > len(files) // 2


def test_the_recommended_candidate_is_among_the_curves_and_no_name_lies_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    labels: list[str] = []

    def keep(figure: Any, file: Path, notes: list[str]) -> None:
        figure.draw_without_rendering()
        axes = figure.axes[0]
        legend = axes.get_legend() or figure.legends[0]
        labels.extend(text.get_text() for text in legend.get_texts())
        assert not legend.get_window_extent().overlaps(axes.get_window_extent())

    monkeypatch.setattr(predict_show, "save", keep)
    slow = ["--preset", "cpu_only", "--nodes", "4", "--nic", "94mbit", "--gradient-mb", "100", "--backward-ms", "300"]
    assert main([*slow, "--plot", str(tmp_path / "steps.svg")]) == 0
    assert "hierarchical+waterfill4 (recommended)" in labels and len(labels) == len(set(labels))


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main([*AIAK, "--plot", str(tmp_path / "steps.svg")]) == 0
    assert "<svg" in (tmp_path / "steps.svg").read_text()


SLOW = ["--model", "gpt2", "--nodes", "2", "--nic", "100mbit"]


def test_where_one_node_alone_is_faster_that_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SLOW, "--optimizer", "adamw"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    first = text.index("recommended: one node alone, or gradwire.Outer")
    assert "one node alone is faster" in text[:first] and "write: outer = gradwire.Outer(model, optimizer)" in text
    assert text.index("with gradients at every step: plan hierarchical, compressor") > first
    assert "gradwire.Outer" in str(ask(capsys, *SLOW)["recommend"]["first"])  # type: ignore[index]
    quick = ["--model", "gpt2", "--nodes", "2", "--nic", "25gbit"]
    assert ask(capsys, *quick)["recommend"]["first"] is None  # type: ignore[index]
    assert main(quick) == 0
    assert "recommended: plan" in " ".join(capsys.readouterr().out.split())


def test_torchs_hook_is_recommended_where_it_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    """GPUs without peer access reduce inside the node through host memory; torch's hook halves those bytes, too."""
    boxes = ["--preset", "rtx_pro_6000", "--nodes", "2", "--model", "gpt2"]
    answer: Any = ask(capsys, *boxes)
    own = answer["plans"][f"hierarchical+{answer['recommend']['compressor']}"]["step_seconds"]
    assert answer["torch_fp16_hook"]["step_seconds"] < 0.9 * own
    assert answer["recommend"]["first"] == "torch's own fp16 hook, without gradwire"
    gains = answer["against_one_node"]
    flat = answer["plans"]["flat"]["step_seconds"]
    assert gains["recommended"] / gains["flat"] == pytest.approx(flat / answer["torch_fp16_hook"]["step_seconds"])
    assert main(boxes) == 0
    text = capsys.readouterr().out
    assert "recommended: torch's own fp16 hook, without gradwire\nwrite: model.register_comm_hook(None, " in text
    assert "with gradwire: plan hierarchical, compressor " in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith(" * ")] == ["torch"]


@pytest.mark.parametrize("preset", ["pcie_box", "dgx_spark", "rtx_5090", "rtx_pro_6000", "strix_halo", "mi300x"])
@pytest.mark.parametrize("words", [("--model", "gpt2"), ("--model", "resnet50"), ("--gradient-mb", "500")])
def test_nothing_in_the_table_is_much_faster_than_what_is_recommended(
    preset: str, words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless one node alone or torch's hook is recommended first."""
    answer: Any = ask(capsys, "--preset", preset, "--nodes", "2", *words)
    verdict, hook = answer["recommend"], answer["torch_fp16_hook"]["step_seconds"]
    name = verdict["plan"] + ("" if verdict["compressor"] == "none" else f"+{verdict['compressor']}")
    hidden = "--model" not in words and verdict["compressor"] == "none"  # it may be: exact sums are not given up for it
    assert verdict["first"] or hidden or answer["plans"][name]["step_seconds"] <= 1.05 * hook * (1 + 1e-9)
    assert not (hidden and verdict["first"])


@pytest.mark.parametrize(("words", "bound"), [
    (["--preset", "rtx_5090", "--nodes", "2"], True),  # Ethernet cards without RDMA
    (["--preset", "strix_halo", "--nodes", "2"], True),
    (["--preset", "dgx_h100", "--nodes", "2"], False),  # InfiniBand
    (["--preset", "dgx_h100", "--nodes", "2", "--nic", "25gbit"], True),  # what such a card has is not known
    (["--preset", "rtx_5090", "--nodes", "1"], False),
    (["--preset", "gb200_nvl72", "--nodes", "2"], False),  # over NVLink
    (["--preset", "cpu_only", "--nodes", "2"], False),  # what TCP reaches is subtracted
])  # fmt: skip
def test_over_tcp_the_rate_of_cards_is_said_to_be_an_upper_bound(
    words: list[str], bound: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--gradient-mb", "100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nic_rate_is_upper_bound"] is bound
    assert main([*words, "--gradient-mb", "100"]) == 0
    assert ("which is an upper bound" in " ".join(capsys.readouterr().out.split())) is bound


@pytest.mark.parametrize(("preset", "kernels"), [("strix_halo", False), ("mi300x", False), ("dgx_spark", True)])
def test_amds_gpus_have_no_kernels_so_torchs_operators_are_priced(
    preset: str, kernels: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--preset", preset, "--nodes", "2", "--nic", "10gbit", "--gradient-mb", "500")
    answer: Any = ask(capsys, *words)
    assert answer["kernels"] is kernels
    plain = answer["plans"]["flat"]["seconds"]
    int8 = min(each["seconds"] for each in answer["plans"].values() if each["compressor"] == "int8")
    assert main([*words]) == 0
    assert ("priced are torch's operators" in capsys.readouterr().out) is not kernels
    assert (int8 > 0.5 * plain) is (preset == "strix_halo")  # beside 10 Gbit/s its memory is too slow for operators


def test_a_codec_of_ones_own_is_not_recommended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    registry.register_codec("a users own", lambda: QuantizeCodec(4))
    for optimizer in OPTIMIZERS:
        answer = ask(capsys, *SLOW, "--optimizer", optimizer)
        assert answer["recommend"]["compressor"] != "a users own"  # type: ignore[index]
        warning = answer["plans"]["hierarchical+a users own"]["warning"]  # type: ignore[index]
        assert "no training with a users own was measured here" in warning


def test_the_picture_shows_the_number_that_was_asked_for() -> None:
    assert node_counts(4) == [1, 2, 4, 8, 16]
    assert 48 in node_counts(48)


def test_the_page_shows_what_the_commands_print(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = (Path(__file__).parents[2] / "docs/how-to/predict.md").read_text()
    commands = re.findall(r"```sh\n(gradwire predict --preset .*?)```", text, re.DOTALL)
    shown = re.findall(r"```text\n((?:\d+ nodes train|recommended: ).*?)```", text, re.DOTALL)
    assert len(commands) == len(shown) >= 1
    for command, block in zip(commands, shown, strict=True):
        assert main(shlex.split(command.replace("\\\n", " "))[2:]) == 0
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        lines = [line for line in block.splitlines() if line.strip() not in ("", "...")]
        gone = [line for line in lines if line not in printed]
        assert lines == [line for line in printed if line in lines], (
            f"docs/how-to/predict.md is behind `COLUMNS=80 {' '.join(command.split())}`, which prints no {gone}. "
            "Paste from this, with `...` for the rows that are left out:\n" + "\n".join(printed)
        )


def test_a_machine_that_nobody_named_is_assumed_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    """README's own line."""
    words = ["--model", "gpt2", "--nodes", "2", "--nic", "10gbit"]
    assert main(words) == 0
    assert "(assumed: pcie_box; --preset or --topology says which)" in " ".join(capsys.readouterr().out.split())
    assert ask(capsys, *words)["plans"] == ask(capsys, *words, "--preset", "pcie_box")["plans"]


def test_without_a_backward_pass_the_first_line_says_from_which_step_on_nodes_beat_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--preset", "cpu_only", "--ranks-per-node", "2", "--nic", "200mbit", "--gradient-mb", "100"]
    assert main([*words, "--nodes", "2"]) == 0
    first = " ".join(capsys.readouterr().out.split())
    found = re.match(
        r"2 nodes beat one if a step on one node takes more than (\d+) ms with plain DDP, (\d+) ms with", first
    )
    assert found is not None and float(found[2]) < 0.4 * float(found[1]), first
    flat = ask(capsys, *words, "--nodes", "2")["plans"]["flat"]["seconds"]  # type: ignore[index]
    assert float(found[1]) == pytest.approx(1e3 * flat / (2 - 1 / 3), abs=1)


@pytest.mark.parametrize(("preset", "factor"), [
    ("pcie_box", 1.0), ("dgx_a100", 125 / 312), ("dgx_h100", 125 / 989), ("mi300x", 125 / 1307), ("dgx_spark", 1.0),
    ("rtx_5090", 125 / 209), ("rtx_pro_6000", 125 / 500), ("strix_halo", 125 / 59), ("cpu_only", 125 / (32 * 0.0864)),
])  # fmt: skip
def test_computing_belongs_to_the_device_and_is_called_assumed(
    preset: str, factor: float, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--preset", preset, "--model", "gpt2", "--nodes", "2", "--nic", "25gbit"]
    answer = ask(capsys, *words)
    assert answer["backward_seconds"] == pytest.approx(2 / 3 * 0.25 * factor)
    assert "TFLOP/s [" in str(answer["compute_assumed"])
    assert main(words) == 0
    assert "Computing is assumed: 12 x 1,024 tokens on " in " ".join(capsys.readouterr().out.split())
    given = ask(capsys, *words, "--backward-ms", "30")
    assert (given["backward_seconds"], given["compute_assumed"]) == (0.03, None)


def test_a_device_without_a_figure_is_said_to_be_another_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dataclasses import replace

    from gradwire.topology.presets import pcie_box
    from gradwire.topology.show import json_form

    machine = pcie_box()
    strange = replace(machine, gpus=tuple(replace(gpu, name="NVIDIA Strange 1") for gpu in machine.gpus))
    (tmp_path / "node.json").write_text(json_form.write(strange))
    answer = ask(capsys, "--topology", str(tmp_path / "node.json"), "--model", "gpt2")
    assert answer["compute_assumed"] == "12 x 1,024 tokens on an A10, as nothing is known here of NVIDIA Strange 1"
    assert answer["memory_assumed"] == "600 GB/s as on the card A10, as nothing is known here of NVIDIA Strange 1"
    assert main(["--topology", str(tmp_path / "node.json"), "--parameters", "1e6"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The GPUs' memory, which prices compressors, is assumed: 600 GB/s" in said and "topo --json" in said
    told = replace(machine, gpus=tuple(replace(gpu, memory_bytes_per_second=9e11) for gpu in strange.gpus))
    (tmp_path / "node.json").write_text(json_form.write(told))
    assert ask(capsys, "--topology", str(tmp_path / "node.json"), "--model", "gpt2")["memory_assumed"] is None


@pytest.mark.parametrize("preset", PRESETS)
def test_the_memory_of_no_preset_is_assumed(preset: str) -> None:
    assert assumed_memory(PRESETS[preset]()) == ""


def test_a_gpu_whose_kind_is_not_known_counts_as_the_slowest_and_is_said_to() -> None:
    from gradwire.topology.graph import Gpu, Machine

    strange = Gpu(key="g", name="NVIDIA Strange 1", compute_capability=90)
    assert assumed_memory(Machine(gpus=(strange,))).startswith("3350 GB/s as on the card H100 SXM, ")
    slow = "273 GB/s as on the card GB10, as nothing is known here of theirs"
    assert assumed_memory(Machine(gpus=(strange, Gpu(key="h")))) == slow


CPUS = ["--preset", "cpu_only", "--parameters", "1.56e6", "--backward-ms", "100"]


def seconds(answer: dict[str, object], name: str) -> float:
    plans = answer["plans"]
    assert isinstance(plans, dict)
    found = plans[name]["seconds"]
    assert isinstance(found, float)
    return found


def test_gradients_of_two_bytes_are_half_as_many_and_compress_to_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*CPUS, "--nodes", "2", "--ranks-per-node", "1", "--nic", "40mbit"]
    whole, half = ask(capsys, *words), ask(capsys, *words, "--gradient-dtype", "bfloat16")
    assert whole["gradient_nbytes"] == 2 * half["gradient_nbytes"]  # type: ignore[operator]
    assert seconds(half, "flat") == pytest.approx(seconds(whole, "flat") / 2, rel=0.02)
    assert seconds(half, "hierarchical+int8") == pytest.approx(seconds(whole, "hierarchical+int8"), rel=0.02)
    assert whole["torch_fp16_hook"] is not None and half["torch_fp16_hook"] is None
    by_size = [*words[:2], *words[4:], "--gradient-mb", "3.12", "--gradient-dtype", "bfloat16"]
    assert ask(capsys, *by_size)["gradient_nbytes"] == half["gradient_nbytes"]


def test_steps_that_travel_exactly_at_first_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--preset", "cpu_only", "--nodes", "2", "--ranks-per-node", "1", "--nic", "2mbit", "--model", "gpt2",
             "--backward-ms", "100", "--optimizer", "sgd"]  # fmt: skip
    recommend = ask(capsys, *words)["recommend"]
    assert isinstance(recommend, dict)
    steps = registry.options_of(str(recommend["compressor"]))["warmup_steps"]
    assert recommend["dense_steps"] == steps == 100, recommend
    assert main(words) == 0
    assert "Its first 100 steps travel exactly (warmup_steps)" in " ".join(capsys.readouterr().out.split())


def test_unlike_links_and_uneven_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    base = [*CPUS, "--nodes", "3"]
    alike = ask(capsys, *base, "--ranks-per-node", "1", "--nic", "15mbit")
    fast = ask(capsys, *base, "--ranks-per-node", "1", "--nic", "40mbit")
    unlike = ask(capsys, *base, "--ranks-per-node", "1", "--nic", "40mbit,40mbit,15mbit")
    for name in ("flat", "hierarchical", "hierarchical+int8"):
        assert seconds(fast, name) < seconds(unlike, name) <= 1.05 * seconds(alike, name), name
    uneven = ask(capsys, *base, "--ranks-per-node", "2,1,1", "--nic", "40mbit")
    assert uneven["ranks"] == 4 and "2, 1, 1 ranks" in str(uneven["cluster"])
    assert main([*base, "--ranks-per-node", "1", "--nic", "40mbit,40mbit,15mbit"]) == 0
    assert "37.6 Mbit/s, 37.6 Mbit/s, 14.1 Mbit/s of data by node" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("words", "message"), [
    (["--nic", "40mbit,15mbit"], "`--nic` has 2 values and `--nodes` is 3"),
    (["--nic", "40mbit", "--ranks-per-node", "2,1"], "`--ranks-per-node` has 2 values"),
    (["--nic", "1gbit,1gbit,1gbit", "--plot", "a.png"], "with `--plot`"),
])  # fmt: skip
def test_a_value_for_each_node_or_one_for_all(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CPUS, "--nodes", "3", *words]) == 2
    assert message in capsys.readouterr().err
