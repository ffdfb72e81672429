"""Measures one bucket through the DDP hook on emulated clusters: seconds, and bytes on the busiest node's NIC.

Feeds docs/results/performance.md, docs/results/compressors.md and docs/results/exchanges.md.

    python -m gradwire.bench.studies.hook_speed                       # every cluster of `CASES`; needs root
    python -m gradwire.bench.studies.hook_speed 2x2 3+1 --json FILE
    python -m gradwire.bench.studies.hook_speed 2x2 --compressor fp16,onebit,dgc,powersgd
    python -m gradwire.bench.studies.hook_speed 4x1 --nic 200mbit,200mbit,200mbit,50mbit
    python -m gradwire.bench.studies.hook_speed 2x2 --nic 100mbit --delay 40ms --loss 0.1% --compressor none,int8

On each cluster plain DDP (a flat ring over gloo), a bare gloo all_reduce and gradwire's hook take turns in one process
group, with a step that averages nothing: what passes over memory cost where all ranks share two cores. The link's
limit is 2(N-1)/N * S / B for N nodes, S bytes and B bytes per second: every node must let (N-1)/N of the sum in and as
much out, twice (reduce-scatter, all-gather). Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for
clusters of workstations (JPDC 2009), section 3, with a node in place of a process. Where the links differ it is that of
comms/plan/owners.py, and gradwire runs with equal shares too, and without being told a rate.

That limit counts gradients alone. A link carries frames: of the 1514 bytes of each (MTU 1500) TCP leaves 1448 for data,
so no exchange over it reaches more than 0.956 of the limit. The share of the link counts frames, and leaves out the
seconds of a step that averages nothing.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.bench.configuration import Configuration
from gradwire.bench.emulation.fork import ForkedRank
from gradwire.bench.emulation.paths import PathOptions
from gradwire.bench.emulation.rate import format_rate, parse_rate, parse_rates
from gradwire.bench.emulation.signals import clean_end
from gradwire.bench.machine import machine_line
from gradwire.bench.nccl_tests.backends.select import check_compressor
from gradwire.bench.studies.shared.parser import StudyParser, path_of, path_words
from gradwire.bench.studies.shared.turns import hear_turns, tell_turns
from gradwire.bench.terminal import right_columns, write_json
from gradwire.comms.bootstrap.compat import GradBucket
from gradwire.comms.plan.codec_price import short_start
from gradwire.comms.plan.owners import exact_shares

CASES = {
    "2x2": ((2, 2), "contiguous"),
    "2x4": ((4, 4), "contiguous"),
    "4x2": ((2, 2, 2, 2), "contiguous"),
    "4x4": ((4, 4, 4, 4), "contiguous"),
    "4x1": ((1, 1, 1, 1), "contiguous"),
    "8x1": ((1,) * 8, "contiguous"),
    "3+1": ((3, 1), "contiguous"),
    "2x2 round-robin": ((2, 2), "round-robin"),
}
"""Name -> (ranks of each node, order of the ranks)."""

DATA_SHARE = 1448 / 1514
"""Data as a share of a full Ethernet frame at MTU 1500, as the emulated links count it: 14 bytes of Ethernet, 20 of IP,
20 of TCP and 12 of its timestamps are not data. Acknowledgements come on top. Source: RFC 791, RFC 9293 and RFC 7323,
IEEE 802.3."""

NOTHING = "no averaging"
PLAIN, RING, GRADWIRE, RATE_UNKNOWN = "plain DDP", "gloo all_reduce", "gradwire", "gradwire, rate unknown"
EQUAL_SHARES = "gradwire, equal shares"
COLUMNS = ("cluster", "way", "s", "MB on NIC", "x lower bound", "share of limit", "of link", "speed-up")


@dataclass(frozen=True, slots=True)
class HookSpeedResult:
    """Holds the figures of one configuration on one cluster: medians over the rounds.

    Attributes:
        case: Name of the cluster.
        name: Name of the configuration.
        seconds: Duration of a step on the slowest rank.
        nic_nbytes: Bytes sent or received by the busiest node, whichever is more.
        nic_share: `nic_nbytes` over the lower bound 2(N-1)/N * S of equal links.
        limit_share: Seconds that the links need at least, over `seconds`.
        link_share: Seconds that the links need with headers, over `seconds` without those of a step that averages
            nothing.
        speed_up: Seconds of plain DDP over `seconds`.
    """

    case: str
    name: str
    seconds: float
    nic_nbytes: float
    nic_share: float
    limit_share: float
    link_share: float
    speed_up: float

    def cells(self) -> list[str]:
        """Returns the figures as cells of a table row, in the order of `COLUMNS`."""
        shares = (f"{each:.2f}" for each in (self.limit_share, self.link_share, self.speed_up))
        figures = f"{self.seconds:.3f}", f"{self.nic_nbytes / 1e6:.2f}", f"{self.nic_share:.3f}"
        return [self.case, self.name, *figures, *shares]


class Given(torch.autograd.Function):
    """Has a gradient that is its second argument: a backward pass computes nothing and allocates nothing."""

    @staticmethod
    def forward(context: FunctionCtx, weight: Tensor, gradient: Tensor) -> Tensor:
        """Returns a scalar; keeps `gradient` for the backward pass."""
        context.save_for_backward(gradient)
        return weight.new_zeros(())

    @staticmethod
    def backward(context: FunctionCtx, outer: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient that was given, whatever `outer` is."""
        (gradient,) = context.saved_tensors  # type: ignore[attr-defined]
        return gradient, None


class OneBucket(nn.Module):
    """Has one parameter whose gradient is its input, so that a backward pass is one bucket and little else.

    Sixteen ranks on two cores pay eight times for every pass over memory, which would hide the link's time.

    Args:
        shape: Shape of the parameter.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, gradient: Tensor) -> Tensor:
        """Returns a loss whose gradient is `gradient`, a float32 tensor of the weight's shape."""
        loss: Tensor = Given.apply(self.weight, gradient)  # type: ignore[no-untyped-call]
        return loss


def matrix_shape(numel: int) -> tuple[int, int]:
    """Returns the shape nearest to a square with `numel` elements, as PowerSGD does not compress one dimension."""
    rows = next(rows for rows in range(math.isqrt(numel), 0, -1) if numel % rows == 0)
    return rows, numel // rows


def _ddp(shape: tuple[int, ...]) -> DistributedDataParallel:
    return DistributedDataParallel(
        OneBucket(shape), bucket_cap_mb=2 * math.prod(shape) * 4 // 2**20 + 1, gradient_as_bucket_view=True
    )


def _step(model: DistributedDataParallel, own: Tensor, mean: Tensor | None, name: str) -> Configuration:
    """Makes a configuration whose step is one forward and backward pass.

    Args:
        model: Model of one bucket.
        own: Gradient of this rank.
        mean: Averaged gradient that the first step has to give, else it raises RuntimeError; None checks nothing.
        name: Name of the configuration.
    """

    def step(number: int) -> None:
        model.zero_grad(set_to_none=False)
        model(own).backward()
        if number == 0 and mean is not None and not torch.equal(model.module.weight.grad, mean):
            raise RuntimeError(f"{name} gave a wrong gradient")

    return Configuration(name, step)


def _keep(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Returns the bucket as it is: a comm hook that averages nothing."""
    kept: torch.futures.Future[Tensor] = torch.futures.Future()
    kept.set_result(bucket.buffer())
    return kept


def configurations(
    place: ForkedRank, numel: int, node_rates: Sequence[float], compressors: Sequence[str]
) -> list[Configuration]:
    """Makes the configurations that average one bucket, on all ranks in the same order.

    Args:
        place: Rank and nodes of the forked job.
        numel: Number of float32 in the bucket.
        node_rates: Bytes per second of each node's link.
        compressors: Names of compressors to compare in place of other exact configurations; may be empty.
    """
    # Integers whose mean is exact in float32 in whatever order they are added.
    own = torch.arange(numel, dtype=torch.float32).remainder_(1021).mul_(place.world_size).add_(place.rank)
    mean = own - place.rank + (place.world_size - 1) / 2
    bytes_per_second, slowest = node_rates[place.node], min(node_rates)
    nothing, plain, rate_known = _ddp((numel,)), _ddp((numel,)), _ddp((numel,))
    nothing.register_comm_hook(None, _keep)
    _hook(rate_known, bytes_per_second)
    always = [
        _step(nothing, own, None, NOTHING),
        _step(plain, own, mean, PLAIN),
        _step(rate_known, own, mean, GRADWIRE),
    ]
    if compressors:
        shape, rates = matrix_shape(numel), (bytes_per_second, None)
        return always + [_compressed(name, shape, place.rank, rate) for name in compressors for rate in rates]
    if slowest < max(node_rates):
        equal, default = _ddp((numel,)), _ddp((numel,))
        _hook(equal, slowest)
        _hook(default, None)
        return [*always, _step(equal, own, mean, EQUAL_SHARES), _step(default, own, mean, RATE_UNKNOWN)]
    rate_unknown, flat = _ddp((numel,)), own.clone()
    _hook(rate_unknown, None)
    return [*always, Configuration(RING, lambda _: _all_reduce(flat)), _step(rate_unknown, own, mean, RATE_UNKNOWN)]


def _hook(model: DistributedDataParallel, rate: float | None, compressor: str | None = None) -> None:
    gradwire.attach(
        model,
        nic_bytes_per_second=rate,
        compressor=compressor,
        compressor_options=short_start(compressor) if compressor else {},
    )


def _compressed(name: str, shape: tuple[int, int], rank: int, rate: float | None) -> Configuration:
    """Makes a configuration that compresses normally distributed gradients; its dense start is not timed."""
    model = _ddp(shape)
    _hook(model, rate, name)
    own = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    return _step(model, own, None, f"{GRADWIRE} {name}{'' if rate else ', rate unknown'}")


def _all_reduce(flat: Tensor) -> None:
    dist.all_reduce(flat)


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    """Runs one rank's part of the comparison; rank 0 reports the figures. Returns its exit status.

    Args:
        place: Rank and nodes of the forked job.
        arguments: Number of elements in the bucket, number of rounds, bytes per second of each node's link (separated
            by commas), then the names of compressors.
    """
    numel, rounds, node_rates = int(arguments[0]), int(arguments[1]), [float(each) for each in arguments[2].split(",")]
    return tell_turns(place, lambda _: configurations(place, numel, node_rates, arguments[3:]), rounds=rounds, warmup=2)


def measure(
    case: str, nic: str, numel: int, rounds: int, compressors: Sequence[str] = (), path: PathOptions | None = None
) -> list[HookSpeedResult]:
    """Runs all configurations on one emulated cluster.

    Args:
        case: Name of the cluster, a key of `CASES`.
        nic: Rate of each node's link: one for all, or one for each, separated by commas.
        numel: Number of float32 elements in the bucket.
        rounds: Number of timed rounds.
        compressors: Names of compressors to compare in place of other exact configurations; may be empty.
        path: Delay and loss between the nodes.

    Raises:
        RuntimeError: This machine cannot emulate a cluster, or a rank failed.
    """
    nodes, order = CASES[case]
    node_rates = [bits / 8 for bits in parse_rates(nic, len(nodes), "--nic")]
    found = hear_turns(
        "hook_speed",
        [str(numel), str(rounds), ",".join(map(str, node_rates)), *compressors],
        nodes=nodes,
        nic=nic,
        timeout_seconds=540,
        order=order,
        path=path,
    )
    lower_bound = 2 * (len(nodes) - 1) / len(nodes) * numel * 4
    owned = exact_shares(tuple(node_rates), len(nodes) - 2) if len(nodes) > 2 else [0.0] * len(nodes)
    limit_seconds = max(
        numel * 4 * (1 + (len(nodes) - 2) * share) / rate for share, rate in zip(owned, node_rates, strict=True)
    )
    plain, nothing = found[PLAIN].median_seconds, found[NOTHING].median_seconds
    return [
        HookSpeedResult(
            case,
            one.name,
            one.median_seconds,
            one.median_nic_nbytes,
            one.median_nic_nbytes / lower_bound,
            limit_seconds / one.median_seconds,
            limit_seconds / DATA_SHARE / (one.median_seconds - nothing),
            plain / one.median_seconds,
        )
        for one in found.values()
        if one.name != NOTHING
    ]


def table(results: list[HookSpeedResult], title: str) -> Table:
    """Returns the results as a table for the terminal, with `title` above it."""
    rows = Table(*COLUMNS[:2], *right_columns(*COLUMNS[2:]), title=title)
    for one in results:
        rows.add_row(*one.cells())
    return rows


def build_parser() -> StudyParser:
    """Returns the parser of the command line."""
    parser = StudyParser("hook_speed", __doc__)
    parser.add_names("case", CASES)
    parser.add_argument(
        "--nic", default="200mbit", help="rate of the links: one, or one for each node (default 200mbit)"
    )
    parser.add_path()
    parser.add_argument("--megabytes", type=float, default=16.0, help="size of the bucket in 10^6 bytes (default 16)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument(
        "--compressor", metavar="NAMES", help="compare these, with commas, instead of what runs without one"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    return parser


def main(argv: list[str]) -> int:
    """Measures a step of one bucket under each configuration, on each cluster, and prints a table of them.

    The clusters are those that `argv` names, else all of `CASES`, emulated one after the other; `--json` writes the
    figures to a file. A failed rank, or a machine that cannot emulate a cluster, raises RuntimeError.

    Returns:
        0; or 2 for an unknown compressor, before anything is measured.
    """
    options = build_parser().parse_args(argv)
    compressors = options.compressor.split(",") if options.compressor else []
    try:
        for name in compressors:
            check_compressor(name)
    except ValueError as error:
        print(f"hook_speed: {error}", file=sys.stderr)
        return 2
    results, numel = [], round(options.megabytes * 1e6 / 4)
    with clean_end():
        for case in options.cases or CASES:
            results += measure(case, options.nic, numel, options.rounds, compressors, path_of(options))
    rate = ", ".join(dict.fromkeys(format_rate(parse_rate(each, "--nic")) for each in options.nic.split(",")))
    rate += path_words(options)
    title = f"{options.megabytes:g} MB, links of {rate}, median of {options.rounds} rounds; {machine_line()}"
    Console(width=120).print(table(results, title))
    record = {
        "kind": "hook_speed",
        "machine": machine_line(),
        "megabytes": options.megabytes,
        "nic": options.nic,
        "delay": options.delay,
        "loss": options.loss,
        "results": [asdict(one) for one in results],
    }
    write_json(options.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
