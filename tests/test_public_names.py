"""The public names: a change here is a change that users notice, and belongs into the changelog."""

import subprocess
import sys

import gradwire

PUBLIC = [
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


def test_the_public_names_are_these() -> None:
    assert gradwire.__all__ == PUBLIC
    assert all(getattr(gradwire, name).__name__ == name for name in PUBLIC)


def test_the_public_names_for_sharded_models_are_these() -> None:
    assert gradwire.fsdp.__all__ == ["FsdpState", "apply"]


def test_importing_gradwire_alone_imports_no_torch_and_no_cupy() -> None:
    script = (
        "import sys, gradwire, gradwire.topology.readers.detect\n"
        "print([name for name in ('torch', 'cupy') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
