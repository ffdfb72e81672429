"""Gradients on the wire, and as little else as possible.

Two lines in a training script::

    state = gradwire.HookState(model)
    model.register_comm_hook(state, gradwire.comm_hook)

The names below are imported when they are first used: `gradwire topo` and `gradwire gdr-check` need no torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire.comms.config import Config
    from gradwire.comms.hook import HookState, comm_hook
    from gradwire.comms.wrap import wrap

__version__ = "0.1.0"
__all__ = ["Config", "HookState", "comm_hook", "wrap"]

_HOMES = {"Config": "gradwire.comms.config", "HookState": "gradwire.comms.hook", "comm_hook": "gradwire.comms.hook",
          "wrap": "gradwire.comms.wrap"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'gradwire' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
