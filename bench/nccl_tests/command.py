"""`gradwire bench`: nccl-tests for plans, compressors and their peers."""

import argparse
import importlib
import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.table import Table

import gradwire
from gradwire.bench.arguments import check_memory, check_output
from gradwire.bench.emulation.fork import fork_ranks
from gradwire.bench.emulation.launch import held_port
from gradwire.bench.machine import machine_line, memory_line, processor
from gradwire.bench.nccl_tests import output
from gradwire.bench.nccl_tests.backends.backend import Backend
from gradwire.bench.nccl_tests.backends.select import BackendSpec, backend_specs, check_device, connect, device_of
from gradwire.bench.nccl_tests.checks import Case, CodingLoss, ExactCheck, LossyCheck, ResultCheck, cases
from gradwire.bench.nccl_tests.collectives import COLLECTIVES
from gradwire.bench.nccl_tests.options import parse, sizes
from gradwire.bench.nccl_tests.output import BenchBlock, fresh_name, now, to_json, write_csv
from gradwire.bench.nccl_tests.ranks import World, meet
from gradwire.bench.nccl_tests.rows import RowRunner, TableRow
from gradwire.bench.nccl_tests.start import Start, find_start, speaks
from gradwire.bench.pipe import reader_may_leave
from gradwire.bench.terminal import STDOUT, CleanConsole, StatusLine, complain, right_columns, write_json, writing
from gradwire.comms.environment import bench_environment, launcher_variables

DEFAULT_TIMEOUT = timedelta(minutes=5)

ONE_RANK = (
    "one rank: nothing is exchanged and busbw is 0 by definition. Use -g N, or torchrun, mpirun or srun. If you did "
    "start several, each of them is running alone: start them with `mpirun` and mpi4py, or with torchrun"
)


def main(argv: list[str]) -> int:
    """Runs the bench as one rank of a job, or starts the ranks of `-g`; returns the exit status.

    Args:
        argv: Words of the command line after `bench`: a collective and flags; or `kernels` or `codecs`, with the flags
            of those commands.

    Returns:
        0 if all went well; 1 if a result is wrong, the mean bandwidth misses NCCL_TESTS_MIN_BW, or a rank failed; 2 for
        a bad flag, or a launcher that cannot be used.
    """
    own = {"kernels": "gradwire.bench.kernels.command", "codecs": "gradwire.bench.kernels.codecs"}
    if argv and argv[0] in own:
        status: int = importlib.import_module(own[argv[0]]).main(argv[1:])
        return status
    variables = launcher_variables()
    try:
        options = parse(argv)
        specs = backend_specs(options)
        wanted = bench_environment()
        start = find_start(variables)
        # A rank has one device, so 1 is what each rank of a launcher has; nccl-tests' own lines for mpirun say it.
        if start is not None and options.ngpus not in (None, 1):
            raise ValueError(
                f"`-g` is {options.ngpus}, but {start.by} has started {start.size} ranks already, each with one "
                "device; wanted -g 1, or no -g, and as many ranks of the launcher as there are devices"
            )
        check_device(options, before_fork=start is None)
        if start is None or start.rank == 0:
            _check_places(options, 1 if start else options.ngpus or 1)
    except (ValueError, RuntimeError) as error:
        if speaks(variables):
            complain("bench", error)
        return 2
    if start is not None:
        return _run_rank(start, options, specs, wanted, argv)
    return _start_ranks(options.ngpus or 1, options, specs, wanted, argv)


def _check_places(options: argparse.Namespace, ranks: int) -> None:
    """Checks before the start that the files can be written, and that the tensors fit in memory.

    Only the rank that writes the files calls it.

    Args:
        options: Options of the command line.
        ranks: Number of ranks that this process starts on this machine, 1 under a launcher.

    Raises:
        ValueError: A file cannot be written, or the tensors of `ranks` ranks do not fit into this machine's memory.
    """
    for flag, path in (("-J", options.output_file), ("--csv", options.csv)):
        try:
            fresh = None if path is None else fresh_name(path)
        except OSError as error:  # a name that is too long
            raise ValueError(f"`{flag}`: cannot write {path}: {error.strerror}") from None
        check_output(flag, fresh)
    if options.collective != "barrier" and options.device != "cuda" and not {"nccl", "nccl-raw"} & set(options.backend):
        flag = "-e" if options.agg_iters == 1 else "-m"
        tensors = 2 * options.agg_iters  # an input and an output for each operation of -m, see `Buffers`
        check_memory(flag, ranks * tensors * options.maxbytes, "the tensors of all ranks")


def _start_ranks(
    size: int, options: argparse.Namespace, specs: list[BackendSpec], wanted: float | None, argv: list[str]
) -> int:
    """Forks the ranks of `-g`, and returns the exit status of the job.

    This process has imported torch, but none of torch's threads has started yet, so that it can be forked.
    """
    with held_port() as port:
        starts = [Start("-g", rank, size, "127.0.0.1", port) for rank in range(size)]
        return fork_ranks(starts, lambda start, _: _run_rank(start, options, specs, wanted, argv), [])


def _run_rank(
    start: Start, options: argparse.Namespace, specs: list[BackendSpec], wanted: float | None, argv: list[str]
) -> int:
    timeout = timedelta(seconds=options.timeout) if options.timeout else DEFAULT_TIMEOUT
    try:
        try:
            world = meet(start, timeout)
        except (RuntimeError, ValueError) as error:  # the launcher's variables lead nowhere: no code to look into
            complain("bench", f"rank {start.rank} of {start.size} cannot meet the others: {error}")
            return 1
        try:
            return Bench(world, options, wanted, argv, timeout).run(specs)
        except ValueError as error:  # the same on all ranks: a flag that does not fit these ranks
            if start.rank == 0:
                complain("bench", error)
            return 2
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:
        traceback.print_exc()
        complain("bench", f"rank {start.rank}: {error}")
        return 1


class Bench:
    """One rank's run of all tables (blocks), one for each backend, plan and compressor; rank 0 prints and writes.

    Args:
        world: All ranks.
        options: Options of the command line.
        wanted: Value of NCCL_TESTS_MIN_BW in GB/s, the mean bandwidth to reach; None without it.
        argv: Words of the command line after `bench`, which the JSON records.
        timeout: Time limit of every collective.
    """

    def __init__(
        self, world: World, options: argparse.Namespace, wanted: float | None, argv: list[str], timeout: timedelta
    ) -> None:
        self._world = world
        self._options = options
        self._wanted = wanted
        self._argv = argv
        self._timeout = timeout
        self._device = device_of(options, world.local_rank)
        self._collective = COLLECTIVES[options.collective]
        self._cases = cases(self._collective, options, world.size)
        self._compact = not options.json and output.compact_fits_better(options)
        self._status = StatusLine(shown=world.rank == 0)
        self._sizes = [0] if options.collective == "barrier" else sizes(options)
        # As many threads as torch would take are too many where the ranks share the cores.
        local = sum(info.hostname == world.ranks[world.rank].hostname for info in world.ranks)
        torch.set_num_threads(max(1, torch.get_num_threads() // local))

    def run(self, specs: list[BackendSpec]) -> int:
        """Measures every block, -N times, and writes the files; returns the exit status, 0 or 1.

        Args:
            specs: Backends to measure, each with its plan and compressor.

        Raises:
            ValueError: A backend cannot be used on these ranks, or can run none of the cases.
            RuntimeError: A library is missing, or a rank did not respond in time.
        """
        started, blocks = now(), []
        self._warn()
        cycle = 0
        while self._options.run_cycles == 0 or cycle < self._options.run_cycles:
            for spec, backend in connect(specs, self._world, self._device, self._timeout, cycle):
                blocks.append(self._block(spec, backend))
            cycle += 1
        if self._world.rank == 0:
            self._write(blocks, started)
        failed = any(
            sum(row.wrong for row in block.rows) or output.too_slow(block.rows, self._wanted) for block in blocks
        )
        return int(failed)

    def _block(self, spec: BackendSpec, backend: Backend) -> BenchBlock:
        """Measures one block and prints its table, from the first line to the last. Collective."""
        world, options = self._world, self._options
        check: ResultCheck
        lossy = LossyCheck(world.size, self._device, world.control) if spec.lossy else None
        check = lossy or ExactCheck(world.size, self._device)
        runnable = self._runnable(backend)
        facts = {"ranks": f"{world.shape()}, started by {world.start.by}", **spec.facts(), **backend.facts()}
        self._say(output.opening(self._collective.name, options, gradwire.__version__))
        self._say(output.devices(world, self._device_name()))
        self._say(output.facts(facts))
        self._say(output.header(options, compact=self._compact))
        table = RowRunner(backend, self._collective, options, self._device, world.control, check, self._many_checks)
        rows: list[TableRow] = []
        count = len(runnable) * len(self._sizes)
        self._status.show(f"{spec.backend} {self._collective.name}: row 1 of {count}")
        for case in runnable:
            for row in table.rows(case, self._sizes):
                rows.append(row)
                self._status.clear()
                self._say([output.row_line(row, options, compact=self._compact)])
                if len(rows) < count:
                    self._status.show(f"{spec.backend} {self._collective.name}: row {len(rows) + 1} of {count}")
        self._status.clear()
        after = {key: value for key, value in backend.facts().items() if facts.get(key) != value}
        if options.memory:
            after["memory"] = memory_line(self._device)
        self._say(output.facts(after))
        self._say(output.closing(self._collective.name, rows, self._wanted))
        losses = lossy.losses if lossy else []
        if losses and world.rank == 0:
            self._show_losses(spec.compressor, losses)
        return BenchBlock(facts | after, rows, losses)

    def _runnable(self, backend: Backend) -> list[Case]:
        """Returns the cases that the backend can run, and prints why others are left out.

        Raises:
            ValueError: The backend can run none of the cases.
        """
        refused: dict[str, None] = {}
        found = []
        for case in self._cases:
            reason = backend.refusal(self._collective.name, case.element.name, case.operation)
            if reason is None:
                found.append(case)
            else:
                refused[reason] = None
        if not found:
            raise ValueError(
                f"`-d` {self._options.datatype} with `-o` {self._options.op}: {next(iter(refused))}; wanted "
                "another type, operation or backend"
            )
        self._say([f"# skipped: {reason}" for reason in refused])
        return found

    def _warn(self) -> None:
        if self._world.size == 1 and self._world.rank == 0:
            print(f"gradwire bench: warning: {ONE_RANK}", file=sys.stderr, flush=True)
            self._say(["# warning: one rank, busbw is 0 by definition"])

    def _many_checks(self, seconds: float) -> None:
        """Warns on stderr that the checks of `-c`, which has no upper bound here or in nccl-tests, take long.

        Args:
            seconds: Seconds that one check took.
        """
        if self._world.rank == 0:
            self._status.clear()
            count = self._options.check
            print(
                f"gradwire bench: warning: `-c` {count}: a check took {seconds * 1e3:.3g} ms, and so those of this "
                f"row, out of place and in place, take {2 * count * seconds / 60:.3g} min; a smaller `-c` ends sooner",
                file=sys.stderr,
                flush=True,
            )

    def _say(self, lines: list[str]) -> None:
        if self._world.rank == 0 and not self._options.json:
            with reader_may_leave():
                for line in lines:
                    print(line, flush=True)

    def _show_losses(self, compressor: str, losses: list[CodingLoss]) -> None:
        """Shows losses on stderr: parsers of nccl-tests' output read stdout."""
        if not self._options.json:
            CleanConsole(stderr=True, highlight=False).print(loss_table(compressor, losses))

    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else processor()

    def _write(self, blocks: list[BenchBlock], started: str) -> None:
        """Writes the JSON and CSV that -J, --json and --csv ask for.

        Args:
            blocks: All tables.
            started: Date and time of the run's start.
        """
        if self._options.output_file is not None or self._options.json:
            record = to_json(
                blocks,
                self._options,
                self._world,
                self._device_name(),
                argv=self._argv,
                started=started,
                wanted=self._wanted,
                version=gradwire.__version__,
                machine=machine_line(),
            )
            if self._options.json:
                write_json(STDOUT, record)
            if self._options.output_file is not None:
                with writing("-J", self._options.output_file):
                    _create(fresh_name(self._options.output_file), json.dumps(record, indent=2) + "\n")
        if self._options.csv is not None:
            with writing("--csv", self._options.csv):
                write_csv(fresh_name(self._options.csv), blocks, self._options.collective)


def _create(path: Path, text: str) -> None:
    with path.open("x") as file:
        file.write(text)


def loss_table(compressor: str, losses: list[CodingLoss]) -> Table:
    """Returns a table of a compressor's errors, bytes and times.

    Args:
        compressor: Name of the compressor, for the title.
        losses: Rows of the table, at least one.
    """
    columns = right_columns("size (B)", "error", "cosine", "exact (B)", "sent (B)", "ratio", "encode", "decode")
    title = f"{compressor}: {losses[0].bound}; times in us"
    table = Table(*columns, title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for loss in losses:
        coding = [
            f"{seconds * 1e6:.1f}" if seconds is not None else "-"
            for seconds in (loss.encode_seconds, loss.decode_seconds)
        ]
        ratio = f"{loss.logical_nbytes / loss.wire_nbytes:.2f}" if loss.wire_nbytes else "-"
        table.add_row(
            str(loss.nbytes),
            f"{loss.relative_error:.3e}",
            f"{loss.cosine:.6f}",
            f"{loss.logical_nbytes:.0f}",
            f"{loss.wire_nbytes:.0f}",
            ratio,
            *coding,
        )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
