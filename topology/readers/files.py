"""Offline inputs: which kind a file is, by what stands in it, and the Machine it describes.

A new kind of text is recognized in two places: `_is_known`, by which texts with prefixes or table borders are
unwrapped, and `_machine_of_known`. readers/__init__.py has the whole recipe.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Machine
from gradwire.topology.readers import hwloc, lspci, nccl_xml, smi
from gradwire.topology.readers.kinds import tool_of, unwrapped
from gradwire.topology.show import json_form

MAX_NBYTES = 16 << 20
"""A full `lspci -vvv` of a large server is 1 MB."""

_MARKS = ((b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"), (b"\xef\xbb\xbf", "utf-8-sig"))
"""Byte order marks; PowerShell writes redirected output as UTF-16."""


def read_text(path: Path, most_nbytes: int = MAX_NBYTES) -> str:
    """Returns a file's text; bytes that are not UTF-8 become replacement characters.

    Args:
        path: A regular file.
        most_nbytes: Maximum size in bytes.

    Raises:
        TopologyError: The file cannot be read, is too large, or is not text.
    """
    try:
        if path.stat().st_size > most_nbytes:
            raise TopologyError(f"{path.stat().st_size} bytes; expected at most {most_nbytes}", source=str(path))
        if not path.is_file():
            raise TopologyError("not a regular file", source=str(path))
        return decode(path.read_bytes())
    except OSError as error:
        raise TopologyError(error.strerror or str(error), source=str(path)) from None
    except ValueError as error:
        raise (error.at(str(path)) if isinstance(error, TopologyError) else TopologyError(str(error))) from None


def decode(content: bytes) -> str:
    """Decodes a file's content to text without terminal escapes.

    Args:
        content: UTF-8, UTF-16 with a byte order mark, or something close to UTF-8.

    Raises:
        TopologyError: There are NUL bytes in it, so it is no text.
    """
    encoding = next((name for mark, name in _MARKS if content.startswith(mark)), "utf-8")
    text = content.decode(encoding, "replace")
    if "\0" in text:
        raise TopologyError("not a text file: it contains NUL bytes")
    return smi.ANSI.sub("", text)


_XML = re.compile(r"^[ \t]*<(?:\?xml\b|!DOCTYPE\b|(?:system|graphs|topology)\b)", re.MULTILINE)
"""Where an XML document of a known kind begins; a shell prompt or a ticket's text may stand before it."""
_OBJECT = re.compile(r"^[ \t]*(?=\{\s*(?:[\"}]|\Z))", re.MULTILINE)
"""Where a line begins with a JSON object."""
_SPACES = re.compile("[\u00a0\u2007\u202f]")
"""What web pages put in place of spaces."""
_GRAPH = re.compile(r'"graph"\s*:')
"""A key of this project's own JSON, whose texts may quote anything."""
_PAGE = re.compile(r"<html\b", re.IGNORECASE)
_DECLARATION = re.compile(r"<\?xml\b[^>]{0,200}\?>")


def machine_of(text: str) -> Machine:
    """Returns the machine that a text of any accepted kind describes, ignoring other text before and after it.

    Args:
        text: NCCL topology XML, hwloc XML, this project's JSON, or the output of `nvidia-smi topo -m`,
            `amd-smi topology`, `rocm-smi --showtopo` or `lspci -vvv`.

    Raises:
        TopologyError: The text is of no known kind, or broken.
    """
    text = _SPACES.sub(" ", text)
    if not text.strip():
        raise TopologyError("the text is empty")
    note = ""
    if not _is_known(text):
        text, note = unwrapped(text, _is_known)
    machine = _machine_of_known(text)
    return replace(machine, notes=(*machine.notes, note)) if note else machine


def _is_known(text: str) -> bool:
    """Returns whether a text has a part that describes a machine."""
    return bool(_XML.search(text)) or smi.looks_like_smi(text) or lspci.looks_like_lspci(text)


def _machine_of_known(text: str) -> Machine:
    document = _XML.search(text)
    if document is not None and not _PAGE.search(text):
        return _machine_of_xml(text, document.start())
    if smi.looks_like_smi(text):
        return smi.read(text)
    if lspci.looks_like_lspci(text):
        return lspci.read(text)
    if (found := tool_of(text)) is not None and not _GRAPH.search(text):
        tool, instead = found
        raise TopologyError(f"this looks like {tool}, which gradwire reads no topology from; {instead}")
    start = text.lstrip()[:1]
    if start in ("{", "[") or _OBJECT.search(text):
        return json_form.read(_json_part(text))
    if start == "<":
        return nccl_xml.read(text)
    raise TopologyError(
        "not recognised; expected NCCL topology XML, hwloc XML (lstopo), the output of `nvidia-smi topo -m`, `amd-smi "
        "topology`, `rocm-smi --showtopo` or `lspci -vvv`, or the JSON of `gradwire topo --json`"
    )


def _machine_of_xml(text: str, start: int) -> Machine:
    """Returns the machine of the first XML document in a text; line numbers stay those of the text."""
    document = "\n" * text.count("\n", 0, start) + _DECLARATION.sub("", text[start:], count=1)
    root = re.search(r"<([a-z]\w{0,40})", document)
    end = document.find(f"</{root[1]}>") if root else -1
    rest = "" if root is None or end < 0 else document[end + len(root[1]) + 3 :]
    another = _XML.search(rest) is not None
    if another or "<" not in rest:
        document = document[: len(document) - len(rest)]
    machine = hwloc.read(document) if root is not None and root[1] == "topology" else nccl_xml.read(document)
    note = "Another XML document follows in the file, of another host perhaps; the first is shown."
    return replace(machine, notes=(*machine.notes, note)) if another else machine


def _json_part(text: str) -> str:
    """Returns the first JSON object that begins a line, without what stands around it; line numbers stay."""
    first = _OBJECT.search(text)
    if first is None:
        return text
    before = "\n" * text.count("\n", 0, first.end())
    try:
        _, end = json.JSONDecoder().raw_decode(text, first.end())
    except (ValueError, RecursionError):  # the reader of the form says what is wrong, and where
        return before + text[first.end() :]
    return before + text[first.end() : end]


def read_file(path: Path) -> Machine:
    """Returns the machine that a file describes.

    Args:
        path: A file of any accepted kind.

    Raises:
        TopologyError: The file cannot be read, is of no known kind, or broken; the message names file and line.
    """
    text = read_text(path)
    try:
        machine = machine_of(text)
        return replace(machine, sources=tuple(f"{source} ({path.name})" for source in machine.sources))
    except TopologyError as error:
        raise error.at(str(path)) from None
