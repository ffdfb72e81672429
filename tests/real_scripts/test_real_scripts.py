"""What judges the scripts, on a repository and records made here; the scripts themselves run by `make real-scripts`."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from real_scripts import sources
from real_scripts.__main__ import table
from real_scripts.job import JobError, Record, Step, read, run
from real_scripts.scripts import NANOGPT, SCRIPTS, Script
from real_scripts.sources import Change, SourceError, apply, take_out
from real_scripts.trial import LEFT_ALONE, Failure, Verdict, judge


def ranks(*weights: str, losses: tuple[str, ...] = ("0x1p+0",), nbytes: int | None = None) -> list[list[Record]]:
    """One run of two ranks with these weights after their steps."""
    record = Record(losses, tuple(Step(each, nbytes) for each in weights), "")
    return [[record, record]]


def script(**options: object) -> Script:
    return Script(name="s", repository="o/n", commit="c", command=(), **options)  # type: ignore[arg-type]


def test_names_and_repositories_are_unique_and_whole() -> None:
    assert len({one.name for one in SCRIPTS}) == len(SCRIPTS)
    fetched = [one for one in SCRIPTS if one.repository]
    assert all(len(one.commit) == 40 and one.repository.count("/") == 1 for one in fetched)
    assert all(one.command[0] == "-m" and one.needs for one in SCRIPTS if one not in fetched)


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is missing: apt-get install git")


@needs_git
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


@needs_git
def test_of_a_repository_one_commit_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = tmp_path / "server" / "owner" / "name"
    origin.mkdir(parents=True)

    def git(*words: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e")
        return subprocess.run(
            ["git", "-C", origin, *identity, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "--quiet")
    # As GitHub's server is set up.
    git("config", "uploadpack.allowFilter", "true")
    git("config", "uploadpack.allowAnySHA1InWant", "true")
    commits = []
    for text in ("first", "second", "third"):
        (origin / "train.py").write_text(text)
        git("add", "train.py")
        git("commit", "--quiet", "-m", text)
        commits.append(git("rev-parse", "HEAD"))
    monkeypatch.setattr(sources, "SERVER", f"file://{tmp_path / 'server'}")
    for commit, text in list(zip(commits, ("first", "second", "third"), strict=True))[:2]:
        folder = take_out("owner/name", commit, ["train.py"], tmp_path / "sources", tmp_path / "out")
        assert (folder / "train.py").read_text() == text
    held = sources.git("-C", tmp_path / "sources" / "owner+name", "rev-list", "--all", *commits[:2]).decode().split()
    assert sorted(held) == sorted(commits[:2])
    git("checkout", "--quiet", "--detach", commits[0])
    (origin / ".git").rename(origin / "gone")  # what has been fetched is not asked for again
    take_out("owner/name", commits[1], ["train.py"], tmp_path / "sources", tmp_path / "out")


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
    verdict = judge(script(killed_after=2), found)
    assert verdict == Verdict("2 steps", "equal bits", "0.26 of the bytes", "killed after 2, saves nothing")
    shown = table({"good": (verdict, "passed"), "other": (None, "not run, because this environment lacks wings")})
    assert shown.splitlines()[2].split("  ")[0] == "good" and "0.26 of the bytes" in shown
    assert shown.splitlines()[-1] == "other: not run, because this environment lacks wings"


def test_a_command_that_starts_the_ranks_is_run_once(tmp_path: Path) -> None:
    code = (
        "import os, pathlib\n"
        "assert 'RANK' not in os.environ\n"
        "for rank in '01':\n"
        "    pathlib.Path(os.environ['REAL_SCRIPTS_RECORD'], rank + '.jsonl').write_text('{\"loss\": \"0x1p+0\"}')\n"
        "print('said')\n"
    )
    (tmp_path / "start.py").write_text(code)
    found = run(["start.py"], tmp_path, tmp_path / "record", {}, starts_ranks=True)
    assert found == [Record(("0x1p+0",), (), "said\n")] * 2
    with pytest.raises(JobError, match=r"(?s)ended with \[1\].*AssertionError"):
        run(["start.py"], tmp_path, tmp_path / "record", {"RANK": "0"}, starts_ranks=True)


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


def test_a_training_that_computes_nothing_proves_nothing() -> None:
    lost = ranks("a", "b", losses=("nan",))
    with pytest.raises(Failure, match="not a number"):
        judge(script(), {"": lost, "none": lost, "int8": ranks("c", "d", nbytes=260)})


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
    assert "left alone" in judge(script(hooked=False), silent | {"int8": [[heard, heard]]}).compressed


def test_a_lost_residual_must_be_said() -> None:
    found = {"": ranks("a"), "none": ranks("a", nbytes=1000), "int8": ranks("c", nbytes=260)}
    twice = {mode: [run, run] for mode, [run] in found.items()}
    with pytest.raises(Failure, match="held back"):
        judge(script(resume=()), twice)


def test_what_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not NANOGPT.lacks()
    assert script(needs=("json", "no_such_module")).lacks() == "this environment lacks no_such_module"
    (tmp_path / "half_a_module.py").write_text("raise OSError('a library is missing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    wanted = "`import half_a_module` fails here: OSError: a library is missing"
    assert script(needs=("json", "half_a_module")).lacks() == wanted
