"""Public models by name, and the table of them by link."""

import contextlib
import io
import json
import re
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradwire.bench.compare.public_models import PUBLIC_MODELS
from gradwire.cli import predict_models
from gradwire.cli.predict import build_parser, main, read_question

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = {"resnet50": 25_557_032, "gpt2": 124_439_808, "llama-3.2-1b": 1_235_814_400}
"""What torchvision and the models' own pages give."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_as_many_parameters_as_the_published_one(name: str) -> None:
    assert PUBLIC_MODELS[name].numel == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_names_are_unique_and_shapes_are_shapes(name: str) -> None:
    shapes = PUBLIC_MODELS[name].shapes
    assert len({parameter for parameter, _ in shapes}) == len(shapes)
    assert all(extent > 0 for _, shape in shapes for extent in shape)


def test_a_model_by_name_is_its_shapes_and_its_backward_pass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = ["--preset", "pcie_box", "--nodes", "2", "--nic", "10gbit", "--json"]
    assert main([*where, "--model", "gpt2"]) == 0
    named = json.loads(capsys.readouterr().out)
    assert named["gradient_nbytes"] == 4 * PUBLISHED["gpt2"]
    assert named["backward_seconds"] == pytest.approx(2 / 3 * PUBLIC_MODELS["gpt2"].step_seconds)
    assert main([*where, "--model", "gpt2", "--backward-ms", "50"]) == 0
    assert json.loads(capsys.readouterr().out)["backward_seconds"] == 0.05


def ddp_buckets(name: str, cap_nbytes: int) -> tuple[int, ...]:
    """Bytes of the buckets that torch itself makes of a model's parameters, in the order of the backward pass."""
    with torch.device("meta"):
        parameters = [torch.empty(shape) for _, shape in reversed(PUBLIC_MODELS[name].shapes)]
    first: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]  # as DDP itself
    limits = [first, cap_nbytes] if cap_nbytes == 25 << 20 else [cap_nbytes]
    assigned, _ = dist._compute_bucket_assignment_by_size(parameters, limits)  # type: ignore[attr-defined]  # as DDP itself
    return tuple(sum(parameters[index].nbytes for index in bucket) for bucket in assigned)


@pytest.mark.parametrize("name", PUBLIC_MODELS)
@pytest.mark.parametrize("cap", [25, 4])
def test_a_model_travels_in_the_buckets_that_ddp_makes_of_it(name: str, cap: int) -> None:
    """Whole parameters: the embedding of Llama is one bucket of a gigabyte, and none of it hides behind backward."""
    options = build_parser().parse_args(["--model", name, "--bucket-mb", str(cap)])
    workload = read_question(options).workload
    assert workload.bucket_sizes == ddp_buckets(name, cap << 20)
    assert sum(workload.bucket_sizes) == workload.gradient_nbytes
    halved = workload.halved()
    assert halved.bucket_sizes == tuple(nbytes // 2 for nbytes in workload.bucket_sizes)
    assert sum(halved.bucket_sizes) == halved.gradient_nbytes
    largest = max(prod(shape) for _, shape in PUBLIC_MODELS[name].shapes)
    assert max(workload.bucket_sizes) >= 4 * largest


def test_torchs_hook_halves_every_bucket(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A model given by its shapes and the same by name, and never more than its own exact sum takes."""
    file = tmp_path / "model.json"
    file.write_text(json.dumps(dict(PUBLIC_MODELS["sdxl-lora"].shapes)))
    found = []
    for words in (["--model", "sdxl-lora"], ["--model-json", str(file)]):
        where = ["--preset", "pcie_box", "--nodes", "2", "--nic", "1gbit", "--backward-ms", "333", "--json"]
        assert main([*where, *words]) == 0
        answer = json.loads(capsys.readouterr().out)
        found.append((answer["torch_fp16_hook"]["step_seconds"], answer["plans"]["flat"]["step_seconds"]))
    assert found[0] == found[1] and found[0][0] < 0.7 * found[0][1]


@pytest.fixture(scope="module")
def table() -> list[dict[str, object]]:
    """The whole table, once."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["--preset", "pcie_box", "--models", "--json"]) == 0
    rows: list[dict[str, object]] = json.loads(out.getvalue())
    return rows


def test_every_model_on_every_link(table: list[dict[str, object]]) -> None:
    assert len({(row["model"], row["nodes"], row["link"]) for row in table}) == len(table) == 2 * 5 * len(PUBLIC_MODELS)


def test_half_the_bytes_and_fewer_nodes_never_cost_more(table: list[dict[str, object]]) -> None:
    for row in table:
        seconds = row["seconds"]
        assert isinstance(seconds, dict)
        assert seconds["torch fp16"] <= seconds["plain DDP"] * 1.0001, row
        assert seconds["exact"] <= seconds["plain DDP"] * 1.0001, row
        assert min(seconds.values()) >= row["alone_seconds"] * 0.9999, row  # type: ignore[operator]


def test_a_row_is_what_predict_says_of_that_model_and_link(
    table: list[dict[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--preset", "pcie_box", "--nodes", "4", "--nic", "10gbit", "--nics-per-node", "2", "--model", "sdxl-lora"]
    assert main([*words, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    (row,) = (row for row in table if (row["model"], row["nodes"], row["link"]) == ("sdxl-lora", 4, "2 x 10 GbE"))
    assert row["seconds"]["int8"] == pytest.approx(plans["hierarchical+int8"]["step_seconds"])  # type: ignore[index]


def test_people_get_a_table_that_fits_and_pages_get_one_of_theirs(
    table: list[dict[str, object]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    for row in table:
        nodes, alone, seconds = row["nodes"], row["alone_seconds"], row["seconds"]
        assert isinstance(nodes, int) and isinstance(alone, float) and isinstance(seconds, dict)
        rows.append(predict_models.ModelRow(PUBLIC_MODELS[str(row["model"])], nodes, str(row["link"]), alone, seconds))
    monkeypatch.setattr(predict_models, "rows", lambda models, ask: iter(rows))  # priced once is enough
    assert main(["--preset", "pcie_box", "--models"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80 and "2 nodes: 4 GPUs (NVIDIA A10)" in text
    assert "Predicted, not measured" in text
    assert main(["--preset", "pcie_box", "--models", "--markdown"]) == 0
    page = capsys.readouterr().out
    assert sum(line.startswith("| GPT-2 124M |") for line in page.splitlines()) == 10
    kept = (ROOT / "docs/results/models_by_link.md").read_text()
    assert page.strip() == kept.partition("<!-- printed -->")[2].partition("<!-- /printed -->")[0].strip()
    shown = (ROOT / "README.md").read_text().partition("<!-- models -->")[2].partition("<!-- /models -->")[0].strip()
    of_two_nodes = page.partition("4 nodes of")[0].splitlines()
    assert len(shown.splitlines()) > 10 and set(shown.splitlines()) <= set(of_two_nodes)


def test_the_readmes_first_screen_has_the_figures_of_its_table() -> None:
    """Plain DDP, torch's fp16 hook and int8 on 10 GbE, in the order of the table's columns."""
    page = (ROOT / "README.md").read_text()
    sentence = " ".join(page.partition("`gradwire predict` gives ")[2].partition("So torch's hook")[0].split())
    for model in ("GPT-2", "Llama-3.2-1B", "ResNet-50"):
        row = next(line for line in page.splitlines() if line.startswith(f"| {model}") and "| 10 GbE |" in line)
        plain, fp16, _, int8 = (cell.strip(" !") for cell in row.split("|")[3:7])
        said = re.findall(r"\b\d+\b", sentence.partition(f"{model} ")[2].partition(";")[0])
        assert said == [plain, fp16, int8], model


@pytest.mark.parametrize(
    ("words", "name"),
    [(["--nodes", "2"], "--nodes"), (["--nic", "1gbit"], "--nic"), (["--backward-ms", "3"], "--backward-ms")],
)
def test_what_the_table_has_itself_is_refused(words: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--preset", "pcie_box", "--models", *words]) == 2
    assert f"`{name}`" in capsys.readouterr().err


MACHINES = {
    "a DGX Spark, 200 Gbit/s": ["dgx_spark", "--nic", "200gbit"],
    "4 RTX PRO 6000 without peer access, 2 x 25 GbE": ["rtx_pro_6000", "--nic", "25gbit", "--nics-per-node", "2"],
    "2 RTX 5090, 10 GbE": ["rtx_5090", "--nic", "10gbit"],
    "a Strix Halo, USB4 (10 Gbit/s of TCP)": ["strix_halo", "--nic", "10gbit"],
    "8 MI300X, 8 x 400 Gbit/s": ["mi300x"],
}
"""Row of README's table of machines -> the preset, and the options that it is asked with."""


def row_of(machine: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The row of a machine: milliseconds of plain DDP, torch's fp16 hook, the best exact plan and the best of int8."""
    assert main(["--preset", *MACHINES[machine], "--nodes", "2", "--model", "gpt2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plans = [each for each in found["plans"].values() if each["available"]]
    best = {
        name: min(each["step_seconds"] for each in plans if each["compressor"] == name) for name in ("none", "int8")
    }
    seconds = (found["plans"]["flat"]["step_seconds"], found["torch_fp16_hook"]["step_seconds"], *best.values())
    one_node = found["forward_seconds"] + found["backward_seconds"]
    words = (f"{1000 * each:.0f}{'!' if each > 2 * one_node else ''}" for each in seconds)
    return f"| {machine} | {' | '.join(words)} |"


@pytest.mark.parametrize("machine", MACHINES)
def test_the_table_of_machines_is_what_is_predicted(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = (ROOT / "README.md").read_text().partition("<!-- machines -->")[2].partition("<!-- /machines -->")[0]
    assert row_of(machine, capsys) in shown.splitlines()
