"""What the study of planted faults counts as right, and where it writes that."""

import time
from pathlib import Path

import pytest

from gradwire.bench.studies.watch import planted
from gradwire.bench.studies.watch.forked import run_ranks
from gradwire.bench.studies.watch.job import PlantedDelay


def test_a_delay_counts_where_its_rank_is_named_alone() -> None:
    found = [
        PlantedDelay(1, (1,), ()),
        PlantedDelay(2, (), (2,)),
        PlantedDelay(3, (3, 0), ()),
        PlantedDelay(0, (0,), ()),
    ]
    assert "| 2 of 4 named within 20 steps; another rank was named 1 times |" in planted.delay_row("ddp", found)
    assert planted.delay_row("ddp", found[:1]).endswith("| 1 of 1 named within 20 steps, nobody else |")


def test_what_was_not_explained_in_time_is_not_counted() -> None:
    row = planted.disagreement_row("skip", [3.0, None, 4.5])
    assert "a rank leaves out a collective" in row and "2 of 3 explained with file and line, after 3.0 to 4.5 s" in row
    assert planted.healthy_row(10_000, [], 0.0123).endswith("12.3 ms each | nobody named |")
    assert planted.healthy_row(10, [3], 0.1).endswith("| rank 3 named |")


def test_the_table_takes_the_place_of_the_last_one_and_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{planted.BEGIN}\nold\n{planted.END}\nafter\n")
    planted.write(page, ["| a | b |"], "python -m study")
    text = page.read_text()
    assert text.startswith(f"before\n{planted.BEGIN}") and text.endswith(f"{planted.END}\nafter\n")
    assert "| planted | said |\n|---|---|\n| a | b |" in text and "`python -m study`" in text and "old" not in text
    page.write_text("nothing")
    with pytest.raises(ValueError, match="`write`"):
        planted.write(page, [], "")


def test_ranks_are_ended_as_by_torchrun_when_one_has_failed() -> None:
    def main(rank: int, port: int) -> None:
        print(f"rank {rank} on {port}")
        if rank == 1:
            raise ValueError("the second one fails")
        time.sleep(30.0)

    statuses, text = run_ranks(3, main, 60.0)
    assert statuses == [-15, 1, -15]
    assert "the second one fails" in text
