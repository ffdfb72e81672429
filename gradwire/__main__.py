"""The console command `gradwire`: one table of sub-commands, each imported only when it is asked for."""

import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import TracebackType

from gradwire.bench.emulation.signals import EndedBySignal
from gradwire.bench.pipe import reader_may_leave, status_of
from gradwire.comms.bootstrap.requirement import require_torch
from gradwire.topology.printable import printable

COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("gradwire.bench.doctor.command", "find out why a multi-node job is slow, and what to type"),
    "predict": ("gradwire.cli.predict", "predict step times on a cluster, recommend plan and compressor"),
    "topo": ("gradwire.cli.topo", "show CPUs, GPUs, NICs and links of this machine"),
    "gdr-check": ("gradwire.cli.gdr_check", "check the GPUDirect RDMA configuration"),
    "selftest": ("gradwire.bench.selftest.command", "check kernels, NCCL and short trainings on this machine"),
    "bench": ("gradwire.bench.nccl_tests.command", "time collectives (flags of nccl-tests), kernels and codecs"),
    "compare": ("gradwire.bench.compare.script", "compare plain DDP, torch's hooks and gradwire, or with your script"),
    "emulate": ("gradwire.bench.emulation.command", "run a command on an emulated cluster (network namespaces)"),
    "plot": ("gradwire.bench.plot.command", "draw the JSON output of bench, compare and traces"),
}
"""Name -> (module with `main(argv: list[str]) -> int`, one line of help)."""

NEED_TORCH = ("bench", "compare", "predict", "selftest")
"""Commands that need torch, even for --help."""


def usage() -> str:
    """Returns the help text that lists every sub-command."""
    rows = "\n".join(f"  {name:<10} {line}" for name, (_, line) in COMMANDS.items())
    return (
        "gradwire: faster data-parallel PyTorch training on slow networks\n\n"
        "usage: gradwire COMMAND [options]    (gradwire --version)\n\n"
        f"{rows}\n\n`gradwire COMMAND --help` explains one of them."
    )


def main(argv: list[str] | None = None) -> int:
    """Runs one sub-command and returns its exit status.

    Args:
        argv: Words after `gradwire`; None takes this process's command line.

    Returns:
        0 for success, otherwise the status of the command; 1 if something it needs is missing, 2 for an unknown name;
        `OUTPUT_LOST` (120) if standard output did not take all that was printed.

    Raises:
        SystemExit: The command's options are wrong (status 2), or are `--help` (0).
        KeyboardInterrupt: Ctrl-C. Python then ends the process by that signal, after all exit handlers, which also
            stops the script or the loop of a shell.
    """
    if sys.stderr is None:  # closed by the shell: what has nowhere to go must not go to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - as long as the process lasts
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # `?` for what an encoding such as ASCII lacks, not the end
    try:
        return status_of(lambda: _run(sys.argv[1:] if argv is None else argv))
    except (KeyboardInterrupt, EndedBySignal) as end:  # in a command, or before it: torch takes seconds to be loaded
        if isinstance(end, EndedBySignal) and end.code != 128 + signal.SIGINT:
            raise
        print("gradwire: interrupted", file=sys.stderr)
        sys.excepthook = _silent_of(interrupt := KeyboardInterrupt())
        raise interrupt from None


def _silent_of(
    interrupt: KeyboardInterrupt,
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    """Returns a `sys.excepthook` that prints nothing for `interrupt`, and calls the present one for other errors."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is not interrupt:
            before(kind, error, trace)

    return hook


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        with reader_may_leave():
            print(usage())
        return 0
    if words[0] in ("-V", "--version"):
        from importlib import metadata  # here: Ctrl-C while it is loaded would end in a traceback

        with reader_may_leave():
            print(f"gradwire {metadata.version('gradwire')}")
        return 0
    if words[0] not in COMMANDS:
        print(f"gradwire: no command `{printable(words[0])}`\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        os.getcwd()  # noqa: PTH109 - torch's libraries end the process where there is none
    except FileNotFoundError:
        print(f"gradwire {words[0]}: the current folder has been removed; `cd` to one that there is", file=sys.stderr)
        return 1
    if words[0] in NEED_TORCH:
        try:
            require_torch()
            if words[0] in ("bench", "compare"):  # and these need gradwire's compiled part
                importlib.import_module("gradwire.compressors.compiled")
        except (ImportError, RuntimeError) as error:
            print(f"gradwire {words[0]}: {error}", file=sys.stderr)
            return 1
    try:
        module = importlib.import_module(COMMANDS[words[0]][0])
    except ModuleNotFoundError as error:
        if (error.name or "gradwire").partition(".")[0] == "gradwire":
            raise
        from importlib import metadata

        # As the installed gradwire has it, which may be a wheel: conditions are those of extras.
        try:
            needed = " ".join(f"'{each}'" for each in metadata.requires("gradwire") or () if ";" not in each)
        except metadata.PackageNotFoundError:
            needed = "."  # in a checkout that nobody has installed
        print(f"gradwire {words[0]}: `{error.name}` is missing here: pip install {needed}", file=sys.stderr)
        return 1
    return int(module.main(words[1:]))


if __name__ == "__main__":
    sys.exit(main())
