"""What the study of injected faults counts as right, and where it writes that."""

import io
import logging
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from gradwire.bench.studies.watch import injected
from gradwire.bench.studies.watch.forked import run_ranks
from gradwire.bench.studies.watch.job import InjectedDelay, NamedRank
from gradwire.comms.watch.activity import QUEUE
from gradwire.comms.watch.collective import IssuedCollective
from gradwire.comms.watch.trouble import Disagreement


def test_a_delay_counts_where_its_rank_is_named_alone() -> None:
    found = [
        InjectedDelay(1, (NamedRank(1),), ()),
        InjectedDelay(2, (), (NamedRank(2),)),
        InjectedDelay(3, (NamedRank(3), NamedRank(0)), ()),
        InjectedDelay(0, (NamedRank(0), NamedRank(1, QUEUE)), ()),
    ]
    assert injected.delay_row("ddp", found).endswith(
        "| 2 of 4 named within 20 steps; another rank was named 2 times, 1 of them as waiting for a processor |"
    )
    assert injected.delay_row("ddp", found[:1]).endswith("| 1 of 1 named within 20 steps, nobody else |")


def test_what_was_not_explained_in_time_is_not_counted() -> None:
    row = injected.disagreement_row("skip", [3.0, None, 4.5])
    assert "a rank leaves out a collective" in row and "2 of 3 explained with file and line, after 3.0 to 4.5 s" in row
    assert injected.healthy_row(10_000, [], 0.0123).endswith("12.3 ms each | nobody named |")
    assert injected.healthy_row(10, [NamedRank(3, "the optimizer")], 0.1).endswith(
        "| rank 3 (in the optimizer) named |"
    )


def test_a_logged_disagreement_is_found() -> None:
    late, own = (IssuedCollective(7, "all_reduce of [3] Float", f"job.py:{line} in train", 1.0) for line in (90, 88))
    disagreement = Disagreement("default", 7, {0: own, 1: own, 2: late})
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(logging.Formatter("%(created).3f %(message)s"))  # as `watched` sets it
    logger = logging.getLogger("gradwire")
    logger.addHandler(handler)
    try:
        logger.warning("watch: %s", disagreement)
    finally:
        logger.removeHandler(handler)
    assert injected.explained_at(output.getvalue(), 2) == pytest.approx(time.time(), abs=60)
    assert injected.explained_at(output.getvalue(), 3) is None


def test_what_the_data_file_has_is_not_run_again_and_fills_the_table(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    first = injected.Outcomes(data)
    assert first.missing("disagree", ["skip", "order"]) == ["skip", "order"]
    first.add(injected.Outcome("healthy", "10", [[], 0.1], "a machine", 3.0))
    first.add(injected.Outcome("disagree", "skip", [2.0, None], "a machine", 5.0))
    late = InjectedDelay(1, (NamedRank(1, "the optimizer"),), ())
    first.add(injected.Outcome("late", "ddp", [asdict(late)], "a machine", 4.0))
    read = injected.Outcomes(data)
    assert read.missing("disagree", ["skip", "order"]) == ["order"] and not read.missing("late", ["ddp"])
    text = injected.with_table(f"before\n{injected.BEGIN}\nold\n{injected.END}\nafter\n", read.all)
    assert text.startswith(f"before\n{injected.BEGIN}") and text.endswith(f"{injected.END}\nafter\n")
    rows = [injected.delay_row("ddp", [late]), injected.disagreement_row("skip", [2.0, None])]
    assert "\n".join(["| injected | said |", "|---|---|", *rows, injected.healthy_row(10, [], 0.1)]) in text
    assert "watch.jsonl`, a machine, at a load of 3 to 5." in text and "old" not in text
    with pytest.raises(ValueError, match="injected: begin"):
        injected.with_table("nothing", read.all)


def test_ranks_are_ended_as_by_torchrun_when_one_has_failed() -> None:
    def main(rank: int, port: int) -> None:
        print(f"rank {rank} on {port}")
        if rank == 1:
            raise ValueError("the second one fails")
        time.sleep(30.0)

    statuses, text = run_ranks(3, main, 60.0)
    assert statuses == [-15, 1, -15]
    assert "the second one fails" in text
