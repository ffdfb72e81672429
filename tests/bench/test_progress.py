"""The progress bar of commands: what it prints for tasks with and without a known number of steps."""

from rich.progress import Progress

from gradwire.bench import terminal


def test_a_task_without_a_known_end_shows_no_count() -> None:
    progress = Progress(terminal._Count(), auto_refresh=False)
    open_ended = progress.add_task("starting", total=None)
    assert str(terminal._Count().render(progress.tasks[0])) == ""
    progress.update(open_ended, total=24, completed=3)
    assert str(terminal._Count().render(progress.tasks[0])) == "3/24"
