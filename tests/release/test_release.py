"""What a release promises beside the code: pinned actions, a recipe and a citation that agree with the package."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
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


def test_the_recipe_asks_for_what_the_package_asks_for() -> None:
    recipe = parsed((ROOT / "packaging" / "conda" / "recipe.yaml.in").read_text())
    needs = {each.replace(" ", "") for each in recipe["requirements"]["run"]}
    assert needs == {*PROJECT["dependencies"], "python", "pytorch>=2.13"}
    assert recipe["about"]["license"] == PROJECT["license"] and recipe["about"]["summary"] == PROJECT["description"]


def test_the_citation_agrees_with_the_package() -> None:
    citation = parsed((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "type"} <= citation.keys()
    assert citation["license"] == PROJECT["license"]
    assert [each["name"] for each in citation["authors"]] == [each["name"] for each in PROJECT["authors"]]
