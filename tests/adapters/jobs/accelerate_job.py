"""One rank of test_adapters.py's training with Accelerate; see conftest.py."""

import json
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gradwire

FOLDER = Path(sys.argv[1])
STEPS = 6


class Run:
    """A model that Accelerate has prepared, with gradwire's hook if a compressor is named."""

    def __init__(self, compressor: str | None = None, **accelerator: object) -> None:
        torch.manual_seed(0)
        buckets = DistributedDataParallelKwargs(bucket_cap_mb=0.02)
        self.accelerator = Accelerator(cpu=True, kwargs_handlers=[buckets], **accelerator)
        model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if compressor is not None:
            self.state = gradwire.accelerate.attach(self.accelerator, self.model, compressor=compressor)

    def train(self, first: int = 0, last: int = STEPS) -> Tensor:
        for step in range(first, last):
            seed = 100 * step + self.accelerator.process_index
            rows = torch.randn(4, 48, generator=torch.Generator().manual_seed(seed))
            self.optimizer.zero_grad()
            self.accelerator.backward(self.model(rows).square().mean())
            self.optimizer.step()
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])


def from_a_loader(folder: Path, resumed: bool = False) -> Tensor:
    """The weights after six batches of a shuffled loader, saved after half of them; or resumed from there."""
    torch.manual_seed(1)
    run = Run("int8")
    rows = torch.randn(64, 48, generator=torch.Generator().manual_seed(1))
    loader = run.accelerator.prepare(torch.utils.data.DataLoader(TensorDataset(rows), batch_size=4, shuffle=True))
    if resumed:
        run.accelerator.load_state(str(folder))
    batches = run.accelerator.skip_first_batches(loader, STEPS // 2) if resumed else loader
    for step, (batch,) in enumerate(batches, STEPS // 2 if resumed else 0):
        run.optimizer.zero_grad()
        run.accelerator.backward(run.model(batch).square().mean())
        run.optimizer.step()
        if step + 1 == STEPS // 2:
            run.accelerator.save_state(str(folder))
        if step + 1 == STEPS:
            break
    return torch.cat([parameter.detach().reshape(-1) for parameter in run.model.parameters()])


def main() -> None:
    torch.set_num_threads(1)
    plain, exact = Run().train(), Run("none").train()
    before = Run("int8")
    before.train(0, STEPS // 2)
    with patch("torch.distributed.gather_object") as gather, patch("torch.distributed.all_gather_object") as gather_all:
        before.accelerator.save_state(str(FOLDER / "checkpoint"))
    assert not gather.called and not gather_all.called  # nothing of the state goes through the network
    whole = before.train(STEPS // 2)
    after = Run("int8")
    after.accelerator.load_state(str(FOLDER / "checkpoint"))
    resumed = after.train(STEPS // 2)
    try:
        gradwire.accelerate.attach(after.accelerator, after.model)
        twice = ""
    except ValueError as error:
        twice = str(error)
    read = from_a_loader(FOLDER / "shuffled")
    found = {
        "shuffled": torch.equal(from_a_loader(FOLDER / "shuffled", resumed=True), read),
        "exact": torch.equal(exact, plain),
        "compressed": not torch.equal(whole, plain) and bool((whole - plain).abs().max() < 0.01),
        "resumed": torch.equal(resumed, whole),
        "files": sorted(path.name for path in (FOLDER / "checkpoint").glob("gradwire*")),
        "twice": twice,
    }
    (FOLDER / f"{after.accelerator.process_index}.json").write_text(json.dumps(found))
    after.accelerator.end_training()


if __name__ == "__main__":
    main()
