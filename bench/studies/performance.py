"""Every figure of docs/results/performance.md, measured again and written down with its machine, date and command.

    python -m gradwire.bench.studies.performance              # all sections; an hour on 2 quiet cores, needs root
    python -m gradwire.bench.studies.performance hook sweep   # these alone; the others keep what the page says

A section is a command whose standard output goes into the page as it is. A section whose command fails keeps its old
text, and the failure is printed.
"""

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from gradwire.bench.machine import machine_line

PAGE = Path("docs/results/performance.md")
NOT_YET = "Not measured yet."

_HEAD = """# Performance

Every table says on which machine, on which day and by which command it was made; `python -m
gradwire.bench.studies.performance` measures all of them again and rewrites the tables. Seconds depend on the machine
and on whatever else it does; ratios inside a table do not, as its rows took turns in one run. Emulated clusters are
network namespaces on one machine, each behind a link of the stated rate; all their ranks share the machine's cores.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """One table of the page.

    Attributes:
        name: On the command line.
        title: Its heading.
        text: What it shows and how to read it.
        command: Words after `python -m`.
    """

    name: str
    title: str
    text: str
    command: tuple[str, ...]


def _compare(*words: str) -> tuple[str, ...]:
    return ("gradwire", "compare", *words)


SECTIONS = (
    Section(
        "hook",
        "One bucket through the DDP hook",
        "16 MB at 200 Mbit. The lower bound is 2(N-1)/N of the bucket on every node's card. "
        '"Share of limit" is the ideal time over the measured one. "Of link" also counts packet headers and leaves out '
        'the time of a step without communication. Speed-up is over plain DDP. "Rate unknown" is gradwire where nobody '
        "has said how fast the links are.",
        ("gradwire.bench.studies.hook_speed",),
    ),
    Section(
        "overhead",
        "The hook where it has nothing to gain",
        "One rank: the same transformer with plain DDP and with the hook, in turns.",
        _compare(
            "--nodes", "1", "--ranks-per-node", "1", "--megabytes", "16", "--rounds", "60", "--only", "gradwire flat"
        ),
    ),
    Section(
        "one-node",
        "The hook on one node of two ranks",
        "Shared memory in place of gloo.",
        _compare(
            "--nodes", "1", "--ranks-per-node", "2", "--megabytes", "16", "--rounds", "60", "--only", "gradwire flat"
        ),
    ),
    Section(
        "sweep",
        "All-reduce inside a node, 2 ranks",
        "gradwire as the hook calls it, its shared memory alone, and gloo.",
        (
            "gradwire",
            "bench",
            "all_reduce",
            "-b",
            "8",
            "-e",
            "64M",
            "-f",
            "8",
            "-g",
            "2",
            "--backend",
            "gradwire,shm,gloo",
        ),
    ),
    Section(
        "compare",
        "Plain DDP, torch's hooks and gradwire side by side",
        "A transformer on 2 nodes of 2 ranks behind 200 Mbit. The error is that of one averaged gradient against the "
        "exact mean; compressors with feedback make up for it in later steps, and those with a momentum of their own "
        "(onebit, dgc) deliver another quantity than the mean.",
        _compare("--megabytes", "16", "--plot", "docs/pictures/speedup.png"),
    ),
    Section(
        "swin-2x8",
        "Replay: Swin-T on 2x8 GPUs behind 25 Gbit",
        "Real shapes and order, computation as timed waits. A connection reaches 5 Gbit, see docs/results/replays.md.",
        _compare("--replay", "swin_t", "--nodes", "2", "--stream", "5gbit"),
    ),
    Section(
        "swin-4x8",
        "Replay: Swin-T on 4x8 GPUs behind 25 Gbit",
        "The same on twice the nodes.",
        _compare("--replay", "swin_t", "--stream", "5gbit"),
    ),
    Section(
        "resnet50",
        "Replay: ResNet-50 on 4x8 GPUs behind 25 Gbit",
        "64 images a GPU and step.",
        _compare("--replay", "resnet50"),
    ),
    Section(
        "bert",
        "Replay: BERT-base on 4x8 GPUs behind 25 Gbit",
        "32 sentences a GPU and step.",
        _compare("--replay", "bert_base", "--only", "hier,onebit"),
    ),
    Section(
        "vgg16",
        "Replay: VGG16 on 2x8 GPUs behind 25 Gbit",
        "32 images a GPU and step.",
        _compare("--replay", "vgg16", "--nodes", "2"),
    ),
    Section(
        "peers",
        "Shared memory against MPI's",
        "All-reduce on one node against gloo and the MPI libraries that are given with --mpi-venv.",
        ("gradwire.bench.studies.shm_peers",),
    ),
    Section("kernels", "The compressors' kernels", "Encode and decode of one shard.", ("gradwire", "bench", "kernels")),
)


def split_page(text: str) -> dict[str, str]:
    """The body of each section of a page, by title."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return {title.strip(): body.strip() for title, body in zip(parts[1::2], parts[2::2], strict=True)}


def head_of(page: str) -> str:
    """What a page says before its first section, which is written by hand."""
    return re.split(r"^## ", page, maxsplit=1, flags=re.MULTILINE)[0].strip()


def write_page(bodies: dict[str, str], head: str = _HEAD) -> str:
    """The page, with one body for each section.

    Args:
        bodies: By title; sections without one say that they were not measured.
        head: What stands before the first section.
    """
    blocks = [f"## {one.title}\n\n{bodies.get(one.title) or body(one, None)}" for one in SECTIONS]
    return "\n\n".join([head.strip(), *blocks]) + "\n"


def body(section: Section, output: str | None) -> str:
    """A section's text under its heading.

    Args:
        section: Which.
        output: What its command printed; None where it has not run.
    """
    command = "`python -m " + " ".join(f'"{word}"' if " " in word else word for word in section.command) + "`"
    if output is None:
        return f"{section.text}\n\n{command}\n\n{NOT_YET}"
    lines = "\n".join(line.rstrip() for line in output.strip("\n").splitlines())
    return f"{section.text}\n\n{command}; {machine_line()}\n\n```\n{lines}\n```"


def measure(section: Section, timeout_seconds: float, extra: list[str]) -> str | None:
    """Runs a section's command; None, with a word on stderr, where it fails."""
    words = [sys.executable, "-m", *section.command, *extra]
    print(f"{section.name}: {' '.join(words[1:])}", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired:
        print(f"{section.name}: took longer than {timeout_seconds:g} s; its old text stays", file=sys.stderr)
        return None
    if done.returncode:
        print(f"{section.name}: status {done.returncode}; its old text stays", file=sys.stderr)
        return None
    return done.stdout


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench.studies.performance",
        description="Measures the figures of docs/results/performance.md again.",
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(one.name for one in SECTIONS))
    parser.add_argument("--output", type=Path, default=PAGE, help=f"the page (default {PAGE})")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for one section (default 1200)")
    parser.add_argument("--mpi-venv", action="append", default=[], metavar="NAME=DIR", help="for the section `peers`")
    return parser


def main(argv: list[str]) -> int:
    """Measures and writes the page; returns 1 if a section failed, 2 for a bad word.

    Args:
        argv: Sections and options.
    """
    options = build_parser().parse_args(argv)
    unknown = set(options.sections) - {one.name for one in SECTIONS}
    if unknown:
        print(
            f"performance: `SECTION` is {min(unknown)!r}; wanted {', '.join(one.name for one in SECTIONS)}",
            file=sys.stderr,
        )
        return 2
    page = options.output.read_text() if options.output.exists() else ""
    bodies, head = split_page(page), head_of(page) or _HEAD
    failed = False
    for section in SECTIONS:
        if options.sections and section.name not in options.sections:
            continue
        extra = [word for venv in options.mpi_venv for word in ("--mpi-venv", venv)] if section.name == "peers" else []
        output = measure(section, options.timeout, extra)
        failed = failed or output is None
        if output is not None:
            bodies[section.title] = body(section, output)
        # After each section: an hour's work is not lost to the last one.
        options.output.parent.mkdir(exist_ok=True)
        options.output.write_text(write_page(bodies, head))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
