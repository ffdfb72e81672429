"""The pages: every Python block of README.md and docs/ runs, links lead somewhere, folders stay small.

The blocks of a page share a namespace and run in order, in a world of one rank. Before them stand `gradwire`, `torch`,
`nn`, `dist`, `DistributedDataParallel`, `build_model()` and `train(model, optimizer, steps)`. What a block needs beside
these is in an HTML comment of the page, `<!-- before: ... -->`; a block that cannot run has a comment above it,
`<!-- not run: why -->`.
"""

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
CODE = {"bench", "comms", "compressors", "csrc", "gradwire", "topology"}
"""Folders that who has the wheel has elsewhere."""
MOST_NOT_RUN = 6
"""Blocks that are marked as not run: each is a promise that nobody checks, but for the four of frameworks.md, whose
lines the jobs of tests/adapters hold."""

_PIECE = re.compile(
    r"^<!-- before:\n(?P<before>.*?)^-->$"
    r"|^<!-- not run: (?P<why>[^\n]+) -->\n+```python\n.*?^```$"
    r"|^```python\n(?P<block>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line, source) of what runs of a page, in order."""
    text = page.read_text()
    found = []
    for piece in _PIECE.finditer(text):
        kind = "before" if piece["before"] is not None else "block"
        if piece[kind] is not None:
            found.append((text.count("\n", 0, piece.start(kind)) + 1, piece[kind]))
    return found


RUNNER = """
import json, os, sys, traceback

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.bench.emulation.launch import held_port

torch.set_num_threads(1)


def build_model():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))


def train(model, optimizer=None, steps=1):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()


def new_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


failures = {}
for name, pieces in json.load(sys.stdin):
    before = {"gradwire": gradwire, "torch": torch, "nn": nn, "dist": dist, "build_model": build_model, "train": train}
    names = before | {"DistributedDataParallel": DistributedDataParallel, "__name__": "page"}
    os.environ["MASTER_PORT"] = "0"
    if not any("init_process_group" in source for _, source in pieces):
        new_group()
    for line, source in pieces:
        with held_port() as port:
            if "init_process_group" in source:
                os.environ["MASTER_PORT"] = str(port)
            try:
                exec(compile("\\n" * (line - 1) + source, name, "exec"), names)
            except BaseException:
                failures[name] = traceback.format_exc()
                break
    names.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
with open(sys.argv[1], "w") as file:
    json.dump(failures, file)
"""


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Page -> traceback, of one process that runs all pages: importing torch takes longer than they do."""
    folder = tmp_path_factory.mktemp("pages")
    pages = [(name, found) for name, page in zip(NAMES, PAGES, strict=True) if (found := blocks(page))]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(folder / "failures.json")],
        input=json.dumps(pages),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, str] = json.loads((folder / "failures.json").read_text())
    return result


def test_pages_import_public_names_alone() -> None:
    """What a page has users import, `gradwire` itself offers."""
    for page in PAGES:
        for line, code in blocks(page):
            inner = re.findall(r"(?:from|import) (gradwire\.[\w.]+)", code)
            assert not inner, f"{page.name}:{line} imports {inner[0]}: make it a public name of gradwire"


@pytest.mark.parametrize("name", [name for name, page in zip(NAMES, PAGES, strict=True) if blocks(page)])
def test_the_python_blocks_run(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]


def test_few_blocks_are_not_run() -> None:
    reasons = [piece["why"] for page in PAGES for piece in _PIECE.finditer(page.read_text()) if piece["why"]]
    assert len(reasons) <= MOST_NOT_RUN, reasons


@pytest.mark.parametrize("name", NAMES)
def test_no_python_block_escapes(name: str) -> None:
    """Every fence that says `python` is found above: one that is indented or written otherwise would never run."""
    text = (ROOT / name).read_text()
    fences = len(re.findall(r"^\s*```\s*(?:python|py)\b", text, re.MULTILINE))
    found = sum(piece["before"] is None for piece in _PIECE.finditer(text))
    assert found == fences


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", [*NAMES, "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_between_pages_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{name} links to {target}, which is not there"
        room = file.resolve().relative_to(ROOT).parts[0]
        assert room not in CODE, f"{name} links to {target}: who has the wheel has no such file; name it"
        assert not anchor or anchor in _anchors(file), f"{name} links to {target}, which has no such heading"


def test_every_page_is_in_the_index() -> None:
    """Whose lists are the site's navigation, too: docs/site_pages.py."""
    index = (ROOT / "docs" / "index.md").read_text()
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]]
    assert [page for page in pages if page != "index.md" and f"]({page}" not in index] == []


def test_what_the_api_page_lists_is_there() -> None:
    listed = re.findall(r"^- `(gradwire[\w.]*)`", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE)
    parts = [name.rpartition(".") for name in listed]
    gone = [name for module, _, name in parts if not hasattr(importlib.import_module(module), name)]
    assert len(listed) > 20 and not gone


def test_no_page_shows_directives_where_a_forge_shows_it() -> None:
    assert [name for name, page in zip(NAMES, PAGES, strict=True) if "```{" in page.read_text()] == []


def test_the_site_begins_with_the_readme_and_is_made_again_when_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx", reason="it comes with the extra `docs`")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    noted: list[str] = []
    source = [(ROOT / "docs" / "index.md").read_text()]
    site_pages: Any = importlib.import_module("site_pages")
    site_pages.change(SimpleNamespace(env=SimpleNamespace(note_dependency=noted.append)), "index", source)
    assert noted == [str(ROOT / "README.md")]
    first = (ROOT / "README.md").read_text().split("\n\n")[:2]
    assert source[0].startswith("\n\n".join(first)) and "# All pages" in source[0]


FOR_USERS = ("start", "how-to", "reference", "explanation")


def test_pages_for_users_begin_with_a_sentence() -> None:
    """The first thing below the title is prose: not a heading, code or a table."""
    for page in (page for page in PAGES[1:] if page.parent.name in FOR_USERS):
        title, _, rest = page.read_text().partition("\n")
        first = rest.strip().partition("\n\n")[0]
        assert title.startswith("# ") and re.match(r"[`*\[]*\w", first), f"{page.name} begins with {first[:40]!r}"
        assert not first.startswith("```"), f"{page.name} begins with code"


def _texts_of_the_code() -> str:
    """All strings of the code, f-strings with `...` for what differs, one a line."""
    found = []
    installed = importlib.util.find_spec("gradwire")
    assert installed is not None and installed.origin is not None
    top = Path(installed.origin).parent  # in a checkout its folders are links, which rglob follows only where it begins
    for folder in (top, top / "comms", top / "compressors"):
        for file in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    found.append(
                        "".join(str(each.value) if isinstance(each, ast.Constant) else "..." for each in node.values)
                    )
    return "\n".join(text.replace("%s", "...").replace("%d", "...") for text in found)


def test_troubleshooting_quotes_messages_that_there_are() -> None:
    """Who looks for the words of a message must find them: each is a part of one string of the code."""
    page = (ROOT / "docs" / "reference" / "troubleshooting.md").read_text().partition("## Not gradwire's own")[0]
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    quoted = [
        words.strip()
        for row in rows
        for words in re.findall(r"``\s?(.+?)\s?``|`([^`]+)`", row)
        for words in words
        if words
    ]
    texts = _texts_of_the_code()
    assert len(quoted) > 40
    assert [words for words in quoted if words not in texts] == []


def test_the_changelog_begins_with_the_version_that_would_be_built() -> None:
    """Between two tags the version is a development version of the next release: 0.1.dev2345+g1a2b3c4d5."""
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    release = re.match(r"[\d.]+\d(?!\w)", metadata.version("gradwire").partition(".dev")[0])
    assert first is not None and release is not None
    numbers = [[int(part) for part in text.split(".")] + [0] for text in (first[1], release[0])]
    assert numbers[0][:3] == numbers[1][:3]


def _yaml_files() -> list[Path]:
    return [ROOT / ".pre-commit-config.yaml", ROOT / ".readthedocs.yaml", *sorted((ROOT / ".github").rglob("*.yml"))]


@pytest.mark.parametrize("file", _yaml_files(), ids=lambda file: file.name)
def test_workflows_and_templates_are_yaml(file: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="pyyaml reads them; it comes with the extra `test`")
    content: Any = yaml.safe_load(file.read_text())
    assert isinstance(content, dict)
    if file.parent.name == "workflows":
        # YAML 1.1 reads the key `on` as true.
        assert {"name", True, "jobs"} <= content.keys()
        assert all("runs-on" in job and job["steps"] for job in content["jobs"].values())
