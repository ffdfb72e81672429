"""One rank of `gradwire compare`: it builds the configurations, times them in turns, and reports in lines of JSON."""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.bench.arguments import import_modules
from gradwire.bench.compare.configurations import PLAIN, ConfigurationSpec, configuration_specs, select
from gradwire.bench.compare.models import BATCHES, BatchLoss, build
from gradwire.bench.compare.replay import ReplayModel, Scale, load_case
from gradwire.bench.configuration import Configuration, take_turns
from gradwire.bench.emulation.connections import limit_streams
from gradwire.bench.emulation.fork import ForkedRank

WARMUP_ROUNDS = 1

PROBE_STEPS = 3
"""Trial steps of each configuration before the rounds: DDP rebuilds its buckets after the first, and torch's PowerSGD
starts in the third."""

REPLAY_PROBE_STEPS = 2
"""Trial steps of each configuration of a replay, whose steps last seconds: these two make all connections and buckets,
and no warm-up round follows."""


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """Settings of a comparison, the same on all ranks.

    Attributes:
        model: Name of a model, one of `models.MODELS`; unused with a replay.
        nbytes: Wanted size of the gradients, in bytes; unused with a replay.
        replay: Name or file of a replay case; None for a model that computes.
        factor: Divisor of the sizes of a replay's gradients and buckets.
        slow_motion: Multiplier of the duration of a replay's waits.
        batch: Samples per GPU and step of a built-in replay; None for its default.
        rounds: Number of timed rounds.
        only: Words of `--only`, which select the configurations; None for all.
        bytes_per_second: Rate of the links; None if they have no limit.
        stream_bytes_per_second: Rate of one connection between nodes; None if it has no limit of its own.
        with_mpi: Whether mpirun started the ranks.
        imports: Modules to import, which register compressors of the user's own.
    """

    model: str
    nbytes: float
    replay: str | None
    factor: int
    slow_motion: int
    batch: int | None
    rounds: int
    only: str | None
    bytes_per_second: float | None = None
    stream_bytes_per_second: float | None = None
    with_mpi: bool = False
    imports: Sequence[str] = ()


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    """Runs the comparison in a rank that was forked on an emulated node; returns the exit status 0.

    Args:
        place: Rank and node of this process, which connects it to the others.
        arguments: A list of one item, a `CompareSettings` as JSON.
    """
    place.connect()
    compare(CompareSettings(**json.loads(arguments[0])), place.interface, lambda text: print(text, flush=True))
    place.leave()
    return 0


def compare(settings: CompareSettings, interface: str | None, line: Callable[[str], None]) -> None:
    """Tries and times all configurations in the default process group. Collective.

    Args:
        settings: Settings of the comparison, the same on all ranks.
        interface: Name of the network interface whose bytes are counted; None to count none.
        line: Callback on rank 0 with a record as a line of JSON: the gradients' size, a finished turn, a configuration
            that does not run, or the measurements of one that does.
    """

    def send(record: dict[str, object]) -> None:
        if dist.get_rank() == 0:
            line(json.dumps(record))

    # Build the model, and compute the exact gradients with which the configurations' are compared.
    torch.set_num_threads(1)
    import_modules(settings.imports)
    model, loss = _model(settings)
    references = None if settings.replay else _references(model, loss)
    gradient_nbytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    send({"gradient_nbytes": gradient_nbytes})
    # Try each configuration for a few steps; those that fail on any rank are reported and left out.
    running: list[Configuration] = []
    judges: list[_Judge] = []
    specs = select(configuration_specs(settings.with_mpi), settings.only)
    for number, spec in enumerate(specs, 1):
        judge = _Judge(references)
        send({"turn": 0, "turns": None, "name": f"trying {spec.name}, {number} of {len(specs)}"})
        configuration = _enter(spec, settings, model, loss, judge)
        if isinstance(configuration, str):
            send({"name": spec.name, "reason": configuration})
            continue
        running.append(configuration)
        judges.append(judge)
    # Time the others in turns, step by step, and report their measurements.
    if settings.stream_bytes_per_second is not None:
        limit_streams(settings.stream_bytes_per_second)
    seconds_of = {configuration.name: configuration.seconds for configuration in running}
    warmup = 0 if settings.replay else WARMUP_ROUNDS

    def taken(name: str, turn: int, turns: int) -> None:
        timed = turn > warmup * len(running)
        send({"turn": turn, "turns": turns, "name": name, "seconds": seconds_of[name][-1] if timed else None})

    take_turns(running, rounds=settings.rounds, warmup=warmup, interface=interface, progress=taken)
    for configuration, judge in zip(running, judges, strict=True):
        send(
            {
                "name": configuration.name,
                "seconds": configuration.seconds,
                "nic_nbytes": configuration.nic_nbytes,
                "error": judge.error(),
            }
        )


def _model(settings: CompareSettings) -> tuple[nn.Module, BatchLoss]:
    if settings.replay is None:
        return build(settings.model, settings.nbytes, dist.get_rank())
    case = load_case(settings.replay, settings.batch)
    return ReplayModel(case, settings.factor, settings.slow_motion, dist.get_rank()), lambda module, _: module(_start())


def _start() -> Tensor:
    return torch.zeros((), requires_grad=True)


class _Judge:
    """Comparison of a configuration's gradients with the exact mean over the ranks.

    All ranks compute the same error up to rounding.

    Args:
        references: Mean gradient of all ranks for each batch, flattened, in float64; None to compare nothing (a
            replay).
    """

    def __init__(self, references: list[Tensor] | None) -> None:
        self._references = references
        self._errors: list[float] = []

    def look(self, model: nn.Module, number: int) -> None:
        """Records the relative error of the model's gradients, except in the warm-up round and without references.

        Args:
            model: Model whose `grad` fields hold the averaged gradients.
            number: Number of the step, which says what batch it had.
        """
        if self._references is not None and number >= WARMUP_ROUNDS:
            wanted = self._references[number % BATCHES]
            self._errors.append(float((_gradients(model) - wanted).norm() / wanted.norm()))

    def error(self) -> float | None:
        """Returns the mean relative error over the timed rounds; None if nothing was compared."""
        return sum(self._errors) / len(self._errors) if self._errors else None


def _gradients(model: nn.Module) -> Tensor:
    return torch.cat(
        [parameter.grad.double().flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


def _references(model: nn.Module, loss: BatchLoss) -> list[Tensor]:
    found = []
    for number in range(BATCHES):
        model.zero_grad()
        loss(model, number).backward()  # type: ignore[no-untyped-call]  # torch leaves it without annotations
        gradients = _gradients(model)
        dist.all_reduce(gradients)
        found.append(gradients / dist.get_world_size())
    model.zero_grad()
    return found


def _enter(
    spec: ConfigurationSpec, settings: CompareSettings, model: nn.Module, loss: BatchLoss, judge: _Judge
) -> Configuration | str:
    """Builds a configuration with its own copy of the model, and tries it for a few steps. Collective.

    Returns:
        The configuration; if it failed on any rank, the reason as text.

    Raises:
        RuntimeError: Plain DDP failed, with which all others are compared.
    """
    # The copies are alike already, and a broadcast to dozens of ranks over a slow link takes longer than a round.
    own = DistributedDataParallel(
        copy.deepcopy(model), bucket_cap_mb=_bucket_megabytes(spec, settings, model), init_sync=False
    )

    def step(number: int) -> None:
        own.zero_grad()
        loss(own, number).backward()  # type: ignore[no-untyped-call]  # torch leaves it without annotations

    reason = ""
    try:
        spec.attach(own, settings.bytes_per_second)
        for number in range(REPLAY_PROBE_STEPS if settings.replay else PROBE_STEPS):
            step(number)
    except Exception as error:  # noqa: BLE001 - a peer that cannot run here is a line of the table, whatever its reason
        text = str(error).replace("Got the following error when running the callback: ", "")
        reason = text.splitlines()[0] if text else type(error).__name__
    failed = torch.tensor([float(bool(reason))])
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    if not failed.item():
        return Configuration(spec.name, step, lambda number: judge.look(own.module, number))
    if spec.name == PLAIN:
        raise RuntimeError(f"plain DDP does not run: {reason}")
    return reason or "it failed on another rank"


def _bucket_megabytes(spec: ConfigurationSpec, settings: CompareSettings, model: nn.Module) -> float | None:
    """Returns the value of DDP's `bucket_cap_mb` for a configuration; None for DDP's default."""
    if spec.one_bucket:
        return 2 * sum(parameter.nbytes for parameter in model.parameters()) / 2**20 + 1
    return Scale(settings.factor, settings.slow_motion).bucket_megabytes if settings.replay else None
