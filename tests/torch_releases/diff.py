"""Names what gradwire relies on of torch's private code, and another release has changed.

    make torch-diff VERSION=2.16.0                         # brings its wheel, 0.5 GB, and reads it without unpacking it
    make torch-diff VERSION=2.16.0 TORCH_WHEELS=FOLDER     # the wheel is there already
    make torch-diff VERSION=2.16.0 ARGS=--show             # brings the release before it, too, and shows each change
    make torch-diff VERSION=2.16.0 ARGS=--record           # keeps its hashes: when all of that was read

What is relied on stands in the tables RELIED_ON of comms/bootstrap/compat.py and comms/sharded/param_groups.py, next
to its use. hashes.json beside this file has a hash of each for every release in constraints.txt: of a function or
class of Python its syntax tree without docstrings, comments and line breaks; of a header of C++ its words without
comments. So the hash of a release says nothing of the machine or the Python that computed it.

Ends with status 1 if something has changed since the release before and the hashes of this one were not recorded.
"""

import argparse
import ast
import difflib
import hashlib
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from gradwire.comms.bootstrap import compat
from gradwire.comms.sharded import param_groups
from support.cuda_wheel import BuildError, download, find_wheel

ROOT = Path(__file__).resolve().parents[2]
HASHES = ROOT / "tests" / "torch_releases" / "hashes.json"
TABLES: dict[str, Mapping[str, tuple[str, ...]]] = {
    "comms/bootstrap/compat.py": compat.RELIED_ON,
    "comms/sharded/param_groups.py": param_groups.RELIED_ON,
}
"""Module of gradwire -> file of torch's wheel -> names in it, `Class.method`; of a file without names all of it."""

Read = Callable[[str], str | None]
"""A file of torch's, by its path in the wheel; None if there is none."""

Hashes = dict[str, str | None]
"""`file::name` -> its hash; None if a release has none of that name."""


def installed(path: str) -> str | None:
    """Reads a file of the torch of this environment."""
    file = Path(torch.__file__).parents[1] / path
    return file.read_text() if file.exists() else None


def inside(wheel: Path) -> Read:
    """Reads the files of a wheel where they lie."""

    def read(path: str) -> str | None:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(path).decode() if path in archive.NameToInfo else None

    return read


@dataclass(frozen=True, slots=True)
class Source:
    """What one name is in a release.

    Attributes:
        text: For people.
        structure: What its hash is of.
    """

    text: str
    structure: str

    @property
    def hash(self) -> str:
        """Its first 12 digits."""
        return hashlib.sha256(self.structure.encode()).hexdigest()[:12]


def sources(read: Read) -> dict[str, Source | None]:
    """What is relied on: `file::name` -> its source; None where it is missing."""
    found: dict[str, Source | None] = {}
    for table in TABLES.values():
        for path, names in table.items():
            text = read(path)
            if not names:
                found[path] = None if text is None else header_of(text)
                continue
            tree = None if text is None else ast.parse(text)
            for name in names:
                found[f"{path}::{name}"] = None if tree is None else python_of(tree, name)
    return found


def header_of(text: str) -> Source:
    """A header of C++ without comments, a word a line."""
    words = "\n".join(re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL).split())
    return Source(words, words)


def python_of(tree: ast.Module, name: str) -> Source | None:
    """The statements that define a name, without docstrings; several if it is overloaded or has a setter."""
    body: list[ast.stmt] = tree.body
    found: list[ast.stmt] = []
    for part in name.split("."):
        found = [each for statement in body for each in _flat(statement) if part in _defined_by(each)]
        body = [inner for each in found for inner in getattr(each, "body", [])]
    if not found:
        return None
    for node in [inner for each in found for inner in ast.walk(each)]:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = node.body[1:] or [ast.Pass()] if ast.get_docstring(node) is not None else node.body
    return Source("\n".join(ast.unparse(each) for each in found), "\n".join(_structure(each) for each in found))


def _structure(node: object) -> str:
    """A syntax tree in words that are the same in each Python: `ast.dump` and `ast.unparse` differ."""
    if isinstance(node, list):
        return f"[{' '.join(map(_structure, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    # Python 3.15 says of each import that it is not lazy.
    unsaid = {"kind"} if getattr(node, "is_lazy", 0) else {"kind", "is_lazy"}
    named = ((name, value) for name, value in ast.iter_fields(node) if name not in unsaid and value not in (None, []))
    return f"({type(node).__name__} {' '.join(f'{name}={_structure(value)}' for name, value in named)})"


def _flat(statement: ast.stmt) -> list[ast.stmt]:
    """A statement, or those inside of it where it decides whether they count: `if`, `try`."""
    if not isinstance(statement, ast.If | ast.Try):
        return [statement]
    inner = [*statement.body, *statement.orelse, *getattr(statement, "finalbody", [])]
    inner += [each for handler in getattr(statement, "handlers", []) for each in handler.body]
    return [each for one in inner for each in _flat(one)]


def _defined_by(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [each.id for each in targets if isinstance(each, ast.Name)]


def hashes(found: Mapping[str, Source | None]) -> Hashes:
    """The hash of each source; see `sources`."""
    return {name: None if source is None else source.hash for name, source in found.items()}


def recorded() -> dict[str, Hashes]:
    """Release -> its hashes, the oldest first."""
    found: dict[str, Hashes] = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    return dict(sorted(found.items(), key=lambda entry: number(entry[0])))


def number(release: str) -> tuple[int, ...]:
    """2.15.0 as numbers, which sort."""
    return tuple(int(part) for part in release.split("+")[0].split("."))


def user_of(name: str) -> str:
    """The module of gradwire that relies on it."""
    return next(module for module, table in TABLES.items() if name.split("::")[0] in table)


def reader(release: str, wheels: Path | None, scratch: Path) -> Read:
    """Brings a release: this environment's, a wheel in a folder, or one that pip downloads without what it requires.

    Raises:
        BuildError: There is no such wheel.
    """
    if metadata.version("torch").partition("+")[0] == release:
        return installed
    wheel = None if wheels is None else find_wheel(wheels, release)
    if wheels is not None and wheel is None:
        raise BuildError(f"`--wheels`: {wheels} has no wheel of torch {release} for this Python")
    if wheel is None:
        print(f"downloading torch {release}, some 500 MB ...", flush=True)
        wheel = download(f"torch=={release}", scratch)
    return inside(wheel)


def main() -> int:
    """Returns 0 if nothing has changed, or what has was recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", help="2.15.0")
    parser.add_argument("--wheels", type=Path, help="a folder with torch's wheels, in it or in folders inside it")
    parser.add_argument("--since", metavar="RELEASE", help="default: the newest recorded one before it")
    parser.add_argument("--show", action="store_true", help="what has changed, line by line; needs both releases")
    parser.add_argument("--record", action="store_true", help="keep the hashes of this release")
    options = parser.parse_args()
    known = recorded()
    older = [each for each in known if number(each) < number(options.release)]
    since = options.since or (older[-1] if older else None)
    with tempfile.TemporaryDirectory() as scratch:
        found = sources(reader(options.release, options.wheels, Path(scratch)))
        before = sources(reader(since, options.wheels, Path(scratch))) if options.show and since else {}
    new = hashes(found)
    stale = options.release in known and known[options.release] != new
    if options.record:
        HASHES.write_text(
            json.dumps(dict(sorted((known | {options.release: new}).items())), indent=1, sort_keys=True) + "\n"
        )
    changed = [] if since is None else [name for name in new if known[since].get(name) != new[name]]
    for name in changed:
        assert since is not None
        was = "new" if known[since].get(name) is None else "gone" if new[name] is None else "changed"
        print(f"{was:8} {name}   ({user_of(name)})")
        if options.show:
            old, new_text = ("" if one is None else one.text for one in (before.get(name), found[name]))
            print(
                "\n".join(
                    f"    {line}"
                    for line in difflib.unified_diff(
                        old.splitlines(), new_text.splitlines(), since, options.release, "", "", 2
                    )
                )
            )
    print(f"torch {options.release}: {len(changed)} of {len(new)} names that gradwire relies on differ from {since}")
    if stale and not options.record:
        print("its recorded hashes are of other source or of another table: read it, then ARGS=--record")
        return 1
    if changed and options.release not in known and not options.record:
        print("read each in the new source, run `make torch-versions` on it, then keep its hashes: ARGS=--record")
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BuildError as error:
        sys.exit(str(error))
