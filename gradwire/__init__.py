"""Faster data-parallel PyTorch training on slow networks.

Two lines in a training script::

    state = gradwire.HookState(model)
    model.register_comm_hook(state, gradwire.comm_hook)

or one, for the whole of torch.distributed::

    torch.distributed.init_process_group("gradwire")

In a checkout the folders comms, compressors, topology, bench and csrc here are symbolic links to those at the top of
the repository, so `gradwire.comms.hook` is comms/hook.py there. An installed package has the folders themselves.

The names below are imported when they are first used: `gradwire topo` and `gradwire gdr-check` need no torch. The
backend "gradwire" is registered by torch at the end of `import torch` (entry point `torch.backends`), or here where
torch is already there; with TORCH_DEVICE_BACKEND_AUTOLOAD=0, at the first use of a name below.
"""

import importlib
import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from gradwire import accelerate, fsdp, lightning, transformers  # noqa: F401  # by their modules' names, not in __all__
    from gradwire.comms.attach import attach
    from gradwire.comms.bootstrap.mpi_launch import init_mpi_process_group
    from gradwire.comms.config import Config
    from gradwire.comms.fusion import FusionPlan
    from gradwire.comms.hook import HookState, comm_hook
    from gradwire.comms.outer.outer import Outer
    from gradwire.comms.watch.watch import watch
    from gradwire.comms.wrap import wrap
    from gradwire.compressors.base import Codec, Collective, Compressor, Layout, Member, Slice
    from gradwire.compressors.optim.fit import check_optimizer, take_momentum
    from gradwire.compressors.optim.layerwise import Lamb, Lars
    from gradwire.compressors.registry import register_codec, register_compressor
    from gradwire.compressors.rules import Rule
    from gradwire.topology.levels import levels_of
    from gradwire.topology.readers.detect import detect_machine

_HOMES = {
    "Codec": "gradwire.compressors.base",
    "Collective": "gradwire.compressors.base",
    "Compressor": "gradwire.compressors.base",
    "Config": "gradwire.comms.config",
    "FusionPlan": "gradwire.comms.fusion",
    "HookState": "gradwire.comms.hook",
    "Lamb": "gradwire.compressors.optim.layerwise",
    "Lars": "gradwire.compressors.optim.layerwise",
    "Layout": "gradwire.compressors.base",
    "Member": "gradwire.compressors.base",
    "Outer": "gradwire.comms.outer.outer",
    "Rule": "gradwire.compressors.rules",
    "Slice": "gradwire.compressors.base",
    "attach": "gradwire.comms.attach",
    "check_optimizer": "gradwire.compressors.optim.fit",
    "comm_hook": "gradwire.comms.hook",
    "detect_machine": "gradwire.topology.readers.detect",
    "init_mpi_process_group": "gradwire.comms.bootstrap.mpi_launch",
    "levels_of": "gradwire.topology.levels",
    "register_codec": "gradwire.compressors.registry",
    "register_compressor": "gradwire.compressors.registry",
    "take_momentum": "gradwire.compressors.optim.fit",
    "watch": "gradwire.comms.watch.watch",
    "wrap": "gradwire.comms.wrap",
}
__all__ = [
    "Codec",
    "Collective",
    "Compressor",
    "Config",
    "FusionPlan",
    "HookState",
    "Lamb",
    "Lars",
    "Layout",
    "Member",
    "Outer",
    "Rule",
    "Slice",
    "attach",
    "check_optimizer",
    "comm_hook",
    "detect_machine",
    "init_mpi_process_group",
    "levels_of",
    "register_codec",
    "register_compressor",
    "take_momentum",
    "watch",
    "wrap",
]


def _name_the_sender(record: logging.LogRecord) -> bool:
    """Prefixes a log message with `gradwire: `, in place, unless it begins with gradwire; returns True: it is logged.

    Without a log handler in the script, Python prints the bare message.
    """
    if not str(record.msg).startswith("gradwire"):
        record.msg = f"gradwire: {record.msg}"
    return True


# All modules of gradwire log to this one logger.
logging.getLogger("gradwire").addFilter(_name_the_sender)

_ADAPTERS = ("accelerate", "fsdp", "lightning", "transformers")
"""Modules that import what they are for, when they are first named: `gradwire.lightning.Callback`."""


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("gradwire")
    if name in _ADAPTERS:
        return importlib.import_module(f"gradwire.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'gradwire' has no attribute {name!r}")
    if not _HOMES[name].startswith("gradwire.topology"):  # which needs no torch
        _register()
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def _register() -> None:
    importlib.import_module("gradwire.comms.bootstrap.requirement").require_torch()
    importlib.import_module("gradwire.comms.backend.register").register()


if hasattr(sys.modules.get("torch"), "distributed"):  # not so while torch itself is being imported
    importlib.import_module("gradwire.comms.backend.register").register()
