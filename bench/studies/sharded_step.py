"""Measures training steps of sharded models on emulated clusters: seconds, and bytes on the busiest node's NIC.

Feeds docs/results/sharded.md.

    python -m gradwire.bench.studies.sharded_step                # 2x2 and 4x2, links of 200 Mbit/s; needs root
    python -m gradwire.bench.studies.sharded_step 2x2 --rounds 3 --json FILE

A byte-level transformer of 4 million parameters in float32, one unit for each block and one for the rest, which FSDP2
shards over all ranks, and HSDP inside the nodes. In each round every way of communicating takes one step (forward,
backward, AdamW) in its turn, so that whatever else the machine does slows all alike.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import gradwire.fsdp
from gradwire.bench.configuration import Configuration
from gradwire.bench.emulation.fork import ForkedRank
from gradwire.bench.emulation.paths import PathOptions
from gradwire.bench.emulation.rate import format_rate, parse_rate
from gradwire.bench.emulation.signals import clean_end
from gradwire.bench.machine import machine_line
from gradwire.bench.studies.shared.parser import StudyParser, path_of, path_words
from gradwire.bench.studies.shared.turns import hear_turns, tell_turns
from gradwire.bench.terminal import right_columns, write_json
from gradwire.bench.train.model import VOCABULARY, ByteTransformer, loss_in_nats
from gradwire.comms.bootstrap.compat import Store

CASES = {"2x2": (2, 2), "4x2": (2, 2, 2, 2)}
"""Name -> ranks of each node."""
WIDTH, LAYERS = 256, 5
"""4.09 million parameters, 98 of 100 in matrices."""
BATCH = (1, 32)
"""Sequences of a rank and step, and bytes of text in each."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way for a sharded model to communicate.

    Attributes:
        name: Name of the setting in the table.
        inside_nodes: True shards inside the nodes and replicates between them (HSDP); False shards over all ranks.
        apply: Keyword arguments of `gradwire.fsdp.apply`; None leaves all communication to torch.
        backend: Backend of the process group that parameters are sharded over; used if `inside_nodes` is False.
    """

    name: str
    inside_nodes: bool
    apply: dict[str, Any] | None = None
    backend: str = "gloo"


PLAIN, NATIVE = "plain FSDP2", "native HSDP"
SETTINGS = (
    Setting(PLAIN, False),
    Setting("FSDP2, backend gradwire", False, backend="gradwire"),
    Setting("FSDP2, apply, exact", False, {}),
    Setting("FSDP2, shards=int8 weights=int8", False, {"shards": "int8", "weights": "int8"}),
    Setting("FSDP2, shards=int4 weights=int8", False, {"shards": "int4", "weights": "int8"}),
    Setting("FSDP2, shards=waterfill4 weights=waterfill4", False, {"shards": "waterfill4", "weights": "waterfill4"}),
    Setting(NATIVE, True),
    Setting("HSDP, exact", True, {}),
    Setting("HSDP, int8", True, {"compressor": "int8"}),
    Setting("HSDP, int4", True, {"compressor": "int4"}),
)


@dataclass(frozen=True, slots=True)
class ShardedStepResult:
    """Step time and bytes of one setting on one cluster, as medians over the rounds.

    Attributes:
        case: Name of the cluster; a key of `CASES`.
        name: Name of the setting.
        seconds: Duration of a step on the slowest rank.
        nic_nbytes: Bytes of a step that the busiest node sent or received, whichever is more.
        speed_up: Seconds of the baseline over `seconds`, the median of the rounds' ratios. The baseline is plain FSDP2,
            or native HSDP for HSDP settings.
        fewer: Bytes of the baseline over `nic_nbytes`; 1.0 if no bytes were counted.
    """

    case: str
    name: str
    seconds: float
    nic_nbytes: float
    speed_up: float
    fewer: float


def make_configuration(
    setting: Setting, place: ForkedRank, batch: tuple[int, int], rate: float | None
) -> Configuration:
    """Makes a configuration that trains a model of its own; a collective: all ranks make them in the same order.

    Args:
        setting: Sharding and communication of the model.
        place: Rank and nodes of the forked job.
        batch: (number of sequences, bytes of text in each) of a rank and step.
        rate: Bytes per second of the links, told to gradwire for its plans; None tells nothing.
    """
    nodes, width = len(place.nodes), place.nodes[0]
    grid = init_device_mesh("cpu", (nodes, width), mesh_dim_names=("replicate", "shard"))
    if setting.inside_nodes:
        mesh = grid if setting.apply is None else grid["shard"]
    else:
        group = dist.new_group(backend=setting.backend)
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    model = ByteTransformer(context=batch[1], width=WIDTH, layers=LAYERS)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = None
    if setting.apply is not None:
        state = gradwire.fsdp.apply(
            model,
            replicas=grid["replicate"] if setting.inside_nodes else None,
            nic_bytes_per_second=rate,
            **setting.apply,
        )
    optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(place.rank)

    def step(number: int) -> None:
        text = torch.randint(VOCABULARY, (batch[0], batch[1] + 1), generator=generator)
        optimizer.zero_grad()
        loss = loss_in_nats(model, text[:, :-1], text[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if number == 0 and not loss.isfinite():
            raise RuntimeError(f"{setting.name} (steps: {state and state.steps}) gave a loss of {loss.item()}")

    return Configuration(setting.name, step)


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    """Measures as one rank of the forked job; rank 0 prints the figures. Returns the exit status.

    Args:
        place: Rank and nodes of the forked job.
        arguments: Number of timed rounds; sequences of text that a rank trains on in a step; bytes of text in each;
            bytes per second of the emulated links, which gradwire is only told for its plans (0: it is told none); then
            the names of the settings to measure.
    """
    batch, rate, names = (int(arguments[1]), int(arguments[2])), float(arguments[3]) or None, arguments[4:]

    def make(_: Store) -> list[Configuration]:
        return [make_configuration(one, place, batch, rate) for one in SETTINGS if one.name in names]

    return tell_turns(place, make, rounds=int(arguments[0]), warmup=2)


def measure(
    case: str,
    nic: str | None,
    rounds: int,
    batch: tuple[int, int],
    names: Sequence[str],
    path: PathOptions | None = None,
) -> list[ShardedStepResult]:
    """Measures settings on one emulated cluster.

    Args:
        case: Key of `CASES`.
        nic: Rate of each node's link; None leaves the links without a limit.
        rounds: Number of timed rounds.
        batch: (number of sequences, bytes of text in each) of a rank and step.
        names: Names of the settings; plain FSDP2 and native HSDP, the baselines, must be among them.
        path: Delay and loss between the nodes; None for none.

    Raises:
        RuntimeError: This machine cannot emulate a cluster, or a rank failed.
    """
    nodes = CASES[case]
    rate = 0.0 if nic is None else parse_rate(nic, "--nic") / 8
    found = hear_turns(
        "sharded_step",
        [str(rounds), *map(str, batch), str(rate), *names],
        nodes=nodes,
        nic=nic,
        timeout_seconds=1200,
        path=path,
    )
    return [_result(case, one, found[NATIVE if "HSDP" in name else PLAIN]) for name, one in found.items()]


def _result(case: str, one: Configuration, baseline: Configuration) -> ShardedStepResult:
    ratios = [theirs / own for theirs, own in zip(baseline.seconds, one.seconds, strict=True)]
    return ShardedStepResult(
        case,
        one.name,
        one.median_seconds,
        one.median_nic_nbytes,
        statistics.median(ratios),
        baseline.median_nic_nbytes / one.median_nic_nbytes if one.median_nic_nbytes else 1.0,
    )


def table(results: Sequence[ShardedStepResult], title: str) -> Table:
    """Returns the results as a table for the terminal, with `title` above it."""
    columns = right_columns("s per step", "MB on the NIC", "faster", "fewer bytes")
    rows = Table("cluster", "setting", *columns, title=title)
    for one in results:
        figures = f"{one.seconds:.3f}", f"{one.nic_nbytes / 1e6:.2f}", f"{one.speed_up:.2f}x", f"{one.fewer:.1f}x"
        rows.add_row(one.case, one.name, *figures)
    return rows


def build_parser() -> StudyParser:
    """Returns the parser of the command line."""
    parser = StudyParser("sharded_step", __doc__)
    parser.add_names("case", CASES)
    parser.add_argument("--nic", default="200mbit", help="rate of each node's link, or `none` (default 200mbit)")
    parser.add_path()
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--setting", action="append", metavar="WORDS", help="those whose name has WORDS; repeatable")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    return parser


def main(argv: list[str]) -> int:
    """Measures the settings on each cluster, prints the table, and writes the JSON if asked for; returns 0."""
    options = build_parser().parse_args(argv)
    wanted = options.setting or [""]
    names = [one.name for one in SETTINGS if one.name in (PLAIN, NATIVE) or any(words in one.name for words in wanted)]
    nic = None if options.nic == "none" else options.nic
    results = []
    with clean_end():
        for case in options.cases or CASES:
            results += measure(case, nic, options.rounds, BATCH, names, path_of(options))
    rate = "without a limit" if nic is None else f"of {format_rate(parse_rate(nic, '--nic'))}"
    title = (
        f"{BATCH[0]} x {BATCH[1]} bytes of text a rank, links {rate}{path_words(options)}, "
        f"median of {options.rounds} rounds; {machine_line()}"
    )
    Console(width=120).print(table(results, title))
    record = {
        "kind": "sharded_step",
        "machine": machine_line(),
        "nic": options.nic,
        "delay": options.delay,
        "loss": options.loss,
        "rounds": options.rounds,
        "layers": LAYERS,
        "batch": BATCH,
        "results": [asdict(one) for one in results],
    }
    write_json(options.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
