"""Pictures: every kind of file is drawn, with units, names, machine and date in it; anything else is refused."""

import json
from pathlib import Path

import pytest

from gradwire.bench.plot import command as plot
from gradwire.bench.plot import timeline
from gradwire.bench.plot.bars import draw_compare
from gradwire.bench.plot.style import PlotRecord, load_pyplot

pytest.importorskip("matplotlib")


def bench_record(collective: str = "all_reduce") -> PlotRecord:
    half = {"time": 12.5, "alg_bw": 1.0, "bus_bw": 1.5, "nwrong": 0}
    rows = [
        {"size": size, "block": block, "experiment_name": collective, "out_of_place": half, "in_place": half}
        for block in range(2)
        for size in (0, 1024, 4096)
    ]
    facts = {"ranks": "4 (2 nodes x 2 local ranks)"}
    return {
        "version": 3,
        "machine": "a processor, 2 cores, 2026-01-02",
        "args": ["gradwire", "bench", "-J", "secret/x.json"],
        "config": {"iterations": 20},
        "results": rows,
        "blocks": [
            {"facts": facts | {"backend": "gloo"}},
            {"facts": facts | {"backend": "gradwire", "algorithm": "flat", "compressor": "none"}},
        ],
    }


def compare_record() -> PlotRecord:
    return {
        "kind": "compare",
        "title": "a model on a cluster",
        "machine": "a processor, 2026-01-02",
        "args": ["--megabytes", "2", "--json", "secret/x.json", "--only", "gradwire hier"],
        "results": [
            {
                "name": "plain DDP (gloo)",
                "seconds": 2.0,
                "nic_nbytes": 3e6,
                "error": 0.0,
                "speed_up": 1.0,
                "reason": None,
            },
            {
                "name": "gradwire auto",
                "seconds": 1.0,
                "nic_nbytes": None,
                "error": None,
                "speed_up": 2.0,
                "reason": None,
            },
            {"name": "a peer", "seconds": None, "nic_nbytes": None, "error": None, "speed_up": None, "reason": "no"},
        ],
    }


def test_bench_files_become_two_pictures(tmp_path: Path) -> None:
    load_pyplot().rcParams["svg.fonttype"] = "none"  # text stays text, so that it can be looked for
    file = tmp_path / "run.json"
    file.write_text(json.dumps(bench_record()))
    drawn = plot.draw([file], tmp_path / "run.svg")
    assert [path.name for path in drawn] == ["run-busbw.svg", "run-time.svg"]
    for path, axis in zip(drawn, ("GB/s", "time of one operation"), strict=True):
        text = path.read_text()
        for word in (axis, "bytes", "gloo", "gradwire flat", "a processor", "2026-01-02", "2 nodes", "all_reduce"):
            assert word in text
        assert "secret" not in text


def test_several_files_are_told_apart(tmp_path: Path) -> None:
    load_pyplot().rcParams["svg.fonttype"] = "none"
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    for number, file in enumerate(files):
        file.write_text(json.dumps(bench_record() | {"machine": f"machine {number}"}))
    text = plot.draw(files, tmp_path / "both.svg")[0].read_text()
    for word in ("gloo, before", "gloo, after", "before: machine 0", "after: machine 1"):
        assert word in text


def test_compare_files_become_bars(tmp_path: Path) -> None:
    load_pyplot().rcParams["svg.fonttype"] = "none"
    draw_compare(compare_record(), tmp_path / "bars.svg")
    text = (tmp_path / "bars.svg").read_text()
    for word in (
        "gradwire auto",
        "2.00x",
        "seconds per training step",
        "does not run here: a peer (no)",
        "2026-01-02",
        'gradwire compare --megabytes 2 --only "gradwire hier"',
        "3 MB",
    ):
        assert word in text
    assert "secret" not in text


@pytest.mark.parametrize("kind", [[], {}, None, 3])
def test_a_kind_of_another_type_is_refused_in_words(kind: object, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"kind": kind, "results": []}))
    with pytest.raises(ValueError, match="is none of gradwire's"):
        plot.read(file)


def test_a_training_has_the_loss_beside_each_bar(tmp_path: Path) -> None:
    load_pyplot().rcParams["svg.fonttype"] = "none"
    file = tmp_path / "training.json"
    seconds = {"plain": 0.6, "gradwire": 0.4, "gradwire:fp16": 0.3, "gradwire:int8": 0.2}
    results = [
        {
            "hook": hook,
            "steps": 56,
            "gradient_nbytes": 1_900_000,
            "nic_nbytes_per_step": 3e6,
            "seconds_per_step": each,
            "final_loss": 2.7817 + each / 1e3,
        }
        for hook, each in seconds.items()
    ]
    record = {"kind": "main_job", "nodes": [2, 2], "nic_bits_per_second": 20_000_000, "results": results}
    file.write_text(json.dumps(record | {"machine": "a processor, 2026-01-02", "args": ["--json", "secret/x.json"]}))
    (drawn,) = plot.draw([file], tmp_path / "training.svg")
    text = drawn.read_text()
    for word in (
        "plain DDP",
        "gradwire, exact",
        "gradwire:int8",
        "3.00x",
        "loss 2.7823",
        "loss 2.7819",
        "20mbit",
        "main_job",
    ):
        assert word in text
    assert "secret" not in text


def test_png_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bars.json"
    file.write_text(json.dumps(compare_record()))
    assert plot.main([str(file)]) == 0
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, reduce, bars = tmp_path / "other.json", tmp_path / "reduce.json", tmp_path / "bars.json"
    other.write_text("[1, 2]")
    reduce.write_text(json.dumps(bench_record("reduce")))
    bars.write_text(json.dumps(compare_record()))
    good = tmp_path / "good.json"
    good.write_text(json.dumps(bench_record()))
    for words in (
        [str(other)],
        [str(tmp_path / "missing.json")],
        [str(good), str(reduce)],
        [str(good), str(bars)],
        [str(good), "-o", str(tmp_path / "x.pdf")],
    ):
        assert plot.main(words) == 2
        assert "gradwire plot: `" in capsys.readouterr().err


def test_a_step_of_a_trace_is_drawn_and_one_that_is_not_in_it_refused(tmp_path: Path) -> None:
    def event(rank: int, track: str, name: str, at: float, **args: object) -> dict[str, object]:
        return {"ph": "X", "pid": rank, "tid": 0, "cat": track, "name": name, "ts": at, "dur": 900.0, "args": args}

    events: list[dict[str, object]] = []
    for rank in range(2):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}, node n{rank}"}})
        events.append(event(rank, "step", "step 6: backward", 0.0, step=6))
        events.append(event(rank, "step", "step 6: wait for buckets", 900.0, step=6))
        events.append(event(rank, "buckets", "bucket 0 (`w`)", 100.0 + rank, step=6, bucket=0))
        events.append(event(rank, "lane 0.0", "all_reduce inter_node", 200.0))
    about = {"kind": "gradwire trace", "cluster": "2 nodes x 1 rank", "plans": [], "clock_error_seconds": [0.0, 1e-4]}
    file = tmp_path / "steps.json"
    file.write_text(json.dumps({"traceEvents": events, "otherData": about}))
    (drawn,) = plot.draw([file], tmp_path / "step.svg")
    text = drawn.read_text()
    for words in ("rank 1", "n1", "step 6", "clocks aligned to 0.1 ms", "all_reduce", "waiting"):
        assert words in text, words
    with pytest.raises(ValueError, match=r"`--step`: found 7, wanted 6 to 6, which"):
        plot.draw([file], tmp_path / "step.svg", 7)
    other = tmp_path / "bench.json"
    other.write_text(json.dumps(bench_record()))
    with pytest.raises(ValueError, match="no trace to take it from"):
        plot.draw([other], None, 7)


def _event(lane: int, name: str, began: float, ended: float) -> dict[str, object]:
    return {
        "ph": "X",
        "pid": 0,
        "cat": f"lane {lane}.0",
        "name": name,
        "ts": began * 1e6,
        "dur": (ended - began) * 1e6,
        "args": {"launch": 7},
    }


def test_a_transfer_that_no_lane_carries_is_drawn_from_its_issue_to_the_end_of_the_wait() -> None:
    step = {"ph": "X", "pid": 0, "cat": "step", "name": "step 6: backward", "ts": 0, "dur": 9e6, "args": {"step": 6}}
    events = [
        _event(0, "reduce_scatter intra_node", 0.0, 1.0),
        _event(0, "reduce_scatter intra_node", 1.0, 2.0),
        _event(2, "wait for all_reduce inter_node", 1.5, 4.0),
        _event(2, "all_gather intra_node", 4.0, 4.5),
        _event(2, "wait for all_reduce inter_node", 4.5, 7.0),
    ]
    rows = timeline.rows_of({"traceEvents": [step, *events]}, 6)[0]
    found = [(bar.began, bar.ended, bar.kind) for bar in rows["lane 1, inter_node"]]
    assert found == [(1.0, 4.0, "all_reduce"), (2.0, 7.0, "all_reduce")]


def test_a_collective_in_shared_memory_is_drawn_as_waiting_until_the_last_rank_of_the_node_is_in_it() -> None:
    step = {"ph": "X", "pid": 0, "cat": "step", "name": "step 6: backward", "ts": 0, "dur": 9e6, "args": {"step": 6}}
    gather = "all_gather intra_node"
    events = [
        *({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}, node {node}"}}
          for rank, node in enumerate("aab")),
        _event(2, gather, 1.0, 4.5),
        _event(2, gather, 5.0, 6.0),
        {**_event(2, gather, 4.0, 4.6), "pid": 1},
        {**_event(2, gather, 5.0, 6.0), "pid": 1},
        {**_event(2, gather, 6.0, 7.0), "pid": 2},
    ]  # fmt: skip
    rows = timeline.rows_of({"traceEvents": [step, *events]}, 6)
    bars = {rank: [(bar.began, bar.ended, bar.kind) for bar in rows[rank]["lane 2.0"]] for rank in range(3)}
    assert bars[0] == [(1.0, 4.0, "wait"), (4.0, 4.5, "all_gather"), (5.0, 6.0, "all_gather")]
    assert bars[1] == [(4.0, 4.6, "all_gather"), (5.0, 6.0, "all_gather")]
    assert bars[2] == [(6.0, 7.0, "all_gather")]


def test_numbers_of_buckets_that_would_overlap_stand_together() -> None:
    bars = [timeline.TimelineBar(began, 9.0, "backward", text=str(index)) for index, began in enumerate([0, 0.1, 5])]
    assert [bar.text for bar in timeline._readable(bars, 0.5)] == ["0,1", "", "2"]
