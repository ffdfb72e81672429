"""Makes the name "gradwire" known to torch.distributed; imports little, as it runs at the end of `import torch`."""

from typing import TYPE_CHECKING

from gradwire.comms.bootstrap.requirement import require_torch
from gradwire.comms.config import automatic_hook_wanted

if TYPE_CHECKING:
    from gradwire.comms.backend.process_group import GradwireGroup
    from gradwire.comms.bootstrap.compat import GroupOptions

NAME = "gradwire"


def register() -> None:
    """Registers the backend once, and GRADWIRE_HOOK's hook where that is set.

    Does nothing where torch was built without torch.distributed.

    Called by torch itself (entry point `torch.backends`), by `import gradwire` where torch is already there, and on
    the first use of gradwire's names.
    """
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    if dist.is_available() and automatic_hook_wanted():
        from gradwire.comms.automatic import install

        install()


def _create(options: "GroupOptions", backend_options: object = None) -> "GradwireGroup":
    # Not in register(), which an older torch calls as well, for programs that never ask for this backend.
    require_torch()
    from gradwire.comms.backend.process_group import create

    return create(options, backend_options)
