"""What a plain exact hook loads: a feature that is off is not imported; a reader of the hook need not know it."""

import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

MOST_MODULES = {1: 63, 2: 91}
"""Ranks -> modules of ours, packages included, that a rank loads. One rank alone has no links to look up, and two share
memory here. An executor is five of them: launches, ledger, programs, what is alike, and the kind. It was 150 when
every feature was imported by the hook."""

PLAIN = """
import sys
import torch, torch.distributed as dist
from torch import nn
file, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", store=dist.FileStore(file, size), rank=rank, world_size=size)
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
    "gradwire.comms.transport.nccl",
    "gradwire.comms.transport.launch_order",
    "gradwire.comms.plan.nccl_model",
    "gradwire.comms.plan.codec_price",
    "gradwire.comms.plan.packing",
    "gradwire.comms.migration",
    "gradwire.comms.resume",
    "gradwire.comms.step.samples",
    "gradwire.comms.step.deal",
    "gradwire.comms.sparse",
    "gradwire.comms.observe.recorder",
    "gradwire.compressors.stateful",
    "gradwire.compressors.routed",
    "gradwire.compressors.rules",
    "gradwire.compressors.registry",
    "gradwire.compressors.codecs",
    "gradwire.compressors.kernels",
    "gradwire.compressors.optim",
)
"""Modules, and all below them, that only those need who ask for them."""


@pytest.mark.parametrize("size", MOST_MODULES)
def test_a_plain_exact_hook_loads_no_feature_that_is_off(size: int, tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", PLAIN, str(tmp_path / "store"), str(rank), str(size)] for rank in range(size)]
    started = [subprocess.Popen(each, stdout=PIPE, stderr=PIPE, text=True) for each in commands]
    try:
        said = [each.communicate(timeout=300) for each in started]
    finally:
        for each in started:
            each.kill()
    for process, (out, err) in zip(started, said, strict=True):
        assert process.returncode == 0, err
        loaded = out.split()
        needless = [name for name in loaded if any(name == off or name.startswith(off + ".") for off in OFF)]
        assert not needless, f"loaded by a hook that has not asked for them: {needless}"
        assert len(loaded) <= MOST_MODULES[size], f"{len(loaded)} modules: {sorted(loaded)}"
