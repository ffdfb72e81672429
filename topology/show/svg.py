"""The picture people put in a ticket: sockets, switches, GPUs, NICs, their links, and which pairs can use GDR."""

from collections.abc import Iterable
from itertools import pairwise
from xml.sax.saxutils import escape, quoteattr

from gradwire.topology.assign import nics_of_gpus
from gradwire.topology.bandwidth import socket_bytes_per_second
from gradwire.topology.graph import Gpu, Machine, Nic
from gradwire.topology.labels import Labels, gigabytes
from gradwire.topology.readers.xml_tree import allowed
from gradwire.topology.show.draw import summary
from gradwire.topology.show.svg_layout import LEAF_HEIGHT, MARGIN, SOCKET_GAP, TOP, Box, Drawing, Edge, layout

INK, PALE_INK, PAPER = "#1f2933", "#616e7c", "#ffffff"
GDR, FAR, NVLINK = "#12855b", "#d9730d", "#6b46c1"
FILLS = {
    "cpu": ("#dde6f0", "#486581"),
    "switch": ("#efe9fb", "#8f7bc8"),
    "gpu": ("#eaf7dc", "#6aa121"),
    "nic": ("#dcefff", "#2f7fc1"),
    "nowhere": ("#ffffff", "#9aa5b1"),
}
"""Kind of box -> (inside, border)."""
FONT = "'DejaVu Sans', 'Segoe UI', Helvetica, Arial, sans-serif"
MAX_ARCS, MAX_NOTES = 512, 6
SMALLEST, BOLD_GLYPH = 10.0, 0.72
"""Size below which no bold line is shrunk, and the width of a bold glyph as a part of its size."""


def svg(machine: Machine) -> str:
    """Returns the picture as an SVG document.

    Args:
        machine: The machine.

    Raises:
        TopologyError: There are too many devices for a picture.
    """
    labels = Labels(machine)
    plan = layout(labels)
    arcs, depth = _arcs(labels, plan)
    fabric, fabric_bottom = _fabric(labels, plan, plan.leaves_bottom + depth + 24)
    footer, height = _footer(machine, {good for _, _, _, good in _pairs(labels)}, fabric_bottom + 34)
    width = max(plan.width, 760)
    body = [
        _title(machine, width),
        *(_socket(box) for box in plan.sockets),
        *_between_cpus(machine, plan),
        *fabric,
        *(_edge(edge) for edge in plan.edges),
        *arcs,
        *(_box(box) for box in plan.boxes.values()),
        *footer,
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family={quoteattr(FONT)}>'
    )
    return "\n".join([head, f'<rect width="100%" height="100%" fill="{PAPER}"/>', *filter(None, body), "</svg>", ""])


def _text(
    x: float, y: float, text: str, size: float, colour: str = INK, *, bold: bool = False, at: str = "middle"
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.3g}" fill="{colour}" text-anchor="{at}"{weight}>'
        f"{escape(allowed(text))}</text>"
    )


def _fit(text: str, width: float, size: float) -> str:
    """Returns text cut to a width; a glyph is about 0.6 of the font size wide."""
    room = max(1, int(width / (0.6 * size)))
    return text if len(text) <= room else text[: max(1, room - 1)] + "…"


def _title(machine: Machine, width: float) -> str:
    name, rest = machine.hostname or "unnamed machine", summary(machine)
    return "\n".join(
        [
            _text(MARGIN, 36, _fit(name, width - 2 * MARGIN, 22), 22, bold=True, at="start"),
            _text(MARGIN, 58, _fit(rest, width - 2 * MARGIN, 13), 13, PALE_INK, at="start"),
        ]
    )


def _socket(box: Box) -> str:
    return (
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="12" '
        f'fill="#f5f7fa" stroke="#cbd2d9"/>\n' + _text(box.x + 14, box.y + 20, box.lines[0], 12, PALE_INK, at="start")
    )


def _between_cpus(machine: Machine, plan: Drawing) -> Iterable[str]:
    """Yields the connections between neighbouring NUMA nodes, with their rate."""
    cpus = sorted((plan.boxes[cpu.key] for cpu in machine.cpus if cpu.numa is not None), key=lambda box: box.x)
    rates = {cpu.key: socket_bytes_per_second(cpu) for cpu in machine.cpus}
    y = TOP + 20
    for left, right in pairwise(cpus):
        yield (
            f'<line x1="{left.x + left.width:.1f}" y1="{y}" x2="{right.x:.1f}" y2="{y}" stroke="#486581" '
            'stroke-width="4"/>'
        )
        room = right.x - left.x - left.width
        if rates[left.key] is not None and room >= SOCKET_GAP:
            yield _text(right.x - room / 2, y - 8, gigabytes(rates[left.key]), 10, "#486581")


def _edge(edge: Edge) -> str:
    x = edge.below.middle
    dash = ' stroke-dasharray="4 3"' if edge.label == "virtual" else ""
    line = (
        f'<line x1="{x:.1f}" y1="{edge.above.bottom:.1f}" x2="{x:.1f}" y2="{edge.below.y:.1f}" stroke="#7b8794" '
        f'stroke-width="2"{dash}/>'
    )
    return f"{line}\n{_text(x + 5, edge.below.y - 8, edge.label, 10, PALE_INK, at='start')}" if edge.label else line


def _box(box: Box) -> str:
    """Returns a box with its lines of text centred in it."""
    fill, border = FILLS[box.kind]
    dash = ' stroke-dasharray="5 4"' if box.virtual or box.kind == "nowhere" else ""
    rect = (
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="7" '
        f'fill="{fill}" stroke="{border}" stroke-width="1.5"{dash}/>'
    )
    sizes = [13.0 if box.kind != "switch" else 11.0, *[10.5] * (len(box.lines) - 1)]
    lines = [(line, size) for line, size in zip(box.lines, sizes, strict=True) if line]
    y = box.y + (box.height - sum(size + 4.5 for _, size in lines)) / 2
    texts = []
    for position, (line, size) in enumerate(lines):
        y += size + 4.5
        bold = position == 0 and box.kind != "switch"
        shrunk = max(SMALLEST, min(size, (box.width - 6) / (BOLD_GLYPH * len(line)))) if bold else size
        texts.append(_text(box.middle, y - 4, _fit(line, box.width - 6, shrunk), shrunk, bold=bold))
    return "\n".join([rect, *texts])


def _pairs(labels: Labels) -> list[tuple[Gpu, Nic, str, bool]]:
    """Returns (GPU, NIC, path, qualifies): all pairs that qualify for GDR; for a GPU without one, its best NIC."""
    machine, distances = labels.machine, labels.distances
    chosen = nics_of_gpus(machine)
    pairs = []
    for gpu in machine.gpus:
        good = [nic for nic in machine.nics if distances.qualifies_for_gdr(gpu, nic)]
        fallback = chosen[gpu.key]
        for nic in good or ([fallback] if fallback is not None else []):
            path = distances.gpu_nic(gpu, nic)
            pairs.append((gpu, nic, "?" if path is None else path.name, bool(good)))
    return pairs[:MAX_ARCS]


def _arcs(labels: Labels, plan: Drawing) -> tuple[list[str], float]:
    """Returns the curves between GPUs and NICs below the row of devices, and how far down they reach."""
    drawn: list[str] = []
    names: list[str] = []
    deepest = 0.0
    named: set[tuple[str, int]] = set()
    for gpu, nic, path, good in _pairs(labels):
        a, b = plan.boxes[gpu.key], plan.boxes[nic.key]
        y, dip = a.bottom, min(18 + 0.16 * abs(a.middle - b.middle), 130)
        lean = 10 if b.middle > a.middle else -10
        x1, x2, low = a.middle + lean, b.middle - lean, y + dip * 1.33
        colour, dash = (GDR, "") if good else (FAR, ' stroke-dasharray="6 4"')
        drawn.append(
            f'<path d="M{x1:.1f} {y:.1f} C{x1:.1f} {low:.1f} {x2:.1f} {low:.1f} {x2:.1f} {y:.1f}" '
            f'fill="none" stroke="{colour}" stroke-width="2.4"{dash}/>'
        )
        spot = (path, round((x1 + x2) / 40))
        if spot not in named:
            named.add(spot)
            middle = (x1 + x2) / 2
            names.append(f'<rect x="{middle - 14:.1f}" y="{y + dip - 6:.1f}" width="28" height="13" fill="{PAPER}"/>')
            names.append(_text(middle, y + dip + 4, path, 10, colour, bold=True))
        deepest = max(deepest, dip + 8)
    return [*drawn, *names], deepest


def _fabric(labels: Labels, plan: Drawing, y: float) -> tuple[list[str], float]:
    """Returns the NVLink or xGMI fabric as a bar below the GPUs it joins, or as curves, and its lower edge."""
    machine = labels.machine
    joined = [gpu for gpu in machine.gpus if labels.bundles[gpu.key]]
    if not joined:
        return [], y - 20
    boxes = [plan.boxes[gpu.key] for gpu in joined]
    left, right = min(box.x for box in boxes), max(box.x + box.width for box in boxes)
    drawn = [
        f'<line x1="{box.middle:.1f}" y1="{box.y + LEAF_HEIGHT:.1f}" x2="{box.middle:.1f}" y2="{y:.1f}" '
        f'stroke="{NVLINK}" stroke-width="3" stroke-opacity="0.75"/>'
        for box in boxes
    ]
    drawn.append(
        f'<rect x="{left:.1f}" y="{y:.1f}" width="{right - left:.1f}" height="34" rx="8" fill="#f3edff" '
        f'stroke="{NVLINK}" stroke-width="1.5"/>'
    )
    text = _fabric_text(labels, joined)
    drawn.append(_text((left + right) / 2, y + 22, _fit(text, right - left - 8, 13), 13, NVLINK, bold=True))
    return drawn, y + 34


def _fabric_text(labels: Labels, joined: list[Gpu]) -> str:
    """Returns what is written on the bar of the fabric."""
    kinds = {link.kind for gpu in joined for link in labels.bundles[gpu.key]}
    name = "xGMI" if kinds == {"xgmi"} else "NVLink"
    counts = sorted({labels.link_count(gpu) for gpu in joined})
    rates = sorted({rate for gpu in joined if (rate := labels.link_bytes_per_second(gpu)) is not None})
    pairs = [(a, b) for i, a in enumerate(joined) for b in joined[i + 1 :]]
    cells = {labels.gpu_gpu(a, b) for a, b in pairs}
    switches = len(labels.machine.nvswitches)
    hidden = any(switch.key == "hidden" for switch in labels.machine.nvswitches)
    how = "direct links" if len(cells) > 1 else "all to all"
    if switches:
        how = "through NVSwitches" if hidden else f"through {switches} NVSwitch{'es' if switches > 1 else ''}"
    links = "-".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    each = f", {gigabytes(rates[0])} per GPU" if rates else ""
    return f"{name} {how}: {links} links{each}"


def _footer(machine: Machine, used: set[bool], y: float) -> tuple[list[str], float]:
    """Returns the legend and the notes, and the height of the whole picture."""
    drawn: list[str] = []
    entries = [
        (True, GDR, "", "within the distance at which NCCL uses GPUDirect RDMA"),
        (False, FAR, ' stroke-dasharray="6 4"', "nearest NIC; NCCL does not use GPUDirect RDMA with it by default"),
    ]
    x = float(MARGIN)
    for good, colour, dash, text in entries:
        if good not in used:
            continue
        drawn.append(
            f'<line x1="{x}" y1="{y - 4}" x2="{x + 30}" y2="{y - 4}" stroke="{colour}" stroke-width="2.4"{dash}/>'
        )
        drawn.append(_text(x + 38, y, text, 11.5, PALE_INK, at="start"))
        x += 60 + 7.2 * len(text)
    for note in machine.notes[:MAX_NOTES]:
        y += 18
        drawn.append(_text(MARGIN, y, f"Note: {note}", 11.5, PALE_INK, at="start"))
    if len(machine.notes) > MAX_NOTES:
        y += 18
        drawn.append(_text(MARGIN, y, f"and {len(machine.notes) - MAX_NOTES} notes more", 11.5, PALE_INK, at="start"))
    return drawn, y + 26
