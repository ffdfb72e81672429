"""`gradwire predict`: which plan, how long, and whether to compress at all, for machines one need not have."""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gradwire.bench.arguments import CommandParser, check_can_plot, check_number, check_output, read_input
from gradwire.bench.compare.devices import all_on_machine, on_machine
from gradwire.bench.compare.public_models import PUBLIC_MODELS, PublicModel
from gradwire.bench.doctor.checks.steps import FIRST_BUCKET_NBYTES
from gradwire.bench.emulation.paths import parse_loss, parse_seconds
from gradwire.bench.emulation.rate import parse_rate
from gradwire.bench.pipe import reader_may_leave
from gradwire.bench.prediction import cluster_of_nodes
from gradwire.bench.terminal import CleanConsole, complain, working, writing
from gradwire.cli import predict_models
from gradwire.cli.predict_show import Answer, Gains, as_json, as_table, draw
from gradwire.comms.links.distance import MOST_ROUND_TRIP_SECONDS
from gradwire.comms.plan.advise import ANY_OPTIMIZER, Advice, Candidate, Workload, advise
from gradwire.comms.plan.codec_price import ELEMENT_NBYTES, codec_price, layout_of, square_layout
from gradwire.comms.plan.cost import EXACT
from gradwire.comms.plan.machine_cluster import (
    cluster_of_machines,
    codec_bytes_per_second,
    has_kernels,
    library_of,
    over_tcp,
)
from gradwire.comms.plan.overlap import FORWARD_SHARE
from gradwire.comms.plan.plan import BUCKET_NBYTES
from gradwire.compressors import registry
from gradwire.compressors.base import Layout
from gradwire.topology.bandwidth import memory_bytes_per_second, memory_of
from gradwire.topology.cluster import Cluster
from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Machine
from gradwire.topology.presets import PRESETS
from gradwire.topology.printable import shortened
from gradwire.topology.readers.files import read_file

ASSUMED = "pcie_box"
"""Preset that is used if neither --preset nor --topology is set: users with slow links have no DGX."""
MOST_RANKS_OF_A_NODE = 1024
MOST_RANKS = 2**17
"""Planning for more takes minutes."""
MOST_MEGABYTES = 1e8
"""25 * 10^12 parameters."""
MOST_BUCKETS = 10**5
"""The time of each is predicted under every plan with every compressor."""
GRADIENT_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Dtype of the gradients that DDP reduces -> bytes of an element."""
BOUNDS = {
    "nodes": (1, MOST_RANKS),
    "nics_per_node": (1, 1024),
    "backward_ms": (0, 1e9),
    "forward_ms": (0, 1e9),
    "bucket_mb": (1e-6, MOST_MEGABYTES),
    "accumulate": (1, 1e6),
}
"""Option -> the least and the most that makes sense."""
PICTURES = (".png", ".svg", ".pdf")
OPTIMIZERS = (ANY_OPTIMIZER, "sgd", "adam", "adamw", "lamb", "adagrad", "muon", "other")


@dataclass(frozen=True, slots=True)
class Question:
    """Holds the checked inputs of a prediction: machine, options, gradients and workload.

    Attributes:
        machine: One of the nodes.
        options: Parsed options of the command line.
        layout: Shapes of the parameters.
        workload: Gradients and computation of one step.
        assumed_compute: Device whose computing time is assumed, in words; empty if the user set the time.
    """

    machine: Machine
    options: argparse.Namespace
    layout: Layout
    workload: Workload
    assumed_compute: str = ""

    def cluster(self, nodes: int) -> Cluster:
        """Returns the cluster of the first `nodes` nodes, with the links that the options describe.

        Raises:
            ValueError: `--rtt` or `--loss` cannot be read, or the options do not fit the machine.
        """
        trip = self.options.rtt
        return cluster_of_nodes(
            self.machine,
            nodes,
            ranks=self.options.ranks_per_node,
            rates=self.options.nic or (),
            nics_per_node=self.options.nics_per_node,
            intra_bits_per_second=self.options.intra_node,
            round_trip_seconds=0.0 if trip is None else parse_seconds(trip, "--rtt", MOST_ROUND_TRIP_SECONDS),
            loss=0.0 if self.options.loss is None else parse_loss(self.options.loss, "--loss"),
        )

    def advice(self, cluster: Cluster) -> Advice:
        """Predicts the step time of every plan, exact and with every registered compressor, on a cluster.

        Compressors are fed float32. If gradients are float16 or bfloat16 (2 bytes), each byte of them stands for twice
        as many elements, so the bytes that a compressor sends and its seconds are doubled for each byte of gradients.

        Args:
            cluster: Placement of the ranks, and the rates of their links.

        Returns:
            The candidates with their predicted times, and the recommendation.
        """
        rate, kernels = codec_bytes_per_second(self.machine), has_kernels(self.machine)
        wider = ELEMENT_NBYTES / GRADIENT_NBYTES[self.options.gradient_dtype]
        prices = [
            codec_price(name, self.layout, len(cluster.nodes), rate, kernels=kernels) for name in registry.names()
        ]
        prices = [
            replace(price, ratio=price.ratio * wider, seconds_per_byte=price.seconds_per_byte * wider)
            for price in prices
            if price.name != EXACT.name
        ]
        return advise(cluster, self.workload, prices, library=library_of(self.machine))

    def torch_hook(self, cluster: Cluster) -> Candidate | None:
        """Predicts torch's fp16_compress_hook, one all-reduce of half the bytes; None if gradients are not float32."""
        if self.options.gradient_dtype != "float32":
            return None
        candidate = advise(cluster, self.workload.halved(), (), library=library_of(self.machine)).candidate("flat")
        return replace(candidate, name="torch fp16 hook", compressor="fp16 (torch)")


def build_parser() -> CommandParser:
    """Returns the parser of the options of `gradwire predict`."""
    parser = CommandParser(
        prog="gradwire predict",
        usage="%(prog)s [--preset NAME | --topology FILE]\n"
        "       (--gradient-mb MB | --parameters N | --model-json FILE\n        | --model NAME | --models) [options]",
        description="Predicts the time of every plan and compressor on a cluster, and recommends one.",
        epilog="example: gradwire predict --preset dgx_a100 --nodes 4 --nic 25gbit --gradient-mb 113.2 "
        "--backward-ms 45",
    )
    # The machine.
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        metavar="NAME",
        help=f"a well-known machine (default {ASSUMED}; the output says so): {', '.join(sorted(PRESETS))}",
    )
    source.add_argument(
        "--topology",
        type=Path,
        metavar="FILE",
        help="NCCL topology XML, `nvidia-smi topo -m`, or `gradwire topo --json` of one node",
    )
    # The nodes and their links.
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes like that (default 1)")
    parser.add_argument(
        "--ranks-per-node",
        type=_counts,
        default=(),
        metavar="R",
        help="ranks of a node (default: one for each GPU, else CPU socket); 2,1 for nodes that differ",
    )
    parser.add_argument(
        "--nic",
        type=_rates,
        metavar="RATE",
        help="rate of one NIC, 25gbit, in place of the machine's own; 40mbit,40mbit,15mbit for nodes that differ",
    )
    parser.add_argument(
        "--intra-node",
        type=_rate,
        metavar="RATE",
        help="rate of one rank inside its node, 1880gbit, if the machine does not say",
    )
    parser.add_argument("--rtt", metavar="TIME", help="round trip between two nodes of CPUs, 80ms")
    parser.add_argument("--loss", metavar="SHARE", help="share of packets lost, 0.1%%; with --rtt")
    parser.add_argument(
        "--nics-per-node",
        type=int,
        metavar="K",
        help="NICs that gradients use (default: 1 with --nic, else the machine's)",
    )
    # The gradients.
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--gradient-mb", type=float, metavar="MB", help="size of all gradients, in 10^6 bytes")
    size.add_argument("--parameters", type=float, metavar="N", help="number of parameters, 7e9")
    size.add_argument(
        "--model-json",
        type=Path,
        metavar="FILE",
        help='parameters: {"name": [shape], ...} or [{"name": ..., "shape": [...]}, ...]',
    )
    size.add_argument("--model", choices=sorted(PUBLIC_MODELS), help="a public model, with its backward time assumed")
    size.add_argument("--models", action="store_true", help="all of these by link, on 2 and on 4 nodes, as one table")
    parser.add_argument(
        "--gradient-dtype",
        choices=GRADIENT_NBYTES,
        default="float32",
        help="dtype of the gradients that DDP reduces, which is the parameters' (default float32)",
    )
    # The step.
    parser.add_argument(
        "--backward-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="time of a backward pass without communication (default: not known)",
    )
    parser.add_argument(
        "--forward-ms",
        type=float,
        metavar="MS",
        help="time of a forward pass and the optimizer (default: half of backward)",
    )
    parser.add_argument(
        "--bucket-mb", type=float, default=BUCKET_NBYTES / 2**20, metavar="MIB", help="DDP's bucket_cap_mb (default 25)"
    )
    parser.add_argument(
        "--accumulate", type=int, default=1, metavar="K", help="micro-batches a step; the last one sends (default 1)"
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default=ANY_OPTIMIZER,
        help="compressors known to reach a higher loss with it are not recommended",
    )
    # The output.
    parser.add_argument("--all", action="store_true", help="show every plan with every compressor")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON for programs")
    parser.add_argument("--markdown", action="store_true", help="print the table of --models for a page")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw step time over node count (needs matplotlib)")
    return parser


def _counts(text: str) -> tuple[int, ...]:
    """Parses the value of `--ranks-per-node`: one number of ranks for all nodes, `2`, or one for each, `2,1`.

    Raises:
        argparse.ArgumentTypeError: A value is no whole number, or out of range.
    """
    words = text.split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= MOST_RANKS_OF_A_NODE for word in words):
        raise argparse.ArgumentTypeError(
            f"found {shortened(text, 40)!r}; wanted a whole number from 1 to {MOST_RANKS_OF_A_NODE}, or one for each "
            "node: 2,1"
        )
    return tuple(map(int, words))


def _rate(text: str) -> int:
    """Parses one rate, such as `25gbit`, into bits per second.

    As a `type` of argparse it runs while the words are parsed, so a bad rate is reported before a required option that
    is missing, such as `--gradient-mb`.

    Raises:
        argparse.ArgumentTypeError: The text is no rate, or out of range.
    """
    try:
        return parse_rate(text, "")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).partition(": ")[2]) from None


def _rates(text: str) -> list[int]:
    """Parses the value of `--nic` as `_rate` does: one rate, or several with commas, one for each node.

    How many rates there are is not checked here, but by `_check_nodes`.
    """
    return [_rate(word) for word in text.split(",")]


def _check_nodes(options: argparse.Namespace) -> None:
    """Checks that `--nic` and `--ranks-per-node` have one value, or one for each node.

    Raises:
        ValueError: One of them has another number of values, or has several and there is a `--plot`.
    """
    for option, values in (("--nic", options.nic or ()), ("--ranks-per-node", options.ranks_per_node)):
        if len(values) > 1 and len(values) != options.nodes:
            raise ValueError(
                f"`{option}` has {len(values)} values and `--nodes` is {options.nodes}; wanted one value for all "
                "nodes, or one for each"
            )
        if len(values) > 1 and options.plot is not None:
            raise ValueError(
                f"`{option}` has {len(values)} values with `--plot`; wanted one: it draws other numbers of nodes"
            )


def read_question(options: argparse.Namespace) -> Question:
    """Checks the options of a prediction, reads its files, and returns its inputs.

    Args:
        options: Parsed options of the command line, without `--models`.

    Raises:
        ValueError: An option's value does not fit, a file of parameters cannot be read, or matplotlib is missing for
            `--plot`; the message names the option.
        TopologyError: The topology file cannot be used.
    """
    for name, (least, most) in BOUNDS.items():
        check_number(spelled(name), getattr(options, name), least, most)
    _check_nodes(options)
    if options.markdown:
        raise ValueError("`--markdown` is given without `--models`, whose table it prints; leave it out, or give both")
    check_number("--gradient-mb", options.gradient_mb, ELEMENT_NBYTES / 1e6, MOST_MEGABYTES)
    check_number("--parameters", options.parameters, 1, MOST_MEGABYTES * 1e6 / ELEMENT_NBYTES)
    if options.loss is not None and options.rtt is None:
        raise ValueError("`--loss` is given without `--rtt`; wanted both: what loss costs depends on the round trip")
    if options.plot is not None:
        if options.plot.suffix not in PICTURES:
            raise ValueError(f"`--plot`: found {options.plot}, wanted a name that ends in {', '.join(PICTURES)}")
        check_can_plot("--plot")
        check_output("--plot", options.plot)
    if options.forward_ms is not None and not options.backward_ms and options.model is None:
        raise ValueError(
            f"`--forward-ms` is {options.forward_ms:g} without `--backward-ms`; wanted both: gradients travel in "
            "backward"
        )
    machine = machine_of(options)
    check_number("--nodes", options.nodes, 1, MOST_RANKS // ranks_of(machine, options))
    if options.model is not None:
        model = on_machine(PUBLIC_MODELS[options.model], machine, ranks_of(machine, options))
        return question_about(model, machine, options)
    element = GRADIENT_NBYTES[options.gradient_dtype]
    layout, nbytes = gradient_of(
        options.model_json,
        options.gradient_mb * ELEMENT_NBYTES / element
        if options.parameters is None and options.gradient_mb is not None
        else (options.parameters or 0) * ELEMENT_NBYTES / 1e6,
    )
    nbytes = nbytes * element // ELEMENT_NBYTES
    shapes_are_known = options.model_json is not None
    workload = _workload(options, nbytes, options.backward_ms / 1e3, layout if shapes_are_known else None)
    return Question(machine, options, layout, workload)


def buckets_of_parameters(sizes: Sequence[int], cap_nbytes: int) -> tuple[int, ...]:
    """Returns the bytes of DDP's buckets, in the order in which DDP fills them: from the last parameter to the first.

    Source: torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size; distributed.py (with the default
    cap the first bucket has a smaller one).

    Args:
        sizes: Bytes of each parameter, in the model's order; a bucket holds whole parameters. Empty: no bucket.
        cap_nbytes: Bytes from which a bucket is full.
    """
    made, held, cap = [], 0, FIRST_BUCKET_NBYTES if cap_nbytes == BUCKET_NBYTES else cap_nbytes
    for nbytes in reversed(sizes):
        held += nbytes
        if held >= cap:
            made.append(held)
            held, cap = 0, cap_nbytes
    return (*made, *([held] if held else []))


def ranks_of(machine: Machine, options: argparse.Namespace) -> int:
    """Returns the number of ranks on the node that has most: one for each GPU, else for each CPU socket, at least 1.

    Args:
        machine: One of the nodes.
        options: Parsed options; `ranks_per_node` takes precedence over the machine's GPUs and sockets.
    """
    sockets = len({cpu.socket for cpu in machine.cpus})
    return max(options.ranks_per_node, default=0) or len(machine.gpus) or sockets or 1


def machine_of(options: argparse.Namespace) -> Machine:
    """Returns the machine that each node is; all nodes are alike.

    Args:
        options: Parsed options: `topology`, else `preset`, else the assumed machine.

    Raises:
        TopologyError: The topology file cannot be used.
    """
    return read_file(options.topology) if options.topology is not None else PRESETS[options.preset or ASSUMED]()


def spelled(name: str) -> str:
    """Returns an option as the user writes it, from its attribute: `--ranks-per-node`."""
    return "--" + name.replace("_", "-")


def forward_seconds(options: argparse.Namespace, backward_seconds: float) -> float:
    """Returns the seconds of a forward pass: `--forward-ms`, else half of a backward pass.

    Args:
        options: Parsed options of the command line.
        backward_seconds: Duration of a backward pass.
    """
    return backward_seconds * FORWARD_SHARE if options.forward_ms is None else options.forward_ms / 1e3


def question_about(model: PublicModel, machine: Machine, options: argparse.Namespace) -> Question:
    """Returns the inputs of a prediction for a public model, with an assumed backward time without `--backward-ms`.

    Args:
        model: Public model, scaled to the machine's devices.
        machine: One of the nodes.
        options: Parsed and checked options.
    """
    layout = layout_of(model.shapes)
    seconds = options.backward_ms / 1e3 or model.backward_seconds
    nbytes = layout.numel * GRADIENT_NBYTES[options.gradient_dtype]
    assumed = "" if options.backward_ms else model.assumed
    return Question(machine, options, layout, _workload(options, nbytes, seconds, layout), assumed)


def _workload(
    options: argparse.Namespace, nbytes: int, backward_seconds: float, layout: Layout | None = None
) -> Workload:
    """Returns the training step to predict: bytes of its gradients and buckets, and seconds of its computation.

    Args:
        options: Parsed and checked options: `bucket_mb`, `gradient_dtype`, `forward_ms`, `optimizer`, `accumulate`.
        nbytes: Bytes of all gradients.
        backward_seconds: Seconds of a backward pass without communication; 0 if unknown.
        layout: Parameters, by whose sizes DDP fills its buckets; None if their shapes are unknown: then all buckets
            have `--bucket-mb`.

    Raises:
        ValueError: There would be more than `MOST_BUCKETS` buckets.
    """
    forward, cap = forward_seconds(options, backward_seconds), round(options.bucket_mb * 2**20)
    element = GRADIENT_NBYTES[options.gradient_dtype]
    sizes = () if layout is None else [element * (piece.stop - piece.start) for piece in layout.slices]
    if (buckets := nbytes / cap) > MOST_BUCKETS:
        least = math.ceil(nbytes / MOST_BUCKETS / 2**20)
        raise ValueError(f"`--bucket-mb`: found {options.bucket_mb:g} ({buckets:.3g} buckets), wanted at least {least}")
    return Workload(
        gradient_nbytes=nbytes,
        backward_seconds=backward_seconds,
        bucket_nbytes=cap,
        bucket_sizes=buckets_of_parameters(sizes, cap),
        optimizer=options.optimizer,
        accumulate=options.accumulate,
        micro_seconds=forward + backward_seconds,
        rest_seconds=forward,
    )


def assumed_memory(machine: Machine) -> str:
    """Returns the card whose memory rate is taken for a machine's slowest GPU, in words; empty if its own is known.

    Args:
        machine: One of the nodes.
    """
    gpu = min(machine.gpus, key=memory_bytes_per_second, default=None)
    if gpu is None or not (assumed := memory_of(gpu))[1]:
        return ""
    return (
        f"{assumed[0] / 1e9:.0f} GB/s as on the card {assumed[1]}, as nothing is known here of {gpu.name or 'theirs'}"
    )


def main(argv: list[str]) -> int:
    """Runs `gradwire predict`: prints its answer, and draws the picture of `--plot`.

    Args:
        argv: Words after `gradwire predict`.

    Returns:
        The exit status: 0, or 2 after an error, which is printed.

    Raises:
        SystemExit: An option is wrong (status 2), or is `--help` (0).
    """
    options = build_parser().parse_naming(argv, "--topology")
    try:
        if options.models:
            _answer_models(options)
            return 0
        question = read_question(options)
        began = time.perf_counter()
        with working("pricing every plan and compressor"):
            cluster = question.cluster(options.nodes)
            advice = question.advice(cluster)
            gains, hook = None, question.torch_hook(cluster)
            if options.nodes > 1 and question.workload.backward_seconds > 0:
                gains = Gains.over_one_node(options.nodes, advice, question.advice(question.cluster(1)), hook)
        took, kernels = time.perf_counter() - began, has_kernels(question.machine)
        crossed = options.nodes > 1 and not cluster.levels[-1].link.nvlink
        tcp = crossed and over_tcp(question.machine, nic_given=options.nic is not None)
        assumptions = question.assumed_compute, assumed_memory(question.machine)
        answer = Answer(cluster, question.workload, advice, took, gains, hook, *assumptions, kernels, tcp)
        with reader_may_leave():
            if options.json:
                print(json.dumps(as_json(answer), indent=1))
            else:
                assumed = "" if options.preset or options.topology else ASSUMED
                as_table(CleanConsole(highlight=False), answer, everything=options.all, assumed=assumed)
        if options.plot is not None:
            with working("pricing clusters of other sizes"), writing("--plot", options.plot):
                draw(options.plot, lambda nodes: question.advice(question.cluster(nodes)), options.nodes)
    except (ValueError, TopologyError, OSError, RuntimeError) as error:
        complain("predict", error)
        return 2
    return 0


def _answer_models(options: argparse.Namespace) -> None:
    """Prints the table of `--models`: public models on fixed links and numbers of nodes.

    Args:
        options: Parsed options of the command line.

    Raises:
        ValueError: An option is given that the table has values of its own for, such as `--nodes` or `--nic`.
        TopologyError: The topology file cannot be used.
    """
    for name, refused in (("nodes", options.nodes != 1), ("nic", options.nic is not None), ("rtt", options.rtt),
                          ("loss", options.loss), ("nics-per-node", options.nics_per_node),
                          ("plot", options.plot), ("backward-ms", options.backward_ms),
                          ("forward-ms", options.forward_ms is not None),
                          ("gradient-dtype", options.gradient_dtype != "float32"),
                          ("ranks-per-node", len(options.ranks_per_node) > 1),
                          ("accumulate", options.accumulate != 1), ("intra-node", options.intra_node)):  # fmt: skip
        if refused:
            raise ValueError(
                f"`--{name}` is given with `--models`, which has its own; leave it out, or take `--model NAME`"
            )
    machine = machine_of(options)

    def ask(model: PublicModel, nodes: int, rate: str, nics: int, *, halved: bool = False) -> Advice:
        question = question_about(model, machine, options)
        if halved:
            question = replace(question, workload=question.workload.halved())
        bits = parse_rate(rate, "--nic")
        cluster = cluster_of_machines(
            machine,
            nodes,
            ranks_per_node=max(options.ranks_per_node, default=None),
            nic_bits_per_second=bits,
            nics_per_node=nics,
        )
        return question.advice(cluster)

    models = all_on_machine(list(PUBLIC_MODELS.values()), machine, ranks_of(machine, options))
    with working("pricing every model on every link"):
        predictions = list(predict_models.rows(models, ask))
    with reader_may_leave():
        if options.json:
            print(json.dumps(predict_models.as_objects(predictions), indent=1))
        elif options.markdown:
            print(predict_models.as_markdown(predictions, machine_words(machine, options)))
        else:
            predict_models.as_table(CleanConsole(highlight=False), predictions, machine_words(machine, options))


def machine_words(machine: Machine, options: argparse.Namespace) -> str:
    """Describes a node of the table of `--models` in words: `4 GPUs (NVIDIA A10)`, or `1 rank`.

    Args:
        machine: One of the nodes.
        options: Parsed and checked options.
    """
    ranks = max(options.ranks_per_node, default=0) or max(1, len(machine.gpus))
    names = sorted({gpu.name for gpu in machine.gpus if gpu.name})
    return f"{ranks} {'GPU' if machine.gpus else 'rank'}{'s' if ranks > 1 else ''}" + (
        f" ({', '.join(names)})" if names else ""
    )


def gradient_of(model: Path | None, megabytes: float | None) -> tuple[Layout, int]:
    """Returns the layout of a gradient and its bytes in float32.

    Args:
        model: JSON file with the parameters, in a form that `_entries` reads; None takes `megabytes` instead.
        megabytes: Size of the gradient in 10^6 bytes of float32 if there is no file; square matrices are assumed.

    Returns:
        (shapes of the parameters, bytes of the gradient in float32).

    Raises:
        ValueError: The file cannot be read, or does not describe parameters, or describes none or too many.
    """
    if model is None:
        nbytes = round((megabytes or 0.0) * 1e6)
        return square_layout(nbytes), nbytes
    text = read_input("--model-json", model)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`--model-json` {model} is no JSON: {error}") from None
    try:
        shapes = [_parameter(entry) for entry in _entries(document)]
    except ValueError as error:
        raise ValueError(f"{error}; read from {model}") from None
    numel = sum(math.prod(shape) for _, shape in shapes)
    if numel * ELEMENT_NBYTES > MOST_MEGABYTES * 1e6:
        raise ValueError(f"`--model-json` {model} has more than {MOST_MEGABYTES * 1e6 / ELEMENT_NBYTES:.1e} parameters")
    layout = layout_of(shapes)
    if not layout.numel:
        raise ValueError(f"`--model-json` {model} has no elements; wanted at least one parameter")
    return layout, layout.numel * ELEMENT_NBYTES


def _entries(document: object) -> list[tuple[object, object]]:
    """Returns the unchecked (name, shape) pairs of a parsed `--model-json`.

    Its forms are {"name": [shape], ...} and [{"name": ..., "shape": [...]}, ...], the second also as the value of a
    key "parameters".

    Raises:
        ValueError: The document has another form. Names and shapes are not checked here.
    """
    if isinstance(document, dict) and isinstance(document.get("parameters"), list):
        document = document["parameters"]
    if isinstance(document, dict):
        return list(document.items())
    if isinstance(document, list) and all(isinstance(entry, dict) for entry in document):
        return [(entry.get("name"), entry.get("shape")) for entry in document]
    raise ValueError('`--model-json` is neither {"name": [shape], ...} nor [{"name": ..., "shape": [...]}, ...]')


def _parameter(entry: tuple[object, object]) -> tuple[str, tuple[int, ...]]:
    name, shape = entry
    if not isinstance(name, str) or not isinstance(shape, list):
        raise ValueError(  # noqa: TRY004 - the content of a file is a value, whatever its type
            f"`--model-json` has a parameter {name!r} of shape {shape!r}; wanted a name and a list of numbers"
        )
    for extent in shape:
        if not isinstance(extent, int) or isinstance(extent, bool) or extent < 0:
            raise ValueError(f"`--model-json` gives {name!r} the shape {shape!r}; wanted whole numbers >= 0")
    return name, tuple(shape)
