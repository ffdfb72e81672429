"""One rank of test_adapters.py's training with Lightning; see conftest.py."""

import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

import gradwire

FOLDER = Path(sys.argv[1])
EPOCHS = 4


class Model(pl.LightningModule):
    """Three layers; their gradients do not arrive in the order of the buckets that DDP guesses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        rows = batch[0]
        for number in (2, 0, 3, 1):
            rows = torch.relu(self.layers[number](rows)) + rows
        return rows.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train(callbacks: list[pl.Callback], epochs: int = EPOCHS, ckpt_path: str | None = None) -> Tensor:
    model = Model()
    rows = torch.randn(16, 48, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(bucket_cap_mb=0.02),
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=any(isinstance(each, pl.callbacks.ModelCheckpoint) for each in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def main() -> None:
    torch.set_num_threads(1)
    plain = train([])
    exact = train([gradwire.lightning.Callback()])
    saving = pl.callbacks.ModelCheckpoint(FOLDER, filename="{epoch}", save_top_k=-1)
    int8 = gradwire.lightning.Callback(compressor="int8")
    with patch("torch.distributed.gather_object") as gather, patch("torch.distributed.all_gather_object") as gather_all:
        whole = train([int8, saving])
    assert not gather.called and not gather_all.called  # nothing of the state goes through the network
    again, linked = (gradwire.lightning.Callback(compressor="int8") for _ in range(2))
    resumed = train([again], ckpt_path=str(FOLDER / "epoch=1.ckpt"))
    last = pl.callbacks.ModelCheckpoint(FOLDER / "last", filename="{epoch}", save_top_k=1, save_last="link")
    train([gradwire.lightning.Callback(compressor="int8"), last], epochs=2)
    from_last = train([linked], ckpt_path=str(FOLDER / "last" / "last.ckpt"))
    train([gradwire.lightning.Callback(compressor="int8"), last], ckpt_path=str(FOLDER / "last" / "last.ckpt"))
    assert int8.state is not None and again.state is not None
    found = {
        "exact": torch.equal(exact, plain),
        "compressed": not torch.equal(whole, plain) and bool((whole - plain).abs().max() < 0.01),
        "resumed": torch.equal(resumed, whole),
        "linked": torch.equal(from_last, whole),
        "files": sorted(path.name for path in (FOLDER / "last").glob("*gradwire*")),
        "steps": [int8.state.steps, again.state.steps],
    }
    (FOLDER / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
