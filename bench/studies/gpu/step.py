"""Measures what the hook costs a training step on one rank, and whether backward waits for the device.

A residual network of 50 layers takes steps on one device in a world of one rank: in turns with a hook that hands every
bucket back at once, and with gradwire's. The difference is what the hook itself puts on the compute stream.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.bootstrap.compat import GradBucket, HashStore

BLOCKING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
"""Calls of the CUDA runtime in which a thread waits for the device."""


class Bottleneck(nn.Module):
    """Adds three convolutions to a shortcut.

    Args:
        inputs: Channels of the input.
        width: Channels of the middle convolution; the output has four times as many.
        stride: Stride of the middle convolution and of the shortcut.

    Source: He et al., Deep Residual Learning (CVPR 2016), figure 5, right.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for source, outputs, kernel, step in (
            (inputs, width, 1, 1),
            (width, width, 3, stride),
            (width, 4 * width, 1, 1),
        ):
            layers += [
                nn.Conv2d(source, outputs, kernel, step, kernel // 2, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
            ]
        self.path = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, inputs, height, width) to (batch, 4 * width, height / stride, width / stride)."""
        return torch.relu(self.path(x) + self.shortcut(x))


def residual_network() -> nn.Sequential:
    """Makes ResNet-50, with 25,557,032 parameters.

    Source: He et al., Deep Residual Learning (CVPR 2016), table 1 (50-layer).
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for blocks, width, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


@dataclass(frozen=True, slots=True)
class StepCost:
    """Holds the seconds of a step without and with gradwire's hook, as `measure` found them."""

    bare_seconds: float
    """Median of a step whose hook does nothing."""
    hook_seconds: float
    """Median of a step with gradwire's hook."""
    blocking: tuple[str, ...]
    """Calls that wait for the device within one forward and backward pass with gradwire's hook."""

    @property
    def share(self) -> float:
        """The hook's cost as a share of the step without it; negative if the step became faster."""
        return self.hook_seconds / self.bare_seconds - 1.0


def nothing(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Hands the bucket back at once, as a DDP hook; `state` is not used."""
    flat = bucket.buffer()
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])
    done.set_result(flat)
    return done


class _TimedModel:
    """Wraps a network in DDP and times its forward and backward pass on random images."""

    def __init__(self, network: nn.Module, device: torch.device, image: int, batch: int) -> None:
        self.model = DistributedDataParallel(
            network.to(device),
            gradient_as_bucket_view=True,
            forward_sync_buffers=False,
        )
        self.images = torch.randn(batch, 3, image, image, device=device)

    def step(self) -> None:
        self.model.zero_grad()
        self.model(self.images).sum().backward()

    def seconds(self) -> float:
        """Returns the seconds of one step, with the device idle before and after it."""
        _finish(self.images)
        start = time.perf_counter()
        self.step()
        _finish(self.images)
        return time.perf_counter() - start


def _finish(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def measure(
    device: torch.device,
    make: Callable[[], nn.Module] = residual_network,
    *,
    image: int = 224,
    batch: int = 64,
    rounds: int = 20,
) -> StepCost:
    """Measures steps with a hook that does nothing and with gradwire's, in turns, in a world of this process alone.

    Args:
        device: Device to train on.
        make: Makes the network.
        image: Height and width of the images, in pixels.
        batch: Images a step.
        rounds: Timed steps with each hook, after three that are not timed.

    Raises:
        RuntimeError: torch.distributed is initialised already.
    """
    if dist.is_initialized():
        raise RuntimeError("torch.distributed is initialised: this measurement makes a world of one rank of its own")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        bare, hooked = (_TimedModel(make(), device, image, batch) for _ in range(2))
        bare.model.register_comm_hook(None, nothing)
        state = gradwire.attach(hooked.model)
        timed = [(bare.seconds(), hooked.seconds()) for _ in range(rounds + 3)][3:]  # the first ones build buckets
        blocking = _blocking(hooked)
        state.close()
    finally:
        dist.destroy_process_group()
    bare_seconds, hook_seconds = (statistics.median(each) for each in zip(*timed, strict=True))
    return StepCost(bare_seconds, hook_seconds, blocking)


def _blocking(model: _TimedModel) -> tuple[str, ...]:
    with torch.profiler.profile() as trace:
        model.step()
    return tuple(event.name for event in trace.events() or () if event.name in BLOCKING)
