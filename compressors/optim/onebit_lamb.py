"""LAMB whose second stage sends one bit an element."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.compressors.optim.onebit_optimizer import FlatGroup, OneBitOptimizer
from gradwire.compressors.optim.peers import Peers

COEFFICIENT_DECAY = 0.9
"""Of the running mean of a layer's coefficient, which the second stage starts from."""
COEFFICIENT_RANGE = (0.01, 10.0)
"""A layer's coefficient |w| / |update| is kept in here."""
FACTOR_RANGE = (0.5, 4.0)
"""How far the second stage may move a coefficient from the frozen one."""
FACTOR_STEP = 0.1
"""How far, in proportion, one step may move it. Source of all four: Li et al., arXiv 2104.06069, section 5.1."""


@dataclass(slots=True)
class Layers:
    """Coefficients of each parameter, and a second moment that still follows the gradients in the second stage."""

    coefficients: list[float] = field(default_factory=list)
    """Running mean of |w| / |update| for each parameter; frozen in the second stage."""
    factors: list[float] = field(default_factory=list)
    """What the second stage multiplied each coefficient by in the last step."""
    fresh_variance: Tensor = field(default_factory=lambda: torch.empty(0))
    """Second moment of the gradients, laid out as the flat group's."""


class OneBitLamb(OneBitOptimizer):
    """1-bit LAMB: LAMB until `freeze_step`, then frozen variance and coefficients corrected by a fresh variance.

    The fresh variance follows the gradient that the change of the common momentum reveals, so that it is the same on
    all ranks and costs no byte. Units of the elements take the place of the paper's scaling of layers to one magnitude.

    Args:
        parameters: As for any torch optimizer; float32.
        group: The ranks that train together: a process group of torch; None is the default one.
        freeze_step: Steps of the first, dense stage.
        lr: Learning rate.
        betas: Decay of the first and second moment.
        eps: Added to the root of the second moment.
        weight_decay: Added to the update before its norm is taken.

    Source: Li et al., 1-bit LAMB, HiPC 2022 (arXiv 2104.06069), algorithm 1.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        group: Peers | dist.ProcessGroup | None = None,
        *,
        freeze_step: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, group, defaults, freeze_step)
        self.layers = [
            Layers([0.0] * len(entry["params"]), [1.0] * len(entry["params"])) for entry in self.param_groups
        ]

    def apply(self, entry: dict[str, Any], flat: FlatGroup, last_momentum: Tensor, frozen: bool) -> None:
        """See `OneBitOptimizer.apply`."""
        layers = self.layers[next(i for i, other in enumerate(self.flats) if other is flat)]
        if frozen:
            self._follow(entry, flat, last_momentum, layers)
        else:
            layers.fresh_variance = flat.variance
        at = 0
        for number, parameter in enumerate(entry["params"]):
            run = slice(at, at + parameter.numel())
            at = run.stop
            denominator = flat.variance[run].sqrt() + entry["eps"]
            plain = flat.momentum[run] / denominator
            update = plain + entry["weight_decay"] * parameter.view(-1)
            if frozen:
                fresh = layers.fresh_variance[run].sqrt() + entry["eps"]
                coefficient = self._corrected(layers, number, float((denominator / fresh).max()), plain, update)
            else:
                coefficient = _coefficient(parameter, update)
                mean = layers.coefficients[number]
                layers.coefficients[number] = COEFFICIENT_DECAY * mean + (1.0 - COEFFICIENT_DECAY) * coefficient
            parameter.sub_(update.view_as(parameter), alpha=entry["lr"] * coefficient)

    def _follow(self, entry: dict[str, Any], flat: FlatGroup, last_momentum: Tensor, layers: Layers) -> None:
        beta1, beta2 = entry["betas"]
        gradient = (flat.momentum - beta1 * last_momentum) / (1.0 - beta1)
        layers.fresh_variance = torch.addcmul(layers.fresh_variance * beta2, gradient, gradient, value=1.0 - beta2)

    def _corrected(self, layers: Layers, number: int, factor: float, plain: Tensor, update: Tensor) -> float:
        """Returns the frozen coefficient times the ratio of frozen to fresh step size, both kept within limits."""
        norm = float(torch.linalg.vector_norm(update))
        share = min(1.0, float(torch.linalg.vector_norm(plain)) / norm) if norm else 1.0
        factor = factor * share + (1.0 - share)  # weight decay has no variance to correct for
        factor = min(max(factor, FACTOR_RANGE[0]), FACTOR_RANGE[1])
        last = layers.factors[number]
        factor = min(max(factor, last * (1.0 - FACTOR_STEP)), last * (1.0 + FACTOR_STEP))
        layers.factors[number] = factor
        return layers.coefficients[number] * factor

    def state_dict(self) -> dict[str, Any]:
        """See `OneBitOptimizer.state_dict`; the layers' numbers are added."""
        state = super().state_dict()
        state["onebit"]["layers"] = [
            {
                "coefficients": list(layer.coefficients),
                "factors": list(layer.factors),
                "fresh_variance": layer.fresh_variance.clone(),
            }
            for layer in self.layers
        ]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `OneBitOptimizer.load_state_dict`."""
        saved = (state_dict.get("onebit") or {}).get("layers")
        if saved is None or [len(layer["factors"]) for layer in saved] != [len(layer.factors) for layer in self.layers]:
            raise ValueError("`state_dict['onebit']['layers']` is not of as many parameters as this optimizer has")
        super().load_state_dict(state_dict)
        self.layers = [
            Layers(list(layer["coefficients"]), list(layer["factors"]), layer["fresh_variance"].clone())
            for layer in saved
        ]


def _coefficient(parameter: Tensor, update: Tensor) -> float:
    """Returns |w| / |update| within its range, or 1 where one of them is zero."""
    weight, length = float(torch.linalg.vector_norm(parameter)), float(torch.linalg.vector_norm(update))
    if not weight or not length:
        return 1.0
    return min(max(weight / length, COEFFICIENT_RANGE[0]), COEFFICIENT_RANGE[1])
