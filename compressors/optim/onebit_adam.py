"""Adam whose second stage sends one bit an element."""

import logging
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradwire.compressors.optim.onebit_optimizer import FlatGroup, OneBitOptimizer
from gradwire.compressors.optim.peers import Peers

log = logging.getLogger("gradwire")


class OneBitAdam(OneBitOptimizer):
    """1-bit Adam: torch's AdamW until `freeze_step`, then momentum SGD with its step sizes of that moment.

    Both moments are corrected for having begun at zero, as torch's are and the paper's are not: a learning rate found
    for Adam is right here too. Without it betas[1] = 0.999 takes steps up to 6.6 times as long in the first stage, and
    freezes a variance whose steps are 2.6 times too long for good after 160 steps.

    Args:
        parameters: As for any torch optimizer; float32.
        group: The ranks that train together: a process group of torch; None is the default one.
        freeze_step: Steps of the first, dense stage; 15 to 20 percent of all steps is usual.
        lr: Learning rate.
        betas: Decay of the first and second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled: pulls the parameters towards zero by lr * weight_decay a step.

    Source: Tang et al., 1-bit Adam, ICML 2021, algorithm 1; Kingma and Ba, Adam, ICLR 2015, section 3 (correction).
    """

    bias_corrected = True

    def __init__(
        self,
        parameters: Iterable[Tensor],
        group: Peers | dist.ProcessGroup | None = None,
        *,
        freeze_step: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, group, defaults, freeze_step)
        log.warning(
            "OneBitAdam is known to end behind Adam in short runs: a small transformer by 0.03 bits a byte after 800 "
            "steps (docs/results/convergence.md). Watch the result against a dense run"
        )

    def apply(self, entry: dict[str, Any], flat: FlatGroup, last_momentum: Tensor, frozen: bool) -> None:
        """See `OneBitOptimizer.apply`."""
        beta1, beta2 = entry["betas"]
        variance = flat.variance if frozen else flat.variance / (1.0 - beta2 ** (self.steps + 1))
        update = flat.momentum / (1.0 - beta1 ** (self.steps + 1)) / (variance.sqrt() + entry["eps"])
        at = 0
        for parameter in entry["params"]:
            part = update[at : at + parameter.numel()].view_as(parameter)
            parameter.mul_(1.0 - entry["lr"] * entry["weight_decay"]).sub_(part, alpha=entry["lr"])
            at += parameter.numel()
