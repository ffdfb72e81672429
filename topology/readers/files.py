"""Offline inputs: which kind a file is, by what stands in it, and the Machine it describes."""

from dataclasses import replace
from pathlib import Path

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Machine
from gradwire.topology.readers import lspci, nccl_xml, smi
from gradwire.topology.show import json_form

MAX_NBYTES = 64 << 20
"""A full `lspci -vvv` of a large server is 1 MB."""

_MARKS = ((b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"), (b"\xef\xbb\xbf", "utf-8-sig"))
"""Byte order marks; PowerShell writes redirected output as UTF-16."""


def read_text(path: Path) -> str:
    """Returns a file's text; bytes that are not UTF-8 become replacement characters.

    Args:
        path: A regular file.

    Raises:
        TopologyError: The file cannot be read, is too large, or is not text.
    """
    try:
        if path.stat().st_size > MAX_NBYTES:
            raise TopologyError(f"{path.stat().st_size} bytes; expected at most {MAX_NBYTES}", source=str(path))
        if not path.is_file():
            raise TopologyError("not a regular file", source=str(path))
        return decode(path.read_bytes())
    except OSError as error:
        raise TopologyError(error.strerror or str(error), source=str(path)) from None
    except ValueError as error:
        raise (error.at(str(path)) if isinstance(error, TopologyError) else TopologyError(str(error))) from None


def decode(content: bytes) -> str:
    """Returns text without terminal escapes.

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


def machine_of(text: str) -> Machine:
    """Returns the machine that a text of any accepted kind describes.

    Args:
        text: NCCL topology XML, `nvidia-smi topo -m`, `lspci -vvv`, or this project's JSON.

    Raises:
        TopologyError: The text is of no known kind, or broken.
    """
    start = text.lstrip()[:1]
    if start == "<":
        return nccl_xml.read(text)
    if start in ("{", "["):
        return json_form.read(text)
    if smi.looks_like_smi(text):
        return smi.read(text)
    if lspci.looks_like_lspci(text):
        return lspci.read(text)
    raise TopologyError(
        "not recognised; expected NCCL topology XML, the output of `nvidia-smi topo -m` or `lspci -vvv`, "
        "or the JSON of `gradwire topo --json`"
    )


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
