"""What every rank of one job does for test_wrap.py: trains one model under many fusion plans.

Run as a script under torchrun's environment variables; NODES gives each rank's node as a letter. The first argument is
a folder for results, one JSON file a rank.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

import gradwire
from gradwire.comms.fusion import FusionPlan
from gradwire.comms.hook import HookState

RANK = int(os.environ["RANK"])
NODE = os.environ["NODES"][RANK]
FOLDER = Path(sys.argv[1])


class Branches(nn.Module):
    """Layers of which one is not used in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
        self.sometimes = nn.Linear(64, 64)

    def forward(self, rows: torch.Tensor, use_all: bool = True) -> torch.Tensor:
        rows = self.layers(rows)
        return self.sometimes(rows) if use_all else rows


def train(
    steps: int,
    plans: list[FusionPlan] | None = None,
    skip: bool = False,
    ddp: dict[str, object] | None = None,
    batches: int | None = None,
    **options: object,
) -> tuple[str, HookState]:
    """Trains and returns a digest of every bit of the parameters."""
    torch.manual_seed(0)
    model, state = gradwire.wrap(Branches(), base_bucket_mb=0.03, ddp_options=ddp, hostname=NODE, **options)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with Join([model], enable=batches is not None):
        for step in range(batches if batches is not None else steps):
            generator = torch.Generator().manual_seed(1000 * step + RANK)
            optimizer.zero_grad()
            model(torch.randn(8, 64, generator=generator), not skip or step % 2 == 0).square().mean().backward()
            optimizer.step()
            if plans:
                state.fuse(plans[step % len(plans)])
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(bits).hexdigest(), state


def main() -> None:
    dist.init_process_group("gloo")
    changing = [
        FusionPlan(),
        FusionPlan(threshold_nbytes=1 << 30),
        FusionPlan(threshold_nbytes=40_000),
        FusionPlan(piece_nbytes=5000),
        FusionPlan(threshold_nbytes=70_000, piece_nbytes=999),
    ]
    found: dict[str, object] = {}
    found["small"], state = train(10, fusion=0.0001)
    found["small_launches"] = state.report().buckets
    found["all"], state = train(10, fusion=25)
    found["all_launches"] = state.report().buckets
    found["changing"], _ = train(10, changing, fusion=0.05)
    found["unused"], state = train(10, skip=True, ddp={"find_unused_parameters": True}, fusion=0.05)
    found["unused_again"], _ = train(10, changing, skip=True, ddp={"find_unused_parameters": True}, fusion=0.0001)
    found["unused_steps"] = state.steps
    found["joined"], _ = train(10, batches=4 + RANK, fusion=0.05)
    found["joined_again"], _ = train(10, batches=4 + RANK, fusion=25)
    found["calculated"], _ = train(12, fusion="auto:0.05", plan="hierarchical")
    found["not_calculated"], _ = train(12, fusion=0.05, plan="hierarchical")
    kept: dict[str, Any] = {"fusion": f"{FOLDER}/profile{RANK}.json:0.05", "plan": "hierarchical"}
    found["searched"], _ = train(12, **kept)
    found["kept"], state = train(12, **kept)
    if RANK == 0:  # each compressor is timed on this machine, for seconds
        found["advice"] = str(state.advise())
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


main()
