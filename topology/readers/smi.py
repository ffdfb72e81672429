"""`nvidia-smi topo -m` text -> Machine: a matrix of distances without the tree behind it.

What real texts do: colour escapes, tabs or aligned spaces, NICs as `NIC3` with a legend or as `mlx5_3` without one,
cells and titles run together, missing affinities, rows cut off, words of other releases (SOC is today's SYS), `-mp`
(which hides NVLink), and no column at all for cards without verbs (Slingshot, EFA): "no NIC in the matrix" is not "no
NIC". On Grace the memory of a GPU is a NUMA node of its own (`GPU NUMA ID`), so that SYS says nothing there.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Cpu, Defect, DeviceLink, GivenPath, Gpu, Machine, Nic, NvSwitch, Port
from gradwire.topology.paths import path_of_printed
from gradwire.topology.pci_ids import AMD_GPU, normal_bus_id
from gradwire.topology.readers.affinity import members

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[@-_]")
"""Terminal escapes: colours, cursor movement, titles."""
_TAIL = re.compile(r"CPU Affinity|NUMA Affinity|GPU NUMA ID")
_COMMAND = re.compile(r"^.*\btopo[ \t]+(?:-mp?|--matrix)[ \t]+(?=(?:GPU|NIC)[0-9])")
"""A prompt and the command before the header, where its leading blanks took the place of a line's end."""
_GPU = re.compile(r"GPU[0-9]{1,4}")
_COLUMN = re.compile(r"(GPU|NIC)[0-9]{1,4}|(?!GPU|NIC)[A-Za-z][\w.-]*[0-9][\w.-]*")
_NUMBERED_NIC = re.compile(r"NIC[0-9]{1,4}")
_CELL = re.compile(
    r"\s*(XGMI|X|SYS|SOC|NODE|PHB|PXB|PXN|P2C|PIX|PSB|NVB|NVL|C2C|NV[0-9]{1,2}|N/A|\?|[A-Z][A-Z0-9]{0,7})"
)
"""A cell; the last alternative is a word of a release that nobody here knows, and unknown."""
_STATUSES = frozenset({"OK", "CNS", "GNS", "TNS", "NS", "DR", "U"})
"""Cells of `nvidia-smi topo -p2p`, which prints what is supported, not how far it is."""
_FUSED = re.compile(r"((?:GPU|NIC)[0-9]{1,4})(?=(?:GPU|NIC)[0-9]|[a-z])")
_WITHIN_A_CPU = ("PIX", "PSB", "PXB", "PHB", "NODE")
"""Cells of pairs that hang off the same CPU, nearest first."""
_LEGEND = re.compile(r"(?:^|\s)(NIC\d+):\s*([\w.-]+)")
"""An entry of a legend; a pasted one may have several on a line."""

_ROCM = re.compile(r"=+ *Link Type between two GPUs *=+")
_ROCM_NUMA = re.compile(r"GPU\[(\d{1,4})\]\s*: \(Topology\) Numa Node: (\d{1,6})")
"""Source: rocm_smi_lib, python_smi_tools/rocm_smi.py (showTopology)."""

_AMD_SMI = re.compile(r"^LINK TYPE TABLE:[ \t]*$", re.MULTILINE)
_OTHER_TABLE = re.compile(r"^\w[\w -]* TABLE:", re.MULTILINE)
"""Source: amdsmi, amdsmi_cli/amdsmi_commands.py (topology): tables by bus id, SELF, XGMI and PCIE in that of links."""

MAX_COLUMNS = 512
MAX_NVLINKS_OF_A_GPU = 18
"""NVLink 4 and 5; more in a row's sum proves that a switch fans them out. Source: NVIDIA H100 and B200 data sheets."""


@dataclass(slots=True)
class _Matrix:
    """Holds a printed matrix as text: its columns, rows and legend."""

    columns: list[str]
    tail: list[str]
    """Titles of the columns after the matrix."""
    rows: dict[str, list[str]] = field(default_factory=dict)
    rests: dict[str, str] = field(default_factory=dict)
    """Name of a row -> the text after its cells."""
    names: dict[str, str] = field(default_factory=dict)
    """The legend below: `NIC0` -> `mlx5_0`."""
    uncovered: list[str] = field(default_factory=list)
    """Rows that have no column: what was cut off at the right."""

    @property
    def is_peer_access(self) -> bool:
        """Returns whether this is the output of `topo -p2p`, which has no distances."""
        cells = {cell for row in self.rows.values() for cell in row} - {"X"}
        return bool(cells) and cells <= _STATUSES

    def coherent(self, name: str) -> bool:
        """Returns whether a GPU's memory is a NUMA node, as it is behind a chip-to-chip link (Grace)."""
        if "GPU NUMA ID" not in self.tail or name not in self.rests:
            return False
        rest = self.rests[name].rstrip(" \r\n")
        cells = rest.split("\t")[1:] if "\t" in rest else rest.split()
        return len(cells) >= len(self.tail) and re.fullmatch(r"[0-9]{1,6}", cells[-1].strip()) is not None


def looks_like_smi(text: str) -> bool:
    """Returns whether a text contains the header of a matrix.

    Args:
        text: Any text, escapes removed.
    """
    return _AMD_SMI.search(text) is not None or any(_header(line) is not None for line in text.splitlines())


def read(text: str) -> Machine:
    """Returns the machine that a printed matrix describes.

    Args:
        text: Output of `nvidia-smi topo -m`, `rocm-smi --showtopo` or `amd-smi topology`, with or without escapes.

    Raises:
        TopologyError: There is no matrix of distances in the text.
    """
    plain = ANSI.sub("", text)
    if _ROCM.search(plain):
        return _read_rocm(plain)
    if _AMD_SMI.search(plain):
        return _read_amd_smi(plain)
    matrix, others = _matrix(plain.splitlines())
    gpus = [name for name in matrix.columns if _GPU.fullmatch(name)]
    cpus = _cpus(matrix, gpus)
    defects = (*_asymmetric(matrix), *_short(matrix))
    links = _links(matrix, gpus)
    switched = _switched(links, gpus)
    return Machine(
        cpus=tuple(sorted(cpus.values(), key=lambda cpu: cpu.numa or 0)),
        gpus=tuple(Gpu(key=name, index=int(name[3:]), parent=_parent(matrix, name)) for name in gpus),
        nics=tuple(_nic(matrix, name, matrix.names, gpus) for name in matrix.columns if name not in gpus),
        nvswitches=(NvSwitch(key="hidden"),) if switched else (),
        links=(*(_through_switch(links, gpus) if switched else links), *_coherent_links(matrix, gpus)),
        links_known=_shows_nvlink(text) and not _unknown_pairs(matrix, gpus),
        given_paths=_paths(matrix),
        defects=defects,
        notes=tuple(_notes(matrix, text, defects, others)),
        sources=("nvidia-smi topo -m",),
    )


def _read_rocm(text: str) -> Machine:
    """Returns the machine of `rocm-smi --showtopo`: the matrix of link types, and a line for each GPU's NUMA node.

    The matrices of weights and hops beside it say nothing that path types do not.
    """
    title = _ROCM.search(text)
    assert title is not None
    lines = [re.sub(r"(?<=\s)0(?=\s|$)", "X", line) for line in text[title.end() :].splitlines()]
    end = next((number for number, line in enumerate(lines) if number and line.startswith("====")), len(lines))
    matrix, _ = _matrix([re.sub(r"\bPCIE\b", "?", line) for line in lines[:end]])
    gpus = [name for name in matrix.columns if _GPU.fullmatch(name)]
    numa = {f"GPU{match[1]}": int(match[2]) for match in _ROCM_NUMA.finditer(text)}
    pairs = [path for path in _paths(matrix) if path.name == "XGMI"]
    return Machine(
        cpus=tuple(Cpu(key=f"numa{node}", numa=node) for node in sorted({*numa.values()})),
        gpus=tuple(
            Gpu(key=name, index=int(name[3:]), parent=f"numa{numa[name]}" if name in numa else None) for name in gpus
        ),
        links=tuple(DeviceLink(a=pair.a, b=pair.b, kind="xgmi", count=1) for pair in pairs),
        links_known=True,
        given_paths=_paths(matrix),
        defects=(*_asymmetric(matrix), *_short(matrix)),
        notes=("rocm-smi shows GPUs alone: network cards are unknown, and so is where PCIe leads.",),
        sources=("rocm-smi --showtopo",),
    )


def _read_amd_smi(text: str) -> Machine:
    """Returns the machine of `amd-smi topology`: the matrix of link types, by the GPUs' bus ids.

    Raises:
        TopologyError: The table has no line of distinct bus ids.
    """
    title = _AMD_SMI.search(text)
    assert title is not None
    after = text[title.end() :]
    other = _OTHER_TABLE.search(after)
    body = after[: other.start()] if other else after
    first = next((line for line in body.splitlines() if line.strip()), "")
    buses = [bus for word in first.split() if (bus := normal_bus_id(word)) is not None]
    if not buses or len(set(buses)) != len(first.split()):
        raise TopologyError("the LINK TYPE TABLE of `amd-smi topology` has no line of bus ids; expected it whole")
    number = {bus: f"GPU{index}" for index, bus in enumerate(buses)}
    words = {"SELF": "X", "PCIE": "?"} | number
    lines = [
        re.sub(r"\S+", lambda word: words.get(normal_bus_id(word[0]) or word[0], word[0]), line)
        for line in body.splitlines()
    ]
    matrix, _ = _matrix(lines)
    named = _paths(matrix)
    keys = {name: bus for bus, name in number.items()}
    paths = tuple(GivenPath(a=keys[path.a], b=keys[path.b], name=path.name) for path in named)
    return Machine(
        gpus=tuple(Gpu(key=bus, bus=bus, index=index, vendor=AMD_GPU) for index, bus in enumerate(buses)),
        links=tuple(DeviceLink(a=path.a, b=path.b, kind="xgmi", count=1) for path in paths if path.name == "XGMI"),
        links_known=True,
        given_paths=paths,
        defects=(*_asymmetric(matrix), *_short(matrix)),
        notes=("amd-smi shows GPUs alone: network cards and NUMA nodes are unknown, and so is where PCIe leads.",),
        sources=("amd-smi topology",),
    )


def _header(line: str) -> tuple[list[str], list[str]] | None:
    """Returns (column names, titles of the columns after the matrix), or None if the line is no header."""
    line = _COMMAND.sub("", line)
    tail = _TAIL.search(line)
    words = _FUSED.sub(r"\1 ", line[: tail.start() if tail else len(line)]).split()
    if not any(_GPU.fullmatch(word) for word in words) and not all(map(_NUMBERED_NIC.fullmatch, words)):
        return None
    if not 0 < len(words) <= MAX_COLUMNS or not all(_COLUMN.fullmatch(word) for word in words):
        return None
    if len(set(words)) != len(words):
        return None
    return words, _TAIL.findall(line)


def _matrix(lines: Sequence[str]) -> tuple[_Matrix, int]:
    """Returns the first matrix of distances in the text, and the number of others that differ from it.

    Raises:
        TopologyError: There is no matrix of distances.
    """
    matrices: list[_Matrix] = []
    reading = _Reading()
    for line in lines:
        header = _header(line)
        if header is None:
            reading.read(line)
        elif reading.continues(header):
            reading.extend(header)
        else:
            reading = _Reading(_Matrix(*header))
            matrices.append(reading.matrix)
    distances = [matrix for matrix in matrices if not matrix.is_peer_access]
    if not distances and matrices:
        raise TopologyError(
            "this is the output of `nvidia-smi topo -p2p`, which says whether GPUs may reach each other and not how "
            "far apart they are; expected that of `nvidia-smi topo -m`"
        )
    if not distances:
        raise TopologyError("no matrix found; expected the output of `nvidia-smi topo -m`")
    first, *others = distances
    return first, sum((other.columns, other.rows) != (first.columns, first.rows) for other in others)


class _Reading:
    """Reads a matrix line by line: rows, the rest of rows that a narrow terminal broke, and the legend."""

    def __init__(self, matrix: _Matrix | None = None) -> None:
        self.matrix = matrix or _Matrix([], [])
        self._row: str | None = None
        """Row that a line without a name continues."""
        self._legend = False

    def continues(self, header: tuple[list[str], list[str]]) -> bool:
        """Returns whether a header is the second line of the one before it, as a narrow terminal breaks it.

        Args:
            header: Column names and titles of a line.
        """
        names, _ = header
        first = bool(self.matrix.columns) and not self.matrix.rows and not self.matrix.tail
        return first and not set(names) & set(self.matrix.columns) and names[0] != "GPU0"

    def extend(self, header: tuple[list[str], list[str]]) -> None:
        """Adds the second line of a header.

        Args:
            header: Column names and titles of the second line.
        """
        names, tail = header
        self.matrix.columns += names
        self.matrix.tail += tail

    def read(self, line: str) -> None:
        """Reads a line that is no header.

        Args:
            line: A row, the rest of one, a line of the legend, or something else.
        """
        matrix = self.matrix
        if not matrix.columns:
            return
        if line.strip().startswith("Legend"):
            self._legend, self._row = True, None
        matrix.names |= {match[1]: match[2] for match in _LEGEND.finditer(line) if match[2] != match[1]}
        if self._legend:
            return
        text = line.strip("\r\n") if "\t" in line else line.strip()
        name, _, rest = text.partition("\t" if "\t" in line else " ")
        name = name.strip()
        if name in matrix.columns and name not in matrix.rows:
            _read_row(matrix, name, rest)
            self._row = name
        elif self._row is not None and self._goes_on(self._row, line):
            _read_row(matrix, self._row, line, matrix.rows[self._row])
        elif not matrix.rows and line.strip():  # a second line of the header that names no GPU
            words = _TAIL.sub("", line).split()
            if not matrix.tail and all(_COLUMN.fullmatch(word) and word not in matrix.columns for word in words):
                self.extend((words, _TAIL.findall(line)))
        elif _COLUMN.fullmatch(name) and name not in matrix.columns and self._is_cell(rest):
            matrix.uncovered.append(name)
            self._row = None

    def _goes_on(self, row: str, line: str) -> bool:
        """Returns whether a line continues a row that a narrow terminal broke: with more cells, or affinities."""
        first = next(iter(line.split()), "")
        if len(self.matrix.rows[row]) < len(self.matrix.columns):
            return self._is_cell(line)
        return bool(self.matrix.tail) and not self.matrix.rests[row].strip() and first[:1].isdigit()

    @staticmethod
    def _is_cell(text: str) -> bool:
        """Returns whether a text begins with a cell of the matrix: `X`, `N/A`, `?`, `SOC`, or such as `PIX`."""
        first = next(iter(text.split()), "")
        return first in ("X", "N/A", "?", "SOC") or path_of_printed(first) is not None


def _read_row(matrix: _Matrix, name: str, rest: str, before: Sequence[str] = ()) -> None:
    """Stores one row of a matrix: cells up to the first that cannot be parsed, then the remaining text.

    Args:
        matrix: Matrix that the row is stored in.
        name: Name of the row.
        rest: Text after the name, or a further line of the same row.
        before: Cells of the row's earlier lines.
    """
    cells = list(before)
    position = 0
    while len(cells) < len(matrix.columns):
        match = _CELL.match(rest, position)
        if match is None:
            break
        cells.append("SYS" if match[1] == "SOC" else match[1])
        position = match.end()
    matrix.rows[name] = cells
    matrix.rests[name] = rest[position:]


def _tail_cell(matrix: _Matrix, name: str, title: str) -> str | None:
    """Returns the affinity cell of a row below `title`; None if it is empty or cannot be told from its neighbour."""
    if title not in matrix.tail or name not in matrix.rests:
        return None
    rest = matrix.rests[name]
    cells = rest.strip(" ").split("\t")[1:] if "\t" in rest else rest.split()
    if "\t" not in rest and len(cells) < len(matrix.tail):
        shape = r"\d+(?:[-,]\d+)+" if title == "CPU Affinity" else r"\d+"
        return next((cell for cell in cells if re.fullmatch(shape, cell)), None)
    position = matrix.tail.index(title)
    cell = cells[position].strip() if position < len(cells) else ""
    return cell if re.fullmatch(r"[\d,-]+", cell) else None


def _numa(matrix: _Matrix, name: str) -> int | None:
    """Returns the NUMA node of a GPU, or None where the text gives none or several.

    On Grace several are given, of which the lowest is the CPU's own and the others are memory of GPUs.
    """
    cell = _tail_cell(matrix, name, "NUMA Affinity")
    if cell is not None and matrix.coherent(name):
        return next(iter(members(cell)), None)
    return int(cell) if cell is not None and re.fullmatch(r"[0-9]{1,6}", cell) else None


def _parent(matrix: _Matrix, name: str) -> str | None:
    """Returns the key of the CPU a GPU hangs off: by NUMA node, or by cores where the text has no such column."""
    numa = _numa(matrix, name)
    if numa is not None:
        return f"numa{numa}"
    cores = None if "NUMA Affinity" in matrix.tail else _tail_cell(matrix, name, "CPU Affinity")
    return None if cores is None else f"cores {cores}"


def _cpus(matrix: _Matrix, gpus: Sequence[str]) -> dict[str, Cpu]:
    """Returns the CPUs next to the GPUs: by NUMA node, or by set of cores if the text has no NUMA nodes."""
    cpus: dict[str, Cpu] = {}
    for gpu in gpus:
        parent = _parent(matrix, gpu)
        if parent is not None and parent not in cpus:
            cores = _tail_cell(matrix, gpu, "CPU Affinity")
            cpus[parent] = Cpu(key=parent, numa=_numa(matrix, gpu), cores=cores)
    return cpus


def _nic(matrix: _Matrix, name: str, names: Mapping[str, str], gpus: Sequence[str]) -> Nic:
    """Returns the NIC of a column; a matrix shows devices that have verbs, one port each.

    A path that stays below one CPU proves that the NIC hangs off the same CPU as the GPU; the nearest GPUs decide.
    """
    place = matrix.columns.index(name)
    cells = {gpu: cell for gpu in gpus for cell in matrix.rows.get(gpu, [])[place : place + 1]}
    best = min((_WITHIN_A_CPU.index(cell) for cell in cells.values() if cell in _WITHIN_A_CPU), default=None)
    near = [gpu for gpu, cell in cells.items() if best is not None and cell == _WITHIN_A_CPU[best]]
    parents = {_parent(matrix, gpu) for gpu in near}
    return Nic(
        key=name, parent=next(iter(parents)) if len(parents) == 1 else None, ports=(Port(name=names.get(name, name)),)
    )


def _is_unknown_word(cell: str) -> bool:
    """Returns whether a cell's word is no path type and no sign for itself or for unknown."""
    return path_of_printed(cell) is None and cell not in ("X", "?", "N/A")


def _pairs(matrix: _Matrix) -> list[tuple[str, str, str | None, str | None]]:
    """Returns (a, b, cell of a's row, cell of b's row) for every pair of devices; None for a missing cell."""
    place = {name: position for position, name in enumerate(matrix.columns)}

    def cell(row: str, column: str) -> str | None:
        cells = matrix.rows.get(row, [])
        found = cells[place[column]] if place[column] < len(cells) else None
        return None if found is not None and _is_unknown_word(found) else found

    names = matrix.columns
    return [(a, b, cell(a, b), cell(b, a)) for i, a in enumerate(names) for b in names[i + 1 :]]


def _paths(matrix: _Matrix) -> tuple[GivenPath, ...]:
    """Returns the path of every pair of devices; a pair whose two cells disagree or are missing is `?`."""
    paths = []
    for a, b, one, other in _pairs(matrix):
        name = one or other or "?"
        unclear = one and other and one != other
        if name == "SYS" and (matrix.coherent(a) or matrix.coherent(b)):
            unclear = True  # of the GPU's own memory node, not of its CPU
        paths.append(GivenPath(a=a, b=b, name="?" if unclear else name))
    return tuple(paths)


def _unknown_pairs(matrix: _Matrix, gpus: Sequence[str]) -> int:
    """Returns how many pairs of GPUs have no cell that can be understood, so that an NVLink may stand there."""
    known = set(gpus)
    between = [path for path in _paths(matrix) if path.a in known and path.b in known]
    return sum(path_of_printed(path.name) is None for path in between)


def _coherent_links(matrix: _Matrix, gpus: Sequence[str]) -> tuple[DeviceLink, ...]:
    """Returns the chip-to-chip links to the CPUs, whose rate a matrix does not show."""
    parents = {gpu: _parent(matrix, gpu) for gpu in gpus if matrix.coherent(gpu)}
    return tuple(DeviceLink(a=gpu, b=cpu, kind="c2c") for gpu, cpu in parents.items() if cpu is not None)


def _asymmetric(matrix: _Matrix) -> list[Defect]:
    """Returns the pairs whose two cells disagree."""
    return [
        Defect(kind="asymmetric_cell", where=f"{a}-{b}: {one}/{other}")
        for a, b, one, other in _pairs(matrix)
        if one is not None and other is not None and one != other
    ]


def _short(matrix: _Matrix) -> list[Defect]:
    """Returns the rows that are missing or end early; NIC rows may be missing as a whole."""
    gpu_rows_only = all(name.startswith("GPU") for name in matrix.rows)
    expected = [name for name in matrix.columns if name.startswith("GPU") or not gpu_rows_only]
    short = [name for name in expected if len(matrix.rows.get(name, ())) < len(matrix.columns)]
    return [Defect(kind="short_row", where=name) for name in short]


def _links(matrix: _Matrix, gpus: Sequence[str]) -> tuple[DeviceLink, ...]:
    """Returns the NVLink bundles between GPUs; their rate is unknown, because the GPUs' generation is."""
    known = set(gpus)
    return tuple(
        DeviceLink(a=path.a, b=path.b, kind="nvlink", count=int(path.name[2:]))
        for path in _paths(matrix)
        if path.a in known and path.b in known and re.fullmatch(r"NV\d+", path.name)
    )


def _switched(links: Sequence[DeviceLink], gpus: Sequence[str]) -> bool:
    """Returns whether some GPU would need more links than exist, which only an NVLink switch explains."""
    sums = dict.fromkeys(gpus, 0)
    for link in links:
        sums[link.a] += link.count
        sums[link.b] += link.count
    return max(sums.values(), default=0) > MAX_NVLINKS_OF_A_GPU


def _through_switch(links: Sequence[DeviceLink], gpus: Sequence[str]) -> tuple[DeviceLink, ...]:
    """Replaces the bundles between pairs by one bundle from each GPU to a hidden switch."""
    widest = dict.fromkeys(gpus, 0)
    for link in links:
        widest[link.a] = max(widest[link.a], link.count)
        widest[link.b] = max(widest[link.b], link.count)
    return tuple(DeviceLink(a=gpu, b="hidden", kind="nvlink", count=count) for gpu, count in widest.items() if count)


def _shows_nvlink(text: str) -> bool:
    """Returns whether NVLink is in the cells or the legend, which `-mp` keeps it out of."""
    return re.search(r"\bNV([0-9]+|#)", text) is not None


_GRACE_GPUS, _GRACE_LINKS = 4, 6
"""Most GPUs of a host of Grace, and least NVLinks of each pair. Source: NVIDIA, GB200 NVL72 and GH200 reference
designs: 4 GPUs of 18 links a compute tray; NVL4: 6 links between two of four."""


def _may_be_grace(matrix: _Matrix, gpus: Sequence[str]) -> bool:
    """Returns whether a matrix without the column GPU NUMA ID looks like Grace: many NVLinks, and all NICs far.

    An A100 or H100 board has its cards at PIX or PXB of some GPU at least; PCIe boxes have few NVLinks or none.
    """
    cards = [name for name in matrix.columns if name not in gpus]
    if "GPU NUMA ID" in matrix.tail or not cards or not 2 <= len(gpus) <= _GRACE_GPUS:
        return False
    cells = {(a, b): one or other for a, b, one, other in _pairs(matrix)}
    to_cards = {cell for (a, b), cell in cells.items() if (a in gpus) != (b in gpus)}
    links = [re.fullmatch(r"NV(\d+)", cell or "") for (a, b), cell in cells.items() if a in gpus and b in gpus]
    counts = [int(match[1]) for match in links if match is not None]
    return to_cards <= {"SYS", "NODE"} and len(counts) == len(links) and min(counts) >= _GRACE_LINKS


def _notes(matrix: _Matrix, text: str, defects: Sequence[Defect], others: int) -> list[str]:
    """Returns sentences on what this text cannot show or what in it could not be read.

    Args:
        matrix: The matrix that was read.
        text: The whole text.
        defects: Errors found in the matrix.
        others: Number of further matrices that differ.
    """
    notes = ["The matrix shows only cards with verbs: Slingshot (cxi) and EFA cards are invisible to nvidia-smi."]
    gpus = [name for name in matrix.columns if _GPU.fullmatch(name)]
    if not _shows_nvlink(text):
        notes.append("NVLink is unknown: no NV# in the text, as with `topo -mp`, which hides it.")
    elif unknown := _unknown_pairs(matrix, gpus):
        notes.append(f"{unknown} pair{'s' * (unknown > 1)} of GPUs cannot be read: NVLinks there are not counted.")
    if any(matrix.coherent(gpu) for gpu in gpus):
        notes.append(
            "The GPUs' memory is NUMA nodes of its own (GPU NUMA ID), coherent with the CPU over a chip-to-chip link. "
            "nvidia-smi then prints SYS even for a card of the same CPU, so SYS is unknown here. NCCL reaches a card "
            "of the GPU's own CPU at P2C, with GPUDirect RDMA by default from 2.27 on: see NCCL_TOPO_DUMP_FILE."
        )
    elif _may_be_grace(matrix, gpus):
        notes.append(
            "All cards are SYS or NODE from GPUs that have many NVLinks. If these are Grace superchips (GH200, GB200), "
            "whose matrix has no column GPU NUMA ID in some drivers, SYS says nothing here: each GPU reaches its own "
            "CPU's cards over C2C, P2C in NCCL's words, with GPUDirect RDMA by default from 2.27 on. gradwire "
            "gdr-check on the machine, or NCCL_TOPO_DUMP_FILE, tells."
        )
    words = {cell for row in matrix.rows.values() for cell in row if _is_unknown_word(cell)}
    if words:
        notes.append(f"Cells with an unknown word are unknown: {', '.join(sorted(words)[:8])}.")
    if matrix.uncovered:
        more = ", ..." if len(matrix.uncovered) > 8 else ""
        notes.append(
            f"{', '.join(matrix.uncovered[:8])}{more}: a row and no column. The lines seem to be cut off at the right, "
            "and these devices are left out."
        )
    if others:
        more = "another matrix that differs, of another host" if others == 1 else f"{others} more, of other hosts"
        notes.append(f"The text has {more} perhaps; the first matrix is shown.")
    notes += [f"{defect.where}: {defect.kind.replace('_', ' ')}; unknown there." for defect in defects]
    return notes
