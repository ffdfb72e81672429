"""What every rank does for test_checkpoint.py under `torchrun --max-restarts 1`.

Trains without interruption, then again, saving each step; a rank kills itself in the middle of the second run. After
the restart all ranks go on from the last checkpoint. Writes into the folder of the command line whether the weights
are the same, bit for bit.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

import gradwire

STEPS, KILLED_BEFORE = 5, 3
RESTARTS = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
FOLDER = Path(sys.argv[1])


class Run:
    """A model and its hook, which calls each rank a node."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(48, 48) for _ in range(3)]
        self.model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.01)
        self.state = gradwire.HookState(self.model, compressor="int4", hostname=f"node{dist.get_rank()}")
        self.model.register_comm_hook(self.state, gradwire.comm_hook)

    def step(self, number: int) -> Tensor:
        rows = torch.randn(4, 48, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))
        self.model.zero_grad()
        self.model(rows).square().mean().backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    whole, again, first = Run(), Run(), 0
    expected = [whole.step(number) for number in range(STEPS)][-1]
    latest = FOLDER / "latest.txt"
    if latest.exists():
        first = int(latest.read_text())
        load({"model": again.model, "hook": again.state}, checkpoint_id=FOLDER / str(first))
    for number in range(first, STEPS):
        if number == KILLED_BEFORE and RESTARTS == 0 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        found = again.step(number)
        save({"model": again.model, "hook": again.state}, checkpoint_id=FOLDER / str(number + 1))
        if dist.get_rank() == 0:
            latest.write_text(str(number + 1))
    verdict = "the same" if torch.equal(found, expected) else "other weights"
    (FOLDER / f"{dist.get_rank()}.txt").write_text(f"restart {RESTARTS}, step {first}: {verdict}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
