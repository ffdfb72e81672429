"""One rank of test_adapters.py's training with Accelerate; see conftest.py."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor, nn

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


def main() -> None:
    torch.set_num_threads(1)
    plain, exact = Run().train(), Run("none").train()
    before = Run("int8")
    before.train(0, STEPS // 2)
    before.accelerator.save_state(str(FOLDER / "checkpoint"))
    whole = before.train(STEPS // 2)
    after = Run("int8")
    after.accelerator.load_state(str(FOLDER / "checkpoint"))
    resumed = after.train(STEPS // 2)
    try:
        gradwire.accelerate.attach(after.accelerator, after.model)
        twice = ""
    except ValueError as error:
        twice = str(error)
    found = {
        "exact": torch.equal(exact, plain),
        "compressed": not torch.equal(whole, plain) and bool((whole - plain).abs().max() < 0.01),
        "resumed": torch.equal(resumed, whole),
        "files": sorted(path.name for path in (FOLDER / "checkpoint").glob("custom*")),
        "twice": twice,
    }
    (FOLDER / f"{after.accelerator.process_index}.json").write_text(json.dumps(found))
    after.accelerator.end_training()


if __name__ == "__main__":
    main()
