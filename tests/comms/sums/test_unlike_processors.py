"""Ranks on unlike processors: torch rounds otherwise there (fused multiply-add or not), what ranks share must not."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.bench.emulation.launch import held_port

SETTINGS: dict[str, dict[str, Any]] = {
    "average": {},
    "sgd": {"lr": 0.7, "compressor": None},
    "momentum": {"lr": 0.7, "momentum": 0.9, "nesterov": False},
    "nesterov": {"lr": 0.7, "momentum": 0.9, "nesterov": True},
}
"""Of the outer SGD."""

HOOKS: dict[str, dict[str, Any]] = {
    "exact": {},
    "int8": {"compressor": "int8"},
    "waterfill4": {"compressor": "waterfill4"},
    "onebit": {"compressor": "onebit", "compressor_options": {"warmup_steps": 3}},
    "dgc": {"compressor": "dgc", "compressor_options": {"warmup_steps": 3}},
    "powersgd": {"compressor": "powersgd", "compressor_options": {"warmup_steps": 2}},
    "powersgd+int8": {"compressor": "powersgd+int8", "compressor_options": {"warmup_steps": 2}},
}
"""Options of the hook, each with what its ranks keep alike: units, factors, masks, densities."""


def digest(tensors: Iterable[Tensor]) -> str:
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()[:16]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(67, 129), nn.Tanh(), nn.Linear(129, 33), nn.Linear(33, 5))


def outer_digests(rank: int, options: dict[str, Any]) -> list[str]:
    """Anchors after each of 14 steps, then parameters after a reload and `synchronize()`."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    outer = gradwire.Outer(model, optimizer, every=4, fragments=2, delay=1, inside="none", **options)
    draw, found = torch.Generator().manual_seed(rank), []
    for _ in range(14):
        optimizer.zero_grad()
        model(torch.randn(8, 67, generator=draw)).square().mean().backward()
        optimizer.step()
        kept = [flat for part in outer.exchange.fragments for flat in (part.anchor, part.momentum) if flat is not None]
        found.append(digest(kept))
    outer.load_state_dict(outer.state_dict())
    outer.synchronize()
    outer.close()
    return [*found, digest(model.parameters())]


def hook_digests(rank: int, options: dict[str, Any]) -> list[str]:
    """The averaged gradients of six steps; no optimizer, which would round otherwise itself."""
    model = DistributedDataParallel(build())
    state = gradwire.HookState(model, **options)
    model.register_comm_hook(state, gradwire.comm_hook)
    draw, found = torch.Generator().manual_seed(rank), []
    for _ in range(6):
        model.zero_grad()
        model(torch.randn(8, 67, generator=draw)).square().mean().backward()
        found.append(digest(each.grad for each in model.parameters() if each.grad is not None))
    state.close()
    return found


def main() -> None:
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {"processor": [torch.backends.cpu.get_cpu_capability()]}
    found |= {f"outer {name}": outer_digests(rank, options) for name, options in SETTINGS.items()}
    found |= {f"hook {name}": hook_digests(rank, options) for name, options in HOOKS.items()}
    Path(sys.argv[1], str(rank)).write_text(json.dumps(found))
    dist.destroy_process_group()


def test_ranks_on_unlike_processors_keep_the_same_bits(tmp_path: Path) -> None:
    with held_port() as port:
        common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        common |= {"OMP_NUM_THREADS": "1", "GRADWIRE_NIC_BYTES_PER_SECOND": "assume"}
        own: list[dict[str, str]] = [{"ATEN_CPU_CAPABILITY": "default"}, {}]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(tmp_path)],
                env=common | {"RANK": str(rank), "GRADWIRE_HOSTNAME": "ab"[rank], **own[rank]},
            )
            for rank in (0, 1)
        ]
        try:
            assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
        finally:
            for each in ranks:
                each.kill()
    one, other = (json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1))
    if one.pop("processor") == other.pop("processor"):
        pytest.skip("this processor has no other instruction set that torch would choose")
    for name, digests in one.items():
        assert digests == other[name], f"{name}: other bits on the two ranks"
    assert len(one["outer nesterov"]) == 15 and len(set(one["outer nesterov"])) >= 5


if __name__ == "__main__":
    main()
