"""`gradwire predict`: which plan, how long, and whether to compress at all, for machines one need not have."""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from gradwire.bench.emulation.rate import parse_rate
from gradwire.cli.predict_model import gradient_of
from gradwire.cli.predict_plot import draw
from gradwire.cli.predict_table import as_json, as_table
from gradwire.comms.plan.advise import BUCKET_NBYTES, Advice, Workload, advise
from gradwire.comms.plan.codec_price import codec_price
from gradwire.comms.plan.machine_cluster import cluster_of_machines, codec_bytes_per_second, library_of
from gradwire.compressors import registry
from gradwire.compressors.base import Layout
from gradwire.topology.cluster import Cluster
from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Machine
from gradwire.topology.presets import cpu_only, dgx_a100, dgx_h100, pcie_box
from gradwire.topology.readers.files import read_file

PRESETS = {"dgx_a100": dgx_a100, "dgx_h100": dgx_h100, "pcie_box": pcie_box, "cpu_only": cpu_only}
OPTIMIZERS = ("sgd", "adam", "adamw", "lamb", "adagrad", "other")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, read from the command line and checked."""

    machine: Machine
    options: argparse.Namespace
    layout: Layout
    workload: Workload

    def cluster(self, nodes: int) -> Cluster:
        """The cluster with that many nodes."""
        return cluster_of_machines(
            self.machine,
            nodes,
            ranks_per_node=self.options.ranks_per_node,
            nic_bits_per_second=self._rate("nic"),
            nics_per_node=self.options.nics_per_node,
            intra_bits_per_second=self._rate("intra_node"),
        )

    def _rate(self, option: str) -> int | None:
        text = getattr(self.options, option)
        return None if text is None else parse_rate(text, option.replace("_", "-"))

    def advice(self, cluster: Cluster) -> Advice:
        """Every plan and compressor priced on a cluster."""
        rate = codec_bytes_per_second(self.machine)
        prices = [codec_price(name, self.layout, len(cluster.nodes), rate) for name in registry.names()]
        return advise(cluster, self.workload, prices, library=library_of(self.machine))


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="gradwire predict",
        description="Predicts the time of every plan and compressor on a cluster, and recommends one.",
        epilog="example: gradwire predict --preset dgx_a100 --nodes 4 --nic 25gbit --gradient-mb 113.2 --backward-ms 45",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--preset", choices=sorted(PRESETS), help="a well-known machine")
    source.add_argument(
        "--topology",
        type=Path,
        metavar="FILE",
        help="NCCL topology XML, `nvidia-smi topo -m`, or `gradwire topo --json` of one node",
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes like that (default 1)")
    parser.add_argument("--ranks-per-node", type=int, metavar="R", help="default: one for each GPU, else CPU socket")
    parser.add_argument("--nic", metavar="RATE", help="rate of one network card, 25gbit, in place of the machine's own")
    parser.add_argument(
        "--intra-node", metavar="RATE", help="what one rank has inside its node, 1880gbit, where unknown"
    )
    parser.add_argument(
        "--nics-per-node",
        type=int,
        metavar="K",
        help="cards that gradients use (default: 1 with --nic, else the machine's)",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--gradient-mb", type=float, metavar="MB", help="size of all gradients, in 10^6 bytes")
    size.add_argument(
        "--model-json",
        type=Path,
        metavar="FILE",
        help='parameters: {"name": [shape], ...} or [{"name": ..., "shape": [...]}, ...]',
    )
    parser.add_argument(
        "--backward-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="a backward pass without communication (default: not known)",
    )
    parser.add_argument(
        "--bucket-mb", type=float, default=BUCKET_NBYTES / 2**20, metavar="MIB", help="DDP's bucket_cap_mb (default 25)"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="some compressors presume SGD")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw step time over node count (needs matplotlib)")
    return parser


def read_question(options: argparse.Namespace) -> Question:
    """Reads files and checks numbers.

    Raises:
        ValueError: An option's value does not fit; the message names it.
        TopologyError: The topology file cannot be used.
        OSError: A file cannot be read.
    """
    for name, least in (("gradient_mb", 0), ("backward_ms", None), ("bucket_mb", 0)):
        value = getattr(options, name)
        if value is not None and not (value > least if least is not None else value >= 0):
            raise ValueError(
                f"`{name.replace('_', '-')}` is {value}; wanted a number {'> 0' if least is not None else '>= 0'}"
            )
    machine = PRESETS[options.preset]() if options.preset else read_file(options.topology)
    layout, nbytes = gradient_of(options.model_json, options.gradient_mb)
    return Question(
        machine,
        options,
        layout,
        Workload(nbytes, options.backward_ms / 1e3, round(options.bucket_mb * 2**20), options.optimizer),
    )


def main(argv: list[str]) -> int:
    """Runs the command; returns 0, or 2 where the question makes no sense.

    Args:
        argv: Words after `gradwire predict`.
    """
    options = build_parser().parse_args(argv)
    try:
        question = read_question(options)
        began = time.perf_counter()
        cluster = question.cluster(options.nodes)
        advice = question.advice(cluster)
        planning_seconds = time.perf_counter() - began
        if options.json:
            print(json.dumps(as_json(cluster, question.workload, advice, planning_seconds), indent=1))
        else:
            as_table(Console(), cluster, question.workload, advice, planning_seconds)
        if options.plot is not None:
            draw(options.plot, lambda nodes: question.advice(question.cluster(nodes)), options.nodes)
    except (ValueError, TopologyError, OSError, RuntimeError) as error:
        print(f"gradwire predict: {error}", file=sys.stderr)
        return 2
    return 0
