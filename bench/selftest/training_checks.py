"""Checks by three short trainings under DDP (exact, int8, PowerSGD), compared with plain DDP on the same data."""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.bench.selftest.checks import Attempt, Mismatch, NotHere
from gradwire.compressors.kernels.cuda.require import CudaKernelsError, require_cupy

STEPS = 30
BATCH = 64
WIDTH = 512
"""Width of the hidden layer, whose matrices PowerSGD compresses."""
CLASSES = 10
LEARNED = 0.7
"""Largest mean loss of the last five steps, as a share of the first loss, for which a training has learned something;
all of these trainings reach about 0.4."""
EXACT_TOLERANCE = 1e-3
"""Allowed relative difference of the exact hook's loss from plain DDP's in any step: its sums are in another order."""
LOSSY_TOLERANCE = 0.15
"""Largest excess of a training's mean loss in the last five steps over plain DDP's, as a share of the first loss."""

TRAININGS: Mapping[str, Mapping[str, object]] = {
    "exact": {},
    "int8": {"compressor": "int8"},
    "powersgd": {"compressor": "powersgd", "compressor_options": {"rank": 4, "warmup_steps": 0}},
}
"""Name of a training -> options of the hook. The last one tests state that is kept from step to step."""


class TrainingChecks:
    """Checks by trainings on one rank; all ranks run them in the same order.

    Args:
        device: Device of this rank, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._plain: list[float] = []
        self.losses: dict[str, list[float]] = {}
        """Name of a training -> loss of each step, the mean of all ranks."""

    def attempts(self) -> Iterator[tuple[str, Attempt]]:
        """Yields the name and the function of each check; plain DDP comes first, as others are compared with it."""
        yield "plain DDP", self._plain_ddp
        for name, options in TRAININGS.items():
            yield name, partial(self._hooked, name, options)

    def _plain_ddp(self) -> float:
        self._plain = self._train("plain DDP", None)
        return self._judged(self._plain, self._plain)

    def _hooked(self, name: str, options: Mapping[str, object]) -> float:
        if not self._plain:
            raise NotHere("plain DDP has not trained, and its losses are what others are compared with")
        if self._device.type == "cuda" and "compressor" in options:
            try:
                require_cupy(self._device.index)
            except CudaKernelsError as error:
                raise NotHere(str(error)) from None
        losses = self._train(name, options)
        worst = self._judged(losses, self._plain)
        if "compressor" not in options:
            off = [abs(ours - plain) / plain for ours, plain in zip(losses, self._plain, strict=True)]
            worst = max(off)
            if worst > EXACT_TOLERANCE:
                step = off.index(worst)
                raise Mismatch(
                    f"the loss of step {step} is {losses[step]:.6f}; plain DDP has {self._plain[step]:.6f}", worst
                )
        return worst

    def _judged(self, losses: list[float], plain: list[float]) -> float:
        """Returns how much higher the mean of the last losses is than plain DDP's, as a share of the first loss.

        Args:
            losses: Loss of each step.
            plain: Loss of each step under plain DDP.

        Raises:
            Mismatch: The loss did not fall enough, or ended too far above plain DDP's.
        """
        first, last, aim = losses[0], sum(losses[-5:]) / 5, sum(plain[-5:]) / 5
        if not last <= LEARNED * first:
            raise Mismatch(f"the loss went from {first:.4f} to {last:.4f}: nothing was learned", last / first)
        behind = max(0.0, (last - aim) / first)
        if behind > LOSSY_TOLERANCE:
            raise Mismatch(f"the loss ended at {last:.4f}; plain DDP's at {aim:.4f}", behind)
        return behind

    def _train(self, name: str, options: Mapping[str, object] | None) -> list[float]:
        """Trains a small model, and returns the loss of each step, the mean of all ranks. Collective.

        Args:
            name: Name under which the losses are kept in `losses`.
            options: Options of the hook; None for plain DDP.

        Raises:
            Mismatch: The ranks have ended with different weights.
        """
        torch.manual_seed(0)
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)).to(self._device)
        )
        teacher = torch.randn(64, CLASSES, generator=torch.Generator().manual_seed(1))
        generator = torch.Generator().manual_seed(2 + dist.get_rank())
        state = None
        if options is not None:
            state = gradwire.attach(model, plan="hierarchical", **options)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = torch.zeros(STEPS, device=self._device)
        for step in range(STEPS):
            inputs = torch.randn(BATCH, 64, generator=generator)
            labels = (inputs @ teacher).argmax(dim=1)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs.to(self._device)), labels.to(self._device))
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without annotations
            optimizer.step()
            losses[step] = loss.detach()
        if state is not None:
            state.close()
        dist.all_reduce(losses)
        self.losses[name] = (losses / dist.get_world_size()).tolist()
        self._check_alike(model)
        return self.losses[name]

    @staticmethod
    def _check_alike(model: nn.Module) -> None:
        weights = torch.cat([weight.detach().view(-1) for weight in model.parameters()])
        low, high = weights.clone(), weights.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        apart = float((high - low).abs().max())
        if apart or not bool(weights.isfinite().all()):
            raise Mismatch(f"the weights of the ranks differ by up to {apart:g} after {STEPS} steps", apart)
