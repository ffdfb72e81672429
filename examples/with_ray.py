"""Ray Train: Ray starts the workers, `prepare_model` wraps the model in DDP, and one line gives it the hook.

python examples/with_ray.py
"""

import argparse
import tempfile
from pathlib import Path

import ray
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig, get_context, report
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

import gradwire


def train(settings: dict[str, int]) -> None:
    """What every worker does."""
    rank = get_context().get_world_rank()
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    # int8 is for what crosses between nodes; here, on one, `plan="flat"` has it work between all ranks.
    state = gradwire.attach(model, compressor="int8", plan="flat")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    loss = torch.zeros(())
    for _ in range(settings["steps"]):
        optimizer.zero_grad()
        loss = model(torch.randn(32, 64, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()

    saved = {"model": model.module.state_dict(), "hook": state.gathered_state_dict()}  # all ranks gather, rank 0 writes
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            torch.save(saved, Path(folder) / "state.pt")
        checkpoint = Checkpoint.from_directory(folder) if rank == 0 else None
        report({"loss": loss.item(), "gradwire": str(state.report())}, checkpoint=checkpoint)
    state.close()


def main() -> None:
    """Starts two workers on this machine and prints what the first reported."""
    parser = argparse.ArgumentParser(description="gradwire in Ray Train.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("ray-results"))
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": options.steps},
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),  # backend="gradwire" works as well
        run_config=RunConfig(name="gradwire", storage_path=str(options.folder.resolve())),
    )
    result = trainer.fit()
    print(result.metrics["gradwire"])
    print(f"loss {result.metrics['loss']:.3f}; a checkpoint with the states of all ranks: {result.checkpoint.path}")
    ray.shutdown()


if __name__ == "__main__":
    main()
