"""`gradwire compare`: plain DDP, torch's hooks and gradwire side by side, with models of its own or with your script.

With `--script` an unchanged training script runs for some steps under each configuration, one run after the other, on
emulated nodes; under torchrun, mpirun or srun each rank runs it at its place in the job that was started.
"""

import argparse
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress, TaskID

from gradwire.bench.compare.command import main as compare_models
from gradwire.bench.compare.configurations import compressor_names
from gradwire.bench.compare.options import build_parser, check_outputs, parse
from gradwire.bench.compare.replay import Scale
from gradwire.bench.compare.report import ConfigurationResult, Measured, describe_emulated, middle, report, shape
from gradwire.bench.compare.script_rank import STEP, TORCH_HOOKS
from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.command import ranks_of_nodes
from gradwire.bench.emulation.fork import BAD_FLAG
from gradwire.bench.emulation.launch import Ranks, held_port, python_module
from gradwire.bench.emulation.namespaces import available
from gradwire.bench.emulation.signals import EndedBySignal, clean_end
from gradwire.bench.meeting import refusal_of
from gradwire.bench.nccl_tests.ranks import World, meet
from gradwire.bench.nccl_tests.start import Start, find_start, speaks
from gradwire.bench.terminal import STDOUT, CleanConsole, PlainLines, complain, progress_bar
from gradwire.comms.bootstrap.compat import store_of
from gradwire.comms.boundary.gathering import gather_records
from gradwire.comms.config import AUTOMATIC
from gradwire.comms.environment import launcher_variables
from gradwire.comms.plan.advise import MOST_OF_IT, distortion_of

PLAIN = "plain DDP"
USUAL = f"{PLAIN},torch fp16,gradwire exact,gradwire int8"
"""Configurations that run if `--only` names none."""
WARM_UP_STEPS = 5
"""Steps before the timed ones: DDP rebuilds its buckets after the first, gradwire measures links in steps 2 to 4."""
START_TIMEOUT = timedelta(minutes=5)
_OWN = ("model", "megabytes", "replay", "batch", "factor", "slow_motion", "stream", "imports")
"""Options for the models of `gradwire compare` itself."""
_LAST_LINES = 15
NOT_USED = "it did not run: the script trains no DistributedDataParallel, so torch reduced its gradients as before"
"""Words about a configuration whose hook no model has taken, as with FSDP2."""


@dataclass(slots=True)
class ConfigurationRun:
    """Collects the output of a script's ranks under one configuration.

    Attributes:
        name: Name of the configuration.
        records: Rank -> records of its steps, as `script_rank` printed them.
        other: Rank -> lines of the script's own output.
        failures: Rank -> (time of its end in seconds since the epoch, its exit status), of ranks that failed.
    """

    name: str
    records: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    other: dict[int, list[str]] = field(default_factory=dict)
    failures: dict[int, tuple[float, int]] = field(default_factory=dict)

    def line(self, rank: int, text: str) -> bool:
        """Stores a line that a rank printed; returns True if it is the record of a step."""
        found = _record(text)
        if found is None:
            self.other.setdefault(rank, []).append(text)
            return False
        self.records.setdefault(rank, []).append(found)
        return True

    @property
    def gradient_nbytes(self) -> int:
        """Returns the bytes of one rank's gradients in one step, the most of all so far; 0 before the first record."""
        return max((each["gradient_nbytes"] for own in self.records.values() for each in own), default=0)

    def result(self, ranks: int, counted: bool) -> ConfigurationResult:
        """Returns the figures of the steps after the warm-up: time of the slowest rank, bytes of the busiest node.

        Args:
            ranks: Number of ranks in the job.
            counted: True if the bytes of a network card were counted.

        Returns:
            The result, without a speed-up: its `speed_up_range` holds the quartiles of a step's seconds, which
            `_Runs.results` replaces. One with a `reason` and no figures if a rank made too few steps.
        """
        steps = min((len(own) for own in self.records.values()), default=0) if len(self.records) == ranks else 0
        if steps < WARM_UP_STEPS + 2:
            return ConfigurationResult(self.name, reason=self._why_not(steps))
        # The last step of the warm-up is where the clock starts.
        timed = {rank: own[WARM_UP_STEPS - 1 : steps] for rank, own in self.records.items()}
        moments = {rank: [each["moment"] for each in own] for rank, own in timed.items()}
        # Ranks' clocks differ, the lengths of their steps do not: a step lasts as long as on the slowest rank.
        lengths = [[after - before for before, after in pairwise(own)] for own in moments.values()]
        seconds = [max(step) for step in zip(*lengths, strict=True)]
        carried = [
            (last - first) / len(seconds)
            for own in timed.values()
            for first, last in zip(own[0]["carried"], own[-1]["carried"], strict=True)
        ]
        last = [each["loss"] for own in timed.values() for each in own[-max(1, len(seconds) // 4) :]]
        losses = [loss for loss in last if loss is not None]
        return ConfigurationResult(
            self.name,
            statistics.median(seconds),
            max(carried) if counted else None,
            speed_up_range=middle(seconds),
            loss=statistics.fmean(losses) if losses else None,
        )

    def unexpected_hook(self) -> str | None:
        """Returns the name of the script's own hook that ran instead, "" if none ran; None if its own did."""
        hooks = {hook for own in self.records.values() for each in own for hook in each["hooks"]}
        expected = {hook.__name__ for name, hook in TORCH_HOOKS.items() if name == self.name}
        expected |= {"automatic_hook"} if self.name.startswith("gradwire") else set()
        return min(hooks - expected - {""}, default="" if expected and not expected & hooks else None)

    def _why_not(self, steps: int) -> str:
        """Returns why there are no figures, with the last lines of the rank that failed first, or else came least far.

        If the ranks cannot meet as the script has it, it is what the first of them has said of that.

        Args:
            steps: Number of steps that all ranks have made.
        """
        if (why := refusal_of(chain.from_iterable(self.other.values()))) is not None:
            return why
        made = f"it made {steps} steps on all ranks, {WARM_UP_STEPS + 2} are needed; "
        if not (ranks := {*self.other, *self.failures}):
            return made + "it printed nothing"
        late = (math.inf, 0)
        rank = min(ranks, key=lambda each: (self.failures.get(each, late), len(self.records.get(each, ()))))
        failed = f" failed with status {self.failures[rank][1]}, and" if rank in self.failures else ""
        lines = [text for text in self.other.get(rank, ()) if text.strip()][-_LAST_LINES:] or ["(nothing)"]
        return f"{made}rank {rank}{failed} printed last:\n" + "\n".join(f"  {text}" for text in lines)


def _record(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and STEP in found else None


def configurations_of(only: str | None) -> dict[str, str]:
    """Returns the configurations to run, plain DDP first: name -> value of GRADWIRE_HOOK, empty for those of torch.

    Args:
        only: Words with commas between them; a configuration runs if its name contains one.

    Raises:
        ValueError: A word is in no name.
    """
    found = {PLAIN: "", **dict.fromkeys(TORCH_HOOKS, ""), "gradwire exact": "none"}
    found |= {f"gradwire {name}": name for name in compressor_names()}
    words = [word.strip().lower() for word in (only or USUAL).split(",")]
    for word in words:
        if not word or not any(word in name.lower() for name in found):
            raise ValueError(f"`--only` has {word!r}, which is in no name; there are {', '.join(found)}")
    return {name: hook for name, hook in found.items() if name == PLAIN or any(word in name.lower() for word in words)}


def run_emulated(options: argparse.Namespace, nodes: list[int], runs: "_Runs") -> None:
    """Runs the script under every configuration on one emulated cluster.

    Args:
        options: Parsed options of the command line.
        nodes: Number of ranks on each node.
        runs: Collection that the output of the ranks is added to.

    Raises:
        RuntimeError: The cluster cannot be set up, or the script does not run under plain DDP.
    """
    with EmulatedCluster(nodes, options.nic) as cluster:
        for name, hook in runs.configurations.items():
            runs.begin(name)
            command, variables = _command(options, name, cluster.interfaces[0]), _variables(hook)
            done = cluster.run(
                command, order=options.order, grace_seconds=5.0, environment=variables, on_line=runs.take
            )
            if (rank := done.first_failure) is not None:
                runs.found[-1].failures[rank] = time.time(), done.returncodes[rank]
            runs.check_plain(sum(nodes))


def run_given(options: argparse.Namespace, world: World, runs: "_Runs") -> None:
    """Runs the script under every configuration as this rank of the job; all ranks call it together.

    Args:
        options: Parsed options of the command line.
        world: Connected ranks of the job.
        runs: Collection that the output of all ranks is added to.
    """
    start = world.start
    local = Counter(info.hostname for info in world.ranks)
    place = {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(local[world.ranks[world.rank].hostname]),
        "MASTER_ADDR": start.address,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    assert dist.group.WORLD is not None
    store = store_of(dist.group.WORLD)
    for name, hook in runs.configurations.items():
        runs.begin(name)
        failed = f"gradwire/compare/{name}"
        with held_port() as free:
            # Each run has a port of its own: the last one's may still be in TIME_WAIT.
            port = torch.tensor([free], dtype=torch.int64, device="cpu")
            dist.broadcast(port, src=0)
            variables = place | {"MASTER_PORT": str(int(port.item()))} | _variables(hook)
            words = [f"{key}={value}" for key, value in variables.items()]
            command = ["setpriv", "--pdeathsig", "KILL", "env", *words, *_command(options, name, options.interface)]
            with Ranks([command], on_line=lambda _, text: runs.take(world.rank, text)) as ranks:
                # One rank that fails early would leave the others waiting for it, for minutes by torch's defaults.
                done = ranks.wait(None, 0.0, stop=partial(store.check, [failed]))
        own = runs.found[-1]
        if done.first_failure is not None:
            own.failures[world.rank] = time.time(), done.returncodes[0]
            store.set(failed, "")
        for other in gather_records(own):
            own.records |= other.records
            own.other |= other.other
            own.failures |= other.failures
        runs.check_plain(world.size)


def _command(options: argparse.Namespace, name: str, interface: str | None) -> list[str]:
    steps = str(WARM_UP_STEPS + options.rounds)
    return python_module("gradwire.bench.compare.script_rank", steps, name, interface or "", *options.script)


def _variables(hook: str) -> dict[str, str]:
    """Returns the environment variables that select a configuration, and empty those that would select another.

    Args:
        hook: Value of GRADWIRE_HOOK; empty registers no hook.
    """
    return {AUTOMATIC: hook, "GRADWIRE_COMPRESSOR": ""}


class _Runs:
    """Collects the runs of all configurations and shows their progress.

    Args:
        configurations: Name -> value of GRADWIRE_HOOK, see `configurations_of`.
        steps: Number of steps of each run.
        lines: Printer of progress lines, for a pipe or a log.
    """

    def __init__(self, configurations: dict[str, str], steps: int, lines: PlainLines) -> None:
        self.configurations = configurations
        self.found: list[ConfigurationRun] = []
        self._steps = steps
        self._lines = lines
        self._progress = Progress(disable=True)
        self._task = TaskID(0)

    def draw_on(self, progress: Progress) -> None:
        """Shows the steps on a progress bar from now on."""
        self._progress = progress
        self._task = progress.add_task("starting", total=len(self.configurations) * self._steps)

    def begin(self, name: str) -> None:
        """Starts collecting for the next configuration: lines passed to `take` belong to it from now on."""
        self.found.append(ConfigurationRun(name))
        self.show(0)

    def take(self, rank: int, text: str) -> None:
        """Stores a line that a rank printed, and moves the bar if rank 0 finished a step."""
        if self.found[-1].line(rank, text) and rank == 0:
            self.show(len(self.found[-1].records[0]))

    def show(self, step: int) -> None:
        """Moves the bar to a step of the running configuration."""
        number, name = len(self.found), self.found[-1].name
        self._progress.update(self._task, completed=(number - 1) * self._steps + step, description=name)
        self._lines.show(
            f"{name}, {number} of {len(self.configurations)}: step {step} of {self._steps}", at_once=not step
        )

    def check_plain(self, ranks: int) -> None:
        """Ends the comparison after its first run if the script does not run: a hook would not mend that.

        Args:
            ranks: Number of ranks in the job.

        Raises:
            RuntimeError: The script does not run under plain DDP.
        """
        plain = self.found[0].result(ranks, counted=False)
        if plain.seconds is None:
            raise RuntimeError(f"the script does not run under plain DDP: {plain.reason}")

    def results(self, ranks: int, counted: bool) -> list[ConfigurationResult]:
        """Returns the figures of all configurations that have run, each with its speed-up over plain DDP.

        Args:
            ranks: Number of ranks in the job.
            counted: True if the bytes of a network card were counted.

        Raises:
            RuntimeError: The script does not run under plain DDP.
        """
        self.check_plain(ranks)
        found = [run.result(ranks, counted) for run in self.found]
        plain = found[0]
        assert plain.seconds is not None and plain.speed_up_range is not None
        best, worst = plain.speed_up_range
        compared = []
        for each in found:
            if each.seconds is not None and each.speed_up_range is not None:
                # Until here the range is that of the seconds of a step.
                fast, slow = each.speed_up_range
                ratios = None if each is plain else (best / slow, worst / fast)
                compared.append(replace(each, speed_up=plain.seconds / each.seconds, speed_up_range=ratios))
        return compared + [each for each in found if each.seconds is None]


def what_to_write(results: Sequence[ConfigurationResult], configurations: Mapping[str, str]) -> str:
    """Returns the advice of a comparison: of the configurations that save most, the one that changes gradients least.

    Args:
        results: Figures of the configurations, plain DDP first.
        configurations: Name -> value of GRADWIRE_HOOK, see `configurations_of`.
    """
    plain = results[0]
    assert plain.seconds is not None
    faster = {
        each.name: plain.seconds - each.seconds
        for each in results[1:]
        if each.seconds is not None and each.speed_up_range is not None and each.speed_up_range[0] > 1.0
    }
    if not any(each.seconds is not None for each in results[1:]):
        return "No other configuration was measured: nothing can be said yet."
    if not faster:
        return "No configuration was clearly faster than plain DDP: change nothing, or take more --rounds."
    close = [name for name, saved in faster.items() if saved >= MOST_OF_IT * max(faster.values())]
    name = min(close, key=lambda one: distortion_of(configurations[one] or one.split()[1]))
    hook = configurations[name]
    if not hook:
        kind = TORCH_HOOKS[name].__name__
        how = f"write model.register_comm_hook(None, {kind}), from torch.distributed.algorithms.ddp_comm_hooks"
    else:
        option = "" if hook == "none" else f', compressor="{hook}"'
        how = (
            f"put {AUTOMATIC}={hook} before the command, or write state = gradwire.HookState(model{option}) and "
            "model.register_comm_hook(state, gradwire.comm_hook)"
        )
    lossy = "" if hook == "none" else " It is lossy: train to the end once before you rely on it."
    return f"Take {name}, {plain.seconds / (plain.seconds - faster[name]):.2f}x as fast: {how}.{lossy}"


def options_behind_script(options: argparse.Namespace) -> list[str]:
    """Returns the words behind the script that are options of compare, too: the script gets them."""
    own = {f"--{name.replace('_', '-')}" for name in vars(options)}
    return [word for word in dict.fromkeys(options.script[1:]) if word.partition("=")[0] in own]


def compare_script(options: argparse.Namespace, argv: list[str], start: Start | None) -> None:
    """Runs the script under each configuration; rank 0 prints the table and the advice, also after a signal.

    Args:
        options: Parsed options of the command line.
        argv: Words of the command line, for the report.
        start: Place of this rank as a launcher set it; None emulates a cluster.

    Raises:
        ValueError: An option does not fit, or this machine cannot emulate a cluster.
        RuntimeError: The script does not run under plain DDP.
    """
    configurations = configurations_of(options.only)
    world = None
    if start is None:
        if (reason := available()) is not None:
            raise ValueError(
                f"cannot emulate a cluster here: {reason}; on real nodes type torchrun ... -m gradwire compare "
                "--script train.py"
            )
        nodes = ranks_of_nodes(options)
        where = describe_emulated(options, nodes, Scale())
    else:
        world = meet(start, START_TIMEOUT)
        nodes = list(Counter(info.hostname for info in world.ranks).values())
        where = f"{shape(nodes)} ranks started by {start.by}"
    speaker = world is None or world.rank == 0
    if speaker and (behind := options_behind_script(options)):
        names = " and ".join(f"`{name}`" for name in behind)
        complain("compare", f"the script gets {names}; put what is meant for compare before --script")
    counted = world is None or options.interface is not None
    runs = _Runs(configurations, WARM_UP_STEPS + options.rounds, PlainLines(shown=speaker))
    try:
        with progress_bar(shown=speaker) as progress:
            runs.draw_on(progress)
            if world is None:
                run_emulated(options, nodes, runs)
            else:
                run_given(options, world, runs)
    except EndedBySignal:
        if speaker:
            complain("compare", f"stopped in {runs.found[-1].name if runs.found else 'the start'}")
            if len(runs.found) > 1 and runs.found[-1].result(sum(nodes), counted).seconds is None:
                del runs.found[-1]  # it was stopped: whether it runs is not known
            if runs.found and runs.found[0].result(sum(nodes), counted).seconds is not None:
                _show(options, argv, runs, where, nodes, counted)
        raise
    finally:
        if world is not None:
            dist.destroy_process_group()
    if speaker:
        _show(options, argv, runs, where, nodes, counted)


def _show(
    options: argparse.Namespace, argv: list[str], runs: "_Runs", where: str, nodes: list[int], counted: bool
) -> None:
    """Prints the table and the advice, and writes the files that were asked for."""
    results = runs.results(sum(nodes), counted)
    nbytes = max(run.gradient_nbytes for run in runs.found)
    report(options, argv, Measured(results, where, nodes, nbytes, Scale(), script=Path(options.script[0]).name))
    if options.json == STDOUT:
        return
    console = CleanConsole(highlight=False, markup=False)
    foreign = {run.name: hook for run in runs.found if run.records and (hook := run.unexpected_hook()) is not None}
    for run in runs.found:
        made = min((len(own) for own in run.records.values()), default=0) - WARM_UP_STEPS
        if 2 <= made < options.rounds:
            status = "".join(f"; rank {rank} failed with status {end[1]}" for rank, end in run.failures.items())
            console.print(f"{run.name} ended after {made} of {options.rounds} timed steps{status}")
    for name, hook in foreign.items():
        own = f"the script registers a hook itself, {hook}, which ran in its place"
        console.print(f"{name}: {own if hook else NOT_USED}")
    console.print("loss: mean over all ranks and the last quarter of the steps, of what backward() is called on")
    if foreign:
        how = "leave its registration out, and compare again" if any(foreign.values()) else "see the pages on FSDP2"
        console.print(f"Nothing can be said where the configuration did not run: {how}")
    else:
        console.print(what_to_write(results, runs.configurations))


def _read(argv: list[str]) -> argparse.Namespace:
    """Reads the command line of a comparison with `--script`.

    Raises:
        ValueError: A value does not fit; the message names the option.
    """
    options = parse(argv)
    default = build_parser().get_default
    for name in _OWN:
        if getattr(options, name) != default(name):
            raise ValueError(f"`--{name.replace('_', '-')}` is for the models of compare itself; leave it out")
    if not options.script:
        raise ValueError("`--script`: found nothing after it, wanted a script, for example --script train.py")
    if not Path(options.script[0]).is_file():
        raise ValueError(f"`--script`: there is no file {options.script[0]}; wanted a path, not -m, and its arguments")
    return options


def main(argv: list[str]) -> int:
    """Compares with `--script`, or with models of the command's own; returns the exit status.

    Args:
        argv: Words after `compare`.

    Returns:
        0, 1 for a failure, 2 for a bad option.
    """
    if "--script" not in argv:
        return compare_models(argv)
    variables = launcher_variables()
    try:
        options = _read(argv)
        with clean_end():
            start = find_start(variables)
            if speaks(variables):
                check_outputs(options)
            compare_script(options, argv, start)
    except (ValueError, RuntimeError) as error:
        if speaks(variables):
            complain("compare", error)
        return BAD_FLAG if isinstance(error, ValueError) else 1
    return 0
