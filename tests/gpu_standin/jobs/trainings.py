"""Trainings of one model on a CPU and on CUDA, in the same processes: each step's loss, and the bits of the end.

    trainings.py BACKEND CASES     NODES has a letter for each rank; CASES is JSON, a list of [name, settings]

The settings have `kind`, one of KINDS, and what that takes.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist
from gpu_standin.jobs.model import NETS, Layers, Net, digest_of, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import gradwire
import gradwire.fsdp

STEPS = 6
LATE = timedelta(seconds=240)
"""Longer than the test waits: that a busy machine is slow is not to be taken for a deadlock."""
Settings = dict[str, Any]
Result = dict[str, Any]


def net_of(settings: Settings, **arguments: bool) -> Net | Layers:
    """What is trained."""
    return NETS[settings.get("net", "block")](**arguments)


class Run:
    """A training under way: `model` is what is called, `net` what has the parameters; `close` ends it.

    The settings' `net` is one of NETS, "block" by default.
    """

    model: nn.Module
    net: nn.Module
    optimizer: Optimizer

    def close(self) -> None:
        """Lets go of gradwire's communicators."""
        raise NotImplementedError

    def learn(self, device: torch.device, first: int = 0, last: int = STEPS) -> Tensor:
        """Takes the steps from `first` to `last`; returns their losses, float32, on the device."""
        losses = torch.zeros(last - first, device=device)
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss = loss_of(self.model, step, dist.get_rank(), device)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            losses[step - first] = loss.detach()
        return losses


class Hooked(Run):
    """DDP with gradwire's hook, or with the group alone.

    Args:
        device: Where it trains.
        settings: `ddp` has options of DistributedDataParallel; `momentum` is the optimizer's; `hook` has options of
            gradwire's hook, and without it there is none.
    """

    def __init__(self, device: torch.device, settings: Settings) -> None:
        options = settings.get("ddp", {})
        self.net = net_of(settings, skips=bool(options.get("find_unused_parameters"))).to(device)
        ids = [device.index] if device.type == "cuda" else None
        self.model = DistributedDataParallel(self.net, device_ids=ids, bucket_cap_mb=0.02, **options)
        self.optimizer = SGD(self.model.parameters(), lr=0.05, momentum=settings.get("momentum", 0.0))
        self.state: gradwire.HookState | None = None
        if "hook" in settings:
            self.state = gradwire.attach(self.model, hostname=node(), timeout=LATE, **settings["hook"])

    def close(self) -> None:
        """See Run."""
        if self.state is not None:
            self.state.close()


class Sharded(Run):
    """FSDP2 over all ranks, or over pairs with two `replicas`; `apply` has gradwire's options."""

    def __init__(self, device: torch.device, settings: Settings) -> None:
        net = net_of(settings, normed=False).to(device)
        self.model = self.net = net
        pairs = settings.get("replicas", False)
        shape, names = ((2, 2), ("replicate", "shard")) if pairs else ((4,), ("shard",))
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        for name in net.sharded:
            fully_shard(net.get_submodule(name), mesh=mesh["shard"])
        fully_shard(net, mesh=mesh["shard"])
        replicas = mesh["replicate"] if pairs else None
        options = settings["apply"]
        self.state = gradwire.fsdp.apply(self.net, replicas=replicas, hostname=node(), timeout=LATE, **options)
        self.optimizer = SGD(self.net.parameters(), lr=0.05)

    def close(self) -> None:
        """See Run."""
        self.state.close()


class Apart(Run):
    """Units that train by themselves and exchange what they have learned.

    `outer` has the options of Outer; `normed`: DDP broadcasts running means inside a unit meanwhile.
    """

    def __init__(self, device: torch.device, settings: Settings) -> None:
        self.net = net_of(settings, normed=settings.get("normed", False)).to(device)
        self.optimizer = SGD(self.net.parameters(), lr=0.05)
        self.outer = gradwire.Outer(self.net, self.optimizer, hostname=node(), timeout=LATE, **settings["outer"])
        self.model = self.outer.model

    def close(self) -> None:
        """Averages the units, too."""
        self.outer.synchronize()
        self.outer.close()


RUNS: dict[str, Callable[[torch.device, Settings], Run]] = {"hooked": Hooked, "sharded": Sharded, "apart": Apart}


def node() -> str:
    """The name of this rank's node."""
    return os.environ["NODES"][dist.get_rank()]


def result(losses: Tensor, model: nn.Module, **more: Any) -> Result:
    """What a training came to on this rank: losses to the last bit, and what its weights are."""
    return {"losses": [loss.hex() for loss in losses.tolist()], "bits": digest_of(model.parameters()), **more}


def straight(device: torch.device, settings: Settings) -> Result:
    """One of RUNS from its beginning to its end."""
    run = RUNS[settings["kind"]](device, settings)
    losses = run.learn(device)
    run.close()
    return result(losses, run.net)


def resumed(device: torch.device, settings: Settings) -> Result:
    """The same with a restart in the middle; `whole` is what it ends with without one."""
    whole, before, after = (Hooked(device, settings) for _ in range(3))
    whole.learn(device)
    first = before.learn(device, 0, STEPS // 2)
    file = BytesIO()
    assert before.state is not None
    assert after.state is not None
    parts = {"model": before.net.state_dict(), "optimizer": before.optimizer.state_dict()}
    torch.save(parts | {"hook": before.state.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True, map_location=device)
    after.net.load_state_dict(saved["model"])
    after.optimizer.load_state_dict(saved["optimizer"])
    after.state.load_state_dict(saved["hook"])
    second = after.learn(device, STEPS // 2, STEPS)
    for run in (whole, before, after):
        run.close()
    return result(torch.cat([first, second]), after.net, whole=digest_of(whole.net.parameters()))


def mixed(device: torch.device, settings: Settings) -> Result:
    """Autocast to `dtype`, and a GradScaler that begins too high where that is float16."""
    run = Hooked(device, settings)
    half = settings["dtype"] == "float16"
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**19, growth_interval=2, enabled=half)
    if half and "compressor" in settings["hook"]:
        assert run.state is not None
        run.state.watch(scaler)  # what a compressor holds back follows the scale
    losses, scales = torch.zeros(settings["steps"], device=device), list[float]()
    for step in range(settings["steps"]):
        run.optimizer.zero_grad()
        with torch.autocast(device.type, dtype=getattr(torch, settings["dtype"])):
            loss = loss_of(run.model, step, dist.get_rank(), device)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(run.optimizer)
        scaler.update()
        losses[step] = loss.detach()
        scales.append(scaler.get_scale())
    run.close()
    return result(losses, run.net, scales=scales)


KINDS: dict[str, Callable[[torch.device, Settings], Result]] = {
    **dict.fromkeys(RUNS, straight),
    "resumed": resumed,
    "mixed": mixed,
}


def main(backend: str, cases: str) -> None:
    warnings.simplefilter("ignore")
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group(backend, timeout=LATE)
    for name, settings in json.loads(cases):
        training = KINDS[settings["kind"]]
        found = {kind: training(torch.device(kind), settings) for kind in ("cpu", f"cuda:{rank}")}
        print(json.dumps([name, {kind.partition(":")[0]: one for kind, one in found.items()}]), flush=True)
    dist.barrier()  # rank 0 serves the store
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
