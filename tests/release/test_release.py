"""What a release promises beside the code: pinned actions, a recipe and a citation that agree with the package."""

import re
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# It runs while a wheel is built, and is in no package.
version_here = runpy.run_path(str(ROOT / "docs" / "index_page.py"))["version_here"]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def parsed(text: str) -> Any:
    yaml = pytest.importorskip("yaml", reason="pyyaml reads it; it comes with the extra `test`")
    return yaml.safe_load(text)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_actions_are_pinned_by_commit_with_their_release_beside(file: Path) -> None:
    lines = re.findall(r"uses: (.+)", file.read_text())
    assert lines
    for line in lines:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_every_python_that_the_package_names_is_run_by_a_workflow() -> None:
    named = {
        found[1]
        for each in PROJECT["classifiers"]
        if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each))
    }
    run: set[str] = set()
    for file in WORKFLOWS:
        for job in parsed(file.read_text())["jobs"].values():
            run.update(job.get("strategy", {}).get("matrix", {}).get("python", ()))
    assert named == run


def test_an_archive_of_git_names_its_commit(tmp_path: Path) -> None:
    """Also before the first tag: a wheel built from a downloaded archive replaces that of another commit."""

    def git(*words: str) -> str:
        who = ("-c", "user.name=one", "-c", "user.email=one@localhost", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", "-C", tmp_path, *who, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "--quiet")
    for name in (".gitattributes", ".git_archival.txt"):
        shutil.copy(ROOT / name, tmp_path)
    git("add", ".")
    seen = set()
    for number in range(2):
        git("commit", "--quiet", "--allow-empty", "-m", str(number))
        folder = tmp_path / f"archive{number}"
        git("archive", f"--output={folder}.tar", "HEAD")
        shutil.unpack_archive(f"{folder}.tar", folder, filter="data")
        version = version_here(folder)
        assert version == f"0.1.dev0+g{git('rev-parse', 'HEAD')[:9]}"
        seen.add(version)
    assert len(seen) == 2


def test_the_recipe_asks_for_what_the_package_asks_for() -> None:
    recipe = parsed((ROOT / "packaging" / "conda" / "recipe.yaml.in").read_text())
    needs = {each.replace(" ", "") for each in recipe["requirements"]["run"]}
    assert needs == {*PROJECT["dependencies"], "python", "pytorch>=2.13"}
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert f'match(python, "<{oldest}")' in recipe["build"]["skip"], "conda-forge also builds for older ones"
    assert recipe["about"]["homepage"] and recipe["extra"]["recipe-maintainers"], "conda-smithy asks for both"
    assert recipe["about"]["license"] == PROJECT["license"] and recipe["about"]["summary"] == PROJECT["description"]


def test_the_citation_agrees_with_the_package() -> None:
    citation = parsed((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "type"} <= citation.keys()
    assert citation["license"] == PROJECT["license"]
    assert [each["name"] for each in citation["authors"]] == [each["name"] for each in PROJECT["authors"]]
