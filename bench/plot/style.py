"""Style of all pictures: colours, frames and captions; matplotlib is loaded without a screen."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PlotRecord = dict[str, Any]
"""Parsed JSON from `bench -J`, `compare --json`, `make run` or a trace."""

OURS, PEERS, BASELINE = "#0b6e4f", "#8d99ae", "#c1440e"
"""Colors of gradwire, of others, and of the baseline of speed-ups."""

_FILE_FLAGS = ("-J", "--output_file", "--csv", "--json", "--plot")
_CAPTION_WIDTH = 130
_DOTS_PER_INCH = 130


def load_pyplot() -> Any:
    """Imports matplotlib.pyplot with a backend that needs no screen, and returns it.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("matplotlib is needed to draw: install it with `pip install matplotlib`") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def strip(axes: "Axes") -> None:
    """Removes the frame's lines at the top and on the right."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: "Figure", output: Path, notes: list[str]) -> None:
    """Writes a figure with a caption below it, and closes it.

    Args:
        figure: Finished figure; closed afterwards.
        output: Picture to write, .png, .svg or .pdf.
        notes: Paragraphs of the caption: machine, date, what the colours mean.
    """
    text = "\n".join(textwrap.fill(note, _CAPTION_WIDTH) for note in notes)
    figure.text(0.01, -0.02, text, fontsize=8, color="#555555", va="top")
    # No date in the file: the same figures give the same bytes.
    metadata = {"Date": None} if output.suffix == ".svg" else None
    figure.savefig(output, dpi=_DOTS_PER_INCH, bbox_inches="tight", metadata=metadata)
    load_pyplot().close(figure)


def shown_command(words: list[str]) -> str:
    """Returns a command line for the caption, without the options that name its output files.

    Args:
        words: Words of the command line as the user typed them.
    """
    kept: list[str] = []
    names = iter(words)
    for word in names:
        if word in _FILE_FLAGS:
            next(names, None)
        else:
            kept.append(f'"{word}"' if " " in word else word)
    return " ".join(kept)
