"""The version, and the README as a package index shows it: with links to the repository, as an index has no docs/.

scikit-build-core calls it for the fields `version`, `readme` and `urls` of pyproject.toml. The variable
GRADWIRE_REPOSITORY names the repository (`https://github.com/OWNER/NAME`); the workflow that builds a release sets it
to its own. Where it is not set, the words of a relative link stay and its address goes, and so do pictures: better no
link than a dead one.
"""

import os
import re
from collections.abc import Mapping
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FALLBACK = "0.1.dev0"
"""Version of a folder without a tag and without git's history; an archive that git has made adds its commit."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|mailto:|#)([^)\s]+)\)")


def dynamic_metadata(settings: Mapping[str, object], project: Mapping[str, object]) -> dict[str, object]:
    """Returns the fields `version`, `readme` and `urls`.

    Args:
        settings: Of the table in pyproject.toml; there are none.
        project: The other fields.
    """
    saved = ROOT / "PKG-INFO"
    if saved.exists():  # an sdist: its wheels say what it says
        message = Parser().parsestr(saved.read_text(encoding="utf-8"))
        version, text = str(message["Version"]), str(message.get_payload())
        urls = dict(each.split(", ", 1) for each in message.get_all("Project-URL") or [])
    else:
        repository = os.environ.get("GRADWIRE_REPOSITORY", "").rstrip("/")
        version = version_here(ROOT)
        text = rewrite((ROOT / "README.md").read_text(encoding="utf-8"), repository, shown(version))
        urls = urls_of(repository, shown(version))
    return {"version": version, "readme": {"content-type": "text/markdown", "text": text}, "urls": urls}


def version_here(root: Path) -> str:
    """Returns the version by git's tags and commits; of an archive before the first tag, the commit alone.

    Args:
        root: Folder of pyproject.toml: a checkout, what `git archive` made of one, or neither.
    """
    archived = root / ".git_archival.txt"
    text = archived.read_text(encoding="utf-8") if archived.exists() else ""
    fields = dict(re.findall(r"^([\w-]+): *(.*)$", text, re.MULTILINE))
    # git has put in the commit and found no tag; setuptools-scm would say 0.0 of every commit.
    if re.fullmatch("[0-9a-f]+", fields.get("node", "")) and not fields.get("describe-name"):
        return f"{FALLBACK}+g{fields['node'][:9]}"
    from setuptools_scm import get_version

    return str(get_version(str(root), fallback_version=FALLBACK))


def shown(version: str) -> str:
    """Return what the links of a version show: its tag, or between two tags the commit that the version names.

    Args:
        version: `0.1.0`, or `0.1.dev2345+g1a2b3c4d5` of a commit without a tag.
    """
    commit = re.search(r"\+g([0-9a-f]+)", version)
    return commit[1] if commit else f"v{version}"


def rewrite(text: str, repository: str, tag: str) -> str:
    """Makes relative links absolute.

    Args:
        text: In Markdown.
        repository: Its address on GitHub, or on a forge with the same paths; empty where it is not known.
        tag: The tag or commit that the links show: `v0.1.0`.
    """

    def absolute(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if not repository:
            return "" if picture else words
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/{tag}/{target})"

    return LINK.sub(absolute, text)


def urls_of(repository: str, tag: str) -> dict[str, str]:
    """The links beside the page: `Project-URL` in the metadata.

    Messages of an installed wheel name pages by the address of the documentation, which therefore shows this version.

    Args:
        repository: Its address; empty where it is not known.
        tag: The tag or commit that the documentation is of.
    """
    if not repository:
        return {}
    return {
        "Source": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/index.md",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
