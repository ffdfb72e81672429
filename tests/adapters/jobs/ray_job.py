"""test_adapters.py's training with Ray Train: two workers, one of which fails once; writes `found.json`."""

import json
import sys
import tempfile
from pathlib import Path

import ray
import torch
from ray import train as ray_train
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import Tensor, nn

import gradwire

FOLDER = Path(sys.argv[1])
STEPS = 4


class Run:
    """A model that Ray has prepared, with gradwire's hook if a compressor is named."""

    def __init__(self, rank: int, compressor: str | None = None) -> None:
        self.rank = rank
        torch.manual_seed(0)
        self.model = prepare_model(nn.Sequential(*(nn.Linear(48, 48) for _ in range(4))))
        if compressor is not None:
            self.state = gradwire.attach(self.model, compressor=compressor, hostname=f"node{rank}")

    def step(self, number: int) -> Tensor:
        rows = torch.randn(4, 48, generator=torch.Generator().manual_seed(100 * number + self.rank))
        self.model.zero_grad()
        self.model(rows).square().mean().backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sub_(0.05 * parameter.grad)
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])

    def train(self) -> Tensor:
        return [self.step(number) for number in range(STEPS)][-1]

    def report(self, step: int, found: dict[str, object]) -> None:
        """Rank 0 writes the checkpoint, with the states of all ranks in it."""
        hook = self.state.gathered_state_dict()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if self.rank == 0:
                file = Path(folder) / "checkpoint.pt"
                torch.save({"model": self.model.state_dict(), "hook": hook, "step": step}, file)
                checkpoint = ray_train.Checkpoint.from_directory(folder)
            ray_train.report(found, checkpoint=checkpoint)

    def resume(self, checkpoint: ray_train.Checkpoint) -> int:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.state.load_state_dict(saved["hook"])
        return int(saved["step"])


def work() -> None:
    """A worker: trains with a failure in the middle, and, when that is through, without."""
    torch.set_num_threads(1)
    rank = ray_train.get_context().get_world_rank()
    run, latest = Run(rank, "int8"), ray_train.get_checkpoint()
    first = run.resume(latest) if latest is not None else 0
    for number in range(first, STEPS):
        if number == STEPS // 2 and latest is None:
            raise RuntimeError("this worker fails once")
        resumed = run.step(number)
        if number + 1 < STEPS:
            run.report(number + 1, {})
    plain, exact, whole = Run(rank).train(), Run(rank, "none").train(), Run(rank, "int8").train()
    found = {
        "exact": torch.equal(exact, plain),
        "compressed": not torch.equal(whole, plain) and bool((whole - plain).abs().max() < 0.01),
        "resumed": torch.equal(resumed, whole),
        "first": first,
        "backend": torch.distributed.get_backend(),
    }
    run.report(STEPS, found)


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    result = TorchTrainer(
        work,
        torch_config=TorchConfig(backend="gradwire"),
        scaling_config=ray_train.ScalingConfig(num_workers=2),
        run_config=ray_train.RunConfig(
            name="job", storage_path=str(FOLDER / "ray"), failure_config=ray_train.FailureConfig(max_failures=1)
        ),
    ).fit()
    ray.shutdown()
    names = ("exact", "compressed", "resumed", "first", "backend")
    (FOLDER / "found.json").write_text(json.dumps({name: result.metrics[name] for name in names}))


if __name__ == "__main__":
    main()
