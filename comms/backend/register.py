"""Registers the backend "gradwire" and the rendezvous `mpi://` with torch.distributed, at the end of `import torch`."""

import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gradwire.comms.config import automatic_hook_wanted, unused_variables
from gradwire.comms.environment import watch_wanted

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from gradwire.comms.backend.process_group import GradwireGroup

NAME = "gradwire"
"""Name of the backend."""
SCHEME = "mpi"
"""Scheme of the rendezvous URL, `mpi://`."""

log = logging.getLogger("gradwire")


def register() -> None:
    """Registers the backend and the rendezvous `mpi://` once, and what environment variables switch on.

    These are the automatic hook (GRADWIRE_HOOK), the watch (GRADWIRE_WATCH), and a warning for options that are set
    without a hook. It does nothing if torch was built without torch.distributed.

    It is called by torch itself (entry point `torch.backends`), by `import gradwire` if torch is already imported, and
    on the first use of gradwire's names.
    """
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        _register_rendezvous()
    try:
        if dist.is_available() and (automatic_hook_wanted() or unused_variables()):
            from gradwire.comms.automatic import expect_hook, install

            (install if automatic_hook_wanted() else expect_hook)()
        if dist.is_available() and watch_wanted():
            from gradwire.comms.watch.watch import install as install_watch

            install_watch()
    except ImportError as error:
        # One of these modules has imported torch, which calls this: the first use of gradwire's names calls it again.
        # Python decides by the same attribute that a module is partially initialized (import_from in ceval.c).
        spec = getattr(sys.modules.get(error.name or ""), "__spec__", None)
        if not getattr(spec, "_initializing", False):
            raise
        log.debug("GRADWIRE_HOOK and GRADWIRE_WATCH take effect later: %s", error)


def _register_rendezvous() -> None:
    """Registers the handler of `mpi://`; one that another package has registered stays."""
    from torch.distributed.rendezvous import register_rendezvous_handler

    try:
        register_rendezvous_handler(SCHEME, _rendezvous_by_mpi)  # type: ignore[no-untyped-call]  # torch has no types there
    except RuntimeError as error:  # another package's, which is there first: `import torch` must not fail for it
        log.info("`%s://` stays as it is: %s", SCHEME, error)


def _rendezvous_by_mpi(url: str, **options: Any) -> "Iterator[tuple[TCPStore, int, int]]":
    """Calls `mpi_launch.rendezvous`, the handler of `mpi://`, with torch's arguments."""
    # Imported here, so that mpi4py is loaded only in programs that use `mpi://`.
    from gradwire.comms.bootstrap.mpi_launch import rendezvous

    return rendezvous(url, **options)


def _create(options: object, backend_options: object = None) -> "GradwireGroup":
    """Calls `process_group.create` with torch's arguments, after a check of torch's version."""
    # Not in register(), which runs for programs, also with an older torch, that never use this backend.
    from gradwire.comms.bootstrap.requirement import require_torch

    require_torch()
    from gradwire.comms.backend.process_group import create

    return create(options, backend_options)
