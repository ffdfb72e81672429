"""What a plain exact hook loads: a feature that is off is not imported; a reader of the hook need not know it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.forked import TORCH, ForkServer, fork_server

MOST_MODULES = {1: 60, 2: 71}
"""Ranks -> modules of ours with code in them, the compiled one too, that a rank loads. Ranks of one host have no links
to look up; two share memory, watch each other, and learn what their link gives. An executor is six of them: launches,
stats, failures, programs, what is alike, and the kind. It was 150 when the hook imported every feature;
counted 2026-11-29: 59 and 70 (two validate what other processes send, one finds the model's group), and one more where
a variable of an option is set, as in these tests: it explains variables that nothing reads."""

PLAIN = """
import pathlib, sys
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
import gradwire
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
state = gradwire.HookState(model)
model.register_comm_hook(state, gradwire.comm_hook)
for _ in range(3):
    model(torch.randn(4, 64)).sum().backward()
assert state.report().steps == 3
ours = [name for name in sys.modules if name.partition(".")[0] == "gradwire"]
print(*(name for name in ours if pathlib.Path(sys.modules[name].__file__).read_bytes().count(b"\\n") > 1))
state.close()
dist.destroy_process_group()
"""

OFF = (
    "gradwire.comms.elastic",
    "gradwire.comms.outer",
    "gradwire.comms.sharded",
    "gradwire.comms.compression",
    "gradwire.comms.autotune",
    "gradwire.comms.links.probe",
    "gradwire.comms.observe.trace",
    "gradwire.comms.observe.metrics",
    "gradwire.comms.transport.mpi",
    "gradwire.comms.transport.nccl",
    "gradwire.comms.transport.launch_order",
    "gradwire.comms.plan.nccl_model",
    "gradwire.comms.plan.codec_price",
    "gradwire.comms.plan.payloads",
    "gradwire.comms.migration",
    "gradwire.comms.resume",
    "gradwire.comms.step.samples",
    "gradwire.comms.run.sparse",
    "gradwire.comms.observe.recorder",
    "gradwire.compressors.stateful",
    "gradwire.compressors.composite",
    "gradwire.compressors.rules",
    "gradwire.compressors.registry",
    "gradwire.compressors.codecs",
    "gradwire.compressors.kernels",
    "gradwire.compressors.optim",
)
"""Modules, and all below them, that only those need who ask for them."""


@pytest.fixture(scope="module")
def ranks_of_torch() -> Iterator[ForkServer]:
    """Ranks that have torch, and nothing of ours."""
    with fork_server(TORCH) as server:
        yield server


@pytest.mark.parametrize("size", MOST_MODULES)
def test_a_plain_exact_hook_loads_no_feature_that_is_off(size: int, ranks_of_torch: ForkServer, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    done = ranks_of_torch.run(script, [], size, tmp_path)
    assert done.statuses == [0] * size, done.errors
    for out in done.outputs:
        loaded = out.split()
        needless = [name for name in loaded if any(name == off or name.startswith(off + ".") for off in OFF)]
        assert not needless, f"loaded by a hook that has not asked for them: {needless}"
        assert 0 < len(loaded) <= MOST_MODULES[size], f"{len(loaded)} modules: {sorted(loaded)}"
