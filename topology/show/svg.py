"""The picture people put in a ticket: CPUs, switches, GPUs, NICs, their links, and which pairs can use GDR."""

import textwrap
from collections.abc import Iterable, Iterator
from itertools import pairwise
from xml.sax.saxutils import escape, quoteattr

from gradwire.topology.bandwidth import socket_bytes_per_second
from gradwire.topology.graph import Gpu, Machine
from gradwire.topology.labels import Labels, gigabytes
from gradwire.topology.readers.xml_tree import allowed
from gradwire.topology.show.draw import summary, title
from gradwire.topology.show.svg_layout import (
    CPU_GAP,
    FABRIC_WIDTH,
    MARGIN,
    Box,
    Bracket,
    Drawing,
    Edge,
    layout,
)

INK, PALE_INK, PAPER = "#1f2933", "#52606d", "#ffffff"
GDR, FAR, NVLINK = "#12855b", "#c2570a", "#6b46c1"
FILLS = {
    "cpu": ("#dde6f0", "#486581"),
    "switch": ("#efe9fb", "#8f7bc8"),
    "gpu": ("#eaf7dc", "#6aa121"),
    "nic": ("#dcefff", "#2f7fc1"),
    "nvswitch": ("#f3edff", "#6b46c1"),
    "nowhere": ("#ffffff", "#9aa5b1"),
}
"""Kind of box -> (inside, border)."""
SHADES = ("#e9ddff", "#b79cf2", "#8a63e0")
"""Few, more and most NVLinks between two GPUs."""
FONT = "'DejaVu Sans', 'Segoe UI', Helvetica, Arial, sans-serif"
MAX_NOTES = 6
THIN_GLYPH, GLYPH, NAME_GLYPH, BOLD_GLYPH = 0.56, 0.6, 0.66, 0.7
"""Width of a glyph as a part of its size: in a sentence, among digits, and the same in bold."""
LINE = 18
CELL_WIDTH, CELL_HEIGHT = 42, 24


def svg(machine: Machine) -> str:
    """Returns the picture as an SVG document.

    Args:
        machine: The machine.

    Raises:
        TopologyError: There are too many devices for a picture.
    """
    labels = Labels(machine)
    plan = layout(labels)
    pairs = _differing_pairs(labels)
    width = max(plan.width, MARGIN * 2 + 70 + CELL_WIDTH * len(machine.gpus) if pairs else 0)
    footer, y = _legend(labels, plan, plan.bottom + 34)
    grid, y = _pair_matrix(labels, y) if pairs else ([], y)
    notes, height = _notes(machine, width, y)
    body = [
        _title(machine, width),
        *_between_cpus(machine, plan),
        *map(_edge, plan.edges),
        *([] if pairs else _fabric(labels, plan)),
        *(part for bracket in plan.brackets for part in _bracket(bracket, plan)),
        *map(_box, (*plan.boxes.values(), *plan.nvswitches)),
        *footer,
        *grid,
        *notes,
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family={quoteattr(FONT)}>'
    )
    return "\n".join([head, f'<rect width="100%" height="100%" fill="{PAPER}"/>', *filter(None, body), "</svg>", ""])


def _text(
    x: float, y: float, text: str, size: float, colour: str = INK, *, bold: bool = False, at: str = "start"
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.3g}" fill="{colour}" text-anchor="{at}"{weight}>'
        f"{escape(allowed(text))}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 2, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"'
        f"{dashed}/>"
    )


def _fit(text: str, width: float, size: float, glyph: float = GLYPH) -> str:
    """Cuts a text to a width, and marks it with an ellipsis if it was longer.

    Args:
        text: Text to fit.
        width: Available width in pixels.
        size: Font size in pixels.
        glyph: Width of a glyph as a fraction of the size.
    """
    room = max(1, int(width / (glyph * size)))
    return text if len(text) <= room else text[: max(1, room - 1)] + "…"


def _title(machine: Machine, width: float) -> str:
    room, about = width - 2 * MARGIN, summary(machine)
    size = max(11.0, min(13.0, room / (THIN_GLYPH * len(about))))
    return "\n".join(
        [
            _text(MARGIN, 38, _fit(title(machine), room, 22, BOLD_GLYPH), 22, bold=True),
            _text(MARGIN, 60, _fit(about, room, size, THIN_GLYPH), size, PALE_INK),
        ]
    )


def _between_cpus(machine: Machine, plan: Drawing) -> Iterable[str]:
    """Yields the connections between neighbouring NUMA nodes, with their rate."""
    rates = {cpu.key: socket_bytes_per_second(cpu) for cpu in machine.cpus}
    known = {cpu.key for cpu in machine.cpus if cpu.numa is not None}
    boxes = sorted((box for box in plan.boxes.values() if box.key in known), key=lambda box: box.y)
    for upper, lower in pairwise(boxes):
        x = upper.x + 34
        yield _line(x, upper.bottom, x, lower.y, "#486581", 4)
        rate = rates[upper.key]
        if rate is not None and lower.y - upper.bottom >= CPU_GAP:
            yield _text(x + 10, (upper.bottom + lower.y) / 2 + 4, gigabytes(rate), 11, "#486581")


def _edge(edge: Edge) -> str:
    y = edge.below.middle
    line = _line(edge.above.right, y, edge.below.x, y, "#7b8794", 2, "4 3" if edge.label == "virtual" else "")
    return f"{line}\n{_text(edge.below.x - 6, y - 5, edge.label, 11, PALE_INK, at='end')}" if edge.label else line


def _box(box: Box) -> str:
    """Returns a box with its text: devices on one line, all others on several."""
    fill, border = FILLS[box.kind]
    dash = ' stroke-dasharray="5 4"' if box.virtual or box.kind == "nowhere" else ""
    rect = (
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="6" '
        f'fill="{fill}" stroke="{border}" stroke-width="1.5"{dash}/>'
    )
    texts = _device_text(box) if box.kind in ("gpu", "nic") else _stacked_text(box)
    return "\n".join([rect, *texts])


def _device_text(box: Box) -> Iterator[str]:
    """Yields a device's name, and at its right what else is known of it; the bus id at the right edge."""
    name, about, bus = box.lines
    y = box.middle + 4.5
    bus_width = len(bus) * GLYPH * 11
    name = _fit(name, box.width * 0.55, 13, BOLD_GLYPH)
    start = max(64.0, len(name) * NAME_GLYPH * 13 + 16)
    yield _text(box.x + 10, y, name, 13, bold=True)
    room = box.width - start - bus_width - (18 if bus else 8)
    shorter = about.rpartition(" ")[0]  # the rate without the link layer rather than a word that is cut
    if box.kind == "nic" and len(about) * GLYPH * 11 > room and shorter.endswith("/s"):
        about = shorter
    if box.kind == "nic" and len(about) * GLYPH * 11 > room and bus:  # its rate rather than where it is
        bus, room = "", box.width - start - 8
    if about and room > GLYPH * 11 * 3:
        yield _text(box.x + start, y, _fit(about, room, 11), 11)
    if bus:
        yield _text(box.right - 8, y, bus, 11, PALE_INK, at="end")


def _stacked_text(box: Box) -> Iterator[str]:
    """Yields the lines of a CPU or a switch, as many as there is room for, in its middle."""
    bold = box.kind not in ("switch", "nvswitch")
    size = 13.0 if bold else 11.0
    lines = [(_fit(box.lines[0], box.width - 8, size, BOLD_GLYPH if bold else GLYPH), size)]
    for line in box.lines[1:]:
        room = max(1, int((box.width - 10) / (GLYPH * 11)))
        lines += [(part, 11.0) for part in textwrap.wrap(line, room, break_on_hyphens=False)[:3]]
    lines = lines[: max(1, int((box.height + 2) / 14))]
    y = box.middle - 7 * len(lines)
    for position, (line, own) in enumerate(lines):
        yield _text(box.x + box.width / 2, y + 14 * position + 11, line, own, bold=bold and position == 0, at="middle")


def _bracket(bracket: Bracket, plan: Drawing) -> Iterator[str]:
    """Yields a vertical line with a tick to every device that belongs to it, and its path."""
    colour, dash = (GDR, "") if bracket.good else (FAR, "6 4")
    x = plan.lanes_x + 24 + bracket.lane * plan.lane_width
    ticks = [plan.boxes[key].middle - 6 for key in bracket.gpus] + [plan.boxes[key].middle for key in bracket.nics]
    top, bottom = min(ticks), max(ticks)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    path = f"M{x:.1f} {top:.1f} V{bottom:.1f}" + "".join(f" M{plan.lanes_x:.1f} {y:.1f} H{x:.1f}" for y in ticks)
    yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.4"{dashed}/>'
    y = sum(sorted(ticks)[:2]) / 2 + 1.5  # between two ticks, and clear of NVLink's
    width = len(bracket.path) * BOLD_GLYPH * 11 + 6
    yield f'<rect x="{x - width / 2:.1f}" y="{y - 6.5:.1f}" width="{width:.1f}" height="13" fill="{PAPER}"/>'
    yield _text(x, y + 4, bracket.path, 11, colour, bold=True, at="middle")


def _joined(labels: Labels) -> list[Gpu]:
    """Returns the GPUs that have NVLink or xGMI."""
    return [gpu for gpu in labels.machine.gpus if labels.bundles[gpu.key]]


def _differing_pairs(labels: Labels) -> bool:
    """Returns whether GPUs are joined directly and not all alike, so that only a table tells the pairs apart."""
    joined = _joined(labels)
    cells = {labels.gpu_gpu(a, b) for i, a in enumerate(joined) for b in joined[i + 1 :]}
    return bool(joined) and not labels.machine.nvswitches and len(cells) > 1


def _fabric(labels: Labels, plan: Drawing) -> Iterator[str]:
    """Yields NVLink or xGMI as a bar with a line to each of its GPUs, and one to each NVSwitch."""
    joined = [plan.boxes[gpu.key] for gpu in _joined(labels)]
    if not joined:
        return
    x, top, bottom = plan.fabric_x, min(box.y for box in joined), max(box.bottom for box in joined)
    for box in joined:
        yield _line(plan.lanes_x, box.middle + 4, x, box.middle + 4, NVLINK, 2.4)
    for box in plan.nvswitches:
        yield _line(x + FABRIC_WIDTH, box.middle, box.x, box.middle, NVLINK, 2.4)
        top, bottom = min(top, box.y), max(bottom, box.bottom)
    yield (
        f'<rect x="{x:.1f}" y="{top:.1f}" width="{FABRIC_WIDTH}" height="{bottom - top:.1f}" rx="6" fill="#f3edff" '
        f'stroke="{NVLINK}" stroke-width="1.5"/>'
    )
    name = _fabric_name(labels)
    if bottom - top > len(name) * 10:
        middle_x, middle_y = x + FABRIC_WIDTH / 2 + 4.5, (top + bottom) / 2
        yield (
            f'<g transform="rotate(-90 {middle_x:.1f} {middle_y:.1f})">'
            f"{_text(middle_x, middle_y, name, 13, NVLINK, bold=True, at='middle')}</g>"
        )


def _fabric_name(labels: Labels) -> str:
    """Returns `NVLink` or `xGMI`."""
    kinds = {link.kind for gpu in _joined(labels) for link in labels.bundles[gpu.key]}
    return "xGMI" if kinds == {"xgmi"} else "NVLink"


def _fabric_text(labels: Labels) -> str:
    """Returns a sentence on how NVLink or xGMI joins the GPUs, with the number and rate of links of a GPU."""
    joined = _joined(labels)
    counts = sorted({labels.link_count(gpu) for gpu in joined})
    rates = sorted({rate for gpu in joined if (rate := labels.link_bytes_per_second(gpu)) is not None})
    switches = len(labels.machine.nvswitches)
    hidden = any(switch.key == "hidden" for switch in labels.machine.nvswitches)
    how = "between pairs of GPUs" if _differing_pairs(labels) else "all to all"
    if switches:
        how = "through NVSwitches" if hidden else f"through {switches} NVSwitch{'es' if switches > 1 else ''}"
    links = "-".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    each = f", {gigabytes(rates[0])} each way" if rates else ""
    total = len(labels.machine.gpus)
    whose = "each GPU" if len(joined) == total else f"{len(joined)} of {total} GPUs"
    return f"{_fabric_name(labels)} {how}: {links} links of {whose}{each}"


def _legend(labels: Labels, plan: Drawing, y: float) -> tuple[list[str], float]:
    """Returns the SVG lines of a legend for the colours in use, and the legend's lower edge in pixels."""
    entries = [
        (any(bracket.good for bracket in plan.brackets), GDR, "", "near enough for GPUDirect RDMA by default"),
        (
            any(not bracket.good for bracket in plan.brackets),
            FAR,
            "6 4",
            "the nearest cards, yet NCCL does not use GPUDirect RDMA with them by default",
        ),
    ]
    if _joined(labels):
        entries.append((True, NVLINK, "", _fabric_text(labels)))
    drawn: list[str] = []
    for used, colour, dash, text in entries:
        if used:
            drawn.append(_line(MARGIN, y - 4, MARGIN + 30, y - 4, colour, 2.4, dash))
            drawn.append(_text(MARGIN + 40, y, text, 12, PALE_INK))
            y += LINE
    return drawn, y


def _pair_matrix(labels: Labels, y: float) -> tuple[list[str], float]:
    """Returns the SVG lines of a table of the links between each pair of GPUs, and its lower edge in pixels."""
    numbers = {gpu.key: int(labels.gpu(gpu).removeprefix("GPU")) for gpu in labels.machine.gpus}
    gpus = sorted(labels.machine.gpus, key=lambda gpu: numbers[gpu.key])
    counts = sorted({link.count for bundle in labels.bundles.values() for link in bundle})
    left, y = MARGIN + 62.0, y + 12
    drawn = []
    for column, gpu in enumerate(gpus):
        drawn.append(_text(left + (column + 0.5) * CELL_WIDTH, y, str(numbers[gpu.key]), 11, bold=True, at="middle"))
    for row, one in enumerate(gpus):
        top = y + 8 + row * CELL_HEIGHT
        drawn.append(_text(left - 8, top + 16, labels.gpu(one), 11, bold=True, at="end"))
        for column, other in enumerate(gpus):
            cell = "" if one is other else labels.gpu_gpu(one, other)
            direct = [link.count for link in labels.bundles[one.key] if other.key in (link.a, link.b) and cell]
            shade = SHADES[min(counts.index(direct[0]), 2)] if direct else "#ffffff" if cell else "#eef1f4"
            x = left + column * CELL_WIDTH
            drawn.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" fill="{shade}" '
                'stroke="#cbd2d9"/>'
            )
            ink = PAPER if direct and shade == SHADES[2] else INK if direct else PALE_INK
            drawn.append(_text(x + CELL_WIDTH / 2, top + 16, cell, 11, ink, bold=bool(direct), at="middle"))
    return drawn, y + 8 + len(gpus) * CELL_HEIGHT + LINE


def _notes(machine: Machine, width: float, y: float) -> tuple[list[str], float]:
    """Returns the SVG lines of the machine's first notes, wrapped, and the height of the whole picture in pixels."""
    room = max(20, int((width - 2 * MARGIN) / (GLYPH * 11)))
    notes = [f"Note: {note}" for note in machine.notes[:MAX_NOTES]]
    if len(machine.notes) > MAX_NOTES:
        notes.append(f"and {len(machine.notes) - MAX_NOTES} notes more")
    drawn = []
    for line in (line for note in notes for line in textwrap.wrap(note, room)[:4]):
        drawn.append(_text(MARGIN, y, line, 11, PALE_INK))
        y += LINE - 2
    return drawn, y + 8
