"""Draws bars of seconds with the speed-up written beside them, from what `compare --json` and `make run` wrote."""

import textwrap
from dataclasses import dataclass
from pathlib import Path

from gradwire.bench.emulation.rate import format_rate
from gradwire.bench.plot.style import BASELINE, OURS, PEERS, PlotRecord, load_pyplot, save, shown_command, strip

_TITLE_WIDTH = 100
_ROOM_FOR_TEXT = 1.75
"""Length of the axis relative to the longest bar, which leaves room for the text beside it."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Describes a bar of the picture: one configuration.

    Attributes:
        name: Label on the left of the bar.
        seconds: Length of the bar.
        text: Figures on the right of the bar.
    """

    name: str
    seconds: float
    text: str

    @property
    def colour(self) -> str:
        """Returns the color by the bar's origin: gradwire, plain DDP, or others."""
        return OURS if "gradwire" in self.name else BASELINE if "plain DDP" in self.name else PEERS


def draw_compare(record: PlotRecord, output: Path) -> None:
    """Draws seconds per step as bars, with the speed-up over plain DDP beside each.

    Args:
        record: Parsed output of `gradwire compare --json`.
        output: Picture to write, .png or .svg.
    """
    results = record["results"]
    ran = sorted((each for each in results if each["seconds"] is not None), key=lambda each: -each["seconds"])
    columns = ["speed-up over plain DDP"]
    columns += ["bytes on the busiest network card"] if any(each["nic_nbytes"] is not None for each in ran) else []
    columns += ["relative error of the averaged gradient"] if any(each["error"] is not None for each in ran) else []
    notes = [f"{record['machine']}; `{shown_command(['gradwire', 'compare', *record['args']])}`"]
    missing = {each["name"]: each["reason"] for each in results if each["seconds"] is None}
    notes += [f"does not run here: {name} ({reason})" for name, reason in missing.items()]
    _draw(
        [Bar(each["name"], each["seconds"], _figures(each)) for each in ran],
        record["title"],
        f"seconds per training step, lower is better\nbeside the bars: seconds, {', '.join(columns)}",
        notes,
        output,
    )


def _figures(result: PlotRecord) -> str:
    text = f"{result['seconds']:.3g} s   {result['speed_up']:.2f}x"
    text += f"   {result['nic_nbytes'] / 1e6:.3g} MB" if result["nic_nbytes"] is not None else ""
    return text + (f"   error {result['error']:.0e}" if result["error"] is not None else "")


def draw_training(record: PlotRecord, output: Path) -> None:
    """Draws seconds per step as bars, with the loss at the end beside each.

    Args:
        record: Parsed output of `make run` with `--json`.
        output: Picture to write, .png or .svg.
    """
    results = record["results"]
    bars = []
    for each in results[::-1]:
        seconds = each["seconds_per_step"]
        speed_up = results[0]["seconds_per_step"] / seconds
        text = f"{seconds:.3g} s   {speed_up:.2f}x   loss {each['final_loss']:.4f}"
        bars.append(Bar(_TRAINED.get(each["hook"], each["hook"]), seconds, text))
    first, ranks = results[0], record["nodes"]
    links = f" behind {format_rate(record['nic_bits_per_second'])}" if first["nic_nbytes_per_step"] else ""
    _draw(
        bars,
        f"a small transformer, {first['gradient_nbytes'] / 1e6:.2g} MB of gradients, AdamW; {len(ranks)} nodes x "
        f"{ranks[0]} ranks{links}",
        f"seconds per training step, lower is better\nbeside the bars: seconds, speed-up over plain DDP, loss after "
        f"{first['steps']} steps from the same start",
        [f"{record['machine']}; `{shown_command(['python', '-m', 'gradwire.bench.train.main_job', *record['args']])}`"],
        output,
    )


_TRAINED = {"plain": "plain DDP", "torch-fp16": "torch's fp16 hook", "gradwire": "gradwire, exact"}
"""Name of a hook -> label of its bar; others, such as `gradwire:int8`, are labelled by their name."""


def _draw(bars: list[Bar], title: str, axis: str, notes: list[str], output: Path) -> None:
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.34 * len(bars)), layout="constrained")
    axes.barh([bar.name for bar in bars], [bar.seconds for bar in bars], color=[bar.colour for bar in bars], height=0.7)
    for position, bar in enumerate(bars):
        axes.text(bar.seconds, position, f"  {bar.text}", va="center", fontsize=8)
    axes.set_xlim(0, _ROOM_FOR_TEXT * max(bar.seconds for bar in bars))
    axes.set_xlabel(axis, fontsize=9)
    axes.set_title(textwrap.fill(title, _TITLE_WIDTH), fontsize=10, loc="left")
    strip(axes)
    whose = {OURS: "gradwire", BASELINE: "plain DDP", PEERS: "others"}
    used = [colour for colour in whose if any(bar.colour == colour for bar in bars)]
    axes.legend(
        [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in used],
        [whose[colour] for colour in used],
        frameon=False,
        fontsize=9,
        loc="upper right",
    )
    save(figure, output, notes)
