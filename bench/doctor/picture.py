"""Picture of the rates between all nodes (SVG): a square for each pair and direction, red if slow, with its rate."""

from xml.sax.saxutils import escape

from gradwire.bench.doctor.facts import JobFacts
from gradwire.topology.wording import rate

_CELL, _MARGIN, _LETTER = 84, 24, 7.2
_FONT = "font-family='system-ui, sans-serif'"
_SLOW, _FAST, _UNKNOWN = (178, 24, 43), (209, 229, 240), "#f4f4f4"
"""Colours of the scale's two ends, and of pairs that were not measured. The ends are from ColorBrewer's RdBu, which
people with red-green colour blindness can tell apart."""


def svg(facts: JobFacts) -> str:
    """Returns the SVG text of the matrix of rates: each row is a sending node, each column a receiving one.

    Args:
        facts: Measurements of the job, with at least one pair.
    """
    # Collect the rates, and lay out the picture: long names of columns are turned by 45 degrees.
    names = _short(facts.names)
    rates: dict[tuple[int, int], float] = {}
    for pair in facts.pairs:
        rates[pair.a, pair.b], rates[pair.b, pair.a] = pair.many
    best = max(rates.values(), default=1.0) or 1.0
    cell = _CELL if len(names) <= 16 else 40
    top_number, unit_of_all = float(rate(best).split(" ")[0]), rate(best).split(" ")[1]
    left = _MARGIN + max(len(name) for name in names) * _LETTER + 12
    turned = max(len(name) for name in names) * _LETTER > cell - 8
    top = 64 + (max(len(name) for name in names) * _LETTER * 0.75 if turned else 20)
    hanging = max(len(name) for name in names) * _LETTER * 0.75 - cell / 2 if turned else 0
    width, height = left + cell * len(names) + _MARGIN + max(hanging, 40), top + cell * len(names) + 76
    # Draw the frame, the title and the names of the columns.
    parts = [
        (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' width='{width:.0f}' "
            f"height='{height:.0f}'>"
        ),
        "<rect width='100%' height='100%' fill='white'/>",
        (
            f"<text x='{_MARGIN}' y='34' {_FONT} font-size='17' font-weight='600'>"
            "What each node sends to each other node</text>"
        ),
    ]
    for column, name in enumerate(names):
        x, y = left + cell * (column + 0.5), top - 8
        turn = f" transform='rotate(-45 {x:.1f} {y:.1f})'" if turned else ""
        anchor = "start" if turned else "middle"
        parts.append(_text(x, y, name, anchor, 13, "#222", turn))
    # Draw a row of squares for each sending node; small squares have a number without its unit.
    for row, name in enumerate(names):
        parts.append(_text(left - 10, top + cell * (row + 0.5) + 5, name, "end", 13, "#222"))
        for column in range(len(names)):
            x, y = left + cell * column, top + cell * row
            if row == column:
                continue
            found = rates.get((row, column))
            fill, ink = (_UNKNOWN, "#888") if found is None else _colour(found / best)
            label = "not measured" if found is None else rate(found)
            parts.append(
                f"<rect x='{x + 1:.1f}' y='{y + 1:.1f}' width='{cell - 2}' height='{cell - 2}' rx='3' fill='{fill}'>"
                f"<title>{escape(name)} to {escape(names[column])}: {label}</title></rect>"
            )
            if found is not None and cell >= _CELL:
                number, unit = label.split(" ")
                parts.append(_text(x + cell / 2, y + cell / 2 + 1, number, "middle", 17, ink))
                parts.append(_text(x + cell / 2, y + cell / 2 + 18, unit, "middle", 11, ink))
            elif found is not None:
                parts.append(
                    _text(x + cell / 2, y + cell / 2 + 4, f"{found / best * top_number:.3g}", "middle", 11, ink)
                )
    # Close with the legend.
    note = "row to column, several connections" + (f", in {unit_of_all}" if cell < _CELL else "")
    parts += _legend(_MARGIN, height - 44, best, note)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _short(names: list[str]) -> list[str]:
    """Returns the names without their domains if they still differ; else the names unchanged."""
    first = [name.partition(".")[0] for name in names]
    return first if len(set(first)) == len(first) else names


def _legend(x: float, y: float, best: float, note: str) -> list[str]:
    """Returns the SVG elements of the colour scale from 0 to `best` bytes per second, with a note beside it."""
    parts = []
    for place, share in enumerate((0.0, 0.25, 0.5, 0.75, 1.0)):
        parts.append(f"<rect x='{x + 26 * place:.0f}' y='{y:.0f}' width='26' height='14' fill='{_colour(share)[0]}'/>")
    parts.append(_text(x, y + 30, "0", "start", 11, "#444"))
    parts.append(_text(x + 130, y + 30, rate(best), "end", 11, "#444"))
    parts.append(_text(x + 142, y + 11, note, "start", 11, "#444"))
    return parts


def _colour(share: float) -> tuple[str, str]:
    """Returns the colours of a square and of the text in it.

    Args:
        share: Rate divided by that of the fastest link in the picture, 0 to 1.
    """
    near = min(max(share, 0.0), 1.0)
    mixed = [round(slow + (fast - slow) * near) for slow, fast in zip(_SLOW, _FAST, strict=True)]
    return f"#{mixed[0]:02x}{mixed[1]:02x}{mixed[2]:02x}", "#fff" if near < 0.55 else "#123"


def _text(x: float, y: float, text: str, anchor: str, size: int, ink: str, more: str = "") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' {_FONT} font-size='{size}' fill='{ink}'{more}>"
        f"{escape(text)}</text>"
    )
