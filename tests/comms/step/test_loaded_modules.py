"""What a plain exact hook loads: a feature that is off is not imported; a reader of the hook need not know it."""

import subprocess
import sys

MOST_MODULES = 97
"""Of ours, packages included; it was 150 when every feature was imported by the hook."""

PLAIN = """
import sys
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import gradwire
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
state = gradwire.HookState(model)
model.register_comm_hook(state, gradwire.comm_hook)
model(torch.ones(2, 4)).sum().backward()
assert state.report().steps == 1
print(*(name for name in sys.modules if name.partition(".")[0] == "gradwire"))
state.close()
dist.destroy_process_group()
"""

OFF = (
    "gradwire.comms.elastic",
    "gradwire.comms.outer",
    "gradwire.comms.sharded",
    "gradwire.comms.compression",
    "gradwire.comms.autotune.tune",
    "gradwire.comms.autotune.choose",
    "gradwire.comms.autotune.probe",
    "gradwire.comms.observe.trace",
    "gradwire.comms.observe.metrics",
    "gradwire.comms.transport.mpi",
    "gradwire.compressors.registry",
    "gradwire.compressors.codecs",
    "gradwire.compressors.kernels",
    "gradwire.compressors.optim",
)
"""Modules, and all below them, that only those need who ask for them."""


def test_a_plain_exact_hook_loads_no_feature_that_is_off() -> None:
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    needless = [name for name in loaded if any(name == off or name.startswith(off + ".") for off in OFF)]
    assert not needless, f"loaded by a hook that has not asked for them: {needless}"
    assert len(loaded) <= MOST_MODULES, f"{len(loaded)} modules: {loaded}"
