"""Lightning: one callback, and a checkpoint from which training goes on bit for bit.

torchrun --standalone --nproc-per-node 2 examples/with_lightning.py
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradwire.lightning


class Classifier(LightningModule):
    """A module as it would be without gradwire."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(folder: Path, epochs: int, resume_from: Path | None = None) -> tuple[list[Tensor], Trainer]:
    """Trains from the same start on the same data, and returns the weights and the trainer."""
    torch.manual_seed(0)
    model, inputs = Classifier(), torch.randn(256, 64)
    data = TensorDataset(inputs, inputs[:, :10].argmax(dim=1))
    # int8 is for what crosses between nodes; here, on one, `plan="flat"` has it work between all ranks.
    callback = gradwire.lightning.Callback(compressor="int8", plan="flat")
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=epochs,
        callbacks=[callback, ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=32), ckpt_path=resume_from)
    if trainer.is_global_zero and callback.state is not None:
        print(callback.state.report())
    return [parameter.detach() for parameter in model.parameters()], trainer


def main() -> None:
    """Trains two epochs, then the second once more, from the checkpoint of the first."""
    parser = argparse.ArgumentParser(description="gradwire in Lightning.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("lightning-checkpoints"))
    options = parser.parse_args()
    whole, _ = fit(options.folder, options.epochs)
    resumed, trainer = fit(options.folder / "resumed", options.epochs, options.folder / "epoch=0.ckpt")
    if not all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True)):
        raise SystemExit("the resumed run ended elsewhere")
    if trainer.is_global_zero:
        print("the resumed run ends with the same weights, bit for bit")


if __name__ == "__main__":
    main()
