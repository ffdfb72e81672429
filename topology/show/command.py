"""`gradwire topo`: what does this machine, or a described one, look like."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Machine
from gradwire.topology.readers.detect import LIVE, detect
from gradwire.topology.readers.files import read_file
from gradwire.topology.show import draw, json_form, nccl_xml_write
from gradwire.topology.show.pipe import reader_may_leave
from gradwire.topology.show.svg import svg

PIPE_WIDTH = 400
"""Columns where nobody looks at a terminal, so that no line is broken."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    options = argparse.ArgumentParser(
        prog="gradwire topo",
        description="Shows CPUs, PCIe switches, GPUs, NICs and links: as a tree unless told otherwise.",
    )
    options.add_argument("--matrix", action="store_true", help="distances of all GPUs and NICs, as nvidia-smi topo -m")
    options.add_argument("--json", action="store_true", help="everything, for programs")
    options.add_argument("--svg", metavar="FILE", type=Path, help="write a picture")
    options.add_argument("--nccl-xml", metavar="FILE", type=Path, help="write a file for NCCL_TOPO_FILE")
    source = options.add_mutually_exclusive_group()
    source.add_argument(
        "--from",
        metavar="FILE",
        type=Path,
        dest="description",
        help="read NCCL XML, nvidia-smi topo -m, lspci -vvv or this command's JSON instead of this machine",
    )
    source.add_argument("--root", metavar="DIR", type=Path, default=LIVE, help="read sys/ and proc/ below this folder")
    return options


def main(argv: list[str]) -> int:
    """Runs the command; returns 0, or 2 where the input or a file could not be used.

    Args:
        argv: Words after `gradwire topo`.
    """
    words = parser().parse_args(argv)
    try:
        machine = read_file(words.description) if words.description is not None else detect(words.root)
        _written(machine, words.svg, words.nccl_xml)
        with reader_may_leave():
            _printed(machine, words)
    except (TopologyError, OSError) as error:
        print(f"gradwire topo: {error}", file=sys.stderr)
        return 2
    return 0


def _printed(machine: Machine, words: argparse.Namespace) -> None:
    """Prints what was asked for, the tree where nothing was."""
    if words.json:
        print(json_form.write(machine))
    if words.matrix:
        print(draw.matrix(machine))
    if not (words.json or words.matrix or words.svg or words.nccl_xml):
        width = None if sys.stdout.isatty() else PIPE_WIDTH
        Console(highlight=False, emoji=False, width=width).print(draw.tree(machine))  # 0000:cd:00.0 is no disc


def _written(machine: Machine, picture: Path | None, nccl_xml: Path | None) -> None:
    """Writes the files that were asked for, and says so on stderr."""
    if picture is not None:
        picture.write_text(svg(machine), encoding="utf-8")
        print(f"wrote {picture}", file=sys.stderr)
    if nccl_xml is not None:
        text = nccl_xml_write.write(machine)
        nccl_xml.write_text(text, encoding="utf-8")
        count = nccl_xml_write.element_count(text)
        limit = nccl_xml_write.NCCL_MAX_NODES
        over = f"; NCCL refuses more than {limit} elements, this has {count}" if count > limit else ""
        print(f"wrote {nccl_xml}{over}", file=sys.stderr)
