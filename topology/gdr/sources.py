"""Makes a host for the checks from this machine, a captured folder, an archive, or the text of lspci alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from gradwire.topology.gdr.capture import CaptureError, Say, opened_capture
from gradwire.topology.gdr.example import ExampleMachine
from gradwire.topology.gdr.host import Host
from gradwire.topology.gdr.inputs.collect import collect
from gradwire.topology.gdr.inputs.environment import parse_environment, read_environment
from gradwire.topology.gdr.inputs.files import Files
from gradwire.topology.gdr.inputs.nccl_log import NcclLog, read_nccl_log
from gradwire.topology.gdr.inputs.texts import parse_nvlink_status, parse_perftest
from gradwire.topology.pci_ids import NVIDIA
from gradwire.topology.readers.lspci import read_tree as read_lspci_tree
from gradwire.topology.readers.pci import PciTree
from gradwire.topology.readers.pci_sysfs import read_tree

LIVE_ROOT = Path("/")
"""Root folder for checks of this machine itself."""
_TEXT_NBYTES = 16 << 20
"""Most bytes of a text; lspci -vvv of a large server is 1 MB."""
_MAX_PAIRS = 1 << 16
"""Most pairs of GPUs and NICs: 16 GPUs with 16 cards of 256 virtual functions each."""


class SourceError(ValueError):
    """Reports an input that cannot be used; the message names its option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInputs:
    """Holds the inputs of `gradwire gdr-check`, one field for each option of the command line.

    Attributes:
        root: Folder with a captured tree; None if not set, as for all paths here.
        archive: File that `--capture` wrote.
        lspci: Output of `lspci -vvv`.
        env: Output of `env`, or a /proc/PID/environ.
        nccl_log: NCCL's log with NCCL_DEBUG=INFO.
        nvlink: Output of `nvidia-smi nvlink --status`.
        perftest: Outputs of ib_write_bw: from host memory, then from GPU memory.
        prove: True also registers GPU memory with the NICs.
        example: True reads a made-up healthy machine.
    """

    root: Path | None = None
    archive: Path | None = None
    lspci: Path | None = None
    env: Path | None = None
    nccl_log: Path | None = None
    nvlink: Path | None = None
    perftest: tuple[Path, ...] = ()
    prove: bool = False
    example: bool = False

    @property
    def live(self) -> bool:
        """Returns whether the inputs describe this machine itself, and no file or example."""
        return self.root is None and self.archive is None and self.lspci is None and not self.example


@contextmanager
def opened_host(inputs: HostInputs, say: Say = lambda _: None) -> Iterator[Host]:
    """Reads the host that the inputs describe, for the length of a `with` block; its temporary folders end with it.

    Args:
        inputs: Options of the command line.
        say: Function that is called repeatedly with a line about the progress.

    Raises:
        SourceError: An input is missing, unreadable or not what its option wants.
    """
    with _bare_host(inputs, say) as host:
        if len(host.gpus) * len(host.nics) > _MAX_PAIRS:
            raise SourceError(
                f"{len(host.gpus)} GPUs and {len(host.nics)} NICs: more than {_MAX_PAIRS} pairs to judge; wanted what "
                "one machine has"
            )
        if inputs.env is not None:
            host.environment = parse_environment(read_text(inputs.env, "--env"))
        if inputs.nccl_log is not None:
            host.log = _read_log(inputs.nccl_log, say)
        if inputs.nvlink is not None:
            host.nvlinks = parse_nvlink_status(read_text(inputs.nvlink, "--nvlink"))
            if not host.nvlinks:
                raise SourceError(
                    f"`--nvlink` {inputs.nvlink}: no `GPU N:` line, want the output of nvidia-smi nvlink --status"
                )
        host.bandwidths = _bandwidths(inputs.perftest)
        yield host


@contextmanager
def _bare_host(inputs: HostInputs, say: Say) -> Iterator[Host]:
    if inputs.archive is not None:
        try:
            if inputs.archive.exists() and not inputs.archive.is_file():
                raise SourceError(f"`--from` {inputs.archive}: no regular file")
            with opened_capture(inputs.archive, say) as capture:
                say("reading the PCI tree")
                files = Files(capture.root, capture.denied)
                yield Host(files, _tree(inputs, capture.root), capture.facts, capture.environment)
        except CaptureError as error:
            raise SourceError(f"`--from` {inputs.archive}: {error}") from error
        except OSError as error:
            raise SourceError(f"`--from` {inputs.archive}: {error.strerror or error}") from error
    elif inputs.example:
        with TemporaryDirectory(prefix="gradwire-gdr-") as folder:
            yield ExampleMachine(Path(folder)).host()
    elif inputs.root is not None:
        if not _is_folder(inputs.root):
            raise SourceError(f"`--root` {inputs.root}: no folder, want the top of a tree that holds sys/ and proc/")
        yield Host(Files(inputs.root), _tree(inputs, inputs.root))
    elif inputs.lspci is not None:
        with TemporaryDirectory(prefix="gradwire-gdr-") as empty:
            yield Host(Files(Path(empty)), _tree(inputs, Path(empty)))
    else:
        yield _live_host(inputs)


def _live_host(inputs: HostInputs) -> Host:
    host = Host(Files(LIVE_ROOT), read_tree(LIVE_ROOT), environment=read_environment())
    switches = any(function.vendor == NVIDIA for function in host.tree.of_class(0x06))
    host.facts = collect(LIVE_ROOT, bool(host.gpus and (host.capable or host.rdma_devices)), switches, inputs.prove)
    # What was derived without the facts is derived again: distances know of chip-to-chip links.
    return Host(host.files, host.tree, host.facts, host.environment)


def _tree(inputs: HostInputs, root: Path) -> PciTree:
    if inputs.lspci is None:
        return read_tree(root)
    tree = read_lspci_tree(read_text(inputs.lspci, "--lspci").splitlines(keepends=True))
    if not tree.functions:
        raise SourceError(f"`--lspci` {inputs.lspci}: {tree.problems[0]}")
    return tree


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long
        return False


def read_text(path: Path, option: str) -> str:
    """Reads a text file of at most 16 MiB; bytes that are not UTF-8 become replacement characters.

    Args:
        path: A regular file.
        option: Option that named the file, for messages.

    Raises:
        SourceError: It cannot be read, or is larger.
    """
    try:
        if not path.is_file():
            raise SourceError(f"`{option}` {path}: no regular file")
        nbytes = path.stat().st_size
        if nbytes > _TEXT_NBYTES:
            raise SourceError(f"`{option}` {path}: {nbytes} bytes, want at most {_TEXT_NBYTES}")
        with path.open("rb") as file:
            return file.read(_TEXT_NBYTES).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"`{option}` {path}: {getattr(error, 'strerror', None) or error}") from error


def _read_log(path: Path, say: Say) -> NcclLog:
    try:
        return read_nccl_log(path, say)
    except OSError as error:
        raise SourceError(f"`--nccl-log` {path}: {error.strerror or 'no regular file'}") from error


def _bandwidths(paths: tuple[Path, ...]) -> dict[str, float]:
    found = {}
    for name, path in zip(("host", "gdr"), paths, strict=False):
        value = parse_perftest(read_text(path, "--perftest"))
        if value is None:
            raise SourceError(f"`--perftest` {path}: no result row, want the output of ib_write_bw")
        found[name] = value
    return found
