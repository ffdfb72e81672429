"""Optimizers for large batches: each parameter's step is in proportion to its own norm. Plain: nothing is compressed.

They see the averaged gradient, so any hook and any compressor that fits their kind works beneath them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

Loss = TypeVar("Loss")


class _LayerwiseOptimizer(Optimizer):
    """Base of `Lars` and `Lamb`: checks options and gradients, and keeps buffers.

    Args:
        parameters: Parameters or groups, as for any torch optimizer; floating-point.
        defaults: Hyper-parameters of the groups: lr, weight_decay, adapt_vectors and the subclass's own.
    """

    def __init__(self, parameters: Iterable[Tensor], defaults: dict[str, Any]) -> None:
        for name in ("lr", "eps", "weight_decay"):
            if not defaults[name] >= 0.0:
                raise ValueError(f"`{name}` is {defaults[name]}; wanted a number >= 0")
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:  # type: ignore[override]
        """Takes one step; parameters without a gradient stay as they are.

        Args:
            closure: Computes the loss and the gradients again; None steps on the gradients that are there.

        Returns:
            Result of `closure`; None without one.

        Raises:
            TypeError: A gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = []
            for parameter in parameters:
                gradient = parameter.grad
                if gradient.layout != torch.strided or gradient.is_complex():
                    raise TypeError(
                        f"a gradient of {type(self).__name__} is {gradient.layout} of {gradient.dtype}; wanted dense "
                        "floating-point ones: nn.Embedding(sparse=False)"
                    )
                gradients.append(gradient)
            if parameters:
                self._step(group, parameters, gradients)
        return loss

    def _step(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Changes the parameters of one group, in place.

        Args:
            group: The optimizer's group, with the hyper-parameters.
            parameters: Parameters of the group that have a gradient.
            gradients: Gradients of these parameters, in the same order; not changed.
        """
        raise NotImplementedError

    def _buffers(self, parameters: list[Tensor], name: str) -> list[Tensor]:
        """Returns the buffer `name` of each parameter from the optimizer's state; made at the first call, of zeros."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return [self.state[parameter][name] for parameter in parameters]


def _scaled(
    updates: Sequence[Tensor], ratios: Sequence[Tensor], parameters: Sequence[Tensor], adapt_vectors: bool
) -> None:
    """Multiplies each update by its ratio, in place; vectors and scalars keep theirs unless `adapt_vectors`."""
    for update, ratio, parameter in zip(updates, ratios, parameters, strict=True):
        if adapt_vectors or parameter.dim() > 1:
            update.mul_(ratio)


class Lars(_LayerwiseOptimizer):
    """LARS: SGD with momentum whose step is, for each parameter, in proportion to its norm over its gradient's.

    Args:
        parameters: Parameters, named parameters or groups of them, as for any torch optimizer.
        lr: Learning rate, as large as that of SGD with this batch or larger: the ratio makes each step small.
        momentum: Factor of the momentum (heavy ball); 0 for none.
        weight_decay: Factor of the weights that are added to the gradient; counts in the ratio of norms, too.
        trust: Trust coefficient: norm of a parameter's step in proportion to the parameter's own, with lr 1. Source:
            You et al., section 5 (0.001).
        nesterov: Whether to use Nesterov's momentum instead of the heavy ball.
        eps: Number added to the divisor of the ratio: the gradient's norm plus `weight_decay` times the parameter's.
        adapt_vectors: Whether parameters of less than two dimensions (biases, weights of normalization layers) are
            adapted, too; else they step as under SGD, with lr alone. Source for leaving them out: the authors' code,
            and MLPerf's rules for ResNet-50.

    Source: You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks, 2017 (arXiv 1708.03888), algorithm 1.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        nesterov: bool = False,
        eps: float = 1e-9,
        adapt_vectors: bool = False,
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"`momentum` is {momentum}; wanted 0 <= momentum < 1")
        if not trust > 0.0:
            raise ValueError(f"`trust` is {trust}; wanted a number > 0")
        if nesterov and not momentum:
            raise ValueError("`nesterov` is on and `momentum` is 0; wanted a momentum")
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "nesterov": nesterov,
            "eps": eps, "adapt_vectors": adapt_vectors,
        }  # fmt: skip
        super().__init__(parameters, defaults)

    def _step(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        decay, momentum = group["weight_decay"], group["momentum"]
        lengths, norms = torch._foreach_norm(gradients), torch._foreach_norm(parameters)
        updates = list(torch._foreach_add(gradients, parameters, alpha=decay))
        ratios = [
            torch.where((length > 0) & (norm > 0), group["trust"] * norm / (length + decay * norm + group["eps"]), 1.0)
            for length, norm in zip(lengths, norms, strict=True)
        ]
        _scaled(updates, ratios, parameters, group["adapt_vectors"])
        torch._foreach_mul_(updates, group["lr"])
        if momentum:
            buffers = self._buffers(parameters, "momentum_buffer")
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, updates)
            if group["nesterov"]:
                torch._foreach_add_(updates, buffers, alpha=momentum)
            else:
                updates = buffers
        torch._foreach_sub_(parameters, updates)


class Lamb(_LayerwiseOptimizer):
    """LAMB: Adam whose step is, for each parameter, in proportion to its norm over that of Adam's update.

    Args:
        parameters: Parameters, named parameters or groups of them, as for any torch optimizer.
        lr: Learning rate: the step's length in proportion to the weights.
        betas: Decay of the first and second moment; both are corrected for their start at zero.
        eps: Number added to the root of the second moment.
        weight_decay: Factor of the weights that are added to the update before its norm is taken.
        adapt_vectors: Whether parameters of less than two dimensions (biases, weights of normalization layers) are
            adapted, too; else they step as under Adam. Source for leaving them out: the authors' code for BERT.

    Source: You et al., Large Batch Optimization for Deep Learning, ICLR 2020 (arXiv 1904.00962), algorithm 2, with the
        identity as its function phi.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adapt_vectors: bool = False,
    ) -> None:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"`betas` are {betas}; wanted 0 <= beta < 1")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt_vectors": adapt_vectors,
        }  # fmt: skip
        super().__init__(parameters, defaults)

    def _step(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        first_decay, second_decay = group["betas"]
        first, second = self._buffers(parameters, "exp_avg"), self._buffers(parameters, "exp_avg_sq")
        torch._foreach_lerp_(first, gradients, 1.0 - first_decay)
        torch._foreach_mul_(second, second_decay)
        torch._foreach_addcmul_(second, gradients, gradients, 1.0 - second_decay)
        updates = []
        for parameter, mean, square in zip(parameters, first, second, strict=True):
            steps = self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
            root = (square / (1.0 - second_decay**steps)).sqrt_().add_(group["eps"])
            updates.append((mean / (1.0 - first_decay**steps)).div_(root))
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        ratios = [
            torch.where((length > 0) & (norm > 0), norm / length, 1.0)
            for length, norm in zip(torch._foreach_norm(updates), torch._foreach_norm(parameters), strict=True)
        ]
        _scaled(updates, ratios, parameters, group["adapt_vectors"])
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])
