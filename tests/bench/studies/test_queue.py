"""The queue of trainings: what a list says, what is skipped, and what the page is made of."""

import fcntl
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from gradwire.bench.studies.convergence.alone import sent_nbytes, train_alone
from gradwire.bench.studies.convergence.optimizers import groups_of, optimizers_of
from gradwire.bench.studies.convergence.queue import entries_from, main, task_of, with_tables
from gradwire.bench.studies.convergence.results import (
    BEGIN,
    END,
    Entry,
    Result,
    accumulations,
    draw,
    missing,
    over_exact,
    results_from,
    tables,
)
from gradwire.bench.studies.convergence.tasks import FashionTask, TextTask
from gradwire.compressors.base import Layout, Slice
from gradwire.compressors.composite import make_composite

LIST = """
# what a queue does

text 0.5M muon none 0 steps=2
text 0.5M muon onebit 0 steps=2
text 0.5M muon accumulate{"batches":2} 0 steps=2
text 0.5M muon none 0 steps=2
text 0.5M muon Outer{"every":1,"fragments":1,"delay":0,"compressor":"int8"} 0 steps=2
"""


def result(method: str, seed: int, quality: float, optimizer: str = "muon") -> Result:
    (entry,) = entries_from(f"text 0.5M {optimizer} {method} {seed}")
    return Result(
        entry=entry,
        curve=((400, 3.0), (800, quality)),
        ratio=8.0,
        processor_seconds=1.0,
        date="2026-11-23T10:00+00:00",
        machine="a processor, 2 cores, torch 2.13.0, 2026-11-23",
        load=3.0,
    )


def test_a_line_is_a_training_for_each_seed() -> None:
    first, second, third = entries_from('text 0.5M muon powersgd{"rank":16} 0,2\ntext 10M adamw none 1 steps=8')
    assert (first.seed, second.seed, first.steps) == (0, 2, 800)
    assert first.options == {"rank": 16} and first.method == 'powersgd{"rank":16}'
    assert (third.size, third.optimizer, third.steps, third.method) == ("10M", "adamw", 8, "none")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("text 0.5M muon none", "TASK SIZE OPTIMIZER"),
        ("text 5M muon none 0", "wanted text 0.5M or 10M"),
        ("text 0.5M sgd none 0", "trained with adamw or muon"),
        ('text 0.5M muon int4{"rank":2} 0', "int4 has no option rank"),
        ("text 0.5M muon int3 0", "`compressor` is 'int3'"),
        ('text 0.5M muon accumulate{"lr":2} 0', "with `batches`"),
        ('text 0.5M muon accumulate{"batches":0} 0', "a whole number, 1 or more"),
        ("text 0.5M muon none x", "invalid literal"),
        ('text 0.5M muon Outer{"rank":2} 0', "Outer has no option rank"),
        ("words 1M adam none 0", "or words 0.3M"),
    ],
)
def test_a_line_that_says_something_else_is_named(line: str, wanted: str) -> None:
    with pytest.raises(ValueError, match=r"`--entries` line 2: ") as caught:
        entries_from(f"# first\n{line}\n")
    assert wanted in str(caught.value)


def test_what_is_compared_has_as_many_nodes_and_exact_parameters_are_of_the_method() -> None:
    two, four, kept = entries_from(
        'text 0.5M muon none 0\ntext 0.5M muon none{"nodes":4} 0\nwords 0.3M adam int8{"exact":"a.*,b.*"} 0'
    )
    assert two.method == four.method == "none" and two.kind != four.kind and (two.nodes, four.nodes) == (2, 4)
    assert kept.exact == ("a.*", "b.*") and kept.method == 'int8{"exact":"a.*,b.*"}'
    assert kept.kind == ("words", "0.3M", 300, 2)


def test_exact_parameters_cost_their_bytes_and_have_no_error() -> None:
    task = task_of("words", "0.3M")
    task.load()
    some, none, everything = (
        train_alone(task, "waterfill2", {}, 0, 1, exact=each) for each in (("embedding.*",), (), ("*",))
    )
    exact = train_alone(task, None, {}, 0, 1)
    assert exact.ratio == pytest.approx(everything.ratio) and none.ratio > 10 > some.ratio > 1
    assert everything.quality == pytest.approx(exact.quality, rel=1e-6)


def test_what_the_file_has_is_left_out_and_nothing_is_done_twice() -> None:
    entries = entries_from("text 0.5M muon none 0,1\ntext 0.5M muon none 1\ntext 0.5M muon none 0 steps=8")
    left = missing(entries, [result("none", 0, 2.0)])
    assert [(each.seed, each.steps) for each in left] == [(1, 800), (0, 8)]


def test_a_queue_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    entries, data = tmp_path / "entries", tmp_path / "data.jsonl"
    entries.write_text(LIST)
    command = [
        *(sys.executable, "-m", "gradwire.bench.studies.convergence.queue", "run"),
        *("--entries", str(entries), "--data", str(data), "--nice", "0"),
    ]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    lines = data.read_text().splitlines()
    results = results_from(data)
    assert [each.entry.compressor for each in results] == ["none", "onebit", "accumulate", "Outer"]
    assert [each.curve[-1][0] for each in results] == [2, 2, 1, 2]
    assert abs(results[3].quality - results[0].quality) < 0.1 and 3.0 < results[3].ratio < 4.0
    assert results[2].ratio == 2.0
    data.write_text("\n".join(lines[:2]) + "\n")  # as if it had been stopped in the third
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    again = data.read_text().splitlines()
    assert again[:2] == lines[:2]
    assert results_from(data)[2].curve == results[2].curve
    with data.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        entries.write_text("text 0.5M muon none 5 steps=2\n")
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 1
    assert "is in use by another queue" in ended.stderr
    ended = subprocess.run([*command, "--until", "00:00"], check=False, capture_output=True, text=True, timeout=900)
    assert "1 trainings are left" in ended.stdout
    assert data.read_text().splitlines() == again


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    assert results_from(file) == []
    file.write_text(json.dumps(asdict(result("none", 0, 2.0))) + "\n{}\n")
    with pytest.raises(ValueError, match=r"data\.jsonl line 2 is no result"):
        results_from(file)


def test_tables_compare_with_the_exact_sum_of_the_same_seed() -> None:
    results = [
        *(result("none", seed, 2.0 + seed) for seed in (0, 1)),
        result("int4", 0, 2.25),
        result("int4", 1, 3.0),
        result("waterfill2", 2, 9.0),
        result("none", 0, 5.0, "adamw"),
        result("int4", 0, 5.5, "adamw"),
    ]
    assert over_exact(results[2:5], results) == [0.25, 0.0]
    text = tables(results)
    assert "| `int4` | 8.0x | 5.500 (0) | +0.500 | 2.250, 3.000 (0, 1) | +0.125 |" in text
    assert "| `waterfill2` | 8.0x |  |  | 9.000 (2) | ? |" in text
    assert "queue: 7 trainings; a processor, 2 cores, torch 2.13.0, 2026-11-23, load 3 to 3." in text
    assert accumulations(results) == ""
    several = result('accumulate{"batches":4}', 0, 4.0)
    assert "| text 0.5M | muon | 4 | 1x | 800 | 800 | 2178 | 218 | 4.000 (0) |" in accumulations([*results, several])
    assert tables([*results, several]) == text
    assert text.index("`none`") < text.index("`waterfill2`") < text.index("`int4`")


def test_page_and_picture_come_from_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, picture = tmp_path / "data.jsonl", tmp_path / "picture.png"
    rows = [result("none", 0, 2.0), result("int4", 0, 2.25)]
    data.write_text("".join(json.dumps(asdict(each)) + "\n" for each in rows))
    assert main(["show", "--data", str(data), "--draw", str(picture)]) == 0
    page = with_tables(f"before\n{BEGIN}\n{END}\nafter\n", data)
    assert "+0.250" in page and page.endswith("after\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "+0.250" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no method beside an exact sum"):
        draw(rows[1:], picture)


def test_muon_gets_the_matrices_inside_and_the_rest_is_adamws() -> None:
    task = TextTask()
    model = task.model(0)
    muon, adamw = optimizers_of(task, model, "muon", lr=0.5)
    names = {id(each): name for name, each in model.named_parameters()}
    inside = {names[id(each)] for group in muon.param_groups for each in group["params"]}
    assert {name.partition(".")[0] for name in inside} == {"blocks"} and len(inside) == 8
    assert len(inside) + sum(len(group["params"]) for group in adamw.param_groups) == len(names)
    assert [group["lr"] for group in groups_of([muon, adamw])] == [1.5e-3, 1.5e-3]
    (alone,) = optimizers_of(task, model, "adamw")
    assert isinstance(alone, torch.optim.AdamW)
    with pytest.raises(ValueError, match="trained with adamw or muon"):
        optimizers_of(task, model, "sgd")
    with pytest.raises(ValueError, match=r"no matrix named blocks\."):
        optimizers_of(FashionTask(), nn.Linear(2, 2), "muon")


@pytest.mark.parametrize(
    ("name", "size", "wanted"),
    [
        ("text", "0.5M", 470_528),
        ("text", "10M", 10_048_640),
        ("fashion", "0.1M", 105_866),
        ("fashion", "5M", 5_054_026),
    ],
)
def test_sizes_are_what_they_say(name: str, size: str, wanted: int) -> None:
    assert sum(each.numel() for each in task_of(name, size).model(0).parameters()) == wanted


def test_ten_million_parameters_take_a_lower_rate_of_adamw_and_muons_own() -> None:
    task = task_of("text", "10M")
    model = task.model(0)
    (alone,) = optimizers_of(task, model, "adamw")
    assert [group["lr"] for group in alone.param_groups] == [1e-3]
    assert [group["lr"] for group in groups_of(optimizers_of(task, model, "muon"))] == [3e-3, 3e-3]


def test_behind_is_less_of_an_accuracy_and_more_of_a_loss() -> None:
    for task, optimizer, ends in (("fashion", "sgd", (90.0, 89.0)), ("text", "adamw", (2.0, 3.0))):
        results = [
            Result(
                entry=Entry(task=task, size="1M", optimizer=optimizer, compressor=name, options={}, seed=0, steps=9),
                curve=((9, end),),
                ratio=1.0,
                processor_seconds=None,
                date="2026-11-25",
                machine="a machine, 2 cores",
                load=None,
            )
            for name, end in zip(("none", "int8"), ends, strict=True)
        ]
        assert over_exact(results[1:], results) == [1.0]


def test_a_dense_start_counts_among_the_bytes() -> None:
    shape = (512, 512)
    layout = Layout((Slice("blocks.weight", shape, 0, 0, 512 * 512),))
    powersgd = make_composite("powersgd", {"rank": 4, "warmup_steps": 3}, ())
    sent = [sent_nbytes(powersgd, layout, 2, update) for update in range(5)]
    assert sent == [4 * 512 * 512] * 3 + [powersgd.wire_nbytes(layout, 2)] * 2
    dgc = make_composite("dgc", {"momentum": 0.0}, ())
    assert sent_nbytes(dgc, layout, 2, 0) == dgc.wire_nbytes(layout, 2)


def test_entries_are_the_same_whatever_the_order_of_their_options() -> None:
    one, other = (
        Entry(task="text", size="0.5M", optimizer="muon", compressor="x", options=options, seed=0, steps=1)
        for options in ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    )
    assert one.key == other.key
