"""The Trainer of Transformers: one callback, and a checkpoint from which training goes on bit for bit.

torchrun --standalone --nproc-per-node 2 examples/with_transformers.py
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import gradwire.transformers


class Classifier(nn.Module):
    """A model as the Trainer wants it: the loss comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss and logits of a batch."""
        logits = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train(folder: Path, steps: int, resume_from: Path | None = None) -> tuple[list[Tensor], Trainer]:
    """Trains from the same start on the same data, and returns the weights and the trainer."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 64)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=steps // 2,
        per_device_train_batch_size=8,
        use_cpu=True,
        ddp_backend="gloo",
        report_to="none",
        disable_tqdm=True,
    )
    rows = [{"inputs": row, "labels": row[:10].argmax()} for row in inputs]
    trainer = Trainer(Classifier(), arguments, train_dataset=rows)
    # int8 is for what crosses between nodes; here, on one, `plan="flat"` has it work between all ranks.
    callback = gradwire.transformers.Callback(trainer, compressor="int8", plan="flat")
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    if trainer.is_world_process_zero() and callback.state is not None:
        print(callback.state.report())
    return [parameter.detach() for parameter in trainer.model.parameters()], trainer


def main() -> None:
    """Trains, then takes the second half of the steps once more, from the checkpoint in the middle."""
    parser = argparse.ArgumentParser(description="gradwire in the Trainer of Transformers.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("transformers-checkpoints"))
    options = parser.parse_args()
    whole, _ = train(options.folder, options.steps)
    middle = options.folder / f"checkpoint-{options.steps // 2}"
    resumed, trainer = train(options.folder / "resumed", options.steps, middle)
    if not all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True)):
        raise SystemExit("the resumed run ended elsewhere")
    if trainer.is_world_process_zero():
        print("the resumed run ends with the same weights, bit for bit")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
