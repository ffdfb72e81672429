"""The command line of `gradwire bench`: the flags of nccl-tests with their meanings and defaults, checked.

Source: nccl-tests 2.19, README.md (Arguments) and src/common.cu.
"""

import argparse
import re
from pathlib import Path
from typing import NoReturn

from gradwire.bench.arguments import MOST_SECONDS, CommandParser, add_import_option, import_modules, in_one_form
from gradwire.bench.emulation.cluster import MOST_RANKS
from gradwire.bench.nccl_tests.collectives import COLLECTIVES
from gradwire.bench.nccl_tests.dtypes import ELEMENT_TYPES, OPERATIONS
from gradwire.topology.printable import shortened

BACKENDS = ("gradwire", "gloo", "nccl", "mpi", "shm", "nccl-raw")
ALGORITHMS = ("auto", "flat", "hierarchical", "leader")

MOST_NBYTES = 2**50
"""Upper limit of a tensor's size in bytes: a thousand times the memory of a large machine."""
MOST_ROWS = 100_000
_MOST_TIMES = 10**9
"""Upper limit of the numbers of iterations, warm-ups and checks: at a microsecond each a quarter of an hour."""

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


class Parser(CommandParser):
    """Parser that raises ValueError where argparse would print and exit, so that only one of several ranks prints."""

    def error(self, message: str) -> NoReturn:
        """Raises ValueError with the message of argparse, its option in backticks."""
        raise ValueError(in_one_form(message))


def parse_size(text: str) -> int:
    """Returns the bytes of a size as nccl-tests reads it: `8`, `64K`, `1.5G`, `1GB`, `1 MiB`; units are powers of 1024.

    Args:
        text: Word of the command line.

    Raises:
        argparse.ArgumentTypeError: The text is no size, or more than `MOST_NBYTES`.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(?:\s*([kmg])(?:i?b|bytes)?)?", text.strip(), re.ASCII | re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"found {text!r}, wanted a number of bytes, with K, M or G for powers of 1024")
    nbytes = float(match[1]) * _UNITS[(match[2] or "").lower()]
    if nbytes > MOST_NBYTES:
        raise argparse.ArgumentTypeError(f"found {shortened(text, 40)!r}, wanted at most {MOST_NBYTES >> 30}G")
    return int(nbytes)


def _collective(text: str) -> str:
    """Returns a collective's name, given that or the path of nccl-tests' program for it, such as `all_reduce_perf`."""
    return Path(text).name.removesuffix("_perf")


def _at_least(lowest: int, highest: int = _MOST_TIMES) -> "type[int]":
    """Returns a converter for argparse that accepts whole numbers from `lowest` to `highest`."""

    def convert(text: str) -> int:
        # Ten digits are more than any of these may have; Python refuses to read 5,000.
        value = int(text) if re.fullmatch(r"\s*[+-]?\d{1,10}\s*", text, re.ASCII) else None
        if value is None or not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(
                f"found {shortened(text, 40)!r}, wanted a whole number from {lowest} to {highest}"
            )
        return value

    return convert  # type: ignore[return-value]  # argparse takes any callable


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"found {text!r}, wanted a number >= 1 (1: use -i)")
    return value


def _root(text: str) -> int | None:
    if text == "all":
        return None
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"found {shortened(text, 40)!r}, wanted a rank, or all")
    return int(text)


def _names(known: tuple[str, ...]) -> "type[str]":
    """Returns a converter for argparse from names separated by commas to a tuple of different names, all of `known`."""

    def convert(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"found {unknown[0]!r}, wanted {', '.join(known)}; commas for several")
        return names

    return convert  # type: ignore[return-value]  # argparse takes any callable


def _output(suffix: str) -> "type[Path]":
    """Returns a converter for argparse that accepts file names with this suffix in an existing folder."""

    def convert(text: str) -> Path:
        path = Path(text)
        if path.suffix != suffix:
            raise argparse.ArgumentTypeError(f"found {text!r}, wanted a file name that ends in {suffix}")
        if not path.absolute().parent.is_dir():
            raise argparse.ArgumentTypeError(f"found {text!r}, but there is no such folder: make it first")
        return path

    return convert  # type: ignore[return-value]  # argparse takes any callable


def build_parser() -> Parser:
    """Returns the parser of `gradwire bench COLLECTIVE ...`."""
    parser = Parser(
        prog="gradwire bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Times a collective and checks its result, as nccl-tests does.",
        epilog="`gradwire bench kernels` times the compressors' kernels instead.\n"
        "Example: gradwire bench all_reduce -b 8 -e 64M -f 2 -g 4",
    )
    names = ", ".join(COLLECTIVES)
    parser.add_argument("collective", type=_collective, choices=COLLECTIVES, metavar="COLLECTIVE", help=names)
    _add_sizes(parser)
    _add_timing(parser)
    _add_operation(parser)
    _add_output(parser)
    _add_backends(parser)
    return parser


def _add_sizes(parser: Parser) -> None:
    sizes = parser.add_argument_group("sizes and ranks")
    # Ranks.
    sizes.add_argument(
        "-g",
        "--ngpus",
        type=_at_least(1, MOST_RANKS),
        default=None,
        metavar="N",
        help="ranks to start on this host (default 1); only 1 under torchrun, mpirun or srun, which start them",
    )
    sizes.add_argument(
        "-t",
        "--nthreads",
        type=_at_least(1, MOST_RANKS),
        default=1,
        metavar="N",
        help="only 1: a rank is a process here, never a thread",
    )
    sizes.add_argument(
        "-p",
        "--parallel_init",
        type=int,
        choices=(0, 1),
        default=0,
        help="no effect: processes start in parallel in any case",
    )
    sizes.add_argument(
        "-R", "--local_register", type=int, choices=(0, 1, 2), default=0, help="only 0: no backend registers buffers"
    )
    # Sizes of the rows.
    sizes.add_argument("-b", "--minbytes", type=parse_size, default=32 * 2**20, metavar="SIZE", help="default 32M")
    sizes.add_argument("-e", "--maxbytes", type=parse_size, default=32 * 2**20, metavar="SIZE", help="default 32M")
    sizes.add_argument(
        "-i",
        "--stepbytes",
        type=parse_size,
        default=2**20,
        metavar="SIZE",
        help="added from row to row (default 1M), unless -f is given",
    )
    sizes.add_argument(
        "-f",
        "--stepfactor",
        type=_factor,
        default=1.0,
        metavar="FACTOR",
        help="multiplies the size from row to row (default 1: off)",
    )


def _add_number(
    group: argparse._ArgumentGroup,
    flags: tuple[str, str],
    text: str,
    default: int,
    bounds: tuple[int, int] = (0, _MOST_TIMES),
    *,
    meaning: str = "",
    metavar: str | None = None,
) -> None:
    """Adds a flag that takes a whole number.

    Args:
        group: Group of options to which it is added.
        flags: Short and long name of the flag.
        text: Beginning of its help, which ends with the default.
        default: Value without the flag.
        bounds: Least and largest value.
        meaning: What the default does, for the help; with its punctuation.
        metavar: Name of the value in the help; None for the flag's name.
    """
    words = f"{text} (default {default}{meaning})"
    group.add_argument(*flags, type=_at_least(*bounds), default=default, metavar=metavar, help=words)


_ONCE_AT_LEAST = (1, _MOST_TIMES)
_OFF_OR_ON = (0, 1)


def _add_timing(parser: Parser) -> None:
    timing = parser.add_argument_group("timing")
    _add_number(timing, ("-n", "--iters"), "timed iterations", 20, _ONCE_AT_LEAST)
    _add_number(timing, ("-w", "--warmup_iters"), "untimed iterations of every size, before the table", 1)
    _add_number(timing, ("-m", "--agg_iters"), "operations issued together in each iteration", 1, _ONCE_AT_LEAST)
    _add_number(timing, ("-N", "--run_cycles"), "tables; 0 for ever", 1)
    blocking = "1: wait and barrier after each operation; 2: wait; 3: barrier outside the time"
    _add_number(timing, ("-z", "--blocking"), blocking, 0, (0, 3))
    average = "time of rank 0 (0), mean (1), min (2) or max (3) over the ranks"
    _add_number(timing, ("-a", "--average"), average, 1, (0, 3))
    processor = "report processor time (CPU tensors) or time to issue (CUDA) instead"
    _add_number(timing, ("-C", "--report_cputime"), processor, 0, _OFF_OR_ON)
    graph = "capture the iterations in a CUDA graph and launch it so often"
    _add_number(timing, ("-G", "--cudagraph"), graph, 0, meaning=": off")
    longest = "longest wait for a peer"
    _add_number(timing, ("-T", "--timeout"), longest, 0, (0, MOST_SECONDS), meaning=": 300 s", metavar="SECONDS")
    each = "also show each iteration's minimum, maximum, p99 and spread"
    _add_number(timing, ("-I", "--per_iter_timing"), each, 0, _OFF_OR_ON)
    _add_number(timing, ("-K", "--per_iter_skip"), "iterations left out of that", 0)


def _add_operation(parser: Parser) -> None:
    operation = parser.add_argument_group("operation and check")
    operation.add_argument("-o", "--op", choices=(*OPERATIONS, "all"), default="sum", help="default sum")
    operation.add_argument(
        "-d",
        "--datatype",
        choices=(*ELEMENT_TYPES, "all"),
        default="float",
        metavar="TYPE",
        help=f"{', '.join(ELEMENT_TYPES)} or all (default float)",
    )
    operation.add_argument("-r", "--root", type=_root, default=0, help="a rank, or all (default 0)")
    times = "times to check the result, bit by bit"
    _add_number(operation, ("-c", "--check"), times, 1, meaning="; 0: #wrong shows N/A")


def _add_output(parser: Parser) -> None:
    output = parser.add_argument_group("output")
    _add_number(output, ("-S", "--report_timestamps"), "adds a column", 0, _OFF_OR_ON)
    output.add_argument(
        "-J",
        "--output_file",
        type=_output(".json"),
        metavar="FILE.json",
        help="the JSON of nccl-tests, without the environment; never overwrites",
    )
    output.add_argument("--json", action="store_true", help="print that JSON in place of the table")
    output.add_argument("--csv", type=_output(".csv"), metavar="FILE.csv", help="one line a row; never overwrites")
    _add_number(output, ("-M", "--memory"), "shows the memory used", 0, _OFF_OR_ON)


def _add_backends(parser: Parser) -> None:
    backends = parser.add_argument_group("what is measured (commas for several; one block each)")
    backends.add_argument("--backend", type=_names(BACKENDS), default=("gradwire",), help=f"{', '.join(BACKENDS)}")
    backends.add_argument(
        "--algorithm",
        type=_names(ALGORITHMS),
        default=("auto",),
        help=f"gradwire's plan: {', '.join(ALGORITHMS)} (default auto)",
    )
    backends.add_argument(
        "--compressor",
        default="none",
        metavar="NAME",
        help="gradwire's compressor between nodes, for all_reduce (default none: exact)",
    )
    add_import_option(backends)
    backends.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where the tensors are (default: cuda for nccl and nccl-raw, else cpu)",
    )


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line, checks what argparse cannot, and imports the modules of `--import`.

    Args:
        argv: Words of the command line after `bench`.

    Raises:
        ValueError: A value does not fit; the message names the flag.
    """
    options = build_parser().parse_args(argv)
    if options.nthreads != 1:
        raise ValueError(
            f"`-t`: found {options.nthreads}, wanted 1, because a rank is a process here: multiply `-g`, or the "
            "launcher's ranks"
        )
    if options.local_register:
        raise ValueError(f"`-R`: found {options.local_register}, wanted 0, because no backend here registers buffers")
    if options.minbytes > options.maxbytes:
        raise ValueError(f"`-b` is {options.minbytes} and `-e` is {options.maxbytes}; wanted the smallest size first")
    if options.stepfactor == 1.0 and options.stepbytes == 0:
        raise ValueError("`-i` is 0; wanted a size to add from row to row, or a factor with -f")
    sizes(options)
    import_modules(options.imports)
    if options.per_iter_skip >= options.iters:
        raise ValueError(
            f"`-K` is {options.per_iter_skip} and `-n` is {options.iters}; wanted fewer skipped than timed"
        )
    return options


def sizes(options: argparse.Namespace) -> list[int]:
    """Returns the sizes of the rows in bytes, from `-b` to `-e`, in steps of `-i` or `-f`.

    Args:
        options: Options of the command line.

    Raises:
        ValueError: There are more than `MOST_ROWS`.
    """
    found = [options.minbytes]
    while True:
        last = found[-1]
        following = int(last * options.stepfactor) if options.stepfactor > 1 else last + options.stepbytes
        following = max(following, last + 1)
        if following > options.maxbytes:
            return found
        if len(found) == MOST_ROWS:
            flag = "-f" if options.stepfactor > 1 else "-i"
            raise ValueError(f"`{flag}` gives more than {MOST_ROWS} rows from `-b` to `-e`; wanted larger steps")
        found.append(following)
