"""Where the scripts come from: a git clone of each repository, at the commit that the list names."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FETCHED = "commits_fetched"
"""A file in the git directories that are made here: their commits."""


class SourceError(Exception):
    """What cannot be had, and what to do."""


@dataclass(frozen=True, slots=True)
class Change:
    """A piece of a file that asks for a GPU, and what stands in its place on a machine without."""

    file: str
    wanted: str
    instead: str


def git(*words: str | Path) -> bytes:
    """What a git command prints."""
    done = subprocess.run(["git", *map(str, words)], capture_output=True, check=False)
    if done.returncode:
        raise SourceError(f"git {' '.join(map(str, words[:4]))} ...: {done.stderr.decode()[-500:].strip()}")
    return done.stdout


SERVER = "https://github.com"


def clone_of(repository: str, commit: str, sources: Path) -> Path:
    """The git directory of a repository in `sources`, which has the commit.

    A repository that is not there is fetched: the one commit, without the history, and of its files those that are
    taken out, so that large repositories stay small.

    Args:
        repository: `karpathy/nanoGPT`.
        commit: Its full name.
        sources: Holds a clone or a bare mirror of each repository, as OWNER+NAME.
    """
    folder = sources / repository.replace("/", "+")
    made = folder / FETCHED
    if not folder.exists():
        folder.mkdir(parents=True)
        git("-C", folder, "init", "--quiet", "--bare")
        git("-C", folder, "remote", "add", "origin", f"{SERVER}/{repository}")
        made.touch()
    if made.exists() and commit not in made.read_text().split():
        git("-C", folder, "fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", commit)
        made.write_text(f"{made.read_text()}{commit}\n")
    return folder


def take_out(repository: str, commit: str, paths: Sequence[str], sources: Path, into: Path) -> Path:
    """Puts files of one commit into an empty folder.

    Args:
        repository: `karpathy/nanoGPT`.
        commit: Its full name.
        paths: Files and folders of the repository; none takes all of it.
        sources: See `clone_of`.
        into: Replaced if it exists.
    """
    clone = clone_of(repository, commit, sources)
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    archive = git("-C", clone, "archive", "--format=tar", commit, *paths)
    # Python's own has had a filter against files outside the folder since 3.11.4; tar always refuses them.
    subprocess.run(["tar", "--extract", "--directory", into], input=archive, check=True)
    return into


def apply(changes: Sequence[Change], folder: Path) -> None:
    """Changes files of the copy.

    Raises:
        SourceError: A file does not hold what is to be changed: the list belongs to another commit.
    """
    for change in changes:
        path = folder / change.file
        text = path.read_text()
        if change.wanted not in text:
            raise SourceError(f"{change.file} does not hold {change.wanted!r}: the change is for another commit")
        path.write_text(text.replace(change.wanted, change.instead))
