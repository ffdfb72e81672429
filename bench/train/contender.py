"""One model in training under one communication hook."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.bench.train.model import ByteTransformer, loss_in_nats

PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 10
HOOKS = "plain, torch-fp16, gradwire, gradwire:COMPRESSOR"

Report = Callable[[], str]


def check_hook(hook: str) -> None:
    """Raises ValueError unless a hook is known; what comes after gradwire's colon is for gradwire to judge.

    Args:
        hook: One of `HOOKS`.
    """
    if hook not in ("plain", "torch-fp16", "gradwire") and not hook.startswith("gradwire:"):
        raise ValueError(f"`--hook`: found {hook!r}, wanted one of {HOOKS}")


def attach_hook(model: DistributedDataParallel, hook: str) -> Report | None:
    """Registers a communication hook.

    Args:
        model: Gets the hook; nothing is registered for `plain`.
        hook: One of `HOOKS`; the word after the colon is the name of a compressor.

    Returns:
        What to call for the hook's own report; None if it has none.

    Raises:
        ValueError: if the hook is unknown.
    """
    check_hook(hook)
    name, _, compressor = hook.partition(":")
    if name == "gradwire":
        state = gradwire.HookState(model, compressor=compressor or None)
        model.register_comm_hook(state, gradwire.comm_hook)
        return lambda: str(state.report())
    if hook == "torch-fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    return None


class NicCounter:
    """Reads the bytes that an interface of this rank's own node has carried."""

    def __init__(self, interface: str | None) -> None:
        """Finds the counters.

        Args:
            interface: For example `eth0`; None to count nothing.
        """
        self._folder = None if interface is None else Path("/sys/class/net", interface, "statistics")

    def read(self) -> torch.Tensor:
        """Returns (sent, received) in bytes: int64, shape (2,); zeros where nothing is counted."""
        if self._folder is None:
            return torch.zeros(2, dtype=torch.int64)
        return torch.tensor([int((self._folder / name).read_text()) for name in ("tx_bytes", "rx_bytes")])


class Contestant:
    """A model, its optimizer and its hook; remembers what each step took."""

    def __init__(self, hook: str, *, steps: int, context: int, nic: NicCounter) -> None:
        """Makes the model (the same one for every hook) and registers the hook.

        Args:
            hook: One of `HOOKS`.
            steps: Length of the learning rate's schedule.
            context: Bytes in a sequence.
            nic: Counts the bytes of each step.
        """
        self.hook = hook
        self.model = DistributedDataParallel(ByteTransformer(context=context))
        self.report = attach_hook(self.model, hook)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: _share_of_peak(step, steps))
        self._nic = nic
        self.losses: list[float] = []
        """Of this rank's batches, in nats per byte."""
        self.seconds: list[float] = []
        self.nic_nbytes: list[torch.Tensor] = []
        """(sent, received) of this rank's node in each step."""

    def take_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Trains on one batch; all ranks together.

        Args:
            inputs: (batch, context), int64.
            targets: As `inputs`, one byte later.
        """
        # The barriers stand outside the clock: nobody's bytes or waits leak into another contestant's step.
        dist.barrier()
        nbytes_before, started = self._nic.read(), time.perf_counter()
        loss = loss_in_nats(self.model, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without annotations
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - started)
        dist.barrier()
        self.nic_nbytes.append(self._nic.read() - nbytes_before)
        self._schedule.step()
        self.losses.append(loss.item())


def _share_of_peak(step: int, steps: int) -> float:
    """The learning rate's share of its peak: a linear rise, then half a cosine down to a tenth."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = min(1.0, (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))
    return 0.55 + 0.45 * math.cos(math.pi * progress)
