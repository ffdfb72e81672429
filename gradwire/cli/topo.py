"""`gradwire topo`: what this machine, or a described one, looks like; under torchrun, the whole cluster.

    torchrun --nnodes 4 --nproc-per-node 8 ... -m gradwire topo

In a job without options it shows every node, the NIC of each rank, which nodes differ and which ranks are badly placed.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from gradwire.bench.arguments import CommandParser, check_output
from gradwire.bench.pipe import reader_may_leave
from gradwire.bench.terminal import CleanConsole, complain, fitting_width, working
from gradwire.cli.job import joined_job
from gradwire.comms.boundary.files import replace_text
from gradwire.comms.environment import local_rank, visibility, world_size
from gradwire.topology.assign import gpu_for_local_rank, nic_for_local_rank
from gradwire.topology.compare import RankPlacement, compare, nvlink_domains
from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Machine, Nic
from gradwire.topology.labels import nic_name
from gradwire.topology.printable import printable
from gradwire.topology.readers.detect import LIVE, detect_machine
from gradwire.topology.readers.files import read_file
from gradwire.topology.show import draw, json_form
from gradwire.topology.show.svg import svg
from gradwire.topology.visible import visible_gpus

_TIMEOUT = timedelta(minutes=5)
PIPE_WIDTH = 400
"""Columns in a pipe where COLUMNS is not set, so that no line is broken and `grep` finds whole ones."""


def parser() -> CommandParser:
    """Returns a parser of the options of `gradwire topo`."""
    options = CommandParser(
        prog="gradwire topo",
        description="Shows CPUs, PCIe switches, GPUs, NICs and links of a machine (default: as a tree).",
    )
    options.add_argument(
        "--matrix", action="store_true", help="print distances of GPUs and NICs, as nvidia-smi topo -m"
    )
    options.add_argument("--json", action="store_true", help="print everything as JSON, for programs")
    options.add_argument("--svg", metavar="FILE", type=Path, help="write a picture")
    source = options.add_mutually_exclusive_group()
    source.add_argument(
        "--from",
        metavar="FILE",
        type=Path,
        dest="description",
        help="read NCCL XML, hwloc XML, nvidia-smi topo -m, amd-smi topology, rocm-smi --showtopo, lspci -vvv or this "
        "command's JSON instead of this machine",
    )
    source.add_argument("--root", metavar="DIR", type=Path, default=LIVE, help="read sys/ and proc/ below this folder")
    return options


def main(argv: list[str]) -> int:
    """Runs `gradwire topo`: shows this machine or, in a job of several ranks, the machines of all ranks.

    In a job all ranks exchange their machines, and rank 0 prints them; if there are words in `argv`, it shows one
    machine instead, by default its own, as outside a job.

    Args:
        argv: Words after `gradwire topo`.

    Returns:
        The exit status: 0; 1 on rank 0 of a job if nodes differ or ranks are badly placed; 2 after an error, which the
        rank prints that has it.

    Raises:
        SystemExit: An option is wrong (status 2), or is `--help` (0).
    """
    try:
        return show_machine(argv) if world_size() == 1 else _show_in_job(argv)
    except (TopologyError, OSError, ValueError, RuntimeError) as error:
        complain("topo", error)
        return 2


def _show_in_job(argv: list[str]) -> int:
    with joined_job(_TIMEOUT) as job:
        with working("asking all ranks", shown=job.rank == 0):
            ranks = job.gather(
                RankMachine(job.host, local_rank() or 0, json_form.write(detect_machine()), visibility())
            )
        if job.rank != 0:
            return 0
        return show_machine(argv) if argv else show_job(ranks)


def show_machine(argv: list[str]) -> int:
    """Prints one machine in the forms that the options ask for, or writes its picture, and returns 0.

    Without a form it prints a tree. The machine is this one unless `--from` or `--root` gives another.

    Args:
        argv: Words after `gradwire topo`.

    Raises:
        TopologyError: The input could not be used.
        ValueError: The path of `--svg` cannot be written; found out before the machine is read.
        OSError: Writing the picture failed.
        SystemExit: An option is wrong (status 2), or is `--help` (0).
    """
    options = parser().parse_naming(argv, "--from")
    check_output("--svg", options.svg)
    with working("reading the machine"):
        machine = read_file(options.description) if options.description is not None else detect_machine(options.root)
    if options.svg is not None:
        replace_text(options.svg, svg(machine), lasting=False)
        print(printable(f"wrote {options.svg}"), file=sys.stderr)
    with reader_may_leave():
        _print(machine, options)
    return 0


def _print(machine: Machine, options: argparse.Namespace) -> None:
    """Prints the machine in the form that the options ask for, by default as a tree."""
    if options.json:
        print(json_form.write(machine))
    if options.matrix:
        print(printable(draw.matrix(machine)))
    if not (options.json or options.matrix or options.svg):
        width = fitting_width(PIPE_WIDTH)
        CleanConsole(highlight=False, emoji=False, width=width).print(draw.tree(machine))  # 0000:cd:00.0 is no disc


@dataclass(frozen=True, slots=True)
class RankMachine:
    """Holds what one rank of a job sends to the others about its machine.

    Attributes:
        host: Host name, boot id and device of /dev/shm: ranks with the same three are on one node.
        local_rank: Index of the rank on its node; with `visible` it decides which GPU and NIC are the rank's.
        machine: Topology of its machine as JSON.
        visible: Name -> value of those variables in `topology.visible.VARIABLES`, such as CUDA_VISIBLE_DEVICES, that
            are set in the rank's environment.
    """

    host: tuple[str, ...]
    local_rank: int
    machine: str
    visible: Mapping[str, str] = field(default_factory=dict)


def show_job(reports: list[RankMachine]) -> int:
    """Prints the ranks and NICs of each node, each kind of machine once, and which ranks are badly placed.

    Nodes are numbered in the order of their lowest rank; alike machines are printed once, with the nodes' numbers.

    Args:
        reports: Machine of each rank, in rank order; a node's is the one that its lowest rank has sent.

    Returns:
        Exit status: 1 if nodes differ or ranks are badly placed, else 0. Ranks whose place is unknown do not count.
    """
    console = CleanConsole(file=sys.stdout, emoji=False)
    hosts = list(dict.fromkeys(report.host for report in reports))
    machines = [json_form.read(next(report.machine for report in reports if report.host == host)) for host in hosts]
    console.print(f"{len(reports)} ranks on {len(hosts)} {'node' if len(hosts) == 1 else 'nodes'}")
    doubtful = 0
    for number, host in enumerate(hosts):
        ranks = [rank for rank, report in enumerate(reports) if report.host == host]
        ranks.sort(key=lambda rank: reports[rank].local_rank)
        console.print(
            f"node {number} {host[0]}: ranks {', '.join(map(str, ranks))}; {draw.summary(machines[number])}",
            highlight=False,
        )
        nics = [_nic(machines[number], reports[rank]) for rank in ranks]
        console.print(
            f"  NIC by local rank: {', '.join(nic_name(nic) if nic else '?' for nic in nics)}", highlight=False
        )
        for reason, those in _doubts(machines[number], reports, ranks).items():
            console.print(f"  rank {', '.join(map(str, those))}: {reason}", highlight=False)
            doubtful += sum(nic is None for rank, nic in zip(ranks, nics, strict=True) if rank in those)
    kinds: dict[str, list[str]] = {}
    for number, machine in enumerate(machines):
        kinds.setdefault(json_form.write(_kind(machine)), []).append(str(number))
    for kind, numbers in kinds.items():
        name = f"node{'' if len(numbers) == 1 else 's'} {', '.join(numbers)}"
        console.print(draw.tree(replace(json_form.read(kind), hostname=name)))
    for sentence in nvlink_domains(machines):
        console.print(sentence, highlight=False)
    findings = compare(machines, [_placement(rank, report, hosts, machines) for rank, report in enumerate(reports)])
    for finding in findings:
        console.print(f"- {finding}", highlight=False)
    if not findings:
        placed = f"nothing is known against the ranks' places, {doubtful} of them unknown (above)" if doubtful else ""
        console.print(f"all nodes are alike, and {placed or 'all ranks are well placed'}", highlight=False)
    return 1 if findings else 0


def _kind(machine: Machine) -> Machine:
    """Returns a machine without its host name, UUIDs and MIG slices, so that machines of one kind are equal."""
    return replace(machine, hostname=None, gpus=tuple(replace(gpu, uuid=None, slices=()) for gpu in machine.gpus))


def _doubts(machine: Machine, reports: list[RankMachine], ranks: list[int]) -> dict[str, list[int]]:
    """Finds the ranks whose GPUs are unknown, or whose variables, such as CUDA_VISIBLE_DEVICES, name GPUs they lack.

    Args:
        machine: The node's machine.
        reports: What each rank of the job has sent, in rank order.
        ranks: Ranks of the node.

    Returns:
        Reason, in words -> ranks that it holds for, in the order of `ranks`; empty if all GPUs are known.
    """
    doubts: dict[str, list[int]] = {}
    for rank in ranks:
        if why := visible_gpus(machine, reports[rank].visible).why:
            doubts.setdefault(why, []).append(rank)
    return doubts


def _nic(machine: Machine, report: RankMachine) -> Nic | None:
    return nic_for_local_rank(machine, report.local_rank, report.visible)


def _placement(rank: int, report: RankMachine, hosts: list[tuple[str, ...]], machines: list[Machine]) -> RankPlacement:
    node = hosts.index(report.host)
    machine = machines[node]
    gpu, nic = gpu_for_local_rank(machine, report.local_rank, report.visible), _nic(machine, report)
    port = nic.ports[0].name if nic is not None and nic.ports else None
    number = None if gpu is None else gpu.index if gpu.index is not None else machine.gpus.index(gpu)
    return RankPlacement(rank=rank, node=node, gpu=number, nic=port)
