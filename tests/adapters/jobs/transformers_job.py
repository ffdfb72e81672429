"""One rank of test_adapters.py's training with the Trainer of Transformers; see conftest.py."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import gradwire

FOLDER = Path(sys.argv[1])
STEPS = 6


class Model(nn.Module):
    """What the Trainer asks of a model: a loss under that name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        for number in (2, 0, 3, 1):
            rows = torch.relu(self.layers[number](rows)) + rows
        return {"loss": rows.square().mean()}


def train(compressor: str | None, name: str, resume: str | None = None) -> tuple[Tensor, int]:
    arguments = TrainingArguments(
        output_dir=str(FOLDER / name),
        per_device_train_batch_size=4,
        max_steps=STEPS,
        save_steps=STEPS // 2,
        save_strategy="steps" if compressor == "int8" else "no",
        learning_rate=0.01,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        logging_strategy="no",
    )
    rows = torch.randn(64, 48, generator=torch.Generator().manual_seed(1))
    trainer = Trainer(Model(), arguments, train_dataset=[{"rows": row} for row in rows])
    callback = None
    if compressor is not None:
        callback = gradwire.transformers.Callback(trainer, compressor=compressor)
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    steps = callback.state.steps if callback is not None and callback.state is not None else 0
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainer.model.parameters()]), steps


def main() -> None:
    torch.set_num_threads(1)
    plain, _ = train(None, "plain")
    exact, _ = train("none", "exact")
    whole, steps = train("int8", "whole")
    checkpoint = FOLDER / "whole" / f"checkpoint-{STEPS // 2}"
    resumed, steps_again = train("int8", "resumed", str(checkpoint))
    found = {
        "exact": torch.equal(exact, plain),
        "compressed": not torch.equal(whole, plain) and bool((whole - plain).abs().max() < 0.05),
        "resumed": torch.equal(resumed, whole),
        "steps": [steps, steps_again],
        "files": sorted(path.name for path in checkpoint.glob("gradwire*")),
    }
    (FOLDER / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
