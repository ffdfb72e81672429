"""Offline inputs: which kind a file is, by what stands in it, and the Machine it describes."""

import json
import re
from dataclasses import replace
from pathlib import Path

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Machine
from gradwire.topology.readers import hwloc, lspci, nccl_xml, smi
from gradwire.topology.show import json_form

MAX_NBYTES = 16 << 20
"""A full `lspci -vvv` of a large server is 1 MB."""

_MARKS = ((b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"), (b"\xef\xbb\xbf", "utf-8-sig"))
"""Byte order marks; PowerShell writes redirected output as UTF-16."""


def read_text(path: Path, most_nbytes: int = MAX_NBYTES) -> str:
    """Returns a file's text; bytes that are not UTF-8 become replacement characters.

    Args:
        path: A regular file.
        most_nbytes: The largest that is read.

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


_XML = re.compile(r"^[ \t]*<(?:\?xml\b|!DOCTYPE\b|(?:system|graphs|topology)\b)", re.MULTILINE)
"""Where an XML document of a known kind begins; a shell prompt or a ticket's text may stand before it."""
_OBJECT = re.compile(r"^[ \t]*(?=\{\s*(?:[\"}]|\Z))", re.MULTILINE)
"""Where a line begins with a JSON object."""
_HEAD_CHARACTERS = 1 << 16
_OTHER_TOOLS = (
    (r"NCCL (?:INFO|WARN)", "a log of NCCL", "`gradwire gdr-check --nccl-log FILE` reads it"),
    (
        r"^GPU \d+: .*\n\s+Link \d+:",
        "`nvidia-smi nvlink -s`",
        "`gradwire gdr-check` reads it; here `nvidia-smi topo -m`",
    ),
    (r"^GPU \d+: .*\(UUID: ", "`nvidia-smi -L`", "give `nvidia-smi topo -m`"),
    (r"NVIDIA-SMI \d|^\| +GPU +Name ", "the table of `nvidia-smi`", "give `nvidia-smi topo -m`"),
    (r"^-\[[0-9a-f]{4}:[0-9a-f]{2}\]-|^\s*[+\\]-[0-9a-f]{2}\.[0-9a-f]", "`lspci -t`", "give `lspci -vvv`, as root"),
    (
        r"^\[ *\d+\.\d+\]|^\[[A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ [\d:]+ \d{4}\]",
        "the kernel's log",
        "`gradwire gdr-check` reads it on the host",
    ),
    (
        r"^CA '\w+'|^\s*CA type:",
        "`ibstat`",
        "`gradwire topo` reads /sys/class/infiniband itself; or give `nvidia-smi topo -m`",
    ),
    (r"^hca_id:", "`ibv_devinfo`", "`gradwire topo` reads /sys/class/infiniband itself; or give `nvidia-smi topo -m`"),
    (r"^link \w+/\d+ .*state \w+", "`rdma link`", "`gradwire topo` reads /sys/class/infiniband itself"),
    (r"HL-SMI|hl-smi", "`hl-smi`", "Gaudi is not known here; `lspci -vvv` shows its place in the machine"),
    (r"ROCm System Management Interface|^=+ ROCm", "`rocm-smi`", "give `rocm-smi --showtopo`"),
    (
        r"^\| +\| GPU \d+/\d+ ",
        "`xpu-smi topology`",
        "Intel's GPUs are not known here; `lspci -vvv` shows their place in the machine",
    ),
    (r"^Architecture: +\w", "`lscpu`", "`gradwire topo` reads that itself; or give `lstopo file.xml`"),
    (r"^available: \d+ nodes \(", "`numactl -H`", "`gradwire topo` reads that itself; or give `lstopo file.xml`"),
    (r"^Module +Size +Used by", "`lsmod`", "`gradwire gdr-check` reads that itself"),
    (r"^\d+: [\w.@-]+: <[A-Z]", "`ip link`", "`gradwire topo` reads that itself; or give `nvidia-smi topo -m`"),
    (r"^Settings for [\w.-]+:", "`ethtool`", "`gradwire topo` reads that itself; or give `nvidia-smi topo -m`"),
    (
        r"neuron-device|instance-type: (?:inf|trn)",
        "`neuron-ls`",
        "Neuron is not known here; `lspci -vvv` shows its place",
    ),
)
"""First lines of what people have at hand: a pattern, what prints it, what to do with it."""
_DECLARATION = re.compile(r"<\?xml\b[^>]{0,200}\?>")


def machine_of(text: str) -> Machine:
    """Returns the machine that a text of any accepted kind describes, whatever stands before and after it.

    Args:
        text: NCCL topology XML, hwloc XML, `nvidia-smi topo -m`, `lspci -vvv`, or this project's JSON.

    Raises:
        TopologyError: The text is of no known kind, or broken.
    """
    document = _XML.search(text)
    if document is not None:
        return _machine_of_xml(text, document.start())
    if smi.looks_like_smi(text):
        return smi.read(text)
    if lspci.looks_like_lspci(text):
        return lspci.read(text)
    if _OBJECT.search(text):
        return json_form.read(_json_part(text))
    for pattern, tool, instead in _OTHER_TOOLS:
        if re.search(pattern, text[:_HEAD_CHARACTERS], re.MULTILINE):
            raise TopologyError(f"this looks like {tool}, which does not say how devices are connected; {instead}")
    start = text.lstrip()[:1]
    if start in ("{", "["):
        return json_form.read(_json_part(text))
    if start == "<":
        return nccl_xml.read(text)
    raise TopologyError(
        "not recognised; expected NCCL topology XML, hwloc XML (lstopo), the output of `nvidia-smi topo -m` or "
        "`lspci -vvv`, or the JSON of `gradwire topo --json`"
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
