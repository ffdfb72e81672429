"""A codec of one's own, in twenty lines: float8 with one scale, trained with residuals and beside an exact run.

    torchrun --standalone --nproc-per-node 2 examples/own_codec.py

Only what crosses the network is compressed, so each process here calls itself a node of its own.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


class Float8:
    """Four exponent and three mantissa bits for each element, and four bytes of scale."""

    def wire_nbytes(self, numel: int) -> int:
        """Bytes of the payload; they depend on `numel` alone, so that all ranks expect the same."""
        return 4 + numel

    def encode(self, flat: Tensor, payload: Tensor) -> None:
        """Writes `flat` (float32) into `payload` (uint8, of `wire_nbytes(flat.numel())` elements)."""
        scale = flat.abs().amax().clamp(min=1e-30) / torch.finfo(torch.float8_e4m3fn).max
        payload[:4] = scale.view(1).view(torch.uint8)
        payload[4:] = (flat / scale).to(torch.float8_e4m3fn).view(torch.uint8)

    def decode(self, payload: Tensor, flat: Tensor) -> None:
        """Writes what `payload` stands for into `flat`: the same bits on every rank, so nothing random here."""
        scale = payload[:4].clone().view(torch.float32)
        flat.copy_(payload[4:].view(torch.float8_e4m3fn).float() * scale)


def train(compressor: str | None, steps: int, device: str) -> tuple[float, float]:
    """Trains from the same start on the same data, and returns (last loss, bytes that a step sent)."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(layers.to(device))
    state = gradwire.HookState(model, compressor=compressor, hostname=f"node{dist.get_rank()}")
    model.register_comm_hook(state, gradwire.comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    teacher, loss = torch.randn(64, 10), torch.zeros(())
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        inputs = torch.randn(32, 64, generator=generator)
        optimizer.zero_grad()
        labels = (inputs @ teacher).argmax(dim=1)
        loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
    sent = sum(row.wire_nbytes for row in state.report().rows) / steps
    state.close()
    return loss.item(), sent


def main() -> None:
    """Registers the codec on every rank, before a state is made, and compares."""
    parser = argparse.ArgumentParser(description="A codec of one's own.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    gradwire.register_codec("float8", Float8)
    for compressor in (None, "float8"):
        loss, sent = train(compressor, options.steps, options.device)
        if dist.get_rank() == 0:
            print(f"{compressor or 'exact':>7}: loss {loss:.3f}, {sent / 1e3:.1f} kB sent a step", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
