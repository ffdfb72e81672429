"""What judges the scripts, on a repository and records made here; the scripts themselves run by `make real-scripts`."""

import json
import subprocess
from pathlib import Path

import pytest

from real_scripts.job import Record, Step, read
from real_scripts.scripts import NANOGPT, SCRIPTS, Script
from real_scripts.sources import Change, SourceError, apply, take_out
from real_scripts.trial import LEFT_ALONE, Failure, judge


def ranks(*weights: str, losses: tuple[str, ...] = ("0x1p+0",), nbytes: int | None = None) -> list[list[Record]]:
    """One run of two ranks with these weights after their steps."""
    record = Record(losses, tuple(Step(each, nbytes) for each in weights), "")
    return [[record, record]]


def script(**options: object) -> Script:
    return Script(name="s", repository="o/n", commit="c", command=(), **options)  # type: ignore[arg-type]


def test_names_and_repositories_are_unique_and_whole() -> None:
    assert len({one.name for one in SCRIPTS}) == len(SCRIPTS)
    assert all(len(one.commit) == 40 and one.repository.count("/") == 1 for one in SCRIPTS)


def test_files_come_from_the_commit_that_is_named(tmp_path: Path) -> None:
    clone = tmp_path / "sources" / "owner+name"
    clone.mkdir(parents=True)

    def git(*words: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e")
        return subprocess.run(
            ["git", "-C", clone, *identity, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "--quiet")
    for text in ("old", "new"):
        (clone / "train.py").write_text(text)
        git("add", "train.py")
        git("commit", "--quiet", "-m", text)
    old = git("rev-parse", "HEAD~1")
    folder = take_out("owner/name", old, ["train.py"], tmp_path / "sources", tmp_path / "out")
    assert (folder / "train.py").read_text() == "old"
    with pytest.raises(SourceError, match=r"lost\.py"):
        take_out("owner/name", old, ["lost.py"], tmp_path / "sources", tmp_path / "out")


def test_a_change_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("device = 'cuda'\n")
    apply([Change("train.py", "'cuda'", "'cpu'")], tmp_path)
    assert (tmp_path / "train.py").read_text() == "device = 'cpu'\n"
    with pytest.raises(SourceError, match="another commit"):
        apply([Change("train.py", "'cuda'", "'cpu'")], tmp_path)


def test_what_the_observer_writes_is_read(tmp_path: Path) -> None:
    lines = [{"loss": "0x1p+0"}, {"step": 1, "weights": "a", "nbytes": None}, {"loss": "0x1p-1"}]
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "0.txt").write_text("said")
    assert read(tmp_path, 0) == Record(("0x1p+0", "0x1p-1"), (Step("a", None),), "said")


def test_a_script_that_does_as_it_should_passes() -> None:
    found = {"": ranks("a", "b"), "none": ranks("a", "b", nbytes=1000), "int8": ranks("c", "d", nbytes=260)}
    assert "0.26 of them" in judge(script(), found)


@pytest.mark.parametrize(
    ("exact", "compressed", "what"),
    [
        (ranks("a", "x", nbytes=1000), ranks("c", "d", nbytes=260), "weights, rank 0"),
        (ranks("a", "b", losses=("0x1p+1",), nbytes=1000), ranks("c", "d", nbytes=260), "losses, rank 0"),
        (ranks("a", nbytes=1000), ranks("c", "d", nbytes=260), "2 against 1"),
        (ranks("a", "b", nbytes=1000), ranks("c", "d", nbytes=900), "int8 sent 900"),
        (ranks("a", "b", nbytes=1000), ranks("a", "b", nbytes=260), "the same weights"),
        (ranks("a", "b"), ranks("c", "d"), "no hook"),
    ],
)
def test_each_fault_is_seen(exact: list[list[Record]], compressed: list[list[Record]], what: str) -> None:
    with pytest.raises(Failure, match=what):
        judge(script(), {"": ranks("a", "b"), "none": exact, "int8": compressed})


def test_ranks_that_drift_apart_are_seen() -> None:
    [[one, _]], [[other, _]] = ranks("c", "d", nbytes=260), ranks("c", "e", nbytes=260)
    found = {"": ranks("a", "b"), "none": ranks("a", "b", nbytes=1000), "int8": [[one, other]]}
    with pytest.raises(Failure, match="the ranks' weights differ"):
        judge(script(), found)


def test_a_script_without_a_model_to_hook_must_hear_of_it() -> None:
    silent = {"": ranks("a"), "none": ranks("a"), "int8": ranks("a")}
    with pytest.raises(Failure, match="nothing was said"):
        judge(script(hooked=False), silent)
    [[record, _]] = ranks("a")
    heard = Record(record.losses, record.steps, f"GRADWIRE_HOOK is set, and {LEFT_ALONE}")
    assert "left alone" in judge(script(hooked=False), silent | {"int8": [[heard, heard]]})


def test_a_lost_residual_must_be_said() -> None:
    found = {"": ranks("a"), "none": ranks("a", nbytes=1000), "int8": ranks("c", nbytes=260)}
    twice = {mode: [run, run] for mode, [run] in found.items()}
    with pytest.raises(Failure, match="held back"):
        judge(script(resume=()), twice)


def test_modules_that_are_missing_are_named() -> None:
    assert NANOGPT.lacks() == []
    assert script(needs=("json", "no_such_module")).lacks() == ["no_such_module"]
