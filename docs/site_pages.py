"""What the site makes of two pages that read as plain Markdown on a forge.

- `index.md` begins with what README.md says, and its lists become the site's navigation.
- In `reference/api.md` an item that begins with a name becomes that name's signature and docstring. Docstrings have
  code in single backticks, as Markdown has it.
"""

import importlib
import inspect
import re
from pathlib import Path

from sphinx.application import Sphinx

README = Path(__file__).resolve().parents[1] / "README.md"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|mailto:|#)([^)\s]+)\)")
LISTED = re.compile(r"\]\(([\w/-]+)\.md(?:#[\w-]+)?\)")
OPTIONS = {
    "gradwire.Config": ":members:\n   :inherited-members:",
    "gradwire.HookState": ":members:\n   :inherited-members: Generic",
    "gradwire.Outer": ":members:\n   :inherited-members: Generic",
    "gradwire.fsdp.FsdpState": ":members:\n   :inherited-members: Generic",
}
"""Classes of which not all is for users -> what is shown; else all members."""

RETURNED = ("gradwire.fsdp.FsdpState",)
"""Users are given one, and make none: no signature is shown."""

CODE = re.compile(r":[\w:]+:`[^`]*`|``[^`]+``|`([^`]+)`(?!_)(?=(\w?))")
"""Between single backticks, with the letter that follows (`Rule`s); roles and code between two come first."""

API_ITEM = re.compile(r"^- `(gradwire[\w.]*)`(?:: (.+))?$", re.MULTILINE)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", change)
    app.setup_extension("sphinx.ext.autodoc")  # whose event it is
    app.connect("autodoc-process-docstring", show_code)
    return {"parallel_read_safe": True}


def change(app: Sphinx, page: str, source: list[str]) -> None:
    """Changes the source of a page before it is read; Sphinx passes it as a list of one text."""
    if page == "index":
        source[0] = readme() + "\n# All pages\n" + navigation(source[0])
        app.env.note_dependency(str(README))  # or a later build would keep the old README
    elif page == "reference/api":
        source[0] = API_ITEM.sub(lambda item: directive(item[1], item[2]), source[0])


def show_code(app: Sphinx, kind: str, name: str, documented: object, options: object, lines: list[str]) -> None:
    """Changes the lines of a docstring in place: in reStructuredText code has two backticks, and no letter after it."""

    def shown(code: re.Match[str]) -> str:
        return f"``{code[1]}``" + ("\\ " if code[2] else "") if code[1] else code[0]

    lines[:] = [CODE.sub(shown, line) for line in lines]


def readme() -> str:
    """README with links as the site has them; what is not on the site keeps its words."""

    def inside(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        return f"{picture}[{words}]({target.removeprefix('docs/')})" if target.startswith("docs/") else words

    return LINK.sub(inside, README.read_text(encoding="utf-8"))


def navigation(index: str) -> str:
    """The lists of the index, without its head, and for each of them an entry of the navigation.

    Args:
        index: Markdown with lists of pages under headings of the second level.
    """
    _, *parts = re.split(r"^## ", index, flags=re.MULTILINE)
    text, seen = "", set()
    for part in parts:
        pages = [page for page in LISTED.findall(part) if page not in seen]
        seen.update(pages)
        listed = "\n".join(pages)
        text += f"\n## {part.rstrip()}\n\n```{{toctree}}\n:hidden:\n:caption: {part.splitlines()[0]}\n{listed}\n```\n"
    return text


def directive(name: str, words: str | None) -> str:
    """What Sphinx makes documentation of: a class with its members, a function, or words for what has no docstring.

    Args:
        name: With its module.
        words: What the page says of it; then they are all there is to say.
    """
    if words is not None:
        return f"```{{eval-rst}}\n.. py:class:: {name}\n\n   {words.replace('`', '``')}\n```\n"
    module, _, last = name.rpartition(".")
    found = getattr(importlib.import_module(module), last)
    kind = "autoclass" if inspect.isclass(found) else "autofunction"
    options = f"\n   {OPTIONS.get(name, ':members:')}" if inspect.isclass(found) else ""
    return f"```{{eval-rst}}\n.. {kind}:: {name}{'()' if name in RETURNED else ''}{options}\n```\n"
